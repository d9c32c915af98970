// Inner loop of the decode kernel: one warp multiplies the k-tiles of its pipeline with the inputs.
//
// For each k-tile, 32 columns and 1, 8, 16 or 32 rows of the batch:
//
//   total += scale * (codes @ x) + offset * sum(x)        offset = -scale * zero, or the minimum
//
// With small groups, the same for each half block (SmallGroupSums).
//
// Tensor cores compute both sums. The A operand of sum(x) is a matrix of ones. Numbers without an
// offset need the first sum only.
#pragma once

#include <type_traits>

#include "cuda/linear/quant_decode.cuh"
#include "cuda/linear/quant_stream.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

// Number of batch rows of one launch: one, or 8 per row tile. A single row is broadcast to all
// eight columns of the B operand. has_small: a part may have small groups. Kernels without them keep
// their registers.
template <int num_row_tiles, bool is_one_row, bool has_small = false>
struct RowShape {
    static constexpr bool kHasSmall = has_small;
    static constexpr int kRowTiles = num_row_tiles;
    static constexpr bool kIsOneRow = is_one_row;
    // Batch rows of a row tile whose sums a lane keeps: the two adjacent columns of its C fragment,
    // or one of them, because all columns are equal for a single row.
    static constexpr int kLaneRows = is_one_row ? 1 : 2;
    static constexpr int kRows = is_one_row ? 1 : 8 * num_row_tiles;
    // Inputs are prefetched one load ahead, if enough registers are left for them.
    static constexpr bool kPrefetchesInputs = num_row_tiles == 1;
};

// A lane's sums for one column panel, in the order of its C fragments: [row tile][quarter q][row c]
// is column 8 q + lane / 4 and batch row 2 (lane % 4) + c of the row tile.
template <class Shape>
using PanelSums = float[Shape::kRowTiles][4][Shape::kLaneRows];

// A lane's inputs for one block of 32 rows of k: 8 float16 numbers per row tile, the B fragments of
// both k16 steps.
template <int kRowTiles>
struct InputFragments {
    uint4 row_tiles[kRowTiles];

    // Inline asm pins the loads here. Otherwise the compiler sinks those of a whole k-tile below
    // its MMAs.
    __device__ __forceinline__ void load(const __half* x) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            uint4& to = row_tiles[i];
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                         : "l"(x + i * 8 * 32));
        }
    }
};

// Loads the scales or minimums of columns g, g + 8, g + 16 and g + 24.
__device__ __forceinline__ void load_factors(
    float (&to)[4], const uint8_t* from, bool has_floats, int g
) {
    if (has_floats) {
        const float4 four = reinterpret_cast<const float4*>(from)[g];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const uint2 four = reinterpret_cast<const uint2*>(from)[g];
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
        const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
        to[0] = first.x, to[1] = first.y, to[2] = second.x, to[3] = second.y;
    }
}

// Scales and offsets of a k-tile for the lane's four columns.
struct KTileFactors {
    float scales[4], offsets[4];

    __device__ __forceinline__ void load(
        const uint8_t* k_tile, const LoadRun& run, int middle, int lane
    ) {
        if (run.is_plain()) {  // the common case, without further branches
            load_factors(scales, k_tile, false, lane / 4);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                offsets[q] = -scales[q] * static_cast<float>(middle);
            }
            return;
        }
        const bool has_floats = run.has_floats();
        load_factors(scales, k_tile, has_floats, lane / 4);
        const uint8_t* from = k_tile + (has_floats ? 128 : 64);
        if (run.offset_kind() == EXL_OFFSET_MINIMUMS) {
            load_factors(offsets, from, has_floats, lane / 4);
        } else if (run.offset_kind() == EXL_OFFSET_ZEROS) {
            const uint32_t zeros = reinterpret_cast<const uint32_t*>(from)[lane / 4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                offsets[q] = -scales[q] * static_cast<float>(zeros >> 8 * q & 255);
            }
        } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                offsets[q] = -scales[q] * static_cast<float>(middle);
            }
        }
    }
};

// Kinds of factors: LoadRun::factor_kind.
constexpr int kPlainFactors = EXL_OFFSET_MIDDLE, kFloatFactors = 8 | EXL_OFFSET_MIDDLE;

// KTileFactors::load for factors that are known to be of kind `kKind`. Those of a k-tile that does
// not exist are zero.
template <int kKind>
__device__ __forceinline__ void load_factors_of(
    KTileFactors& to, const uint8_t* k_tile, int middle, bool exists, int lane
) {
    constexpr bool kHasFloats = kKind & 8;
    constexpr int kOffsets = kKind & 7;
    load_factors(to.scales, k_tile, kHasFloats, lane / 4);
    const uint8_t* const from = k_tile + (kHasFloats ? 128 : 64);
    if constexpr (kOffsets == EXL_OFFSET_MINIMUMS) {
        load_factors(to.offsets, from, kHasFloats, lane / 4);
    }
    uint32_t zeros = 0;
    if constexpr (kOffsets == EXL_OFFSET_ZEROS) {
        zeros = reinterpret_cast<const uint32_t*>(from)[lane / 4];
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        if (!exists) to.scales[q] = 0.0f;
        if constexpr (kOffsets == EXL_OFFSET_MINIMUMS) {
            if (!exists) to.offsets[q] = 0.0f;
        } else {
            const int zero = kOffsets == EXL_OFFSET_ZEROS ? zeros >> 8 * q & 255 : middle;
            to.offsets[q] = -to.scales[q] * static_cast<float>(zero);
        }
    }
}

// c [16, 8] float32 = a [16, 16] * b [16, 8]: `mma_16816` with a sum that begins at zero.
__device__ __forceinline__ void mma_16816_from_zero(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f)
    );
#else
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    mma_16816(c, a, b0, b1);
#endif
}

// Sums over one k-tile before scaling: of code * x as subnormal numbers, and of x.
template <class Shape>
struct KTileSums {
    float codes[Shape::kRowTiles][2][4] = {};
    float inputs[Shape::kRowTiles][4] = {};

    // kStarts: the sums are zero.
    template <int kStep, bool kStarts = false, class Codes>
    __device__ __forceinline__ void add_step(
        const Codes& block, const InputFragments<Shape::kRowTiles>& rows
    ) {
        constexpr uint32_t kOnes = 0x3c003c00;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        uint32_t a_low[4], a_high[4];
        block.template fragment<0, kStep>(a_low);
        block.template fragment<1, kStep>(a_high);
#pragma unroll
        for (int i = 0; i < Shape::kRowTiles; ++i) {
            const uint4& x = rows.row_tiles[i];
            const uint32_t b0 = kStep ? x.z : x.x, b1 = kStep ? x.w : x.y;
            if constexpr (kStarts) {
                mma_16816_from_zero(codes[i][0], a_low, b0, b1);
                mma_16816_from_zero(codes[i][1], a_high, b0, b1);
                if constexpr (Codes::kHasOffsets) mma_16816_from_zero(inputs[i], ones, b0, b1);
            } else {
                mma_16816(codes[i][0], a_low, b0, b1);
                mma_16816(codes[i][1], a_high, b0, b1);
                if constexpr (Codes::kHasOffsets) mma_16816(inputs[i], ones, b0, b1);
            }
        }
    }
    template <bool kStarts = false, class Codes>
    __device__ __forceinline__ void add(
        const Codes& block, const InputFragments<Shape::kRowTiles>& rows
    ) {
        add_step<0, kStarts>(block, rows);
        add_step<1>(block, rows);
    }

    template <int kForm>
    __device__ __forceinline__ void scale_into(
        PanelSums<Shape>& total, const KTileFactors& factors
    ) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float scale = factors.scales[q] * subnormal_factor(kForm, q);
#pragma unroll
            for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
                for (int c = 0; c < Shape::kLaneRows; ++c) {
                    float& to = total[i][q][c];
                    to = fmaf(scale, codes[i][q / 2][2 * (q % 2) + c], to);
                    if constexpr (has_offsets(kForm)) {
                        to = fmaf(factors.offsets[q], inputs[i][c], to);
                    }
                }
            }
        }
        *this = {};
    }
};

// Sums over one k-tile of small groups before the factors are applied. Each k16 step is a group:
//
//   products += multiplier * (codes - middle) @ x       minimums += multiplier * sum(x)
//
// Codes are subnormal numbers here, and so are the products. Only for up to 8 rows.
template <int kForm, class Shape>
struct SmallGroupSums {
    static constexpr bool kHasMinimums = width_of(kForm) == 2;
    float products[4][Shape::kLaneRows] = {};
    float minimums[4][Shape::kLaneRows] = {};

    template <int kStep>
    __device__ __forceinline__ void add_step(
        const BlockCodes<kForm>& block, const SmallMultipliers<2>& multipliers, const uint4& x
    ) {
        constexpr uint32_t kOnes = 0x3c003c00;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        const uint32_t b0 = kStep ? x.z : x.x, b1 = kStep ? x.w : x.y;
        float inputs[4];
        mma_16816_from_zero(inputs, ones, b0, b1);
        add_columns<kStep, 0>(block, multipliers, inputs, b0, b1);
        add_columns<kStep, 1>(block, multipliers, inputs, b0, b1);
    }
    // Adds a group's products of columns 16 * kColumns .. 16 * kColumns + 15.
    template <int kStep, int kColumns>
    __device__ __forceinline__ void add_columns(
        const BlockCodes<kForm>& block, const SmallMultipliers<2>& multipliers,
        const float (&inputs)[4], uint32_t b0, uint32_t b1
    ) {
        uint32_t a[4];
        block.template fragment<kColumns, kStep>(a);
        float codes[4];
        mma_16816_from_zero(codes, a, b0, b1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int q = 2 * kColumns + i;
            const float multiplier =
                kHasMinimums ? multipliers.low(kStep, q) : multipliers.whole(kStep, q);
            const float middle = middle_of(width_of(kForm)) / subnormal_factor(kForm, q);
#pragma unroll
            for (int c = 0; c < Shape::kLaneRows; ++c) {
                float product = codes[2 * i + c];
                if constexpr (kHasMinimums) {
                    minimums[q][c] = fmaf(multipliers.high(kStep, q), inputs[c], minimums[q][c]);
                } else {
                    product = fmaf(-middle, inputs[c], product);
                }
                products[q][c] = fmaf(multiplier, product, products[q][c]);
            }
        }
    }
    __device__ __forceinline__ void scale_into(
        PanelSums<Shape>& total, const uint8_t* k_tile, int lane
    ) const {
        float factors[4], minimum_factors[4] = {};
        load_factors(factors, k_tile, false, lane / 4);
        if constexpr (kHasMinimums) load_factors(minimum_factors, k_tile + 64, false, lane / 4);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float factor = factors[q] * subnormal_factor(kForm, q);
#pragma unroll
            for (int c = 0; c < Shape::kLaneRows; ++c) {
                float& to = total[0][q][c];
                to = fmaf(factor, products[q][c], to);
                if constexpr (kHasMinimums) to = fmaf(-minimum_factors[q], minimums[q][c], to);
            }
        }
    }
};

// Addresses of a lane's inputs. Prepared inputs are [block][32] for a single row, otherwise
// [block][row tile][8][32] (exl/cuda/linear.h).
struct InputReader {
    const QuantLinearArgs& args;
    int lane_halves;  // offset of the lane's first number in a block

    __device__ __forceinline__ InputReader(const QuantLinearArgs& args, int lane)
        : args(args),
          lane_halves(8 * (lane % 4) + (args.block_halves == 32 ? 0 : 32 * (lane / 4))) {}
    __device__ __forceinline__ const __half* at(const LoadRun& run) const {
        return args.parts[run.part()].inputs + (run.block() * args.block_halves + lane_halves);
    }
    // Float16 numbers from one block to the next.
    template <class Shape>
    __device__ __forceinline__ int pitch() const {
        return Shape::kIsOneRow ? 32 : args.block_halves;
    }
};

// Inputs of one load if they are prefetched, otherwise of one block.
template <class Shape>
using LoadInputs = InputFragments<Shape::kRowTiles>[Shape::kPrefetchesInputs ? kStageBlocks : 1];

template <class Shape>
__device__ __forceinline__ void load_inputs(
    LoadInputs<Shape>& rows, const LoadRun& run, const InputReader& inputs
) {
    const __half* x = inputs.at(run);
#pragma unroll
    for (int i = 0; i < kStageBlocks; ++i) {
        if (i < run.blocks()) rows[i].load(x + i * inputs.pitch<Shape>());
    }
}

// Adds the loads of a run whose loads are one k-tile of four blocks each. Stops after the last load
// of the run, or earlier if the pipeline has to open a new load run. Releases all loads except the
// last one it added. As soon as a block's inputs have been used, those of the next load replace
// them. On return, `run` is the rest of the run, or the next run. Returns whether the run is done.
template <int kForm, class Shape>
__device__ __forceinline__ bool add_full_k_tiles(
    PanelSums<Shape>& total, LoadInputs<Shape>& rows, LoadRun& run, WeightPipeline& pipeline,
    const InputReader& inputs, int lane
) {
    const LoadRun own = run;
    int header_bytes = inputs.args.parts[own.part()].header_bytes;
    // Hides the value's origin from the compiler, which would otherwise reload it for every k-tile.
    asm("" : "+r"(header_bytes));
    const int pitch = inputs.pitch<Shape>();
    const __half* x = inputs.at(own);
    int loads_left = own.count();
#pragma unroll 1
    for (;;) {
        --loads_left;
        x += kStageBlocks * pitch;
        if (loads_left == 0) {
            run = pipeline.next();
            x = inputs.at(run);
        }
        pipeline.wait();
        const uint8_t* bytes = pipeline.data();
        if constexpr (is_small_form(kForm)) {
            SmallGroupSums<kForm, Shape> sums;
            const uint8_t* multipliers = bytes + header_bytes - kPanelColumns * kSmallGroups;
#pragma unroll
            for (int i = 0; i < kStageBlocks; ++i) {
                BlockCodes<kForm> codes;
                codes.load(bytes + header_bytes + i * 128 * width_of(kForm), lane);
                SmallMultipliers<2> own_multipliers;
                own_multipliers.load(multipliers, lane / 4, 2 * i);
                sums.template add_step<0>(codes, own_multipliers, rows[i].row_tiles[0]);
                sums.template add_step<1>(codes, own_multipliers, rows[i].row_tiles[0]);
                rows[i].load(x + i * pitch);
            }
            sums.scale_into(total, bytes, lane);
        } else {
            KTileFactors factors;
            factors.load(bytes, own, middle_of(kForm), lane);
            KTileSums<Shape> sums;
#pragma unroll
            for (int i = 0; i < kStageBlocks; ++i) {
                BlockCodes<kForm> codes;
                codes.load(bytes + header_bytes + i * 128 * width_of(kForm), lane);
                sums.add(codes, rows[i]);
                // May read past the next load's last block; unused then.
                rows[i].load(x + i * pitch);
            }
            sums.template scale_into<kForm>(total, factors);
        }
        if (loads_left == 0) return true;
        if (pipeline.continues_run()) {
            pipeline.release_in_run();
            continue;
        }
        if (pipeline.needs_load_run()) {
            run = own.last(loads_left);
            return false;
        }
        pipeline.release<false>();
    }
}

// Adds the first load of `run`, of any shape, block by block, and prefetches the inputs of `next`.
template <int kForm, class Shape>
__device__ __forceinline__ void add_load(
    PanelSums<Shape>& total, LoadInputs<Shape>& rows, const LoadRun& run, const LoadRun& next,
    const uint8_t* bytes, const InputReader& inputs, int lane
) {
    const int header_bytes = inputs.args.parts[run.part()].header_bytes;
    const int blocks = run.blocks(), k_tile_blocks = run.k_tile_blocks();
    const __half* x = inputs.at(Shape::kPrefetchesInputs ? next : run);
    KTileSums<Shape> sums;
    const uint8_t* k_tile = bytes;
    int in_k_tile = 0;
#pragma unroll(Shape::kPrefetchesInputs ? kStageBlocks : 1)
    for (int i = 0; i < kStageBlocks; ++i) {
        InputFragments<Shape::kRowTiles>& own = rows[Shape::kPrefetchesInputs ? i : 0];
        if (i < blocks) {
            if (in_k_tile == 0) k_tile = bytes, bytes += header_bytes;
            BlockCodes<kForm> codes;
            codes.load(bytes, lane);
            bytes += 128 * width_of(kForm);
            if constexpr (!Shape::kPrefetchesInputs) own.load(x + i * inputs.pitch<Shape>());
            sums.add(codes, own);
            if (++in_k_tile == k_tile_blocks) {
                KTileFactors factors;
                factors.load(k_tile, run, middle_of(kForm), lane);
                sums.template scale_into<kForm>(total, factors);
                in_k_tile = 0;
            }
        }
        if (Shape::kPrefetchesInputs && i < next.blocks()) own.load(x + i * inputs.pitch<Shape>());
    }
}

// Adds the next loads of the pipeline to `total`: several loads of a run of full k-tiles if inputs
// are prefetched, otherwise one. `run` describes them, and on return what comes next. `rows` holds
// their inputs if these are prefetched. Returns whether they end the warp's k-slice of the output
// tile.
template <class Shape>
__device__ __forceinline__ bool add_load_run(
    PanelSums<Shape>& total, LoadInputs<Shape>& rows, LoadRun& run, WeightPipeline& pipeline,
    const InputReader& inputs, int lane
) {
    const LoadRun own = run;
    bool is_run_done = own.count() == 1;
    const auto add = [&](auto form) {
        constexpr int kForm = decltype(form)::value;
        if constexpr (Shape::kPrefetchesInputs) {
            // K-tiles of small groups have four blocks.
            if (is_small_form(kForm) || own.is_full_k_tile()) {
                is_run_done =
                    add_full_k_tiles<kForm, Shape>(total, rows, run, pipeline, inputs, lane);
                return;
            }
        }
        if constexpr (!is_small_form(kForm)) {
            run = is_run_done ? pipeline.next() : own.last(own.count() - 1);
            pipeline.wait();
            add_load<kForm, Shape>(total, rows, own, run, pipeline.data(), inputs, lane);
        }
    };
    switch (own.form()) {
        case 2: add(std::integral_constant<int, 2>()); break;
        case 3: add(std::integral_constant<int, 3>()); break;
        case 4: add(std::integral_constant<int, 4>()); break;
        case 5: add(std::integral_constant<int, 5>()); break;
        case 6: add(std::integral_constant<int, 6>()); break;
        case 8: add(std::integral_constant<int, 8>()); break;
        case kE4m3:
        case kIq4:
        case kMxfp4:
            // Up to 8 rows only, so that the variants for more rows keep their registers.
            if constexpr (Shape::kRowTiles == 1) {
                if (own.form() == kE4m3) {
                    add(std::integral_constant<int, kE4m3>());
                } else if (own.form() == kIq4) {
                    add(std::integral_constant<int, kIq4>());
                } else {
                    add(std::integral_constant<int, kMxfp4>());
                }
            }
            break;
        case small_form(2):
        case small_form(3):
        case small_form(6):
            if constexpr (Shape::kHasSmall) {
                if (own.form() == small_form(2)) {
                    add(std::integral_constant<int, small_form(2)>());
                } else if (own.form() == small_form(3)) {
                    add(std::integral_constant<int, small_form(3)>());
                } else {
                    add(std::integral_constant<int, small_form(6)>());
                }
            }
            break;
        default: run = pipeline.next(); pipeline.wait();
    }
    pipeline.release<true>();
    const bool has_one_stage = inputs.args.num_stages == 1;
    if (has_one_stage && is_run_done) run = pipeline.front();
    if constexpr (Shape::kPrefetchesInputs) {
        if (has_one_stage || own.is_empty()) load_inputs<Shape>(rows, run, inputs);
    }
    return is_run_done && own.is_last();
}

}  // namespace exl::cuda

#endif  // __CUDACC__

// Product of up to 32 rows with trellis codes, decoded to float16: the small-batch kernel.
//
// Contract   exl_cuda_trellis_linear, m > 8, m > 4 of MUL1, and any m in the batch-invariant mode. Writes slots of
//            sums (trellis_work.cuh).
// Mapping    A block takes successive items of 256 columns and 128 rows. Its 16 warps are 4 column
//            groups x 4 steps of a unit. A warp decodes the tiles of its step in registers, as A
//            operands, and multiplies them with all rows of the batch. The 4 warps of a step share
//            their inputs, and are synchronized by a named barrier once per item. The 4 warps of the
//            same columns add their sums in shared memory, in an order that does not vary.
// Accuracy   Values of the codes, inputs in float16, sums in float32. MUL1's products are those of
//            raw_fragment_of, which leave out its rounding to float16 (2.1e-4 of the weights' RMS).
//            The finish kernel subtracts the offset and scales.
// Overlap    Codes fill the stages before the previous kernel has ended. Meanwhile one warp of each
//            scheduler runs the code of a step, which takes longer to fetch than to run.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/trellis/trellis_rates.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_work.cuh"

namespace exl::cuda::trellis {

constexpr int kBatchWarps = 16, kColumnWarps = 4;

// Shape of one instance, for up to kMostRows rows: 8 or 32.
template <int kWordsOfTile, int kBook, int kMostRows>
struct BatchShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook, kRows = kMostRows;
    static constexpr int kOfTile = kRows / 2;           // sums of a lane and a tile
    static constexpr int kHalfBytes = kRows * 16;       // of inputs, half a tile
    static constexpr int kInputBytes = 4 * kHalfBytes;  // of a step
    static constexpr int kSumBytes =
        kBatchWarps * kUnitColumns * kRows / 2 * 4;  // half of the sums
    static constexpr int kStepBytes = step_bytes(kTileWords);
    // Codes of all warps, and inputs.
    static constexpr int kStageBytes = kBatchWarps * kStepBytes + kSteps * kInputBytes;
    // As many stages as fit beside the sums.
    static constexpr int kMost = ((227 << 10) - kSumBytes) / kStageBytes;
    static constexpr int kBatchStages = kMost < 4 ? kMost : 4;
    static constexpr int kSharedBytes = kBatchStages * kStageBytes + kSumBytes;
    static_assert(kBatchStages >= 3);
};

// Sums of a warp: 64 columns of all rows. Element [i][4 q + c] is column 16 i + 8 (c / 2) + lane / 4
// and row 8 q + 2 (lane % 4) + c % 2.
template <class Shape>
using BatchSums = float[kUnitTiles][Shape::kOfTile];

// Copies of one warp from device memory to the stages of its block: where the next item is. A warp
// copies its own codes and a quarter of its step's inputs.
template <class Shape>
struct BatchStream {
    const WorkArgs& args;
    uint8_t* shared;
    const int column_warp, step, lane;
    uint32_t item, group, group_end;  // group_end: first item after the group
    const uint8_t *from_codes, *from_inputs;
    bool exists;  // columns past the end of a matrix have no codes; their sums are never read

    __device__ __forceinline__ BatchStream(
        const WorkArgs& work, uint8_t* memory, const Place& first, int of_columns, int of_step,
        int of_lane
    )
        : args(work),
          shared(memory),
          column_warp(of_columns),
          step(of_step),
          lane(of_lane),
          item(first.item),
          group(first.group) {
        enter_group(first.start);
    }
    __device__ __forceinline__ void enter_group(uint32_t start) {
        const WorkPart& part = args.part_of(group);
        const uint32_t column = (group - part.first_group) * kColumnWarps + column_warp;
        const uint32_t k_unit = item - start, unit = column * args.division.group_items + k_unit;
        exists = column < part.n_units;
        from_codes =
            part.words + static_cast<int64_t>(unit * kSteps + step) * Shape::kStepBytes + lane * 16;
        from_inputs = part.inputs + (k_unit * kSteps + step) * Shape::kInputBytes +
                      column_warp * Shape::kHalfBytes + lane * 16;
        group_end = start + args.division.group_items;
    }
    __device__ __forceinline__ void advance() {
        ++item;
        from_codes += kSteps * Shape::kStepBytes;
        from_inputs += kSteps * Shape::kInputBytes;
        if (item == group_end) ++group, enter_group(group_end);
    }
    __device__ __forceinline__ uint8_t* codes(int stage) const {
        return shared + stage * Shape::kStageBytes +
               (step * kColumnWarps + column_warp) * Shape::kStepBytes;
    }
    __device__ __forceinline__ uint8_t* inputs(int stage) const {
        return shared + stage * Shape::kStageBytes + kBatchWarps * Shape::kStepBytes +
               step * Shape::kInputBytes;
    }
    __device__ __forceinline__ void copy_codes(int stage) const {
        if (!exists) return;
        uint8_t* to = codes(stage) + lane * 16;
#pragma unroll
        for (int i = 0; i < Shape::kTileWords; i += kWarp) {
            if (i + kWarp <= Shape::kTileWords || i + lane < Shape::kTileWords) {
                copy_async_16(to + i * 16, from_codes + i * 16);
            }
        }
    }
    __device__ __forceinline__ void copy_inputs(int stage) const {
        if (Shape::kRows < kWarp && lane >= Shape::kRows) return;
        copy_async_16(inputs(stage) + column_warp * Shape::kHalfBytes + lane * 16, from_inputs);
    }
};

#if EXL_IS_HOPPER
using exl::cuda::group_product;
// As there, for 8 rows of the batch.
template <bool is_by_rows>
__device__ __forceinline__ void group_product(float (&d)[4], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n .reg .pred adds;\n .reg .b64 b;\n"
        " setp.ne.b32 adds, 1, 0;\n mov.b64 b, {%8, %9};\n"
        " wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        "{%0,%1,%2,%3}, {%4, %5, %6, %7}, b, adds, 1, 1, %10;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixStride), "n"(is_by_rows)
    );
}
#endif

// Adds the products of a warp's step. The products of the last two tiles may not have ended
// afterwards where they are those of a warpgroup.
template <class Shape>
__device__ __forceinline__ void add_step(
    const uint8_t* codes, const uint8_t* inputs, int lane, BatchSums<Shape>& sums
) {
    StepWords<Shape::kTileWords> words;
    words.load(codes, lane);
#if EXL_IS_HOPPER
    const uint32_t b = matrix_start(inputs, Shape::kHalfBytes);
    uint32_t a[2][4] = {};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        uint32_t states[kPositions];
        words.states(i, states);
        raw_fragment_of<Shape::kCodebook>(states, a[i % 2]);
        group_fence(a);
        group_product<false>(
            sums[i % kUnitTiles], a[i % 2], b + i / kUnitTiles * (2 * Shape::kHalfBytes >> 4)
        );
        group_commit();
        group_wait<1>();  // the next tile's weights replace those of the tile before
    }
#else
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        constexpr int kRowTiles = Shape::kRows / 8;
        uint32_t x[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            x[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(
                inputs + (2 * row + i % 2) * Shape::kHalfBytes + i / 2 * 128 + lane * 4
            );
        }
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
            uint32_t states[kPositions], a[4];
            words.states(4 * row + tile, states);
            raw_fragment_of<Shape::kCodebook>(states, a);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                auto& c = reinterpret_cast<float (&)[4]>(sums[tile][4 * i]);
                mma_16816(c, a, x[i][0], x[i][1]);
            }
        }
    }
#endif
}

// Waits until all products have ended: their inputs have been read, and their sums are there.
template <class Shape>
__device__ __forceinline__ void end_products(BatchSums<Shape>& sums) {
#if EXL_IS_HOPPER
    group_wait<0>();
#pragma unroll
    for (auto& tile : sums) group_results(tile);
#endif
}

// A warp's part of the sums of all steps: a tile of its columns.
template <class Shape>
using TileSums = float[Shape::kOfTile];

// Gives half of a warp's sums to another warp of the same columns, and adds what that one gives to
// the other half. `sum(i)`: sum i of the lane. `keeps_second`: which half is the warp's own. Writes
// to `to` and reads `from`.
template <int kCount, class Sum>
__device__ __forceinline__ void exchange(
    const Sum& sum, bool keeps_second, float* to, const float* from, int barrier,
    float (&own)[kCount]
) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        to[i * kWarp] = keeps_second ? sum(i) : sum(kCount + i);
        own[i] = keeps_second ? sum(kCount + i) : sum(i);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
    for (int i = 0; i < kCount; ++i) own[i] += from[i * kWarp];
}

// Adds the sums of the four steps: of steps 0 and 1, and of 2 and 3, then both. Each warp gets a tile
// of the result, number step % 2 * 2 + step / 2. `buffers`: kSumBytes.
template <class Shape>
__device__ __forceinline__ void add_steps(
    float* buffers, int column_warp, int step, int lane, const BatchSums<Shape>& sums,
    TileSums<Shape>& own
) {
    constexpr int kOfTile = Shape::kOfTile;
    constexpr int kHalf = kUnitTiles * kOfTile / 2;  // sums of a lane that a warp sends
    const auto place = [&](int of_step) {
        return buffers + (column_warp * kSteps + of_step) * kHalf * kWarp + lane;
    };
    const int barrier = 1 + kSteps + column_warp;
    float half[kHalf];
    const auto all = [&](int i) { return sums[i / kOfTile][i % kOfTile]; };
    exchange<kHalf>(all, step % 2 != 0, place(step), place(step ^ 1), barrier, half);
    // The place that this warp has read is free.
    exchange<kHalf / 2>(
        [&](int i) { return half[i]; }, step / 2 != 0, place(step ^ 1), place(step ^ 3), barrier,
        own
    );
    // Before the next exchange all have read.
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// Stores a warp's tile of the sums of a column group to a block's slot.
template <class Shape>
__device__ __forceinline__ void store_tile(
    float* slot, int m, int column_warp, int step, int lane, const TileSums<Shape>& own
) {
    const int tile = step % 2 * 2 + step / 2;
    float* to = slot + column_warp * kUnitColumns + tile * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < Shape::kOfTile; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = i / 2 % 2 * 8;
        if (row < m) to[row * kBatchColumns + column] = own[i];
    }
}

template <class Shape>
__global__ void __launch_bounds__(kBatchWarps* kWarp, 1) batch_kernel(
    const __grid_constant__ WorkArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int kStages = Shape::kBatchStages;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int column_warp = warp % kColumnWarps, step = warp / kColumnWarps;
    auto* buffers = reinterpret_cast<float*>(shared + kStages * Shape::kStageBytes);
    let_next_begin();

    const uint32_t group_items = args.division.group_items;
    const uint32_t last = args.division.first_item(blockIdx.x + 1);
    Place at = args.division.first_place(blockIdx.x);
    BatchStream<Shape> ahead(args, shared, at, column_warp, step, lane);
    BatchStream<Shape> early = ahead;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i, early.advance()) {
        if (early.item < last) early.copy_codes(i);
    }
    int stage = 0;
    bool is_real = false;  // false: the warm-up pass
#pragma unroll 1
    while (true) {
        const uint32_t end = min(last, at.start + group_items);
        BatchSums<Shape> sums = {};
#pragma unroll 1
        while (at.item < end) {
            if (is_real) {
                end_products<Shape>(sums);  // before the stage that they read is filled
                wait_copies<kStages - 2>();
#if EXL_IS_HOPPER
                fence_copies();  // products of a warpgroup read shared memory in their own way
#endif
                // The inputs that the other warps of the step have copied are visible afterwards,
                // and these warps have read the stage that is filled next.
                asm volatile("bar.sync %0, 128;" ::"r"(step + 1) : "memory");
                const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
                if (ahead.item < last) {
                    ahead.copy_codes(free_stage);
                    ahead.copy_inputs(free_stage);
                }
                commit_copies();
                ahead.advance();
            }
            if (is_real || step == 0) {
                add_step<Shape>(ahead.codes(stage), ahead.inputs(stage), lane, sums);
            }
            if (!is_real) break;
            stage = stage == kStages - 1 ? 0 : stage + 1;
            ++at.item;
        }
        end_products<Shape>(sums);
        if (!is_real) {
            is_real = true;
            wait_for_inputs();
#pragma unroll 1
            for (int i = 0; i < kStages - 1; ++i, ahead.advance()) {
                if (ahead.item < last) ahead.copy_inputs(i);
                commit_copies();
            }
            continue;
        }
        TileSums<Shape> own;
        add_steps<Shape>(buffers, column_warp, step, lane, sums, own);
        const int64_t slot = args.division.slot(at.group, blockIdx.x);
        store_tile<Shape>(
            args.sums + slot * (Shape::kRows * kBatchColumns), args.m, column_warp, step, lane, own
        );
        if (end == last) break;
        at.start += group_items, ++at.group;
    }
}

struct BatchLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(int rows, const WorkArgs& args, void* stream) const {
        if constexpr (kCodebook == EXL_CODEBOOK_MUL1) {
            if (rows <= kDecodeRows) {
                return launch_shape<BatchShape<kTileWords, kCodebook, kDecodeRows>>(args, stream);
            }
        }
        return launch_shape<BatchShape<kTileWords, kCodebook, kBatchRows>>(args, stream);
    }
    template <class Shape>
    static cudaError_t launch_shape(const WorkArgs& args, void* stream) {
        return launch_overlapping(
            batch_kernel<Shape>, dim3(args.division.blocks), dim3(kBatchWarps * kWarp),
            Shape::kSharedBytes, stream, args
        );
    }
};

template <int kCodebook>
cudaError_t launch_batch(int tile_words, int rows, const WorkArgs& args, void* stream) {
    return for_rate<kCodebook>(tile_words, BatchLaunch(), rows, args, stream);
}

}  // namespace exl::cuda::trellis

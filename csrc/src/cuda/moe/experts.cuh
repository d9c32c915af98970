// Products of rows with the matrix of one expert, for the kernels of `experts.cu` and `one_row.cu`:
// a warp's sums over the loads of a column panel, and the stores of a tile.
// Dense matrices need no ring: a lane loads A fragments from global memory.
#pragma once

#include <algorithm>

#include "cuda/elementwise/gate.cuh"
#include "cuda/linear/quant_k_tile.cuh"
#include "cuda/moe/loads.cuh"

namespace exl::cuda {

#ifdef __CUDACC__

constexpr int kPitch =
    36;  // floats from one row of sums to the next: stores without bank conflicts
// Two thread blocks fit on a multiprocessor of 9.0, which has 228 KiB and reserves 1 KiB per block.
constexpr int kMaxSharedBytes = 113 << 10;

struct ExpertArgs {
    ExlExpertLinear call;
    int32_t unit_bits;   // log2 of the panels of a tile, those of both parts of a gated pair
    int32_t num_stages;  // of a warp's ring
    int32_t stage_bytes;
    int32_t ring_bytes;   // shared memory of all rings, or of the sums that overwrite them
    int32_t warp_inputs;  // down of one row (one_row.cu): numbers of a row that a warp needs

    __host__ __device__ bool is_gated() const { return call.epilogue == EXL_EPILOGUE_GATED; }
    __host__ __device__ bool has_activation() const { return call.epilogue >= EXL_EPILOGUE_GATED; }
    __host__ __device__ int part_bits() const { return unit_bits - is_gated(); }
};

// ExlExpertLinear::only of loads with factors of some kind (LoadRun::factor_kind).
constexpr uint32_t only_loads(int bits, int values, int kind, int k_tile_blocks) {
    return bits | values << 8 | kind << 16 | k_tile_blocks << 24;
}

// Bytes of the scales and offsets of a k-tile with factors of some kind.
__host__ __device__ constexpr int header_bytes_of(int kind) {
    const int scale_bytes = kind & 8 ? 4 : 2, offsets = kind & 7;
    const int offset_bytes = offsets == EXL_OFFSET_ZEROS ? 1 : scale_bytes;
    return 32 * (scale_bytes + (offsets == EXL_OFFSET_MIDDLE ? 0 : offset_bytes));
}

// RowShape of the products with matrices that store their weights as `source` says. With `only` not 0,
// all loads have that in common, and there is no code for others.
template <int num_row_tiles, bool is_one_row, int source, uint32_t only = 0>
struct ExpertShape : RowShape<num_row_tiles, is_one_row, source == EXL_EXPERTS_SMALL_GROUPS> {
    static constexpr bool kIsDense = source == EXL_EXPERTS_DENSE;
    static constexpr uint32_t kOnly = only;
    // One row is in shared memory. Its loop over blocks is not unrolled: the code would be fetched
    // once, which takes longer than executing it.
    static constexpr bool kPrefetchesInputs = !is_one_row && num_row_tiles == 1;
};

// Which loads of which column panel a warp adds up.
struct WarpWork {
    int part, panel, slice, slices;

    // Work of a warp of a tile; the tile's panels and slices are divided among kWarps warps.
    __device__ __forceinline__ static WarpWork of(const ExpertArgs& args, int tile, int warp) {
        const int unit = warp & ((1 << args.unit_bits) - 1);
        const int panel = unit & ((1 << args.part_bits()) - 1);
        return {
            args.is_gated() && unit >> args.part_bits() != 0, (tile << args.part_bits()) + panel,
            warp >> args.unit_bits, kWarps >> args.unit_bits
        };
    }
    __device__ __forceinline__ int first(const ExlExpertMatrix& w) const {
        return w.num_loads * slice / slices;
    }
    __device__ __forceinline__ int last(const ExlExpertMatrix& w) const {
        return w.num_loads * (slice + 1) / slices;
    }
};

// Matrix of a part of an expert. With one kind of loads, only tiles, panel_bytes and num_loads are
// set, and nothing is read from memory if the experts are at equal distances: such a read would wait
// behind the weights in flight.
template <class Shape>
__device__ __forceinline__ ExlExpertMatrix matrix_of(
    const ExlExpertLinear& call, int expert, int part
) {
    const ExlExpertMatrix* const entry =
        call.matrices + static_cast<int64_t>(expert) * call.parts + part;
    if constexpr (Shape::kOnly != 0) {
        const bool is_shared = expert >= call.shared_from;
        const ExlExpertPlaces& places = call.places[is_shared];
        ExlExpertMatrix w = {};
        w.num_loads = call.num_loads;
        if (places.tiles == nullptr) {
            w.tiles = entry->tiles, w.panel_bytes = entry->panel_bytes;
        } else {
            const int number = is_shared ? expert - call.shared_from : expert;
            w.tiles = places.tiles + number * places.expert_bytes + part * places.part_bytes;
            w.panel_bytes = places.panel_bytes;
        }
        return w;
    }
    ExlExpertMatrix w = *entry;
    if (call.loads != nullptr) w.loads = call.loads, w.num_loads = call.num_loads;
    return w;
}

// Load of a column panel. With one kind of loads, they follow each other.
template <class Shape>
__device__ __forceinline__ Load load_of(
    const ExlExpertLinear& call, const ExlExpertMatrix& w, int index
) {
    if constexpr (Shape::kOnly != 0) {
        // With k-tiles of one block, the last load may have fewer blocks than the others, or be the
        // only one.
        constexpr int kBlockBytes =
            header_bytes_of(Shape::kOnly >> 16 & 15) + 128 * (Shape::kOnly & 255);
        const int first = kStageBlocks * index;
        int blocks = kStageBlocks, bytes = call.load_bytes;
        if ((Shape::kOnly >> 24) == 1 && call.k / 32 - first < kStageBlocks) {
            blocks = call.k / 32 - first, bytes = kBlockBytes * blocks;
        }
        return {
            static_cast<uint32_t>(EXL_CUDA_PANEL_HEAD + index * call.load_bytes),
            static_cast<uint32_t>(first | bytes << 16), static_cast<uint32_t>(blocks << 24)
        };
    }
    return Load::at(w.loads, index);
}

// ---- products ----------------------------------------------------------------------------------

// Pair of a row of an item. An early call reads pairs before its wait, and therefore past the L1
// cache.
__device__ __forceinline__ int pair_of(
    const ExlExpertLinear& call, const ExlExpertItem& item, int row
) {
    return call.pairs == nullptr ? item.first + row : __ldcg(call.pairs + item.first + row);
}

// Addresses of a lane's inputs: those of row lane / 4 of each row tile. Rows past the last one read
// the inputs of the first one; their sums are dropped.
template <class Shape>
struct LaneRows {
    const __half* at[Shape::kRowTiles];

    __device__ __forceinline__ LaneRows(
        const ExlExpertLinear& call, const ExlExpertItem& item, const void* x, int lane
    ) {
#pragma unroll
        for (int i = 0; i < Shape::kRowTiles; ++i) {
            const int row = 8 * i + lane / 4;
            const int pair = pair_of(call, item, row < item.count ? row : 0);
            const int64_t x_row = pair / call.pairs_per_row;
            at[i] = static_cast<const __half*>(x) + x_row * call.x_stride + 8 * (lane % 4);
        }
    }
    __device__ __forceinline__ void load(InputFragments<Shape::kRowTiles>& to, int block) const {
#pragma unroll
        for (int i = 0; i < Shape::kRowTiles; ++i) {
            uint4& four = to.row_tiles[i];
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                         : "l"(at[i] + 32 * block));
        }
    }
};

// The one row of a pass, float16 in shared memory, from block `first_block` on.
struct SharedRow {
    uint32_t at;  // address of the lane's inputs of block 0

    __device__ __forceinline__ SharedRow(const __half* x, int first_block, int lane)
        : at(shared_address(x) + 16 * (lane % 4) - 64 * first_block) {}
    __device__ __forceinline__ void load(InputFragments<1>& to, int block) const {
        uint4& four = to.row_tiles[0];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                     : "r"(at + 64 * block));
    }
};

// Adds a load to `total`, block by block. `inputs` holds its inputs if they are prefetched; those
// of `next` then replace them.
template <int kForm, class Shape, class Rows>
__device__ __forceinline__ void add_load(
    PanelSums<Shape>& total, LoadInputs<Shape>& inputs, const Load& own, const Load& next,
    const ExlExpertMatrix& w, const uint8_t* bytes, const Rows& rows, int lane
) {
    const LoadRun run = {w.kind, 0};
    KTileSums<Shape> sums;
    const uint8_t* k_tile = bytes;
    int in_k_tile = 0;
#pragma unroll(Shape::kPrefetchesInputs ? kStageBlocks : 1)
    for (int i = 0; i < kStageBlocks; ++i) {
        InputFragments<Shape::kRowTiles>& x = inputs[Shape::kPrefetchesInputs ? i : 0];
        if (i < own.blocks()) {
            if (in_k_tile == 0) k_tile = bytes, bytes += w.header_bytes;
            if constexpr (!Shape::kPrefetchesInputs) rows.load(x, own.first_block() + i);
            BlockCodes<kForm> codes;
            codes.load(bytes, lane);
            bytes += 128 * width_of(kForm);
            sums.add(codes, x);
            if (++in_k_tile == own.k_tile_blocks()) {
                KTileFactors factors;
                factors.load(k_tile, run, middle_of(kForm), lane);
                sums.template scale_into<kForm>(total, factors);
                in_k_tile = 0;
            }
        }
        if (Shape::kPrefetchesInputs && i < next.blocks()) rows.load(x, next.first_block() + i);
    }
}

// Whether `add_whole_load` has code for codes of some form with factors of some kind.
__host__ __device__ constexpr bool has_whole_loads(int form, int kind) {
    if (form == kMxfp4) return kind == kFloatFactors;
    if (form == kIq4 || form == kE4m3) return kind == kPlainFactors || kind == kFloatFactors;
    if (kind == EXL_OFFSET_ZEROS) return form == 4 || form == 8;
    const bool has_minimums = (kind & 7) == EXL_OFFSET_MINIMUMS;
    return kind == kPlainFactors || (has_minimums && (form == 4 || form == 5));
}

// The same for a load of one k-tile of four blocks, or of up to four k-tiles of one block. Its code
// has no branches, so that the latencies of several blocks overlap. With k-tiles of one block, those
// that the load does not have are the last one again, times zero.
template <int kForm, int kKind, int kTileBlocks, class Shape, class Rows>
__device__ __forceinline__ void add_whole_load(
    PanelSums<Shape>& total, LoadInputs<Shape>& inputs, const Load& own, const Load& next,
    const uint8_t* bytes, const Rows& rows, int lane
) {
    constexpr int kBlockBytes = 128 * width_of(kForm), kHeaderBytes = header_bytes_of(kKind);
    const int last = kTileBlocks == 1 ? own.blocks() - 1 : kStageBlocks - 1;
    InputFragments<Shape::kRowTiles> local[kStageBlocks];
    if constexpr (!Shape::kPrefetchesInputs) {
#pragma unroll
        for (int i = 0; i < kStageBlocks; ++i) {
            rows.load(local[i], own.first_block() + min(i, last));
        }
    }
#pragma unroll
    for (int first = 0; first < kStageBlocks; first += kTileBlocks) {
        const uint8_t* const k_tile =
            bytes + (kTileBlocks == 1 ? min(first, last) * (kHeaderBytes + kBlockBytes) : 0);
        KTileFactors factors;
        load_factors_of<kKind>(factors, k_tile, middle_of(kForm), first <= last, lane);
        KTileSums<Shape> sums;
#pragma unroll
        for (int j = 0; j < kTileBlocks; ++j) {
            const int i = first + j;
            auto& x =
                Shape::kPrefetchesInputs ? inputs[Shape::kPrefetchesInputs ? i : 0] : local[i];
            BlockCodes<kForm> codes;
            codes.load(k_tile + kHeaderBytes + j * kBlockBytes, lane);
            if (j == 0) {
                sums.template add<true>(codes, x);
            } else {
                sums.add(codes, x);
            }
            if (Shape::kPrefetchesInputs && i < next.blocks()) {
                rows.load(x, next.first_block() + i);
            }
        }
        sums.template scale_into<kForm>(total, factors);
    }
}

// The same for a load of small groups, which is one k-tile.
template <int kForm, class Shape, class Rows>
__device__ __forceinline__ void add_small_load(
    PanelSums<Shape>& total, LoadInputs<Shape>& inputs, const Load& own, const Load& next,
    const ExlExpertMatrix& w, const uint8_t* bytes, const Rows& rows, int lane
) {
    SmallGroupSums<kForm, Shape> sums;
    const uint8_t* const blocks = bytes + w.header_bytes;
#pragma unroll(Shape::kPrefetchesInputs ? kStageBlocks : 1)
    for (int i = 0; i < kStageBlocks; ++i) {
        InputFragments<Shape::kRowTiles>& x = inputs[Shape::kPrefetchesInputs ? i : 0];
        if (i < own.blocks()) {
            if constexpr (!Shape::kPrefetchesInputs) rows.load(x, own.first_block() + i);
            BlockCodes<kForm> codes;
            codes.load(blocks + i * 128 * width_of(kForm), lane);
            SmallMultipliers<2> multipliers;
            multipliers.load(blocks - kPanelColumns * kSmallGroups, lane / 4, 2 * i);
            sums.template add_step<0>(codes, multipliers, x.row_tiles[0]);
            sums.template add_step<1>(codes, multipliers, x.row_tiles[0]);
        }
        if (Shape::kPrefetchesInputs && i < next.blocks()) rows.load(x, next.first_block() + i);
    }
    sums.scale_into(total, bytes, lane);
}

// Starts the copies of the first loads of a column panel, whose bytes start at `panel`. All stages
// are free.
template <class Shape>
__device__ __forceinline__ void fill_ring(
    const ExpertArgs& args, const ExlExpertMatrix& w, Ring& ring, const uint8_t* panel, int first,
    int last
) {
    const int count = min(args.num_stages, last - first);
#if __CUDA_ARCH__ >= 900
    const int n = threadIdx.x % kWarp;  // each lane starts one copy
    if (n < count) {
        const Load load = load_of<Shape>(args.call, w, first + n);
        ring.issue_alone(ring.stage_after(n), panel + load.offset, load.bytes());
    }
    __syncwarp();
#else
    for (int n = 0; n < count; ++n) {
        const Load load = load_of<Shape>(args.call, w, first + n);
        ring.issue(ring.stage_after(n), panel + load.offset, load.bytes());
    }
#endif
}

// Adds a load of codes of form `kForm`, with the fastest code that knows it.
template <int kForm, class Shape, class Rows>
__device__ __forceinline__ void add_any_load(
    PanelSums<Shape>& total, LoadInputs<Shape>& inputs, const Load& own, const Load& next,
    const ExlExpertMatrix& w, const uint8_t* bytes, const Rows& rows, int lane
) {
    const auto add_whole = [&](auto kind, auto k_tile_blocks) {
        add_whole_load<kForm, decltype(kind)::value, decltype(k_tile_blocks)::value, Shape>(
            total, inputs, own, next, bytes, rows, lane
        );
    };
    // Returns whether the load has factors of this kind, and is added.
    const auto try_kind = [&](auto kind) {
        constexpr uint32_t kKind = decltype(kind)::value;
        if constexpr (Shape::kRowTiles == 1 && has_whole_loads(kForm, kKind)) {
            if ((w.kind >> 16 & 15) != kKind) return false;
            if (own.k_tile_blocks() == 1) {
                add_whole(kind, std::integral_constant<int, 1>());
                return true;
            }
            if (own.k_tile_blocks() == kStageBlocks) {
                add_whole(kind, std::integral_constant<int, kStageBlocks>());
                return true;
            }
        }
        return false;
    };
    if (try_kind(std::integral_constant<int, kPlainFactors>())) return;
    if (try_kind(std::integral_constant<int, kFloatFactors>())) return;
    if (try_kind(std::integral_constant<int, EXL_OFFSET_ZEROS>())) return;
    if (try_kind(std::integral_constant<int, EXL_OFFSET_MINIMUMS>())) return;
    if (try_kind(std::integral_constant<int, 8 | EXL_OFFSET_MINIMUMS>())) return;
    add_load<kForm, Shape>(total, inputs, own, next, w, bytes, rows, lane);
}

// Sum over the loads first .. last - 1 of a column panel, after `fill_ring`. Calls `prepare` before
// the first one. The ring is filled on up to load `end`, which a later call adds.
template <class Shape, class Rows, class Prepare>
__device__ __forceinline__ void sum_loads(
    PanelSums<Shape>& total, const ExpertArgs& args, const ExlExpertMatrix& w, Ring& ring,
    const uint8_t* panel, int first, int last, int end, const Rows& rows, int lane,
    const Prepare& prepare
) {
    const int values = w.kind >> 14 & 3;
    const bool is_small = Shape::kHasSmall && has_small_groups(w.kind >> 16 & 7);
    if (first >= last) return;
    Load own = load_of<Shape>(args.call, w, first);
    LoadInputs<Shape> inputs = {};
    if constexpr (Shape::kPrefetchesInputs) {
#pragma unroll
        for (int i = 0; i < kStageBlocks; ++i) {
            if (i < own.blocks()) rows.load(inputs[i], own.first_block() + i);
        }
    }
#pragma unroll 1
    for (int i = first; i < last; ++i) {
        Load next = {};
        if (i + 1 < last) next = load_of<Shape>(args.call, w, i + 1);
        if (i == first) prepare();
        ring.wait();
        const auto add = [&](auto form) {
            add_any_load<decltype(form)::value, Shape>(
                total, inputs, own, next, w, ring.data(), rows, lane
            );
        };
        const auto add_small = [&](auto form) {
            if constexpr (Shape::kHasSmall) {
                add_small_load<decltype(form)::value, Shape>(
                    total, inputs, own, next, w, ring.data(), rows, lane
                );
            }
        };
        if constexpr (Shape::kOnly != 0) {
            constexpr int kForm = form_of(Shape::kOnly & 255, Shape::kOnly >> 8 & 3);
            constexpr int kKind = Shape::kOnly >> 16 & 15, kTileBlocks = Shape::kOnly >> 24;
            add_whole_load<kForm, kKind, kTileBlocks, Shape>(
                total, inputs, own, next, ring.data(), rows, lane
            );
        } else {
            switch (is_small ? small_form(own.bits()) : form_of(own.bits(), values)) {
                case 2: add(std::integral_constant<int, 2>()); break;
                case 3: add(std::integral_constant<int, 3>()); break;
                case 4: add(std::integral_constant<int, 4>()); break;
                case 5: add(std::integral_constant<int, 5>()); break;
                case 6: add(std::integral_constant<int, 6>()); break;
                case 8: add(std::integral_constant<int, 8>()); break;
                case kE4m3: add(std::integral_constant<int, kE4m3>()); break;
                case kIq4: add(std::integral_constant<int, kIq4>()); break;
                case kMxfp4: add(std::integral_constant<int, kMxfp4>()); break;
                case small_form(2): add_small(std::integral_constant<int, small_form(2)>()); break;
                case small_form(3): add_small(std::integral_constant<int, small_form(3)>()); break;
                case small_form(6): add_small(std::integral_constant<int, small_form(6)>()); break;
            }
        }
        __syncwarp();
        if (i + args.num_stages < end) {
            const Load load = load_of<Shape>(args.call, w, i + args.num_stages);
            ring.issue(ring.stage(), panel + load.offset, load.bytes());
        }
        ring.advance();
        own = next;
    }
}

// ---- dense matrices ----------------------------------------------------------------------------

// A lane's weights of one block of 32 rows of k: 8 of each column g, g + 8, g + 16 and g + 24 of the
// panel, from row 8 (lane % 4) on. These are the rows of its inputs.
struct DenseBlock {
    uint4 columns[4];

    __device__ __forceinline__ void load(const __half* const (&from)[4], int block) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint4& to = columns[q];
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                         : "l"(from[q] + 32 * block));
        }
    }
    // Adds the products with the inputs of the block.
    template <class Shape>
    __device__ __forceinline__ void add_to(
        float (&sums)[Shape::kRowTiles][2][4], const InputFragments<Shape::kRowTiles>& rows
    ) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 &low = columns[2 * half], &high = columns[2 * half + 1];
            const uint32_t first[4] = {low.x, high.x, low.y, high.y};
            const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int i = 0; i < Shape::kRowTiles; ++i) {
                const uint4& x = rows.row_tiles[i];
                mma_16816(sums[i][half], first, x.x, x.y);
                mma_16816(sums[i][half], second, x.z, x.w);
            }
        }
    }
};

// Sum over the blocks first .. last - 1 of a column panel of a dense matrix. Calls `prepare` after
// the first weights are requested.
template <class Shape, class Rows, class Prepare>
__device__ __forceinline__ void sum_dense(
    PanelSums<Shape>& total, const ExpertArgs& args, const ExlExpertMatrix& w, int panel, int first,
    int last, const Rows& rows, int lane, const Prepare& prepare
) {
    constexpr int kAtOnce = Shape::kRowTiles == 4 ? 2 : 4;  // blocks whose weights are in flight
    const __half* from[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        // Columns past the last one read the last one; their sums are dropped.
        const int64_t column = min(32 * panel + 8 * q + lane / 4, args.call.n - 1);
        from[q] =
            reinterpret_cast<const __half*>(w.tiles) + column * 32 * w.num_blocks + 8 * (lane % 4);
    }
    float sums[Shape::kRowTiles][2][4] = {};
    DenseBlock blocks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < last) blocks[i].load(from, first + i);
    }
    prepare();
#pragma unroll 1
    for (int block = first; block < last; block += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (block + i < last) {
                InputFragments<Shape::kRowTiles> x;
                rows.load(x, block + i);
                blocks[i].template add_to<Shape>(sums, x);
            }
            if (block + i + kAtOnce < last) blocks[i].load(from, block + i + kAtOnce);
        }
    }
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
            for (int c = 0; c < Shape::kLaneRows; ++c) {
                total[i][q][c] = sums[i][q / 2][2 * (q % 2) + c];
            }
        }
    }
}

// ---- epilogue ----------------------------------------------------------------------------------

// Stores the sums of a warp: [row][column of the panel].
template <class Shape>
__device__ __forceinline__ void store_sums(
    const PanelSums<Shape>& total, float* to, int count, int lane
) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
        for (int c = 0; c < Shape::kLaneRows; ++c) {
            // A single row is in all columns of the fragment.
            const int row = Shape::kIsOneRow ? lane % 4 : 8 * i + 2 * (lane % 4) + c;
            if (row >= count) continue;
#pragma unroll
            for (int q = 0; q < 4; ++q) to[row * kPitch + 8 * q + lane / 4] = total[i][q][c];
        }
    }
}

// Adds the slices of one output, in order.
__device__ __forceinline__ float add_slices(
    const float* from, int slices, int unit_bits, int warp_floats
) {
    float sum = 0.0f;
    for (int slice = 0; slice < slices; ++slice) sum += from[(slice << unit_bits) * warp_floats];
    return sum;
}

// Addresses that `store_tile` needs. They are read early, because the table is in global memory.
struct TileOutputs {
    const float *bias, *up_bias;
    const int32_t* places;  // of the columns; null: in order

    __device__ __forceinline__ TileOutputs(const ExpertArgs& args, const ExlExpertItem& item) {
        const ExlExpertLinear& call = args.call;
        const ExlExpertMatrix* own = call.matrices + static_cast<int64_t>(item.expert) * call.parts;
        bias = call.has_bias ? own->bias : nullptr;
        up_bias = call.has_bias && args.is_gated() ? own[1].bias : nullptr;
        places = call.next == nullptr ? nullptr : call.next[item.expert].inverse_permutation;
    }
};

// Adds the slices, and stores the tile's outputs. `sums` holds [warp][row][kPitch].
__device__ __forceinline__ void store_tile(
    const ExpertArgs& args, const ExlExpertItem& item, const TileOutputs& outputs, int tile,
    const float* sums, int warp_floats
) {
    const ExlExpertLinear& call = args.call;
    const int slices = kWarps >> args.unit_bits, panels = 1 << args.part_bits();
    for (int i = threadIdx.x; i < 32 * item.count * panels; i += kWarps * kWarp) {
        const int row = i / 32 % item.count, panel = i / 32 / item.count;
        const int column = 32 * ((tile << args.part_bits()) + panel) + i % 32;
        if (column >= call.n) continue;
        const float* from = sums + panel * warp_floats + row * kPitch + i % 32;
        float y = add_slices(from, slices, args.unit_bits, warp_floats);
        if (outputs.bias != nullptr) y += outputs.bias[column];
        const int64_t to = static_cast<int64_t>(pair_of(call, item, row)) * call.y_stride;
        if (!args.has_activation()) {
            static_cast<float*>(call.y)[to + column] = y;
            continue;
        }
        float up = 1.0f;
        if (args.is_gated()) {
            up = add_slices(from + panels * warp_floats, slices, args.unit_bits, warp_floats);
            if (outputs.up_bias != nullptr) up += outputs.up_bias[column];
        }
        const int place = outputs.places == nullptr ? column : outputs.places[column];
        static_cast<__half*>(call.y)[to + place] = from_float<__half>(gated(call.gate, y, up));
    }
}

#endif  // __CUDACC__

// ---- host --------------------------------------------------------------------------------------

// log2 of the panels of a tile. A warp gets two loads or more, if a panel has them: with fewer, the
// start and the end of its work take longer than the work. It depends on the matrices alone.
inline int unit_bits_for(const ExlExpertLinear& call) {
    const int least = call.epilogue == EXL_EPILOGUE_GATED ? 1 : 0;
    int slice_bits = 0;
    while (slice_bits < kWarpBits - least && call.num_loads >> (slice_bits + 1) >= 2) ++slice_bits;
    return kWarpBits - slice_bits;
}

}  // namespace exl::cuda

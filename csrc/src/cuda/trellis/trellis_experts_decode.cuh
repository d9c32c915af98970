// Products of up to 4 or 8 rows of an expert with trellis codes, without decoding them.
//
// Contract   exl_cuda_trellis_experts, EXL_EXPERTS_DECODE. Writes slots of sums (trellis_experts.cuh).
// Mapping    The grid has as many blocks as fit on the device; a block takes every gridDim.x-th
//            share. Its 8 warps take the units of its shares in turn. Each streams its units
//            through two stages of shared memory of its own, across the ends of shares. Sums of a
//            column group are added in shared memory in the order of the units.
// Products   As in the decode kernel of linears (trellis_decode.cuh): integers of 16 bits and
//            items of 4 rows for MUL1, float16 and 8 rows for the other codebooks.
// Floor      The codes of the experts in use at memory bandwidth, or 3 to 4 instructions per weight.
#pragma once

#include <algorithm>

#include "cuda/trellis/trellis_experts.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

constexpr int kExpertWarps = 8;  // of a block; fewer where it has less shared memory
constexpr int kExpertStages = 2;
constexpr int kDecodeTable = 16;  // shares that a block describes at a time

template <int kWordsOfTile, int kBook>
struct ExpertShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr bool kHasIntegers = kCodebook == EXL_CODEBOOK_MUL1;
    static constexpr int kRows = kHasIntegers ? 4 : 8;
    static constexpr int kInputBytes = 256 * kRows;  // of a unit
    static constexpr int kStageBytes = unit_bytes(kTileWords) + kInputBytes;
    static constexpr int kSums = kRows * kUnitColumns;
    static constexpr int kWarpBytes = kExpertStages * kStageBytes + 4 * kSums;
    static constexpr int kTableBytes = kDecodeTable * sizeof(ShareEntry<kRows>);
    // Two blocks per multiprocessor if their shared memory fits in 228 KiB, with 1 KiB reserved.
    static constexpr int kBlocks =
        2 * (kExpertWarps * kWarpBytes + kTableBytes + 1024) <= (228 << 10) ? 2 : 1;
};

// Index of a warp's sum. Eight columns of four rows are in different banks.
__device__ __forceinline__ int expert_sum_at(int row, int column) {
    return row * kUnitColumns + (column ^ row % 4 * 8);
}

// Sums of a warp: [row][column] of its column group, in the layout of the MMA's results.
template <class Shape>
struct ExpertSums {
    static constexpr int kPerTile = Shape::kHasIntegers ? 2 : 4;
    float of[kUnitTiles][kPerTile] = {};

    __device__ __forceinline__ void store(float* to, int lane) const {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kPerTile; ++i) {
                const int row = Shape::kHasIntegers ? q : 2 * q + i % 2;
                const int half = Shape::kHasIntegers ? i : i / 2;
                to[expert_sum_at(row, 16 * tile + 8 * half + g)] = of[tile][i];
            }
        }
    }
};

// Adds the products of a unit in a stage of shared memory.
template <class Shape>
__device__ __forceinline__ void add_unit_integers(
    const uint8_t* stage, float2 scale, int lane, ExpertSums<Shape>& sums
) {
    int products[kUnitTiles][4] = {};
    const uint8_t* inputs = stage + unit_bytes(Shape::kTileWords) + 8 * lane;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        StepWords<Shape::kTileWords> words;
        words.load(stage + step * step_bytes(Shape::kTileWords), lane);
        const uint2 x = *reinterpret_cast<const uint2*>(inputs + 256 * step);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = __byte_perm(row == 0 ? x.x : x.y, 0, 0x1111 * i);
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                uint32_t w[kPositions];
                words.states(4 * row + tile, w);
#pragma unroll
                for (uint32_t& one : w) one = product_of<Shape::kCodebook>(one);
                mma_16832(products[tile], w[0], w[4], w[1], w[5], b[0], b[1]);
                mma_16832(products[tile], w[2], w[6], w[3], w[7], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Below 2^24: exact.
            const float high = static_cast<float>(products[tile][2 * half]);
            const float low = static_cast<float>(products[tile][2 * half + 1]);
            const float sum = fmaf(high, 256.0f, low) - scale.y;
            sums.of[tile][half] = fmaf(sum, scale.x, sums.of[tile][half]);
        }
    }
}

template <class Shape>
__device__ __forceinline__ void add_unit_halves(
    const uint8_t* stage, int lane, ExpertSums<Shape>& sums
) {
    const uint8_t* inputs = stage + unit_bytes(Shape::kTileWords) + 16 * lane;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        StepWords<Shape::kTileWords> words;
        words.load(stage + step * step_bytes(Shape::kTileWords), lane);
        const uint4 x = *reinterpret_cast<const uint4*>(inputs + 512 * step);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t first = row == 0 ? x.x : x.z, second = row == 0 ? x.y : x.w;
            const uint32_t b[4] = {
                __byte_perm(first, 0, 0x1010), __byte_perm(first, 0, 0x3232),
                __byte_perm(second, 0, 0x1010), __byte_perm(second, 0, 0x3232)
            };
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                uint32_t w[kPositions];
                words.states(4 * row + tile, w);
#pragma unroll
                for (uint32_t& one : w) one = product_of<Shape::kCodebook>(one);
                mma_16816(sums.of[tile], {w[0], w[4], w[1], w[5]}, b[0], b[1]);
                mma_16816(sums.of[tile], {w[2], w[6], w[3], w[7]}, b[2], b[3]);
            }
        }
    }
}

// Copies of one warp from device memory to its stages. The warp takes every `warps`-th unit of the
// shares of the table.
template <class Shape>
struct ExpertStream {
    const ExpertWork& work;
    const ShareEntry<Shape::kRows>* table;
    int shares;  // of the table
    uint8_t* stages;
    int warps, lane;

    struct Cursor {
        int share;
        uint32_t unit;
    };
    // Moves a cursor past the end of its share into the share that has the unit.
    __device__ __forceinline__ bool settle(Cursor& at) const {
        while (at.share < shares && at.unit >= table[at.share].last) {
            at.unit -= table[at.share].last;
            if (++at.share < shares) at.unit += table[at.share].first;
        }
        return at.share < shares;
    }
    __device__ __forceinline__ uint8_t* stage(int number) const {
        return stages + number % kExpertStages * Shape::kStageBytes;
    }
    __device__ __forceinline__ void copy_codes(const Cursor& at, int number) const {
        constexpr int kBytes = unit_bytes(Shape::kTileWords);
        const uint8_t* from = table[at.share].words + static_cast<int64_t>(at.unit) * kBytes;
#pragma unroll
        for (int i = 0; i < kBytes / 512; ++i) {
            copy_async_16(stage(number) + i * 512 + lane * 16, from + i * 512 + lane * 16);
        }
    }
    // Offset of a pair's inputs of a unit, 64 bytes of each step (exl/cuda/trellis.h).
    __device__ __forceinline__ int64_t input_offset(int pair, uint32_t k_unit) const {
        const int64_t k_units = work.shares.k_units;
        if constexpr (Shape::kHasIntegers) {
            return (pair / 4 * k_units + k_unit) * 1024 + pair % 4 * 64;
        }
        return (pair * k_units + k_unit) * 256;
    }
    // Copies the inputs of existing rows. The others may be anything: each has its own sums.
    __device__ __forceinline__ void copy_inputs(const Cursor& at, int number) const {
        constexpr int kStep = Shape::kHasIntegers ? 256 : 64;  // bytes between steps of a row
        const ShareEntry<Shape::kRows>& own = table[at.share];
        const uint32_t k_unit = at.unit % work.shares.k_units;
        const int step = lane % 16 / 4, in_step = lane % 4 * 16;
        uint8_t* to = stage(number) + unit_bytes(Shape::kTileWords) + step * Shape::kRows * 64;
        const uint8_t* from = work.inputs[own.part] + step * kStep + in_step;
        for (int row = lane / 16; row < own.count; row += 2) {
            copy_async_16(to + row * 64 + in_step, from + input_offset(own.pairs[row], k_unit));
        }
    }
    // Scale and offset of the integers of row lane % 4.
    __device__ __forceinline__ float2 load_scale(
        const ShareEntry<Shape::kRows>& own, uint32_t unit
    ) const {
        const int pair = own.pairs[lane % 4];
        const int64_t k_units = work.shares.k_units;
        const int64_t at = pair / 4 * k_units + unit % work.shares.k_units;
        return work.scales[own.part][at * 4 + pair % 4];
    }
};

// Adds the warps' sums of a column group in the order of its units, the first of which was taken by
// warp `rotation`, and stores those of existing rows.
template <class Shape>
__device__ __forceinline__ void store_group(
    const ExpertWork& work, const ShareEntry<Shape::kRows>& own, uint32_t group, int rotation,
    int warps, const float* all_sums
) {
    const int64_t slot = static_cast<int64_t>(own.product) * work.shares.slots() +
                         work.shares.slot(group, own.share);
    float* to = work.sums + slot * Shape::kSums;
    for (int i = threadIdx.x; i < own.count * kUnitColumns; i += warps * kWarp) {
        const float* from = all_sums + expert_sum_at(i / kUnitColumns, i % kUnitColumns);
        float sum = 0.0f;
#pragma unroll 4
        for (int w = 0; w < warps; ++w) sum += from[((rotation + w) & (warps - 1)) * Shape::kSums];
        to[i] = Shape::kHasIntegers ? sum * kAlpha : sum;
    }
}

// Computes the shares of the table. `waits`: the inputs may not have been written yet.
template <class Shape>
__device__ __forceinline__ void compute_shares(
    const ExpertStream<Shape>& stream, int warp, bool waits, float* all_sums
) {
    using Stream = ExpertStream<Shape>;
    const ExpertWork& work = stream.work;
    const int warps = stream.warps;
    typename Stream::Cursor ahead = {0, stream.table[0].first + warp};
    typename Stream::Cursor starts[kExpertStages];
    bool exists[kExpertStages];
#pragma unroll
    for (int i = 0; i < kExpertStages; ++i) {
        exists[i] = stream.settle(ahead);
        starts[i] = ahead;
        if (exists[i]) stream.copy_codes(ahead, i), ahead.unit += warps;
    }
    if (waits) wait_for_inputs();
#pragma unroll
    for (int i = 0; i < kExpertStages; ++i) {
        if (exists[i]) stream.copy_inputs(starts[i], i);
        commit_copies();
    }
    int number = 0, rotation = 0;
    for (int share = 0; share < stream.shares; ++share) {
        const ShareEntry<Shape::kRows>& own = stream.table[share];
        for (uint32_t start = own.first; start < own.last;) {
            const uint32_t group = start / work.shares.k_units;
            const uint32_t end = min(own.last, (group + 1) * work.shares.k_units);
            ExpertSums<Shape> sums;
#pragma unroll 1
            for (uint32_t unit = start + ((warp - rotation) & (warps - 1)); unit < end;
                 unit += warps, ++number) {
                float2 scale;
                if constexpr (Shape::kHasIntegers) scale = stream.load_scale(own, unit);
                wait_copies<kExpertStages - 1>();
                __syncwarp();
                if constexpr (Shape::kHasIntegers) {
                    add_unit_integers<Shape>(stream.stage(number), scale, stream.lane, sums);
                } else {
                    add_unit_halves<Shape>(stream.stage(number), stream.lane, sums);
                }
                __syncwarp();
                if (stream.settle(ahead)) {
                    stream.copy_codes(ahead, number);
                    stream.copy_inputs(ahead, number);
                    ahead.unit += warps;
                }
                commit_copies();
            }
            sums.store(all_sums + warp * Shape::kSums, stream.lane);
            __syncthreads();
            store_group<Shape>(work, own, group, rotation, warps, all_sums);
            __syncthreads();
            rotation = (rotation + end - start) & (warps - 1);
            start = end;
        }
    }
}

template <class Shape>
__global__ void __launch_bounds__(kExpertWarps* kWarp, Shape::kBlocks) expert_decode_kernel(
    const __grid_constant__ ExpertWork work
) {
    extern __shared__ __align__(128) uint8_t shared[];
    using Entry = ShareEntry<Shape::kRows>;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int warps = blockDim.x / kWarp;
    // The next kernel may read the items early: it begins after the kernel that wrote them.
    if (!work.is_early) wait_for_inputs();
    let_next_begin();
    auto* all_sums = reinterpret_cast<float*>(shared + warps * kExpertStages * Shape::kStageBytes);
    auto* table = reinterpret_cast<Entry*>(all_sums + warps * Shape::kSums);
    const uint32_t total = work.items.count() * work.parts * work.shares.count;
    bool waits = work.is_early;
    for (uint32_t first = blockIdx.x; first < total; first += kDecodeTable * gridDim.x) {
        const uint32_t left = (total - first + gridDim.x - 1) / gridDim.x;
        const int shares = min(static_cast<uint32_t>(kDecodeTable), left);
        __syncthreads();  // earlier entries have been read
        fill_table(work, Shape::kTileWords, first, shares, table);
        __syncthreads();
        uint8_t* stages = shared + warp * kExpertStages * Shape::kStageBytes;
        const ExpertStream<Shape> stream = {work, table, shares, stages, warps, lane};
        compute_shares<Shape>(stream, warp, waits, all_sums);
        waits = false;
    }
    if (waits) wait_for_inputs();
}

struct ExpertDecodeBlocks {
    template <int kTileWords, int kCodebook>
    cudaError_t run(int* blocks) const {
        *blocks = ExpertShape<kTileWords, kCodebook>::kBlocks;
        return cudaSuccess;
    }
};

struct ExpertDecodeLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(const ExpertWork& work, void* stream) const {
        using Shape = ExpertShape<kTileWords, kCodebook>;
        DeviceInfo info;
        if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
        const auto bytes = [](int warps) { return warps * Shape::kWarpBytes + Shape::kTableBytes; };
        int warps = kExpertWarps;
        while (warps > 1 && bytes(warps) > info.shared_per_block) warps /= 2;
        const int64_t most =
            static_cast<int64_t>(work.items.max_items) * work.parts * work.shares.count;
        const int64_t fitting = static_cast<int64_t>(Shape::kBlocks) * info.multiprocessors;
        const dim3 grid(static_cast<unsigned>(std::min(most, fitting)));
        return launch(
            expert_decode_kernel<Shape>, grid, dim3(warps * kWarp), bytes(warps), stream, work
        );
    }
};

template <int kCodebook>
int expert_decode_blocks(int tile_words) {
    int blocks = 1;
    for_rate<kCodebook>(tile_words, ExpertDecodeBlocks(), &blocks);
    return blocks;
}

template <int kCodebook>
cudaError_t launch_expert_decode(int tile_words, const ExpertWork& work, void* stream) {
    return for_rate<kCodebook>(tile_words, ExpertDecodeLaunch(), work, stream);
}

}  // namespace exl::cuda::trellis

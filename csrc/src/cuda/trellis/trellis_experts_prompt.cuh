// Products of up to 64 rows of an expert with trellis codes, for prompts on compute capability 9.0.
//
// Contract   exl_cuda_trellis_experts, EXL_EXPERTS_PROMPT. Writes slots of sums
//            (trellis_experts.cuh).
// Mapping    The grid has one block per multiprocessor; a block takes every gridDim.x-th share. A
//            unit has 256 columns and 128 rows of k. Two warpgroups divide its four steps. Warp w
//            of each decodes column group w, 64 columns, to A operands in registers, while the
//            previous ones are multiplied: one wgmma has the same 16 columns of every column group,
//            and reads the inputs of all rows from shared memory. Sums of the warpgroups are
//            added in shared memory.
// Accuracy   Exact values of the codes, inputs in float16, sums in float32.
// Floor      About 5.5 instructions per weight and item, or the operations of the tensor cores.
#pragma once

#include <algorithm>

#include "cuda/common/hopper.cuh"
#include "cuda/trellis/trellis_experts.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

constexpr int kPromptGroups = 2;  // warpgroups
constexpr int kPromptThreads = kPromptGroups * 4 * kWarp;
constexpr int kPromptSteps = kSteps / kPromptGroups;  // of a warpgroup and unit
// Inputs of a warpgroup and unit: [8 numbers of k][64 rows], 16 bytes each.
constexpr int kPromptChunks = 4 * kPromptSteps;
constexpr int kPromptChunkBytes = 16 * kPromptTile;
constexpr int kPromptInputBytes = kPromptChunks * kPromptChunkBytes;
constexpr int kPromptSums = kUnitTiles / kPromptGroups * kPromptTile / 2;  // sent by a thread
constexpr int kPromptSumBytes = kPromptThreads * kPromptSums * 4;
constexpr int kPromptTable = 8;  // shares that a block describes at a time

template <int kWordsOfTile, int kBook>
struct ExpertPromptShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr int kCodeBytes = kPromptSteps * step_bytes(kTileWords);  // of a warp
    static constexpr int kStageBytes = kPromptGroups * (4 * kCodeBytes + kPromptInputBytes);
    static constexpr int kTableBytes = kPromptTable * sizeof(ShareEntry<kPromptTile>);
    static constexpr int kMost = ((227 << 10) - kPromptSumBytes - kTableBytes) / kStageBytes;
    static constexpr int kStages = kMost < 4 ? kMost : 4;
    static constexpr int kSharedBytes = kStages * kStageBytes + kPromptSumBytes + kTableBytes;
    static_assert(kStages >= 3);
};

#if defined(__CUDACC__) && EXL_IS_HOPPER

// A lane's sums. Element [t][4 q + c] is row 8 q + 2 (lane % 4) + c % 2 and column
// 16 t + 8 (c / 2) + lane / 4 of the warp's column group.
using PromptSums = float[kUnitTiles][kPromptTile / 2];

template <class Shape>
struct ExpertPromptStream {
    const ExpertWork& work;
    const ShareEntry<kPromptTile>* table;
    int shares;   // of the table
    int n_units;  // columns of a matrix / 64
    uint8_t* shared;
    int group, warp, lane;  // warpgroup, warp of it

    struct Cursor {
        int share;
        uint32_t unit;
    };
    __device__ __forceinline__ bool settle(Cursor& at) const {
        while (at.share < shares && at.unit >= table[at.share].last) {
            if (++at.share < shares) at.unit = table[at.share].first;
        }
        return at.share < shares;
    }
    __device__ __forceinline__ uint8_t* codes(int stage) const {
        return shared + stage * Shape::kStageBytes + (group * 4 + warp) * Shape::kCodeBytes;
    }
    __device__ __forceinline__ uint8_t* inputs(int stage) const {
        return shared + stage * Shape::kStageBytes + kPromptGroups * 4 * Shape::kCodeBytes +
               group * kPromptInputBytes;
    }
    // Columns past the end of a matrix have no codes; their sums are never read.
    __device__ __forceinline__ void copy_codes(const Cursor& at, int stage) const {
        const uint32_t k_units = work.shares.k_units, columns = at.unit / k_units;
        const uint32_t column = columns * 4 + warp;
        if (column >= n_units) return;
        const int64_t unit = static_cast<int64_t>(column) * k_units + (at.unit - columns * k_units);
        const uint8_t* from = table[at.share].words + unit * unit_bytes(Shape::kTileWords) +
                              group * Shape::kCodeBytes;
        uint8_t* to = codes(stage);
#pragma unroll
        for (int i = 0; i < Shape::kCodeBytes; i += 16 * kWarp) {
            if (Shape::kCodeBytes % (16 * kWarp) == 0 || i + lane * 16 < Shape::kCodeBytes) {
                copy_async_16(to + i + lane * 16, from + i + lane * 16);
            }
        }
    }
    // Copies a quarter of the warpgroup's inputs: 32 rows of 4 chunks. Those past the last row may
    // be anything: each has its own sums.
    __device__ __forceinline__ void copy_inputs(const Cursor& at, int stage) const {
        const ShareEntry<kPromptTile>& own = table[at.share];
        const uint32_t k_units = work.shares.k_units, k_unit = at.unit % k_units;
        const int chunk = warp / 2 * 4 + lane / 8;
        const uint8_t* from = work.inputs[own.part] + 16 * (group * kPromptChunks + chunk);
        uint8_t* to = inputs(stage) + chunk * kPromptChunkBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp % 2 * 32 + 8 * i + lane % 8;
            if (row >= own.count) continue;
            const int64_t unit = static_cast<int64_t>(own.pairs[row]) * k_units + k_unit;
            copy_async_16(to + 16 * row, from + unit * 256);
        }
    }
};

// Starts the products of a warp's steps. Those of the last 16 rows of k may run on return.
template <class Shape>
__device__ __forceinline__ void add_prompt_unit(
    const uint8_t* codes, const uint8_t* inputs, int lane, PromptSums& sums
) {
    const uint32_t start = matrix_start(inputs, kPromptChunkBytes);
#pragma unroll
    for (int step = 0; step < kPromptSteps; ++step) {
        StepWords<Shape::kTileWords> words;
        words.load(codes + step * step_bytes(Shape::kTileWords), lane);
        uint32_t a[2][2][2][4];  // [16 rows of k][two tiles][tile][registers]
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                uint32_t states[kPositions];
                words.states(4 * row + tile, states);
                fragment_of<Shape::kCodebook>(states, a[row][tile / 2][tile % 2]);
            }
            group_fence(a[row][0]);
            group_fence(a[row][1]);
            const uint32_t b = start + (4 * step + 2 * row) * kPromptChunkBytes / 16;
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                group_product<false>(sums[tile], a[row][tile / 2][tile % 2], b);
            }
            group_commit();
            group_wait<1>();  // the registers of the fragments before these are free
        }
    }
}

// Adds the sums of both warpgroups. Warpgroup g keeps tiles 2 g and 2 g + 1. `buffer`:
// kPromptSumBytes. Ends with a barrier before it is written again.
__device__ __forceinline__ void add_prompt_groups(float* buffer, int group, PromptSums& sums) {
    constexpr int kHalf = kUnitTiles / kPromptGroups, kOfTile = kPromptTile / 2;
    float* to = buffer + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPromptSums; ++i) {
        to[i * kPromptThreads] =
            group == 0 ? sums[kHalf + i / kOfTile][i % kOfTile] : sums[i / kOfTile][i % kOfTile];
    }
    __syncthreads();
    const float* from = buffer + (threadIdx.x ^ 4 * kWarp);
#pragma unroll
    for (int i = 0; i < kPromptSums; ++i) {
        const float other = from[i * kPromptThreads];
        // The first warpgroup's sum comes first.
        if (group == 0) {
            sums[i / kOfTile][i % kOfTile] += other;
        } else {
            float& own = sums[kHalf + i / kOfTile][i % kOfTile];
            own = other + own;
        }
    }
    __syncthreads();
}

// Stores the tiles of a warpgroup: existing rows of 32 columns of each warp's column group.
template <int kGroup>
__device__ __forceinline__ void store_prompt_tiles(
    float* to, int count, int lane, const PromptSums& sums
) {
    constexpr int kHalf = kUnitTiles / kPromptGroups;
#pragma unroll
    for (int tile = kHalf * kGroup; tile < kHalf * (kGroup + 1); ++tile) {
#pragma unroll
        for (int i = 0; i < kPromptTile / 2; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int column = tile * 16 + i / 2 % 2 * 8 + lane / 4;
            if (row < count) to[row * kBatchGroupColumns + column] = sums[tile][i];
        }
    }
}

// Computes the shares of the table. `waits`: the inputs may not have been written yet.
template <class Shape>
__device__ __forceinline__ void compute_prompt_shares(
    const ExpertPromptStream<Shape>& stream, bool waits, float* buffer
) {
    using Stream = ExpertPromptStream<Shape>;
    constexpr int kStages = Shape::kStages, kAhead = kStages - 2;
    const ExpertWork& work = stream.work;
    typename Stream::Cursor ahead = {0, stream.table[0].first};
    if (waits) wait_for_inputs();
    int stage = 0, free_stage = 0;
    const auto copy_next = [&]() {
        if (stream.settle(ahead)) {
            stream.copy_codes(ahead, free_stage);
            stream.copy_inputs(ahead, free_stage);
            ++ahead.unit;
        }
        commit_copies();
        free_stage = free_stage == kStages - 1 ? 0 : free_stage + 1;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy_next();
    for (int share = 0; share < stream.shares; ++share) {
        const ShareEntry<kPromptTile>& own = stream.table[share];
        for (uint32_t unit = own.first; unit < own.last;) {
            const uint32_t group = unit / work.shares.k_units;
            const uint32_t end = min(own.last, (group + 1) * work.shares.k_units);
            PromptSums sums = {};
#pragma unroll 1
            for (; unit < end; ++unit) {
                wait_copies<kAhead - 1>();
                fence_copies();
                // The other warps' inputs are visible afterwards, and the products of the unit
                // before the previous one, whose stage is filled next, have ended.
                asm volatile("bar.sync %0, 128;" ::"r"(stream.group + 1) : "memory");
                copy_next();
                add_prompt_unit<Shape>(
                    stream.codes(stage), stream.inputs(stage), stream.lane, sums
                );
                stage = stage == kStages - 1 ? 0 : stage + 1;
            }
            group_wait<0>();
#pragma unroll
            for (auto& tile : sums) group_results(tile);
            add_prompt_groups(buffer, stream.group, sums);
            const int64_t slot = static_cast<int64_t>(own.product) * work.shares.slots() +
                                 work.shares.slot(group, own.share);
            float* to =
                work.sums + slot * (kPromptTile * kBatchGroupColumns) + stream.warp * kUnitColumns;
            if (stream.group == 0) {
                store_prompt_tiles<0>(to, own.count, stream.lane, sums);
            } else {
                store_prompt_tiles<1>(to, own.count, stream.lane, sums);
            }
        }
    }
}

#endif  // __CUDACC__ && EXL_IS_HOPPER

template <class Shape>
__global__ void __launch_bounds__(kPromptThreads, 1) expert_prompt_kernel(
    const __grid_constant__ ExpertWork work, const int n_units
) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(128) uint8_t shared[];
    using Entry = ShareEntry<kPromptTile>;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    // The next kernel may read the items early: it begins after the kernel that wrote them.
    if (!work.is_early) wait_for_inputs();
    let_next_begin();
    auto* buffer = reinterpret_cast<float*>(shared + Shape::kStages * Shape::kStageBytes);
    auto* table = reinterpret_cast<Entry*>(buffer + kPromptSumBytes / 4);
    const uint32_t total = work.items.count() * work.parts * work.shares.count;
    bool waits = work.is_early;
    for (uint32_t first = blockIdx.x; first < total; first += kPromptTable * gridDim.x) {
        const uint32_t left = (total - first + gridDim.x - 1) / gridDim.x;
        const int shares = min(static_cast<uint32_t>(kPromptTable), left);
        __syncthreads();  // earlier entries have been read
        fill_table(work, Shape::kTileWords, first, shares, table);
        __syncthreads();
        const ExpertPromptStream<Shape> stream = {work,   table,    shares,   n_units,
                                                  shared, warp / 4, warp % 4, lane};
        compute_prompt_shares<Shape>(stream, waits, buffer);
        waits = false;
    }
    if (waits) wait_for_inputs();
#endif
}

struct ExpertPromptLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(const ExpertWork& work, int n_units, void* stream) const {
        using Shape = ExpertPromptShape<kTileWords, kCodebook>;
        DeviceInfo info;
        if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
        const int64_t most =
            static_cast<int64_t>(work.items.max_items) * work.parts * work.shares.count;
        const dim3 grid(static_cast<unsigned>(std::min<int64_t>(most, info.multiprocessors)));
        return launch(
            expert_prompt_kernel<Shape>, grid, dim3(kPromptThreads), Shape::kSharedBytes, stream,
            work, n_units
        );
    }
};

template <int kCodebook>
cudaError_t launch_expert_prompt(
    int tile_words, const ExpertWork& work, int n_units, void* stream
) {
    return for_rate<kCodebook>(tile_words, ExpertPromptLaunch(), work, n_units, stream);
}

}  // namespace exl::cuda::trellis

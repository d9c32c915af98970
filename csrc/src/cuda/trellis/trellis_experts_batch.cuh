// Products of up to 32 rows of an expert with trellis codes, decoded to float16: the batch kernel.
//
// Contract   exl_cuda_trellis_experts, EXL_EXPERTS_BATCH. Writes slots of sums (trellis_experts.cuh).
// Mapping    The grid has one block per multiprocessor; a block takes every gridDim.x-th share. A
//            unit has 256 columns and 128 rows of k. The 16 warps are 4 column warps x 4 steps of a
//            unit, as in the small-batch kernel of linears (trellis_batch.cuh): a warp decodes the
//            tiles of its step to A operands in registers and multiplies them with all rows. The
//            4 warps of a step share its inputs, which are gathered by pair, and meet at a named
//            barrier once per unit. Stages of shared memory are filled across the ends of shares.
// Accuracy   Exact values of the codes, inputs in float16, sums in float32.
// Floor      About 7 instructions per weight and item, or the operations of the tensor cores.
#pragma once

#include <algorithm>

#include "cuda/trellis/trellis_experts.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

constexpr int kExpertBatchWarps = 16, kExpertColumnWarps = 4;
constexpr int kExpertRowTiles = kBatchTile / 8;
constexpr int kExpertStepInputs = kExpertRowTiles * 512;  // bytes of a step of a unit
// Sums of one step of a unit.
constexpr int kExpertSumBytes = kBatchGroupColumns * kBatchTile * 4;
constexpr int kBatchTable = 16;  // shares that a block describes at a time

template <int kWordsOfTile, int kBook>
struct ExpertBatchShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr int kStepBytes = step_bytes(kTileWords);
    // Codes of all warps, and inputs.
    static constexpr int kStageBytes = kExpertBatchWarps * kStepBytes + kSteps * kExpertStepInputs;
    static constexpr int kTableBytes = kBatchTable * sizeof(ShareEntry<kBatchTile>);
    // As many stages as fit beside two buffers of sums.
    static constexpr int kMost = ((227 << 10) - 2 * kExpertSumBytes - kTableBytes) / kStageBytes;
    static constexpr int kStages = kMost < 4 ? kMost : 4;
    static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kExpertSumBytes + kTableBytes;
    static_assert(kStages >= 3);
};

// Sums of a warp: 64 columns, 32 rows.
using ExpertBatchSums = float[kUnitTiles][kExpertRowTiles][4];

template <class Shape>
struct ExpertBatchStream {
    const ExpertWork& work;
    const ShareEntry<kBatchTile>* table;
    int shares;   // of the table
    int n_units;  // columns of a matrix / 64
    uint8_t* shared;
    int column_warp, step, lane;

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
        return shared + stage * Shape::kStageBytes +
               (step * kExpertColumnWarps + column_warp) * Shape::kStepBytes;
    }
    __device__ __forceinline__ uint8_t* inputs(int stage) const {
        return shared + stage * Shape::kStageBytes + kExpertBatchWarps * Shape::kStepBytes +
               step * kExpertStepInputs;
    }
    // Columns past the end of a matrix have no codes; their sums are never read.
    __device__ __forceinline__ void copy_codes(const Cursor& at, int stage) const {
        const uint32_t k_units = work.shares.k_units, group = at.unit / k_units;
        const uint32_t column = group * kExpertColumnWarps + column_warp;
        if (column >= n_units) return;
        const int64_t unit = static_cast<int64_t>(column) * k_units + (at.unit - group * k_units);
        const uint8_t* from = table[at.share].words + (unit * kSteps + step) * Shape::kStepBytes;
        uint8_t* to = codes(stage);
#pragma unroll
        for (int i = 0; i < Shape::kTileWords; i += kWarp) {
            if (i + lane < Shape::kTileWords) {
                copy_async_16(to + (i + lane) * 16, from + (i + lane) * 16);
            }
        }
    }
    // Copies the inputs of this step of rows 8 * column_warp .. + 7. Those past the last row may be
    // anything: each has its own sums.
    __device__ __forceinline__ void copy_inputs(const Cursor& at, int stage) const {
        const ShareEntry<kBatchTile>& own = table[at.share];
        const int row = 8 * column_warp + lane / 4;
        if (row >= own.count) return;
        const uint32_t k_units = work.shares.k_units;
        const int64_t unit = static_cast<int64_t>(own.pairs[row]) * k_units + at.unit % k_units;
        copy_async_16(
            inputs(stage) + column_warp * 512 + lane * 16,
            work.inputs[own.part] + unit * 256 + step * 64 + lane % 4 * 16
        );
    }
};

// Adds the products of a warp's step with `kRowTiles` tiles of 8 rows.
template <class Shape, int kRowTiles>
__device__ __forceinline__ void add_expert_step(
    const uint8_t* codes, const uint8_t* inputs, int lane, ExpertBatchSums& sums
) {
    StepWords<Shape::kTileWords> words;
    words.load(codes, lane);
    uint4 x[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        x[i] = *reinterpret_cast<const uint4*>(inputs + i * 512 + lane * 16);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
            uint32_t states[kPositions], a[4];
            words.states(4 * row + tile, states);
            fragment_of<Shape::kCodebook>(states, a);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_16816(sums[tile][i], a, row == 0 ? x[i].x : x[i].z, row == 0 ? x[i].y : x[i].w);
            }
        }
    }
}

// Adds the sums of the four steps: those of steps 2 and 3 to 0 and 1, then those of step 1 to 0.
// `buffers`: two of kExpertSumBytes. Ends with a barrier before they are written again.
__device__ __forceinline__ void add_expert_steps(
    float* buffers, int column_warp, int step, int lane, ExpertBatchSums& sums
) {
    constexpr int kThreads = kExpertColumnWarps * kWarp, kBuffer = kExpertSumBytes / 4;
    constexpr int kSums = kUnitTiles * kExpertRowTiles * 4;
    float* of_thread = buffers + column_warp * kWarp + lane;
#pragma unroll
    for (int count = 2; count >= 1; count /= 2) {
        float* to = of_thread + step % count * kBuffer;
        if (step >= count && step < 2 * count) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                to[i * kThreads] = sums[i / (kExpertRowTiles * 4)][i / 4 % kExpertRowTiles][i % 4];
            }
        }
        __syncthreads();
        if (step < count) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                sums[i / (kExpertRowTiles * 4)][i / 4 % kExpertRowTiles][i % 4] += to[i * kThreads];
            }
        }
        __syncthreads();
    }
}

// Stores the sums of a warp of step 0: 64 columns of existing rows.
__device__ __forceinline__ void store_expert_group(
    const ExpertWork& work, const ShareEntry<kBatchTile>& own, uint32_t group, int column_warp,
    int lane, const ExpertBatchSums& sums
) {
    const int64_t slot = static_cast<int64_t>(own.product) * work.shares.slots() +
                         work.shares.slot(group, own.share);
    float* to = work.sums + slot * (kBatchTile * kBatchGroupColumns) + column_warp * kUnitColumns +
                lane / 4;
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kExpertRowTiles * 4; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int column = tile * 16 + i / 2 % 2 * 8;
            if (row < own.count) to[row * kBatchGroupColumns + column] = sums[tile][i / 4][i % 4];
        }
    }
}

// Computes the shares of the table. `waits`: the inputs may not have been written yet.
template <class Shape>
__device__ __forceinline__ void compute_batch_shares(
    const ExpertBatchStream<Shape>& stream, bool waits, float* buffers
) {
    using Stream = ExpertBatchStream<Shape>;
    constexpr int kStages = Shape::kStages;
    const ExpertWork& work = stream.work;
    typename Stream::Cursor ahead = {0, stream.table[0].first};
    typename Stream::Cursor starts[kStages - 1];
    bool exists[kStages - 1];
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        exists[i] = stream.settle(ahead);
        starts[i] = ahead;
        if (exists[i]) stream.copy_codes(ahead, i), ++ahead.unit;
    }
    if (waits) wait_for_inputs();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (exists[i]) stream.copy_inputs(starts[i], i);
        commit_copies();
    }
    int stage = 0;
    for (int share = 0; share < stream.shares; ++share) {
        const ShareEntry<kBatchTile>& own = stream.table[share];
        for (uint32_t unit = own.first; unit < own.last;) {
            const uint32_t group = unit / work.shares.k_units;
            const uint32_t end = min(own.last, (group + 1) * work.shares.k_units);
            ExpertBatchSums sums = {};
#pragma unroll 1
            for (; unit < end; ++unit) {
                wait_copies<kStages - 2>();
                // The inputs that the other warps of the step have copied are visible afterwards,
                // and these warps have read the stage that is filled next.
                asm volatile("bar.sync %0, 128;" ::"r"(stream.step + 1) : "memory");
                const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
                if (stream.settle(ahead)) {
                    stream.copy_codes(ahead, free_stage);
                    stream.copy_inputs(ahead, free_stage);
                    ++ahead.unit;
                }
                commit_copies();
                const uint8_t *codes = stream.codes(stage), *inputs = stream.inputs(stage);
                if (own.count <= 16) {
                    add_expert_step<Shape, kExpertRowTiles / 2>(codes, inputs, stream.lane, sums);
                } else {
                    add_expert_step<Shape, kExpertRowTiles>(codes, inputs, stream.lane, sums);
                }
                stage = stage == kStages - 1 ? 0 : stage + 1;
            }
            add_expert_steps(buffers, stream.column_warp, stream.step, stream.lane, sums);
            if (stream.step == 0) {
                store_expert_group(work, own, group, stream.column_warp, stream.lane, sums);
            }
        }
    }
}

template <class Shape>
__global__ void __launch_bounds__(kExpertBatchWarps* kWarp, 1) expert_batch_kernel(
    const __grid_constant__ ExpertWork work, const int n_units
) {
    extern __shared__ __align__(128) uint8_t shared[];
    using Entry = ShareEntry<kBatchTile>;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    // The next kernel may read the items early: it begins after the kernel that wrote them.
    if (!work.is_early) wait_for_inputs();
    let_next_begin();
    auto* buffers = reinterpret_cast<float*>(shared + Shape::kStages * Shape::kStageBytes);
    auto* table = reinterpret_cast<Entry*>(buffers + 2 * kExpertSumBytes / 4);
    const uint32_t total = work.items.count() * work.parts * work.shares.count;
    bool waits = work.is_early;
    for (uint32_t first = blockIdx.x; first < total; first += kBatchTable * gridDim.x) {
        const uint32_t left = (total - first + gridDim.x - 1) / gridDim.x;
        const int shares = min(static_cast<uint32_t>(kBatchTable), left);
        __syncthreads();  // earlier entries have been read
        fill_table(work, Shape::kTileWords, first, shares, table);
        __syncthreads();
        const ExpertBatchStream<Shape> stream = {work,
                                                 table,
                                                 shares,
                                                 n_units,
                                                 shared,
                                                 warp % kExpertColumnWarps,
                                                 warp / kExpertColumnWarps,
                                                 lane};
        compute_batch_shares<Shape>(stream, waits, buffers);
        waits = false;
    }
    if (waits) wait_for_inputs();
}

struct ExpertBatchLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(const ExpertWork& work, int n_units, void* stream) const {
        using Shape = ExpertBatchShape<kTileWords, kCodebook>;
        DeviceInfo info;
        if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
        const int64_t most =
            static_cast<int64_t>(work.items.max_items) * work.parts * work.shares.count;
        const dim3 grid(static_cast<unsigned>(std::min<int64_t>(most, info.multiprocessors)));
        return launch(
            expert_batch_kernel<Shape>, grid, dim3(kExpertBatchWarps * kWarp), Shape::kSharedBytes,
            stream, work, n_units
        );
    }
};

template <int kCodebook>
cudaError_t launch_expert_batch(int tile_words, const ExpertWork& work, int n_units, void* stream) {
    return for_rate<kCodebook>(tile_words, ExpertBatchLaunch(), work, n_units, stream);
}

}  // namespace exl::cuda::trellis

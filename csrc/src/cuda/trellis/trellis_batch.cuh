// Product of up to 32 rows with trellis codes, decoded to float16: the small-batch kernel.
//
// Contract   exl_cuda_trellis_linear, m > 8, and any m in the batch-invariant mode. Writes slots of
//            sums (trellis_work.cuh).
// Mapping    A block takes successive items of 256 columns and 128 rows. Its 16 warps are 4 column
//            groups x 4 steps of a unit. A warp decodes the tiles of its step in registers, as A
//            operands, and multiplies them with all rows of the batch. The 4 warps of a step share
//            their inputs, and are synchronized by a named barrier once per item. Sums of the 4
//            steps are added in shared memory, in their order.
// Accuracy   Values of the codes, inputs in float16, sums in float32. MUL1's products are those of
//            raw_fragment_of, which leave out its rounding to float16 (2.1e-4 of the weights' RMS).
//            The finish kernel subtracts the offset and scales.
// Overlap    Codes fill the stages before the previous kernel has ended. Meanwhile one warp of each
//            scheduler runs the code of a step, which takes longer to fetch than to run.
#pragma once

#include "cuda/trellis/trellis_rates.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_work.cuh"

namespace exl::cuda::trellis {

constexpr int kBatchWarps = 16, kColumnWarps = 4;
constexpr int kRowTiles = kBatchRows / 8;
constexpr int kBatchInputBytes = kSteps * kRowTiles * 512;  // of a unit
constexpr int kBatchSumBytes = kColumnWarps * kUnitColumns * kBatchRows * 4;

template <int kWordsOfTile, int kBook>
struct BatchShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr int kStepBytes = step_bytes(kTileWords);
    // Codes of all warps, and inputs.
    static constexpr int kStageBytes = kBatchWarps * kStepBytes + kBatchInputBytes;
    // As many stages as fit beside two buffers of sums.
    static constexpr int kMost = ((227 << 10) - 2 * kBatchSumBytes) / kStageBytes;
    static constexpr int kBatchStages = kMost < 4 ? kMost : 4;
    static constexpr int kSharedBytes = kBatchStages * kStageBytes + 2 * kBatchSumBytes;
    static_assert(kBatchStages >= 3);
};

// Sums of a warp: 64 columns, 32 rows.
using BatchSums = float[kUnitTiles][kRowTiles][4];

template <class Shape>
struct BatchStream {
    const WorkArgs& args;
    uint8_t* shared;
    int column_warp, step, lane;

    __device__ __forceinline__ uint8_t* codes(int stage) const {
        return shared + stage * Shape::kStageBytes +
               (step * kColumnWarps + column_warp) * Shape::kStepBytes;
    }
    __device__ __forceinline__ uint8_t* inputs(int stage) const {
        return shared + stage * Shape::kStageBytes + kBatchWarps * Shape::kStepBytes +
               step * kRowTiles * 512;
    }
    // Columns past the end of a matrix have no codes; their sums are never read.
    __device__ __forceinline__ void copy_codes(const Place& place, int stage) const {
        const WorkPart& part = args.part_of(place.group);
        const uint32_t column = (place.group - part.first_group) * kColumnWarps + column_warp;
        if (column >= part.n_units) return;
        const uint32_t unit = column * args.division.group_items + (place.item - place.start);
        const uint8_t* from =
            part.words + static_cast<int64_t>(unit * kSteps + step) * Shape::kStepBytes;
        uint8_t* to = codes(stage);
#pragma unroll
        for (int i = 0; i < Shape::kTileWords; i += kWarp) {
            if (i + lane < Shape::kTileWords) {
                copy_async_16(to + (i + lane) * 16, from + (i + lane) * 16);
            }
        }
    }
    __device__ __forceinline__ void copy_inputs(const Place& place, int stage) const {
        const uint32_t unit = place.item - place.start;
        const int at = column_warp * 512 + lane * 16;
        const uint8_t* from =
            args.part_of(place.group).inputs + (unit * kSteps + step) * (kRowTiles * 512) + at;
        copy_async_16(inputs(stage) + at, from);
    }
};

// Adds the products of a warp's step.
template <class Shape>
__device__ __forceinline__ void add_step(
    const uint8_t* codes, const uint8_t* inputs, int lane, BatchSums& sums
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
            raw_fragment_of<Shape::kCodebook>(states, a);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_16816(sums[tile][i], a, row == 0 ? x[i].x : x[i].z, row == 0 ? x[i].y : x[i].w);
            }
        }
    }
}

// Adds the sums of the four steps: those of steps 2 and 3 to 0 and 1, then those of step 1 to 0.
// `buffers`: two of kBatchSumBytes. Ends with a barrier before they are written again.
__device__ __forceinline__ void add_steps(
    float* buffers, int column_warp, int step, int lane, BatchSums& sums
) {
    constexpr int kThreads = kColumnWarps * kWarp, kBuffer = kBatchSumBytes / 4;
    float* of_thread = buffers + column_warp * kWarp + lane;
#pragma unroll
    for (int count = 2; count >= 1; count /= 2) {
        float* to = of_thread + step % count * kBuffer;
        if (step >= count && step < 2 * count) {
#pragma unroll
            for (int i = 0; i < kUnitTiles * kRowTiles * 4; ++i) {
                to[i * kThreads] = sums[i / (kRowTiles * 4)][i / 4 % kRowTiles][i % 4];
            }
        }
        __syncthreads();
        if (step < count) {
#pragma unroll
            for (int i = 0; i < kUnitTiles * kRowTiles * 4; ++i) {
                sums[i / (kRowTiles * 4)][i / 4 % kRowTiles][i % 4] += to[i * kThreads];
            }
        }
        __syncthreads();
    }
}

// Stores the sums of a column group to a block's slot, in the warps that have them.
__device__ __forceinline__ void store_slot(
    float* slot, int m, int column_warp, int lane, const BatchSums& sums
) {
    float* to = slot + column_warp * kUnitColumns + lane / 4;
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int column = tile * 16 + i / 2 % 2 * 8;
            if (row < m) to[row * kBatchColumns + column] = sums[tile][i / 4][i % 4];
        }
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

    const BatchStream<Shape> stream{args, shared, column_warp, step, lane};
    const uint32_t group_items = args.division.group_items;
    const uint32_t last = args.division.first_item(blockIdx.x + 1);
    Place at = args.division.first_place(blockIdx.x), ahead = at, early = at;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i, early.advance(1, group_items)) {
        if (early.item < last) stream.copy_codes(early, i);
    }
    int stage = 0;
    bool is_real = false;  // false: the warm-up pass
#pragma unroll 1
    while (true) {
        const uint32_t end = min(last, at.start + group_items);
        BatchSums sums = {};
#pragma unroll 1
        while (at.item < end) {
            if (is_real) {
                wait_copies<kStages - 2>();
                // The inputs that the other warps of the step have copied are visible afterwards,
                // and these warps have read the stage that is filled next.
                asm volatile("bar.sync %0, 128;" ::"r"(step + 1) : "memory");
                const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
                if (ahead.item < last) {
                    stream.copy_codes(ahead, free_stage);
                    stream.copy_inputs(ahead, free_stage);
                }
                commit_copies();
                ahead.advance(1, group_items);
            }
            if (is_real || step == 0) {
                add_step<Shape>(stream.codes(stage), stream.inputs(stage), lane, sums);
            }
            if (!is_real) break;
            stage = stage == kStages - 1 ? 0 : stage + 1;
            ++at.item;
        }
        if (!is_real) {
            is_real = true;
            wait_for_inputs();
#pragma unroll 1
            for (int i = 0; i < kStages - 1; ++i, ahead.advance(1, group_items)) {
                if (ahead.item < last) stream.copy_inputs(ahead, i);
                commit_copies();
            }
            continue;
        }
        add_steps(buffers, column_warp, step, lane, sums);
        if (step == 0) {
            const int64_t slot = args.division.slot(at.group, blockIdx.x);
            store_slot(
                args.sums + slot * (kBatchRows * kBatchColumns), args.m, column_warp, lane, sums
            );
        }
        if (end == last) break;
        at.start += group_items, ++at.group;
    }
}

struct BatchLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(const WorkArgs& args, void* stream) const {
        using Shape = BatchShape<kTileWords, kCodebook>;
        return launch(
            batch_kernel<Shape>, dim3(args.division.blocks), dim3(kBatchWarps * kWarp),
            Shape::kSharedBytes, stream, args
        );
    }
};

template <int kCodebook>
cudaError_t launch_batch(int tile_words, const WorkArgs& args, void* stream) {
    return for_rate<kCodebook>(tile_words, BatchLaunch(), args, stream);
}

}  // namespace exl::cuda::trellis

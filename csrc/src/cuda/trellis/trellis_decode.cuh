// Product of up to 8 rows with trellis codes, without decoding them: the decode kernel.
//
// The product of a state (trellis_values.cuh) is four bytes, or two float16 numbers, whose sum is
// the value. They are successive values along k of an MMA, whose other operand holds each input
// four times, or twice: the tensor cores sum them. A register of the A operand is one weight, and no
// weight is moved between lanes.
//
// Contract   exl_cuda_trellis_linear, m <= 8. Writes slots of sums (trellis_work.cuh).
// Mapping    8 warps of a block take successive items in turn: half units, so that the warps end at
//            about the same time. Each streams its items through stages of shared memory of its
//            own. Warps do not wait for one another: the last one to store its sums of a column
//            group adds those of all warps, in the order of the warps.
// MUL1       Up to 4 rows are integers, whose bytes the MMAs multiply with those of the products. Each
//            row takes two of the 8 columns of an MMA. With 5 to 8 rows it is faster to sum the
//            bytes first: 1024 + t is a float16 number (raw_fragment_of).
// Accuracy   Integers have 16 bits per block of 128: the sums of an item are exact, and are rounded
//            to float32 once. Other inputs are float16. The codebook's rounding to float16 is left
//            out: 2.1e-4 of the weights' RMS for MUL1, 2.3e-4 for other codebooks.
// Overlap    Codes of the first stages are copied before the previous kernel has ended. Meanwhile a
//            warm-up pass runs the code of an item and of the sums, which would take longer to
//            fetch than to run.
#pragma once

#include <algorithm>

#include "cuda/trellis/trellis_rates.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_work.cuh"

namespace exl::cuda::trellis {

constexpr int kDecodeWarps = 8;  // of a block; fewer where it has less shared memory
constexpr int kItemSteps = 2;    // of an item, half a unit
constexpr int kSumBuffers = 2;   // of column groups whose sums are not all there yet
constexpr int kEarlyStages = 2;  // filled with codes before the previous kernel has ended
constexpr int kWarmWarps = 4;    // of a block that run the warm-up pass: one per scheduler
// Shared memory of a thread block: two blocks fit in the 228 KiB of a multiprocessor, with 1 KiB
// reserved and less than 1 KiB of static memory for each. Smaller blocks ask for more than a third:
// three on one multiprocessor would leave others with one.
constexpr int kDecodeBytes = (228 << 10) / kDecodeBlocks - 2048;
constexpr int kLeastDecodeBytes = (228 << 10) / (kDecodeBlocks + 1);

// Index of a warp's sum. Eight columns of four rows are in different banks.
__device__ __forceinline__ int sum_at(int row, int column) {
    return row * kUnitColumns + (column ^ row % 4 * 8);
}

// Shape of one instance: up to 4 rows of integers (MUL1), or up to 8 of float16 numbers.
template <int kWordsOfTile, int kBook, bool has_integers>
struct DecodeShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr bool kHasIntegers = has_integers;
    static constexpr int kCodeBytes = kItemSteps * step_bytes(kTileWords);  // of an item
    static constexpr int kInputBytes = kItemSteps * (kHasIntegers ? 256 : 512);
    static constexpr int kStageBytes = kCodeBytes + kInputBytes;
    static constexpr int kRows = kHasIntegers ? 4 : 8;
    static constexpr int kSums = kRows * kUnitColumns;
    static constexpr int kSumBytes = kSumBuffers * kSums * 4;
    // As many stages as fit in the shared memory of a block, but no more than hide the latency.
    static constexpr int kFitting = (kDecodeBytes / kDecodeWarps - kSumBytes) / kStageBytes;
    static constexpr int kStages = kFitting < 4 ? kFitting : 4;
    static constexpr int kWarpBytes = kStages * kStageBytes + kSumBytes;
    static_assert(kStages >= kEarlyStages);
};

// Sums of a warp: [row][column] of its column group, in the layout of the MMA's results.
template <class Shape>
struct WarpSums {
    static constexpr int kPerTile = Shape::kHasIntegers ? 2 : 4;
    float of[kUnitTiles][kPerTile];
    float offset;  // of integers: to subtract from all columns of the lane's row

    __device__ __forceinline__ void clear() {
        offset = 0.0f;
#pragma unroll
        for (auto& tile : of) {
#pragma unroll
            for (float& sum : tile) sum = 0.0f;
        }
    }

    // to: [kRows][kUnitColumns], see `sum_at`.
    __device__ __forceinline__ void store(float* to, int lane) const {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kPerTile; ++i) {
                const int row = Shape::kHasIntegers ? q : 2 * q + i % 2;
                const int half = Shape::kHasIntegers ? i : i / 2;
                to[sum_at(row, 16 * tile + 8 * half + g)] = of[tile][i] - offset;
            }
        }
    }
};

// Adds the products of an item, in a stage of shared memory. `scale`: of the item's block of 128, and
// what to subtract for the whole block, which only its first item does.
template <class Shape>
__device__ __forceinline__ void add_integers(
    const uint8_t* stage, float2 scale, bool is_first, int lane, WarpSums<Shape>& sums
) {
    int products[kUnitTiles][4] = {};
    const uint8_t* inputs = stage + Shape::kCodeBytes + 8 * lane;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
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
    if (is_first) sums.offset = fmaf(scale.x, scale.y, sums.offset);
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // At most 64 * 1020 * (127 * 256 + 128) < 2^31.
            const int sum = products[tile][2 * half] * 256 + products[tile][2 * half + 1];
            sums.of[tile][half] = fmaf(static_cast<float>(sum), scale.x, sums.of[tile][half]);
        }
    }
}

// The same for inputs in float16. MUL1's products are those of raw_fragment_of: the finish kernel
// subtracts the offset and scales.
template <class Shape>
__device__ __forceinline__ void add_halves(const uint8_t* stage, int lane, WarpSums<Shape>& sums) {
    const uint8_t* inputs = stage + Shape::kCodeBytes + 16 * lane;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
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
                if constexpr (Shape::kCodebook == EXL_CODEBOOK_MUL1) {
                    uint32_t a[4];
                    raw_fragment_of<Shape::kCodebook>(w, a);
                    mma_16816(sums.of[tile], a, first, second);
                } else {
#pragma unroll
                    for (uint32_t& one : w) one = product_of<Shape::kCodebook>(one);
                    mma_16816(sums.of[tile], {w[0], w[4], w[1], w[5]}, b[0], b[1]);
                    mma_16816(sums.of[tile], {w[2], w[6], w[3], w[7]}, b[2], b[3]);
                }
            }
        }
    }
}

// Copies of one warp from device memory to its stages: where its next item is.
template <class Shape>
struct DecodeStream {
    // Vectors of 16 bytes of a step: two lanes with integers, one with halves.
    static constexpr int kOfStep = Shape::kInputBytes / 16 / kItemSteps, kOfRow = 4;

    const WorkArgs& args;
    const int lane;
    const bool has_row;             // the lane copies inputs of a row of the batch
    uint32_t item;                  // of the launch
    uint32_t group_end, part_end;   // the first items after its column group and its part
    const uint8_t *codes, *inputs;  // of the item: the lane's bytes

    __device__ __forceinline__ DecodeStream(const WorkArgs& work, const Place& first, int of_lane)
        : args(work),
          lane(of_lane),
          has_row(of_lane % kOfStep / kOfRow < work.m),
          item(first.item),
          group_end(first.start + work.division.group_items) {
        enter_part();
    }
    __device__ __forceinline__ void enter_part() {
        const uint32_t group_items = args.division.group_items;
        const int i = item < args.parts[0].last_group * group_items   ? 0
                      : item < args.parts[1].last_group * group_items ? 1
                                                                      : 2;
        const WorkPart& part = args.parts[i];
        const uint32_t of_part = item - part.first_group * group_items;
        const uint32_t of_group = item + group_items - group_end;
        codes = part.words + static_cast<int64_t>(of_part) * Shape::kCodeBytes + 16 * lane;
        inputs = part.inputs + of_group * Shape::kInputBytes + 16 * lane;
        part_end = part.last_group * group_items;
    }
    // A part ends with a column group, so that most items have one comparison.
    __device__ __forceinline__ void advance(uint32_t count) {
        item += count;
        codes += count * Shape::kCodeBytes;
        inputs += count * Shape::kInputBytes;
        if (item < group_end) return;
        const uint32_t group_items = args.division.group_items;
        do {
            group_end += group_items;
            inputs -= group_items * Shape::kInputBytes;
        } while (item >= group_end);
        if (item >= part_end) enter_part();
    }
    __device__ __forceinline__ void copy_codes(uint8_t* stage) const {
#pragma unroll
        for (int i = 0; i < Shape::kCodeBytes; i += 16 * kWarp) {
            // A half rate's last vectors are those of half a warp.
            if (i + 16 * kWarp <= Shape::kCodeBytes || lane < kWarp / 2) {
                copy_async_16(stage + i + 16 * lane, codes + i);
            }
        }
    }
    // Copies the inputs of existing rows. The others may be anything: each has its own sums.
    __device__ __forceinline__ void copy_inputs(uint8_t* stage) const {
#pragma unroll
        for (int i = 0; i < Shape::kInputBytes; i += 16 * kWarp) {
            if (has_row) copy_async_16(stage + Shape::kCodeBytes + i + 16 * lane, inputs + i);
        }
    }
};

// How many times a buffer of sums was filled by a warp, and how many times all of it was added.
struct SumCounts {
    uint32_t stored[kSumBuffers], added[kSumBuffers];
};

// Adds the sums of all warps to a slot of the workspace, in the order of the warps. Stores nothing
// if `to` is null.
template <class Shape>
__device__ __forceinline__ void add_warps(
    const float* buffer, int warps, int m, int lane, float* to
) {
#pragma unroll 1
    for (int i = 4 * lane; i < m * kUnitColumns; i += 4 * kWarp) {
        const float* from = buffer + sum_at(i / kUnitColumns, i % kUnitColumns);
        float4 sum = {};
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
            const float4 one = *reinterpret_cast<const float4*>(from + w * Shape::kSums);
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        if constexpr (Shape::kHasIntegers) {
            sum.x *= kAlpha, sum.y *= kAlpha, sum.z *= kAlpha, sum.w *= kAlpha;
        }
        if (to != nullptr) *reinterpret_cast<float4*>(to + i) = sum;
    }
}

// Stores a warp's sums of the block's column group `number`. The last warp adds those of all warps
// to the slot `to`. With `to` null nothing is counted.
template <class Shape>
__device__ __forceinline__ void store_sums(
    const WarpSums<Shape>& sums, float* buffers, SumCounts& counts, uint32_t number, int warp,
    int warps, int lane, int m, float* to
) {
    const uint32_t place = number % kSumBuffers;
    float* buffer = buffers + place * warps * Shape::kSums;
    const auto* added = const_cast<const volatile uint32_t*>(counts.added + place);
    while (*added < number / kSumBuffers) {
    }
    __threadfence_block();
    sums.store(buffer + warp * Shape::kSums, lane);
    __threadfence_block();
    __syncwarp();
    uint32_t stored = 0;
    if (to != nullptr && lane == 0) stored = atomicAdd(counts.stored + place, 1) + 1;
    stored = uniform(stored);
    if (stored % warps != 0) return;
    __threadfence_block();
    add_warps<Shape>(buffer, warps, m, lane, to);
    __threadfence_block();
    __syncwarp();
    if (to != nullptr && lane == 0) atomicAdd(counts.added + place, 1);
}

template <class Shape>
__global__ void __launch_bounds__(kDecodeWarps* kWarp, kDecodeBlocks) decode_kernel(
    const __grid_constant__ WorkArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ SumCounts counts;
    constexpr int kStages = Shape::kStages;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int warps = blockDim.x / kWarp;
    uint8_t* stages = shared + warp * kStages * Shape::kStageBytes;
    auto* buffers = reinterpret_cast<float*>(shared + warps * kStages * Shape::kStageBytes);
    let_next_begin();
    if (threadIdx.x == 0) counts = {};
    __syncthreads();

    const uint32_t group_items = args.division.group_items;
    const uint32_t last = args.division.first_item(blockIdx.x + 1);
    Place at = args.division.first_place(blockIdx.x);
    const uint32_t first_group = at.group;
    uint32_t k_item = at.item - at.start + warp;  // may be beyond the end of the column group
    DecodeStream<Shape> ahead(args, at, lane);
    ahead.advance(warp);
    DecodeStream<Shape> early = ahead;
#pragma unroll 1
    for (int i = 0; i < kEarlyStages; ++i, early.advance(warps)) {
        if (early.item < last) early.copy_codes(stages + i * Shape::kStageBytes);
    }
    int offset = 0;        // of the item's stage
    bool is_real = false;  // false: the warm-up pass, of one item
#pragma unroll 1
    while (true) {
        WarpSums<Shape> sums;
        sums.clear();
        const uint32_t end =
            is_real ? min(last - at.start, group_items) : k_item + (warp < kWarmWarps);
        const float2* scales = args.part_of(at.group).scales + lane % 4;
#pragma unroll 1
        for (uint32_t k = k_item; k < end; k += warps) {
            uint8_t* data = stages + offset;
            float2 scale = {};
            if (is_real) {
                // Not used before the item has ended, so that nothing waits for it.
                if constexpr (Shape::kHasIntegers) scale = scales[k / 2 * 4];
                wait_copies<kStages - 1>();
                __syncwarp();
            }
            if constexpr (Shape::kHasIntegers) {
                add_integers<Shape>(data, scale, k % 2 == 0, lane, sums);
            } else {
                add_halves<Shape>(data, lane, sums);
            }
            if (!is_real) break;
            __syncwarp();
            if (ahead.item < last) {
                ahead.copy_codes(data);
                ahead.copy_inputs(data);
            }
            commit_copies();
            ahead.advance(warps);
            offset = offset == (kStages - 1) * Shape::kStageBytes ? 0 : offset + Shape::kStageBytes;
            k_item = k + warps;
        }
        float* slot = args.sums + static_cast<int64_t>(args.division.slot(at.group, blockIdx.x)) *
                                      (kDecodeRows * kUnitColumns);
        store_sums<Shape>(
            sums, buffers, counts, at.group - first_group, warp, warps, lane, args.m,
            is_real ? slot : nullptr
        );
        if (is_real) {
            if (at.start + end == last) break;
            at.start += group_items, k_item -= group_items, ++at.group;
            continue;
        }
        is_real = true;
        wait_for_inputs();
#pragma unroll 1
        for (int i = 0; i < kStages; ++i, ahead.advance(warps)) {
            uint8_t* stage = stages + i * Shape::kStageBytes;
            if (ahead.item < last) {
                if (i >= kEarlyStages) ahead.copy_codes(stage);
                ahead.copy_inputs(stage);
            }
            commit_copies();
        }
    }
}

template <class Shape>
cudaError_t launch_shape(const WorkArgs& args, void* stream) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    int warps = kDecodeWarps;
    while (warps > 1 && warps * Shape::kWarpBytes > info.shared_per_block) warps /= 2;
    int bytes = warps * Shape::kWarpBytes;
    if (info.shared_per_block >= kDecodeBytes) bytes = std::max(bytes, kLeastDecodeBytes);
    return launch(
        decode_kernel<Shape>, dim3(args.division.blocks), dim3(warps * kWarp), bytes, stream, args
    );
}

struct DecodeLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(bool has_integers, const WorkArgs& args, void* stream) const {
        if constexpr (kCodebook == EXL_CODEBOOK_MUL1) {
            if (has_integers) {
                return launch_shape<DecodeShape<kTileWords, kCodebook, true>>(args, stream);
            }
        }
        return launch_shape<DecodeShape<kTileWords, kCodebook, false>>(args, stream);
    }
};

template <int kCodebook>
cudaError_t launch_decode(int tile_words, bool has_integers, const WorkArgs& args, void* stream) {
    return for_rate<kCodebook>(tile_words, DecodeLaunch(), has_integers, args, stream);
}

}  // namespace exl::cuda::trellis

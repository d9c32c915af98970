// Product of up to 8 rows with trellis codes, without decoding them: the decode kernel.
//
// The product of a state (trellis_values.cuh) is four bytes, or two float16 numbers, whose sum is
// the value. They are successive values along k of an MMA, whose other operand holds each input
// four times, or twice: the tensor cores sum them. A register of the A operand is one weight, and no
// weight is moved between lanes.
//
// Contract   exl_cuda_trellis_linear, m <= 8. Writes slots of sums (trellis_work.cuh).
// Mapping    8 warps of a block take successive items in turn. Each streams its units through two
//            stages of shared memory of its own. Sums of a column group are added in shared memory
//            in the order of the warps.
// Accuracy   Inputs as integers of 16 bits per block of 128 (MUL1): their sums are exact, and are
//            rounded to float32 once per block. The codebook's rounding to float16 is left out:
//            2.1e-4 of the weights' RMS, 2.3e-4 for other codebooks, whose inputs are float16.
// Overlap    Codes fill the stages before the previous kernel has ended.
#pragma once

#include "cuda/trellis/trellis_rates.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_work.cuh"

namespace exl::cuda::trellis {

constexpr int kDecodeWarps = 8;  // of a block; fewer where it has less shared memory
constexpr int kStages = 2;

// Index of a warp's sum. Eight columns of four rows are in different banks.
__device__ __forceinline__ int sum_at(int row, int column) {
    return row * kUnitColumns + (column ^ row % 4 * 8);
}

// Shape of one instance. A set has 4 rows of integers, or 8 of float16 numbers.
template <int kWordsOfTile, int kBook, int kSetsOfRows>
struct DecodeShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook, kSets = kSetsOfRows;
    static constexpr bool kHasIntegers = kCodebook == EXL_CODEBOOK_MUL1;
    static constexpr int kInputBytes = kHasIntegers ? 1024 : 2048;  // of a unit and set
    static constexpr int kStageBytes = unit_bytes(kTileWords) + kSets * kInputBytes;
    static constexpr int kRows = kHasIntegers ? 4 * kSets : 8;
    static constexpr int kWarpBytes = kStages * kStageBytes + kRows * kUnitColumns * 4;
    // Two blocks per multiprocessor if their shared memory fits in 228 KiB, with 1 KiB reserved.
    static constexpr int kBlocks = 2 * (kDecodeWarps * kWarpBytes + 1024) <= (228 << 10) ? 2 : 1;
};

// Sums of a warp: [row][column] of its column group, in the layout of the MMA's results.
template <class Shape>
struct WarpSums {
    static constexpr int kPerTile = Shape::kHasIntegers ? 2 : 4;
    float of[Shape::kSets][kUnitTiles][kPerTile];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (auto& set : of) {
#pragma unroll
            for (auto& tile : set) {
#pragma unroll
                for (float& sum : tile) sum = 0.0f;
            }
        }
    }

    // to: [kRows][kUnitColumns], see `sum_at`.
    __device__ __forceinline__ void store(float* to, int lane) const {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int s = 0; s < Shape::kSets; ++s) {
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
                for (int i = 0; i < kPerTile; ++i) {
                    const int row = Shape::kHasIntegers ? 4 * s + q : 2 * q + i % 2;
                    const int half = Shape::kHasIntegers ? i : i / 2;
                    to[sum_at(row, 16 * tile + 8 * half + g)] = of[s][tile][i];
                }
            }
        }
    }
};

// Adds the products of a unit, in a stage of shared memory.
template <class Shape>
__device__ __forceinline__ void add_integers(
    const uint8_t* stage, const float2 (&scales)[Shape::kSets], int lane, WarpSums<Shape>& sums
) {
    int products[Shape::kSets][kUnitTiles][4] = {};
    const uint8_t* inputs = stage + unit_bytes(Shape::kTileWords) + 8 * lane;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        StepWords<Shape::kTileWords> words;
        words.load(stage + step * step_bytes(Shape::kTileWords), lane);
        uint2 x[Shape::kSets];
#pragma unroll
        for (int s = 0; s < Shape::kSets; ++s) {
            x[s] = *reinterpret_cast<const uint2*>(inputs + s * Shape::kInputBytes + 256 * step);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t b[Shape::kSets][4];
#pragma unroll
            for (int s = 0; s < Shape::kSets; ++s) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    b[s][i] = __byte_perm(row == 0 ? x[s].x : x[s].y, 0, 0x1111 * i);
                }
            }
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                uint32_t w[kPositions];
                words.states(4 * row + tile, w);
#pragma unroll
                for (uint32_t& one : w) one = product_of<Shape::kCodebook>(one);
#pragma unroll
                for (int s = 0; s < Shape::kSets; ++s) {
                    auto& c = products[s][tile];
                    mma_16832(c, w[0], w[4], w[1], w[5], b[s][0], b[s][1]);
                    mma_16832(c, w[2], w[6], w[3], w[7], b[s][2], b[s][3]);
                }
            }
        }
    }
#pragma unroll
    for (int s = 0; s < Shape::kSets; ++s) {
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Below 2^24: exact.
                const float high = static_cast<float>(products[s][tile][2 * half]);
                const float low = static_cast<float>(products[s][tile][2 * half + 1]);
                const float sum = fmaf(high, 256.0f, low) - scales[s].y;
                sums.of[s][tile][half] = fmaf(sum, scales[s].x, sums.of[s][tile][half]);
            }
        }
    }
}

template <class Shape>
__device__ __forceinline__ void add_halves(const uint8_t* stage, int lane, WarpSums<Shape>& sums) {
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
                mma_16816(sums.of[0][tile], {w[0], w[4], w[1], w[5]}, b[0], b[1]);
                mma_16816(sums.of[0][tile], {w[2], w[6], w[3], w[7]}, b[2], b[3]);
            }
        }
    }
}

// Copies of one warp from device memory to its stages.
template <class Shape>
struct DecodeStream {
    const WorkArgs& args;
    uint8_t* stages;
    int lane;

    // Where an item is: part, and number of its unit in the part.
    struct Place {
        const WorkPart* part;
        uint32_t unit, k_unit;
    };
    __device__ __forceinline__ Place place_of(uint32_t item) const {
        const uint32_t group = item / args.division.k_units;
        const int i = group < args.parts[0].last_group   ? 0
                      : group < args.parts[1].last_group ? 1
                                                         : 2;
        const WorkPart* part = args.parts + i;
        const uint32_t first = part->last_group - part->n_units;
        return {part, item - first * args.division.k_units, item - group * args.division.k_units};
    }
    __device__ __forceinline__ uint8_t* stage(int number) const {
        return stages + number % kStages * Shape::kStageBytes;
    }
    __device__ __forceinline__ void copy_codes(uint32_t item, int number) const {
        constexpr int kBytes = unit_bytes(Shape::kTileWords);
        const Place place = place_of(item);
        const uint8_t* from = place.part->words + static_cast<int64_t>(place.unit) * kBytes;
#pragma unroll
        for (int i = 0; i < kBytes / 512; ++i) {
            copy_async_16(stage(number) + i * 512 + lane * 16, from + i * 512 + lane * 16);
        }
    }
    // Copies the inputs of existing rows. The others may be anything: each has its own sums.
    __device__ __forceinline__ void copy_inputs(uint32_t item, int number) const {
        const Place place = place_of(item);
        uint8_t* to = stage(number) + unit_bytes(Shape::kTileWords);
        constexpr int kVectors = Shape::kInputBytes / 16;
        // Vectors of 16 bytes of a step: two lanes with integers, one with halves.
        constexpr int kOfStep = kVectors / kSteps, kOfRow = 4;
#pragma unroll
        for (int s = 0; s < Shape::kSets; ++s) {
            const uint8_t* from =
                place.part->inputs +
                static_cast<int64_t>(s * args.set_items + place.k_unit) * Shape::kInputBytes;
#pragma unroll
            for (int i = lane; i < kVectors; i += kWarp) {
                if (i % kOfStep / kOfRow < args.m - 4 * s) {
                    copy_async_16(to + s * Shape::kInputBytes + i * 16, from + i * 16);
                }
            }
        }
    }
    __device__ __forceinline__ void load_scales(uint32_t item, float2 (&to)[Shape::kSets]) const {
        const Place place = place_of(item);
#pragma unroll
        for (int s = 0; s < Shape::kSets; ++s) {
            to[s] = place.part->scales[(s * args.set_items + place.k_unit) * 4 + lane % 4];
        }
    }
};

template <class Shape>
__global__ void __launch_bounds__(kDecodeWarps* kWarp, Shape::kBlocks) decode_kernel(
    const __grid_constant__ WorkArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int kSums = Shape::kRows * kUnitColumns;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int warps = blockDim.x / kWarp;
    auto* all_sums = reinterpret_cast<float*>(shared + warps * kStages * Shape::kStageBytes);
    let_next_begin();

    const DecodeStream<Shape> stream{args, shared + warp * kStages * Shape::kStageBytes, lane};
    const Division& division = args.division;
    const uint32_t first = division.first_item(blockIdx.x);
    const uint32_t last = division.first_item(blockIdx.x + 1);
    uint32_t item = first + warp;
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        if (item + i * warps < last) stream.copy_codes(item + i * warps, i);
    }
    wait_for_inputs();
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        if (item + i * warps < last) stream.copy_inputs(item + i * warps, i);
        commit_copies();
    }
    int number = 0;
    for (uint32_t start = first; start < last;) {
        const uint32_t group = start / division.k_units;
        const uint32_t end = min(last, (group + 1) * division.k_units);
        WarpSums<Shape> sums;
        sums.clear();
#pragma unroll 1
        for (; item < end; item += warps, ++number) {
            float2 scales[Shape::kSets];
            if constexpr (Shape::kHasIntegers) stream.load_scales(item, scales);
            wait_copies<kStages - 1>();
            __syncwarp();
            if constexpr (Shape::kHasIntegers) {
                add_integers<Shape>(stream.stage(number), scales, lane, sums);
            } else {
                add_halves<Shape>(stream.stage(number), lane, sums);
            }
            __syncwarp();
            const uint32_t next = item + kStages * warps;
            if (next < last) {
                stream.copy_codes(next, number);
                stream.copy_inputs(next, number);
            }
            commit_copies();
        }
        sums.store(all_sums + warp * kSums, lane);
        __syncthreads();
        float* to = args.sums + static_cast<int64_t>(division.slot(group, blockIdx.x)) *
                                    (kDecodeRows * kUnitColumns);
        for (int i = threadIdx.x; i < args.m * kUnitColumns; i += warps * kWarp) {
            const float* from = all_sums + sum_at(i / kUnitColumns, i % kUnitColumns);
            float sum = 0.0f;
#pragma unroll 4
            for (int w = 0; w < warps; ++w) sum += from[w * kSums];
            to[i] = Shape::kHasIntegers ? sum * kAlpha : sum;
        }
        __syncthreads();
        start = end;
    }
}

template <class Shape>
cudaError_t launch_shape(const WorkArgs& args, void* stream) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    int warps = kDecodeWarps;
    while (warps > 1 && warps * Shape::kWarpBytes > info.shared_per_block) warps /= 2;
    return launch(
        decode_kernel<Shape>, dim3(args.division.blocks), dim3(warps * kWarp),
        warps * Shape::kWarpBytes, stream, args
    );
}

// Whether an instance with one set of rows takes the batch.
template <int kCodebook>
constexpr bool is_one_set(int rows) {
    return rows <= 4 || kCodebook != EXL_CODEBOOK_MUL1;
}

struct DecodeBlocks {
    template <int kTileWords, int kCodebook>
    cudaError_t run(int rows, int* blocks) const {
        *blocks = DecodeShape<kTileWords, kCodebook, 1>::kBlocks;
        if (!is_one_set<kCodebook>(rows)) *blocks = DecodeShape<kTileWords, kCodebook, 2>::kBlocks;
        return cudaSuccess;
    }
};

struct DecodeLaunch {
    template <int kTileWords, int kCodebook>
    cudaError_t run(const WorkArgs& args, void* stream) const {
        if constexpr (kCodebook == EXL_CODEBOOK_MUL1) {
            if (!is_one_set<kCodebook>(args.m)) {
                return launch_shape<DecodeShape<kTileWords, kCodebook, 2>>(args, stream);
            }
        }
        return launch_shape<DecodeShape<kTileWords, kCodebook, 1>>(args, stream);
    }
};

template <int kCodebook>
int decode_blocks(int tile_words, int rows) {
    int blocks = 1;
    for_rate<kCodebook>(tile_words, DecodeBlocks(), rows, &blocks);
    return blocks;
}

template <int kCodebook>
cudaError_t launch_decode(int tile_words, const WorkArgs& args, void* stream) {
    return for_rate<kCodebook>(tile_words, DecodeLaunch(), args, stream);
}

}  // namespace exl::cuda::trellis

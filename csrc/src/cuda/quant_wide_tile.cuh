// The end of a column tile of the wide kernel: sums of the blocks that share it, then y.
//
// A block leaves its share of a shared tile in the workspace, as its lanes have it, and the block
// that comes last adds up what all have left, itself included, in the order of the split.
#pragma once

#include "quant_wide_unit.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

constexpr int kConsumerThreads = kConsumers * kWarp;

// Of one block and share in the workspace: [2][kRows / 8][threads] of 4 numbers.
template <int kRows>
__device__ __forceinline__ float4* partial_of(
    const WideArgs& args, int block, bool is_first, int half
) {
    const int64_t share = (2 * static_cast<int64_t>(block) + is_first) * 2 + half;
    return reinterpret_cast<float4*>(args.partials) + share * (kRows / 4) * kConsumerThreads +
           threadIdx.x;
}

template <int kRows>
__device__ __forceinline__ void leave(const WideSums<kRows>& sums, float4* to) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        const float* four = &sums[i / (kRows / 8)][4 * (i % (kRows / 8))];
        __stcg(to + i * kConsumerThreads, make_float4(four[0], four[1], four[2], four[3]));
    }
}

// What blocks first .. last have left of a tile's part, of columns 16 `columns` and up.
template <int kRows>
__device__ __forceinline__ void gather_left(
    float (&sums)[kRows / 2], const WideArgs& args, int tile_block, int first, int last, int half,
    int columns
) {
    constexpr int kAtOnce = kRows == 16 ? 4 : 2;
    constexpr int kFours = kRows / 8;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
    for (int block = first; block <= last; block += kAtOnce) {
        float4 fours[kAtOnce][kFours];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int other = min(block + j, last);
            const float4* from = partial_of<kRows>(args, other, other == tile_block, half) +
                                 columns * kFours * kConsumerThreads;
#pragma unroll
            for (int i = 0; i < kFours; ++i) fours[j][i] = __ldcg(from + i * kConsumerThreads);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (block + j > last) break;
#pragma unroll
            for (int i = 0; i < kFours; ++i) {
                sums[4 * i] += fours[j][i].x, sums[4 * i + 1] += fours[j][i].y;
                sums[4 * i + 2] += fours[j][i].z, sums[4 * i + 3] += fours[j][i].w;
            }
        }
    }
}

__device__ __forceinline__ void write(const WideArgs& args, int64_t at, float y) {
    if (args.y_dtype == kF16) {
        static_cast<__half*>(args.y)[at] = from_float<__half>(y);
    } else {
        static_cast<float*>(args.y)[at] = y;
    }
}

// y of this warp's columns 16 `columns` and up; of a gated pair `ups` are the second part's sums.
template <int kRows>
__device__ __forceinline__ void write_columns(
    const WideArgs& args, const WideWalk& walk, const float (&sums)[kRows / 2],
    const float (&ups)[kRows / 2], int columns, int warp, int lane
) {
    const WidePart& part = args.parts[walk.group];
    const int strip = kTileStrips * static_cast<int>(walk.tile) + warp;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int column = 32 * strip + 16 * columns + 8 * j + lane / 4;
        if (column >= part.n) break;
        const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
        const float* up = args.parts[1].bias;
        const float up_bias = args.is_gated() && up != nullptr ? up[column] : 0.0f;
#pragma unroll
        for (int n = 0; n < kRows / 4; ++n) {
            const int row = 8 * (n / 2) + 2 * (lane % 4) + n % 2;
            const int of = 4 * (n / 2) + 2 * j + n % 2;
            if (row >= args.m) continue;
            const int64_t at = row * args.y_stride + part.first_column + column;
            float value = sums[of] + bias;
            if (args.epilogue == EXL_EPILOGUE_ADD) value += static_cast<const float*>(args.y)[at];
            if (args.is_gated()) value = gate_of(args.gate, value) * (ups[of] + up_bias);
            write(args, at, value);
        }
    }
}

// Sums of a block's share of a tile to y, once all that share it have left theirs; a tile that is
// the block's alone is in `sums`, and a pair in the workspace too. The barrier is the consumers'.
template <int kRows>
__device__ __forceinline__ void finish_wide_tile(
    const WideArgs& args, const WideWalk& walk, const WideSums<kRows>& sums,
    uint32_t& is_last_to_come, int warp, int lane
) {
    const uint32_t length = args.tile_length(walk.group);
    const int first = walk.start / args.run, last = (walk.start + length - 1) / args.run;
    if (first < last) {
        named_barrier<1, kConsumerThreads>();
        if (threadIdx.x == 0) {
            // The fences of one thread order what the barriers have ordered for it. The count goes
            // up to the number of blocks and back to zero.
            const uint32_t others = last - first;
            __threadfence();
            is_last_to_come = atomicInc(&args.counters[first], others) == others;
            __threadfence();
        }
        named_barrier<1, kConsumerThreads>();
        if (!is_last_to_come) return;
    }
    const uint32_t middle = walk.start + args.parts[0].num_blocks;  // of a pair
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float ups[kRows / 2];
        if (args.is_gated()) {
            float gates[kRows / 2];
            gather_left<kRows>(gates, args, first, first, (middle - 1) / args.run, 0, i);
            gather_left<kRows>(ups, args, first, middle / args.run, last, 1, i);
            write_columns<kRows>(args, walk, gates, ups, i, warp, lane);
        } else if (first < last) {
            float all[kRows / 2];
            gather_left<kRows>(all, args, first, first, last, 0, i);
            write_columns<kRows>(args, walk, all, ups, i, warp, lane);
        } else {
            write_columns<kRows>(args, walk, sums[i], ups, i, warp, lane);
        }
    }
}

}  // namespace exl::cuda

#endif

// The end of a column tile of the wide kernel: sums of the blocks that share it, then y.
//
// A block leaves its share of a shared tile in the workspace, as its lanes have it, and the block
// that comes last adds up what all have left, itself included, in the order of the split.
#pragma once

#include "quant_wide_unit.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {


// Of one block and share in the workspace: [2][kRows / 8][threads] of 4 numbers.
template <int kRows>
__device__ __forceinline__ float4* partial_of(
    const WideArgs& args, int block, bool is_first, int half
) {
    const int64_t share = (2 * static_cast<int64_t>(block) + is_first) * 2 + half;
    return reinterpret_cast<float4*>(args.partials) + share * (kRows / 4) * kMultiplierThreads +
           threadIdx.x;
}

template <int kRows>
__device__ __forceinline__ void leave(const WideSums<kRows>& sums, float4* to) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        const float* four = &sums[i / (kRows / 8)][4 * (i % (kRows / 8))];
        __stcg(to + i * kMultiplierThreads, make_float4(four[0], four[1], four[2], four[3]));
    }
}

// What blocks first .. last have left of a tile's part, of columns 16 `columns` and up.
template <int kRows>
__device__ __forceinline__ void gather_left(
    float (&sums)[kRows / 2], const WideArgs& args, int tile_block, int first, int last, int half,
    int columns
) {
    constexpr int kAtOnce = kRows == 16 ? 8 : kRows == 32 ? 3 : 2;  // what registers allow
    constexpr int kFours = kRows / 8;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
    for (int block = first; block <= last; block += kAtOnce) {
        float4 fours[kAtOnce][kFours];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int other = min(block + j, last);
            const float4* from = partial_of<kRows>(args, other, other == tile_block, half) +
                                 columns * kFours * kMultiplierThreads;
#pragma unroll
            for (int i = 0; i < kFours; ++i) fours[j][i] = __ldcg(from + i * kMultiplierThreads);
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

// y of this warp's columns 16 `columns` and up; of a gated pair `ups` are the second part's sums.
template <int kRows>
__device__ __forceinline__ void write_columns(
    const WideArgs& args, const WideWalk& walk, float (&sums)[kRows / 2],
    const float (&ups)[kRows / 2], int columns, int warp, int lane
) {
    const WidePart& part = args.parts[walk.group];
    const int strip = kTileStrips * static_cast<int>(walk.tile) + warp;
    const int first = 32 * strip + 16 * columns + lane / 4;
    const int64_t at = (2 * (lane % 4)) * args.y_stride + part.first_column + first;
    // Number n is of column first + 8 * (n % 4 / 2) and of row 2 * (lane % 4) + row_of(n).
    const auto row_of = [](int n) { return 8 * (n / 4) + n % 2; };
    const int rows = args.m - 2 * (lane % 4);
    const bool is_there[2] = {first < part.n, first + 8 < part.n};
    const auto add_bias = [&](const float* bias, int n) {
        return bias != nullptr && is_there[n % 4 / 2] ? bias[first + 8 * (n % 4 / 2)] : 0.0f;
    };
    if (args.epilogue == EXL_EPILOGUE_ADD) {  // all at once, ahead of what is written
        float before[kRows / 2];
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) {
            const float* y = static_cast<const float*>(args.y) + at + row_of(n) * args.y_stride +
                             8 * (n % 4 / 2);
            before[n] = row_of(n) < rows && is_there[n % 4 / 2] ? *y : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) sums[n] += before[n];
    }
    const float bias[2] = {add_bias(part.bias, 0), add_bias(part.bias, 2)};
#pragma unroll
    for (int n = 0; n < kRows / 2; ++n) sums[n] += bias[n % 4 / 2];
    if (args.is_gated()) {
        const float* of_ups = args.parts[1].bias;
        const float up_bias[2] = {add_bias(of_ups, 0), add_bias(of_ups, 2)};
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) {
            sums[n] = gate_of(args.gate, sums[n]) * (ups[n] + up_bias[n % 4 / 2]);
        }
    }
#pragma unroll
    for (int n = 0; n < kRows / 2; ++n) {
        if (row_of(n) >= rows || !is_there[n % 4 / 2]) continue;
        const int64_t to = at + row_of(n) * args.y_stride + 8 * (n % 4 / 2);
        if (args.y_dtype == kF16) {
            static_cast<__half*>(args.y)[to] = from_float<__half>(sums[n]);
        } else {
            static_cast<float*>(args.y)[to] = sums[n];
        }
    }
}

// Sums of a block's share of a tile to y, once all that share it have left theirs; a tile that is
// the block's alone is in `sums`, and a pair in the workspace too.
template <int kRows>
__device__ __forceinline__ void finish_wide_tile(
    const WideArgs& args, const WideWalk& walk, const WideSums<kRows>& sums,
    uint32_t& is_last_to_come, int warp, int lane
) {
    const uint32_t length = args.tile_length(walk.group);
    const int first = walk.start / args.run, last = (walk.start + length - 1) / args.run;
    if (first < last) {
        named_barrier<1, kMultiplierThreads>();
        if (threadIdx.x == 0) {
            // Up to the number of blocks and back to zero.
            const uint32_t others = last - first;
            is_last_to_come = ordered_increment(&args.counters[first], others) == others;
        }
        named_barrier<1, kMultiplierThreads>();
        if (!is_last_to_come) return;
    }
    float own[kRows / 2], ups[kRows / 2];
    if (first == last && !args.is_gated()) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < kRows / 2; ++n) own[n] = i == 0 ? sums[0][n] : sums[1][n];
            write_columns<kRows>(args, walk, own, ups, i, warp, lane);
        }
        return;
    }
    const uint32_t middle = walk.start + args.parts[0].num_blocks;  // of a pair
    const int last_own = args.is_gated() ? (middle - 1) / args.run : last;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        gather_left<kRows>(own, args, first, first, last_own, 0, i);
        if (args.is_gated()) {
            gather_left<kRows>(ups, args, first, middle / args.run, last, 1, i);
        }
        write_columns<kRows>(args, walk, own, ups, i, warp, lane);
    }
}

}  // namespace exl::cuda

#endif

// The end of a column tile of the wide kernel: sums of the cluster's thread blocks and teams, then y.
//
// Each thread leaves its sums in shared memory. The blocks of the cluster then divide the tile among
// them and read what all have left of their piece, always in the order of the split.
#pragma once

#include "quant_wide_unit.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

template <int kRows>
__device__ __forceinline__ float4 four_of(const WideSums<kRows>& sums, int i) {
    const float* four = &sums[i / (kRows / 8)][4 * (i % (kRows / 8))];
    return make_float4(four[0], four[1], four[2], four[3]);
}

template <int kRows>
__device__ __forceinline__ void leave(const WideSums<kRows>& sums, float4* to) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        to[i * kMultiplierThreads + threadIdx.x] = four_of<kRows>(sums, i);
    }
}

// What all teams of the cluster have left there.
__device__ __forceinline__ float4 gather(const WideArgs& args, const float4* from) {
    constexpr int kAtOnce = 4;
    const int sources = args.splits << args.team_bits, team_threads = args.tile_strips() * kWarp;
    float4 sum = {};
#pragma unroll 1
    for (int first = 0; first < sources; first += kAtOnce) {
        float4 fours[kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int source = first + j;
            if (source < sources) {
                fours[j] = load_cluster(
                    from + (source & args.team_bits) * team_threads, source >> args.team_bits
                );
            }
        }
#pragma unroll
        for (const float4& four : fours) {
            sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
        }
    }
    return sum;
}

// This block's piece of a tile, from what its teams and those of the cluster have left in `sums`, of
// a gated pair the second part's. Little code: it runs once in most launches, and what takes the
// time then is to fetch it.
template <int kRows>
__device__ __forceinline__ void write_wide_tile(
    const WideArgs& args, const WideWalk& walk, const float4* sums, const float4* gates
) {
    const WidePart& part = args.parts[walk.group];
    const int team_threads = args.tile_strips() * kWarp;
    const int begin = static_cast<int>(cluster_rank()) * args.piece;
    const int end = min(kRows / 4 * team_threads, begin + args.piece);
    const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
#pragma unroll 1
    for (int n = begin + threadIdx.x; n < end; n += kMultiplierThreads) {
        const int i = n * args.teams() / kMultiplierThreads, thread = n & (team_threads - 1);
        const int lane = thread % kWarp;
        const int strip = args.tile_strips() * static_cast<int>(walk.tile) + thread / kWarp;
        const int row = 8 * (i % (kRows / 8)) + 2 * (lane % 4);
        const int column = 32 * strip + 16 * (i / (kRows / 8)) + lane / 4;
        const int64_t first = row * args.y_stride + part.first_column + column;
        const auto is_there = [&](int c) {
            return row + c % 2 < args.m && column + 8 * (c / 2) < part.n;
        };
        const auto at = [&](int c) { return first + c % 2 * args.y_stride + 8 * (c / 2); };
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            y[c] = is_added && is_there(c) ? static_cast<const float*>(args.y)[at(c)] : 0.0f;
        }
        const float4 last = gather(args, sums + i * kMultiplierThreads + thread);
        float4 own = last;
        if (args.is_gated()) own = gather(args, gates + i * kMultiplierThreads + thread);
        y[0] += own.x, y[1] += own.y, y[2] += own.z, y[3] += own.w;
        if (part.bias != nullptr) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_there(c)) y[c] += part.bias[column + 8 * (c / 2)];
            }
        }
        if (args.is_gated()) {
            float ups[4] = {last.x, last.y, last.z, last.w};
            const float* bias = args.parts[1].bias;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (bias != nullptr && is_there(c)) ups[c] += bias[column + 8 * (c / 2)];
                y[c] = gate_of(args.gate, y[c]) * ups[c];
            }
        }
        if (args.y_dtype == kF16) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_there(c)) static_cast<__half*>(args.y)[at(c)] = from_float<__half>(y[c]);
            }
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_there(c)) static_cast<float*>(args.y)[at(c)] = y[c];
            }
        }
    }
}

}  // namespace exl::cuda

#endif

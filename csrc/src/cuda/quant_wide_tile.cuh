// The end of a column tile of the wide kernel: sums of the cluster's thread blocks and teams, then y.
//
// Each thread leaves its sums in shared memory. The blocks of the cluster then divide the tile among
// them and read what all have left of their piece, always in the order of the split.
#pragma once

#include "quant_wide_unit.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

// Sums of a block, as its threads have them: [kRows / 4][kMultiplierThreads] of 4 numbers. Number 4 i
// and up of a thread is of columns first + 16 (i / (kRows / 8)) and the eighth after it, where its
// first is lane / 4 of its strip, and of rows 8 (i % (kRows / 8)) + 2 (lane % 4) and the one after it.
template <int kRows>
constexpr int kSumsBytes = kRows / 4 * kMultiplierThreads * 16;

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
    constexpr int kAtOnce = 8;
    const int sources = args.splits * args.teams, team_threads = args.tile_strips() * kWarp;
    float4 sum = {};
#pragma unroll 1
    for (int first = 0; first < sources; first += kAtOnce) {
        float4 fours[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int source = first + j;
            if (source >= sources) break;
            fours[j] = load_cluster(
                from + source % args.teams * team_threads, source / args.teams
            );
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (first + j >= sources) break;
            sum.x += fours[j].x, sum.y += fours[j].y, sum.z += fours[j].z, sum.w += fours[j].w;
        }
    }
    return sum;
}

// Four numbers of y, those of a thread's number i; of a gated pair `ups` are the second part's sums.
struct WidePlace {
    int row, column;  // the other ones are row + 1 and column + 8
    int64_t at;

    template <int kRows>
    __device__ __forceinline__ static WidePlace of(
        const WideArgs& args, const WideWalk& walk, int i, int thread
    ) {
        const int strip = args.tile_strips() * static_cast<int>(walk.tile) + thread / kWarp;
        const int lane = thread % kWarp;
        const int row = 8 * (i % (kRows / 8)) + 2 * (lane % 4);
        const int column = 32 * strip + 16 * (i / (kRows / 8)) + lane / 4;
        return {row, column, row * args.y_stride + args.parts[walk.group].first_column + column};
    }
    __device__ __forceinline__ bool has(const WideArgs& args, const WidePart& part, int c) const {
        return row + c % 2 < args.m && column + 8 * (c / 2) < part.n;
    }
    __device__ __forceinline__ int64_t at_number(const WideArgs& args, int c) const {
        return at + c % 2 * args.y_stride + 8 * (c / 2);
    }
    __device__ __forceinline__ void load(
        float (&before)[4], const WideArgs& args, const WidePart& part
    ) const {
        const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            before[c] = is_added && has(args, part, c)
                            ? static_cast<const float*>(args.y)[at_number(args, c)]
                            : 0.0f;
        }
    }
    __device__ __forceinline__ void store(
        const WideArgs& args, const WidePart& part, const float (&before)[4], const float4& own,
        const float4& ups
    ) const {
        const float sums[4] = {own.x, own.y, own.z, own.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (!has(args, part, c)) continue;
            const int of_part = column + 8 * (c / 2);
            float y = sums[c] + before[c] + (part.bias != nullptr ? part.bias[of_part] : 0.0f);
            if (args.is_gated()) {
                const float* bias = args.parts[1].bias;
                y = gate_of(args.gate, y) * (up[c] + (bias != nullptr ? bias[of_part] : 0.0f));
            }
            if (args.y_dtype == kF16) {
                static_cast<__half*>(args.y)[at_number(args, c)] = from_float<__half>(y);
            } else {
                static_cast<float*>(args.y)[at_number(args, c)] = y;
            }
        }
    }
};

// A tile that is one team's: `sums` are all there is, or the second part's of a pair.
template <int kRows>
__device__ __forceinline__ void write_own_tile(
    const WideArgs& args, const WideWalk& walk, const WideSums<kRows>& sums, const float4* gates
) {
    const WidePart& part = args.parts[walk.group];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        const WidePlace place = WidePlace::of<kRows>(args, walk, i, threadIdx.x);
        float before[4];
        place.load(before, args, part);
        float4 own = four_of<kRows>(sums, i), ups = own;
        if (args.is_gated()) own = gates[i * kMultiplierThreads + threadIdx.x];
        place.store(args, part, before, own, ups);
    }
}

// This block's piece of a tile that is shared, from what is left in `sums`, of a gated pair the
// second part's. All of it is there.
template <int kRows>
__device__ __forceinline__ void write_shared_tile(
    const WideArgs& args, const WideWalk& walk, const float4* sums, const float4* gates
) {
    const WidePart& part = args.parts[walk.group];
    const int team_threads = args.tile_strips() * kWarp, rank = blockIdx.x % args.splits;
    const int all = kRows / 4 * team_threads, each = (all + args.splits - 1) / args.splits;
    const int end = min(all, (rank + 1) * each);
#pragma unroll 1
    for (int n = rank * each + threadIdx.x; n < end; n += kMultiplierThreads) {
        const int i = n / team_threads, thread = n % team_threads;
        const WidePlace place = WidePlace::of<kRows>(args, walk, i, thread);
        float before[4];
        place.load(before, args, part);
        const int at = i * kMultiplierThreads + thread;
        const float4 last = gather(args, sums + at);
        const float4 own = args.is_gated() ? gather(args, gates + at) : last;
        place.store(args, part, before, own, last);
    }
}

}  // namespace exl::cuda

#endif

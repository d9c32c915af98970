// The end of a column tile of the wide kernel: sums of the cluster's thread blocks and teams, then y.
//
// The blocks of the cluster divide the tile among them. Each gets its piece of the sums of all teams
// into its own shared memory and adds them up, always in the order of the split.
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

// To each block of the cluster its piece of what this thread has.
template <int kRows>
__device__ __forceinline__ void send_pieces(
    const WideArgs& args, const WideSums<kRows>& sums, float4* to, uint64_t* barrier
) {
    const uint32_t warp = uniform(threadIdx.x / kWarp);
    const uint32_t strips = args.tile_strips(), strip = warp & (strips - 1);
    const uint32_t team = warp >> (3 - args.team_bits);
    const uint32_t source = cluster_rank() << args.team_bits | team;
    float4* const own = to + source * args.piece * kWarp + threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        const uint32_t of_tile = i * strips + strip;
        const uint32_t rank = of_tile * args.per_piece >> 16;
        send(own + (of_tile - rank * args.piece) * kWarp, four_of<kRows>(sums, i), barrier, rank);
    }
}

// Of a power of two.
__device__ __forceinline__ float inverse(float x) {
    return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// `factor` times the sum of what lies at `from`, `stride` after it, and so on: what all teams of the
// cluster have sent, or clusters that meet have left.
template <bool is_global = false>
__device__ __forceinline__ float4 gather(
    int sources, const float4* from, int stride, float factor
) {
    constexpr int kAtOnce = 4;
    float4 sum = {};
#pragma unroll 1
    for (int first = 0; first < sources; first += kAtOnce) {
        float4 fours[kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const float4* one = from + (first + j) * stride;
            if (first + j < sources) fours[j] = is_global ? __ldcg(one) : *one;
        }
#pragma unroll
        for (const float4& four : fours) {
            sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
        }
    }
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    return sum;
}

// Leaves this block's piece of the sums, of `count` fours, at `to`, where the tile's clusters meet.
// True if by `counter` the others have done so: then all of them can be read there.
__device__ __forceinline__ bool meet(
    const WideArgs& args, const float4* sums, float4* to, int count, uint32_t* counter,
    WideState& state
) {
    barrier_wait<true>(&state.sums, 0);
#pragma unroll 1
    for (int n = threadIdx.x; n < count; n += kMultiplierThreads) {
        to[n] = gather(args.sources(), sums + n, args.piece * kWarp, 1.0f);
    }
    __threadfence();
    named_barrier<2, kMultiplierThreads>();
    if (threadIdx.x == 0) {
        const bool is_last = atomicAdd(counter, 1) == (1u << args.meeting_bits) - 1;
        if (is_last) *counter = 0;  // for the next launch
        state.is_last = is_last;
        __threadfence();
    }
    named_barrier<2, kMultiplierThreads>();
    return state.is_last != 0;
}

// This block's piece of a tile, from what is in `sums`, of a gated pair the second part's, once
// `barrier` says that it has come. Little code: it runs once in most launches, and what takes the
// time then is to fetch it. What is not real reads, writes nothing and ends early.
template <int kRows>
__device__ __forceinline__ void write_wide_tile(
    const WideArgs& args, const WideWalk& walk, const float4* sums, const float4* gates,
    WideState& state, bool is_real
) {
    const WidePart& part = args.parts[walk.group];
    const int strips = args.tile_strips(), stride = args.piece * kWarp;
    const int sources = args.sources();
    const int begin = static_cast<int>(cluster_rank()) * stride;
    const int end = min(kRows / 4 * strips * kWarp, begin + stride);
    const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
    const float4* left = nullptr;  // what has been left for this piece where clusters meet
    if (is_real && args.meets()) {
        const uint32_t at = walk.of_all * args.splits + cluster_rank();
        auto* const counter = reinterpret_cast<uint32_t*>(args.meeting) + at;
        auto* const first = reinterpret_cast<float4*>(args.meeting + kMeetingHead) +
                            (at << args.meeting_bits) * stride;
        float4* const own = first + wide_cluster(args) * stride;
        if (!meet(args, sums, own, end - begin, counter, state)) return;
        left = first;
    }
    const int warp = uniform(threadIdx.x / kWarp) % kMultipliers;
#pragma unroll 1
    for (int from = begin + kWarp * warp; from < end; from += kMultiplierThreads) {
        const int lane = threadIdx.x % kWarp, n = from + lane;
        const int i = n / kWarp >> (3 - args.team_bits);
        const int strip = strips * static_cast<int>(walk.tile) + (n / kWarp & (strips - 1));
        const int row = 8 * (i % (kRows / 8)) + 2 * (lane % 4);
        const int column = 32 * strip + 16 * (i / (kRows / 8)) + lane / 4;
        const auto is_there = [&](int c) {
            return row + c % 2 < args.m && column + 8 * (c / 2) < part.n;
        };
        int64_t at[4];
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int of_part = column + 8 * (c / 2), own_row = row + c % 2;
            at[c] = own_row * args.y_stride + part.first_column + of_part;
            y[c] = is_added && is_there(c) ? static_cast<const float*>(args.y)[at[c]] : 0.0f;
        }
        int places[2] = {};
        if (args.places != nullptr) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (is_there(2 * i)) places[i] = args.places[column + 8 * i];
            }
        }
        const WidePart& last_part = args.parts[args.is_gated() ? 1 : walk.group];
        const float factor = inverse(weight_unit(part, strip));
        const float last_factor = inverse(weight_unit(last_part, strip));
        if (is_real && args.is_shared()) barrier_wait<true>(&state.sums, 0);
        const float4 last =
            left != nullptr
                ? gather<true>(1 << args.meeting_bits, left + n - begin, stride, last_factor)
                : gather(sources, sums + n - begin, stride, last_factor);
        float4 own = last;
        if (args.is_gated()) own = gather(sources, gates + n - begin, stride, factor);
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
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            asm volatile("" ::"f"(y[c]), "l"(at[c]));  // not left out where it is not real
        }
        if (!is_real) return;
        if (args.places != nullptr) {
            // Two rows beside each other, of which the second may be one of the tile's past the last.
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                if (!is_there(c)) continue;
                auto* to = static_cast<__half*>(args.y) +
                           prepared_by_rows_at(args.m, row, places[c / 2]);
                *reinterpret_cast<__half2*>(to) = __halves2half2(
                    from_float<__half>(y[c]), from_float<__half>(y[c + 1])
                );
            }
        } else if (args.y_dtype == kF16) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_there(c)) static_cast<__half*>(args.y)[at[c]] = from_float<__half>(y[c]);
            }
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_there(c)) static_cast<float*>(args.y)[at[c]] = y[c];
            }
        }
    }
}

}  // namespace exl::cuda

#endif

// Epilogue of the small-batch kernel: split-K reduction, then bias, gate and store.
//
// The thread blocks of a cluster divide the output tile into portions. Every block receives the
// partial sums of its portion from all splits and slices in its shared memory (a reduce-scatter)
// and adds them up in a fixed order, so that the same inputs give the same bits.
#pragma once

#include "cuda/elementwise/gate.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/linear/prepared.cuh"
#include "cuda/linear/quant_small_batch_k_tile.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

// Vector number i, of four sums, of this thread. A thread has kRows / 4 vectors.
template <int kRows>
__device__ __forceinline__ float4 sums_vector(const SmallBatchSums<kRows>& sums, int i) {
    const float* four = &sums[i / (kRows / 8)][4 * (i % (kRows / 8))];
    return make_float4(four[0], four[1], four[2], four[3]);
}

// Stores the sums of a tile that is not split to this block's shared memory.
template <int kRows>
__device__ __forceinline__ void store_sums(const SmallBatchSums<kRows>& sums, float4* to) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        to[i * kConsumerThreads + threadIdx.x] = sums_vector<kRows>(sums, i);
    }
}

// Sends this thread's partial sums to the shared memory of the blocks that reduce them. `barrier`
// counts the bytes in each receiving block.
template <int kRows>
__device__ __forceinline__ void scatter_sums(
    const SmallBatchArgs& args, const SmallBatchSums<kRows>& sums, float4* to, uint64_t* barrier
) {
    const uint32_t warp = uniform(threadIdx.x / kWarp);
    const uint32_t panels = args.tile_panels(), panel = warp & (panels - 1);
    const uint32_t slice = warp >> (3 - args.slice_bits);
    const uint32_t partial = cluster_rank() << args.slice_bits | slice;
    float4* const own = to + partial * args.portion * kWarp + threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
        const uint32_t vector = i * panels + panel;
        const uint32_t rank = vector * args.portion_reciprocal >> 16;
        float4* const target = own + (vector - rank * args.portion) * kWarp;
        send(target, sums_vector<kRows>(sums, i), barrier, rank);
    }
}

// 1 / x for a power of two.
__device__ __forceinline__ float inverse(float x) {
    return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// Returns factor * (from[0] + from[stride] + ...), num_partials terms: the partial sums of a
// cluster in shared memory, or those of several clusters in global memory.
template <bool is_global = false>
__device__ __forceinline__ float4 add_partials(
    int num_partials, const float4* from, int stride, float factor
) {
    constexpr int kAtOnce = 4;
    float4 sum = {};
#pragma unroll 1
    for (int first = 0; first < num_partials; first += kAtOnce) {
        float4 loaded[kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const float4* address = from + (first + j) * stride;
            if (first + j < num_partials) loaded[j] = is_global ? __ldcg(address) : *address;
        }
#pragma unroll
        for (const float4& vector : loaded) {
            sum.x += vector.x, sum.y += vector.y, sum.z += vector.z, sum.w += vector.w;
        }
    }
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    return sum;
}

// Reduces this block's portion over its cluster, `count` vectors, and stores the result in the
// workspace at `to`. Returns true if all other clusters of the tile have already stored theirs, by
// the arrival counter. Then this block reads all of them and writes y.
__device__ __forceinline__ bool store_global_sums(
    const SmallBatchArgs& args, const float4* sums, float4* to, int count, uint32_t* counter,
    SmallBatchState& state
) {
    barrier_wait<true>(&state.sums_ready, 0);
#pragma unroll 1
    for (int n = threadIdx.x; n < count; n += kConsumerThreads) {
        to[n] = add_partials(args.num_partials(), sums + n, args.portion * kWarp, 1.0f);
    }
    __threadfence();
    named_barrier<2, kConsumerThreads>();
    if (threadIdx.x == 0) {
        const bool is_last_cluster = atomicAdd(counter, 1) == (1u << args.global_split_bits) - 1;
        if (is_last_cluster) *counter = 0;  // for the next launch
        state.is_last_cluster = is_last_cluster;
        __threadfence();
    }
    named_barrier<2, kConsumerThreads>();
    return state.is_last_cluster != 0;
}

// Sends a square of 8 rows and 16 columns of y that a warp holds: y[c] of lane 4 q + h has row
// 2 h + c % 2 and column q + 8 (c / 2). The lanes trade them so that each stores four adjacent
// columns: the link to another GPU takes longer for many small stores.
__device__ __forceinline__ void send_square(
    const SmallBatchArgs& args, const SmallBatchPart& part, const float (&y)[4], int first_row,
    int first_column
) {
    const int lane = threadIdx.x % kWarp;
    const bool is_odd = lane & 4, is_second = lane & 8;  // column q, pair of columns q / 2
    float pairs[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // two columns of row 2 h or 2 h + 1
        const float own = is_odd ? y[2 * half + 1] : y[2 * half];
        const float other = is_odd ? y[2 * half] : y[2 * half + 1];
        const float found = __shfl_xor_sync(0xffffffffu, other, 4);
        pairs[half][0] = is_odd ? found : own;
        pairs[half][1] = is_odd ? own : found;
    }
    uint32_t bits[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // four columns of the first or the second eight
        const float own = is_second ? pairs[1][j] : pairs[0][j];
        const float other = is_second ? pairs[0][j] : pairs[1][j];
        const float found = __shfl_xor_sync(0xffffffffu, other, 8);
        bits[j] = sent_bits(is_second ? found : own);
        bits[2 + j] = sent_bits(is_second ? own : found);
    }
    const int row = first_row + 2 * (lane % 4) + is_odd;
    const int column = first_column + 8 * is_second + lane / 16 * 4;
    if (row >= args.m) return;
    const int64_t at = row * args.y_stride + part.first_column + column;
    auto* const own = static_cast<float*>(args.y) + at;
    if (column + 4 <= part.n && args.y_stride % 4 == 0 && part.first_column % 4 == 0) {
        const uint4 quad = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        int i = 0, end = args.copies.count + 1;
        if (args.row_shift >= 0) i = row >> args.row_shift, end = i + 1;
#pragma unroll 1
        for (; i < end; ++i) {
            store_parts(i < args.copies.count ? args.copies.to[i] + at : own, quad);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (column + j >= part.n) continue;
        send_part(args.copies, at + j, bits[j]);
        store_part(own + j, bits[j]);
    }
}

// Reduces this block's portion of an output tile and writes it to y. `sums` holds the partial sums,
// for a gated pair those of up, and `gate_sums` those of the gate. The code is short: most launches
// run it once, and then fetching its instructions takes most of its time. The warm-up warp (not
// is_consumer) runs it once without waiting and without storing anything.
template <int kRows>
__device__ __forceinline__ void write_tile(
    const SmallBatchArgs& args, const TileScheduler& scheduler, const float4* sums,
    const float4* gate_sums, SmallBatchState& state, bool is_consumer
) {
    const SmallBatchPart& part = args.parts[scheduler.group];
    const int panels = args.tile_panels(), stride = args.portion * kWarp;
    const int num_partials = args.num_partials();
    const int begin = static_cast<int>(cluster_rank()) * stride;
    const int end = min(kRows / 4 * panels * kWarp, begin + stride);
    const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
    const float4* global_sums = nullptr;  // the clusters' sums of this portion, in the workspace
    if (is_consumer && args.has_global_split()) {
        const uint32_t portion_index = scheduler.index * args.splits + cluster_rank();
        auto* const counter = reinterpret_cast<uint32_t*>(args.workspace) + portion_index;
        auto* const first = reinterpret_cast<float4*>(args.workspace + kCounterBytes) +
                            (portion_index << args.global_split_bits) * stride;
        float4* const own = first + cluster_in_tile(args) * stride;
        if (!store_global_sums(args, sums, own, end - begin, counter, state)) return;
        global_sums = first;
    }
    const int warp = uniform(threadIdx.x / kWarp) % kConsumerWarps;
#pragma unroll 1
    for (int from = begin + kWarp * warp; from < end; from += kConsumerThreads) {
        const int lane = threadIdx.x % kWarp, n = from + lane;
        const int i = n / kWarp >> (3 - args.slice_bits);
        const int panel = panels * static_cast<int>(scheduler.tile) + (n / kWarp & (panels - 1));
        const int row = 8 * (i % (kRows / 8)) + 2 * (lane % 4);
        const int column = 32 * panel + 16 * (i / (kRows / 8)) + lane / 4;
        const auto is_valid = [&](int c) {
            return row + c % 2 < args.m && column + 8 * (c / 2) < part.n;
        };
        int64_t at[4];
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int part_column = column + 8 * (c / 2);
            const int64_t y_row = scheduler.chunk * EXL_CUDA_CHUNK_ROWS + row + c % 2;
            at[c] = y_row * args.y_stride + part.first_column + part_column;
            y[c] = is_added && is_valid(c) ? static_cast<const float*>(args.y)[at[c]] : 0.0f;
        }
        int positions[2] = {};
        if (args.inverse_permutation != nullptr) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (is_valid(2 * i)) positions[i] = args.inverse_permutation[column + 8 * i];
            }
        }
        const SmallBatchPart& last_part = args.parts[args.is_gated() ? 1 : scheduler.group];
        const float factor = inverse(load_panel_scale(part, panel));
        const float last_factor = inverse(load_panel_scale(last_part, panel));
        if (is_consumer && args.is_split()) barrier_wait<true>(&state.sums_ready, 0);
        const float4 last =
            global_sums != nullptr
                ? add_partials<true>(
                      1 << args.global_split_bits, global_sums + n - begin, stride, last_factor
                  )
                : add_partials(num_partials, sums + n - begin, stride, last_factor);
        float4 own = last;
        if (args.is_gated()) {
            own = add_partials(num_partials, gate_sums + n - begin, stride, factor);
        }
        y[0] += own.x, y[1] += own.y, y[2] += own.z, y[3] += own.w;
        if (part.bias != nullptr) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_valid(c)) y[c] += part.bias[column + 8 * (c / 2)];
            }
        }
        if (args.has_activation()) {
            float ups[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            if (args.is_gated()) ups[0] = last.x, ups[1] = last.y, ups[2] = last.z, ups[3] = last.w;
            const float* bias = args.is_gated() ? args.parts[1].bias : nullptr;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (bias != nullptr && is_valid(c)) ups[c] += bias[column + 8 * (c / 2)];
                y[c] = gated(args.gate, y[c], ups[c]);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            // Keeps the compiler from removing the computation for the warm-up warp.
            asm volatile("" ::"f"(y[c]), "l"(at[c]));
        }
        if (!is_consumer) return;
        if (args.inverse_permutation != nullptr) {
            // Stores two adjacent rows at once. The second one may be a padding row of the chunk.
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                if (!is_valid(c)) continue;
                auto* to = static_cast<__half*>(args.y) +
                           prepared_by_rows_at(args.m, row, positions[c / 2]);
                *reinterpret_cast<__half2*>(to) =
                    __halves2half2(from_float<__half>(y[c]), from_float<__half>(y[c + 1]));
            }
        } else if (args.y_dtype == kF16) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_valid(c)) static_cast<__half*>(args.y)[at[c]] = from_float<__half>(y[c]);
            }
        } else if (args.copies.count > 0) {
            const int first_row = row - 2 * (lane % 4), first_column = column - lane / 4;
            send_square(args, part, y, first_row, first_column);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (is_valid(c)) static_cast<float*>(args.y)[at[c]] = y[c];
            }
        }
    }
}

}  // namespace exl::cuda

#endif

// The kernel of attention_decode.cuh's plan.
#pragma once

#include "attention_decode_copies.cuh"

namespace exl::cuda {

// Address of query vector v in rows of `stride`.
__device__ __forceinline__ uint8_t* vector_at(
    const AttentionParams& params, const Piece& piece, const void* base, int64_t stride, int v
) {
    const int64_t row = piece.first_row + v / params.group;
    const int head = static_cast<int>(blockIdx.y) * params.group + v % params.group;
    const int64_t at = row * stride + static_cast<int64_t>(head) * params.d;
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(base)) +
           at * (params.dtype == kF16 ? 2 : 4);
}

// The warps' results to shared memory, side by side.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void store_results(
    const Running<width, tiles>& run, float* results, float* stats, int warp, int lane
) {
    constexpr int kQueries = 8 * tiles;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float weight = run.weight[n][j];
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2) {
                weight += __shfl_xor_sync(0xffffffffu, weight, step);
            }
            const int v = 8 * n + lane % 4 * 2 + j;
            if (lane < 4) {
                stats[2 * warp * kQueries + v] = run.peak[n][j];
                stats[(2 * warp + 1) * kQueries + v] = weight;
            }
            float* to = results + (warp * kQueries + v) * (width + 4);
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
                using Values = ValueFragments<value_type, width>;
                to[Values::element(tile, lane / 4, 0)] = Values::unit(0) * run.sums[tile][n][j];
                to[Values::element(tile, lane / 4, 1)] = Values::unit(1) * run.sums[tile][n][2 + j];
            }
        }
    }
}

// Adds the warps' results: to the first one's place, divided by their weight, or, where `partials`
// is not null, there, with peak and weight.
template <int width, int queries>
__device__ __forceinline__ void merge_warps(
    float* results, const float* stats, int vectors, float* partials, float2* partial_stats,
    int warp, int warps, int lane
) {
    static_assert(kDecodeWarps == 8);
    for (int v = warp; v < vectors; v += warps) {
        // Lane l has the peak and the weight of warp l % 8; without keys they are -infinity and 0.
        const int w = lane % kDecodeWarps;
        float factor = w < warps ? stats[2 * w * queries + v] : -INFINITY;
        float weight = w < warps ? stats[(2 * w + 1) * queries + v] : 0.0f;
        float peak = factor;
#pragma unroll
        for (int step = 1; step < kDecodeWarps; step *= 2) {
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, step));
        }
        factor = exp2_of(factor - (peak == -INFINITY ? 0.0f : peak));
        weight *= factor;
#pragma unroll
        for (int step = 1; step < kDecodeWarps; step *= 2) {
            weight += __shfl_xor_sync(0xffffffffu, weight, step);
        }
        if (partials == nullptr) factor *= __fdividef(1.0f, weight);
#pragma unroll
        for (int i = 4 * lane; i < width; i += 4 * kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
            for (int other = 0; other < warps; ++other) {
                const float4 x = *reinterpret_cast<const float4*>(
                    results + (other * queries + v) * (width + 4) + i
                );
                const float by = __shfl_sync(width < 4 * kWarp ? 0xffffu : 0xffffffffu, factor, other);
                sum.x += by * x.x;
                sum.y += by * x.y;
                sum.z += by * x.z;
                sum.w += by * x.w;
            }
            // Nobody else reads this query's results, and this lane has read what it overwrites.
            float* to = partials == nullptr ? results + v * (width + 4) : partials + v * width;
            *reinterpret_cast<float4*>(to + i) = sum;
        }
        if (partials != nullptr && lane == 0) partial_stats[v] = make_float2(peak, weight);
    }
}

// Whether this block is the last of those that share `counter`; their partial results can be read.
__device__ __forceinline__ bool arrives_last(unsigned* counter, int splits) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before) : "l"(counter) : "memory");
        is_last = before == static_cast<unsigned>(splits) - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    return is_last;
}

// What each split has of the whole, from their peaks and weights, of which lane l has those of the
// splits l, l + 32.. of `count`.
template <int count>
__device__ __forceinline__ void find_shares(float2 (&mine)[count], float* shares, int lane) {
    float peak = -INFINITY, weight = 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) peak = fmaxf(peak, mine[i].x);
    peak = warp_max(peak);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        mine[i].x = exp2_of(mine[i].x - (peak == -INFINITY ? 0.0f : peak));
        weight += mine[i].x * mine[i].y;
    }
    const float by = __fdividef(1.0f, warp_sum(weight));
#pragma unroll
    for (int i = 0; i < count; ++i) shares[i * kWarp + lane] = mine[i].x * by;
    __syncwarp();
}

// Adds the splits' partial results, always in the same order, to rows of `results`: in parts, for
// which a vector's warps have `queries` rows each. How many parts there are.
template <int width, int queries>
__device__ __forceinline__ int add_splits(
    float* results, float* shares, int vectors, const float* partials, const float2* partial_stats,
    int splits, int warp, int warps, int lane
) {
    // Loads on their way at once: four vectors have two warps each, and eight heads 33 splits on 132
    // multiprocessors.
    constexpr int kAhead = 17;
    constexpr int kQuads = width / 4;  // of a vector
    constexpr int kSharing = kQuads < kWarp ? kWarp / kQuads : 1;  // lanes that have the same quads
    const int parts = max(1, warps / vectors);
    const int every = parts * kSharing;
    shares += warp * kMaxSplits;
    for (int item = warp; item < vectors * parts; item += warps) {
        const int part = item / vectors, v = item - part * vectors;
        const int own = part * kSharing + lane / kQuads % kSharing;
        float2 mine[kMaxSplits / kWarp];
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = i * kWarp + lane;
            mine[i] = make_float2(-INFINITY, 0.0f);
            if (split < splits) mine[i] = __ldcg(partial_stats + split * queries + v);
        }
        constexpr int kRow = queries * kQuads;
        const auto* from = reinterpret_cast<const float4*>(partials) + own * kRow + v * kQuads +
                           lane % kQuads;
        float* to = results + (part * queries + v) * (width + 4) + lane % kQuads * 4;
        for (int quad = 0; quad < kQuads; quad += kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int first = 0; first < splits; first += kAhead * every) {
                float4 x[kAhead];
                const auto* at = from + first * kRow + quad;
                int left = splits - own - first;
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (left > 0) x[i] = __ldcg(at);
                    at += every * kRow;
                    left -= every;
                }
                if (first == 0 && quad == 0) find_shares<kMaxSplits / kWarp>(mine, shares, lane);
                const float* share = shares + own + first;
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const float by = share[min(i * every, kMaxSplits - 1 - own - first)];
                    sum.x += by * x[i].x;
                    sum.y += by * x[i].y;
                    sum.z += by * x[i].z;
                    sum.w += by * x[i].w;
                }
            }
#pragma unroll
            for (int step = kQuads; step < kWarp; step *= 2) {
                sum.x += __shfl_xor_sync(0xffffffffu, sum.x, step);
                sum.y += __shfl_xor_sync(0xffffffffu, sum.y, step);
                sum.z += __shfl_xor_sync(0xffffffffu, sum.z, step);
                sum.w += __shfl_xor_sync(0xffffffffu, sum.w, step);
            }
            *reinterpret_cast<float4*>(to + 4 * quad) = sum;
        }
        __syncwarp();  // shares are read
    }
    return parts;
}

template <int key_type, int value_type, int width, int tiles, bool is_runs>
__global__ void __launch_bounds__((kDecodeWarps + is_runs) * kWarp, width * tiles <= 128 ? 2 : 1)
decode_kernel(const AttentionParams params) {
    if constexpr (is_runs && !EXL_IS_HOPPER) return;  // never launched
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kQueries = Shape::kQueries;
    constexpr int kStep = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    const int warps = blockDim.x / kWarp - is_runs;  // that compute
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const Piece piece = piece_of(params, kQueries, kStep, warps);
    if (piece.splits == 0) {
        wait_for_inputs();
        return;
    }
    const int kv_head = blockIdx.y;
    const int d = params.d;

    uint8_t* queries = shared;
    float* stats = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
    uint8_t* staged = shared + Shape::kQueryBytes + Shape::kStatBytes + Shape::kBarrierBytes;
    StepCopies<key_type, value_type, width, is_runs> copies(params, piece, staged, warp, warps, lane);
    if (is_runs && warp == warps) {
        copies.run();
        return;
    }
    // What earlier passes wrote is on its way before this pass's rows are there.
    copies.begin_known();
    wait_for_inputs();
    copies.begin_others();

    // Queries as float16 to shared memory, from there as fragments to registers.
    for (int v = warp; v < kQueries; v += warps) {
        HeadRow<width> x = {};
        if (v < piece.vectors) {
            const auto* from = vector_at(params, piece, params.q, params.q_stride, v);
            load_row(x, from, params.dtype, d, lane);
            if (is_codes(key_type)) rotate_row(x, d, lane);
        }
        store_row(queries + v * Shape::kQueryStride * 2, x, kF16, width, lane);
    }
    copies.meet();
    uint32_t q[tiles][width / 16][2];
    int positions[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const auto* row = reinterpret_cast<const __half*>(queries) +
                          (8 * n + lane / 4) * Shape::kQueryStride;
#pragma unroll
        for (int k = 0; k < width / 16; ++k) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const __half2 two = __halves2half2(row[Keys::query_element(k, lane % 4, r, 0)],
                                                   row[Keys::query_element(k, lane % 4, r, 1)]);
                q[n][k][r] = bits_of(__hmul2(two, Keys::query_unit(r)));
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int v = 8 * n + lane % 4 * 2 + j;
            positions[n][j] = piece.first_position + min(v / params.group, piece.rows - 1);
        }
    }

    Means<tiles> means = {};
    if constexpr (is_codes(key_type)) find_means<key_type, width, tiles>(means, q, lane);

    uint32_t less[4] = {};
    if constexpr (is_codes(value_type)) {
        Values::less_middle(less, reinterpret_cast<uint8_t*>(stats + warp * 8), lane);
    }
    Running<width, tiles> run;
    run.start();
    // From this key on every row's window has begun.
    const int all_begin =
        params.window > 0 ? max(0, piece.first_position + piece.rows - params.window) : 0;
    for (int step = piece.begin + warp; step < piece.end; step += warps) {
        uint8_t* rows = copies.take();
        const int first_key = step * kStep;
        if (first_key < piece.begin_key || first_key + kStep > piece.end_key) {
            clear_hidden(rows + Shape::kKeyBytes, Values::kStride, kStep,
                         piece.begin_key - first_key, piece.end_key - first_key, lane, kWarp);
            copies.fence();
            __syncwarp();
        }
        const bool masked =
            first_key < all_begin || first_key + kStep > piece.first_position + 1;
        attend_step<key_type, value_type, width, tiles>(
            params, rows, first_key, masked, positions, q, means, less, run, lane
        );
        copies.give_back();
    }
    copies.finish();
    __syncthreads();  // the warps' results take the place of what was staged

    float* results = reinterpret_cast<float*>(staged);
    store_results<value_type, width, tiles>(run, results, stats, warp, lane);
    __syncthreads();
    float* partials = nullptr;
    float2* partial_stats = nullptr;
    const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + kv_head;
    if (piece.splits > 1) {
        partials = params.partials + item * params.splits * kQueries * (width + 2);
        partial_stats = reinterpret_cast<float2*>(
            partials + static_cast<int64_t>(params.splits) * kQueries * width
        );
    }
    const int split = blockIdx.x;  // 0 where there is one
    merge_warps<width, kQueries>(
        results, stats, piece.vectors, partials + split * kQueries * width,
        partial_stats + split * kQueries, warp, warps, lane
    );
    // Where results go, which is known before they are: asked for early.
    Places<width> places;
    const bool is_placed = params.places != nullptr;
    if (is_placed && warp < piece.vectors) {
        load_places<width>(places, params, kv_head * params.group + warp % params.group, lane);
    }
    int parts = 1;
    if (piece.splits > 1) {
        if (!arrives_last(params.counters + item, piece.splits)) return;
        parts = add_splits<width, kQueries>(
            results, stats, piece.vectors, partials, partial_stats, piece.splits, warp, warps, lane
        );
    }
    __syncthreads();
    for (int v = warp; v < piece.vectors; v += warps) {
        HeadRow<width> x;
        load_row(x, results + v * (width + 4), kF32, width, lane);
        for (int part = 1; part < parts; ++part) {
            HeadRow<width> more;
            load_row(more, results + (part * kQueries + v) * (width + 4), kF32, width, lane);
#pragma unroll
            for (int u = 0; u < width / kUnit; ++u) x[u].x += more[u].x, x[u].y += more[u].y;
        }
        if (is_codes(value_type)) rotate_row(x, d, lane);
        if (!is_placed) {
            store_row(
                vector_at(params, piece, params.out, params.out_stride, v), x, params.dtype, d, lane
            );
            continue;
        }
        const int head = kv_head * params.group + v % params.group;
        if (v > warp) load_places<width>(places, params, head, lane);
        place_row<width>(params, piece.first_row + v / params.group, x, places, lane);
    }
}

}  // namespace exl::cuda

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
    for (int v = warp; v < vectors; v += warps) {
        float peak = -INFINITY;
        for (int w = 0; w < warps; ++w) peak = fmaxf(peak, stats[2 * w * queries + v]);
        const float base = peak == -INFINITY ? 0.0f : peak;
        float factors[kDecodeWarps];
        float weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) {
            factors[w] = 0.0f;
            if (w >= warps) continue;
            factors[w] = exp2_of(stats[2 * w * queries + v] - base);
            weight += factors[w] * stats[(2 * w + 1) * queries + v];
        }
        const float by = partials == nullptr ? 1.0f / weight : 1.0f;
        for (int i = 4 * lane; i < width; i += 4 * kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                if (w >= warps) continue;
                const float4 x = *reinterpret_cast<const float4*>(
                    results + (w * queries + v) * (width + 4) + i
                );
                sum.x += factors[w] * x.x;
                sum.y += factors[w] * x.y;
                sum.z += factors[w] * x.z;
                sum.w += factors[w] * x.w;
            }
            sum = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
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

// Adds the splits' partial results, in their order, to `results`.
template <int width, int queries>
__device__ __forceinline__ void add_splits(
    float* results, float* shares, int vectors, const float* partials, const float2* partial_stats,
    int splits, int warp, int warps, int lane
) {
    // Loads on their way at once: two threads share a quad where four vectors of 128 fill half a
    // block, and eight heads have 33 splits on 132 multiprocessors.
    constexpr int kAhead = 17;
    const int quads = vectors * (width / 4);
    const int threads = warps * kWarp;
    const int sharing = quads < threads ? min(threads / quads, warps) : 1;
    const int own = sharing == 1 ? 0 : threadIdx.x / quads;  // of the splits, each `sharing`-th
    const auto load = [&](float4 (&to)[kAhead], int quad, int first) {
        const auto* from = reinterpret_cast<const float4*>(partials) + quad;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int split = first + i * sharing;
            if (split < splits) to[i] = __ldcg(from + split * (queries * width / 4));
        }
    };
    float4 x[kAhead];
    const int first_quad = own < sharing ? threadIdx.x - own * quads : quads;
    if (first_quad < quads) load(x, first_quad, own);  // while shares are worked out
    for (int v = warp; v < vectors; v += warps) {
        float2 mine[kMaxSplits / kWarp];
        float peak = -INFINITY;
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = i * kWarp + lane;
            mine[i] = make_float2(-INFINITY, 0.0f);
            if (split < splits) mine[i] = __ldcg(partial_stats + split * queries + v);
            peak = fmaxf(peak, mine[i].x);
        }
        peak = warp_max(peak);
        const float base = peak == -INFINITY ? 0.0f : peak;
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            mine[i].x = exp2_of(mine[i].x - base);
            weight += mine[i].x * mine[i].y;
        }
        weight = warp_sum(weight);
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = i * kWarp + lane;
            if (split < splits) shares[split * queries + v] = mine[i].x / weight;
        }
    }
    __syncthreads();
    const auto place_of = [&](int quad, int part) {
        const int row = part * queries + quad / (width / 4);
        return reinterpret_cast<float4*>(results + row * (width + 4) + quad % (width / 4) * 4);
    };
    for (int quad = first_quad; quad < quads; quad += sharing == 1 ? threads : quads) {
        const int v = quad / (width / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int first = own; first < splits; first += kAhead * sharing) {
            if (first != own || quad != first_quad) load(x, quad, first);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int split = first + i * sharing;
                if (split >= splits) continue;
                const float share = shares[split * queries + v];
                sum.x += share * x[i].x;
                sum.y += share * x[i].y;
                sum.z += share * x[i].z;
                sum.w += share * x[i].w;
            }
        }
        *place_of(quad, own) = sum;
    }
    if (sharing == 1) return;
    __syncthreads();
    if (own > 0) return;
    float4 sum = *place_of(first_quad, 0);
    for (int part = 1; part < sharing; ++part) {
        const float4 more = *place_of(first_quad, part);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    *place_of(first_quad, 0) = sum;
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
        Row x = {};
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
    if (piece.splits == 1) {
        merge_warps<width, kQueries>(
            results, stats, piece.vectors, nullptr, nullptr, warp, warps, lane
        );
    } else {
        const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + kv_head;
        const int64_t split = blockIdx.x;
        float* partials = params.partials + item * params.splits * kQueries * (width + 2);
        auto* partial_stats = reinterpret_cast<float2*>(
            partials + static_cast<int64_t>(params.splits) * kQueries * width
        );
        merge_warps<width, kQueries>(
            results, stats, piece.vectors, partials + split * kQueries * width,
            partial_stats + split * kQueries, warp, warps, lane
        );
        if (!arrives_last(params.counters + item, piece.splits)) return;
        add_splits<width, kQueries>(
            results, stats, piece.vectors, partials, partial_stats, piece.splits, warp, warps, lane
        );
    }
    __syncthreads();
    for (int v = warp; v < piece.vectors; v += warps) {
        Row x;
        load_row(x, results + v * (width + 4), kF32, d, lane);
        if (is_codes(value_type)) rotate_row(x, d, lane);
        if (params.places == nullptr) {
            store_row(
                vector_at(params, piece, params.out, params.out_stride, v), x, params.dtype, d, lane
            );
        } else {
            const int head = kv_head * params.group + v % params.group;
            place_row(params, piece.first_row + v / params.group, head, x, lane);
        }
    }
}

}  // namespace exl::cuda

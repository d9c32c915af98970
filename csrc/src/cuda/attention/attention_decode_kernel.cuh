// The decode attention kernel; attention_decode.cuh describes its mapping. After the walk over the
// keys its epilogue merges the warps' results and, if keys are split, adds the splits' results.
#pragma once

#include "cuda/attention/attention_decode_copies.cuh"
#include "cuda/attention/attention_decode_heads.cuh"
#include "cuda/attention/attention_merge.cuh"

namespace exl::cuda {

// Address of the result of query vector v at `base`, where rows are `stride` elements apart.
__device__ __forceinline__ uint8_t* vector_at(
    const AttentionParams& params, const WorkItem& work, const void* base, int64_t stride, int v
) {
    const int64_t row = work.first_row + v / params.group;
    const int head = static_cast<int>(blockIdx.y) * params.group + v % params.group;
    const int64_t at = row * stride + static_cast<int64_t>(head) * params.d;
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(base)) +
           at * (params.dtype == kF16 ? 2 : 4);
}

// Stores the warps' results in shared memory, one after the other.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void store_results(
    const SoftmaxState<width, tiles>& state, float* results, float* stats, int warp, int lane
) {
    constexpr int kQueries = 8 * tiles;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float weight = state.weight[n][j];
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2) {
                weight += __shfl_xor_sync(0xffffffffu, weight, step);
            }
            const int v = 8 * n + lane % 4 * 2 + j;
            if (lane < 4) {
                // The weights are relative to this exponent, as is the weight of a sink.
                stats[2 * warp * kQueries + v] = state.peak[n][j] - weight_lift(value_type);
                stats[(2 * warp + 1) * kQueries + v] = weight;
            }
            float* to = results + (warp * kQueries + v) * (width + 4);
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
                using Values = ValueFragments<value_type, width>;
                const auto& sums = state.sums[tile][n];
                to[Values::element(tile, lane / 4, 0)] = Values::factor(0) * sums[j];
                to[Values::element(tile, lane / 4, 1)] = Values::factor(1) * sums[2 + j];
            }
        }
    }
}

// Adds the warps' results. If `partials` is null, sums are divided by their weight and replace the
// first warp's results. Otherwise they go to `partials` undivided, with peak and weight in
// `partial_stats`. merge_chains takes its place in the batch-invariant mode.
template <int width, int queries>
__device__ __forceinline__ void merge_warps(
    float* results, const float* stats, int vectors, float* partials, float2* partial_stats,
    const AttentionParams& params, int kv_head, int warp, int warps, int lane
) {
    static_assert(kDecodeWarps == 8);
    for (int v = warp; v < vectors; v += warps) {
        // Lane l has the peak and the weight of warp l % 8: -infinity and 0 if that had no keys.
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
        if (partials == nullptr) {
            weight += sink_weight(params, kv_head * params.group + v % params.group, peak);
        }
        const float by_weight = partials == nullptr ? __fdividef(1.0f, weight) : 1.0f;
        factor *= by_weight;
#pragma unroll
        for (int i = 4 * lane; i < width; i += 4 * kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
            for (int other = 0; other < warps; ++other) {
                const float4 x = *reinterpret_cast<const float4*>(
                    results + (other * queries + v) * (width + 4) + i
                );
                constexpr uint32_t kLanes = width < 4 * kWarp ? 0xffffu : 0xffffffffu;
                const float by = __shfl_sync(kLanes, factor, other);
                sum.x += by * x.x;
                sum.y += by * x.y;
                sum.z += by * x.z;
                sum.w += by * x.w;
            }
            // Overwriting is safe: no other warp reads this query's results, and this lane has
            // already read the ones it overwrites.
            float* to = partials == nullptr ? results + v * (width + 4) : partials + v * width;
            *reinterpret_cast<float4*>(to + i) = sum;
        }
        if (partials != nullptr && lane == 0) partial_stats[v] = make_float2(peak, weight);
    }
}

// True in the last of the `splits` blocks that arrive at `counter`. The partial results of all of
// them are visible to it, and the counter is zero again.
__device__ __forceinline__ bool arrives_last(unsigned* counter, int splits) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
        is_last = before == static_cast<unsigned>(splits) - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    return is_last;
}

// Computes the factor of each split's sums from the splits' peaks and weights. Lane l has those of
// splits l, l + 32, ..., which are `count` per lane.
template <int count>
__device__ __forceinline__ void compute_shares(
    float2 (&mine)[count], float* shares, const AttentionParams& params, int head, int lane
) {
    float peak = -INFINITY, weight = 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) peak = fmaxf(peak, mine[i].x);
    peak = warp_max(peak);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        mine[i].x = exp2_of(mine[i].x - (peak == -INFINITY ? 0.0f : peak));
        weight += mine[i].x * mine[i].y;
    }
    const float by = __fdividef(1.0f, warp_sum(weight) + sink_weight(params, head, peak));
#pragma unroll
    for (int i = 0; i < count; ++i) shares[i * kWarp + lane] = mine[i].x * by;
    __syncwarp();
}

// Adds the partial results of splits 0 .. end_split - 1 in a fixed order and stores the sums as rows
// of `results`. If there are more warps than vectors, several warps share a vector,
// and each adds a part of its splits: part p of vector v is row p * `queries` + v. Returns the
// number of parts, whose sums the caller adds.
template <int width, int queries>
__device__ __forceinline__ int add_splits(
    float* results, float* shares, int vectors, const float* partials, const float2* partial_stats,
    int end_split, const AttentionParams& params, int kv_head, int warp, int warps, int lane
) {
    // Loads in flight per lane. 17 are half of 33 splits: eight kv heads have 33 splits on 132
    // multiprocessors, and with four vectors two warps share a vector.
    constexpr int kInFlight = 17;
    constexpr int kQuads = width / 4;  // groups of four elements in a vector
    // Lanes that read the same quads, each of other splits.
    constexpr int kLanesPerQuad = kQuads < kWarp ? kWarp / kQuads : 1;
    const int parts = max(1, warps / vectors);
    const int split_step = parts * kLanesPerQuad;
    shares += warp * kMaxSplits;
    for (int item = warp; item < vectors * parts; item += warps) {
        const int part = item / vectors, v = item - part * vectors;
        const int own = part * kLanesPerQuad + lane / kQuads % kLanesPerQuad;
        float2 mine[kMaxSplits / kWarp];
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = i * kWarp + lane;
            mine[i] = make_float2(-INFINITY, 0.0f);
            if (split < end_split) mine[i] = __ldcg(partial_stats + split * queries + v);
        }
        constexpr int kRow = queries * kQuads;
        const auto* from =
            reinterpret_cast<const float4*>(partials) + own * kRow + v * kQuads + lane % kQuads;
        float* to = results + (part * queries + v) * (width + 4) + lane % kQuads * 4;
        for (int quad = 0; quad < kQuads; quad += kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int first = 0; first < end_split; first += kInFlight * split_step) {
                float4 x[kInFlight];
                const auto* at = from + first * kRow + quad;
                int left = end_split - own - first;
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (left > 0) x[i] = __ldcg(at);
                    at += split_step * kRow;
                    left -= split_step;
                }
                if (first == 0 && quad == 0) {
                    const int head = kv_head * params.group + v % params.group;
                    compute_shares<kMaxSplits / kWarp>(mine, shares, params, head, lane);
                }
                const float* share = shares + own + first;
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    const float by = share[min(i * split_step, kMaxSplits - 1 - own - first)];
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
        __syncwarp();  // all lanes have read the shares
    }
    return parts;
}

template <int key_type, int value_type, int width, int tiles, bool has_producer, bool is_invariant>
__global__ void __launch_bounds__(
    (kDecodeWarps + has_producer) * kWarp, width* tiles <= 128 ? 2 : 1
) decode_kernel(const AttentionParams params) {
    if constexpr (has_producer && !EXL_IS_HOPPER) return;  // never launched
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kQueries = Shape::kQueries;
    constexpr int kStep = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    const int warps = blockDim.x / kWarp - has_producer;  // warps that compute
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const WorkItem work = work_item_of<is_invariant>(params, kQueries, kStep, warps);
    if (work.splits == 0) {
        wait_for_inputs();
        return;
    }
    const int kv_head = blockIdx.y;
    const int d = params.d;

    uint8_t* queries = shared;
    float* stats = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
    uint8_t* new_rows = shared + Shape::kQueryBytes + Shape::kStatBytes;
    uint8_t* staged = shared + Shape::kStaged;
    StepCopies<key_type, value_type, width, has_producer, is_invariant> copies(
        params, work, staged, warp, warps, lane
    );
    if (has_producer && warp == warps) {
        copies.produce();
        return;
    }
    // Prefetch keys and values of earlier passes. Those of this pass, and the queries, exist only
    // after the wait.
    copies.prefetch_past();
    // Only the block that has a sequence's last keys writes its new ones.
    const bool has_new =
        params.new_rows.slots != nullptr && work.split + 1 == work.first_split + work.splits;
    // A first iteration with `is_real` false is the warm-up pass (kWarmUpRows in common.cuh).
#pragma unroll 1
    for (bool is_real = !params.warms_up;; is_real = true) {
        const Angles<width> angles(params, work, lane);
        if (is_real) wait_for_inputs();
        if (is_real) copies.prefetch_new();
        read_heads<key_type, value_type, width, tiles>(
            params, work, angles, queries, new_rows, has_new, is_real, warp, warps, lane
        );
        if (is_real) break;
    }
    copies.sync();
    uint32_t q[tiles][width / 16][2];
    load_queries<key_type, width, tiles>(q, queries, lane);
    int positions[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int v = 8 * n + lane % 4 * 2 + j;
            positions[n][j] = work.first_position + min(v / params.group, work.rows - 1);
        }
    }

    Means<tiles> means = {};
    if constexpr (is_codes(key_type)) compute_means<key_type, width, tiles>(means, q, lane);

    uint32_t minus_middle[4] = {};
    if constexpr (is_codes(value_type)) {
        Values::minus_middle(minus_middle, reinterpret_cast<uint8_t*>(stats + warp * 8), lane);
    }
    SoftmaxState<width, tiles> state;
    state.start();
    // First key that is within the windows of all rows.
    const int common_begin =
        params.window > 0 ? max(0, work.first_position + work.rows - params.window) : 0;
    const WarpSteps steps = steps_of<is_invariant>(work, warp, warps);
    for (int step = steps.begin; step < steps.end; step += steps.stride) {
        uint8_t* rows = copies.acquire();
        const int first_key = step * kStep;
        const bool gets_new = has_new && first_key + kStep > work.first_position;
        if (first_key < work.begin_key || first_key + kStep > work.end_key || gets_new) {
            clear_hidden(
                rows + Shape::kKeyBytes, Values::kStride, kStep, work.begin_key - first_key,
                work.end_key - first_key, lane, kWarp
            );
            if (gets_new) {
                const int at = work.first_position - first_key;
                uint8_t* value = rows + Shape::kKeyBytes + at * Values::kStride;
                copy_row<key_type, width>(rows + at * Keys::kStride, new_rows, lane);
                copy_row<value_type, width>(value, new_rows + Shape::kNewKeyBytes, lane);
            }
            copies.fence();
            __syncwarp();
        }
        const bool masked = first_key < common_begin || first_key + kStep > work.first_position + 1;
        attend_steps<key_type, value_type, width, tiles>(
            params, rows, rows + Shape::kKeyBytes, first_key, masked, positions, q, means,
            minus_middle, state, lane
        );
        copies.release();
    }
    copies.finish();
    __syncthreads();  // the warps' results overwrite the staging buffers

    float* results = reinterpret_cast<float*>(staged);
    store_results<value_type, width, tiles>(state, results, stats, warp, lane);
    __syncthreads();
    float* partials = nullptr;
    float2* partial_stats = nullptr;
    const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + kv_head;
    if (work.splits > 1) {
        partials = params.partials + item * params.splits * kQueries * (width + 2);
        partial_stats = reinterpret_cast<float2*>(
            partials + static_cast<int64_t>(params.splits) * kQueries * width
        );
    }
    float* own_partials = partials == nullptr ? nullptr : partials + work.split * kQueries * width;
    if constexpr (is_invariant) {
        merge_chains<width, kQueries>(
            results, stats, work.vectors, own_partials, partial_stats + work.split * kQueries,
            params, kv_head, warp, warps, lane
        );
    } else {
        merge_warps<width, kQueries>(
            results, stats, work.vectors, own_partials, partial_stats + work.split * kQueries,
            params, kv_head, warp, warps, lane
        );
    }
    // Load the permutation early: it does not depend on the results.
    Permutation<width> permutation;
    const bool is_permuted = params.permutation != nullptr;
    if (is_permuted && warp < work.vectors) {
        const int head = kv_head * params.group + warp % params.group;
        load_permutation<width>(permutation, params, head, lane);
    }
    int parts = 1;
    if (work.splits > 1) {
        if (!arrives_last(params.counters + item, work.splits)) return;
        if constexpr (is_invariant) {
            merge_partitions<width, kQueries, kMaxSplits>(
                results, work.vectors, partials, partial_stats, work.first_split,
                work.first_split + work.splits, params, kv_head, warp, warps, lane
            );
        } else {
            parts = add_splits<width, kQueries>(
                results, stats, work.vectors, partials, partial_stats, work.splits, params, kv_head,
                warp, warps, lane
            );
        }
    }
    __syncthreads();
    for (int v = warp; v < work.vectors; v += warps) {
        HeadRow<width> x;
        load_row(x, results + v * (width + 4), kF32, width, lane);
        for (int part = 1; part < parts; ++part) {
            HeadRow<width> more;
            load_row(more, results + (part * kQueries + v) * (width + 4), kF32, width, lane);
#pragma unroll
            for (int u = 0; u < width / kUnit; ++u) x[u].x += more[u].x, x[u].y += more[u].y;
        }
        if (is_codes(value_type)) hadamard_row(x, d, lane);
        if (!is_permuted) {
            store_row(
                vector_at(params, work, params.out, params.out_stride, v), x, params.dtype, d, lane
            );
            continue;
        }
        const int head = kv_head * params.group + v % params.group;
        if (v > warp) load_permutation<width>(permutation, params, head, lane);
        store_permuted<width>(params, work.first_row + v / params.group, x, permutation, lane);
    }
}

}  // namespace exl::cuda

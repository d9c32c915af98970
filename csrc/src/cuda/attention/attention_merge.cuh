// Batch-invariant mode: merges of results over consecutive keys, in the order of the keys.
//
// A result is a peak (maximum score), a weight (sum of exponentials relative to the peak) and sums
// of values. The decode kernel and the prompt kernel compute the same bits, so every operation
// here rounds explicitly: the compiler may not fuse it with others.
#pragma once

#include "cuda/attention/attention.cuh"

namespace exl::cuda {

// Factors that bring the result so far and the next one to their common peak.
struct MergeFactors {
    float before, next;
};

// Exponent that weights with this peak are relative to: 0 while there are none.
__device__ __forceinline__ float base_of(float peak) { return peak == -INFINITY ? 0.0f : peak; }

// Also updates `peak`, that of the result so far.
__device__ __forceinline__ MergeFactors merge_factors(float& peak, float next) {
    const float top = fmaxf(peak, next), base = base_of(top);
    const MergeFactors by = {exp2_of(peak - base), exp2_of(next - base)};
    peak = top;
    return by;
}
__device__ __forceinline__ float merged(float sum, float next, const MergeFactors& by) {
    return __fmaf_rn(next, by.next, __fmul_rn(sum, by.before));
}
__device__ __forceinline__ void merge(float4& sum, const float4& next, const MergeFactors& by) {
    sum.x = merged(sum.x, next.x, by), sum.y = merged(sum.y, next.y, by);
    sum.z = merged(sum.z, next.z, by), sum.w = merged(sum.w, next.w, by);
}

// Factor of all sums: 1 / (weight + weight of a sink).
__device__ __forceinline__ float final_factor(
    const AttentionParams& params, int head, float peak, float weight
) {
    float y;
    const float all = __fadd_rn(weight, sink_weight(params, head, peak));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(all));
    return y;
}
// Results are never -0: whether a sum of zeros is -0 may depend on keys that the row does not see.
__device__ __forceinline__ float finished(float sum, float factor) {
    return __fadd_rn(__fmul_rn(sum, factor), 0.0f);
}
__device__ __forceinline__ float4 finished(const float4& sum, float factor) {
    return make_float4(
        finished(sum.x, factor), finished(sum.y, factor), finished(sum.z, factor),
        finished(sum.w, factor)
    );
}

// Merge factors of 32 results in a row, one per lane. `before` is the peak of the results before
// them and becomes that of all.
__device__ __forceinline__ MergeFactors merge_factors_of_lanes(float& before, float own, int lane) {
    float peak = own;  // of the lanes up to this one
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, peak, step);
        if (lane >= step) peak = fmaxf(peak, other);
    }
    peak = fmaxf(peak, before);
    float last = __shfl_up_sync(0xffffffffu, peak, 1);
    if (lane == 0) last = before;
    before = __shfl_sync(0xffffffffu, peak, kWarp - 1);
    return merge_factors(last, own);
}
__device__ __forceinline__ MergeFactors factors_of_lane(const MergeFactors& by, int lane) {
    return {__shfl_sync(0xffffffffu, by.before, lane), __shfl_sync(0xffffffffu, by.next, lane)};
}

// Merges the results of the chains of a partition: peaks and weights in `stats`, sums in `results`,
// as in merge_warps. If `partials` is null, the row's result replaces the first chain's. Otherwise
// the partition's goes to `partials`, with peak and weight in `partial_stats`.
template <int width, int queries>
__device__ __forceinline__ void merge_chains(
    float* results, const float* stats, int vectors, float* partials, float2* partial_stats,
    const AttentionParams& params, int kv_head, int warp, int warps, int lane
) {
    for (int v = warp; v < vectors; v += warps) {
        const bool has_chain = lane < warps;
        const float own = has_chain ? stats[2 * lane * queries + v] : -INFINITY;
        const float own_weight = has_chain ? stats[(2 * lane + 1) * queries + v] : 0.0f;
        float peak = -INFINITY, weight = 0.0f;
        const MergeFactors factors = merge_factors_of_lanes(peak, own, lane);
        float4 sums[width < 4 * kWarp ? 1 : width / 4 / kWarp] = {};
        for (int chain = 0; chain < warps; ++chain) {
            const MergeFactors by = factors_of_lane(factors, chain);
            weight = merged(weight, __shfl_sync(0xffffffffu, own_weight, chain), by);
#pragma unroll
            for (int i = 0; 4 * (i * kWarp) < width; ++i) {
                const int at = 4 * (i * kWarp + lane);
                if (at >= width) break;
                const float* from = results + (chain * queries + v) * (width + 4) + at;
                merge(sums[i], *reinterpret_cast<const float4*>(from), by);
            }
        }
        const bool is_last = partials == nullptr;
        const int head = kv_head * params.group + v % params.group;
        const float factor = is_last ? final_factor(params, head, peak, weight) : 1.0f;
        // Overwriting is safe: no other warp reads this query's results.
        __syncwarp();
        float* to = is_last ? results + v * (width + 4) : partials + v * width;
#pragma unroll
        for (int i = 0; 4 * (i * kWarp) < width; ++i) {
            const int at = 4 * (i * kWarp + lane);
            if (at >= width) break;
            *reinterpret_cast<float4*>(to + at) = is_last ? finished(sums[i], factor) : sums[i];
        }
        if (!is_last && lane == 0) partial_stats[v] = make_float2(peak, weight);
    }
}

// Merge factors of all splits: lane l has those of splits l, l + 32, ... `own` are their peaks and
// weights; splits that do not exist have -infinity and 0. Returns the peak of all.
template <int count>
__device__ __forceinline__ float merge_factors_of_splits(
    MergeFactors (&factors)[count], const float2 (&own)[count], int lane
) {
    float peak = -INFINITY;
#pragma unroll
    for (int i = 0; i < count; ++i) factors[i] = merge_factors_of_lanes(peak, own[i].x, lane);
    return peak;
}

// Merges the results of partitions first .. end - 1 and stores the rows' in `results`.
template <int width, int queries, int max_splits>
__device__ __forceinline__ void merge_partitions(
    float* results, int vectors, const float* partials, const float2* partial_stats, int first,
    int end, const AttentionParams& params, int kv_head, int warp, int warps, int lane
) {
    static_assert(max_splits == 2 * kWarp);
    constexpr int kInFlight = 16;  // loads per lane
    constexpr int kQuads = width / 4;
    for (int v = warp; v < vectors; v += warps) {
        float2 own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int split = i * kWarp + lane;
            own[i] = make_float2(-INFINITY, 0.0f);
            if (split >= first && split < end) own[i] = __ldcg(partial_stats + split * queries + v);
        }
        MergeFactors factors[2];
        float peak = -INFINITY;
#pragma unroll 1
        for (int quad = lane; quad - lane < kQuads; quad += kWarp) {
            const bool has_quad = quad < kQuads;
            const auto* from = reinterpret_cast<const float4*>(partials) + v * kQuads + quad;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float weight = 0.0f;
#pragma unroll 1
            for (int split = first; split < end; split += kInFlight) {
                float4 next[kInFlight] = {};
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    const bool is_real = has_quad && split + i < end;
                    if (is_real) next[i] = __ldcg(from + (split + i) * queries * kQuads);
                }
                // The factors are computed while the first results arrive.
                if (split == first) peak = merge_factors_of_splits(factors, own, lane);
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    if (split + i >= end) break;
                    const bool is_low = split + i < kWarp;
                    const MergeFactors all = {
                        is_low ? factors[0].before : factors[1].before,
                        is_low ? factors[0].next : factors[1].next
                    };
                    const int from_lane = (split + i) % kWarp;
                    const MergeFactors by = factors_of_lane(all, from_lane);
                    const float more = is_low ? own[0].y : own[1].y;
                    weight = merged(weight, __shfl_sync(0xffffffffu, more, from_lane), by);
                    merge(sum, next[i], by);
                }
            }
            const int head = kv_head * params.group + v % params.group;
            const float factor = final_factor(params, head, peak, weight);
            if (has_quad) {
                float* to = results + v * (width + 4) + 4 * quad;
                *reinterpret_cast<float4*>(to) = finished(sum, factor);
            }
        }
    }
}

}  // namespace exl::cuda

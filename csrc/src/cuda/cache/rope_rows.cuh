// Changes of a head's row before it is attended or cached: norm, RoPE, key smoothing.
//
// Contract   ExlRopeWrite in exl/cuda/cache.h.
// Mapping    A warp holds the row as `HeadRow` (kv_rows.cuh).
// Accuracy   float32, with the same explicitly rounded operations in every kernel: a row has the
//            same bits wherever it is computed.
#pragma once

#include "cuda/cache/kv_rows.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

template <int units>
__device__ __forceinline__ void norm_row(
    float2 (&x)[units], const float* weight, float eps, int d, int lane
) {
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < units; ++u)
        squares = __fmaf_rn(x[u].y, x[u].y, __fmaf_rn(x[u].x, x[u].x, squares));
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x *= factor * weight[i];
        x[u].y *= factor * weight[i + 1];
    }
}

// Key smoothing: x * scale + shift.
template <int units>
__device__ __forceinline__ void smooth_row(
    float2 (&x)[units], const float* scale, const float* shift, int d, int lane
) {
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x = fmaf(x[u].x, scale[i], shift[i]);
        x[u].y = fmaf(x[u].y, scale[i + 1], shift[i + 1]);
    }
}

// Cosines and signed sines of a lane's elements; 1 and 0 for elements that RoPE does not rotate.
template <int units>
__device__ __forceinline__ void load_angles(
    float2 (&cos)[units], float2 (&sin)[units], const float* cos_from, const float* sin_from,
    int half, int lane
) {
    if (half == kUnit) {  // heads of 128: an element's partner is in the same lane
        cos[0] = cos[1] = reinterpret_cast<const float2*>(cos_from)[lane];
        sin[1] = reinterpret_cast<const float2*>(sin_from)[lane];
        sin[0] = make_float2(-sin[1].x, -sin[1].y);
        return;
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
        float c[2], s[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = u * kUnit + 2 * lane + e;
            c[e] = i < half ? cos_from[i] : i < 2 * half ? cos_from[i - half] : 1.0f;
            s[e] = i < half ? -sin_from[i] : i < 2 * half ? sin_from[i - half] : 0.0f;
        }
        cos[u] = make_float2(c[0], c[1]);
        sin[u] = make_float2(s[0], s[1]);
    }
}

__device__ __forceinline__ float2 rotated(float2 x, float2 partner, float2 cos, float2 sin) {
    return make_float2(
        __fmaf_rn(x.x, cos.x, __fmul_rn(partner.x, sin.x)),
        __fmaf_rn(x.y, cos.y, __fmul_rn(partner.y, sin.y))
    );
}

// Applies RoPE to a row. The two elements of a pair are `half` apart. Unless they are in the same
// lane, they are exchanged through `scratch`, shared memory of this warp. The caller synchronizes
// the warp before the next call.
template <int units>
__device__ __forceinline__ void rope_row(
    float2 (&x)[units], const float2 (&cos)[units], const float2 (&sin)[units], int half, int d,
    float* scratch, int lane
) {
    if (half == kUnit) {
        const float2 low = x[0];
        x[0] = rotated(low, x[1], cos[0], sin[0]);
        x[1] = rotated(x[1], low, cos[1], sin[1]);
        return;
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i < d) *reinterpret_cast<float2*>(scratch + i) = x[u];
    }
    __syncwarp();
    const auto partner = [&](int i) {
        return i >= 2 * half ? 0.0f : scratch[i < half ? i + half : i - half];
    };
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u] = rotated(x[u], make_float2(partner(i), partner(i + 1)), cos[u], sin[u]);
    }
}

// The same as rope_row for an even `half`, without scratch memory: a pair's elements are exchanged
// between lanes.
template <int units>
__device__ __forceinline__ void rope_row_in_warp(
    float2 (&x)[units], const float2 (&cos)[units], const float2 (&sin)[units], int half, int lane
) {
    if (units > 1 && half == kUnit) {
        const float2 low = x[0];
        x[0] = rotated(low, x[1], cos[0], sin[0]);
        x[1] = rotated(x[1], low, cos[1], sin[1]);
        return;
    }
    float2 partners[units];
#pragma unroll
    for (int u = 0; u < units; ++u) {
        // This lane's pair of elements among all of the row, and that of its partner.
        const int own = u * kWarp + lane;
        const int other = own < half / 2 ? own + half / 2 : own - half / 2;
        partners[u] = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int from = 0; from < units; ++from) {
            const float a = __shfl_sync(0xffffffffu, x[from].x, other % kWarp);
            const float b = __shfl_sync(0xffffffffu, x[from].y, other % kWarp);
            if (own < half && other / kWarp == from) partners[u] = make_float2(a, b);
        }
    }
#pragma unroll
    for (int u = 0; u < units; ++u) x[u] = rotated(x[u], partners[u], cos[u], sin[u]);
}

}  // namespace exl::cuda

#endif  // __CUDACC__

// Activations, gated or not, for kernels and for the epilogues of linears.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/elementwise.h"
#include "exl/ops/elementwise.h"

#ifdef __CUDACC__

namespace exl::cuda {

// Uses the formulas of the reference backend. A plain activation is that of `gate`, with `up` 1.
__device__ __forceinline__ float gated(int kind, float gate, float up) {
    if (kind == EXL_GATE_SILU) return gate / (1.0f + __expf(-gate)) * up;
    if (kind == EXL_GATE_CLAMPED_SWIGLU) {
        // Comparisons with NaN are false, so that it stays visible.
        const float g = gate > kSwigluLimit ? kSwigluLimit : gate;
        const float below = up > kSwigluLimit ? kSwigluLimit : up;
        const float u = below < -kSwigluLimit ? -kSwigluLimit : below;
        return g / (1.0f + __expf(-kSwigluAlpha * g)) * (u + 1.0f);
    }
    // NaN stays NaN, because comparisons with it are false.
    if (kind == EXL_GATE_RELU2) return gate <= 0.0f ? 0.0f : gate * gate * up;
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner)) * up;
}

}  // namespace exl::cuda

#endif  // __CUDACC__

// Gate functions of gated activations, for kernels and for the epilogues of linears.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/elementwise.h"

#ifdef __CUDACC__

namespace exl::cuda {

// Uses the formulas of the reference backend.
__device__ __forceinline__ float gate_of(int kind, float x) {
    if (kind == EXL_GATE_SILU) return x / (1.0f + __expf(-x));
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

}  // namespace exl::cuda

#endif  // __CUDACC__

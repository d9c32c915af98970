// Norms, RoPE and gated activations of the CUDA library, on rows of activations.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Activations. Gated ones multiply act(gate) by `up`. Plain ones have no second operand.
enum {  // the first three have the same numbers as exl::Gate
    EXL_GATE_SILU = 0,
    EXL_GATE_GELU_TANH = 1,
    EXL_GATE_CLAMPED_SWIGLU = 2,  // gated only
    EXL_GATE_RELU2 = 3            // plain only: max(x, 0)^2
};

// out [m, d] = rms_norm(x [m, d]) * weight. x and out are float32 or float16, independently, and
// may be the same memory.
EXL_CUDA_API int exl_cuda_rms_norm(
    const void* x, int32_t x_dtype, int64_t x_stride, const float* weight, float eps, int32_t m,
    int32_t d, void* out, int32_t out_dtype, int64_t out_stride, void* stream
);
// The same for each head of x [rows, heads, d], in place. Rows are row_stride elements apart, heads
// are contiguous.
EXL_CUDA_API int exl_cuda_rms_norm_heads(
    void* x, int32_t dtype, int64_t row_stride, const float* weight, float eps, int32_t rows,
    int32_t heads, int32_t d, void* stream
);
// RoPE of x [rows, heads, d], in place. cos and sin, float32 [rows, half], rotate the pairs of
// elements (i, i + half).
EXL_CUDA_API int exl_cuda_rope(
    void* x, int32_t dtype, int64_t row_stride, const float* cos, const float* sin, int32_t half,
    int32_t rows, int32_t heads, int32_t d, void* stream
);
// out [m, d] = the gated activation of the halves of gate_up [m, 2 d], by EXL_GATE_*. Both are float32 or float16,
// independently.
EXL_CUDA_API int exl_cuda_gated_activation(
    const void* gate_up, int32_t x_dtype, int64_t x_stride, int32_t gate, int32_t m, int32_t d,
    void* out, int32_t out_dtype, int64_t out_stride, void* stream
);

// out [m, d] = act(x [m, d]), by a plain EXL_GATE_*. Both are float32 or float16, independently, and
// may be the same memory.
EXL_CUDA_API int exl_cuda_activation(
    const void* x, int32_t x_dtype, int64_t x_stride, int32_t kind, int32_t m, int32_t d, void* out,
    int32_t out_dtype, int64_t out_stride, void* stream
);

#ifdef __cplusplus
}
#endif

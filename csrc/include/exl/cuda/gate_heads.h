// Gated heads of the CUDA library: results of attention or of a recurrent mixer, times their gates.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// out [m, k] = x act(gate), with an RMSNorm of each head of head_dim elements: of x, or of the
// product. act is the sigmoid or SiLU. x, gate and out are float32 or float16, independently.
typedef struct {
    const void* x;  // [m, k]
    int64_t x_stride;
    const void* gate;  // [m, k]
    int64_t gate_stride;
    const float* norm;  // [norm_size], or null: no norm
    void* out;
    int64_t out_stride;
    // Null, or [k]: out receives prepared inputs of a linear, float16. m is at most
    // exl_cuda_max_prepared_rows then. With more than EXL_CUDA_TILE_ROWS rows they are interleaved
    // by rows (exl/cuda/linear.h).
    const int32_t* inverse_permutation;
    int32_t x_dtype;
    int32_t gate_dtype;
    int32_t out_dtype;
    int32_t m;
    int32_t k;
    int32_t head_dim;
    int32_t norm_size;  // head_dim, or k: factors of each head
    float eps;
    int32_t is_sigmoid;
    int32_t is_gate_first;  // the norm follows the product
    int32_t is_row_gate;    // gate is [m, 1]
} ExlGateHeads;
EXL_CUDA_API int exl_cuda_gate_heads(const ExlGateHeads* args, void* stream);

#ifdef __cplusplus
}
#endif

// Latent attention of the CUDA library: products of each head with a matrix of its own, for few
// rows.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_HEAD_COPIES 3
#define EXL_CUDA_MAX_HEAD_K 1024

// Values [m, heads, width], float32 or float16, that are copied beside the products: as they are,
// after an RMS norm of each row, which has one head then, or after RoPE of all elements. Strides are
// in elements. Null: nothing.
typedef struct {
    const void* from;
    int64_t row_stride;
    int64_t head_stride;
    void* to;  // float16
    int64_t to_row_stride;
    int64_t to_head_stride;
    const float* norm;  // [width], or null
    const float* cos;   // [m, width / 2] both, or null; the elements of a pair are width / 2 apart
    const float* sin;
    const int64_t* slots;  // [m]: row i goes to row slots[i] of `to`, a cache; or null
    int32_t dtype;
    int32_t heads;
    int32_t width;
    float eps;
} ExlHeadCopy;

// y[row, h] = x[row, h] @ weight[h], and copies. Sums are float32, in an order that depends on k
// alone: no bit of a row depends on the other rows.
typedef struct {
    const void* x;  // [m, heads, k] float32 or float16
    int64_t row_stride;
    int64_t head_stride;
    const void* weight;  // [heads, k, n] float16, at an address that is a multiple of 8
    void* y;             // [m, heads, n] float16
    int64_t y_row_stride;
    int64_t y_head_stride;
    // Null, or [heads * n]: y receives prepared inputs of a linear (exl/cuda/linear.h). m is at most
    // exl_cuda_max_prepared_rows then. With more than EXL_CUDA_TILE_ROWS rows they are interleaved by
    // rows.
    const int32_t* inverse_permutation;
    int32_t dtype;
    int32_t m;
    int32_t heads;
    int32_t k;  // at most EXL_CUDA_MAX_HEAD_K
    int32_t n;  // a multiple of 4
    int32_t reserved;
    ExlHeadCopy copies[EXL_CUDA_HEAD_COPIES];
} ExlHeadProducts;
EXL_CUDA_API int exl_cuda_head_products(const ExlHeadProducts* args, void* stream);

#ifdef __cplusplus
}
#endif

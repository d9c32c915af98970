// Product of one row's RMSNorm with quantized matrices, in one launch.
#pragma once

#include "exl/cuda/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_MAX_NORM_FEATURES 4096

// Row x [k], with k a multiple of 8 and at most EXL_CUDA_MAX_NORM_FEATURES. All pointers are
// multiples of 16.
typedef struct {
    const float* x;
    const float* weight;                 // [k]
    const int32_t* inverse_permutation;  // [k]: row of each feature, of every part
    float eps;
    int32_t reserved;
} ExlRowNorm;

// exl_cuda_quant_linear for the RMSNorm of x, whose `inputs` are not read. m is 1, the mode is not
// batch-invariant, and the parts have the same permutation, without padding.
EXL_CUDA_API int exl_cuda_norm_linear(
    const ExlRowNorm* norm, const ExlQuantLinear* args, void* stream
);

#ifdef __cplusplus
}
#endif

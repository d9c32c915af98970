// Products of few rows with trellis codes, from rows that are not prepared.
#pragma once

#include "exl/cuda/trellis.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rows x [m, in_features] float32 or float16, or rms_norm(x, norm, eps).
typedef struct {
    const void* x;
    int64_t x_stride;
    const float* norm;  // [in_features], or null: no norm
    float eps;
    int32_t x_dtype;
} ExlTrellisRows;

// As exl_cuda_trellis_linear, with inputs that the decode kernel prepares itself, in the form
// `integers`. The parts' `out` is not used. `sums` and parts of other codebooks than MUL1 are errors.
EXL_CUDA_API int exl_cuda_trellis_linear_rows(
    const ExlTrellisLinear* args, const ExlTrellisRows* x, void* stream
);
// Most rows of it for `count` parts with tiles of `tile_words` words and k inputs. May be 0.
EXL_CUDA_API int64_t exl_cuda_trellis_most_rows(int32_t tile_words, int32_t count, int32_t k);

#ifdef __cplusplus
}
#endif

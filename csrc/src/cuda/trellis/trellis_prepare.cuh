// Arguments of the kernels that prepare inputs (trellis_prepare.cu, trellis_prompt.cu).
#pragma once

#include "cuda/trellis/trellis_rows.cuh"

namespace exl::cuda::trellis {

struct PrepareArgs {
    const void* x;
    const float* norm;
    int64_t x_stride;
    float eps;
    int features, count, blocks;  // blocks: of the longest form
    bool is_aligned;
    Target to[EXL_TRELLIS_MAX_PARTS];
};

// Checks the operands of exl_cuda_trellis_prepare, and converts them. False: they are invalid.
bool convert(const ExlTrellisPrepare& args, PrepareArgs* operands);

}  // namespace exl::cuda::trellis

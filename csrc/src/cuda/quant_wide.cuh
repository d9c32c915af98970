// Quantized linears of more rows than a tile on compute capability 9.0 (quant_wide.cu).
#pragma once

#include "common.cuh"

namespace exl::cuda {

// Bytes that it needs, zero at first.
int64_t quant_wide_workspace();

// Rows first .. first + rows - 1 of the batch, which are a chunk.
cudaError_t quant_wide(
    const ExlQuantLinear& of, int first, int rows, const DeviceInfo& info, void* stream
);

}  // namespace exl::cuda

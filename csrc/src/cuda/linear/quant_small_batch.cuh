// Small-batch kernel: quantized linears of 9 to 64 rows on compute capability 9.0
// (quant_small_batch.cu).
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/exchange.h"

namespace exl::cuda {

// Size of its workspace in bytes. The caller zeroes the workspace before the first launch.
int64_t small_batch_workspace();

// Computes rows first .. first + rows - 1 of the batch, which are one chunk of the prepared inputs.
// In the batch-invariant mode they may also be several whole chunks. `copies` are those of the rows.
cudaError_t quant_small_batch(
    const ExlQuantLinear& call, const ExlPartialCopies& copies, int first, int rows,
    const DeviceInfo& info, void* stream
);

}  // namespace exl::cuda

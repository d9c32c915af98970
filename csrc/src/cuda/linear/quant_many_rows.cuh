// Many-rows kernel of the batch-invariant mode: quantized linears of several whole chunks of 64 rows
// on compute capability 9.0 (quant_many_rows.cu).
#pragma once

#include "cuda/linear/quant_small_batch_work.cuh"

namespace exl::cuda {

// Whether the kernel computes this launch faster than the small-batch kernel.
bool suits_many_rows(const SmallBatchArgs& args, const DeviceInfo& info);

// Computes args.num_chunks whole chunks. `args` has the partition of k that the mode chose, and
// `max_k_tile_bytes` is the largest k-tile of a panel in all parts.
cudaError_t quant_many_rows(
    const SmallBatchArgs& args, int max_k_tile_bytes, const DeviceInfo& info, void* stream
);

}  // namespace exl::cuda

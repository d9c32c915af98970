// Prepared inputs of quantized linears: index of an element, and rows that one call supports.
// Layout: exl/cuda/linear.h.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda {

// True if a chunk of `rows` rows is computed by the small-batch kernel (quant_small_batch.cu). The
// chunk's prepared inputs then have that kernel's layout.
inline bool is_small_batch(const DeviceInfo& info, int rows) {
    return info.capability == 90 && rows > EXL_CUDA_TILE_ROWS;
}

// Rows that the inputs of a batch-invariant linear are laid out for, at least: those of its kernel.
inline int least_invariant_rows(const DeviceInfo& info, bool has_integers) {
    return has_integers && is_small_batch(info, EXL_CUDA_CHUNK_ROWS) ? EXL_CUDA_TILE_ROWS + 1 : 2;
}

// Most rows that a gated linear can store pre-permuted for the next linear.
inline int max_prepared_rows(const DeviceInfo& info) {
    return is_small_batch(info, EXL_CUDA_CHUNK_ROWS) ? EXL_CUDA_CHUNK_ROWS : EXL_CUDA_TILE_ROWS;
}

#ifdef __CUDACC__

// Rows of a chunk in prepared inputs, padding included, for chunks of more than one row.
__device__ __forceinline__ int padded_rows(int rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}
// Index of an element in prepared inputs of up to 8 rows. `place` is the position of its input
// feature in the matrix's permutation.
__device__ __forceinline__ int prepared_at(int rows, int row, int place) {
    return rows == 1 ? place : place / 32 * 256 + row * 32 + place % 32;
}
// Index of an element in prepared inputs of more than 8 rows in the row-interleaved layout
// (`is_by_rows` in exl/cuda/linear.h).
__device__ __forceinline__ int prepared_by_rows_at(int rows, int row, int place) {
    __builtin_assume(rows > EXL_CUDA_TILE_ROWS);
    const int padded = padded_rows(rows), of_block = place % 32;
    return (place / 32 * 4 + of_block / 2 % 4) * 8 * padded + row / 8 * 64 +
           (of_block / 8 * 2 + of_block % 2) * 8 + row % 8;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

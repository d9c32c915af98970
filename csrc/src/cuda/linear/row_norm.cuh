// RMSNorm of a single row inside of the thread blocks that multiply it: prepared inputs in shared
// memory. It replaces a launch that prepares them (prepare.cu) for short rows.
//
// Contract   exl_cuda_norm_linear in exl/cuda/norm_linear.h.
// Mapping    Every block reads the whole row, eight values per thread and vector, and scatters them
//            to their places.
// Accuracy   As in prepare.cu: float32 squares, in an order of its own.
#pragma once

#include "cuda/common/rows.cuh"
#include "exl/cuda/norm_linear.h"

namespace exl::cuda {

// x null: there is no norm, inputs are prepared.
struct RowNorm {
    const float* x;
    const float* weight;
    const int32_t* places;  // of the features among the prepared inputs
    float eps;
    int k;

    // Shared memory of the inputs, and of what kernels may read after the last one.
    int shared_bytes() const { return x == nullptr ? 0 : 2 * (k + 32 * EXL_CUDA_PAD_BLOCKS); }
};

#ifdef __CUDACC__

// All threads of the block call this. `partial` is scratch for a float per warp. In the warm-up pass
// (not is_real) the row is not read: an earlier kernel may still be writing it.
template <int threads>
__device__ __forceinline__ void normalize_row(
    const RowNorm& norm, __half* to, float* partial, bool is_real
) {
    constexpr int kVectors = EXL_CUDA_MAX_NORM_FEATURES / threads / kVector;
    const float* x = is_real ? norm.x : norm.weight;
    float4 values[kVectors][2];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int i = kVector * (v * threads + threadIdx.x);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            values[v][h] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            // Not from the L1 cache, which earlier kernels on this multiprocessor may have filled.
            if (i < norm.k) values[v][h] = __ldcg(reinterpret_cast<const float4*>(x + i) + h);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4& four = values[v][h];
            squares = __fmaf_rn(four.x, four.x, squares);
            squares = __fmaf_rn(four.y, four.y, squares);
            squares = __fmaf_rn(four.z, four.z, squares);
            squares = __fmaf_rn(four.w, four.w, squares);
        }
    }
    const float sum = block_sum<threads / kWarp>(squares, partial);
    const float factor = rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(norm.k)), norm.eps));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int i = kVector * (v * threads + threadIdx.x);
        if (i >= norm.k) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4& four = values[v][h];
            const float4 by = reinterpret_cast<const float4*>(norm.weight + i)[h];
            const int4 places = reinterpret_cast<const int4*>(norm.places + i)[h];
            to[places.x] = from_float<__half>(four.x * by.x * factor);
            to[places.y] = from_float<__half>(four.y * by.y * factor);
            to[places.z] = from_float<__half>(four.z * by.z * factor);
            to[places.w] = from_float<__half>(four.w * by.w * factor);
        }
    }
    __syncthreads();
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// Rows of activations, eight values at a time; sums over a thread block.
#pragma once

#include "common.cuh"

namespace exl::cuda {

constexpr int kVector = 8;  // values that a thread takes at a time: 16 bytes of float16

#ifdef __CUDACC__

// `count` (at most 8) values as float, zeros after them. Whole and aligned to 16 bytes they are read
// 16 bytes at a time.
template <class T>
__device__ __forceinline__ void load_vector(
    const T* from, int count, bool is_aligned, float (&to)[kVector]
) {
    if (is_aligned && count >= kVector) {
        constexpr int kLoads = kVector * sizeof(T) / 16;
        uint4 raw[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
        const T* values = reinterpret_cast<const T*>(raw);
#pragma unroll
        for (int i = 0; i < kVector; ++i) to[i] = to_float(values[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = i < count ? to_float(from[i]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_vector(
    T* to, int count, bool is_aligned, const float (&from)[kVector]
) {
    if (is_aligned && count >= kVector) {
        constexpr int kStores = kVector * sizeof(T) / 16;
        alignas(16) T values[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = from_float<T>(from[i]);
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(values)[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < count) to[i] = from_float<T>(from[i]);
    }
}

// Sum over a block of `warps` warps (at most 32), the same in every thread. `partial` is shared and
// not in use; what threads wrote to shared memory before, all of them see after.
template <int warps>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    const float sum = warp_sum(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

#endif  // __CUDACC__

// Can rows `stride` elements of `bytes` apart be read 16 bytes at a time?
inline bool rows_are_aligned(const void* first, int64_t stride, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride * bytes % 16 == 0;
}

inline int64_t float_bytes(int type) { return type == kF32 ? 4 : 2; }

}  // namespace exl::cuda

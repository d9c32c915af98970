// Loads and stores of activation rows, eight values at a time, and a sum over a thread block.
#pragma once

#include "cuda/common/common.cuh"

namespace exl::cuda {

constexpr int kVector = 8;  // values per thread and load: 16 bytes of float16

#ifdef __CUDACC__

// Eight values before conversion to float. Several loads can be in flight before the first value is
// converted.
template <class T>
struct Vector {
    uint4 raw[kVector * sizeof(T) / 16];

    __device__ __forceinline__ void to_floats(float (&to)[kVector]) const {
        const T* values = reinterpret_cast<const T*>(raw);
#pragma unroll
        for (int i = 0; i < kVector; ++i) to[i] = to_float(values[i]);
    }
};

// Loads eight values. Aligned rows (`rows_are_aligned`) are read in units of 16 bytes. From other
// rows at most `count` values are read, and the remaining ones are zero.
template <class T>
__device__ __forceinline__ Vector<T> load_vector(const T* from, int count, bool is_aligned) {
    Vector<T> vector;
    if (is_aligned) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(vector.raw) / 16); ++i) {
            vector.raw[i] = reinterpret_cast<const uint4*>(from)[i];
        }
        return vector;
    }
    T* values = reinterpret_cast<T*>(vector.raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = i < count ? from[i] : T(0.0f);
    return vector;
}
template <class T>
__device__ __forceinline__ void load_floats(
    const T* from, int count, bool is_aligned, float (&to)[kVector]
) {
    load_vector(from, count, is_aligned).to_floats(to);
}

template <class T>
__device__ __forceinline__ void store_vector(
    T* to, int count, bool is_aligned, const float (&from)[kVector]
) {
    if (is_aligned) {
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

// Sum over a block of `warps` warps (at most 32), returned to every thread. `partial` is scratch in
// shared memory. The function contains a barrier: earlier writes of all threads to shared memory
// are visible to all threads afterwards.
template <int warps>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    const float sum = warp_sum(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

#endif  // __CUDACC__

// True if all rows start at multiples of 16 bytes and consist of whole vectors. A row has `size`
// elements of `bytes` bytes each, and rows are `stride` elements apart.
inline bool rows_are_aligned(const void* first, int64_t size, int64_t stride, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride * bytes % 16 == 0 &&
           size % kVector == 0;
}
}  // namespace exl::cuda

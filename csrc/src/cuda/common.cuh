// What every kernel file uses: launching, the order of kernels in a stream, asynchronous copies,
// matrix instructions, conversions. Compiled for 7.5 and later; what a processor lacks has a
// slower equivalent of the same result.
#pragma once

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "exl/cuda.h"

namespace exl::cuda {

constexpr int kWarp = 32;

// As exl::DType.
enum Type : int { kF32 = 0, kF16 = 1, kBf16 = 2, kI32 = 3, kI64 = 4, kU8 = 5, kI8 = 6, kF8e4m3 = 7 };

// ---- host ------------------------------------------------------------------------------------

struct DeviceInfo {
    int device = -1;
    int multiprocessors = 0;
    int capability = 0;        // 90 for 9.0
    int shared_per_block = 0;  // the most that a block may ask for
};

// Of the current device; read once for each device (device.cu).
cudaError_t device_info(DeviceInfo* info);

// Whether chunks of so many rows go to the wide kernel (quant_wide.cu), and their inputs are laid
// out for it.
inline bool is_wide(const DeviceInfo& info, int rows) {
    return info.capability == 90 && rows > EXL_CUDA_TILE_ROWS;
}

inline int most_placed_rows(const DeviceInfo& info) {
    return is_wide(info, EXL_CUDA_CHUNK_ROWS) ? EXL_CUDA_CHUNK_ROWS : EXL_CUDA_TILE_ROWS;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Launches a kernel that may begin before the one ahead of it has ended, where the device can do so
// (9.0 and later); the kernel calls `wait_for_inputs` first. A cluster has so many thread blocks, 1
// before 9.0.
template <class... Params, class... Args>
cudaError_t launch_clusters(
    void (*kernel)(Params...), dim3 grid, dim3 block, int cluster, size_t shared_bytes,
    void* stream, Args... args
) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(
            reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(shared_bytes)
        );
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = info.capability < 90 ? 0 : cluster > 1 ? 2 : 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
    if (error != cudaSuccess) cudaGetLastError();  // it is reported, and not to be seen again
    return error;
}

template <class... Params, class... Args>
cudaError_t launch(
    void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args
) {
    return launch_clusters(kernel, grid, block, 1, shared_bytes, stream, args...);
}

#ifdef __CUDACC__

// ---- order -------------------------------------------------------------------------------------

// The next kernel of the stream may be started now; call it first.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What earlier kernels wrote can be read from here on. Every block calls it, whatever it does.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What all lanes have, so that the compiler knows it: what follows from it then takes none of the
// lanes' registers, and branches on it no care.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// Of so few rows a kernel takes as long to have its code fetched as to run it. It can go through it
// once before its inputs are there, to no effect; of more rows that slows the kernel ahead too much.
constexpr int kRehearsedRows = 8;

// ---- copies ------------------------------------------------------------------------------------

// When what is copied leaves the second-level cache: what a step reads once and does not find there
// in the next one goes first, so that kernels' own code, inputs and norms stay. What createpolicy
// gives for all bytes, without its instructions.
constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x16f0000000000000;

#if __CUDA_ARCH__ >= 900
// Multiples of 16 bytes to shared memory, whose barrier there counts them when they have come.
__device__ __forceinline__ void copy_run(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t hint
) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(hint)
        : "memory"
    );
}
__device__ __forceinline__ void copy_weights(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier
) {
    copy_run(to, from, bytes, barrier, kEvictFirst);
}
#endif

// 16 bytes from global to shared memory, past the registers and the first-level cache.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most `pending` of the committed groups are on their way.
template <int pending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- matrix instructions -----------------------------------------------------------------------

// c [16, 8] float32 += a [16, 16] float16 (rows) * b [16, 8] float16 (columns).
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)
    );
#else
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0)
    );
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1)
    );
#endif
}

// ---- numbers -----------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
// Past float16's range a value becomes the largest one, so that one outlier does not make a row NaN;
// NaN stays.
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    const float bounded = fminf(fmaxf(x, -65504.0f), 65504.0f);
    return __float2half_rn(x != x ? x : bounded);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

// Rows of a chunk's prepared inputs, of more than one.
__device__ __forceinline__ int padded_rows(int rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}
// Where prepared inputs of up to 8 rows have one: `place` is its row in the order of the matrix.
__device__ __forceinline__ int prepared_at(int rows, int row, int place) {
    return rows == 1 ? place : place / 32 * 256 + row * 32 + place % 32;
}
// Those of more, by rows.
__device__ __forceinline__ int prepared_by_rows_at(int rows, int row, int place) {
    __builtin_assume(rows > EXL_CUDA_TILE_ROWS);
    const int padded = padded_rows(rows), of_block = place % 32;
    return (place / 32 * 4 + of_block / 2 % 4) * 8 * padded + row / 8 * 64 +
           (of_block / 8 * 2 + of_block % 2) * 8 + row % 8;
}

// Gates of gated activations, as the reference table has them.
__device__ __forceinline__ float gate_of(int kind, float x) {
    if (kind == EXL_GATE_SILU) return x / (1.0f + __expf(-x));
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

#endif  // __CUDACC__

}  // namespace exl::cuda

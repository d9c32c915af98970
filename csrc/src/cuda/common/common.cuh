// Helpers shared by all kernel files: kernel launch, stream order, asynchronous copies, tensor core
// instructions, number conversion.
//
// Compiles for compute capability 7.5 and later. Where a device lacks an instruction, a slower
// equivalent with the same result takes its place.
#pragma once

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "exl/cuda.h"

namespace exl::cuda {

constexpr int kWarp = 32;

// Same numbers as exl::DType.
enum Type : int {
    kF32 = 0,
    kF16 = 1,
    kBf16 = 2,
    kI32 = 3,
    kI64 = 4,
    kU8 = 5,
    kI8 = 6,
    kF8e4m3 = 7
};

// ---- host ------------------------------------------------------------------------------------

struct DeviceInfo {
    int device = -1;
    int multiprocessors = 0;
    int capability = 0;        // 90 for 9.0
    int shared_per_block = 0;  // most shared memory that a block can opt in to, in bytes
};

// Attributes of the current device. They are queried once per device and then cached (device.cu).
cudaError_t device_info(DeviceInfo* info);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Launches a kernel. On 9.0 and later it may start before the previous kernel in the stream has
// ended (programmatic dependent launch), so the kernel must call `wait_for_inputs` before it reads
// the output of earlier kernels. `cluster` is the number of thread blocks per cluster; before 9.0
// it must be 1.
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
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the return value reports it
    return error;
}

template <class... Params, class... Args>
cudaError_t launch(
    void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
    Args... args
) {
    return launch_clusters(kernel, grid, block, 1, shared_bytes, stream, args...);
}

#ifdef __CUDACC__

// ---- stream order ------------------------------------------------------------------------------

// Allows the next kernel in the stream to start now. Every kernel calls this first.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the earlier kernels in the stream; their writes are visible afterwards. Every block
// must call this, including blocks without work.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Broadcasts lane 0's value so that the compiler treats it as warp-uniform. All lanes must hold the
// same value. Values derived from it then take no per-lane registers, and branches on it need no
// code for divergence.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// Most rows with which a kernel runs a warm-up pass: it executes its code once, with stores that
// have no effect, while it waits for its inputs. This warms the instruction cache. With few rows,
// fetching the code takes as long as executing it. With more rows, the warm-up pass would slow down
// the previous kernel too much.
constexpr int kWarmUpRows = 8;

// ---- copies ------------------------------------------------------------------------------------

// L2 cache eviction policies of bulk copies. Data that a decode step reads once, and that the L2
// cache cannot hold until the next step, is evicted first. Kernel code, inputs and norm weights
// then stay. The constants are the results of createpolicy for a fraction of 1.0; using them
// directly saves its instructions.
constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x16f0000000000000;

#if __CUDA_ARCH__ >= 900
// True in one lane, for a warp of which all lanes call it. With a condition on the lane's number the
// compiler surrounds a bulk copy, or the initialization of an mbarrier, with a loop over the lanes
// that may execute it, which takes 60 cycles. It knows that this one holds for one lane.
__device__ __forceinline__ bool is_elected() {
    uint32_t found = 0;
    asm volatile("{\n .reg .pred one;\n elect.sync _|one, 0xffffffff;\n @one mov.u32 %0, 1;\n}"
                 : "+r"(found));
    return found != 0;
}

// Bulk copy of `bytes` bytes, a multiple of 16, to shared memory. The mbarrier at shared memory
// address `barrier` counts the bytes as they arrive.
__device__ __forceinline__ void copy_run(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t hint
) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(hint)
        : "memory"
    );
}
__device__ __forceinline__ void copy_weights(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier
) {
    copy_run(to, from, bytes, barrier, kEvictFirst);
}
#endif

// Copies 16 bytes from global to shared memory, bypassing registers and the L1 cache.
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
// Waits until at most `pending` of the committed groups are still in flight.
template <int pending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- tensor core instructions ------------------------------------------------------------------

// c [16, 8] float32 += a [16, 16] float16 (row-major) * b [16, 8] float16 (column-major).
__device__ __forceinline__ void mma_16816(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)
    );
#else
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0)
    );
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
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
// Values beyond float16's range saturate to its largest finite value, so that one outlier does not
// turn a whole row into NaN. NaN stays NaN.
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

#endif  // __CUDACC__

}  // namespace exl::cuda

// Library functions without kernels: versions, error texts, and cached device attributes.
#include <mutex>

#include "cuda/common/common.cuh"

#ifndef EXL_CUDA_ARCHITECTURES
#define EXL_CUDA_ARCHITECTURES ""
#endif

namespace exl::cuda {

constexpr int kMaxDevices = 64;

cudaError_t device_info(DeviceInfo* info) {
    static std::mutex mutex;
    static DeviceInfo known[kMaxDevices];
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    const std::lock_guard<std::mutex> lock(mutex);
    DeviceInfo& cached = known[device];
    if (cached.device < 0) {
        int major = 0, minor = 0;
        const struct {
            cudaDeviceAttr attribute;
            int* value;
        } queries[] = {
            {cudaDevAttrMultiProcessorCount, &cached.multiprocessors},
            {cudaDevAttrMaxSharedMemoryPerBlockOptin, &cached.shared_per_block},
            {cudaDevAttrComputeCapabilityMajor, &major},
            {cudaDevAttrComputeCapabilityMinor, &minor},
        };
        for (const auto& query : queries) {
            const cudaError_t error = cudaDeviceGetAttribute(query.value, query.attribute, device);
            if (error != cudaSuccess) return error;
        }
        cached.capability = 10 * major + minor;
        cached.device = device;
    }
    *info = cached;
    return cudaSuccess;
}

}  // namespace exl::cuda

extern "C" {

int exl_cuda_abi(void) { return EXL_CUDA_ABI; }

const char* exl_cuda_error_name(int code) {
    return cudaGetErrorName(static_cast<cudaError_t>(code));
}

const char* exl_cuda_error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int exl_cuda_versions(int* driver, int* runtime) {
    if (cudaError_t error = cudaDriverGetVersion(driver); error != cudaSuccess) return error;
    return cudaRuntimeGetVersion(runtime);
}

const char* exl_cuda_architectures(void) { return EXL_CUDA_ARCHITECTURES; }

int exl_cuda_open_device(int device) {
    if (cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
        cudaGetLastError();  // clears it: the return value reports it
        return error;
    }
    return cudaFree(nullptr);  // creates the context, which cudaSetDevice does since CUDA 12 only
}

int exl_cuda_prepare_device(void) {
    exl::cuda::DeviceInfo info;
    return exl::cuda::device_info(&info);
}

int exl_cuda_host_call(void (*function)(void* data), void* data, void* stream) {
    return cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), function, data);
}

}  // extern "C"

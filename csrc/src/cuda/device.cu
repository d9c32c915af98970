// The library itself: its version, its errors, and what it knows of each device.
#include <mutex>

#include "common.cuh"

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
    DeviceInfo& of = known[device];
    if (of.device < 0) {
        int major = 0, minor = 0;
        const struct {
            cudaDeviceAttr attribute;
            int* value;
        } wanted[] = {
            {cudaDevAttrMultiProcessorCount, &of.multiprocessors},
            {cudaDevAttrMaxSharedMemoryPerBlockOptin, &of.shared_per_block},
            {cudaDevAttrComputeCapabilityMajor, &major},
            {cudaDevAttrComputeCapabilityMinor, &minor},
        };
        for (const auto& one : wanted) {
            const cudaError_t error = cudaDeviceGetAttribute(one.value, one.attribute, device);
            if (error != cudaSuccess) return error;
        }
        of.capability = 10 * major + minor;
        of.device = device;
    }
    *info = of;
    return cudaSuccess;
}

}  // namespace exl::cuda

extern "C" {

int exl_cuda_abi(void) { return EXL_CUDA_ABI; }

const char* exl_cuda_error_name(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

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
        cudaGetLastError();  // it is reported, and not to be seen again
        return error;
    }
    return cudaFree(nullptr);  // before CUDA 12 the first call of this kind makes the context
}

int exl_cuda_most_placed_rows(int* rows) {
    exl::cuda::DeviceInfo info;
    if (cudaError_t error = exl::cuda::device_info(&info); error != cudaSuccess) return error;
    *rows = exl::cuda::most_placed_rows(info);
    return cudaSuccess;
}

int exl_cuda_prepare_device(void) {
    exl::cuda::DeviceInfo info;
    return exl::cuda::device_info(&info);
}

}  // extern "C"

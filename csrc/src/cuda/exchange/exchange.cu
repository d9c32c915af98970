// Sums over the GPUs of one host without a linear before or after them, and their memory.
//
// Contract   exl/cuda/exchange.h.
// Used for   Products of kernels that cannot send their sums, and sums whose reader is not
//            exl_cuda_prepare.
// Mapping    Four values per thread. A block has a part of one row.
// Floor      A launch and the latency of a store to another GPU; with many rows, their bytes at the
//            bandwidth of the link.
#include "cuda/exchange/partial_sums.cuh"

namespace exl::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) send_kernel(
    const float* part, int64_t part_stride, int k, float* to, const ExlPartialCopies copies
) {
    let_next_begin();
    wait_for_inputs();
    const int i = 4 * static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
    if (i >= k) return;
    const float* from = part + blockIdx.x * part_stride + i;
    const uint4 bits =
        make_uint4(sent_bits(from[0]), sent_bits(from[1]), sent_bits(from[2]), sent_bits(from[3]));
    const int64_t offset = static_cast<int64_t>(blockIdx.x) * k + i;
    for (int n = 0; n < copies.count; ++n) store_parts(copies.to[n] + offset, bits);
    store_parts(to + offset, bits);
}

__global__ void __launch_bounds__(kThreads) settle_kernel(
    const ExlPartialSums sums, const float* x, int64_t x_stride, int k
) {
    let_next_begin();
    wait_for_inputs();
    const int index = static_cast<int>(blockIdx.y * kThreads + threadIdx.x), i = 4 * index;
    if (i >= k) return;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * k;
    const int64_t rank_stride = static_cast<int64_t>(gridDim.x) * k;
    empty_row(sums, rank_stride, row, k, index, static_cast<int>(gridDim.y * kThreads));
    float values[1][4] = {};
    if (x != nullptr) {
        const float* from = x + blockIdx.x * x_stride + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) values[0][j] = from[j];
    }
    add_parts<1, 1>(sums, rank_stride, row, i, 0, k, values, true, nullptr);
    *reinterpret_cast<float4*>(sums.sum + row + i) =
        make_float4(values[0][0], values[0][1], values[0][2], values[0][3]);
}

}  // namespace

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" {

int exl_cuda_exchange_begin(void* buffer, int64_t bytes, void* stream) {
    static_assert(EXL_CUDA_UNSENT == 0xffffffffu, "a byte pattern");
    return cudaMemsetAsync(
        buffer, 0xff, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)
    );
}

int exl_cuda_exchange_send(
    const float* part, int64_t part_stride, int32_t m, int32_t k, float* to,
    const ExlPartialCopies* copies, void* stream
) {
    const bool fits =
        m >= 0 && k >= 4 && k % 4 == 0 && copies->count >= 0 && copies->count <= EXL_CUDA_MAX_PEERS;
    if (!fits) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(k, 4 * kThreads)));
    return launch(send_kernel, grid, dim3(kThreads), 0, stream, part, part_stride, k, to, *copies);
}

int exl_cuda_exchange_settle(
    const ExlPartialSums* sums, const float* x, int64_t x_stride, int32_t m, int32_t k, void* stream
) {
    const bool fits =
        m >= 0 && k >= 4 && k % 4 == 0 && sums->ranks >= 1 && sums->ranks <= EXL_CUDA_MAX_PEERS + 1;
    if (!fits) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(k, 4 * kThreads)));
    return launch(settle_kernel, grid, dim3(kThreads), 0, stream, *sums, x, x_stride, k);
}

int exl_cuda_shared_new(int64_t bytes, void** memory, void* handle) {
    static_assert(sizeof(cudaIpcMemHandle_t) == EXL_CUDA_SHARED_HANDLE_BYTES, "a handle");
    cudaError_t error = cudaMalloc(memory, static_cast<size_t>(bytes));
    if (error == cudaSuccess) {
        error = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *memory);
        if (error != cudaSuccess) cudaFree(*memory);
    }
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the return value reports it
    return error;
}

int exl_cuda_shared_free(void* memory) { return cudaFree(memory); }

int exl_cuda_shared_open(const void* handle, void** memory) {
    const cudaError_t error = cudaIpcOpenMemHandle(
        memory, *static_cast<const cudaIpcMemHandle_t*>(handle), cudaIpcMemLazyEnablePeerAccess
    );
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the return value reports it
    return error;
}

int exl_cuda_shared_close(void* memory) { return cudaIpcCloseMemHandle(memory); }

}  // extern "C"

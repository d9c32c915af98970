// Rows of a dense embedding matrix as float32.
//
// Contract   exl/cuda/linear.h (exl_cuda_embedding). Quantized embeddings: quant_unpack.cu.
// Floor      Each value moves once: its bytes at memory bandwidth. With few rows, launch latency.
#include "cuda/common/rows.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) embedding_kernel(
    const T* weight, const int64_t* token_ids, int k, float* y, bool is_aligned
) {
    let_next_begin();
    wait_for_inputs();
    const int i = kVector * (blockIdx.y * kThreads + threadIdx.x);
    if (i >= k) return;
    float values[kVector];
    load_floats(weight + token_ids[blockIdx.x] * k + i, k - i, is_aligned, values);
    store_vector(y + static_cast<int64_t>(blockIdx.x) * k + i, k - i, is_aligned, values);
}

template <class T>
static cudaError_t embedding(
    const void* weight, const int64_t* token_ids, int m, int k, float* y, void* stream
) {
    const bool is_aligned =
        rows_are_aligned(weight, k, k, sizeof(T)) && rows_are_aligned(y, k, k, sizeof(float));
    const dim3 grid(m, static_cast<unsigned>(ceil_div(k, kVector * kThreads)));
    return launch(
        embedding_kernel<T>, grid, dim3(kThreads), 0, stream, static_cast<const T*>(weight),
        token_ids, k, y, is_aligned
    );
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_embedding(
    const void* weight, int32_t dtype, const int64_t* token_ids, int32_t m, int32_t k, float* y,
    void* stream
) {
    if (m < 0 || k < 1) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    switch (dtype) {
        case kF32: return embedding<float>(weight, token_ids, m, k, y, stream);
        case kF16: return embedding<__half>(weight, token_ids, m, k, y, stream);
        case kBf16: return embedding<__nv_bfloat16>(weight, token_ids, m, k, y, stream);
        default: return cudaErrorInvalidValue;
    }
}

// Norms, RoPE and gated activations on rows of activations.
//
// Contract   exl/cuda/elementwise.h.
// Floor      Each kernel moves its operands once: their bytes at memory bandwidth. With few rows,
//            launch latency.
#include "cuda/common/rows.cuh"
#include "cuda/elementwise/gate.cuh"
#include "exl/cuda/elementwise.h"

namespace exl::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// One row per block. The second read of the row hits the L1 cache.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(
    const In* x, int64_t x_stride, const float* weight, float eps, int d, Out* out,
    int64_t out_stride, bool is_aligned
) {
    __shared__ float partial[kWarps];
    let_next_begin();
    wait_for_inputs();
    const In* row = x + blockIdx.x * x_stride;
    Out* to = out + blockIdx.x * out_stride;
    float squares = 0.0f;
    for (int i = kVector * threadIdx.x; i < d; i += kVector * kThreads) {
        float values[kVector];
        load_floats(row + i, d - i, is_aligned, values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) squares += values[j] * values[j];
    }
    const float factor = rsqrtf(block_sum<kWarps>(squares, partial) / d + eps);
    for (int i = kVector * threadIdx.x; i < d; i += kVector * kThreads) {
        float values[kVector], weights[kVector];
        const Vector<In> vector = load_vector(row + i, d - i, is_aligned);
        load_floats(weight + i, d - i, is_aligned, weights);
        vector.to_floats(values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] *= factor * weights[j];
        store_vector(to + i, d - i, is_aligned, values);
    }
}

// One head per warp.
template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm_heads_kernel(
    T* x, int64_t row_stride, const float* weight, float eps, int64_t all_heads, int heads, int d
) {
    let_next_begin();
    wait_for_inputs();
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (index >= all_heads) return;
    const int lane = threadIdx.x % kWarp;
    T* head = x + index / heads * row_stride + index % heads * d;
    float squares = 0.0f;
    for (int i = lane; i < d; i += kWarp) {
        const float value = to_float(head[i]);
        squares += value * value;
    }
    const float factor = rsqrtf(warp_sum(squares) / d + eps);
    for (int i = lane; i < d; i += kWarp) {
        head[i] = from_float<T>(to_float(head[i]) * (factor * weight[i]));
    }
}

// One pair of elements per thread.
template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(
    T* x, int64_t row_stride, const float* cos, const float* sin, int half, int heads, int d
) {
    let_next_begin();
    wait_for_inputs();
    const int pair = blockIdx.y * kThreads + threadIdx.x;
    if (pair >= heads * half) return;
    const int64_t row = blockIdx.x;
    const int i = pair % half;
    T* first = x + row * row_stride + static_cast<int64_t>(pair / half) * d + i;
    const float a = to_float(first[0]), b = to_float(first[half]);
    const float c = cos[row * half + i], s = sin[row * half + i];
    first[0] = from_float<T>(a * c - b * s);
    first[half] = from_float<T>(b * c + a * s);
}

// is_gated: the row has d gates, then d values to multiply by.
template <class In, class Out, bool is_aligned, bool is_gated>
__global__ void __launch_bounds__(kThreads) activation_kernel(
    const In* x, int64_t x_stride, int gate, int d, int blocks_per_row, Out* out, int64_t out_stride
) {
    let_next_begin();
    wait_for_inputs();
    const int64_t row = blockIdx.x / blocks_per_row;
    const int i = kVector * (blockIdx.x % blocks_per_row * kThreads + threadIdx.x);
    if (i >= d) return;
    const In* from = x + row * x_stride + i;
    float gates[kVector], ups[kVector];
    const Vector<In> first = load_vector(from, d - i, is_aligned);
    if constexpr (is_gated) {
        load_vector(from + d, d - i, is_aligned).to_floats(ups);
    } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) ups[j] = 1.0f;
    }
    first.to_floats(gates);
#pragma unroll
    for (int j = 0; j < kVector; ++j) ups[j] = gated(gate, gates[j], ups[j]);
    store_vector(out + row * out_stride + i, d - i, is_aligned, ups);
}

// ---- launches ----------------------------------------------------------------------------------

static bool is_float(int type) { return type == kF32 || type == kF16; }

template <class In, class Out>
static cudaError_t rms_norm(
    const void* x, int64_t x_stride, const float* weight, float eps, int m, int d, void* out,
    int64_t out_stride, void* stream
) {
    const bool is_aligned = rows_are_aligned(x, d, x_stride, sizeof(In)) &&
                            rows_are_aligned(out, d, out_stride, sizeof(Out)) &&
                            rows_are_aligned(weight, d, 0, sizeof(float));
    return launch(
        rms_norm_kernel<In, Out>, dim3(m), dim3(kThreads), 0, stream, static_cast<const In*>(x),
        x_stride, weight, eps, d, static_cast<Out*>(out), out_stride, is_aligned
    );
}

template <class In, class Out, bool is_gated>
static cudaError_t activation(
    const void* x, int64_t x_stride, int gate, int m, int d, void* out, int64_t out_stride,
    void* stream
) {
    const bool is_aligned = rows_are_aligned(x, d, x_stride, sizeof(In)) &&
                            rows_are_aligned(out, d, out_stride, sizeof(Out));
    const int blocks_per_row = static_cast<int>(ceil_div(d, kVector * kThreads));
    const int64_t blocks = static_cast<int64_t>(m) * blocks_per_row;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    return launch(
        is_aligned ? activation_kernel<In, Out, true, is_gated>
                   : activation_kernel<In, Out, false, is_gated>,
        dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, static_cast<const In*>(x),
        x_stride, gate, d, blocks_per_row, static_cast<Out*>(out), out_stride
    );
}

template <bool is_gated>
static cudaError_t activation(
    const void* x, int x_dtype, int64_t x_stride, int gate, int m, int d, void* out, int out_dtype,
    int64_t out_stride, void* stream
) {
    const bool is_known = gate == EXL_GATE_SILU || gate == EXL_GATE_GELU_TANH ||
                          gate == (is_gated ? EXL_GATE_CLAMPED_SWIGLU : EXL_GATE_RELU2);
    if (!is_known || !is_float(x_dtype) || !is_float(out_dtype) || m < 0 || d < 1) {
        return cudaErrorInvalidValue;
    }
    if (m == 0) return cudaSuccess;
    const auto run = x_dtype == kF32 ? (out_dtype == kF32 ? activation<float, float, is_gated>
                                                          : activation<float, __half, is_gated>)
                                     : (out_dtype == kF32 ? activation<__half, float, is_gated>
                                                          : activation<__half, __half, is_gated>);
    return run(x, x_stride, gate, m, d, out, out_stride, stream);
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" {

int exl_cuda_rms_norm(
    const void* x, int32_t x_dtype, int64_t x_stride, const float* weight, float eps, int32_t m,
    int32_t d, void* out, int32_t out_dtype, int64_t out_stride, void* stream
) {
    if (!is_float(x_dtype) || !is_float(out_dtype) || m < 0 || d < 1) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const auto run = x_dtype == kF32
                         ? (out_dtype == kF32 ? rms_norm<float, float> : rms_norm<float, __half>)
                         : (out_dtype == kF32 ? rms_norm<__half, float> : rms_norm<__half, __half>);
    return run(x, x_stride, weight, eps, m, d, out, out_stride, stream);
}

int exl_cuda_rms_norm_heads(
    void* x, int32_t dtype, int64_t row_stride, const float* weight, float eps, int32_t rows,
    int32_t heads, int32_t d, void* stream
) {
    if (!is_float(dtype) || rows < 0 || heads < 1 || d < 1) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    const int64_t all_heads = static_cast<int64_t>(rows) * heads;
    const dim3 grid(static_cast<unsigned>(ceil_div(all_heads, kWarps)));
    if (dtype == kF32) {
        return launch(
            rms_norm_heads_kernel<float>, grid, dim3(kThreads), 0, stream, static_cast<float*>(x),
            row_stride, weight, eps, all_heads, heads, d
        );
    }
    return launch(
        rms_norm_heads_kernel<__half>, grid, dim3(kThreads), 0, stream, static_cast<__half*>(x),
        row_stride, weight, eps, all_heads, heads, d
    );
}

int exl_cuda_rope(
    void* x, int32_t dtype, int64_t row_stride, const float* cos, const float* sin, int32_t half,
    int32_t rows, int32_t heads, int32_t d, void* stream
) {
    const bool fits = is_float(dtype) && rows >= 0 && heads >= 1 && half >= 0 && 2 * half <= d;
    if (!fits) return cudaErrorInvalidValue;
    if (rows == 0 || half == 0) return cudaSuccess;
    const dim3 grid(rows, static_cast<unsigned>(ceil_div(heads * half, kThreads)));
    if (dtype == kF32) {
        return launch(
            rope_kernel<float>, grid, dim3(kThreads), 0, stream, static_cast<float*>(x), row_stride,
            cos, sin, half, heads, d
        );
    }
    return launch(
        rope_kernel<__half>, grid, dim3(kThreads), 0, stream, static_cast<__half*>(x), row_stride,
        cos, sin, half, heads, d
    );
}

int exl_cuda_gated_activation(
    const void* gate_up, int32_t x_dtype, int64_t x_stride, int32_t gate, int32_t m, int32_t d,
    void* out, int32_t out_dtype, int64_t out_stride, void* stream
) {
    return activation<true>(
        gate_up, x_dtype, x_stride, gate, m, d, out, out_dtype, out_stride, stream
    );
}

int exl_cuda_activation(
    const void* x, int32_t x_dtype, int64_t x_stride, int32_t kind, int32_t m, int32_t d, void* out,
    int32_t out_dtype, int64_t out_stride, void* stream
) {
    return activation<false>(x, x_dtype, x_stride, kind, m, d, out, out_dtype, out_stride, stream);
}

}  // extern "C"

// Prepares the inputs of products with trellis codes: norm, factors suh, Hadamard transform.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_prepare).
// Mapping    A warp transforms a block of 128 values of one row for one matrix. With a norm, every
//            thread block reads its whole row, which stays in the L2 cache.
// Accuracy   float32. The sum of squares is in an order that depends on the row's length alone.
// Overlap    suh and the norm's weights are loaded before the wait for the previous kernel.
// Floor      With few rows: a launch, a read from the L2 cache, a barrier and five shuffles in turn.
#include <algorithm>

#include "cuda/trellis/trellis_prepare.cuh"
#include "cuda/trellis/trellis_prompt.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 8;

template <class X, bool has_norm>
__global__ void __launch_bounds__(kWarps* kWarp) prepare_kernel(
    const __grid_constant__ PrepareArgs args
) {
    __shared__ float partial[kWarps];
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int row = blockIdx.x, tasks = args.count * args.blocks, stride = gridDim.y * kWarps;
    int task = blockIdx.y * kWarps + warp;
    float suh[kValues] = {}, norm[kValues] = {};
    const auto load_weights = [&]() {
        const int block = task % args.blocks;
        const Target& to = args.to[task / args.blocks];
        if (block >= to.blocks) return;
        const int value = EXL_TRELLIS_BLOCK * block + kValues * lane;
        load_halves(to.suh + value, suh);
        if constexpr (has_norm) {
            const bool is_aligned = args.is_aligned && to.first_in % kVector == 0;
            load_values(args.norm, value - to.first_in, args.features, is_aligned, norm);
        }
    };
    if (task < tasks) load_weights();
    wait_for_inputs();
    const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
    const auto load = [&](float (&v)[kValues]) {
        const Target& to = args.to[task / args.blocks];
        const int block = task % args.blocks;
        if (block >= to.blocks) return;
        const int first = EXL_TRELLIS_BLOCK * block + kValues * lane - to.first_in;
        const bool is_aligned = args.is_aligned && to.first_in % kVector == 0;
        load_values(x, first, args.features, is_aligned, v);
    };
    float factor = 1.0f, v[kValues];
    if (task < tasks) load(v);  // together with the row
    if constexpr (has_norm) {
        const bool is_whole = args.is_aligned && args.features % kVector == 0;
        float squares = 0.0f;
        const auto add = [&](int i, bool whole) {
            float values[kVector];
            load_floats(x + i, args.features - i, whole, values);
#pragma unroll
            for (float one : values) squares += one * one;
        };
        constexpr int kStride = kVector * kWarps * kWarp;
        if (is_whole) {  // a loop without branches, so that loads overlap
#pragma unroll 4
            for (int i = kVector * threadIdx.x; i < args.features; i += kStride) add(i, true);
        } else {
            for (int i = kVector * threadIdx.x; i < args.features; i += kStride) {
                add(i, args.is_aligned && i + kVector <= args.features);
            }
        }
        factor = rsqrtf(block_sum<kWarps>(squares, partial) / args.features + args.eps);
    }
    while (task < tasks) {
        const int block = task % args.blocks;
        const Target& to = args.to[task / args.blocks];
        if (block < to.blocks) {
            if constexpr (has_norm) {
#pragma unroll
                for (int i = 0; i < kValues; ++i) v[i] *= norm[i];
            }
            prepare_block(to, row, block, v, suh, factor, lane);
        }
        task += stride;
        if (task < tasks) load_weights(), load(v);
    }
}

}  // namespace

}  // namespace exl::cuda::trellis

extern "C" int64_t exl_cuda_trellis_inputs_bytes(int32_t form, int32_t rows, int32_t k) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    const int64_t blocks = k / EXL_TRELLIS_BLOCK;
    if (form == EXL_TRELLIS_INTEGERS) {
        return ceil_div(rows, kSetRows) * blocks * (1024 + kSetRows * sizeof(float2));
    }
    if (form == EXL_TRELLIS_HALVES) {
        return halves_bytes(rows, k) + rows * blocks * static_cast<int64_t>(sizeof(float));
    }
    return 2ll * rows * k;
}

extern "C" int exl_cuda_trellis_prepare(const ExlTrellisPrepare* args, void* stream) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    const bool fits = args->count >= 1 && args->count <= EXL_TRELLIS_MAX_PARTS && args->m >= 0 &&
                      (args->x_dtype == kF32 || args->x_dtype == kF16);
    if (!fits) return cudaErrorInvalidValue;
    PrepareArgs operands = {};
    operands.x = args->x, operands.norm = args->norm, operands.x_stride = args->x_stride;
    operands.eps = args->eps, operands.count = args->count;
    operands.features = args->to[0].matrix->in_features;
    for (int i = 0; i < args->count; ++i) {
        const ExlTrellisInputs& to = args->to[i];
        const bool is_form = to.form >= EXL_TRELLIS_INTEGERS && to.form <= EXL_TRELLIS_PLAIN;
        if (!is_valid(*to.matrix) || !is_form || to.rows < args->m ||
            to.matrix->in_features != operands.features) {
            return cudaErrorInvalidValue;
        }
        operands.to[i] = Target(to);
        operands.blocks = std::max(operands.blocks, operands.to[i].blocks);
    }
    if (args->m == 0) return cudaSuccess;
    const int64_t bytes = args->x_dtype == kF32 ? 4 : 2;
    operands.is_aligned = reinterpret_cast<uintptr_t>(args->x) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(args->norm) % 16 == 0 &&
                          args->x_stride * bytes % 16 == 0;
    if (takes_prompt(operands)) {
        return launch_prompt_prepare(operands, args->m, bytes, stream);
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    // Up to four thread blocks per multiprocessor, unless the rows are as many.
    const int most = static_cast<int>(ceil_div(operands.count * operands.blocks, kWarps));
    const int slices = std::clamp(4 * info.multiprocessors / args->m, 1, most);
    const auto kernel =
        args->norm == nullptr
            ? (bytes == 4 ? prepare_kernel<float, false> : prepare_kernel<__half, false>)
            : (bytes == 4 ? prepare_kernel<float, true> : prepare_kernel<__half, true>);
    return launch(kernel, dim3(args->m, slices), dim3(kWarps * kWarp), 0, stream, operands);
}

// Prepares the inputs of products with trellis codes: norm, factors suh, Hadamard transform.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_prepare), exl/cuda/exchange.h
//            (exl_cuda_trellis_prepare_sums).
// Mapping    A warp transforms a block of 128 values of one row for one matrix. With a norm, every
//            thread block reads its whole row, which stays in the L2 cache.
// Accuracy   float32. The sum of squares is in an order that depends on the row's length alone.
// Exchange   With partial sums of several GPUs, every block adds up the row of all ranks and keeps it
//            in shared memory. The first block of a row stores the sums, and all of them empty the
//            stage that the previous exchange has used. An early reader waits for the end of the
//            sending kernel at its own end only, so that kernels end in order.
// Overlap    suh and the norm's weights are loaded before the wait for the previous kernel.
// Floor      With few rows: a launch, a read from the L2 cache, a barrier and five shuffles in turn.
#include <algorithm>
#include <type_traits>

#include "cuda/exchange/partial_sums.cuh"
#include "cuda/trellis/trellis_prepare.cuh"
#include "cuda/trellis/trellis_prompt.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kStride = kVector * kThreads;  // values that a block reads per load

// In place of ExlPartialSums: x is complete.
struct NoSums {};

__device__ __forceinline__ float add_squares(const float (&values)[kVector], float sum) {
#pragma unroll
    for (float one : values) sum = __fmaf_rn(one, one, sum);
    return sum;
}

// Adds the parts of all ranks to a row of x, and keeps it in shared memory. Returns the sum of this
// thread's squares, in the order in which `prepare_kernel` adds those of a row that is complete.
__device__ __forceinline__ float add_row(
    const ExlPartialSums& sums, int k, const float* x, float* row
) {
    constexpr int kInFlight = 2;  // loads of x per thread before the first is used
    const int64_t rank_stride = static_cast<int64_t>(gridDim.x) * k;
    const int64_t sums_row = static_cast<int64_t>(blockIdx.x) * k;
    float squares = 0.0f;
    for (int start = kVector * threadIdx.x; start < k; start += kInFlight * kStride) {
        float values[kInFlight][kVector] = {};
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStride;
            if (i < k) load_floats(x + i, kVector, true, values[n]);
        }
        add_parts<kInFlight, kVector / 4>(
            sums, rank_stride, sums_row, start, kStride, k, values, true, nullptr
        );
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStride;
            if (i >= k) break;
            store_vector(row + i, kVector, true, values[n]);
            if (blockIdx.y == 0) store_vector(sums.sum + sums_row + i, kVector, true, values[n]);
            squares = add_squares(values[n], squares);
        }
    }
    return squares;
}

// With partial sums X is float, and there is a norm.
template <class X, bool has_norm, class Sums>
__global__ void __launch_bounds__(kThreads) prepare_kernel(
    const __grid_constant__ PrepareArgs args, const __grid_constant__ Sums sums
) {
    constexpr bool has_sums = !std::is_same_v<Sums, NoSums>;
    extern __shared__ uint4 shared[];  // with sums: the row in float32
    __shared__ float partial[kWarps];
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int row = blockIdx.x, tasks = args.count * args.blocks, stride = gridDim.y * kWarps;
    int task = blockIdx.y * kWarps + warp;
    Halves suh;
    float norm[kValues] = {};
    const auto load_weights = [&]() {
        const int block = task % args.blocks;
        const Target& to = args.to[task / args.blocks];
        if (block >= to.blocks) return;
        const int value = EXL_TRELLIS_BLOCK * block + kValues * lane;
        suh = Halves(to.suh + value);
        if constexpr (has_norm) {
            const bool is_aligned = args.is_aligned && to.first_in % kVector == 0;
            load_values(args.norm, value - to.first_in, args.features, is_aligned, norm);
        }
    };
    if (task < tasks) load_weights();
    const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
    float squares = 0.0f;
    if constexpr (has_sums) {
        const int64_t rank_stride = static_cast<int64_t>(gridDim.x) * args.features;
        const int64_t sums_row = static_cast<int64_t>(row) * args.features;
        const int early = sums.early_rank;
        if (early < 0) {
            wait_for_inputs();
        } else if (gridDim.x > kWarmUpRows) {
            await_first(sums, sums.parts + early * rank_stride + sums_row);
        }
        const int index = blockIdx.y * kThreads + threadIdx.x, count = gridDim.y * kThreads;
        empty_row(sums, rank_stride, sums_row, args.features, index, count);
        auto* const whole = reinterpret_cast<float*>(shared);
        squares = add_row(sums, args.features, x, whole);
        x = whole;  // read after the barrier of block_sum
    } else {
        wait_for_inputs();
    }
    const auto load = [&](float (&v)[kValues]) {
        const Target& to = args.to[task / args.blocks];
        const int block = task % args.blocks;
        if (block >= to.blocks) return;
        const int first = EXL_TRELLIS_BLOCK * block + kValues * lane - to.first_in;
        const bool is_aligned = args.is_aligned && to.first_in % kVector == 0;
        load_values(x, first, args.features, is_aligned, v);
    };
    float factor = 1.0f, v[kValues];
    if (!has_sums && task < tasks) load(v);  // together with the row
    if constexpr (has_norm && !has_sums) {
        const bool is_whole = args.is_aligned && args.features % kVector == 0;
        const auto add = [&](int i, bool whole) {
            float values[kVector];
            load_floats(x + i, args.features - i, whole, values);
            squares = add_squares(values, squares);
        };
        if (is_whole) {  // a loop without branches, so that loads overlap
#pragma unroll 4
            for (int i = kVector * threadIdx.x; i < args.features; i += kStride) add(i, true);
        } else {
            for (int i = kVector * threadIdx.x; i < args.features; i += kStride) {
                add(i, args.is_aligned && i + kVector <= args.features);
            }
        }
    }
    if constexpr (has_norm) {
        factor = rsqrtf(block_sum<kWarps>(squares, partial) / args.features + args.eps);
    }
    if (has_sums && task < tasks) load(v);
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
    if constexpr (has_sums) wait_for_inputs();
}

// `most`: thread blocks per multiprocessor, unless the rows are as many.
template <class X, bool has_norm, class Sums = NoSums>
cudaError_t launch_prepare(
    const PrepareArgs& operands, int m, int most, void* stream, const Sums& sums = {}
) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const int needed = static_cast<int>(ceil_div(operands.count * operands.blocks, kWarps));
    const int slices = std::clamp(most * info.multiprocessors / m, 1, needed);
    const size_t bytes = std::is_same_v<Sums, NoSums> ? 0 : sizeof(float) * operands.features;
    const auto kernel = prepare_kernel<X, has_norm, Sums>;
    return launch(kernel, dim3(m, slices), dim3(kThreads), bytes, stream, operands, sums);
}

}  // namespace

bool convert(const ExlTrellisPrepare& args, PrepareArgs* operands) {
    const bool fits = args.count >= 1 && args.count <= EXL_TRELLIS_MAX_PARTS && args.m >= 0 &&
                      (args.x_dtype == kF32 || args.x_dtype == kF16);
    if (!fits) return false;
    operands->x = args.x, operands->norm = args.norm, operands->x_stride = args.x_stride;
    operands->eps = args.eps, operands->count = args.count;
    operands->features = args.to[0].matrix->in_features;
    for (int i = 0; i < args.count; ++i) {
        const ExlTrellisInputs& to = args.to[i];
        const bool is_form = to.form >= EXL_TRELLIS_INTEGERS && to.form <= EXL_TRELLIS_PLAIN;
        if (!is_valid(*to.matrix) || !is_form || to.rows < args.m ||
            to.matrix->in_features != operands->features) {
            return false;
        }
        operands->to[i] = Target(to);
        operands->blocks = std::max(operands->blocks, operands->to[i].blocks);
    }
    const int64_t bytes = args.x_dtype == kF32 ? 4 : 2;
    operands->is_aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 &&
                           reinterpret_cast<uintptr_t>(args.norm) % 16 == 0 &&
                           args.x_stride * bytes % 16 == 0;
    return true;
}

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
    PrepareArgs operands = {};
    if (!convert(*args, &operands)) return cudaErrorInvalidValue;
    if (args->m == 0) return cudaSuccess;
    const bool is_float = args->x_dtype == kF32, has_norm = args->norm != nullptr;
    if (takes_prompt(operands)) {
        return launch_prompt_prepare(operands, args->m, is_float ? 4 : 2, stream);
    }
    const auto run =
        has_norm ? (is_float ? launch_prepare<float, true> : launch_prepare<__half, true>)
                 : (is_float ? launch_prepare<float, false> : launch_prepare<__half, false>);
    return run(operands, args->m, 4, stream, NoSums());
}

extern "C" int exl_cuda_trellis_prepare_sums(
    const ExlTrellisPrepare* args, const ExlPartialSums* sums, void* stream
) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    PrepareArgs operands = {};
    if (!convert(*args, &operands)) return cudaErrorInvalidValue;
    const bool fits = args->x_dtype == kF32 && args->norm != nullptr && operands.is_aligned &&
                      operands.features % kVector == 0 && sums->ranks >= 1 &&
                      sums->ranks <= EXL_CUDA_MAX_PEERS + 1;
    if (!fits) return cudaErrorInvalidValue;
    if (args->m == 0) return cudaSuccess;
    // Half as many blocks as without sums: each reads its row from all ranks.
    return launch_prepare<float, true>(operands, args->m, 2, stream, *sums);
}

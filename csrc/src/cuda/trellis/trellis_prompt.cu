// Prepares and finishes products with trellis codes for prompts, whose products are those of a
// library.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_prepare and exl_cuda_trellis_linear).
// Mapping    A lane has 16 columns and takes several rows in turn. It loads those of the next row
//            before it computes.
// Accuracy   float32. The results have the bits of trellis_prepare.cu and trellis_finish.cu, except
//            for the order of a norm's sum of squares, which depends on the row's length alone.
// Floor      The bytes of inputs and results at memory bandwidth; with a gate, about as much time for
//            shuffles.
#include <algorithm>

#include "cuda/elementwise/gate.cuh"
#include "cuda/trellis/trellis_prompt.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kPrepareThreads = 512;  // most
constexpr int kFinishWarps = 4;
constexpr int kResidentWarps = 16;  // per multiprocessor; more would wait for registers

// Sum over a thread block. `partial` has place for its warps, and is not used again before the
// next-but-one sum.
__device__ __forceinline__ float sum_over_warps(float x, float* partial, int warps) {
    x = warp_sum(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps; ++i) total += partial[i];
    return total;
}

template <class X, bool has_norm>
__global__ void __launch_bounds__(kPrepareThreads) prompt_prepare_kernel(
    const __grid_constant__ PrepareArgs args, int rows
) {
    __shared__ float partial[2][kPrepareThreads / kWarp];
    let_next_begin();
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    const int first = kTileValues * threadIdx.x;
    const bool exists = first < args.features;
    Tile<float> norm = {};
    if (has_norm && exists) norm.load(args.norm + first);
    wait_for_inputs();
    const X* x = static_cast<const X*>(args.x) + first;
    Tile<X> next = {};
    int row = blockIdx.x;
    if (exists && row < rows) next.load(x + row * args.x_stride);
    for (int turn = 0; row < rows; turn ^= 1) {
        const int row_after = row + gridDim.x;
        float v[kTileValues], squares = 0.0f, factor = 1.0f;
#pragma unroll
        for (int i = 0; i < kTileValues; ++i) {
            v[i] = next[i];
            squares += v[i] * v[i];
        }
        if (exists && row_after < rows) next.load(x + row_after * args.x_stride);
        if constexpr (has_norm) {
            const float sum = sum_over_warps(squares, partial[turn], warps);
            factor = rsqrtf(sum / args.features + args.eps);
#pragma unroll
            for (int i = 0; i < kTileValues; ++i) v[i] *= norm[i];
        }
#pragma unroll 1
        for (int part = 0; part < args.count; ++part) {
            const Target& to = args.to[part];
            Tile<__half> suh = {};
            if (exists) suh.load(to.suh + first);
            float w[kTileValues];
#pragma unroll
            for (int i = 0; i < kTileValues; ++i) w[i] = __fmul_rn(v[i], suh[i]);
            transform_tile(w, lane);
            store_plain(to, row, first, exists, w, factor * kNormalize, lane);
        }
        row = row_after;
    }
}

// Results of a tile, from its sums.
__device__ __forceinline__ void finish_tile(
    const Tile<__half>& sums, const Tile<__half>& svh, const float* bias, bool exists, int lane,
    float (&v)[kTileValues]
) {
#pragma unroll
    for (int i = 0; i < kTileValues; ++i) v[i] = sums[i];
    transform_tile(v, lane);
#pragma unroll
    for (int i = 0; i < kTileValues; ++i) {
        v[i] = fmaf(v[i] * kNormalize, svh[i], bias != nullptr && exists ? bias[i] : 0.0f);
    }
}

template <bool is_gated, class Y>
__global__ void __launch_bounds__(kFinishWarps* kWarp) prompt_finish_kernel(
    const __grid_constant__ FinishArgs args
) {
    let_next_begin();
    const int lane = threadIdx.x % kWarp;
    const int task = kWarpBlocks * (blockIdx.y * kFinishWarps + threadIdx.x / kWarp);
    if (task >= args.blocks) {
        wait_for_inputs();
        return;
    }
    const bool exists = task + lane / kBlockLanes < args.blocks;
    int i = 0;
    if (!is_gated) {
        i = args.count > 2 && task >= args.parts[2].first_block   ? 2
            : args.count > 1 && task >= args.parts[1].first_block ? 1
                                                                  : 0;
    }
    const FinishPart &part = args.parts[i], &up_part = args.parts[is_gated ? 1 : i];
    const int first = EXL_TRELLIS_BLOCK * (task - part.first_block) + kTileValues * lane;
    Tile<__half> svh = {}, svh_of_up = {}, suh = {};
    if (exists) {
        svh.load(part.svh + first);
        if (is_gated) svh_of_up.load(up_part.svh + first);
        if (is_gated && args.has_next) suh.load(args.next.suh + first);
    }
    const float* bias = part.bias != nullptr ? part.bias + first : nullptr;
    const float* bias_of_up = up_part.bias != nullptr ? up_part.bias + first : nullptr;
    const auto* sums = static_cast<const __half*>(part.sums.from) + first;
    const auto* sums_of_up = static_cast<const __half*>(up_part.sums.from) + first;
    Tile<__half> next = {}, next_of_up = {};
    const auto load = [&](int64_t row) {
        next.load(sums + row * part.n);
        if (is_gated) next_of_up.load(sums_of_up + row * part.n);
    };
    wait_for_inputs();
    int row = blockIdx.x;
    if (exists && row < args.m) load(row);
    while (row < args.m) {
        const int row_after = row + gridDim.x;
        const Tile<__half> own = next, own_of_up = next_of_up;
        if (exists && row_after < args.m) load(row_after);
        float v[kTileValues];
        finish_tile(own, svh, bias, exists, lane, v);
        if constexpr (is_gated) {
            float up[kTileValues];
            finish_tile(own_of_up, svh_of_up, bias_of_up, exists, lane, up);
            const int gate = args.gate;
            if (gate == EXL_GATE_SILU) {
#pragma unroll
                for (int j = 0; j < kTileValues; ++j) v[j] = gated(EXL_GATE_SILU, v[j], up[j]);
            } else {
#pragma unroll
                for (int j = 0; j < kTileValues; ++j) v[j] = gated(gate, v[j], up[j]);
            }
        }
        if (is_gated && args.has_next) {
#pragma unroll
            for (int j = 0; j < kTileValues; ++j) v[j] = __fmul_rn(v[j], suh[j]);
            transform_tile(v, lane);
            store_plain(args.next, args.first_row + row, first, exists, v, kNormalize, lane);
        } else if (exists) {
            Tile<Y> out;
            out.set(v);
            out.store(static_cast<Y*>(args.y) + row * args.y_stride + part.y_column + first);
        }
        row = row_after;
    }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_whole(const Target& to) {
    return to.form == EXL_TRELLIS_PLAIN && to.first_in == 0 && to.in_features == to.k &&
           is_aligned(to.suh) && is_aligned(to.out);
}

}  // namespace

bool takes_prompt(const PrepareArgs& args) {
    bool fits = args.is_aligned && args.features <= kTileValues * kPrepareThreads;
    for (int i = 0; i < args.count; ++i) fits = fits && is_whole(args.to[i]);
    return fits;
}

bool takes_prompt(const FinishArgs& args) {
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    if (!is_gated && args.epilogue != EXL_EPILOGUE_STORE) return false;
    const int y_bytes = args.y_dtype == kF32 ? 4 : 2;
    bool fits = args.has_next ? is_whole(args.next)
                              : is_aligned(args.y) && args.y_stride * y_bytes % 16 == 0;
    for (int i = 0; i < args.count; ++i) {
        const FinishPart& part = args.parts[i];
        fits = fits && part.sums.columns == 0 && part.first_out == 0 &&
               part.out_features == part.n && is_aligned(part.sums.from) && is_aligned(part.svh) &&
               part.y_column * y_bytes % 16 == 0 &&
               // A warp has columns of one part.
               (is_gated || i + 1 == args.count || part.n % kWarpValues == 0);
    }
    return fits;
}

cudaError_t launch_prompt_prepare(
    const PrepareArgs& args, int rows, int64_t x_bytes, void* stream
) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const auto kernel = args.norm == nullptr ? (x_bytes == 4 ? prompt_prepare_kernel<float, false>
                                                             : prompt_prepare_kernel<__half, false>)
                                             : (x_bytes == 4 ? prompt_prepare_kernel<float, true>
                                                             : prompt_prepare_kernel<__half, true>);
    const int warps = static_cast<int>(ceil_div(args.features, kWarpValues));
    const int most = std::max(kResidentWarps / warps, 1) * info.multiprocessors;
    const dim3 grid(std::min(rows, most)), threads(kWarp * warps);
    return launch(kernel, grid, threads, 0, stream, args, rows);
}

cudaError_t launch_prompt_finish(const FinishArgs& args, void* stream) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED, is_float = args.y_dtype == kF32;
    const auto kernel =
        is_gated
            ? (is_float ? prompt_finish_kernel<true, float> : prompt_finish_kernel<true, __half>)
            : (is_float ? prompt_finish_kernel<false, float> : prompt_finish_kernel<false, __half>);
    const int slices = static_cast<int>(ceil_div(args.blocks, kWarpBlocks * kFinishWarps));
    const int most = kResidentWarps / kFinishWarps * info.multiprocessors / slices;
    const dim3 grid(std::clamp(most, 1, args.m), slices);
    return launch(kernel, grid, dim3(kFinishWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

// Finishes products with trellis codes: adds the slots of sums, transforms, scales, and stores.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_linear).
// Mapping    A warp has a block of 128 columns of one row. With a gate it has those of both parts,
//            and may prepare the result for the next matrix. Or it sends partial sums to other GPUs.
// Accuracy   float32, slots in the order of the thread blocks that wrote them.
// Overlap    Factors are loaded before the wait for the previous kernel. Slots, the inputs' sums and
//            the results to add to are loaded together.
// Floor      With few rows: a launch, a read from the L2 cache, five shuffles in turn.
#include "cuda/elementwise/gate.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/trellis/trellis_prompt.cuh"
#include "cuda/trellis/trellis_sums.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 4;

// Stores results of a block to y and all copies, in which they begin `offset` elements after the start.
__device__ __forceinline__ void send_values(
    const FinishArgs& args, int64_t offset, int first, int count, bool is_aligned,
    const float (&v)[kValues]
) {
    auto* const y = static_cast<float*>(args.y) + offset;
    const uint4 quad =
        make_uint4(sent_bits(v[0]), sent_bits(v[1]), sent_bits(v[2]), sent_bits(v[3]));
    if (is_aligned && first >= 0 && first + kValues <= count) {
#pragma unroll 1
        for (int i = 0; i < args.copies.count; ++i) {
            store_parts(args.copies.to[i] + offset, quad);
        }
        store_parts(y, quad);
        return;
    }
    const uint32_t bits[kValues] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        if (first + i < 0 || first + i >= count) continue;
        send_part(args.copies, offset + i, bits[i]);
        store_part(y + i, bits[i]);
    }
}

template <int epilogue, class Y, bool sends>
__global__ void __launch_bounds__(kWarps* kWarp) finish_kernel(
    const __grid_constant__ FinishArgs args
) {
    if constexpr (!sends) let_next_begin();
    const int lane = threadIdx.x % kWarp, row = blockIdx.x;
    const int task = blockIdx.y * kWarps + threadIdx.x / kWarp;
    const bool exists = task < args.blocks;
    constexpr bool is_gated = epilogue == EXL_EPILOGUE_GATED;
    int i = 0;
    if (!is_gated) {
        i = args.count > 2 && task >= args.parts[2].first_block   ? 2
            : args.count > 1 && task >= args.parts[1].first_block ? 1
                                                                  : 0;
    }
    const FinishPart& part = args.parts[i];
    const int block = task - part.first_block;
    const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
    const int output = first - part.first_out;
    Factors factors, of_up;
    Halves suh;
    if (exists) {
        factors.load(part, first);
        if (is_gated) of_up.load(args.parts[1], first);
        if (is_gated && args.has_next) suh = Halves(args.next.suh + first);
    }
    const Slots slots(part, row, args.first_row, first);
    const Slots slots_of_up(args.parts[is_gated ? 1 : i], row, args.first_row, first);
    Y* y = static_cast<Y*>(args.y) + row * args.y_stride + part.y_column;
    const bool is_aligned = reinterpret_cast<uintptr_t>(y + output) % (kValues * sizeof(Y)) == 0;
    wait_for_inputs();
    // The reader of sums does not wait for this kernel (exl_cuda_trellis_prepare_sums). All kernels
    // before this one have ended here.
    if constexpr (sends) let_next_begin();
    if (!exists) return;
    float v[kValues], up[kValues], old[kValues] = {};
    RowSums sums, sums_of_up;
    sums.load(part, slots, row, first, lane);
    if constexpr (is_gated) sums_of_up.load(args.parts[1], slots_of_up, row, first, lane);
    if constexpr (epilogue == EXL_EPILOGUE_ADD) {
        load_values(y, output, part.out_features, is_aligned, old);
    }
    sums.add(part, slots, lane, v);
    if constexpr (is_gated) sums_of_up.add(args.parts[1], slots_of_up, lane, up);
    finish_block(factors, lane, v);
    if constexpr (is_gated) {
        finish_block(of_up, lane, up);
#pragma unroll
        for (int j = 0; j < kValues; ++j) v[j] = gated(args.gate, v[j], up[j]);
        if (args.has_next) {
#pragma unroll
            for (int j = 0; j < kValues; ++j) {
                if (output + j < 0 || output + j >= part.out_features) v[j] = 0.0f;
            }
            prepare_block(args.next, args.first_row + row, block, v, suh, 1.0f, lane);
            return;
        }
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) v[j] += old[j];
    if constexpr (sends) {
        const int64_t offset = row * args.y_stride + part.y_column + output;
        send_values(args, offset, output, part.out_features, is_aligned, v);
    } else {
        store_values(y, output, part.out_features, is_aligned, v);
    }
}

}  // namespace

cudaError_t launch_finish(const FinishArgs& args, void* stream) {
    if (takes_prompt(args)) return launch_prompt_finish(args, stream);
    const bool is_float = args.y_dtype == kF32;
    auto kernel = finish_kernel<EXL_EPILOGUE_ADD, float, false>;
    if (args.sends) {
        kernel = finish_kernel<EXL_EPILOGUE_STORE, float, true>;
    } else if (args.epilogue == EXL_EPILOGUE_STORE) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_STORE, float, false>
                          : finish_kernel<EXL_EPILOGUE_STORE, __half, false>;
    } else if (args.epilogue == EXL_EPILOGUE_GATED) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_GATED, float, false>
                          : finish_kernel<EXL_EPILOGUE_GATED, __half, false>;
    }
    const dim3 grid(args.m, static_cast<unsigned>(ceil_div(args.blocks, kWarps)));
    return launch(kernel, grid, dim3(kWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

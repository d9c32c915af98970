// Heads multiplied by an activation of their gates, with an RMSNorm before or after it.
//
// Contract   exl/cuda/gate_heads.h.
// Mapping    A warp has one head of one row, or a block of 8 warps where heads are long. Elements are
//            read twice, the second time from the L1 cache. The result is stored as a tensor, or in
//            the places of the next linear's prepared inputs, whose rows of padding become zeros.
// Floor      Operands once at memory bandwidth. With few rows, launch latency.
#include "cuda/common/rows.cuh"
#include "cuda/linear/prepared.cuh"
#include "exl/cuda/gate_heads.h"

namespace exl::cuda {

constexpr int kBlockThreads = 256;
constexpr int kLongHead = 512;  // elements from which a block has a head

// x or gate: [m, k] strided rows of either type.
struct GateOperand {
    const void* rows;
    int64_t stride;
    bool is_half;

    __device__ __forceinline__ float at(int64_t row, int column) const {
        const int64_t index = row * stride + column;
        return is_half ? __half2float(static_cast<const __half*>(rows)[index])
                       : static_cast<const float*>(rows)[index];
    }
};

__device__ __forceinline__ void store_gated(
    const ExlGateHeads& args, int64_t row, int column, float value
) {
    if (args.inverse_permutation != nullptr) {
        const int place = args.inverse_permutation[column], of = static_cast<int>(row);
        const int index = args.m > EXL_CUDA_TILE_ROWS ? prepared_by_rows_at(args.m, of, place)
                                                      : prepared_at(args.m, of, place);
        static_cast<__half*>(args.out)[index] = from_float<__half>(value);
    } else if (args.out_dtype == kF16) {
        static_cast<__half*>(args.out)[row * args.out_stride + column] = from_float<__half>(value);
    } else {
        static_cast<float*>(args.out)[row * args.out_stride + column] = value;
    }
}

template <int threads>
__global__ void __launch_bounds__(kBlockThreads) gate_heads_kernel(ExlGateHeads args) {
    __shared__ float partial[kBlockThreads / kWarp];
    constexpr int kHeads = kBlockThreads / threads;  // of a block
    let_next_begin();
    const int thread = threadIdx.x % threads, heads = args.k / args.head_dim;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeads + threadIdx.x / threads;
    const int64_t row = index / heads;
    const int first = static_cast<int>(index % heads) * args.head_dim;
    const GateOperand x = {args.x, args.x_stride, args.x_dtype == kF16};
    const GateOperand gate = {args.gate, args.gate_stride, args.gate_dtype == kF16};
    const auto gated = [&](int column) {
        const float g = gate.at(row, args.is_row_gate ? 0 : column), value = x.at(row, column);
        const float sigmoid = 1.0f / (1.0f + __expf(-g));
        return value * (args.is_sigmoid ? sigmoid : g * sigmoid);
    };
    wait_for_inputs();
    const bool is_row = row < args.m;
    float factor = 1.0f;
    if (args.norm != nullptr) {
        float squares = 0.0f;
        for (int i = thread; is_row && i < args.head_dim; i += threads) {
            const float value = args.is_gate_first ? gated(first + i) : x.at(row, first + i);
            squares += value * value;
        }
        const float sum = threads == kWarp ? warp_sum(squares)
                                           : block_sum<kBlockThreads / kWarp>(squares, partial);
        factor = rsqrtf(sum / args.head_dim + args.eps);
    }
    const int rows = args.inverse_permutation == nullptr || args.m == 1 ? args.m
                     : args.m <= EXL_CUDA_TILE_ROWS                     ? EXL_CUDA_TILE_ROWS
                                                                        : padded_rows(args.m);
    if (row >= rows) return;
    for (int i = thread; i < args.head_dim; i += threads) {
        const int column = first + i;
        float value = 0.0f;
        if (is_row) {
            value = gated(column) * factor;
            if (args.norm != nullptr) value *= args.norm[args.norm_size == args.k ? column : i];
        }
        store_gated(args, row, column, value);
    }
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_gate_heads(const ExlGateHeads* args, void* stream) {
    const auto is_type = [](int type) { return type == kF32 || type == kF16; };
    const bool is_prepared = args->inverse_permutation != nullptr;
    const bool has_norm = args->norm != nullptr;
    const bool fits =
        args->m >= 0 && args->head_dim >= 1 && args->k % args->head_dim == 0 &&
        is_type(args->x_dtype) && is_type(args->gate_dtype) &&
        (is_prepared ? args->m <= EXL_CUDA_CHUNK_ROWS : is_type(args->out_dtype)) &&
        (!has_norm || args->norm_size == args->k || args->norm_size == args->head_dim);
    if (!fits) return cudaErrorInvalidValue;
    if (args->m == 0) return cudaSuccess;
    const int64_t heads = args->k / args->head_dim;
    const int64_t rows = is_prepared && args->m > 1 ? 8 * exl_cuda_row_tiles(args->m) : args->m;
    if (args->head_dim >= kLongHead) {
        const dim3 grid(static_cast<unsigned>(rows * heads));
        return launch(
            gate_heads_kernel<kBlockThreads>, grid, dim3(kBlockThreads), 0, stream, *args
        );
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(rows * heads, kBlockThreads / kWarp)));
    return launch(gate_heads_kernel<kWarp>, grid, dim3(kBlockThreads), 0, stream, *args);
}

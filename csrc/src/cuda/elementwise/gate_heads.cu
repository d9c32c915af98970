// Heads multiplied by an activation of their gates, with an RMSNorm before or after it.
//
// Contract   exl/cuda/gate_heads.h.
// Mapping    A warp has one head of one row, or a block of 8 warps where heads are long. Elements stay
//            in registers, or are read twice where a thread has more than kHeld, the second time from
//            the L1 cache. The result is stored as a tensor, or in the places of the next linear's
//            prepared inputs, whose rows of padding become zeros.
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
    // The bits of several elements of a row. One branch for all of them, and no conversion, so that
    // the loads are in flight together.
    template <int count>
    __device__ __forceinline__ void load(
        int64_t row, const int (&columns)[count], uint32_t (&bits)[count]
    ) const {
        if (is_half) {
            const auto* const from = static_cast<const uint16_t*>(rows) + row * stride;
#pragma unroll
            for (int j = 0; j < count; ++j) bits[j] = from[columns[j]];
        } else {
            const auto* const from = static_cast<const uint32_t*>(rows) + row * stride;
#pragma unroll
            for (int j = 0; j < count; ++j) bits[j] = from[columns[j]];
        }
    }
    __device__ __forceinline__ float value_of(uint32_t bits) const {
        const auto half = __ushort_as_half(static_cast<unsigned short>(bits));
        return is_half ? __half2float(half) : __uint_as_float(bits);
    }
};

// `place`: of the column, in the next linear's prepared inputs if these are stored.
__device__ __forceinline__ void store_gated(
    const ExlGateHeads& args, int64_t row, int place, float value
) {
    if (args.inverse_permutation != nullptr) {
        const int of = static_cast<int>(row);
        const int index = args.m > EXL_CUDA_TILE_ROWS ? prepared_by_rows_at(args.m, of, place)
                                                      : prepared_at(args.m, of, place);
        static_cast<__half*>(args.out)[index] = from_float<__half>(value);
    } else if (args.out_dtype == kF16) {
        static_cast<__half*>(args.out)[row * args.out_stride + place] = from_float<__half>(value);
    } else {
        static_cast<float*>(args.out)[row * args.out_stride + place] = value;
    }
}

// Elements of a head that a thread has at most, where it keeps them in registers.
constexpr int kHeld = 8;

// Rows that are stored: of prepared inputs also those of padding, which are zeros.
__device__ __forceinline__ int stored_rows(const ExlGateHeads& args) {
    if (args.inverse_permutation == nullptr || args.m == 1) return args.m;
    return args.m <= EXL_CUDA_TILE_ROWS ? EXL_CUDA_TILE_ROWS : padded_rows(args.m);
}

__device__ __forceinline__ float gated_value(const ExlGateHeads& args, float value, float gate) {
    const float sigmoid = 1.0f / (1.0f + __expf(-gate));
    return value * (args.is_sigmoid ? sigmoid : gate * sigmoid);
}

template <int threads>
__device__ __forceinline__ float sum_of_head(float x, float* partial) {
    return threads == kWarp ? warp_sum(x) : block_sum<kBlockThreads / kWarp>(x, partial);
}

// `is_held`: heads of up to kHeld elements per thread, all of which are loaded at once. What no
// kernel has written is loaded before the wait for the previous one.
template <int threads, bool is_held>
__global__ void __launch_bounds__(kBlockThreads) gate_heads_kernel(ExlGateHeads args) {
    __shared__ float partial[kBlockThreads / kWarp];
    constexpr int kHeads = kBlockThreads / threads;  // of a block
    constexpr int kCount = is_held ? kHeld : 1;
    let_next_begin();
    const int thread = threadIdx.x % threads, heads = args.k / args.head_dim;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeads + threadIdx.x / threads;
    const int64_t row = index / heads;
    const int first = static_cast<int>(index % heads) * args.head_dim;
    const GateOperand x = {args.x, args.x_stride, args.x_dtype == kF16};
    const GateOperand gate = {args.gate, args.gate_stride, args.gate_dtype == kF16};
    const bool is_row = row < args.m;
    const auto gain_of = [&](int i) {
        if (args.norm == nullptr) return 1.0f;
        return args.norm[args.norm_size == args.k ? first + i : i];
    };
    float gains[kCount], values[kCount];
    int places[kCount];
    if constexpr (is_held) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const int i = min(thread + j * threads, args.head_dim - 1);
            gains[j] = gain_of(i);
            const bool is_prepared = args.inverse_permutation != nullptr;
            places[j] = is_prepared ? args.inverse_permutation[first + i] : first + i;
        }
    }
    wait_for_inputs();
    float squares = 0.0f;
    if constexpr (is_held) {
        const int64_t from = is_row ? row : 0;
        uint32_t of_x[kCount], of_gate[kCount];
        int columns[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            columns[j] = first + min(thread + j * threads, args.head_dim - 1);
        }
        x.load(from, columns, of_x);
        if (args.is_row_gate) {
#pragma unroll
            for (int& column : columns) column = 0;
        }
        gate.load(from, columns, of_gate);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            values[j] = x.value_of(of_x[j]);
            const float product = gated_value(args, values[j], gate.value_of(of_gate[j]));
            const float value = args.is_gate_first ? product : values[j];
            if (thread + j * threads < args.head_dim) squares += value * value;
            values[j] = product;
        }
    } else if (args.norm != nullptr && is_row) {
        for (int i = thread; i < args.head_dim; i += threads) {
            float value = x.at(row, first + i);
            if (args.is_gate_first) {
                value = gated_value(args, value, gate.at(row, args.is_row_gate ? 0 : first + i));
            }
            squares += value * value;
        }
    }
    float factor = 1.0f;
    if (args.norm != nullptr) {
        const float sum = sum_of_head<threads>(squares, partial);
        factor = rsqrtf(sum / args.head_dim + args.eps);
    }
    if (row >= stored_rows(args)) return;
    if constexpr (is_held) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            if (thread + j * threads >= args.head_dim) continue;
            store_gated(args, row, places[j], is_row ? values[j] * factor * gains[j] : 0.0f);
        }
    } else {
        for (int i = thread; i < args.head_dim; i += threads) {
            float value = 0.0f;
            if (is_row) {
                const float g = gate.at(row, args.is_row_gate ? 0 : first + i);
                value = gated_value(args, x.at(row, first + i), g) * factor * gain_of(i);
            }
            const bool is_prepared = args.inverse_permutation != nullptr;
            const int place = is_prepared ? args.inverse_permutation[first + i] : first + i;
            store_gated(args, row, place, value);
        }
    }
}

template <int threads>
cudaError_t launch_gate_heads(const ExlGateHeads& args, int64_t blocks, void* stream) {
    const auto kernel = args.head_dim <= kHeld * threads ? gate_heads_kernel<threads, true>
                                                         : gate_heads_kernel<threads, false>;
    return launch(
        kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), 0, stream, args
    );
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
        return launch_gate_heads<kBlockThreads>(*args, rows * heads, stream);
    }
    const int64_t blocks = ceil_div(rows * heads, kBlockThreads / kWarp);
    return launch_gate_heads<kWarp>(*args, blocks, stream);
}

// Inputs of the products with experts: rows in the order of the matrices, and pairs sorted by
// expert. Also the weighted sum of a row's experts.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_inputs, exl_cuda_expert_sum).
// Mapping    Thread block 0 sorts the pairs (moe/sort.cuh). The other blocks convert rows, two
//            numbers per thread.
// Floor      A launch, and two reads of the ids. With many rows: the bytes at memory bandwidth.
#include <algorithm>

#include "cuda/common/rows.cuh"
#include "cuda/moe/sort.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

namespace {

constexpr int kThreads = kSortThreads, kWarps = kSortWarps;
constexpr int kSlice = 2 * kThreads;  // numbers that a thread block converts

// ---- conversion --------------------------------------------------------------------------------

template <class X>
__device__ __forceinline__ __half2 two_of(const X* row, int2 features) {
    const float first = features.x < 0 ? 0.0f : to_float(row[features.x]);
    const float second = features.y < 0 ? 0.0f : to_float(row[features.y]);
    return __halves2half2(from_float<__half>(first), from_float<__half>(second));
}

// Features of a position and the one after it, -1: padding.
__device__ __forceinline__ int2 features_of(
    const ExlExpertInputs& args, const int32_t* permutation, int position
) {
    if (permutation != nullptr) return *reinterpret_cast<const int2*>(permutation + position);
    return make_int2(position < args.k ? position : -1, position + 1 < args.k ? position + 1 : -1);
}

// Converts slice `index` of all slices of all forms.
template <class X>
__device__ __forceinline__ void convert(const ExlExpertInputs& args, int64_t index, int slices) {
    const int position = static_cast<int>(index % slices) * kSlice + 2 * threadIdx.x;
    const int64_t form_row = index / slices;
    const int form = args.count == 2 && form_row % 2 == 1;
    const int64_t out_row = form_row / args.count;
    int64_t row = out_row;
    int rows_of_k = 32 * args.num_blocks;
    const int32_t* permutation = args.permutation;
    if (args.matrices != nullptr) {
        row = out_row / args.top_k;
        const ExlExpertMatrix* matrix =
            args.matrices + form + args.matrix_stride * args.ids[out_row];
        rows_of_k = 32 * matrix->num_blocks;
        permutation = matrix->permutation;
    }
    if (position >= rows_of_k) return;
    const int2 features = features_of(args, permutation, position);
    const __half2 two = two_of(static_cast<const X*>(args.x) + row * args.x_stride, features);
    auto* const out = static_cast<__half*>(form == 1 ? args.out[1] : args.out[0]);
    *reinterpret_cast<__half2*>(out + out_row * 32 * args.num_blocks + position) = two;
}

template <class X>
__global__ void __launch_bounds__(kThreads) inputs_kernel(
    const ExlExpertInputs args, const int slices
) {
    extern __shared__ int shared[];
    let_next_begin();
    wait_for_inputs();
    const int sorts = args.num_items != nullptr;
    if (sorts && blockIdx.x == 0) {
        const PairSort sort = {args.ids,       args.m,     args.top_k, args.experts, args.tile_rows,
                               args.num_items, args.items, args.pairs, nullptr};
        sort_pairs(sort, shared);
        return;
    }
    convert<X>(args, blockIdx.x - sorts, slices);
}

constexpr int kGatherBlocks = 4;  // blocks of 32 rows of k that a thread converts

// A thread block converts the rows of one chunk: 8 rows per warp, and a group of 8 of the 32
// numbers of a block per lane.
template <class X>
__global__ void __launch_bounds__(kThreads) gather_kernel(const ExlExpertInputs args) {
    wait_for_inputs();
    let_next_begin();
    constexpr int kChunkRows = EXL_CUDA_CHUNK_ROWS;
    static_assert(kChunkRows == 8 * kWarps);
    const int chunk = blockIdx.y, group = threadIdx.x % 4, in_chunk = threadIdx.x / 4;
    if (chunk / 2 >= *args.num_items) return;
    const ExlExpertItem item = args.items[chunk / 2];
    const int row = chunk % 2 * kChunkRows + in_chunk;
    if (row >= item.count) return;
    const int64_t x_row = args.pairs[item.first + row] / args.top_k;
    const X* const x = static_cast<const X*>(args.x) + x_row * args.x_stride;
    const int64_t first_block = static_cast<int64_t>(chunk) * args.num_blocks;
    for (int i = 0; i < kGatherBlocks; ++i) {
        const int block = kGatherBlocks * blockIdx.x + i;
        if (block >= args.num_blocks) return;
        alignas(16) __half2 to[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int at = 32 * block + 8 * t + 2 * group;
            to[t] = two_of(x, features_of(args, args.permutation, at));
        }
        auto* const out = static_cast<__half*>(args.out[0]) +
                          (((first_block + block) * 4 + group) * kChunkRows + in_chunk) * 8;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(to);
    }
}

// One thread per vector of four columns, or per column.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) sum_kernel(
    const float* x, const float* weights, int top_k, int n, bool is_added, float* y,
    int64_t y_stride
) {
    let_next_begin();
    wait_for_inputs();
    const int64_t row = blockIdx.y;
    const int column = kColumns * (blockIdx.x * kThreads + threadIdx.x);
    if (column >= n) return;
    const float* from = x + row * top_k * n + column;
    float sums[kColumns] = {};
#pragma unroll 4
    for (int slot = 0; slot < top_k; ++slot) {
        const float weight = weights[row * top_k + slot];
        float values[kColumns];
        if constexpr (kColumns == 4) {
            *reinterpret_cast<float4*>(values) =
                *reinterpret_cast<const float4*>(from + static_cast<int64_t>(slot) * n);
        } else {
            values[0] = from[static_cast<int64_t>(slot) * n];
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    float* to = y + row * y_stride + column;
    if (is_added) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] += to[i];
    }
    if constexpr (kColumns == 4) {
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(sums);
    } else {
        *to = sums[0];
    }
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_inputs(const ExlExpertInputs* args, void* stream) {
    using namespace exl::cuda;
    const ExlExpertInputs& a = *args;
    const bool sorts = a.num_items != nullptr;
    const int64_t pairs = static_cast<int64_t>(a.m) * a.top_k;
    const bool fits = a.m >= 0 && a.top_k >= 1 && pairs < INT32_MAX / 2 && a.experts >= 1 &&
                      a.experts <= EXL_CUDA_MAX_EXPERTS && a.count >= 0 && a.count <= 2 &&
                      (a.count == 0 || (a.k >= 1 && a.num_blocks >= 1)) &&
                      (a.x_dtype == kF32 || a.x_dtype == kF16) && (!sorts || a.tile_rows >= 1);
    if (!fits) return cudaErrorInvalidValue;
    if (a.m == 0 || (!sorts && a.count == 0)) return cudaSuccess;
    const int64_t slices = ceil_div(32 * static_cast<int64_t>(a.num_blocks), kSlice);
    const int64_t rows = (a.matrices != nullptr ? pairs : a.m) * a.count;
    const int64_t blocks = rows * slices + sorts;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    const size_t shared_bytes = sorts ? sort_bytes(a.experts) : 0;
    return launch(
        a.x_dtype == kF32 ? inputs_kernel<float> : inputs_kernel<__half>,
        dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared_bytes, stream, a,
        static_cast<int>(slices)
    );
}

extern "C" int exl_cuda_expert_gather(
    const ExlExpertInputs* args, int64_t max_items, void* stream
) {
    using namespace exl::cuda;
    const ExlExpertInputs& a = *args;
    const bool fits = a.top_k >= 1 && a.k >= 1 && a.num_blocks >= 1 && a.num_items != nullptr &&
                      a.tile_rows == EXL_CUDA_EXPERT_ITEM_ROWS && max_items >= 0 &&
                      2 * max_items <= 65535 && (a.x_dtype == kF32 || a.x_dtype == kF16);
    if (!fits) return cudaErrorInvalidValue;
    if (max_items == 0) return cudaSuccess;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(a.num_blocks, kGatherBlocks)),
        static_cast<unsigned>(2 * max_items)
    );
    return launch(
        a.x_dtype == kF32 ? gather_kernel<float> : gather_kernel<__half>, grid, dim3(kThreads), 0,
        stream, a
    );
}

extern "C" int exl_cuda_expert_sum(
    const float* x, const float* weights, int32_t m, int32_t top_k, int32_t n, int32_t is_added,
    float* y, int64_t y_stride, void* stream
) {
    using namespace exl::cuda;
    if (m < 0 || m > 65535 || top_k < 1 || n < 1) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const bool is_aligned = reinterpret_cast<uintptr_t>(y) % 16 == 0 && y_stride % 4 == 0;
    const int columns = n % 4 == 0 && is_aligned ? 4 : 1;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(n, columns * kThreads)), static_cast<unsigned>(m)
    );
    return launch(
        columns == 4 ? sum_kernel<4> : sum_kernel<1>, grid, dim3(kThreads), 0, stream, x, weights,
        top_k, n, is_added != 0, y, y_stride
    );
}

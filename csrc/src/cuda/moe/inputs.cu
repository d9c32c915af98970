// Inputs of the products with experts: rows in the order of the matrices, and pairs sorted by
// expert. Also the weighted sum of a row's experts.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_inputs, exl_cuda_expert_sum).
// Mapping    Thread block 0 sorts the pairs (a counting sort: each warp counts the experts of a
//            range of pairs). The other blocks convert rows, two numbers per thread.
// Floor      A launch, and two reads of the ids. With many rows: the bytes at memory bandwidth.
#include <algorithm>

#include "cuda/common/rows.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kSlice = 2 * kThreads;  // numbers that a thread block converts

// ---- sorting -----------------------------------------------------------------------------------

// Shared memory of the sort. counts[w][e] becomes the position of the next pair of expert e that
// warp w finds, relative to the expert's first one.
struct SortState {
    int* counts;       // [kWarps][experts]
    int* starts;       // [experts] position of the expert's first pair
    int* item_starts;  // [experts] number of its first item
    int* totals;       // [experts] its pairs
};

// Calls use(pair, expert, mask) for all pairs of this warp's range, 32 at a time. `mask` has the
// lanes whose pairs have the same expert. Lanes without a pair get expert -1.
template <class Use>
__device__ __forceinline__ void for_own_pairs(
    const ExlExpertInputs& args, int warp, int lane, const Use& use
) {
    const int pairs = args.m * args.top_k;
    const int each = (pairs + kWarps * kWarp - 1) / (kWarps * kWarp) * kWarp;
    const int end = min(pairs, (warp + 1) * each);
    for (int first = warp * each; first < end; first += kWarp) {
        const int pair = first + lane;
        const int expert = pair < end ? args.ids[pair] : -1;
        use(pair, expert, __match_any_sync(0xffffffffu, expert));
    }
}

// Replaces counts by prefix sums over the warps, and numbers pairs and items over the experts.
__device__ __forceinline__ void number_pairs(const ExlExpertInputs& args, const SortState& state) {
    for (int e = threadIdx.x; e < args.experts; e += kThreads) {
        int total = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            int& count = state.counts[w * args.experts + e];
            const int own = count;
            count = total;
            total += own;
        }
        state.totals[e] = total;
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    int pairs = 0, items = 0;
    for (int first = 0; first < args.experts; first += kWarp) {
        const int e = first + static_cast<int>(threadIdx.x);
        const int total = e < args.experts ? state.totals[e] : 0;
        const int own_items = (total + args.tile_rows - 1) / args.tile_rows;
        int pair_sum = total, item_sum = own_items;
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const int more_pairs = __shfl_up_sync(0xffffffffu, pair_sum, step);
            const int more_items = __shfl_up_sync(0xffffffffu, item_sum, step);
            if (static_cast<int>(threadIdx.x) >= step) {
                pair_sum += more_pairs;
                item_sum += more_items;
            }
        }
        if (e < args.experts) {
            state.starts[e] = pairs + pair_sum - total;
            state.item_starts[e] = items + item_sum - own_items;
        }
        pairs += __shfl_sync(0xffffffffu, pair_sum, kWarp - 1);
        items += __shfl_sync(0xffffffffu, item_sum, kWarp - 1);
    }
    if (threadIdx.x == 0) *args.num_items = items;
}

__device__ __forceinline__ void sort_pairs(const ExlExpertInputs& args, int* shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const SortState state = {
        shared, shared + kWarps * args.experts, shared + (kWarps + 1) * args.experts,
        shared + (kWarps + 2) * args.experts
    };
    for (int i = threadIdx.x; i < kWarps * args.experts; i += kThreads) state.counts[i] = 0;
    __syncthreads();
    int* const own = state.counts + warp * args.experts;
    for_own_pairs(args, warp, lane, [&](int, int expert, uint32_t mask) {
        if (expert >= 0 && lane == __ffs(mask) - 1) own[expert] += __popc(mask);
        __syncwarp();
    });
    __syncthreads();
    number_pairs(args, state);
    __syncthreads();
    for_own_pairs(args, warp, lane, [&](int pair, int expert, uint32_t mask) {
        const int position = expert < 0 ? 0 : state.starts[expert] + own[expert];
        __syncwarp();
        if (expert >= 0) {
            args.pairs[position + __popc(mask & ((1u << lane) - 1))] = pair;
            if (lane == __ffs(mask) - 1) own[expert] += __popc(mask);
        }
        __syncwarp();
    });
    for (int e = threadIdx.x; e < args.experts; e += kThreads) {
        const int total = state.totals[e];
        ExlExpertItem* to = args.items + state.item_starts[e];
        for (int done = 0; done < total; done += args.tile_rows, ++to) {
            *to = {e, state.starts[e] + done, min(args.tile_rows, total - done), 0};
        }
    }
}

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
        sort_pairs(args, shared);
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
    const size_t shared_bytes = sorts ? sizeof(int) * (kWarps + 3) * a.experts : 0;
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

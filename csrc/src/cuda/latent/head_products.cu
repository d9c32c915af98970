// Products of each head with a matrix of its own, for few rows: queries for latent vectors, and
// values from them.
//
// Contract   exl/cuda/latent.h.
// Mapping    A thread block has 32 columns of one head and up to 8 rows. A warp takes every eighth
//            group of four numbers of k; a lane has one of the four and 4 columns. Blocks after those
//            of the products copy.
// Accuracy   Inputs as they are, float32 sums over lanes and then over warps.
// Overlap    The first weights of a lane are loaded before the wait for the previous kernel.
// Floor      The weights once at memory bandwidth for every 8 rows. With few heads, launch latency.
#include "cuda/common/rows.cuh"
#include "cuda/linear/prepared.cuh"
#include "exl/cuda/latent.h"

namespace exl::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kLaneColumns = 4;
constexpr int kColumnLanes = 8;  // lanes along the columns
constexpr int kColumns = kLaneColumns * kColumnLanes;
constexpr int kStep =
    kWarps * kWarp / kColumnLanes;     // numbers of k that a block multiplies at once
constexpr int kAhead = 16;             // steps whose weights are loaded at once
constexpr int kRows = 8;               // of a block
constexpr int kInputs = 2;             // of a thread, loaded at once
constexpr int kCopied = 4 * kThreads;  // numbers of a row that a block copies

extern __shared__ float inputs[];  // [rows][k]

// Values at some indices. One branch for all of them, so that the loads are in flight together.
template <int count>
__device__ __forceinline__ void load_values(
    const void* from, bool is_half, const int64_t (&at)[count], float (&to)[count]
) {
    if (is_half) {
        __half halves[count];
#pragma unroll
        for (int j = 0; j < count; ++j) halves[j] = static_cast<const __half*>(from)[at[j]];
#pragma unroll
        for (int j = 0; j < count; ++j) to[j] = __half2float(halves[j]);
    } else {
#pragma unroll
        for (int j = 0; j < count; ++j) to[j] = static_cast<const float*>(from)[at[j]];
    }
}

// Copies one part of the rows of a block. Threads share a row, or a warp has one.
template <int rows>
__device__ __forceinline__ void copy_rows(
    const ExlHeadCopy& copy, int part, int first_row, int count, float* partial
) {
    constexpr int kSharing = rows == 1 ? kThreads : kWarp;
    constexpr int kTogether = kCopied / kThreads;  // numbers of a thread whose loads are in flight
    const int thread = threadIdx.x % kSharing, row = first_row + threadIdx.x / kSharing;
    if (rows > 1 && row >= first_row + count) return;
    const int64_t to_row = copy.slots == nullptr ? row : copy.slots[row];
    const bool is_half = copy.dtype == kF16;
    const int64_t own = row * copy.row_stride;
    float factor = 1.0f;
    if (copy.norm != nullptr) {
        float squares = 0.0f;
#pragma unroll 1
        for (int start = thread; start < copy.width; start += kTogether * kSharing) {
            int64_t at[kTogether];
            float values[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                at[j] = own + min(start + j * kSharing, copy.width - 1);
            }
            load_values(copy.from, is_half, at, values);
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                if (start + j * kSharing < copy.width) squares += values[j] * values[j];
            }
        }
        const float sum = rows == 1 ? block_sum<kWarps>(squares, partial) : warp_sum(squares);
        factor = rsqrtf(sum / copy.width + copy.eps);
    }
    const int half = copy.width / 2, first = part * kCopied;
    const int end = min(first + kCopied, copy.heads * copy.width);
    auto* const to = static_cast<__half*>(copy.to) + to_row * copy.to_row_stride;
#pragma unroll 1
    for (int start = first + thread; start < end; start += kTogether * kSharing) {
        int heads[kTogether], places[kTogether];
        int64_t at[kTogether];
        float values[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = min(start + j * kSharing, end - 1);
            heads[j] = i / copy.width, places[j] = i - heads[j] * copy.width;
            at[j] = own + heads[j] * copy.head_stride + places[j];
        }
        load_values(copy.from, is_half, at, values);
        if (copy.norm != nullptr) {
            float weights[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) weights[j] = copy.norm[places[j]];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) values[j] *= factor * weights[j];
        }
        if (copy.cos != nullptr) {
            float partners[kTogether], cosines[kTogether], sines[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const bool is_low = places[j] < half;
                const int angle = row * half + places[j] - (is_low ? 0 : half);
                cosines[j] = copy.cos[angle];
                sines[j] = is_low ? -copy.sin[angle] : copy.sin[angle];
                at[j] += is_low ? half : -half;
            }
            load_values(copy.from, is_half, at, partners);
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                values[j] = values[j] * cosines[j] + partners[j] * sines[j];
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            if (start + j * kSharing >= end) break;
            to[heads[j] * copy.to_head_stride + places[j]] = from_float<__half>(values[j]);
        }
    }
}

// Blocks for a copy: parts of kCopied numbers of a row.
__host__ __device__ inline int copy_parts(const ExlHeadCopy& copy) {
    return copy.from == nullptr ? 0 : (copy.heads * copy.width + kCopied - 1) / kCopied;
}

// Rows of y that are stored: of prepared inputs also those of padding, which are zeros.
__device__ __forceinline__ int stored_rows(const ExlHeadProducts& args) {
    if (args.inverse_permutation == nullptr || args.m == 1) return args.m;
    return padded_rows(args.m);
}

template <int rows>
__global__ void __launch_bounds__(kThreads) head_products_kernel(
    const __grid_constant__ ExlHeadProducts args, int tiles
) {
    __shared__ float partial[kWarps][rows][kColumns];
    let_next_begin();
    const int block = static_cast<int>(blockIdx.x), products = args.heads * tiles;
    const int first_row = blockIdx.y * rows, count = min(rows, args.m - first_row);
    if (block >= products) {
        wait_for_inputs();
        int part = block - products;
#pragma unroll 1
        for (const ExlHeadCopy& copy : args.copies) {
            const int parts = copy_parts(copy);
            if (part >= 0 && part < parts && count > 0) {
                copy_rows<rows>(copy, part, first_row, count, &partial[0][0][0]);
            }
            part -= parts;
        }
        return;
    }
    const int head = block / tiles, tile = block - head * tiles;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int own_k = warp * (kWarp / kColumnLanes) + lane / kColumnLanes;
    const int column = tile * kColumns + lane % kColumnLanes * kLaneColumns;
    const __half* const weight = static_cast<const __half*>(args.weight) +
                                 static_cast<int64_t>(head) * args.k * args.n + column;
    uint2 ahead[kAhead];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int k = first + own_k + i * kStep;
            ahead[i] = make_uint2(0, 0);
            if (k >= args.k || column >= args.n) continue;
            ahead[i] = *reinterpret_cast<const uint2*>(weight + static_cast<int64_t>(k) * args.n);
        }
    };
    load(0);
    const int row = threadIdx.x / kColumns, place = tile * kColumns + threadIdx.x % kColumns;
    const bool is_placed = args.inverse_permutation != nullptr && place < args.n;
    const int feature = is_placed ? args.inverse_permutation[head * args.n + place] : 0;
    wait_for_inputs();
    const int total = rows * args.k;
#pragma unroll 1
    for (int start = threadIdx.x; start < total; start += kInputs * kThreads) {
        int64_t at[kInputs];
        float some[kInputs];
#pragma unroll
        for (int j = 0; j < kInputs; ++j) {
            const int i = min(start + j * kThreads, total - 1);
            const int of = i / args.k, k = i - of * args.k;
            at[j] =
                (first_row + min(of, count - 1)) * args.row_stride + head * args.head_stride + k;
        }
        load_values(args.x, args.dtype == kF16, at, some);
#pragma unroll
        for (int j = 0; j < kInputs; ++j) {
            const int i = start + j * kThreads;
            if (i < total) inputs[i] = i < count * args.k ? some[j] : 0.0f;
        }
    }
    __syncthreads();
    float sums[rows][kLaneColumns] = {};
    for (int first = 0; first < args.k; first += kAhead * kStep) {
        if (first > 0) load(first);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int k = first + own_k + i * kStep;
            if (k >= args.k) continue;
            const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&ahead[i].x));
            const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&ahead[i].y));
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                const float x = inputs[r * args.k + k];
                sums[r][0] = fmaf(x, low.x, sums[r][0]);
                sums[r][1] = fmaf(x, low.y, sums[r][1]);
                sums[r][2] = fmaf(x, high.x, sums[r][2]);
                sums[r][3] = fmaf(x, high.y, sums[r][3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
            float sum = sums[r][c];
#pragma unroll
            for (int step = kColumnLanes; step < kWarp; step *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            }
            if (lane < kColumnLanes) partial[warp][r][lane * kLaneColumns + c] = sum;
        }
    }
    __syncthreads();
    const int stored = min(rows, stored_rows(args) - first_row);
    if (row >= stored || place >= args.n) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += partial[i][row][threadIdx.x % kColumns];
    int64_t at = (first_row + row) * args.y_row_stride + head * args.y_head_stride + place;
    if (args.inverse_permutation != nullptr) {
        at = args.m > EXL_CUDA_TILE_ROWS ? prepared_by_rows_at(args.m, first_row + row, feature)
                                         : prepared_at(args.m, first_row + row, feature);
    }
    static_cast<__half*>(args.y)[at] = from_float<__half>(sum);
}

template <int rows>
cudaError_t launch_products(const ExlHeadProducts& args, void* stream) {
    const int tiles = static_cast<int>(ceil_div(args.n, kColumns));
    int blocks = args.heads * tiles;
    for (const ExlHeadCopy& copy : args.copies) blocks += copy_parts(copy);
    const bool is_padded = args.inverse_permutation != nullptr && args.m > 1;
    const int64_t stored = is_padded ? 8 * exl_cuda_row_tiles(args.m) : args.m;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(stored, rows)));
    const size_t bytes = sizeof(float) * rows * args.k;
    return launch(head_products_kernel<rows>, grid, dim3(kThreads), bytes, stream, args, tiles);
}

static_assert(kRows * kColumns == kThreads, "a thread stores one number");

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_head_products(const ExlHeadProducts* args, void* stream) {
    using namespace exl::cuda;
    const ExlHeadProducts& a = *args;
    const auto is_type = [](int type) { return type == kF32 || type == kF16; };
    bool fits = a.m >= 0 && a.m <= 65535 && a.heads >= 1 && a.k >= 1 &&
                a.k <= EXL_CUDA_MAX_HEAD_K && a.n >= 4 && a.n % 4 == 0 && is_type(a.dtype) &&
                reinterpret_cast<uintptr_t>(a.weight) % 8 == 0 &&
                (a.inverse_permutation == nullptr || a.m <= EXL_CUDA_CHUNK_ROWS);
    for (const ExlHeadCopy& copy : a.copies) {
        const bool is_copy = is_type(copy.dtype) && copy.heads >= 1 && copy.width >= 1 &&
                             (copy.norm == nullptr || (copy.heads == 1 && copy.width <= kCopied)) &&
                             (copy.cos == nullptr || (copy.norm == nullptr && copy.width % 2 == 0));
        fits = fits && (copy.from == nullptr || is_copy);
    }
    if (!fits) return cudaErrorInvalidValue;
    if (a.m == 0) return cudaSuccess;
    return a.m == 1 ? launch_products<1>(a, stream) : launch_products<kRows>(a, stream);
}

// The kernel of exl_cuda_prepare (prepare.cu) for prompts.
//
// Used for   More than EXL_CUDA_CHUNK_ROWS rows, without LayerNorm and plain forms. Only the
//            batch-invariant mode prepares more rows than that at once.
// Floor      The bytes at memory bandwidth.
// Mapping    A block takes 4 or 8 rows of the batch and keeps them in shared memory as float16. In
//            the small-batch layout the same 8 positions of adjacent rows follow each other, so
//            that adjacent threads gather them, each for one row. A permutation is read once for
//            all rows of the block.
// Accuracy   The bits of prepare.cu: squares are summed by as many threads in the same order.
#pragma once

#include <algorithm>

#include "cuda/common/rows.cuh"
#include "cuda/linear/prepared.cuh"
#include "cuda/linear/quant_small_batch.cuh"

namespace exl::cuda {

constexpr int kBlockRows = 32;
constexpr int kNormThreads = 512;  // the order in which squares are summed depends on it
constexpr int kSegment = 8;        // positions of a row whose values a thread gathers together

// Location of one row of the batch in a prepared form. Offsets are in float16 elements.
struct Place {
    int64_t first;  // offset of position 0
    int pitch;      // from one block of 32 positions to the next
    int spread;     // from one group of 8 to the next, in the small-batch layout; otherwise 0

    // Offset of an even position. The odd position after it follows directly.
    __device__ __forceinline__ int64_t at(int position) const {
        const int in_block = position % 32;
        const int offset = spread == 0 ? in_block : in_block / 2 % 4 * spread + in_block / 8 * 2;
        return first + static_cast<int64_t>(position / 32) * pitch + offset;
    }
};

__device__ __forceinline__ Place place_of(
    int row, int m, int least_rows, int num_blocks, bool may_be_small_batch
) {
    constexpr int kChunkRows = EXL_CUDA_CHUNK_ROWS;
    const int chunk = row / kChunkRows, in_chunk = row % kChunkRows;
    const int rows = max(min(m - chunk * kChunkRows, kChunkRows), least_rows);
    const int64_t first = static_cast<int64_t>(chunk) * num_blocks * 32 * kChunkRows;
    if (rows == 1) return {first, 32, 0};
    const int padded = padded_rows(rows);
    if (rows > 8 && may_be_small_batch) return {first + in_chunk * 8, padded * 32, padded * 8};
    return {first + in_chunk * 32, padded * 32, 0};
}

// Input features at `position` and the position after it.
__device__ __forceinline__ int2 features_at(const ExlPrepared& to, int position, int k) {
    if (to.permutation != nullptr) return *reinterpret_cast<const int2*>(to.permutation + position);
    return make_int2(position < k ? position : -1, position + 1 < k ? position + 1 : -1);
}

// One step of a row's sum of squares. It rounds once in every kernel.
__device__ __forceinline__ float add_square(float sum, float x) { return __fmaf_rn(x, x, sum); }
// Factor of a row's RMSNorm.
__device__ __forceinline__ float rms_factor(float sum, const ExlPrepare& args) {
    return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(args.k)), args.eps));
}

// Elements between rows in shared memory. 16 bytes more than a multiple of 128: a feature of
// different rows falls into different banks.
inline int row_stride(int k) { return static_cast<int>(ceil_div(k, 64) * 64) + kSegment; }

// Calls body(r, values) with the values from i on of each of the rows, of `together` at most.
template <class X, int together, class Body>
__device__ __forceinline__ void for_each_row(
    const ExlPrepare& args, const X* x, int rows, int i, Body&& body
) {
    constexpr int kInFlight = 4;  // loads; more take too many registers
#pragma unroll
    for (int first = 0; first < together; first += kInFlight) {
        Vector<X> vectors[kInFlight];
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
            const X* from = x + (first + r) * args.x_stride + i;
            if (first + r < rows) vectors[r] = load_vector(from, kVector, true);
        }
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
            if (first + r >= rows) break;
            float values[kVector];
            vectors[r].to_floats(values);
            body(first + r, values);
        }
    }
}

// Factors of `together` rows, to `factors` in shared memory. Rows outside of the batch have none.
template <class X, int together>
__device__ __forceinline__ void compute_factors(
    const ExlPrepare& args, const X* x, int rows, float* factors
) {
    constexpr int kWarps = kNormThreads / kWarp;
    __shared__ float partial[together][kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float sums[together] = {};
    for (int i = kVector * threadIdx.x; i < args.k; i += kVector * kNormThreads) {
        for_each_row<X, together>(args, x, rows, i, [&](int r, const float (&values)[kVector]) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) sums[r] = add_square(sums[r], values[j]);
        });
    }
#pragma unroll
    for (int r = 0; r < together; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0) partial[r][warp] = sum;
    }
    __syncthreads();
    if (warp < together) {
        const float sum = warp_sum(lane < kWarps ? partial[warp][lane] : 0.0f);
        if (lane == 0) factors[warp] = rms_factor(sum, args);
    }
    __syncthreads();
}

// Rows of the batch as float16, normalized, in shared memory.
template <class X, int together>
__device__ __forceinline__ void load_rows_as_halves(
    const ExlPrepare& args, const X* x, int rows, const float* factors, __half* to, int stride
) {
    for (int i = kVector * threadIdx.x; i < args.k; i += kVector * kNormThreads) {
        float weights[kVector];
        if (args.norm != nullptr) load_floats(args.norm + i, kVector, true, weights);
        for_each_row<X, together>(args, x, rows, i, [&](int r, float (&values)[kVector]) {
            if (args.norm != nullptr) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) {
                    values[j] = __fmul_rn(__fmul_rn(values[j], weights[j]), factors[r]);
                }
            }
            store_vector(to + r * stride + i, kVector, true, values);
        });
    }
    __syncthreads();
}

template <class X, int together>
__global__ void __launch_bounds__(kNormThreads, 2) prepare_many_rows_kernel(
    const ExlPrepare args, const int all_rows, const int stride, const bool may_be_small_batch
) {
    extern __shared__ uint4 shared[];
    __shared__ float factors[together];
    auto* halves = reinterpret_cast<__half*>(shared);
    let_next_begin();
    wait_for_inputs();
    const int first_row = static_cast<int>(blockIdx.x) * together;
    const int rows = min(together, args.m - first_row);
    const X* x = static_cast<const X*>(args.x) + first_row * args.x_stride;
    if (args.norm != nullptr) compute_factors<X, together>(args, x, rows, factors);
    load_rows_as_halves<X, together>(args, x, rows, factors, halves, stride);

    const int own = threadIdx.x % together, batch_row = first_row + own;
    if (batch_row >= all_rows) return;
    const bool is_padding = own >= rows;
    const __half* row = halves + own * stride;
    for (int form = 0; form < args.count; ++form) {
        const ExlPrepared to = form == 0 ? args.to[0] : form == 1 ? args.to[1] : args.to[2];
        const Place place =
            place_of(batch_row, args.m, args.least_rows, to.num_blocks, may_be_small_batch);
        // A segment has pairs of positions, 8 apart in the small-batch layout and adjacent in the
        // others. The segments of a block start 2 or 8 apart.
        const int pitch = place.spread > 0 ? 8 : 2, step = place.spread > 0 ? 2 : 8;
        const int segments = to.num_blocks * (kBlockRows / kSegment);
        constexpr int kStep = kNormThreads / together;
        const auto position_of = [&](int i) { return i / 4 * kBlockRows + i % 4 * step; };
        int2 features[kSegment / 2];
        const auto load_features = [&](int i) {
#pragma unroll
            for (int pair = 0; pair < kSegment / 2; ++pair) {
                features[pair] = features_at(to, position_of(i) + pair * pitch, args.k);
            }
        };
        int i = threadIdx.x / together;
        if (i < segments) load_features(i);
        for (; i < segments; i += kStep) {
            uint32_t words[kSegment / 2];
#pragma unroll
            for (int pair = 0; pair < kSegment / 2; ++pair) {
                const auto value = [&](int feature) -> uint32_t {
                    const bool has_value = !is_padding && feature >= 0;
                    return has_value ? __half_as_ushort(row[feature]) : 0;
                };
                words[pair] = value(features[pair].x) | value(features[pair].y) << 16;
            }
            __half* at = static_cast<__half*>(to.out) + place.at(position_of(i));
            if (i + kStep < segments) load_features(i + kStep);  // while the values arrive
            *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Rows of a block of prepare_many_rows_kernel; 0 if it cannot be used.
template <class X>
int rows_together(const ExlPrepare& args, const DeviceInfo& info) {
    if (args.m <= EXL_CUDA_CHUNK_ROWS || args.is_layer_norm) return 0;
    if (!rows_are_aligned(args.x, args.k, args.x_stride, sizeof(X))) return 0;
    for (int form = 0; form < args.count; ++form) {
        if (args.to[form].plain) return 0;
    }
    const int most = (info.shared_per_block - 1024) / 2 / row_stride(args.k);
    // Half as many rows keep more multiprocessors busy with a short prompt.
    const bool is_short = args.m < 8 * info.multiprocessors;
    return most >= 8 && !is_short ? 8 : most >= 4 ? 4 : 0;
}

template <class X>
cudaError_t prepare_many_rows(
    const ExlPrepare& args, const DeviceInfo& info, int rows, int together, void* stream
) {
    const int stride = row_stride(args.k);
    return launch(
        together == 8 ? prepare_many_rows_kernel<X, 8> : prepare_many_rows_kernel<X, 4>,
        dim3(static_cast<unsigned>(ceil_div(rows, together))), dim3(kNormThreads),
        static_cast<size_t>(together) * stride * 2, stream, args, rows, stride,
        is_small_batch(info, EXL_CUDA_CHUNK_ROWS)
    );
}

}  // namespace exl::cuda

// Attention with heads of more than 256 elements, for a few or many query rows of a sequence.
//
// Used for   Head sizes 257 to 512 (global layers of Gemma 4), and shared rows. The other two kernels
//            hold a whole head per warp in registers, which such heads do not fit in.
// Floor      Keys and values are read once per block at memory bandwidth; 4 d operations for each
//            pair of a query and a key that it sees.
// Mapping    A block handles 16 or 64 query vectors (rows times query heads of the group) of one kv
//            head, and its share of the keys. All warps share a tile of keys and values, which they
//            convert to float16 while copying it to shared memory. For S = Q K^T each warp takes
//            other keys, for O = P V each warp takes 64 elements of the head.
// Shared     Rows of up to 576 elements that are keys and values at once (latent attention) are
//            copied once. Of more than 512 elements, the first 64 are keys only: their results are
//            not computed.
// Codes      Keys and values stay in the space of the Hadamard transform: queries are transformed
//            when they are loaded, results when they are stored.
// Overlap    The first tile is copied before the previous kernel has ended, except for rows of this
//            pass.
// Splits     Blocks with a part of the keys write partial results. Of each eight blocks the last one
//            to arrive adds theirs, and the last of those adds the sums, in the order of the splits.
//            Each resets its counter to zero. A single block would read all of them alone, at the
//            bandwidth of one multiprocessor.
// Invariance In the batch-invariant mode there is one split, and tiles have the same number of keys
//            and vectors the same number of threads, however many vectors a block has. A vector's
//            sums do not depend on anything else.
#pragma once

#include "cuda/attention/attention_wide_tile.cuh"

namespace exl::cuda {

constexpr int kWideUnits = kWideHead / kUnit;
constexpr int kMostLateRows = 16;  // of a tile that is copied before the previous kernel has ended
constexpr int kAddedParts = 8;     // partial results that one block adds
constexpr int kWideMostSplits = kAddedParts * kAddedParts;
constexpr int kWideCounters = 1 + kAddedParts;  // of each work item whose keys are split

// Keys and vectors of one block.
struct WideWork {
    int seq_begin;           // first row of the sequence in this pass
    int past;                // tokens cached before this pass
    int first_vector;        // of the sequence and kv head
    int first_row;           // of the first vector, counted from the sequence's first row
    int first_head;          // of the first vector, in the group
    int vectors;             // of this block
    int begin_key, end_key;  // keys that any of them sees
    int splits;              // blocks that share these keys
    int begin, end;          // tiles of this block
};

// False if the block has no work.
__device__ __forceinline__ bool find_work(
    WideWork& work, const AttentionParams& params, int block_vectors, int keys, int split
) {
    const int seq = blockIdx.z;
    work.seq_begin = params.row_starts[seq];
    const int rows = params.row_starts[seq + 1] - work.seq_begin;
    work.past = params.past_lens[seq];
    work.first_vector = static_cast<int>(blockIdx.y % params.row_tiles) * block_vectors;
    work.vectors = min(block_vectors, rows * params.group - work.first_vector);
    if (work.vectors <= 0) return false;
    work.first_row = work.first_vector / params.group;
    work.first_head = work.first_vector - work.first_row * params.group;
    const int last_row = (work.first_vector + work.vectors - 1) / params.group;
    work.end_key = work.past + last_row + 1;
    work.begin_key = params.window > 0 ? max(0, work.past + work.first_row - params.window + 1) : 0;
    const int begin = work.begin_key / keys, count = (work.end_key + keys - 1) / keys - begin;
    work.splits = min(params.splits, count);
    if (split >= work.splits) return false;
    work.begin = begin + static_cast<int>(static_cast<int64_t>(count) * split / work.splits);
    work.end = begin + static_cast<int>(static_cast<int64_t>(count) * (split + 1) / work.splits);
    return true;
}

// Row of the sequence and head of the group that a query vector has. Most blocks have vectors of one
// row only, and need no division.
struct WidePlace {
    int row, head;

    __device__ __forceinline__ WidePlace(
        const AttentionParams& params, const WideWork& work, int vector
    )
        : row(work.first_row), head(work.first_head + vector) {
        if (head >= params.group) {
            row += head / params.group;
            head %= params.group;
        }
    }
};

// Element 0 of a query vector in q or out.
__device__ __forceinline__ int64_t vector_offset(
    const AttentionParams& params, const WideWork& work, int kv_head, int vector, int64_t stride
) {
    const WidePlace place(params, work, vector);
    const int head = kv_head * params.group + place.head;
    return (work.seq_begin + place.row) * stride + static_cast<int64_t>(head) * params.d;
}

template <int value_type>
__device__ __forceinline__ void store_wide_result(
    const AttentionParams& params, const WideWork& work, int kv_head, int vector,
    HeadRow<kWideHead>& x, int lane
) {
    const int first = params.first_value, d = params.d - first;
    if (is_codes(value_type)) hadamard_row(x, d, lane);
    const int64_t at = vector_offset(params, work, kv_head, vector, params.out_stride) + first;
    const int bytes = params.dtype == kF16 ? 2 : 4;
    store_row(static_cast<uint8_t*>(params.out) + at * bytes, x, params.dtype, d, lane);
}

__device__ __forceinline__ void store_two(__half* to, float x, float y) {
    *reinterpret_cast<__half2*>(to) = __halves2half2(from_float<__half>(x), from_float<__half>(y));
}
__device__ __forceinline__ void store_two(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// Stores a warp's 64 elements of every result, times the vector's factor.
template <int tiles>
__device__ __forceinline__ void store_sums(
    const AttentionParams& params, const WideWork& work, int kv_head,
    const float (&sums)[tiles][8][4], const float* factors, int warp, int lane
) {
    const int element = warp * kUnit + lane % 4 * 2, elements = params.d - params.first_value;
#pragma unroll
    for (int half = 0; half < 2 * tiles; ++half) {
        const int vector = 8 * half + lane / 4;
        if (vector >= work.vectors) return;
        const float factor = factors[vector];
        const int64_t at = vector_offset(params, work, kv_head, vector, params.out_stride) +
                           params.first_value + element;
        const auto store_as = [&](auto* to) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (element + 8 * n >= elements) return;
                const float* two = sums[half / 2][n] + half % 2 * 2;
                store_two(to + 8 * n, two[0] * factor, two[1] * factor);
            }
        };
        if (params.dtype == kF16) {
            store_as(static_cast<__half*>(params.out) + at);
        } else {
            store_as(static_cast<float*>(params.out) + at);
        }
    }
}

// Scores of all query vectors with the first `count` keys of a tile, as dot products: float
// [vectors, keys].
template <class Shape, int tiles, int keys, int width>
__device__ __forceinline__ void multiply_keys(
    float* scores, const uint8_t* queries, const uint8_t* key_rows, int count, int warp, int lane
) {
    constexpr int kStride = Shape::kScoreStride;
    constexpr int kBlocks = tiles * (keys / 8);  // of 16 vectors and 8 keys
#pragma unroll 1
    for (int block = warp; block < kBlocks; block += kWideWarps) {
        const int tile = block / (keys / 8), eight = block % (keys / 8);
        if (eight * 8 >= count) continue;
        const uint8_t* a_at = queries + (tile * 16 + lane % 16) * Shape::kStride + lane / 16 * 16;
        const uint8_t* b_at = key_rows + (eight * 8 + lane % 8) * Shape::kStride + lane / 8 * 16;
        float even[4] = {}, odd[4] = {};
#pragma unroll 4
        for (int k = 0; k < width / 16; k += 2) {
            uint32_t a[2][4], b[4];
            load_matrices(a[0], a_at + 32 * k);
            load_matrices(a[1], a_at + 32 * k + 32);
            load_matrices(b, b_at + 32 * k);
            multiply(even, a[0], b[0], b[1]);
            multiply(odd, a[1], b[2], b[3]);
        }
        float* to = scores + (tile * 16 + lane / 4) * kStride + eight * 8 + lane % 4 * 2;
        to[0] = even[0] + odd[0];
        to[1] = even[1] + odd[1];
        to[8 * kStride] = even[2] + odd[2];
        to[8 * kStride + 1] = even[3] + odd[3];
    }
}

// One thread's part of the softmax of a query vector. The threads of a vector are adjacent lanes
// and hold the same peak.
template <class Shape, int keys>
struct WideSoftmax {
    float peak = -INFINITY;
    float weight = 0.0f;  // over this thread's keys only

    // Turns scores into float16 weights; `factors` receives the factor on earlier sums.
    __device__ __forceinline__ void update(
        const AttentionParams& params, const float* scores, uint8_t* weights, float* factors,
        int first_key, int position, int vector, int part
    ) {
        constexpr int kCount = keys / Shape::kThreadsPerVector;
        float s[kCount];
        const float* from = scores + vector * Shape::kScoreStride;
#pragma unroll
        for (int j = 0; j < kCount; ++j) s[j] = from[j * Shape::kThreadsPerVector + part];
        scale_scores(s, params);
        float top = peak;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const int age = position - (first_key + j * Shape::kThreadsPerVector + part);
            const bool seen = age >= 0 && (params.window <= 0 || age < params.window);
            s[j] = seen ? s[j] : -INFINITY;
            top = fmaxf(top, s[j]);
        }
#pragma unroll
        for (int step = 1; step < Shape::kThreadsPerVector; step *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        }
        // With a peak of -infinity there are no sums yet; -infinity minus itself is NaN.
        const float base = top == -INFINITY ? 0.0f : top;
        const float factor = exp2_of(peak - base);
        peak = top;
        weight = __fmul_rn(weight, factor);
        auto* to = reinterpret_cast<__half*>(weights + vector * Shape::kWeightStride);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const float w = exp2_of(s[j] - base);
            weight += w;
            to[j * Shape::kThreadsPerVector + part] = __float2half_rn(w);
        }
        if (part == 0) factors[vector] = factor;
    }

    __device__ __forceinline__ float total() const {
        float sum = weight;
#pragma unroll
        for (int step = 1; step < Shape::kThreadsPerVector; step *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        return sum;
    }
};

// sums = sums * factors + weights * values, for this warp's 64 elements of every vector and the
// first `count` keys of a tile.
template <class Shape, int tiles, int keys>
__device__ __forceinline__ void add_values(
    float (&sums)[tiles][8][4], const float* factors, const uint8_t* weights,
    const uint8_t* value_rows, int count, int warp, int lane
) {
    constexpr int kStride = Shape::kWeightStride, kRowStride = Shape::kStride;
    constexpr int kStepKeys = step_keys(keys);
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        const float low = factors[t * 16 + lane / 4], high = factors[t * 16 + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            sums[t][n][0] *= low, sums[t][n][1] *= low;
            sums[t][n][2] *= high, sums[t][n][3] *= high;
        }
    }
    const uint8_t* v_at = value_rows + lane % 16 * kRowStride + lane / 16 * 16 + warp * kUnit * 2;
    const uint8_t* w_at = weights + lane % 16 * kStride + lane / 16 * 16;
#pragma unroll 1
    for (int first = 0; first < count; first += kStepKeys) {
#pragma unroll
        for (int k = 0; k < kStepKeys; k += 16) {
            uint32_t a[tiles][4];
#pragma unroll
            for (int t = 0; t < tiles; ++t) {
                load_matrices(a[t], w_at + t * 16 * kStride + 2 * (first + k));
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                load_transposed(b, v_at + (first + k) * kRowStride + 32 * n);
#pragma unroll
                for (int t = 0; t < tiles; ++t) {
                    multiply(sums[t][2 * n], a[t], b[0], b[1]);
                    multiply(sums[t][2 * n + 1], a[t], b[2], b[3]);
                }
            }
        }
    }
}

// Adds `count` partial results of the `vectors` vectors from `first` on. They start at `from` and are
// `step` floats apart: sums [block_vectors, kWideHead], then a peak and a weight of each vector.
// Without `stats`, sums are divided by their weight. Otherwise that receives peaks and weights. `to`
// and `stats` may be those of the first part.
template <int block_vectors>
__device__ __forceinline__ void add_parts(
    float* to, float2* stats, const float* from, int64_t step, int count, int first, int vectors,
    int warp, int lane
) {
    constexpr int kAtOnce = 4, kQuads = kWideHead / 4 / kWarp;
    static_assert(kAddedParts == 8 && kQuads * 4 * kWarp == kWideHead);
#pragma unroll 1
    for (int v = first + warp; v < first + vectors; v += kWideWarps) {
        // Lane l has the peak and the weight of part l % 8.
        const int own = lane % kAddedParts;
        float2 stat = make_float2(-INFINITY, 0.0f);
        if (own < count) {
            stat = __ldcg(
                reinterpret_cast<const float2*>(from + own * step + block_vectors * kWideHead) + v
            );
        }
        float top = stat.x;
#pragma unroll
        for (int lanes = 1; lanes < kAddedParts; lanes *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        }
        float factor = exp2_of(stat.x - (top == -INFINITY ? 0.0f : top));
        float weight = factor * stat.y;
#pragma unroll
        for (int lanes = 1; lanes < kAddedParts; lanes *= 2) {
            weight += __shfl_xor_sync(0xffffffffu, weight, lanes);
        }
        if (stats == nullptr) factor /= weight;
        float4 sums[kQuads] = {};
#pragma unroll 1
        for (int part = 0; part < count; part += kAtOnce) {
            float4 more[kAtOnce][kQuads];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const auto* at = reinterpret_cast<const float4*>(
                    from + min(part + i, count - 1) * step + v * kWideHead
                );
#pragma unroll
                for (int q = 0; q < kQuads; ++q) more[i][q] = __ldcg(at + q * kWarp + lane);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {  // the factor of parts that do not exist is 0
                const float by = __shfl_sync(0xffffffffu, factor, part + i);
#pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    sums[q].x += by * more[i][q].x;
                    sums[q].y += by * more[i][q].y;
                    sums[q].z += by * more[i][q].z;
                    sums[q].w += by * more[i][q].w;
                }
            }
        }
        auto* row =
            reinterpret_cast<float4*>(to + (v - (stats == nullptr ? first : 0)) * kWideHead);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) row[q * kWarp + lane] = sums[q];
        if (stats != nullptr && lane == 0) stats[v] = make_float2(top, weight);
    }
}

// Copies the queries of a block to shared memory as float16. The caller waits for asynchronous
// copies.
template <int key_type, int vectors, int width>
__device__ __forceinline__ void copy_wide_queries(
    uint8_t* to, const AttentionParams& params, const WideWork& work, int kv_head, int warp,
    int lane
) {
    constexpr int kStride = 2 * width + 16;
    const auto* q = static_cast<const uint8_t*>(params.q);
    const bool is_aligned = (reinterpret_cast<uintptr_t>(q) | params.q_stride * 2) % 16 == 0;
    if (!is_codes(key_type) && params.dtype == kF16 && params.d == width && is_aligned) {
#pragma unroll 1
        for (int v = warp; v < vectors; v += kWideWarps) {
            const bool exists = v < work.vectors;
            const int64_t at = vector_offset(params, work, kv_head, v, params.q_stride);
            copy_half_row<width>(to + v * kStride, q + at * 2, exists ? width : 0, lane);
        }
        commit_copies();
        return;
    }
    for (int v = warp; v < vectors; v += kWideWarps) {
        HeadRow<width> x = {};
        if (v < work.vectors) {
            const int64_t at = vector_offset(params, work, kv_head, v, params.q_stride);
            load_row(x, q + at * (params.dtype == kF16 ? 2 : 4), params.dtype, params.d, lane);
            if (is_codes(key_type)) hadamard_row(x, params.d, lane);
        }
        store_row(to + v * kStride, x, kF16, width, lane);
    }
}

template <int key_type, int value_type, int tiles, int keys, int width, int threads>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const AttentionParams params) {
    using Shape = WideShape<tiles, keys, width, threads>;
    constexpr int kVectors = Shape::kVectors;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int split = blockIdx.x, kv_head = static_cast<int>(blockIdx.y) / params.row_tiles;
    WideWork work;
    if (!find_work(work, params, kVectors, keys, split)) {
        wait_for_inputs();
        return;
    }
    uint8_t* queries = shared;
    uint8_t* key_rows = queries + Shape::kQueryBytes;
    uint8_t* value_rows =
        Shape::kIsShared ? key_rows + 2 * params.first_value : key_rows + Shape::kTileBytes;
    auto* scores = reinterpret_cast<float*>(key_rows + Shape::kAllTileBytes);
    uint8_t* weights = reinterpret_cast<uint8_t*>(scores) + Shape::kScoreBytes;
    auto* factors = reinterpret_cast<float*>(weights + Shape::kWeightBytes);
    float* totals = factors + kVectors;
    const int32_t* pages =
        params.page_table + static_cast<int64_t>(blockIdx.z) * params.table_stride;
    const auto copy_tile = [&](int first_key, int end_key, int count) {
        copy_wide_tile<key_type, keys, width, tiles == 1>(
            key_rows, params, params.key_cache, pages, kv_head, first_key, work.begin_key, end_key,
            count
        );
        if constexpr (!Shape::kIsShared) {
            copy_wide_tile<value_type, keys, width, tiles == 1>(
                value_rows, params, params.value_cache, pages, kv_head, first_key, work.begin_key,
                end_key, count
            );
        }
    };
    // Keys of a tile that are multiplied: those that any vector sees, and up to a whole step.
    const auto count_keys = [&](int first_key) {
        constexpr int kStepKeys = step_keys(keys);
        const int seen = min(keys, work.end_key - first_key);
        return (seen + kStepKeys - 1) / kStepKeys * kStepKeys;
    };
    const auto copy_rows = [&](int first_key, int begin_key, int end_key) {
        copy_wide_rows<key_type, width>(
            key_rows, params, params.key_cache, pages, kv_head, first_key, begin_key, end_key
        );
        if constexpr (!Shape::kIsShared) {
            copy_wide_rows<value_type, width>(
                value_rows, params, params.value_cache, pages, kv_head, first_key, begin_key,
                end_key
            );
        }
    };
    // The first tile is copied before the wait, if most of it is from earlier passes.
    const int first_key = work.begin * keys, end_key = min(work.end_key, first_key + keys);
    const bool is_early =
        work.past > max(first_key, work.begin_key) && end_key - work.past <= kMostLateRows;
    if (is_early) copy_tile(first_key, min(work.end_key, work.past), count_keys(first_key));
    const int vector = threadIdx.x / Shape::kThreadsPerVector;
    const int part = threadIdx.x % Shape::kThreadsPerVector;
    const int position = work.past + WidePlace(params, work, vector).row;
    const bool has_vector = vector < kVectors;
    WideSoftmax<Shape, keys> softmax;
    float sums[tiles][8][4] = {};
    __syncthreads();  // rows of this pass replace zeros
    wait_for_inputs();
    copy_wide_queries<key_type, kVectors, width>(queries, params, work, kv_head, warp, lane);
    if (is_early) copy_rows(first_key, max(first_key, work.past), end_key);
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
        const int count = count_keys(tile * keys);
        if (tile > work.begin || !is_early) copy_tile(tile * keys, work.end_key, count);
        wait_copies<0>();
        __syncthreads();
        multiply_keys<Shape, tiles, keys, width>(scores, queries, key_rows, count, warp, lane);
        __syncthreads();
        if (has_vector) {
            softmax.update(params, scores, weights, factors, tile * keys, position, vector, part);
        }
        __syncthreads();
        add_values<Shape, tiles, keys>(sums, factors, weights, value_rows, count, warp, lane);
        if (tile + 1 < work.end) __syncthreads();
    }
    const float total = softmax.total();
    const bool is_split = work.splits > 1;
    const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    constexpr int64_t kPart = kVectors * (kWideHead + 2);
    float* partials = params.partials + item * params.splits * kPart;
    float* own = partials + split * kPart;
    if (has_vector && part == 0) {
        totals[vector] = is_split || total == 0.0f ? 1.0f : 1.0f / total;
        if (is_split) {
            reinterpret_cast<float2*>(own + kVectors * kWideHead)[vector] =
                make_float2(softmax.peak, total);
        }
    }
    __syncthreads();
    if constexpr (!is_codes(value_type)) {
        if (!is_split) {
            store_sums<tiles>(params, work, kv_head, sums, totals, warp, lane);
            return;
        }
    }
    auto* results = reinterpret_cast<float*>(key_rows);  // of 16 vectors
    const auto store_results = [&](int first) {
        __syncthreads();
        for (int v = warp; v < 16 && first + v < work.vectors; v += kWideWarps) {
            HeadRow<kWideHead> x;
            load_row(x, results + v * kWideHead, kF32, kWideHead, lane);
            store_wide_result<value_type>(params, work, kv_head, first + v, x, lane);
        }
        __syncthreads();
    };
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        float* to = is_split ? own + t * 16 * kWideHead : results;
        const float low = totals[t * 16 + lane / 4], high = totals[t * 16 + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float* at = to + lane / 4 * kWideHead + warp * kUnit + 8 * n + lane % 4 * 2;
            *reinterpret_cast<float2*>(at) = make_float2(sums[t][n][0] * low, sums[t][n][1] * low);
            *reinterpret_cast<float2*>(at + 8 * kWideHead) =
                make_float2(sums[t][n][2] * high, sums[t][n][3] * high);
        }
        if (!is_split) store_results(t * 16);
    }
    if (!is_split) return;
    // This block's group of splits, and the groups.
    const int group = split / kAddedParts, groups = (work.splits - 1) / kAddedParts + 1;
    const int members = min(kAddedParts, work.splits - group * kAddedParts);
    unsigned* counters = params.counters + item * kWideCounters;
    if (!is_last_block(counters + 1 + group, members)) return;
    float* first_part = partials + group * kAddedParts * kPart;
    int count = members;
    int64_t step = kPart;
    if (groups > 1) {
        add_parts<kVectors>(
            first_part, reinterpret_cast<float2*>(first_part + kVectors * kWideHead), first_part,
            step, count, 0, work.vectors, warp, lane
        );
        if (!is_last_block(counters, groups)) return;
        first_part = partials, count = groups, step = kAddedParts * kPart;
    }
#pragma unroll 1
    for (int first = 0; first < work.vectors; first += 16) {
        add_parts<kVectors>(
            results, nullptr, first_part, step, count, first, min(16, work.vectors - first), warp,
            lane
        );
        store_results(first);
    }
}

template <int key_type, int value_type, int tiles, int keys, int width, int threads = 0>
cudaError_t launch_wide(
    AttentionParams params, const AttentionSize& size, const DeviceInfo& info, void* stream
) {
    using Shape = WideShape<tiles, keys, width, threads>;
    params.row_tiles = static_cast<int>(
        ceil_div(static_cast<int64_t>(size.max_rows) * params.group, Shape::kVectors)
    );
    const int64_t items = static_cast<int64_t>(size.seqs) * params.row_tiles * params.kv_heads;
    const int64_t item_floats = static_cast<int64_t>(Shape::kVectors) * (kWideHead + 2);
    const int64_t capacity = (size.workspace_bytes - kCounters * 4) / 4 / item_floats;
    // One block per multiprocessor is resident. A sequence has fewer splits if it has fewer tiles.
    int64_t splits = info.multiprocessors / items;
    const int64_t useful = ceil_div(size.max_keys, keys);
    if (splits > useful) splits = useful;
    if (splits > kWideMostSplits) splits = kWideMostSplits;
    if (splits * items > capacity) splits = capacity / items;
    if (items * kWideCounters > kCounters || splits < 1 || size.is_invariant) splits = 1;
    params.splits = static_cast<int>(splits);
    params.counters = static_cast<unsigned*>(size.workspace);
    params.partials = reinterpret_cast<float*>(params.counters + kCounters);
    const dim3 grid(
        static_cast<unsigned>(splits), static_cast<unsigned>(params.row_tiles * params.kv_heads),
        static_cast<unsigned>(size.seqs)
    );
    return launch(
        wide_kernel<key_type, value_type, tiles, keys, width, threads>, grid, dim3(kWideThreads),
        Shape::kBytes, stream, params
    );
}

// Takes as many vectors and keys per block as fit in shared memory.
template <int key_type, int value_type, int width = kWideHead>
cudaError_t wide_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const auto fits = [&](int bytes) { return bytes <= info.shared_per_block; };
    // The threads per vector of 64 vectors. Without them the mode has 16 vectors for every batch.
    constexpr int kThreads = kWideThreads / 64;
    using Many = WideShape<4, 32, width, kThreads>;
    if (params.group * size.max_rows > 16 && fits(Many::kBytes)) {
        return launch_wide<key_type, value_type, 4, 32, width, kThreads>(
            params, size, info, stream
        );
    }
    if (size.is_invariant && (width == kSharedRow || fits(WideShape<1, 32, width, 0>::kBytes))) {
        return launch_wide<key_type, value_type, 1, 32, width, kThreads>(
            params, size, info, stream
        );
    }
    if constexpr (width == kSharedRow) {
        if (!size.is_invariant && fits(WideShape<1, 128, width, 0>::kBytes)) {
            return launch_wide<key_type, value_type, 1, 128, width>(params, size, info, stream);
        }
    }
    if (!size.is_invariant && fits(WideShape<1, 64, width, 0>::kBytes)) {
        return launch_wide<key_type, value_type, 1, 64, width>(params, size, info, stream);
    }
    if constexpr (width == kSharedRow) {
        return launch_wide<key_type, value_type, 1, 32, width>(params, size, info, stream);
    } else {
        if (fits(WideShape<1, 32, width, 0>::kBytes)) {
            return launch_wide<key_type, value_type, 1, 32, width>(params, size, info, stream);
        }
        return launch_wide<key_type, value_type, 1, 16, width>(params, size, info, stream);
    }
}

}  // namespace exl::cuda

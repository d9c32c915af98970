// Attention with heads of more than 256 elements, for a few or many query rows of a sequence.
//
// Used for   Head sizes 257 to 512 (global layers of Gemma 4), and shared rows. The other two kernels hold a whole
//            head per warp in registers, which such heads do not fit in.
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
// Splits     Blocks with a part of the keys write partial results. The last block to arrive adds
//            them in the order of the splits, and resets the counter to zero.
// Invariance In the batch-invariant mode there is one split, and tiles have the same number of keys
//            and vectors the same number of threads, however many vectors a block has. A vector's
//            sums do not depend on anything else.
#pragma once

#include "cuda/attention/attention.cuh"

namespace exl::cuda {

constexpr int kWideWarps = 8;
constexpr int kWideThreads = kWideWarps * kWarp;
constexpr int kWideUnits = kWideHead / kUnit;
constexpr int kWideMostSplits = 64;
static_assert(kWideHead / kWideWarps == kUnit, "a warp holds one unit of every result");

// `width`: elements of a key in shared memory. If it is kSharedRow, keys are values too, and there
// is one tile of both. `threads`: that compute the softmax of a vector. 0: as many as there are.
template <int tiles, int keys, int width, int threads>
struct WideShape {
    static constexpr bool kIsShared = width == kSharedRow;
    static constexpr int kStride = 2 * width + 16;  // bytes between float16 rows
    static constexpr int kVectors = 16 * tiles;
    static constexpr int kScoreStride = keys + 4;        // floats
    static constexpr int kWeightStride = 2 * keys + 16;  // bytes
    static constexpr int kThreadsPerVector = threads > 0 ? threads : kWideThreads / kVectors;
    static_assert(kVectors * kThreadsPerVector % kWarp == 0, "whole warps");
    static constexpr int kQueryBytes = kVectors * kStride;
    static constexpr int kTileBytes = keys * kStride;
    static constexpr int kAllTileBytes = (kIsShared ? 1 : 2) * kTileBytes;
    static constexpr int kScoreBytes = kVectors * kScoreStride * 4;
    static constexpr int kWeightBytes = kVectors * kWeightStride;
    static constexpr int kStatBytes = kVectors * 2 * 4;
    static constexpr int kBytes =
        kQueryBytes + kAllTileBytes + kScoreBytes + kWeightBytes + kStatBytes;
    // Results of 16 vectors as float32 take the place of keys and values at the end.
    static_assert(16 * kWideHead * 4 <= kAllTileBytes, "results fit");
};

// Eight elements of a cache row as stored, with their scale.
struct WideRaw {
    uint4 a, b;
    __half scale;
};

__device__ __forceinline__ uint32_t load_word(const uint8_t* from) {
    const auto* two = reinterpret_cast<const uint16_t*>(from);  // rows of codes have even sizes
    return two[0] | static_cast<uint32_t>(two[1]) << 16;
}

template <int type>
__device__ __forceinline__ WideRaw load_eight(const uint8_t* row, int element, int d) {
    WideRaw raw = {};
    const uint8_t* from = row + value_bytes(type, element);
    if constexpr (type == kF32) {
        raw.a = reinterpret_cast<const uint4*>(from)[0];
        raw.b = reinterpret_cast<const uint4*>(from)[1];
    } else if constexpr (type == kF16) {
        raw.a = *reinterpret_cast<const uint4*>(from);
    } else if constexpr (type == kF8e4m3) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        raw.a.x = two.x, raw.a.y = two.y;
    } else {
        raw.a.x = load_word(from);
        if (type == kI8) raw.a.y = load_word(from + 4);
        raw.scale = *reinterpret_cast<const __half*>(
            row + value_bytes(type, d) + element / kScaleGroup * 2
        );
    }
    return raw;
}

template <int type>
__device__ __forceinline__ uint4 eight_halves(const WideRaw& raw) {
    if constexpr (type == kF32) {
        return rounded8(
            *reinterpret_cast<const float4*>(&raw.a), *reinterpret_cast<const float4*>(&raw.b)
        );
    } else if constexpr (type == kF16) {
        return raw.a;
    } else if constexpr (type == kF8e4m3) {
        return make_uint4(
            bits_of(byte_floats<0>(raw.a.x)), bits_of(byte_floats<1>(raw.a.x)),
            bits_of(byte_floats<0>(raw.a.y)), bits_of(byte_floats<1>(raw.a.y))
        );
    } else {
        const __half2 scale = __half2half2(raw.scale);
        if constexpr (type == kI8) {
            return make_uint4(
                bits_of(__hmul2(byte_codes<0>(raw.a.x), scale)),
                bits_of(__hmul2(byte_codes<1>(raw.a.x), scale)),
                bits_of(__hmul2(byte_codes<0>(raw.a.y), scale)),
                bits_of(__hmul2(byte_codes<1>(raw.a.y), scale))
            );
        } else {
            const uint32_t w = raw.a.x;
            const uint32_t a = bits_of(__hmul2(low_codes(w), scale));        // elements 0, 4
            const uint32_t b = bits_of(__hmul2(next_codes(w), scale));       // elements 1, 5
            const uint32_t c = bits_of(__hmul2(low_codes(w >> 8), scale));   // elements 2, 6
            const uint32_t e = bits_of(__hmul2(next_codes(w >> 8), scale));  // elements 3, 7
            return make_uint4(
                __byte_perm(a, b, 0x5410), __byte_perm(c, e, 0x5410), __byte_perm(a, b, 0x7632),
                __byte_perm(c, e, 0x7632)
            );
        }
    }
}

// All threads copy `keys` rows from `first_key` on, as float16 rows. Rows outside of
// [begin_key, end_key) and elements past d become zeros. `has_room`: for more loads in flight, so
// that a tile takes fewer rounds of them.
template <int type, int keys, int width, bool has_room>
__device__ __forceinline__ void copy_wide_tile(
    uint8_t* to, const AttentionParams& params, const uint8_t* cache, const int32_t* pages,
    int kv_head, int first_key, int begin_key, int end_key
) {
    constexpr int kParts = width / 8;
    constexpr bool has_many = has_room && width == kSharedRow && keys % 32 == 0;
    constexpr int kBatch = has_many ? 9 : width == kSharedRow ? 3 : 4;  // in flight per thread
    constexpr int kStride = 2 * width + 16;
    static_assert(keys * kParts % (kWideThreads * kBatch) == 0);
#pragma unroll 1
    for (int first = 0; first < keys * kParts; first += kWideThreads * kBatch) {
        WideRaw raw[kBatch];
        bool seen[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * kWideThreads + static_cast<int>(threadIdx.x);
            const int key = first_key + i / kParts, element = i % kParts * 8;
            seen[j] = key >= begin_key && key < end_key && element < params.d;
            // Others load what is there: no load waits for a branch of its own.
            const int there = min(max(key, begin_key), end_key - 1);
            const int64_t row = cache_row(params, pages, kv_head, there);
            raw[j] = load_eight<type>(
                cache + row * row_bytes(type, params.d), element < params.d ? element : 0, params.d
            );
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * kWideThreads + static_cast<int>(threadIdx.x);
            *reinterpret_cast<uint4*>(to + i / kParts * kStride + i % kParts * 16) =
                seen[j] ? eight_halves<type>(raw[j]) : make_uint4(0, 0, 0, 0);
        }
    }
}

// Keys and vectors of one block.
struct WideWork {
    int seq_begin;           // first row of the sequence in this pass
    int past;                // tokens cached before this pass
    int first_vector;        // of the sequence and kv head
    int vectors;             // of this block
    int begin_key, end_key;  // keys that any of them sees
    int begin, end;          // tiles of this block
};

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
    const int first_row = work.first_vector / params.group;
    const int last_row = (work.first_vector + work.vectors - 1) / params.group;
    work.end_key = work.past + last_row + 1;
    work.begin_key = params.window > 0 ? max(0, work.past + first_row - params.window + 1) : 0;
    const int begin = work.begin_key / keys, count = (work.end_key + keys - 1) / keys - begin;
    work.begin = begin + static_cast<int>(static_cast<int64_t>(count) * split / params.splits);
    work.end = begin + static_cast<int>(static_cast<int64_t>(count) * (split + 1) / params.splits);
    return true;
}

// Element 0 of a query vector in q or out.
__device__ __forceinline__ int64_t vector_offset(
    const AttentionParams& params, const WideWork& work, int kv_head, int vector, int64_t stride
) {
    const int v = work.first_vector + vector;
    const int head = kv_head * params.group + v % params.group;
    return (work.seq_begin + v / params.group) * stride + static_cast<int64_t>(head) * params.d;
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

// Scores of all query vectors with the keys of a tile, as dot products: float [vectors, keys].
template <class Shape, int tiles, int keys, int width>
__device__ __forceinline__ void multiply_keys(
    float* scores, const uint8_t* queries, const uint8_t* key_rows, int warp, int lane
) {
    constexpr int kStride = Shape::kScoreStride;
    constexpr int kBlocks = tiles * (keys / 8);  // of 16 vectors and 8 keys
#pragma unroll 1
    for (int block = warp; block < kBlocks; block += kWideWarps) {
        const int tile = block / (keys / 8), eight = block % (keys / 8);
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

// sums = sums * factors + weights * values, for this warp's 64 elements of every vector.
template <class Shape, int tiles, int keys>
__device__ __forceinline__ void add_values(
    float (&sums)[tiles][8][4], const float* factors, const uint8_t* weights,
    const uint8_t* value_rows, int warp, int lane
) {
    constexpr int kStride = Shape::kWeightStride, kRowStride = Shape::kStride;
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
#pragma unroll
    for (int k = 0; k < keys / 16; ++k) {
        uint32_t a[tiles][4];
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
            load_matrices(a[t], weights + (t * 16 + lane % 16) * kStride + lane / 16 * 16 + 32 * k);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            load_transposed(b, v_at + k * 16 * kRowStride + 32 * n);
#pragma unroll
            for (int t = 0; t < tiles; ++t) {
                multiply(sums[t][2 * n], a[t], b[0], b[1]);
                multiply(sums[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// True in all threads of the block that arrives last. Partial results that were written before are
// visible to it.
__device__ __forceinline__ bool is_last_block(unsigned* counter, int count) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1u) == static_cast<unsigned>(count - 1);
        if (is_last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return is_last;
}

template <int key_type, int value_type, int tiles, int keys, int width, int threads>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const AttentionParams params) {
    using Shape = WideShape<tiles, keys, width, threads>;
    constexpr int kVectors = Shape::kVectors;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int split = blockIdx.x, kv_head = static_cast<int>(blockIdx.y) / params.row_tiles;
    WideWork work;
    if (!find_work(work, params, kVectors, keys, split)) return;

    uint8_t* queries = shared;
    uint8_t* key_rows = queries + Shape::kQueryBytes;
    uint8_t* value_rows =
        Shape::kIsShared ? key_rows + 2 * params.first_value : key_rows + Shape::kTileBytes;
    auto* scores = reinterpret_cast<float*>(key_rows + Shape::kAllTileBytes);
    uint8_t* weights = reinterpret_cast<uint8_t*>(scores) + Shape::kScoreBytes;
    auto* factors = reinterpret_cast<float*>(weights + Shape::kWeightBytes);
    float* totals = factors + kVectors;

    for (int v = warp; v < kVectors; v += kWideWarps) {
        HeadRow<width> x = {};
        if (v < work.vectors) {
            const int64_t at = vector_offset(params, work, kv_head, v, params.q_stride);
            const int bytes = params.dtype == kF16 ? 2 : 4;
            const auto* from = static_cast<const uint8_t*>(params.q) + at * bytes;
            load_row(x, from, params.dtype, params.d, lane);
            if (is_codes(key_type)) hadamard_row(x, params.d, lane);
        }
        store_row(queries + v * Shape::kStride, x, kF16, width, lane);
    }
    const int32_t* pages =
        params.page_table + static_cast<int64_t>(blockIdx.z) * params.table_stride;
    const int vector = threadIdx.x / Shape::kThreadsPerVector;
    const int part = threadIdx.x % Shape::kThreadsPerVector;
    const int position = work.past + (work.first_vector + vector) / params.group;
    const bool has_vector = vector < kVectors;
    WideSoftmax<Shape, keys> softmax;
    float sums[tiles][8][4] = {};
    for (int tile = work.begin; tile < work.end; ++tile) {
        const int first_key = tile * keys;
        copy_wide_tile<key_type, keys, width, tiles == 1>(
            key_rows, params, params.key_cache, pages, kv_head, first_key, work.begin_key,
            work.end_key
        );
        if constexpr (!Shape::kIsShared) {
            copy_wide_tile<value_type, keys, width, tiles == 1>(
                value_rows, params, params.value_cache, pages, kv_head, first_key, work.begin_key,
                work.end_key
            );
        }
        __syncthreads();
        multiply_keys<Shape, tiles, keys, width>(scores, queries, key_rows, warp, lane);
        __syncthreads();
        if (has_vector) {
            softmax.update(params, scores, weights, factors, first_key, position, vector, part);
        }
        __syncthreads();
        add_values<Shape, tiles, keys>(sums, factors, weights, value_rows, warp, lane);
        __syncthreads();
    }
    const float total = softmax.total();
    const bool is_split = params.splits > 1;
    const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    float* partials = params.partials + item * params.splits * kVectors * (kWideHead + 2);
    float* own = partials + static_cast<int64_t>(split) * kVectors * (kWideHead + 2);
    if (has_vector && part == 0) {
        totals[vector] = is_split || total == 0.0f ? 1.0f : 1.0f / total;
        if (is_split) {
            own[kVectors * kWideHead + 2 * vector] = softmax.peak;
            own[kVectors * kWideHead + 2 * vector + 1] = total;
        }
    }
    __syncthreads();
    auto* results = reinterpret_cast<float*>(key_rows);  // of 16 vectors
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
        if (is_split) continue;
        __syncthreads();
        for (int v = warp; v < 16 && t * 16 + v < work.vectors; v += kWideWarps) {
            HeadRow<kWideHead> x;
            load_row(x, results + v * kWideHead, kF32, kWideHead, lane);
            store_wide_result<value_type>(params, work, kv_head, t * 16 + v, x, lane);
        }
        __syncthreads();
    }
    if (!is_split || !is_last_block(params.counters + item, params.splits)) return;
    for (int v = warp; v < work.vectors; v += kWideWarps) {
        const auto part_at = [&](int s) {
            return partials + static_cast<int64_t>(s) * kVectors * (kWideHead + 2);
        };
        float top = -INFINITY;
        for (int s = 0; s < params.splits; ++s) {
            top = fmaxf(top, __ldcg(part_at(s) + kVectors * kWideHead + 2 * v));
        }
        HeadRow<kWideHead> x = {};
        float sum = 0.0f;
        for (int s = 0; s < params.splits; ++s) {
            const float* stats = part_at(s) + kVectors * kWideHead + 2 * v;
            const float factor = exp2_of(__ldcg(stats) - top);
            sum += factor * __ldcg(stats + 1);
            const auto* from = reinterpret_cast<const float2*>(part_at(s) + v * kWideHead) + lane;
#pragma unroll
            for (int u = 0; u < kWideUnits; ++u) {
                const float2 more = __ldcg(from + u * kUnit / 2);
                x[u].x += factor * more.x;
                x[u].y += factor * more.y;
            }
        }
#pragma unroll
        for (int u = 0; u < kWideUnits; ++u) x[u].x /= sum, x[u].y /= sum;
        store_wide_result<value_type>(params, work, kv_head, v, x, lane);
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
    // One block per multiprocessor is resident. A block has at least two tiles.
    int64_t splits = info.multiprocessors / items;
    const int64_t useful = ceil_div(ceil_div(size.max_keys, keys), 2);
    if (splits > useful) splits = useful;
    if (splits > kWideMostSplits) splits = kWideMostSplits;
    if (splits * items > capacity) splits = capacity / items;
    if (items > kCounters || splits < 1 || size.is_invariant) splits = 1;
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

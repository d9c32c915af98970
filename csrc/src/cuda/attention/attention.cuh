// Shared by the two attention kernels: operands, copies of cache rows to shared memory, MMA
// fragments.
//
// Shared memory holds tiles of cache rows in their stored format, in chunks of 16 rows. A chunk
// never crosses a page. If the head dimension equals the kernel's template parameter `width`, rows
// of codes are copied as one contiguous run. Rows of narrower heads are padded to `width` with
// zeros.
#pragma once

#include "cuda/cache/kv_rows.cuh"
#include "exl/cuda/attention.h"

namespace exl::cuda {

constexpr int kChunk = 16;       // cache rows that are copied together
constexpr int kDecodeRows = 16;  // most rows of a sequence that runs in the decode kernel
constexpr float kLog2e = 1.4426950408889634f;

struct AttentionParams {
    const void* q;
    void* out;
    const int32_t* permutation;  // not null: `out` receives prepared inputs of `rows` rows
    int rows;
    int64_t q_stride;
    int64_t out_stride;
    int dtype;
    int q_heads;
    int kv_heads;
    int group;  // query heads per kv head
    int d;
    const uint8_t* key_cache;
    const uint8_t* value_cache;
    int page_bits;  // log2 of the page size
    const int32_t* page_table;
    const int32_t* row_starts;
    const int32_t* past_lens;
    int table_stride;
    int window;
    // Without a soft-cap: log2(e) times the scale of dot products, so that scores are exponents
    // of 2. With a soft-cap c: 2 / c times that, so that 2^(scale * dot) is e^(2 x / c) for a
    // score x.
    float scale;
    float cap;           // soft-cap times log2(e); 0: none
    const float* sinks;  // [q_heads], or null: none
    bool is_shared;      // each cache row is a key and a value
    int first_value;  // first element of a row that has a result; not 0 in attention_wide.cuh only
    // Set by the decode kernel's launch only.
    int first_item;  // number of the tile of rows whose blockIdx.z is 0
    int row_tiles;   // of each sequence
    int splits;
    int chains;  // of a partition; set by the launch of the prompt kernel only
    int stages;
    unsigned* counters;
    float* partials;
};

struct AttentionSize {  // determines kernel instance and grid
    int seqs;
    int max_rows;
    int max_keys;
    int key_dtype;
    int value_dtype;
    bool is_invariant;
    void* workspace;
    int64_t workspace_bytes;
};

// The workspace starts with the counters, one for each work item whose keys are split over blocks.
// Partial results follow.
constexpr int64_t kCounters = 16384;
constexpr int64_t kPartialVectors = 16384;
constexpr int64_t kInvariantVectors = 65536;  // in the batch-invariant mode

cudaError_t attend_decode(AttentionParams params, const AttentionSize& size, void* stream);
cudaError_t attend_prefill(const AttentionParams& params, const AttentionSize& size, void* stream);
// Any number of rows, in the batch-invariant mode.
cudaError_t attend_invariant(
    const AttentionParams& params, const AttentionSize& size, void* stream
);
// Heads of more than kMaxHead elements; any number of rows.
cudaError_t attend_wide(const AttentionParams& params, const AttentionSize& size, void* stream);
// The same for rows of up to kSharedRow elements that are keys and values at once.
cudaError_t attend_shared(const AttentionParams& params, const AttentionSize& size, void* stream);

// True for the types whose rows are staged as float16.
__host__ __device__ constexpr bool is_plain(int type) { return type == kF16 || type == kF32; }
// Bytes between rows in shared memory. For values this is an odd multiple of 16, so that eight rows
// fall into different banks. Rows of codes keep their stored size.
__host__ __device__ constexpr int staged_bytes(int type, int width) {
    return is_plain(type) ? 2 * width + 16 : type == kF8e4m3 ? width + 16 : row_bytes(type, width);
}

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Same as mma_16816, but not volatile: all operands are registers, so the compiler may move it.
__device__ __forceinline__ void multiply(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma_16816(c, a, b0, b1);
#endif
}

// c [16, 8] float32 += a [16, 8] float16 (row-major) * b [8, 8] float16 (column-major).
__device__ __forceinline__ void multiply_8(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Turns dot products, given in units of `unit`, into scores that are exponents of 2. The branch on
// the soft-cap is outside of the loop.
template <class Scores>
__device__ __forceinline__ void scale_scores(
    Scores& scores, const AttentionParams& params, float unit = 1.0f
) {
    auto* s = reinterpret_cast<float*>(&scores);
    constexpr int kCount = sizeof(Scores) / sizeof(float);
    const float scale = unit * params.scale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = __fmul_rn(s[i], scale);
    if (params.cap == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {  // c tanh(x / c) with tanh(y) = 1 - 2 / (e^2y + 1)
        s[i] = __fmul_rn(params.cap, 1.0f - __fdividef(2.0f, exp2_of(s[i]) + 1.0f));
    }
}

// The sink's term in the sum of a head's weights 2^(s - peak), where scores are exponents of 2.
__device__ __forceinline__ float sink_weight(const AttentionParams& params, int head, float peak) {
    if (params.sinks == nullptr) return 0.0f;
    return exp2_of(kLog2e * params.sinks[head] - (peak == -INFINITY ? 0.0f : peak));
}

// Row of the cache that holds `position` for one kv head.
__device__ __forceinline__ int64_t cache_row(
    const AttentionParams& params, const int32_t* pages, int kv_head, int position
) {
    const int64_t page = pages[position >> params.page_bits];
    const int offset = position & ((1 << params.page_bits) - 1);
    return ((page * params.kv_heads + kv_head) << params.page_bits) + offset;
}

__device__ __forceinline__ uint4 rounded8(const float4& a, const float4& b) {
    const auto two = [](float x, float y) {
        return bits_of(__halves2half2(from_float<__half>(x), from_float<__half>(y)));
    };
    return make_uint4(two(a.x, a.y), two(a.z, a.w), two(b.x, b.y), two(b.z, b.w));
}

// Copies a chunk of rows that must be converted to float16 or padded to `width`. Not inlined,
// because it is rare and long.
template <int type, int width>
__device__ __noinline__ void copy_padded_chunk(uint8_t* to, const uint8_t* from, int d, int lane) {
    constexpr int kStride = staged_bytes(type, width);
    if constexpr (is_plain(type)) {
        const int parts = d / 8;
        for (int i = lane; i < kChunk * parts; i += kWarp) {
            uint8_t* at = to + i / parts * kStride + i % parts * 16;
            if constexpr (type == kF32) {
                const auto* eight = reinterpret_cast<const float4*>(from) + 2 * i;
                *reinterpret_cast<uint4*>(at) = rounded8(eight[0], eight[1]);
            } else {
                copy_async_16(at, from + 16 * i);
            }
        }
    } else {
        const int bytes = row_bytes(type, d);
        const int values = value_bytes(type, d);
        for (int i = lane; i < kChunk * bytes / 2; i += kWarp) {
            const int at = 2 * i % bytes;
            const int moved = at < values ? at : at - values + value_bytes(type, width);
            *reinterpret_cast<uint16_t*>(to + 2 * i / bytes * kStride + moved) =
                reinterpret_cast<const uint16_t*>(from)[i];
        }
    }
}

// One warp starts to copy `rows` rows of d elements, from cache row `row` on. They are whole chunks
// within one page.
template <int type, int width, int rows = kChunk>
__device__ __forceinline__ void copy_rows(
    uint8_t* to, const uint8_t* cache, int64_t row, int d, int lane
) {
    constexpr int kStride = staged_bytes(type, width);
    if (type == kF32 || d != width) {
#pragma unroll 1
        for (int i = 0; i < rows; i += kChunk) {
            const uint8_t* from = cache + (row + i) * row_bytes(type, d);
            copy_padded_chunk<type, width>(to + i * kStride, from, d, lane);
        }
        return;
    }
    constexpr int kParts = is_codes(type) ? kStride * rows / 16 : value_bytes(type, width) / 16;
    constexpr int kRows = is_codes(type) ? 1 : rows;
    const uint8_t* from = cache + row * row_bytes(type, width) + 16 * lane;
#pragma unroll
    for (int first = 0; first < kRows * kParts; first += kWarp) {
        const int i = first + lane;
        if (kRows * kParts % kWarp != 0 && i >= kRows * kParts) break;
        copy_async_16(to + i / kParts * kStride + i % kParts * 16, from + 16 * first);
    }
}

// Sets `bytes` bytes (whole words) to zero. `threads` threads share the work; this is `thread`.
__device__ __forceinline__ void clear(uint8_t* from, int bytes, int thread, int threads) {
#pragma unroll 1  // rare code inside of loops stays small
    for (int i = thread; i < bytes / 4; i += threads) reinterpret_cast<uint32_t*>(from)[i] = 0;
}

// Sets the rows outside of [first, last), out of `count` rows, to zero. Values that no query sees
// may be NaN, and their weight of 0 times NaN would be NaN.
__device__ __forceinline__ void clear_hidden(
    uint8_t* rows, int stride, int count, int first, int last, int thread, int threads
) {
    if (first > 0) clear(rows, min(first, count) * stride, thread, threads);
    if (last < count) {
        const int begin = max(last, 0);
        clear(rows + begin * stride, (count - begin) * stride, thread, threads);
    }
}

// Converts the rows of codes or f8e4m3 in `staged` to float16 rows. Rows outside of [first, last)
// become zeros.
template <int type, int width, int keys>
__device__ __forceinline__ void convert_tile(
    uint8_t* to, const uint8_t* staged, int first, int last
) {
    constexpr int kWords = value_bytes(type, width) / 4;
    constexpr int kElements = type == kU8 ? 8 : 4;  // per word
    constexpr int kToStride = 2 * width + 16;
#pragma unroll 4
    for (int i = threadIdx.x; i < keys * kWords; i += blockDim.x) {
        const int row = i / kWords;
        const int word = i % kWords;
        const uint8_t* from = staged + row * staged_bytes(type, width);
        const bool seen = row >= first && row < last;
        const uint32_t w = seen ? reinterpret_cast<const uint32_t*>(from)[word] : 0;
        uint8_t* at = to + row * kToStride + word * kElements * 2;
        if constexpr (type == kF8e4m3) {
            *reinterpret_cast<uint2*>(at) =
                make_uint2(bits_of(byte_floats<0>(w)), bits_of(byte_floats<1>(w)));
        } else {
            const int group = word * kElements / kScaleGroup;
            const __half stored = reinterpret_cast<const __half*>(from + 4 * kWords)[group];
            const __half2 scale = __half2half2(seen ? stored : __ushort_as_half(0));
            if constexpr (type == kU8) {
                const uint32_t a = bits_of(__hmul2(low_codes(w), scale));        // elements 0, 4
                const uint32_t b = bits_of(__hmul2(next_codes(w), scale));       // elements 1, 5
                const uint32_t c = bits_of(__hmul2(low_codes(w >> 8), scale));   // elements 2, 6
                const uint32_t e = bits_of(__hmul2(next_codes(w >> 8), scale));  // elements 3, 7
                *reinterpret_cast<uint4*>(at) = make_uint4(
                    __byte_perm(a, b, 0x5410), __byte_perm(c, e, 0x5410), __byte_perm(a, b, 0x7632),
                    __byte_perm(c, e, 0x7632)
                );
            } else {
                *reinterpret_cast<uint2*>(at) = make_uint2(
                    bits_of(__hmul2(byte_codes<0>(w), scale)),
                    bits_of(__hmul2(byte_codes<1>(w), scale))
                );
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

#endif  // __CUDACC__

}  // namespace exl::cuda

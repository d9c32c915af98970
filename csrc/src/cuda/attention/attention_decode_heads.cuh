// Heads that a block of attention_decode_kernel.cuh reads: its queries and, if attention writes the
// cache (exl_cuda_attend), the new key and value of its sequence.
#pragma once

#include "cuda/attention/attention_decode_copies.cuh"
#include "cuda/cache/rope_rows.cuh"

namespace exl::cuda {

// Cosines and sines of a block's row. They are read before the wait for the previous kernel: they
// were written before the pass began.
template <int width>
struct Angles {
    HeadRow<width> cos, sin;

    __device__ __forceinline__ Angles(
        const AttentionParams& params, const WorkItem& work, int lane
    ) {
        const NewRows& rows = params.new_rows;
        if (rows.slots == nullptr || rows.rotary_half == 0) return;
        const int64_t at = static_cast<int64_t>(work.first_row) * rows.rotary_half;
        load_angles(cos, sin, rows.cos + at, rows.sin + at, rows.rotary_half, lane);
    }
};

// Copies a row in the format of the cache.
template <int type, int width>
__device__ __forceinline__ void copy_row(void* to, const void* from, int lane) {
    constexpr int kWords = row_bytes(type, width) / 4;
    static_assert(row_bytes(type, width) % 4 == 0);
#pragma unroll
    for (int i = 0; i < kWords; i += kWarp) {
        if (i + lane >= kWords) break;
        static_cast<uint32_t*>(to)[i + lane] = static_cast<const uint32_t*>(from)[i + lane];
    }
}

// Row of a cache for the sequence's new key or value.
__device__ __forceinline__ int64_t new_cache_row(const AttentionParams& params, uint32_t slot) {
    const int64_t page = slot >> params.page_bits;
    const int offset = static_cast<int>(slot & ((1u << params.page_bits) - 1));
    return ((page * params.kv_heads + blockIdx.y) << params.page_bits) + offset;
}

// Head norm, RoPE and key smoothing. `head` counts queries, then keys.
template <int width>
__device__ __forceinline__ void process_head(
    HeadRow<width>& x, const AttentionParams& params, const Angles<width>& angles, int head,
    int lane
) {
    const NewRows& rows = params.new_rows;
    const float* weight = head < params.q_heads ? rows.q_norm : rows.k_norm;
    if (weight != nullptr) norm_row(x, weight, rows.eps, width, lane);
    if (rows.rotary_half > 0) rope_row_in_warp(x, angles.cos, angles.sin, rows.rotary_half, lane);
    if (rows.head_scale != nullptr) {
        const int at = head * width;
        smooth_row(x, rows.head_scale + at, rows.head_shift + at, width, lane);
    }
}

// Reads the block's queries to shared memory as float16. With `has_new`, warps 0 and 1 start with
// the new key and value, which go to the cache and to `new_rows`. Unless `is_real`, all heads are
// zero, and the cache is not written.
template <int key_type, int value_type, int width, int tiles>
__device__ __forceinline__ void read_heads(
    const AttentionParams& params, const WorkItem& work, const Angles<width>& angles,
    uint8_t* queries, uint8_t* new_rows, bool has_new, bool is_real, int warp, int warps, int lane
) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    constexpr int kQueries = 8 * tiles, kNew = 2;
    const bool is_processed = params.new_rows.slots != nullptr;
    const int kv_head = blockIdx.y;
    const auto head_of = [&](int v) {
        return v >= 0 ? kv_head * params.group + v % params.group
                      : params.q_heads + (v + kNew) * params.kv_heads + kv_head;
    };
    const auto load = [&](HeadRow<width>& x, int v) {
        if (!is_real || v >= work.vectors) return;
        const int row = work.first_row + (v >= 0 ? v / params.group : 0);
        const int64_t at = row * params.q_stride + head_of(v) * params.d;
        const auto* base = static_cast<const uint8_t*>(params.q);
        load_row(x, base + at * (params.dtype == kF16 ? 2 : 4), params.dtype, params.d, lane);
    };
    // Vector -2 is the key, -1 the value. The next vector is loaded before this one is processed.
    int v = warp - (has_new ? kNew : 0);
    HeadRow<width> next = {};
    load(next, v);
#pragma unroll 1
    for (; v < kQueries; v += warps) {
        HeadRow<width> x;
#pragma unroll
        for (int u = 0; u < width / kUnit; ++u) x[u] = next[u], next[u] = make_float2(0.0f, 0.0f);
        load(next, v + warps);
        if (v < work.vectors) {
            const int row = work.first_row;
            if (is_processed && v != -1) {
                process_head<width>(x, params, angles, head_of(v), lane);
            }
            if constexpr (key_type != kF32) {
                if (v < 0) {
                    const bool is_key = v == -kNew;
                    uint8_t* to = new_rows + (is_key ? 0 : Shape::kNewKeyBytes);
                    encode_row(to, x, is_key ? key_type : value_type, width, lane);
                    __syncwarp();
                    if (!is_real) continue;
                    const auto slot = static_cast<uint32_t>(params.new_rows.slots[row]);
                    const int64_t cached = new_cache_row(params, slot);
                    // The pointer to const is that of the other kernels, which only read.
                    if (is_key) {
                        auto* cache = const_cast<uint8_t*>(params.key_cache);
                        copy_row<key_type, width>(
                            cache + cached * row_bytes(key_type, width), to, lane
                        );
                    } else {
                        auto* cache = const_cast<uint8_t*>(params.value_cache);
                        copy_row<value_type, width>(
                            cache + cached * row_bytes(value_type, width), to, lane
                        );
                    }
                    continue;
                }
            }
            if (is_processed && params.dtype == kF16) {
                // As exl_cuda_rope_write stores them.
#pragma unroll
                for (int u = 0; u < width / kUnit; ++u) {
                    x[u].x = __half2float(from_float<__half>(x[u].x));
                    x[u].y = __half2float(from_float<__half>(x[u].y));
                }
            }
            if (is_codes(key_type)) hadamard_row(x, params.d, lane);
        }
        store_row(queries + v * Shape::kQueryStride * 2, x, kF16, width, lane);
    }
}

}  // namespace exl::cuda

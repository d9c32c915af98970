// Tiles of keys and values of wide heads (attention_wide.cuh) in shared memory: their layout, and
// copies of cache rows to them.
#pragma once

#include "cuda/attention/attention.cuh"

namespace exl::cuda {

constexpr int kWideWarps = 8;
constexpr int kWideThreads = kWideWarps * kWarp;
static_assert(kWideHead / kWideWarps == kUnit, "a warp holds one unit of every result");

// Keys of a tile that are multiplied with values in one step. Steps that no vector sees are left out.
__host__ __device__ constexpr int step_keys(int keys) { return keys < 32 ? keys : 32; }

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

// A warp starts to copy a row of float16 numbers. Those from `elements` on become zeros.
template <int width>
__device__ __forceinline__ void copy_half_row(
    uint8_t* to, const uint8_t* from, int elements, int lane
) {
#pragma unroll
    for (int part = lane; part < width / 8; part += kWarp) {
        if (part * 8 < elements) {
            copy_async_16(to + 16 * part, from + 16 * part);
        } else {
            *reinterpret_cast<uint4*>(to + 16 * part) = make_uint4(0, 0, 0, 0);
        }
    }
}

// All threads copy `count` of the tile's `keys` rows from `first_key` on, as float16 rows. Rows
// outside of [begin_key, end_key) and elements past d become zeros. `count` is a multiple of a step's
// keys. `has_room`: for more loads in flight, so that a tile takes fewer rounds of them. Float16 is
// copied asynchronously: the caller waits.
template <int type, int keys, int width, bool has_room>
__device__ __forceinline__ void copy_wide_tile(
    uint8_t* to, const AttentionParams& params, const uint8_t* cache, const int32_t* pages,
    int kv_head, int first_key, int begin_key, int end_key, int count
) {
    constexpr int kParts = width / 8;
    constexpr bool has_many = has_room && width == kSharedRow && keys % 32 == 0;
    constexpr int kBatch = has_many ? 9 : width == kSharedRow ? 3 : 4;  // in flight per thread
    constexpr int kStride = 2 * width + 16;
    static_assert(step_keys(keys) * kParts % (kWideThreads * kBatch) == 0, "whole rounds");
    const int first_seen = max(first_key, begin_key);
    const int64_t first_row = cache_row(params, pages, kv_head, first_seen);
    const bool is_one_page = 1 << params.page_bits >= keys;
    const auto row_at = [&](int key) {
        const int64_t row =
            is_one_page ? first_row + (key - first_seen) : cache_row(params, pages, kv_head, key);
        return cache + row * row_bytes(type, params.d);
    };
    if constexpr (type == kF16) {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 1
        for (int row = warp; row < count; row += kWideWarps) {
            const int key = first_key + row;
            const bool seen = key >= begin_key && key < end_key;
            const uint8_t* from = row_at(seen ? key : first_seen);
            copy_half_row<width>(to + row * kStride, from, seen ? params.d : 0, lane);
        }
        commit_copies();
    } else {
#pragma unroll 1
        for (int first = 0; first < count * kParts; first += kWideThreads * kBatch) {
            WideRaw raw[kBatch];
            bool seen[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = first + j * kWideThreads + static_cast<int>(threadIdx.x);
                const int key = first_key + i / kParts, element = i % kParts * 8;
                seen[j] = key >= begin_key && key < end_key && element < params.d;
                // Others load what is there: no load waits for a branch of its own.
                const int there = min(max(key, begin_key), end_key - 1);
                const int own = element < params.d ? element : 0;
                raw[j] = load_eight<type>(row_at(there), own, params.d);
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = first + j * kWideThreads + static_cast<int>(threadIdx.x);
                *reinterpret_cast<uint4*>(to + i / kParts * kStride + i % kParts * 16) =
                    seen[j] ? eight_halves<type>(raw[j]) : make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// The same for the few rows [begin_key, end_key) of the tile alone: the others stay as they are.
template <int type, int width>
__device__ __forceinline__ void copy_wide_rows(
    uint8_t* to, const AttentionParams& params, const uint8_t* cache, const int32_t* pages,
    int kv_head, int first_key, int begin_key, int end_key
) {
    constexpr int kParts = width / 8, kStride = 2 * width + 16;
    const auto row_at = [&](int key) {
        return cache + cache_row(params, pages, kv_head, key) * row_bytes(type, params.d);
    };
    if constexpr (type == kF16) {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 1
        for (int key = begin_key + warp; key < end_key; key += kWideWarps) {
            copy_half_row<width>(to + (key - first_key) * kStride, row_at(key), params.d, lane);
        }
        commit_copies();
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < (end_key - begin_key) * kParts; i += kWideThreads) {
            const int key = begin_key + i / kParts, element = i % kParts * 8;
            if (element >= params.d) continue;
            *reinterpret_cast<uint4*>(to + (key - first_key) * kStride + element * 2) =
                eight_halves<type>(load_eight<type>(row_at(key), element, params.d));
        }
    }
}

}  // namespace exl::cuda

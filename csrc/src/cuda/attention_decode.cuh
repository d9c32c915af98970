// Attention of a few query rows over many keys, split over the keys.
//
// Floor: the keys and values once, at the memory's bandwidth; with few keys, latency.
// Work       A block has one kv head of one sequence, up to 8 or 16 query vectors (rows times the
//            query heads of the group), and its share of the keys, worked out from the real length.
//            Each warp takes its own steps of keys and keeps its own running result, so that nothing
//            but the end of a block is synchronized. It copies ahead by itself, or, of codes on 9.0,
//            a warp beside the others copies for all of them, a run of keys and one of values a step.
// Matrices   S [keys, queries] = K Q^T, O [elements, queries] = V^T P^T: keys, then elements, are
//            the 16 rows of an mma, queries its 8 columns. Codes go from words in shared memory to
//            fragments; which element meets which k is free, so a lane takes whole words, and a
//            fragment's rows share a scale.
// Codes      A code is the float16 number that its bits are. With middle m of the codes' range and
//            scales s of the 32 elements of a group g,
//              S = sum_g s_kg (sum_e K_ke q_e - 32 m mean_g(q)),  O_e = sum_k (V_ke - m) s_kg p_k:
//            keys' middle by one small product of scales and means, values' by a product with -m.
// Order      What earlier passes wrote is copied before the kernel ahead has ended.
// Splits     Blocks write partial results; the last one of them to arrive adds them, in the order
//            of the splits, and leaves its counter at zero.
#pragma once

#include "attention.cuh"

namespace exl::cuda {

constexpr int kMaxSplits = 64;

// A pair of codes is cut out of its word as the float16 numbers that its bits are, subnormal ones:
// 2^-24 times the code, or, of 4-bit codes that begin at the fifth bit, 16 times that. What is in
// the middle of their range is taken off by a product with it.
constexpr float kCodeUnit = 1 << 24;

// Fragments of 16 staged keys: elements 16 k .. of step k, in an order that `query_element` shares.
template <int type, int width>
struct KeyFragments {
    static constexpr int kStride = staged_bytes(type, width);

    // Element of the query at half h (0, 1) of register r of step k, for lane % 4 == t.
    static __device__ __forceinline__ int query_element(int k, int t, int r, int h) {
        if (is_plain(type)) return 16 * k + 2 * t + 8 * r + h;
        if (type == kU8) return 32 * (k / 2) + 8 * t + 2 * (k % 2) + r + 4 * h;
        return 16 * k + 4 * t + 2 * r + h;
    }
    // What that element is multiplied with: the codes that it meets may begin at the fifth bit.
    static __device__ __forceinline__ __half2 query_unit(int r) {
        return __float2half2_rn(type == kU8 && r == 1 ? 1.0f / 16 : 1.0f);
    }
    static constexpr float kMiddle = type == kU8 ? 8 : 128;  // of the range of codes
    // The fragment of a step whose codes are all in the middle.
    static __device__ __forceinline__ void middle(uint32_t (&a)[4]) {
        a[0] = a[1] = type == kU8 ? 0x00080008 : 0x00800080;
        a[2] = a[3] = 0x00800080;
    }
    // Calls body(k, fragment) for each step.
    template <class Body>
    static __device__ __forceinline__ void for_each(const uint8_t* rows, int lane, Body&& body) {
        static_assert(!is_codes(type));
        if constexpr (is_plain(type)) {
            const uint8_t* row = rows + lane % 16 * kStride + lane / 16 * 16;
#pragma unroll
            for (int k = 0; k < width / 16; ++k) {
                uint32_t a[4];
                load_matrices(a, row + 32 * k);
                body(k, a);
            }
        } else {
            const auto* low = reinterpret_cast<const uint32_t*>(rows + lane / 4 * kStride);
            const auto* high = low + 8 * kStride / 4;
#pragma unroll
            for (int k = 0; k < width / 16; ++k) {
                const uint32_t x = low[4 * k + lane % 4], y = high[4 * k + lane % 4];
                const uint32_t a[4] = {bits_of(byte_floats<0>(x)), bits_of(byte_floats<0>(y)),
                                       bits_of(byte_floats<1>(x)), bits_of(byte_floats<1>(y))};
                body(k, a);
            }
        }
    }
    // Scales of keys g and g + 8 for the groups 2 t and 2 t + 1, beginning anew past the width.
    static __device__ __forceinline__ void load_scales(
        uint32_t (&scales)[2], const uint8_t* rows, int lane
    ) {
        constexpr int kScales = value_bytes(type, width) / 4;
        const auto* low = reinterpret_cast<const uint32_t*>(rows + lane / 4 * kStride);
        const int word = kScales + lane % 4 % (width / 64);
        scales[0] = low[word];
        scales[1] = low[8 * kStride / 4 + word];
    }
    // Calls body(k, fragments of codes of steps k and k + 1, scales of keys g and g + 8) for each
    // group of elements that share a scale.
    template <class Body>
    static __device__ __forceinline__ void for_each_group(
        const uint8_t* rows, int lane, Body&& body
    ) {
        static_assert(is_codes(type));
        constexpr int kScales = value_bytes(type, width) / 4;  // word of the first two
        const int t = lane % 4;
        const auto* low = reinterpret_cast<const uint32_t*>(rows + lane / 4 * kStride);
        const auto* high = low + 8 * kStride / 4;
#pragma unroll
        for (int two = 0; two < width / 64; ++two) {
            const float2 low_scales = __half22float2(halves(low[kScales + two]));
            const float2 high_scales = __half22float2(halves(high[kScales + two]));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int group = 2 * two + half;
                uint32_t a[2][4];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if constexpr (type == kU8) {
                        const uint32_t x = low[4 * group + t] >> 8 * s;
                        const uint32_t y = high[4 * group + t] >> 8 * s;
                        a[s][0] = x & kLowCodes;
                        a[s][1] = y & kLowCodes;
                        a[s][2] = x & kNextCodes;
                        a[s][3] = y & kNextCodes;
                    } else {
                        const uint32_t x = low[4 * (2 * group + s) + t];
                        const uint32_t y = high[4 * (2 * group + s) + t];
                        a[s][0] = byte_pair<0>(x);
                        a[s][1] = byte_pair<0>(y);
                        a[s][2] = byte_pair<1>(x);
                        a[s][3] = byte_pair<1>(y);
                    }
                }
                body(2 * group, a, half == 0 ? low_scales.x : low_scales.y,
                     half == 0 ? high_scales.x : high_scales.y);
            }
        }
    }
};

// Fragments of 16 staged values, transposed: 16 elements of the row by 16 keys for each tile.
template <int type, int width>
struct ValueFragments {
    static constexpr int kStride = staged_bytes(type, width);

    // Element at row g + 8 h of tile `tile`; of codes a tile's share their scales.
    static __device__ __forceinline__ int element(int tile, int g, int h) {
        if (is_plain(type)) return 16 * tile + g + 8 * h;
        const int in_tile = type == kU8 ? 8 * (g % 4) + 4 * (g / 4) : 4 * g;
        return 32 * (tile / 2) + in_tile + 2 * (tile % 2) + h;
    }
    // What sums of products with rows g + 8 h are multiplied with.
    static __device__ __forceinline__ float unit(int h) {
        if (!is_codes(type)) return 1.0f;
        return type == kU8 && h == 1 ? kCodeUnit / 16 : kCodeUnit;
    }
    // A fragment that is less the middle of the codes everywhere, by way of 32 bytes of shared memory:
    // constants would be moved to a fragment's registers before each product.
    static __device__ __forceinline__ void less_middle(uint32_t (&a)[4], uint8_t* room, int lane) {
        static_assert(is_codes(type));
        constexpr uint32_t kOfLow = type == kU8 ? 0x80088008 : 0x80808080, kOfNext = 0x80808080;
        if (lane < 8) reinterpret_cast<uint32_t*>(room)[lane] = lane < 4 ? kOfLow : kOfNext;
        __syncwarp();
        load_matrices(a, room + lane / 8 % 2 * 16);
    }
    // Calls body(tile, fragment) for each tile.
    template <class Body>
    static __device__ __forceinline__ void for_each(const uint8_t* rows, int lane, Body&& body) {
        static_assert(!is_codes(type));
        if constexpr (is_plain(type)) {
            // Matrices: elements 0 and 8 of keys 0, then of keys 8.
            const uint8_t* row =
                rows + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 16;
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
                uint32_t a[4];
                load_transposed(a, row + 32 * tile);
                body(tile, a);
            }
        } else {
            const Words at(rows, lane);
#pragma unroll
            for (int c = 0; c < width / 32; ++c) {
                uint32_t x[2], y[2];
                at.bytes(x, y, 8 * c + lane / 4);
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    const uint32_t a[4] = {bits_of(byte_floats<0>(x[p])),
                                           bits_of(byte_floats<1>(x[p])),
                                           bits_of(byte_floats<0>(y[p])),
                                           bits_of(byte_floats<1>(y[p]))};
                    body(2 * c + p, a);
                }
            }
        }
    }
    // Calls body(group, fragments of its two tiles, scales of keys 2 t and 2 t + 1, of those 8 on) for
    // each group of elements that share a scale.
    template <class Body>
    static __device__ __forceinline__ void for_each_group(
        const uint8_t* rows, int lane, Body&& body
    ) {
        static_assert(is_codes(type));
        constexpr int kScales = value_bytes(type, width) / 4;  // word of the first two
        const int g = lane / 4;
        const Words at(rows, lane);
        const uint32_t own = g < 4 ? 0x5410 : 0x7632;
#pragma unroll
        for (int two = 0; two < width / 64; ++two) {
            uint32_t scales[4];
            at.load(scales, kScales + two);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int group = 2 * two + half;
                uint32_t a[2][4];
                if constexpr (type == kU8) {
                    uint32_t w[4];
                    at.load(w, 4 * group + g % 4);
                    const uint32_t x = __byte_perm(w[0], w[1], own);
                    const uint32_t y = __byte_perm(w[2], w[3], own);
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        a[p][0] = x >> 8 * p & kLowCodes;
                        a[p][1] = x >> 8 * p & kNextCodes;
                        a[p][2] = y >> 8 * p & kLowCodes;
                        a[p][3] = y >> 8 * p & kNextCodes;
                    }
                } else {
                    uint32_t x[2], y[2];
                    at.bytes(x, y, 8 * group + g);
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        a[p][0] = byte_pair<0>(x[p]);
                        a[p][1] = byte_pair<1>(x[p]);
                        a[p][2] = byte_pair<0>(y[p]);
                        a[p][3] = byte_pair<1>(y[p]);
                    }
                }
                const uint32_t pick = half == 0 ? 0x5410 : 0x7632;
                body(group, a, halves(__byte_perm(scales[0], scales[1], pick)),
                     halves(__byte_perm(scales[2], scales[3], pick)));
            }
        }
    }

private:
    // Words of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
    struct Words {
        const uint32_t* at[4];

        __device__ __forceinline__ Words(const uint8_t* rows, int lane) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 2 * (lane % 4) + i % 2 + i / 2 * 8;
                at[i] = reinterpret_cast<const uint32_t*>(rows + key * kStride);
            }
        }
        __device__ __forceinline__ void load(uint32_t (&w)[4], int word) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = at[i][word];
        }
        // Bytes 0 and 1, then 2 and 3, of two keys side by side.
        __device__ __forceinline__ void bytes(
            uint32_t (&x)[2], uint32_t (&y)[2], int word
        ) const {
            uint32_t w[4];
            load(w, word);
            x[0] = __byte_perm(w[0], w[1], 0x5140), x[1] = __byte_perm(w[0], w[1], 0x7362);
            y[0] = __byte_perm(w[2], w[3], 0x5140), y[1] = __byte_perm(w[2], w[3], 0x7362);
        }
    };
};

}  // namespace exl::cuda

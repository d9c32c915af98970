// Attention of a few query rows over many keys, split over the keys.
//
// Floor: the keys and values once, at the memory's bandwidth; with few keys, latency.
// Work       A block has one kv head of one sequence, up to 8 or 16 query vectors (rows times the
//            query heads of the group), and its share of the keys, worked out from the real length.
//            Each warp takes its own steps of keys, copies ahead by itself and keeps its own
//            running result, so that nothing but the end of a block is synchronized.
// Matrices   S [keys, queries] = K Q^T, O [elements, queries] = V^T P^T: keys, then elements, are
//            the 16 rows of an mma, queries its 8 columns. Codes go from words in shared memory to
//            fragments; which element meets which k is free, so a lane takes whole words.
// Order      What earlier passes wrote is copied before the kernel ahead has ended.
// Splits     Blocks write partial results; the last one of them to arrive adds them, in the order
//            of the splits, and leaves its counter at zero.
#pragma once

#include "attention.cuh"

namespace exl::cuda {

constexpr int kMaxSplits = 64;

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
                        a[s][0] = bits_of(low_codes(x));
                        a[s][1] = bits_of(low_codes(y));
                        a[s][2] = bits_of(next_codes(x));
                        a[s][3] = bits_of(next_codes(y));
                    } else {
                        const uint32_t x = low[4 * (2 * group + s) + t];
                        const uint32_t y = high[4 * (2 * group + s) + t];
                        a[s][0] = bits_of(byte_codes<0>(x));
                        a[s][1] = bits_of(byte_codes<0>(y));
                        a[s][2] = bits_of(byte_codes<1>(x));
                        a[s][3] = bits_of(byte_codes<1>(y));
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

    // Element at row g + 8 h of tile `tile`.
    static __device__ __forceinline__ int element(int tile, int g, int h) {
        if (is_plain(type)) return 16 * tile + g + 8 * h;
        if (type == kU8) return 64 * (tile / 4) + 8 * g + 2 * (tile % 4) + h;
        return 32 * (tile / 2) + 4 * g + 2 * (tile % 2) + h;
    }
    template <class Body>
    static __device__ __forceinline__ void for_each(const uint8_t* rows, int lane, Body&& body) {
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
            from_words(rows, lane, body);
        }
    }

private:
    template <class Body>
    static __device__ __forceinline__ void from_words(const uint8_t* rows, int lane, Body&& body) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t* at[4];  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = 2 * t + i % 2 + i / 2 * 8;
            at[i] = reinterpret_cast<const uint32_t*>(rows + key * kStride);
        }
        constexpr int kScales = value_bytes(type, width) / 4;
        if constexpr (type == kU8) {
            const uint32_t own = g < 4 ? 0x5410 : 0x7632;  // elements 8 g .. share the lane's scale
#pragma unroll
            for (int c = 0; c < width / 64; ++c) {
                uint32_t w[4], s[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    w[i] = at[i][8 * c + g];
                    s[i] = at[i][kScales + c];
                }
                const __half2 sx = halves(__byte_perm(s[0], s[1], own));
                const __half2 sy = halves(__byte_perm(s[2], s[3], own));
#pragma unroll
                for (int part = 0; part < 2; ++part) {  // codes 0 to 3, 4 to 7 of the words
                    const uint32_t pick = part == 0 ? 0x5410 : 0x7632;
                    const uint32_t x = __byte_perm(w[0], w[1], pick);
                    const uint32_t y = __byte_perm(w[2], w[3], pick);
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        const uint32_t u = x >> 8 * p, v = y >> 8 * p;
                        const uint32_t a[4] = {bits_of(__hmul2(low_codes(u), sx)),
                                               bits_of(__hmul2(next_codes(u), sx)),
                                               bits_of(__hmul2(low_codes(v), sy)),
                                               bits_of(__hmul2(next_codes(v), sy))};
                        body(4 * c + 2 * part + p, a);
                    }
                }
            }
        } else {
#pragma unroll
            for (int c = 0; c < width / 32; ++c) {
                uint32_t w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = at[i][8 * c + g];
                const uint32_t x[2] = {__byte_perm(w[0], w[1], 0x5140),
                                       __byte_perm(w[0], w[1], 0x7362)};
                const uint32_t y[2] = {__byte_perm(w[2], w[3], 0x5140),
                                       __byte_perm(w[2], w[3], 0x7362)};
                if constexpr (type == kF8e4m3) {
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        const uint32_t a[4] = {bits_of(byte_floats<0>(x[p])),
                                               bits_of(byte_floats<1>(x[p])),
                                               bits_of(byte_floats<0>(y[p])),
                                               bits_of(byte_floats<1>(y[p]))};
                        body(2 * c + p, a);
                    }
                } else {
                    const uint32_t own = c % 2 == 0 ? 0x5410 : 0x7632;
                    uint32_t s[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[i] = at[i][kScales + c / 2];
                    const __half2 sx = halves(__byte_perm(s[0], s[1], own));
                    const __half2 sy = halves(__byte_perm(s[2], s[3], own));
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        const uint32_t a[4] = {bits_of(__hmul2(byte_codes<0>(x[p]), sx)),
                                               bits_of(__hmul2(byte_codes<1>(x[p]), sx)),
                                               bits_of(__hmul2(byte_codes<0>(y[p]), sy)),
                                               bits_of(__hmul2(byte_codes<1>(y[p]), sy))};
                        body(2 * c + p, a);
                    }
                }
            }
        }
    }
};

}  // namespace exl::cuda

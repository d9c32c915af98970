// Attention of a few query rows over many keys, split over the keys (split-K).
//
// Floor      Keys and values are read once, at memory bandwidth. With few keys, latency.
// Mapping    A block handles one kv head of one sequence, up to 8 or 16 query vectors (rows times
//            query heads of the group), and its share of the keys, computed from the actual length.
//            Each warp processes its own steps of keys and keeps its own running softmax, so that
//            warps synchronize at the end of the block only. A warp prefetches its own keys and
//            values. For caches of codes on 9.0, a producer warp copies for all warps instead: one
//            bulk copy of keys and one of values per step.
// MMA        S [keys, queries] = K Q^T, O [elements, queries] = V^T P^T. Keys, then elements, are
//            the 16 rows of an MMA, queries its 8 columns. Codes go from words in shared memory to
//            fragments. The assignment of elements to k is free as long as both operands share it.
//            A lane therefore takes whole words, and the rows of a fragment share a scale.
// Codes      A code's bits are used as a float16 number. With the middle m of the range of codes
//            and the scales s of the groups g of 32 elements,
//              S = sum_g s_kg (sum_e K_ke q_e - 32 m mean_g(q)),  O_e = sum_k (V_ke - m) s_kg p_k.
//            The middle of keys is subtracted by one small product of scales and query means, the
//            middle of values by a product with -m.
// Overlap    Keys and values of earlier passes are copied before the previous kernel has ended.
// Splits     Blocks write partial results. The last block to arrive adds them, in the order of the
//            splits, and resets the counter to zero. Results do not depend on the order of arrival.
// Invariance In the batch-invariant mode a split is a partition: the keys from partition_begin(i)
//            on, whatever the lengths. Each warp takes one of its chains: chain_keys(i) consecutive
//            keys with one running softmax. Results of chains are merged in their order into that
//            of a partition, and those in their order into the row's (attention_merge.cuh). In
//            steps and partitions whose keys a row does not see, the row's sums stay as they are.
//            So the order of a row's sums depends on its position and on the window only.
//            attention_prompt.cuh computes them in the same order for many rows.
#pragma once

#include "cuda/attention/attention.cuh"

namespace exl::cuda {

constexpr int kMaxSplits = 64;

// Partitions of the batch-invariant mode: eight of kPartitionKeys keys, then eight of twice as many,
// and so on. The last one of the 64 has no end.
constexpr int kPartitionKeys = 512;
__host__ __device__ constexpr int partition_begin(int i) {
    return i < kMaxSplits ? kPartitionKeys * (((8 + i % 8) << i / 8) - 8) : 0x7fffffff;
}
// Keys of each of a partition's chains. The last chain of the last partition has no end.
__host__ __device__ constexpr int chain_keys(int i, int chains) {
    return (kPartitionKeys << i / 8) / chains;
}
// Partition that contains a key.
__host__ __device__ constexpr int partition_of(int key) {
    int i = 0;
    for (int units = key / kPartitionKeys + 8; i < kMaxSplits - 8 && units >= 16; units /= 2)
        i += 8;
    while (i < kMaxSplits - 1 && partition_begin(i + 1) <= key) ++i;
    return i;
}

// A pair of codes is masked out of its word and used as float16 numbers without conversion. These
// are subnormal: 2^-24 times the code, or 16 times that for 4-bit codes that start at bit 4. The
// middle of the range is subtracted by a separate matrix product. This factor undoes the 2^-24.
constexpr float kSubnormalFactor = 1 << 24;

// MMA fragments of 16 staged keys. K step k covers the 16 elements from 16 k on, or half of the 32
// elements of a group for 4-bit codes. `query_element` gives the order of elements.
template <int type, int width>
struct KeyFragments {
    static constexpr int kStride = staged_bytes(type, width);

    // Query element that belongs into half h (0, 1) of register r in k step k, for lane % 4 == t.
    static __device__ __forceinline__ int query_element(int k, int t, int r, int h) {
        if (is_plain(type)) return 16 * k + 2 * t + 8 * r + h;
        if (type == kU8) return 32 * (k / 2) + 8 * t + 2 * (k % 2) + r + 4 * h;
        return 16 * k + 4 * t + 2 * r + h;
    }
    // Factor for that query element: 1/16 where its codes start at bit 4 of their half word.
    static __device__ __forceinline__ __half2 query_factor(int r) {
        return __float2half2_rn(type == kU8 && r == 1 ? 1.0f / 16 : 1.0f);
    }
    static constexpr float kMiddle = type == kU8 ? 8 : 128;  // of the range of codes
    // Fragment of a k step in which all codes are kMiddle.
    static __device__ __forceinline__ void middle(uint32_t (&a)[4]) {
        a[0] = a[1] = type == kU8 ? 0x00080008 : 0x00800080;
        a[2] = a[3] = 0x00800080;
    }
    // Loads the fragment of a k step.
    static __device__ __forceinline__ void load(
        uint32_t (&a)[4], const uint8_t* rows, int k, int lane
    ) {
        static_assert(!is_codes(type));
        if constexpr (is_plain(type)) {
            load_matrices(a, rows + lane % 16 * kStride + lane / 16 * 16 + 32 * k);
        } else {
            const auto* low = reinterpret_cast<const uint32_t*>(rows + lane / 4 * kStride);
            const uint32_t x = low[4 * k + lane % 4], y = low[8 * kStride / 4 + 4 * k + lane % 4];
            a[0] = bits_of(byte_floats<0>(x)), a[1] = bits_of(byte_floats<0>(y));
            a[2] = bits_of(byte_floats<1>(x)), a[3] = bits_of(byte_floats<1>(y));
        }
    }
    // Loads the scales of keys g and g + 8 (g = lane / 4) for the groups 2 t and 2 t + 1
    // (t = lane % 4). Group numbers wrap around at the width.
    static __device__ __forceinline__ void load_scales(
        uint32_t (&scales)[2], const uint8_t* rows, int lane
    ) {
        constexpr int kScales = value_bytes(type, width) / 4;
        const auto* low = reinterpret_cast<const uint32_t*>(rows + lane / 4 * kStride);
        const int word = kScales + lane % 4 % (width / 64);
        scales[0] = low[word];
        scales[1] = low[8 * kStride / 4 + word];
    }
    // Calls body(k, fragments of codes of k steps k and k + 1, scale of key g, scale of key g + 8)
    // for each group of elements that share a scale.
    template <class Body>
    static __device__ __forceinline__ void for_each_group(
        const uint8_t* rows, int lane, Body&& body
    ) {
        static_assert(is_codes(type));
        constexpr int kScales = value_bytes(type, width) / 4;  // word of the first two scales
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
                body(
                    2 * group, a, half == 0 ? low_scales.x : low_scales.y,
                    half == 0 ? high_scales.x : high_scales.y
                );
            }
        }
    }
};

// MMA fragments of 16 staged values, transposed: a tile is 16 elements of the rows by 16 keys.
template <int type, int width>
struct ValueFragments {
    static constexpr int kStride = staged_bytes(type, width);

    // Element at row g + 8 h of tile `tile`. For codes, all elements of a tile share their scales.
    static __device__ __forceinline__ int element(int tile, int g, int h) {
        if (is_plain(type)) return 16 * tile + g + 8 * h;
        const int in_tile = type == kU8 ? 8 * (g % 4) + 4 * (g / 4) : 4 * g;
        return 32 * (tile / 2) + in_tile + 2 * (tile % 2) + h;
    }
    // Factor for the sums of products with rows g + 8 h.
    static __device__ __forceinline__ float factor(int h) {
        if (!is_codes(type)) return 1.0f;
        return type == kU8 && h == 1 ? kSubnormalFactor / 16 : kSubnormalFactor;
    }
    // Fragment in which every element is minus the middle of the codes. It is loaded from 32 bytes
    // of shared memory: the compiler would move constants to the fragment's registers before each
    // product.
    static __device__ __forceinline__ void minus_middle(
        uint32_t (&a)[4], uint8_t* scratch, int lane
    ) {
        static_assert(is_codes(type));
        constexpr uint32_t kLow = type == kU8 ? 0x80088008 : 0x80808080, kNext = 0x80808080;
        if (lane < 8) reinterpret_cast<uint32_t*>(scratch)[lane] = lane < 4 ? kLow : kNext;
        __syncwarp();
        load_matrices(a, scratch + lane / 8 % 2 * 16);
    }
    // Calls body(tile, fragment) for each tile.
    template <class Body>
    static __device__ __forceinline__ void for_each(const uint8_t* rows, int lane, Body&& body) {
        static_assert(!is_codes(type));
        if constexpr (is_plain(type)) {
            // Order of the four matrices: elements 0 to 7 and 8 to 15 of keys 0 to 7, then those of
            // keys 8 to 15.
            const uint8_t* row = rows + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 16;
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
                    const uint32_t a[4] = {
                        bits_of(byte_floats<0>(x[p])), bits_of(byte_floats<1>(x[p])),
                        bits_of(byte_floats<0>(y[p])), bits_of(byte_floats<1>(y[p]))
                    };
                    body(2 * c + p, a);
                }
            }
        }
    }
    // Calls body(group, fragments of its two tiles, scales of keys 2 t and 2 t + 1, scales of keys
    // 2 t + 8 and 2 t + 9) for each group of elements that share a scale.
    template <class Body>
    static __device__ __forceinline__ void for_each_group(
        const uint8_t* rows, int lane, Body&& body
    ) {
        static_assert(is_codes(type));
        constexpr int kScales = value_bytes(type, width) / 4;  // word of the first two scales
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
                body(
                    group, a, halves(__byte_perm(scales[0], scales[1], pick)),
                    halves(__byte_perm(scales[2], scales[3], pick))
                );
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
        // Interleaves the bytes of two keys: bytes 0 and 1 go to x[0] or y[0], bytes 2 and 3 go to
        // x[1] or y[1].
        __device__ __forceinline__ void bytes(uint32_t (&x)[2], uint32_t (&y)[2], int word) const {
            uint32_t w[4];
            load(w, word);
            x[0] = __byte_perm(w[0], w[1], 0x5140), x[1] = __byte_perm(w[0], w[1], 0x7362);
            y[0] = __byte_perm(w[2], w[3], 0x5140), y[1] = __byte_perm(w[2], w[3], 0x7362);
        }
    };
};

}  // namespace exl::cuda

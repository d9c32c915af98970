// Packed layout of quantized matrices as code. exl/cuda/linear.h documents it.
//
// A matrix consists of column panels of 32 columns. A panel consists of k-tiles: up to four blocks
// of 32 rows of one quantization group. A block consists of the words of 32 lanes. `field_of` gives
// the position of each code in a lane's words. Packing, unpacking and the MMA kernels all use it.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda {

constexpr int kBlockRows = 32;
constexpr int kPanelColumns = 32;
constexpr int kKTileBlocks = 4;

inline int64_t scale_bytes_of(int type) { return type == kF32 ? 4 : 2; }

// Template parameter of the products: how codes of one width are stored, and what they stand for
// (EXL_VALUES_*). The form of integers is their width.
__host__ __device__ constexpr int form_of(int bits, int values) { return bits | values << 4; }
constexpr int kE4m3 = form_of(8, EXL_VALUES_E4M3);
constexpr int kIq4 = form_of(4, EXL_VALUES_IQ4_NL);
constexpr int kMxfp4 = form_of(4, EXL_VALUES_MXFP4);
// Integers in small groups, of some width.
__host__ __device__ constexpr int small_form(int bits) { return form_of(bits, 4); }
__host__ __device__ constexpr bool is_small_form(int form) { return form >> 4 == 4; }
__host__ __device__ constexpr bool has_small_groups(int offset_kind) {
    return offset_kind >= EXL_OFFSET_SMALL_MIDDLE;
}

// Bits that a code is stored in.
__host__ __device__ constexpr int width_of(int form) { return form & 15; }

#ifdef __CUDACC__

// Whether codes are indices into a table of 16 numbers.
__host__ __device__ constexpr bool is_table(int values) {
    return values == EXL_VALUES_IQ4_NL || values == EXL_VALUES_MXFP4;
}
// Zero of codes without stored offsets. Codes of a table are replaced by its entries plus 128.
__host__ __device__ constexpr int middle_of(int form) {
    return form == kE4m3 ? 0 : form == kIq4 || form == kMxfp4 ? 128 : 1 << (width_of(form) - 1);
}

// Entries of a table (exl::kIq4Values or kMxfp4Values) plus 128, one per byte, for the low 3 bits of
// the four low half-bytes of `codes` and for their fourth bits.
__device__ __forceinline__ uint32_t look_up(int values, uint32_t codes) {
    const bool is_iq4 = values == EXL_VALUES_IQ4_NL;
    const uint32_t index = codes & 0x7777;
    const uint32_t low =
        __byte_perm(is_iq4 ? 0x3f2d1801 : 0x83828180, is_iq4 ? 0x766a5d4f : 0x8c888684, index);
    const uint32_t high =
        __byte_perm(is_iq4 ? 0xa6998d81 : 0x7d7e7f80, is_iq4 ? 0xf1d9c5b5 : 0x74787a7c, index);
    return __byte_perm(low, high, 0x3210 | (codes >> 1 & 0x4444));
}

// Float16 numbers with the exponent and mantissa bits of two E4M3 numbers, the low bytes of both
// halves: 2^-8 times the numbers.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t two) {
    return (two << 7 & 0x3f803f80u) | (two << 8 & 0x80008000u);
}

// Pairs of codes per lane and block. Pair n = 4 q + j of lane 4 g + t holds column 8 q + g, rows
// 8 t + 2 j and 8 t + 2 j + 1.
constexpr int kPairs = 16;

// Bit field that holds some bits of both codes of a pair. The first code's bits begin at bit
// `shift` of the lane's word number `word`, the second code's 16 bits higher.
struct BitField {
    int word, shift;
    int first, bits;  // bits first .. first + bits - 1 of the code
};

// Number of bit fields of a pair. Most pairs have one. Pairs that do not fit into a word are split
// over the bits that the other pairs leave free.
__host__ __device__ constexpr int num_fields(int bits, int pair) {
    return bits == 3 && pair == 15   ? 3
           : bits == 5 && pair == 15 ? 5
           : bits == 6 && pair > 11  ? 2
                                     : 1;
}
__host__ __device__ constexpr BitField field_of(int bits, int pair, int i) {
    const int q = pair / 4, j = pair % 4;
    switch (bits) {
        case 2: return {j / 2, 2 * q + 8 * (j % 2), 0, 2};
        case 3:
            if (pair == 15) return {i, 15, i, 1};
            if (q == 0) return {j < 2 ? 0 : j - 1, j == 1 ? 3 : 0, 0, 3};
            if (q == 1) return {1 + j / 2, 3 + 6 * (j % 2), 0, 3};
            if (pair < 11) return {0, 6 + 3 * j, 0, 3};
            return {1 + (pair - 11) / 2, 6 + 6 * ((pair - 11) % 2), 0, 3};
        case 4: return {j, 4 * q, 0, 4};
        case 5:
            if (pair == 15) return {i, 15, i, 1};
            if (pair < 8) return {pair % 5, pair < 5 ? 0 : 10, 0, 5};
            return {pair < 13 ? pair - 8 : pair - 10, pair < 13 ? 5 : 10, 0, 5};
        case 6:
            if (pair < 12) return {pair % 6, pair < 6 ? 0 : 10, 0, 6};
            if (i == 0) return {4 + j / 2, 6 + 2 * (j % 2), 0, 2};
            return {j, 6, 2, 4};
        default: return {4 * (q / 2) + j, 8 * (q % 2), 0, 8};
    }
}

// Number of words per lane in the first part of a block. A block stores its words in two parts;
// each part holds the words of all lanes, those of one lane next to each other.
__host__ __device__ constexpr int first_part_words(int bits) { return bits < 4 ? 2 : 4; }

template <int count, int size>
__device__ __forceinline__ void load_part(
    uint32_t (&words)[size], int first, const uint8_t* from, int lane
) {
    if constexpr (count == 1) {
        words[first] = reinterpret_cast<const uint32_t*>(from)[lane];
    } else if constexpr (count == 2) {
        const uint2 two = reinterpret_cast<const uint2*>(from)[lane];
        words[first] = two.x, words[first + 1] = two.y;
    } else if constexpr (count == 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[lane];
        words[first] = four.x, words[first + 1] = four.y;
        words[first + 2] = four.z, words[first + 3] = four.w;
    }
}
template <int bits>
__device__ __forceinline__ void load_words(
    uint32_t (&words)[bits], const uint8_t* block, int lane
) {
    constexpr int kFirst = first_part_words(bits);
    load_part<kFirst>(words, 0, block, lane);
    load_part<bits - kFirst>(words, kFirst, block + 128 * kFirst, lane);
}

template <int count, int size>
__device__ __forceinline__ void store_part(
    const uint32_t (&words)[size], int first, uint8_t* to, int lane
) {
    if constexpr (count == 1) {
        reinterpret_cast<uint32_t*>(to)[lane] = words[first];
    } else if constexpr (count == 2) {
        reinterpret_cast<uint2*>(to)[lane] = make_uint2(words[first], words[first + 1]);
    } else if constexpr (count == 4) {
        reinterpret_cast<uint4*>(to)[lane] =
            make_uint4(words[first], words[first + 1], words[first + 2], words[first + 3]);
    }
}
template <int bits>
__device__ __forceinline__ void store_words(
    const uint32_t (&words)[bits], uint8_t* block, int lane
) {
    constexpr int kFirst = first_part_words(bits);
    store_part<kFirst>(words, 0, block, lane);
    store_part<bits - kFirst>(words, kFirst, block + 128 * kFirst, lane);
}

// Extracts both codes of a pair from a lane's words. The second code is 16 bits above the first.
template <int bits>
__device__ __forceinline__ uint32_t pair_codes(const uint32_t (&words)[bits], int pair) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        if (i >= num_fields(bits, pair)) break;
        const BitField field = field_of(bits, pair, i);
        const uint32_t mask = ((1u << field.bits) - 1) * 0x00010001u;
        codes |= (words[field.word] >> field.shift & mask) << field.first;
    }
    return codes;
}

// Index of a column's scale among the 32 scales of a k-tile in its panel.
__host__ __device__ constexpr int scale_index(int column) { return 4 * (column % 8) + column / 8; }

constexpr int kSmallGroups = 8;  // groups of 16 rows in a k-tile

// Header of a k-tile: 32 scales, then 32 offsets if they are stored, then the multipliers of small
// groups. The blocks follow.
struct KTileHeader {
    int scale_bytes;  // of one scale: 2 or 4
    int offset_kind;

    // Byte position of the offsets in the k-tile.
    __host__ __device__ int offsets_at() const { return kPanelColumns * scale_bytes; }
    // Size of the header, which is the byte position of the first block.
    __host__ __device__ int size_bytes() const {
        const int multiplier_bytes = has_small_groups(offset_kind) ? kSmallGroups : 0;
        return multipliers_at() + kPanelColumns * multiplier_bytes;
    }
    // Byte position of the multipliers of small groups.
    __host__ __device__ int multipliers_at() const {
        const bool has_none =
            offset_kind == EXL_OFFSET_MIDDLE || offset_kind == EXL_OFFSET_SMALL_MIDDLE;
        const int offset_bytes = has_none ? 0 : offset_kind == EXL_OFFSET_ZEROS ? 1 : scale_bytes;
        return kPanelColumns * (scale_bytes + offset_bytes);
    }
    // The multiplier of one column and group, from the k-tile's first byte.
    __host__ __device__ int multiplier_at(int column, int group) const {
        return multipliers_at() + column % 8 * 4 * kSmallGroups + 4 * group + column / 8;
    }
};

// Multipliers of the small groups of a k-tile, or of one of its blocks, for the lane's four columns:
// a word per group, a byte per quarter.
template <int groups>
struct SmallMultipliers {
    uint32_t of_group[groups];

    // from: the multipliers of the k-tile. g: lane / 4. first: the first of the groups.
    __device__ __forceinline__ void load(const uint8_t* from, int g, int first = 0) {
        const uint2* pairs = reinterpret_cast<const uint2*>(from) + (kSmallGroups * g + first) / 2;
#pragma unroll
        for (int i = 0; i < groups; i += 2) {
            const uint2 pair = pairs[i / 2];
            of_group[i] = pair.x, of_group[i + 1] = pair.y;
        }
    }
    // Multiplier of a signed byte.
    __device__ __forceinline__ float whole(int group, int quarter) const {
        return static_cast<float>(static_cast<int8_t>(of_group[group] >> 8 * quarter));
    }
    // Multipliers of 4 bits: of codes, and of the minimum.
    __device__ __forceinline__ float low(int group, int quarter) const {
        return static_cast<float>(of_group[group] >> 8 * quarter & 15);
    }
    __device__ __forceinline__ float high(int group, int quarter) const {
        return static_cast<float>(of_group[group] >> (8 * quarter + 4) & 15);
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

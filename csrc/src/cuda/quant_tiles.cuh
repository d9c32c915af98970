// The layout of quantized matrices (cuda.h) as code: where the codes of a lane's pairs lie.
#pragma once

#include "common.cuh"

namespace exl::cuda {

constexpr int kBlockRows = 32;
constexpr int kStripColumns = 32;
constexpr int kUnitBlocks = 4;

inline int64_t scale_bytes_of(int type) { return type == kF32 ? 4 : 2; }

#ifdef __CUDACC__

// Pair n = 4 q + j of lane 4 g + t: column 8 q + g, rows 8 t + 2 j and the one after it.
constexpr int kPairs = 16;

// A run of bits of a pair's codes: in which of the lane's words, from which bit of a half on.
struct Piece {
    int word, at;
    int first, bits;  // of the code
};

// Most codes lie in one piece; what does not fit goes into the bits that are left.
__host__ __device__ constexpr int num_pieces(int bits, int pair) {
    return bits == 3 && pair == 15 ? 3 : bits == 5 && pair == 15 ? 5 : bits == 6 && pair > 11 ? 2 : 1;
}
__host__ __device__ constexpr Piece piece_of(int bits, int pair, int i) {
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

// Words of a lane come in two parts, each of all lanes together: so many in the first one.
__host__ __device__ constexpr int first_words(int bits) { return bits < 4 ? 2 : 4; }

template <int count, int size>
__device__ __forceinline__ void load_some(
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
    constexpr int kFirst = first_words(bits);
    load_some<kFirst>(words, 0, block, lane);
    load_some<bits - kFirst>(words, kFirst, block + 128 * kFirst, lane);
}

template <int count, int size>
__device__ __forceinline__ void store_some(
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
    constexpr int kFirst = first_words(bits);
    store_some<kFirst>(words, 0, block, lane);
    store_some<bits - kFirst>(words, kFirst, block + 128 * kFirst, lane);
}

// Two codes of a pair, 16 bits apart, out of a lane's words.
template <int bits>
__device__ __forceinline__ uint32_t codes_of(const uint32_t (&words)[bits], int pair) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        if (i >= num_pieces(bits, pair)) break;
        const Piece piece = piece_of(bits, pair, i);
        const uint32_t mask = ((1u << piece.bits) - 1) * 0x00010001u;
        codes |= (words[piece.word] >> piece.at & mask) << piece.first;
    }
    return codes;
}

// Index of a column's scale among the 32 of its strip.
__host__ __device__ constexpr int scale_index(int column) {
    return 4 * (column % 8) + column / 8;
}

// Bytes of a unit before its blocks, and of these the scales'.
struct UnitHead {
    int scale_bytes;  // of one scale
    int offset_kind;

    __host__ __device__ int offsets() const { return kStripColumns * scale_bytes; }
    __host__ __device__ int blocks() const {
        const int offset_bytes = offset_kind == EXL_OFFSET_MIDDLE  ? 0
                                 : offset_kind == EXL_OFFSET_ZEROS ? 1
                                                                   : scale_bytes;
        return kStripColumns * (scale_bytes + offset_bytes);
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

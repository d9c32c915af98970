// Codes of a block of 32 rows, as they lie in a tile (exl/cuda.h), to A fragments of mma.m16n8k16.
//
// A pair of codes is cut out of its words in place, into the mantissas of two float16 numbers whose
// exponents are zero: code * 2^(position - 24), subnormal, which tensor cores multiply exactly and
// no slower than others. Each quarter of the columns, that is each row g or g + 8 of an m16 tile,
// has one position, so that its sums have one scale. The layout puts codes where most of them need
// a mask and every word a shift or two: 18, 25, 20, 29, 30 and 16 instructions a block of 2, 3, 4,
// 5, 6 and 8 bits. Zeros and minimums are the caller's, times the sums of inputs.
#pragma once

#include "quant_tiles.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

// The bit of a mantissa at which codes of columns 8 `quarter` .. + 7 begin.
__host__ __device__ constexpr int position_of(int bits, int quarter) {
    switch (bits) {
        case 2: return 2 * quarter;
        case 3: return quarter < 2 ? 3 * quarter : 6;
        case 4: return 4 * (quarter % 2);
        case 5: return quarter < 2 ? 0 : 5;
        case 6: return quarter < 2 ? 0 : 4;
        default: return 0;
    }
}

// What sums of products with those columns' fragments are to be multiplied with.
__host__ __device__ constexpr float unit_of_code(int bits, int quarter) {
    return static_cast<float>(1 << (24 - position_of(bits, quarter)));
}

// (a & mask) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
    return d;
}

template <int kBits>
struct BlockCodes {
    uint32_t words[kBits];

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        load_words<kBits>(words, block, lane);
    }

    // The bits of kBase are set too.
    template <int kPair, uint32_t kBase = 0, int kPiece = 0>
    __device__ __forceinline__ uint32_t pair(uint32_t others = kBase) const {
        constexpr Piece kFrom = piece_of(kBits, kPair, kPiece);
        constexpr int kTo = position_of(kBits, kPair / 4) + kFrom.first;
        constexpr int kShift = kFrom.at - kTo;
        static_assert(kShift >= 0 && kTo + kFrom.bits <= 10);
        constexpr uint32_t kMask = ((1u << kFrom.bits) - 1) * 0x00010001u << kTo;
        const uint32_t word = words[kFrom.word];
        uint32_t both;
        if constexpr (kBits == 8 && kShift == 8) {
            both = __byte_perm(word, kBase, 0x5351);
        } else if constexpr (kPiece == 0 && kBase == 0) {
            both = word >> kShift & kMask;
        } else {
            both = and_or(word >> kShift, kMask, others);
        }
        if constexpr (kPiece + 1 < num_pieces(kBits, kPair)) {
            return pair<kPair, kBase, kPiece + 1>(both);
        } else {
            return both;
        }
    }

    // The fragment of columns 16 kColumns .. + 15 and of step kStep.
    template <int kColumns, int kStep, uint32_t kBase = 0>
    __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
        constexpr int kFirst = 8 * kColumns + 2 * kStep;
        a[0] = pair<kFirst, kBase>();
        a[1] = pair<kFirst + 4, kBase>();
        a[2] = pair<kFirst + 1, kBase>();
        a[3] = pair<kFirst + 5, kBase>();
    }
};

}  // namespace exl::cuda

#endif  // __CUDACC__

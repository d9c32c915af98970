// Unpacks the codes of one block of 32 rows into A fragments of mma.m16n8k16. Layout:
// exl/cuda/linear.h.
//
// A pair of codes is masked out of its word in place. The result is two float16 numbers whose
// exponent bits are zero and whose mantissas hold the codes: the subnormal numbers code * 2^(shift
// - 24). Tensor cores multiply subnormal numbers exactly and at full speed. All codes of a quarter
// of the columns (row g or g + 8 of an m16 tile) have the same shift, so that one factor scales the
// sums of a column. The layout is chosen such that most pairs need one mask and every word one or
// two shifts: 18, 25, 20, 29, 30 and 16 instructions per block of 2, 3, 4, 5, 6 and 8 bits.
//
// Zeros and minimums are not applied here. quant_k_tile.cuh applies them to the sums of the inputs,
// quant_small_batch_k_tile.cuh to each weight.
#pragma once

#include "cuda/linear/quant_tiles.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

// Mantissa bit at which the codes of columns 8 * quarter .. 8 * quarter + 7 begin. 0 for codes that
// are not integers.
__host__ __device__ constexpr int mantissa_shift(int form, int quarter) {
    switch (is_small_form(form) ? width_of(form) : form) {
        case 2: return 2 * quarter;
        case 3: return quarter < 2 ? 3 * quarter : 6;
        case 4: return 4 * (quarter % 2);
        case 5: return quarter < 2 ? 0 : 5;
        case 6: return quarter < 2 ? 0 : 4;
        default: return 0;
    }
}

// Power of two by which fragments are divided, apart from the mantissa shift: subnormal numbers for
// integers, E4M3 numbers as float16, and E2M1 numbers as float16, which MXFP4 counts in halves.
__host__ __device__ constexpr int fragment_exponent(int form) {
    return form == kE4m3 ? 8 : form == kMxfp4 ? 15 : 24;
}

// Whether fragments are codes less an offset. Otherwise they are the numbers themselves.
__host__ __device__ constexpr bool has_offsets(int form) { return form != kE4m3 && form != kMxfp4; }

// Factor 2^(24 - shift) that turns sums of products with subnormal codes of these columns into sums
// of products with the codes. 2^8 for E4M3 numbers, 2^15 for MXFP4.
__host__ __device__ constexpr float subnormal_factor(int form, int quarter) {
    return static_cast<float>(1 << (fragment_exponent(form) - mantissa_shift(form, quarter)));
}

// (a & mask) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
    return d;
}

template <int kForm>
struct BlockCodes {
    static constexpr int kBits = width_of(kForm);
    static constexpr bool kHasOffsets = has_offsets(kForm);
    uint32_t words[kBits];

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        load_words<kBits>(words, block, lane);
    }

    // Extracts pair kPair at its mantissa shift and ORs kBase into the result. Recurses over the
    // bit fields of the pair.
    template <int kPair, uint32_t kBase = 0, int kFieldIndex = 0>
    __device__ __forceinline__ uint32_t pair(uint32_t rest = kBase) const {
        constexpr BitField kField = field_of(kBits, kPair, kFieldIndex);
        constexpr int kTo = mantissa_shift(kBits, kPair / 4) + kField.first;
        constexpr int kShift = kField.shift - kTo;
        static_assert(kShift >= 0 && kTo + kField.bits <= 10);
        constexpr uint32_t kMask = ((1u << kField.bits) - 1) * 0x00010001u << kTo;
        const uint32_t word = words[kField.word];
        uint32_t both;
        if constexpr (kBits == 8 && kShift == 8) {
            both = __byte_perm(word, kBase, 0x5351);
        } else if constexpr (kFieldIndex == 0 && kBase == 0) {
            both = word >> kShift & kMask;
        } else {
            both = and_or(word >> kShift, kMask, rest);
        }
        if constexpr (kFieldIndex + 1 < num_fields(kBits, kPair)) {
            return pair<kPair, kBase, kFieldIndex + 1>(both);
        } else {
            return both;
        }
    }

    // A fragment of columns 16 * kColumns .. 16 * kColumns + 15 for the k16 step kStep of the
    // block: rows 8 t + 4 * kStep .. 8 t + 4 * kStep + 3, with t = 0 .. 3.
    template <int kColumns, int kStep, uint32_t kBase = 0>
    __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
        constexpr int kFirst = 8 * kColumns + 2 * kStep;
        a[0] = pair<kFirst, kBase>();
        a[1] = pair<kFirst + 4, kBase>();
        a[2] = pair<kFirst + 1, kBase>();
        a[3] = pair<kFirst + 5, kBase>();
        if constexpr (kForm == kE4m3) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = halves_of_e4m3(a[i]);
        }
    }
};

// Codes that are indices into a table. They are replaced as they are loaded: word j holds pairs
// 4 q + j for q = 0 .. 3, whose first codes are in its low half.
template <int form>
struct TableCodes {
    static constexpr bool kHasOffsets = true;
    uint32_t values[4][2];  // [word][code of the pair], one byte per q

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        uint32_t words[4];
        load_words<4>(words, block, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            values[j][0] = look_up(form >> 4, words[j]);
            values[j][1] = look_up(form >> 4, words[j] >> 16);
        }
    }
    template <int kPair>
    __device__ __forceinline__ uint32_t pair() const {
        constexpr int kQuarter = kPair / 4;
        constexpr uint32_t kBytes = kQuarter | (4 + kQuarter) << 8;
        return __byte_perm(values[kPair % 4][0], values[kPair % 4][1], kBytes) & 0x00ff00ffu;
    }
    template <int kColumns, int kStep>
    __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
        constexpr int kFirst = 8 * kColumns + 2 * kStep;
        a[0] = pair<kFirst>();
        a[1] = pair<kFirst + 4>();
        a[2] = pair<kFirst + 1>();
        a[3] = pair<kFirst + 5>();
    }
};
template <>
struct BlockCodes<kIq4> : TableCodes<kIq4> {};

// E2M1 codes: their bits are the sign, the low exponent bits and the high mantissa bit of a float16
// number that is 2^-14 times the number. Numbers below 1 are subnormal in both formats. Each byte of
// `high` and `low` is the upper byte of such a number: of the high or low half-byte of a code byte.
template <>
struct BlockCodes<kMxfp4> {
    static constexpr bool kHasOffsets = false;
    uint32_t high[4], low[4];

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        uint32_t words[4];
        load_words<4>(words, block, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            high[j] = and_or(words[j], 0x80808080u, words[j] >> 3 & 0x0e0e0e0eu);
            low[j] = and_or(words[j] << 4, 0x80808080u, words[j] << 1 & 0x0e0e0e0eu);
        }
    }
    template <int kPair>
    __device__ __forceinline__ uint32_t pair() const {
        constexpr int kQuarter = kPair / 4;
        const uint32_t bytes = (kQuarter % 2 ? high : low)[kPair % 4];
        return __byte_perm(bytes, 0, kQuarter < 2 ? 0x2404 : 0x3414);
    }
    template <int kColumns, int kStep>
    __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
        constexpr int kFirst = 8 * kColumns + 2 * kStep;
        a[0] = pair<kFirst>();
        a[1] = pair<kFirst + 4>();
        a[2] = pair<kFirst + 1>();
        a[3] = pair<kFirst + 5>();
    }
};

}  // namespace exl::cuda

#endif  // __CUDACC__

// Integer dot products of codes and activations, on one vector of kLanes columns.
//
// A vector of codes has one 32-bit lane per column, which holds 4 rows of it, one byte each.
// Activations are integers of at most 16 bits. With VNNI they are stored as two planes of bytes,
// high and low parts, each the signed operand of a byte dot product. Without VNNI they are 16-bit
// words, and codes are expanded to words by masking: first the even rows of a lane, then the odd
// ones.
#pragma once

#include "cpu/common/vec.h"
#include "exl/ops/quant_linear.h"

#if defined(__AVX512VNNI__)
#define EXL_HAS_BYTE_DOT 1
#else
#define EXL_HAS_BYTE_DOT 0
#endif

namespace exl::EXL_ISA {

#if defined(__AVX512F__)

using Codes = __m512i;
constexpr int kTileSums = 12;  // largest rows x panels whose sums stay in registers
static inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// (v >> Shift) & Mask in every byte. Mask clears the bits that come from the byte above.
template <int Shift, int Mask>
static inline Codes bits_of(Codes v) {
    const Codes moved = Shift == 0 ? v : _mm512_srli_epi16(v, Shift);
    return _mm512_and_si512(moved, _mm512_set1_epi8(Mask));
}
// low | (high << Shift); the shifted bits stay within their bytes.
template <int Shift>
static inline Codes join_bits(Codes low, Codes high) {
    return _mm512_or_si512(low, _mm512_slli_epi16(high, Shift));
}
static inline Codes zero_codes() { return _mm512_setzero_si512(); }
static inline Codes broadcast32(const void* p) {
    return _mm512_set1_epi32(*static_cast<const int32_t*>(p));
}
static inline Codes set_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline Codes sub_int(Codes a, Codes b) { return _mm512_sub_epi32(a, b); }
static inline Codes mul_int(Codes a, Codes b) { return _mm512_mullo_epi32(a, b); }
static inline Codes load_zeros(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Vec to_float(Codes v) { return _mm512_cvtepi32_ps(v); }
static inline Codes add_words(Codes sum, Codes codes, Codes x) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(codes, x));
}
static inline Codes even_rows(Codes v) { return _mm512_and_si512(v, _mm512_set1_epi16(0xff)); }
static inline Codes odd_rows(Codes v) { return _mm512_srli_epi16(v, 8); }

// Gathers x[features], with 0 for feature -1. Three times as fast as a masked gather, which depends
// on its merge operand.
static inline Vec gather_features(const float* x, __m512i features) {
    const __m512i present = _mm512_max_epi32(features, _mm512_setzero_si512());
    return _mm512_maskz_mov_ps(_mm512_movepi32_mask(~features), _mm512_i32gather_ps(present, x, 4));
}

static inline void gather_block(const float* x, const int32_t* features, float* to) {
    for (int64_t i = 0; i < kBlockRows; i += kLanes) {
        store(to + i, gather_features(x, _mm512_loadu_si512(features + i)));
    }
}

#elif defined(__AVX2__)

using Codes = __m256i;
constexpr int kTileSums = 4;
static inline Codes load_codes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <int Shift, int Mask>
static inline Codes bits_of(Codes v) {
    const Codes moved = Shift == 0 ? v : _mm256_srli_epi16(v, Shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8(Mask));
}
template <int Shift>
static inline Codes join_bits(Codes low, Codes high) {
    return _mm256_or_si256(low, _mm256_slli_epi16(high, Shift));
}
static inline Codes zero_codes() { return _mm256_setzero_si256(); }
static inline Codes broadcast32(const void* p) {
    return _mm256_set1_epi32(*static_cast<const int32_t*>(p));
}
static inline Codes set_int(int32_t x) { return _mm256_set1_epi32(x); }
static inline Codes sub_int(Codes a, Codes b) { return _mm256_sub_epi32(a, b); }
static inline Codes mul_int(Codes a, Codes b) { return _mm256_mullo_epi32(a, b); }
static inline Codes load_zeros(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static inline Vec to_float(Codes v) { return _mm256_cvtepi32_ps(v); }
static inline Codes add_words(Codes sum, Codes codes, Codes x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(codes, x));
}
static inline Codes even_rows(Codes v) { return _mm256_and_si256(v, _mm256_set1_epi16(0xff)); }
static inline Codes odd_rows(Codes v) { return _mm256_srli_epi16(v, 8); }

#else

// One lane. The words of a lane are its two 16-bit halves, as in the wide sets.
struct Codes {
    uint32_t lane;
};
constexpr int kTileSums = 2;
static inline Codes load_codes(const uint8_t* p) {
    return {
        static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
        static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24
    };
}
template <int Shift, int Mask>
static inline Codes bits_of(Codes v) {
    return {v.lane >> Shift & Mask * 0x01010101u};
}
template <int Shift>
static inline Codes join_bits(Codes low, Codes high) {
    return {low.lane | high.lane << Shift};
}
static inline Codes zero_codes() { return {0}; }
static inline Codes broadcast32(const void* p) {
    return load_codes(static_cast<const uint8_t*>(p));
}
static inline Codes set_int(int32_t x) { return {static_cast<uint32_t>(x)}; }
static inline Codes sub_int(Codes a, Codes b) { return {a.lane - b.lane}; }
static inline Codes mul_int(Codes a, Codes b) { return {a.lane * b.lane}; }
static inline Codes load_zeros(const uint8_t* p) { return {*p}; }
static inline Vec to_float(Codes v) {
    return set1(static_cast<float>(static_cast<int32_t>(v.lane)));
}
static inline Codes add_words(Codes sum, Codes codes, Codes x) {
    const int32_t low = static_cast<int16_t>(codes.lane) * static_cast<int16_t>(x.lane);
    const int32_t high =
        static_cast<int16_t>(codes.lane >> 16) * static_cast<int16_t>(x.lane >> 16);
    return {sum.lane + static_cast<uint32_t>(low) + static_cast<uint32_t>(high)};
}
static inline Codes even_rows(Codes v) { return {v.lane & 0x00ff00ffu}; }
static inline Codes odd_rows(Codes v) { return {v.lane >> 8 & 0x00ff00ffu}; }

#endif

#if !defined(__AVX512F__)
// Gathers x[features[0 .. 32)], with 0 for feature -1.
static inline void gather_block(const float* x, const int32_t* features, float* to) {
    for (int64_t r = 0; r < kBlockRows; ++r) to[r] = features[r] < 0 ? 0.0f : x[features[r]];
}
#endif

// Entries of a table of Values, plus kTableZero.
struct alignas(16) CodeTable {
    uint8_t entries[16];

    explicit constexpr CodeTable(const int8_t (&values)[16]) : entries{} {
        for (int i = 0; i < 16; ++i) entries[i] = static_cast<uint8_t>(values[i] + kTableZero);
    }
};
constexpr CodeTable kIq4Table(kIq4Values);
constexpr CodeTable kMxfp4Table(kMxfp4Values);

// Entries of `table` for codes of 4 bits in the bytes of `v`.
static inline Codes look_up(const CodeTable& table, Codes v) {
#if defined(__AVX512F__)
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table.entries));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), v);
#elif defined(__AVX2__)
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table.entries));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), v);
#else
    uint32_t found = 0;
    for (int i = 0; i < 32; i += 8) {
        found |= static_cast<uint32_t>(table.entries[v.lane >> i & 15]) << i;
    }
    return {found};
#endif
}

// Loads kLanes exponents as half of the scales that they stand for.
static inline Vec load_half_scales(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m512i exponent = load_zeros(p);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(exponent, set_int(1)), 23);
    const __m512i tiny = _mm512_sllv_epi32(set_int(0x00200000), exponent);
    const __mmask16 is_tiny = _mm512_cmplt_epi32_mask(exponent, set_int(2));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_tiny, tiny));
#elif defined(__AVX2__)
    const __m256i exponent = load_zeros(p);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponent, set_int(1)), 23);
    const __m256i tiny = _mm256_sllv_epi32(set_int(0x00200000), exponent);
    const __m256i is_tiny = _mm256_cmpgt_epi32(set_int(2), exponent);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
#else
    const uint32_t bits = half_scale_bits(*p);
    float scale = 0.0f;
    __builtin_memcpy(&scale, &bits, 4);
    return scale;
#endif
}

// Loads kLanes scales or minimums.
static inline Vec load_grid(const void* grid, DType dtype, int64_t index) {
    if (dtype == DType::u8) return load_half_scales(static_cast<const uint8_t*>(grid) + index);
    return dtype == DType::f32 ? load(static_cast<const float*>(grid) + index)
                               : load(static_cast<const Half*>(grid) + index);
}

constexpr int kSteps = kBlockRows / 4;      // steps of 4 rows of a block
constexpr int64_t kCodeBytes = 4 * kLanes;  // bytes of one vector of codes

// Codes of rows 4 Step .. 4 Step + 3 of a plane, for kLanes columns from `plane` on.
template <int Bits, int Step>
static inline Codes plane_codes(const uint8_t* plane) {
    constexpr int kPerRow = 8 / Bits;
    const Codes row = load_codes(plane + Step / kPerRow * 4 * kPanel);
    if constexpr (Bits == 8) return row;
    return bits_of<Bits*(Step % kPerRow), (1 << Bits) - 1>(row);
}

// Template parameter of the products: how codes of one width are stored and what they stand for. The
// form of integers is their width.
constexpr int kE4m3 = 8 | static_cast<int>(Values::e4m3) << 4;
constexpr int kIq4 = 4 | static_cast<int>(Values::iq4_nl) << 4;
constexpr int kMxfp4 = 4 | static_cast<int>(Values::mxfp4) << 4;
constexpr bool is_table(int form) { return form == kIq4 || form == kMxfp4; }
// Bits that a code is stored in.
constexpr int width_of(int form) { return form & 15; }
constexpr bool is_integer(int form) { return form == width_of(form); }
// Bits of the integers that `block_codes` returns; their middle is 2^(bits - 1).
constexpr int integer_bits(int form) { return is_table(form) ? 8 : width_of(form); }

// Codes of rows 4 Step .. 4 Step + 3 of a block, joined from its planes. Codes of a table
// are replaced by its 8-bit integers.
template <int Bits, int Step>
static inline Codes block_codes(const uint8_t* block) {
    constexpr int64_t kRow = 4 * kPanel;
    if constexpr (is_table(Bits)) {
        return look_up(Bits == kIq4 ? kIq4Table : kMxfp4Table, plane_codes<4, Step>(block));
    } else if constexpr (Bits == kE4m3) {
        return plane_codes<8, Step>(block);
    } else if constexpr (Bits == 3) {
        return join_bits<2>(plane_codes<2, Step>(block), plane_codes<1, Step>(block + 2 * kRow));
    } else if constexpr (Bits == 5) {
        return join_bits<4>(plane_codes<4, Step>(block), plane_codes<1, Step>(block + 4 * kRow));
    } else if constexpr (Bits == 6) {
        return join_bits<4>(plane_codes<4, Step>(block), plane_codes<2, Step>(block + 4 * kRow));
    } else {
        return plane_codes<Bits, Step>(block);
    }
}

// Calls fn<form>() for a form known only at run time.
template <class Fn>
static inline __attribute__((always_inline)) void with_form(
    const QuantMatrix& w, int bits, Fn&& fn
) {
    switch (bits | static_cast<int>(w.values) << 4) {
        case kE4m3: return fn.template operator()<kE4m3>();
        case kIq4: return fn.template operator()<kIq4>();
        case kMxfp4: return fn.template operator()<kMxfp4>();
        case 2: return fn.template operator()<2>();
        case 3: return fn.template operator()<3>();
        case 4: return fn.template operator()<4>();
        case 5: return fn.template operator()<5>();
        case 6: return fn.template operator()<6>();
        default: return fn.template operator()<8>();
    }
}

// Calls fn<I>() for I = 0 .. Count - 1, unrolled.
template <int Count, int I = 0, class Fn>
static inline __attribute__((always_inline)) void unrolled(Fn&& fn) {
    if constexpr (I < Count) {
        fn.template operator()<I>();
        unrolled<Count, I + 1>(fn);
    }
}

// Bytes of one block of quantized activations of one row of x: 2 for each of 32 stored rows. With
// byte dot products a block is 32 bytes of high parts, then 32 bytes of low parts. Without them it
// is 32 words, where every 4 rows are in the order 0 2 1 3.
constexpr int64_t kActBlock = 2 * kBlockRows;
// Bytes from the first row of a block to its row kHalfRows.
constexpr int64_t kActHalf = kHalfRows * (EXL_HAS_BYTE_DOT ? 1 : 2);
// Bits in the low part of a 16-bit integer.
constexpr int kLowBits = 8;

#if EXL_HAS_BYTE_DOT

struct DotSum {
    Codes high = zero_codes();
    Codes low = zero_codes();

    template <int Step>
    inline __attribute__((always_inline)) void add(Codes codes, const uint8_t* act) {
        high = _mm512_dpbusd_epi32(high, codes, broadcast32(act + 4 * Step));
        low = _mm512_dpbusd_epi32(low, codes, broadcast32(act + kBlockRows + 4 * Step));
    }
    Codes total() const { return _mm512_add_epi32(_mm512_slli_epi32(high, kLowBits), low); }
};

// Rounds Rows rows of a block of x times `inverse` to integers and splits each into a high part and
// a low part of `low_bits`. `act` is the place of the first of these rows. Returns the sum of the
// integers.
template <int64_t Rows>
static inline int32_t round_rows(const float* x, float inverse, int low_bits, uint8_t* act) {
    const __m128i shift = _mm_cvtsi32_si128(low_bits);
    const __m512i half = _mm512_set1_epi32(1 << (low_bits - 1));
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < Rows; i += kLanes) {
        const __m512i q =
            _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse)));
        const __m512i high = _mm512_sra_epi32(_mm512_add_epi32(q, half), shift);
        const __m512i low = _mm512_sub_epi32(q, _mm512_sll_epi32(high, shift));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(act + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(act + kBlockRows + i), _mm512_cvtepi32_epi8(low)
        );
        sum = _mm512_add_epi32(sum, q);
    }
    return _mm512_reduce_add_epi32(sum);
}

#else

struct DotSum {
    Codes sum = zero_codes();

    template <int Step>
    inline __attribute__((always_inline)) void add(Codes codes, const uint8_t* act) {
        sum = add_words(sum, even_rows(codes), broadcast32(act + 8 * Step));
        sum = add_words(sum, odd_rows(codes), broadcast32(act + 8 * Step + 4));
    }
    Codes total() const { return sum; }
};

// Rounds Rows rows of a block of x times `inverse` to 16-bit integers. `act` is the place of the
// first of these rows. Returns the sum of the integers.
template <int64_t Rows>
static inline int32_t round_rows(const float* x, float inverse, int, uint8_t* act) {
    // 1.5 * 2^23: adding it leaves the rounded integer in the low bits.
    constexpr float kRound = 12582912.0f;
    constexpr int kOrder[4] = {0, 2, 1, 3};
    int32_t q[Rows];
    int32_t sum = 0;
    for (int i = 0; i < Rows; ++i) {
        const float shifted = x[i] * inverse + kRound;
        int32_t bits = 0;
        __builtin_memcpy(&bits, &shifted, 4);
        q[i] = bits - 0x4b400000;
        sum += q[i];
    }
    auto* words = reinterpret_cast<int16_t*>(act);
    for (int i = 0; i < Rows; ++i) {
        words[i] = static_cast<int16_t>(q[i / 4 * 4 + kOrder[i % 4]]);
    }
    return sum;
}

#endif

}  // namespace exl::EXL_ISA

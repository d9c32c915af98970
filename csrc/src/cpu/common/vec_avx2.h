// Eight lanes: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace exl::EXL_ISA {

using Vec = __m256;
using Mask = __m256;
constexpr int kLanes = 8;
// 6 x 2 sums, 2 weights and a broadcast fill 15 of 16 registers.
constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;

static inline Vec set1(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Vec load(const BFloat* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
static inline Vec load(const Fp8* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i wide = _mm_cvtepu8_epi16(raw);
    const __m128i low = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i half =
        _mm_or_si128(_mm_slli_epi16(_mm_xor_si128(wide, low), 8), _mm_slli_epi16(low, 7));
    const __m128i nan =
        _mm_and_si128(_mm_cmpeq_epi16(low, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0f));
}
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline void store(Half* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Rounds to the nearest E4M3, ties to even, saturating at 448. NaN and infinities become NaN.
static inline void store(Fp8* p, Vec v) {
    const Vec near =
        _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(448.0f)), _mm256_set1_ps(-448.0f));
    const __m256i bits = _mm256_castps_si256(near);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7ffff)), odd);
    const __m256i normal = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xfff00000)));
    const Vec shift = _mm256_set1_ps(24576.0f);  // rounds to multiples of 2^-9
    const Vec small = _mm256_sub_ps(_mm256_add_ps(near, shift), shift);
    const Vec magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), near);
    const Vec is_small = _mm256_cmp_ps(magnitude, _mm256_set1_ps(0.015625f), _CMP_LT_OQ);
    const Vec rounded = _mm256_add_ps(
        _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, is_small), _mm256_sub_ps(v, v)
    );
    const Vec scaled = _mm256_mul_ps(rounded, _mm256_set1_ps(1.0f / 256));
    const Vec sign_bit = _mm256_set1_ps(-0.0f);
    const Vec signed_again =
        _mm256_or_ps(_mm256_andnot_ps(sign_bit, scaled), _mm256_and_ps(v, sign_bit));
    const __m128i half = _mm256_cvtps_ph(signed_again, _MM_FROUND_TO_NEAREST_INT);
    const __m128i sign = _mm_and_si128(_mm_srli_epi16(half, 8), _mm_set1_epi16(0x80));
    const __m128i size = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
    const __m128i low = _mm_min_epi16(_mm_srli_epi16(size, 7), _mm_set1_epi16(0x7f));
    const __m128i codes = _mm_or_si128(sign, low);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(codes, codes));
}
// Partial forms, 0 < count < kLanes; missing lanes read as zero and are not written.
template <class T>
static inline Vec load_n(const T* p, int count) {
    T whole[kLanes] = {};
    std::memcpy(static_cast<void*>(whole), p, sizeof(T) * static_cast<unsigned>(count));
    return load(whole);
}
template <class T>
static inline void store_n(T* p, Vec v, int count) {
    T whole[kLanes];
    store(whole, v);
    std::memcpy(static_cast<void*>(p), whole, sizeof(T) * static_cast<unsigned>(count));
}

static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
// Return the second operand if either is NaN.
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec round_even(Vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
static inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline Vec copy_sign(Vec magnitude, Vec sign) {
    const Vec bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
// x * 2^n for whole n in [-254, 254]; a NaN x stays NaN for any n.
static inline Vec scale_by_power(Vec x, Vec n) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return mul(mul(x, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
static inline float sum(Vec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float largest(Vec a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// The order of sum4: it adds adjacent leaves, then adjacent sums, kSumLevels times. Leaf number
// `leaf` is lane sum_leaf(leaf).
constexpr int kSumLevels = 3;
static inline constexpr int sum_leaf(int leaf) { return leaf; }
// out[i] = sum of v[i].
static inline void sum4(const Vec v[4], float out[4]) {
    const Vec a = _mm256_hadd_ps(v[0], v[1]);
    const Vec b = _mm256_hadd_ps(v[2], v[3]);
    const Vec c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}
// out[i * stride + j] = in[j][i] for 8 x 8.
static inline void transpose_block(const Vec in[kLanes], float* out, int64_t stride) {
    Vec a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        store(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        store(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}
// Converts the 8-bit codes of elements i .. i + kLanes of a row to float.
static inline Vec codes8(const uint8_t* row, int64_t i) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i)))
    );
}
// Dequantizes 4-bit codes: (code - 8) * scale.
struct Scaled4 {
    Vec scale;
    Vec base;

    explicit Scaled4(float by) : scale(set1(by)), base(set1(-8.0f * by)) {}
    Vec at(const uint8_t* row, int64_t i) const {
        int32_t raw;
        std::memcpy(&raw, row + (i >> 1), 4);
        const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        const __m256i moved = _mm256_srlv_epi32(_mm256_set1_epi32(raw), shifts);
        const __m256i codes = _mm256_and_si256(moved, _mm256_set1_epi32(15));
        return fma(_mm256_cvtepi32_ps(codes), scale, base);
    }
};
// Converts the `count` halves before `end`, at most 8, into the last `count` elements of `to`.
// Reads 16 bytes in any case.
static inline void widen_last(const uint8_t* end, int64_t, float to[8]) {
    _mm256_storeu_ps(
        to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(end - 16)))
    );
}
static inline Vec round_half(Vec v) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Swaps lanes: lane l receives lane l ^ Stride, for a stride of 2 or 4.
template <int Stride>
static inline Vec swap_lanes(Vec v) {
    if constexpr (Stride == 2) return _mm256_permute_ps(v, 0x4e);
    return _mm256_permute2f128_ps(v, v, 0x01);
}
// Negates the lanes whose index has bit `Stride` set.
template <int Stride>
static inline Vec flip_signs(Vec v) {
    const Vec bit = _mm256_set1_ps(-0.0f);
    return _mm256_xor_ps(v, _mm256_blend_ps(_mm256_setzero_ps(), bit, Stride == 2 ? 0xcc : 0xf0));
}
// Always inlined: GCC 12 treats a function that only prefetches as free of side effects and drops
// calls to it.
static inline __attribute__((always_inline)) void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
static inline __attribute__((always_inline)) void prefetch_l2(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace exl::EXL_ISA

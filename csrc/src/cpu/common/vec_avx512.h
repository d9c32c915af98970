// Sixteen lanes: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace exl::EXL_ISA {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;
// 14 x 2 sums, 2 weights and a broadcast fill 31 of 32 registers.
constexpr int kTileRows = 14;
constexpr int kTilePanels = 2;

static inline Vec set1(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline Vec widen(__m256i raw) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
static inline Vec load(const BFloat* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline Vec from_fp8(__m128i raw) {
    const __m256i wide = _mm256_cvtepu8_epi16(raw);
    const __m256i low = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i half = _mm256_or_si256(
        _mm256_slli_epi16(_mm256_xor_si256(wide, low), 8), _mm256_slli_epi16(low, 7)
    );
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(low, _mm256_set1_epi16(0x7f));
    return _mm512_mul_ps(
        _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7e00))),
        _mm512_set1_ps(256.0f)
    );
}
static inline Vec load(const Fp8* p) {
    return from_fp8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline void store(Half* p, Vec v) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)
    );
}
// Rounds to the nearest E4M3, ties to even, saturating at 448. NaN and infinities become NaN.
static inline __m128i to_fp8(Vec v) {
    const Vec near =
        _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(448.0f)), _mm512_set1_ps(-448.0f));
    const __m512i bits = _mm512_castps_si512(near);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7ffff)), odd);
    const __m512i normal = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xfff00000)));
    const Vec shift = _mm512_set1_ps(24576.0f);  // rounds to multiples of 2^-9
    const Vec small = _mm512_sub_ps(_mm512_add_ps(near, shift), shift);
    const Mask is_small =
        _mm512_cmp_ps_mask(_mm512_abs_ps(near), _mm512_set1_ps(0.015625f), _CMP_LT_OQ);
    const Vec rounded = _mm512_add_ps(
        _mm512_mask_mov_ps(_mm512_castsi512_ps(normal), is_small, small), _mm512_sub_ps(v, v)
    );
    const Vec scaled = _mm512_mul_ps(rounded, _mm512_set1_ps(1.0f / 256));
    const Vec signs = _mm512_and_ps(v, _mm512_set1_ps(-0.0f));
    const __m256i half =
        _mm512_cvtps_ph(_mm512_or_ps(_mm512_abs_ps(scaled), signs), _MM_FROUND_TO_NEAREST_INT);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
    const __m256i size = _mm256_and_si256(half, _mm256_set1_epi16(0x7fff));
    const __m256i low = _mm256_min_epi16(_mm256_srli_epi16(size, 7), _mm256_set1_epi16(0x7f));
    return _mm256_cvtepi16_epi8(_mm256_or_si256(sign, low));
}
static inline void store(Fp8* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_fp8(v));
}
// Partial forms, 0 < count < kLanes; missing lanes read as zero and are not written.
static inline Mask first(int count) { return static_cast<Mask>((1u << count) - 1); }
static inline Vec load_n(const float* p, int count) {
    return _mm512_maskz_loadu_ps(first(count), p);
}
static inline Vec load_n(const Half* p, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}
static inline Vec load_n(const Fp8* p, int count) {
    return from_fp8(_mm_maskz_loadu_epi8(first(count), p));
}
static inline void store_n(Fp8* p, Vec v, int count) {
    _mm_mask_storeu_epi8(p, first(count), to_fp8(v));
}
static inline void store_n(float* p, Vec v, int count) {
    _mm512_mask_storeu_ps(p, first(count), v);
}
static inline void store_n(Half* p, Vec v, int count) {
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// Return the second operand if either is NaN.
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec round_even(Vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
static inline Vec copy_sign(Vec magnitude, Vec sign) {
    const Vec bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}
// x * 2^n for whole n.
static inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
static inline __m256 fold(Vec a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
static inline float sum(Vec a) {
    const __m256 f = fold(a);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }
// The order of sum4: it adds adjacent leaves, then adjacent sums, kSumLevels times. Leaf number
// `leaf` is lane sum_leaf(leaf).
constexpr int kSumLevels = 4;
static inline constexpr int sum_leaf(int leaf) { return (leaf & 1) * 8 + leaf / 2; }
// out[i] = sum of v[i].
static inline void sum4(const Vec v[4], float out[4]) {
    const __m256 a = _mm256_hadd_ps(fold(v[0]), fold(v[1]));
    const __m256 b = _mm256_hadd_ps(fold(v[2]), fold(v[3]));
    const __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}
// out[i * stride + j] = in[j][i] for 16 x 16.
static inline void transpose_block(const Vec in[kLanes], float* out, int64_t stride) {
    Vec a[16], b[16];
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {  // b[4i + c]: column c of each 4 x 4 of rows 4i .. 4i + 3
        b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int c = 0; c < 4; ++c) {
        const Vec low02 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);  // quarters 0, 2 of both
        const Vec low13 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        const Vec high02 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        const Vec high13 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        store(out + c * stride, _mm512_shuffle_f32x4(low02, high02, 0x88));
        store(out + (4 + c) * stride, _mm512_shuffle_f32x4(low13, high13, 0x88));
        store(out + (8 + c) * stride, _mm512_shuffle_f32x4(low02, high02, 0xdd));
        store(out + (12 + c) * stride, _mm512_shuffle_f32x4(low13, high13, 0xdd));
    }
}
// Converts the 8-bit codes of elements i .. i + kLanes of a row to float.
static inline Vec codes8(const uint8_t* row, int64_t i) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i)))
    );
}
// Dequantizes 4-bit codes: (code - 8) * scale.
struct Scaled4 {
    Vec table;

    explicit Scaled4(float scale)
        : table(mul(
              _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), set1(scale)
          )) {}
    Vec at(const uint8_t* row, int64_t i) const {
        // Broadcasts four bytes to the lanes of each half, then shifts each lane's code to the
        // lowest bits. The permutation ignores the bits above.
        const uint8_t* p = row + (i >> 1);
        const __m512i low = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
        const __m512i both = _mm512_mask_broadcastd_epi32(low, 0xff00, _mm_loadu_si32(p + 4));
        const __m512i shifts =
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), table);
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
    return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Swaps lanes: lane l receives lane l ^ Stride, for a stride of 2, 4 or 8.
template <int Stride>
static inline Vec swap_lanes(Vec v) {
    if constexpr (Stride == 2) return _mm512_permute_ps(v, 0x4e);
    if constexpr (Stride == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
    return _mm512_shuffle_f32x4(v, v, 0x4e);
}
// Negates the lanes whose index has bit `Stride` set.
template <int Stride>
static inline Vec flip_signs(Vec v) {
    constexpr Mask lanes = Stride == 2 ? 0xcccc : Stride == 4 ? 0xf0f0 : 0xff00;
    return _mm512_mask_xor_ps(v, lanes, v, _mm512_set1_ps(-0.0f));
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

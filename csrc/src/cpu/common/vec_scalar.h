// One lane: the scalar form of every vector operation, for any processor, and the reference for the
// other sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exl/half.h"

namespace exl::EXL_ISA {

using Vec = float;
using Mask = bool;
constexpr int kLanes = 1;
// Rows and panels of the register tile: 2 x 16 sums.
constexpr int kTileRows = 2;
constexpr int kTilePanels = 1;

static inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

static inline float from_bits(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// Binary32 to binary16, nearest even; overflow becomes infinity, underflow subnormal.
static inline uint16_t float_to_half(float x) {
    const uint32_t u = bits_of(x);
    const uint16_t sign = uint16_t((u >> 16) & 0x8000);
    const uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 0x1ff));
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 or more
    if (magnitude < 0x38800000) {
        // Below the smallest normal: adding 0.5 leaves the half's mantissa in the low bits,
        // rounded.
        const uint32_t sum = bits_of(from_bits(magnitude) + 0.5f);
        return uint16_t(sign | (sum - 0x3f000000));
    }
    const uint32_t odd = (magnitude >> 13) & 1;
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

// Rounds to the nearest E4M3 value, ties to even, saturating at 448. NaN and infinities become NaN.
static inline float to_fp8_values(float x) {
    const float near = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
    const uint32_t bits = bits_of(near);
    const float normal = from_bits((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000);
    const float small = near + 24576.0f - 24576.0f;  // rounds to multiples of 2^-9
    const float magnitude = near < 0.0f ? -near : near;
    const float rounded = (magnitude < 0.015625f ? small : normal) + (x - x);
    return from_bits((bits_of(rounded) & 0x7fffffff) | (bits_of(x) & 0x80000000));
}

static inline Vec set1(float x) { return x; }
static inline Vec load(const float* p) { return *p; }
static inline Vec load(const Half* p) { return half_to_float(p->bits); }
static inline Vec load(const BFloat* p) { return from_bits(uint32_t(p->bits) << 16); }
static inline Vec load(const Fp8* p) {
    const uint32_t low = p->bits & 0x7f;
    const uint32_t nan = low == 0x7f ? 0x7e00 : 0;
    return half_to_float(uint16_t((p->bits & 0x80) << 8 | low << 7 | nan)) * 256.0f;
}
static inline void store(float* p, Vec v) { *p = v; }
static inline void store(Half* p, Vec v) { p->bits = float_to_half(v); }
static inline void store(Fp8* p, Vec v) {
    const uint16_t h = float_to_half(to_fp8_values(v) * (1.0f / 256));
    const bool is_number = (h & 0x7fff) <= 0x3f00;
    p->bits = uint8_t((h >> 8 & 0x80) | (is_number ? h >> 7 & 0x7f : 0x7f));
}
// Partial forms, 0 < count < kLanes: never called with one lane.
template <class T>
static inline Vec load_n(const T* p, int) {
    return load(p);
}
template <class T>
static inline void store_n(T* p, Vec v, int) {
    store(p, v);
}

static inline Vec add(Vec a, Vec b) { return a + b; }
static inline Vec sub(Vec a, Vec b) { return a - b; }
static inline Vec mul(Vec a, Vec b) { return a * b; }
static inline Vec div(Vec a, Vec b) { return a / b; }
// One rounding where the processor has the instruction, else two.
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
static inline Vec fnma(Vec a, Vec b, Vec c) { return fma(-a, b, c); }
// As the x86 instructions: return the second operand if either is NaN.
static inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
static inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec round_even(Vec a) { return std::nearbyint(a); }
static inline Mask less(Vec a, Vec b) { return a < b; }
static inline Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
static inline Vec abs(Vec a) { return from_bits(bits_of(a) & 0x7fffffff); }
static inline Vec copy_sign(Vec magnitude, Vec sign) {
    return from_bits((bits_of(magnitude) & 0x7fffffff) | (bits_of(sign) & 0x80000000));
}
// x * 2^n for whole n in [-254, 254]; a NaN x stays NaN for any n.
static inline Vec scale_by_power(Vec x, Vec n) {
    if (!(n > -254.0f && n < 254.0f)) return x;
    const int whole = int(n);
    const int half = whole >> 1;
    return x * from_bits(uint32_t(half + 127) << 23) *
           from_bits(uint32_t(whole - half + 127) << 23);
}
static inline float sum(Vec a) { return a; }
static inline float largest(Vec a) { return a; }
// The order of sum4: it adds adjacent leaves, then adjacent sums, kSumLevels times. Leaf number
// `leaf` is lane sum_leaf(leaf).
constexpr int kSumLevels = 0;
static inline constexpr int sum_leaf(int leaf) { return leaf; }
static inline void sum4(const Vec v[4], float out[4]) {
    for (int i = 0; i < 4; ++i) out[i] = v[i];
}
static inline void transpose_block(const Vec in[kLanes], float* out, int64_t) { *out = in[0]; }
// Converts the 8-bit codes of elements i .. i + kLanes of a row to float.
static inline Vec codes8(const uint8_t* row, int64_t i) { return float(row[i]); }
// Dequantizes 4-bit codes: (code - 8) * scale.
struct Scaled4 {
    float scale;

    explicit Scaled4(float by) : scale(by) {}
    Vec at(const uint8_t* row, int64_t i) const {
        return float((row[i / 2] >> (i % 2 * 4) & 15) - 8) * scale;
    }
};
// Converts the `count` halves before `end`, at most 8, into the last `count` elements of `to`.
static inline void widen_last(const uint8_t* end, int64_t count, float to[8]) {
    for (int64_t i = 8 - count; i < 8; ++i) {
        uint16_t bits;
        std::memcpy(&bits, end - 2 * (8 - i), 2);
        to[i] = half_to_float(bits);
    }
}
static inline Vec round_half(Vec v) { return half_to_float(float_to_half(v)); }
static inline void prefetch(const void*) {}
static inline void prefetch_l2(const void*) {}

}  // namespace exl::EXL_ISA

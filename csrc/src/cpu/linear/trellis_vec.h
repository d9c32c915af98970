// Operations on 512 bits: 8 64-bit numbers of 8 rings, or 16 32-bit lanes of 16 columns. Two
// registers with AVX2, arrays without vector instructions.
#pragma once

#include "cpu/common/vec.h"
#include "exl/half.h"
#include "exl/ops/trellis.h"

namespace exl::EXL_ISA {

// Without vector instructions the operations are loops, and copies of them would take minutes to
// compile.
#if defined(__AVX2__)
#define EXL_INLINE static inline __attribute__((always_inline))
#define EXL_LAMBDA __attribute__((always_inline))
#else
#define EXL_INLINE static __attribute__((noinline))
#define EXL_LAMBDA
#endif

#if defined(__AVX512F__)

struct Wide {
    __m512i v;
};
EXL_INLINE Wide load_wide(const void* p) { return {_mm512_loadu_si512(p)}; }
EXL_INLINE void store_wide(void* p, Wide a) { _mm512_storeu_si512(p, a.v); }
EXL_INLINE Wide set_wide(int32_t x) { return {_mm512_set1_epi32(x)}; }
EXL_INLINE Wide add_wide(Wide a, Wide b) { return {_mm512_add_epi32(a.v, b.v)}; }
// The 64 bits of each ring that end after the first `Bits` of `now`, which follows `before`.
template <int Bits>
EXL_INLINE Wide window(Wide before, Wide now) {
    if constexpr (Bits == 64) return now;
#if defined(__AVX512VBMI2__)
    return {_mm512_shldi_epi64(before.v, now.v, Bits)};
#else
    return {
        _mm512_or_si512(_mm512_slli_epi64(before.v, Bits), _mm512_srli_epi64(now.v, 64 - Bits))
    };
#endif
}
// The 16 bits from bit Low up in the lower lane, those from bit High up in the upper one.
template <int Low, int High>
EXL_INLINE Wide states(Wide window) {
#if defined(__AVX512VBMI__)
    constexpr int64_t kBytes = Low | (Low + 8) << 8;
    constexpr int64_t kUpper = High | (High + 8) << 8;
    return {_mm512_maskz_multishift_epi64_epi8(
        0x3333333333333333, _mm512_set1_epi64(kBytes | kUpper << 32), window.v
    )};
#else
    const __m512i low = _mm512_srli_epi64(window.v, Low);
    const __m512i high = High >= 32 ? _mm512_srli_epi64(window.v, High >= 32 ? High - 32 : 0)
                                    : _mm512_slli_epi64(window.v, High >= 32 ? 0 : 32 - High);
    return {
        _mm512_and_si512(_mm512_mask_blend_epi32(0xaaaa, low, high), _mm512_set1_epi32(0xffff))
    };
#endif
}
EXL_INLINE Wide multiply(Wide a, uint32_t by) {
    return {_mm512_mullo_epi32(a.v, _mm512_set1_epi32(static_cast<int32_t>(by)))};
}
// acc + x * (sum of the 4 bytes of each lane); `x` has the same number in both of its halves.
EXL_INLINE Wide add_bytes(Wide acc, Wide lanes, Wide x) {
    const __m512i pairs = _mm512_maddubs_epi16(lanes.v, _mm512_set1_epi8(1));
#if defined(__AVX512VNNI__)
    return {_mm512_dpwssd_epi32(acc.v, pairs, x.v)};
#else
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, x.v))};
#endif
}
// acc + the sum of the products of both 16-bit halves.
EXL_INLINE Wide add_products(Wide acc, Wide w, Wide x) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpwssd_epi32(acc.v, w.v, x.v)};
#else
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(w.v, x.v))};
#endif
}
// Sums of the 4 bytes of each lane, minus `zero`, those of `even` in the lower half of the lane.
EXL_INLINE Wide byte_sums(Wide even, Wide odd, int zero) {
    const __m512i ones = _mm512_set1_epi8(1);
#if defined(__AVX512VNNI__)
    const __m512i from = _mm512_set1_epi32(-zero);
    const __m512i low = _mm512_dpbusd_epi32(from, even.v, ones);
    const __m512i high = _mm512_dpbusd_epi32(from, odd.v, ones);
#else
    const __m512i words = _mm512_set1_epi16(1);
    const __m512i from = _mm512_set1_epi32(zero);
    const __m512i low =
        _mm512_sub_epi32(_mm512_madd_epi16(_mm512_maddubs_epi16(even.v, ones), words), from);
    const __m512i high =
        _mm512_sub_epi32(_mm512_madd_epi16(_mm512_maddubs_epi16(odd.v, ones), words), from);
#endif
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16))};
}
// to += scale * acc.
EXL_INLINE void add_scaled(Wide acc, float scale, float* to) {
    store(to, fma(_mm512_cvtepi32_ps(acc.v), set1(scale), load(to)));
}
// The sums of two float16 numbers in the halves of each lane, rounded to float16.
EXL_INLINE void store_half_sums(Wide a, float* to) {
    const Vec low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v));
    const Vec high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(a.v, 16)));
    store(to, round_half(add(low, high)));
}
EXL_INLINE Wide mask_xor(Wide a, uint32_t mask, uint32_t flips) {
    const __m512i kept = _mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int32_t>(mask)));
    return {_mm512_xor_si512(kept, _mm512_set1_epi32(static_cast<int32_t>(flips)))};
}
EXL_INLINE Vec swap_neighbors(Vec v) { return _mm512_permute_ps(v, 0xb1); }
EXL_INLINE Vec flip_odd(Vec v) { return _mm512_mask_xor_ps(v, 0xaaaa, v, _mm512_set1_ps(-0.0f)); }
constexpr int kTrellisRows = 8;  // with two panels: 16 sums of 32 registers

#elif defined(__AVX2__)

struct Wide {
    __m256i a, b;
};
EXL_INLINE Wide load_wide(const void* p) {
    const auto* from = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
EXL_INLINE void store_wide(void* p, Wide w) {
    auto* to = static_cast<__m256i*>(p);
    _mm256_storeu_si256(to, w.a);
    _mm256_storeu_si256(to + 1, w.b);
}
EXL_INLINE Wide set_wide(int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return {v, v};
}
EXL_INLINE Wide add_wide(Wide x, Wide y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
template <int Bits>
EXL_INLINE Wide window(Wide before, Wide now) {
    if constexpr (Bits == 64) return now;
    const auto join = [](__m256i x, __m256i y) __attribute__((always_inline)) {
        return _mm256_or_si256(_mm256_slli_epi64(x, Bits), _mm256_srli_epi64(y, 64 - Bits));
    };
    return {join(before.a, now.a), join(before.b, now.b)};
}
template <int Low, int High>
EXL_INLINE Wide states(Wide window) {
    const auto pick = [](__m256i v) __attribute__((always_inline)) {
        const __m256i low = _mm256_srli_epi64(v, Low);
        const __m256i high = High >= 32 ? _mm256_srli_epi64(v, High >= 32 ? High - 32 : 0)
                                        : _mm256_slli_epi64(v, High >= 32 ? 0 : 32 - High);
        return _mm256_and_si256(_mm256_blend_epi32(low, high, 0xaa), _mm256_set1_epi32(0xffff));
    };
    return {pick(window.a), pick(window.b)};
}
EXL_INLINE Wide multiply(Wide w, uint32_t by) {
    const __m256i v = _mm256_set1_epi32(static_cast<int32_t>(by));
    return {_mm256_mullo_epi32(w.a, v), _mm256_mullo_epi32(w.b, v)};
}
EXL_INLINE __m256i madd(__m256i acc, __m256i w, __m256i x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
}
EXL_INLINE __m256i pair_sums(__m256i v) { return _mm256_maddubs_epi16(v, _mm256_set1_epi8(1)); }
EXL_INLINE Wide add_bytes(Wide acc, Wide w, Wide x) {
    return {madd(acc.a, pair_sums(w.a), x.a), madd(acc.b, pair_sums(w.b), x.b)};
}
EXL_INLINE Wide add_products(Wide acc, Wide w, Wide x) {
    return {madd(acc.a, w.a, x.a), madd(acc.b, w.b, x.b)};
}
EXL_INLINE Wide byte_sums(Wide even, Wide odd, int zero) {
    const __m256i from = _mm256_set1_epi16(static_cast<int16_t>(zero));
    const auto join = [from](__m256i x, __m256i y) __attribute__((always_inline)) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i low = _mm256_madd_epi16(pair_sums(x), ones);
        const __m256i high = _mm256_madd_epi16(pair_sums(y), ones);
        return _mm256_sub_epi16(_mm256_or_si256(low, _mm256_slli_epi32(high, 16)), from);
    };
    return {join(even.a, odd.a), join(even.b, odd.b)};
}
EXL_INLINE void add_scaled(Wide acc, float scale, float* to) {
    store(to, fma(_mm256_cvtepi32_ps(acc.a), set1(scale), load(to)));
    store(to + 8, fma(_mm256_cvtepi32_ps(acc.b), set1(scale), load(to + 8)));
}
EXL_INLINE void store_half_sums(Wide w, float* to) {
    const auto sums = [](__m256i v, float* at) __attribute__((always_inline)) {
        const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
        const __m256i both =
            _mm256_permute4x64_epi64(_mm256_packus_epi32(low, _mm256_srli_epi32(v, 16)), 0xd8);
        const Vec sum =
            add(_mm256_cvtph_ps(_mm256_castsi256_si128(both)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1)));
        store(at, round_half(sum));
    };
    sums(w.a, to);
    sums(w.b, to + 8);
}
EXL_INLINE Wide mask_xor(Wide w, uint32_t mask, uint32_t flips) {
    const __m256i m = _mm256_set1_epi32(static_cast<int32_t>(mask));
    const __m256i f = _mm256_set1_epi32(static_cast<int32_t>(flips));
    return {
        _mm256_xor_si256(_mm256_and_si256(w.a, m), f), _mm256_xor_si256(_mm256_and_si256(w.b, m), f)
    };
}
EXL_INLINE Vec swap_neighbors(Vec v) { return _mm256_permute_ps(v, 0xb1); }
EXL_INLINE Vec flip_odd(Vec v) {
    const Vec signs = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    return _mm256_xor_ps(v, signs);
}
constexpr int kTrellisRows = 2;  // with two panels: 8 sums of 16 registers

#else

struct Wide {
    uint32_t lane[16];
};
EXL_INLINE Wide load_wide(const void* p) {
    Wide w;
    __builtin_memcpy(&w, p, 64);
    return w;
}
EXL_INLINE void store_wide(void* p, Wide w) { __builtin_memcpy(p, &w, 64); }
template <class Fn>
static inline Wide each_lane(Fn&& fn) {
    Wide w;
    for (int i = 0; i < 16; ++i) w.lane[i] = fn(i);
    return w;
}
EXL_INLINE Wide set_wide(int32_t x) {
    return each_lane([x](int) { return static_cast<uint32_t>(x); });
}
EXL_INLINE Wide add_wide(const Wide& a, const Wide& b) {
    return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
// A number of a ring as its lower and upper lane.
static inline uint64_t number(const Wide& w, int ring) {
    return w.lane[2 * ring] | uint64_t{w.lane[2 * ring + 1]} << 32;
}
template <int Bits>
EXL_INLINE Wide window(const Wide& before, const Wide& now) {
    if constexpr (Bits == 64) return now;
    Wide w;
    for (int i = 0; i < 8; ++i) {
        const uint64_t found =
            number(before, i) << (Bits % 64) | number(now, i) >> ((64 - Bits) % 64);
        w.lane[2 * i] = static_cast<uint32_t>(found);
        w.lane[2 * i + 1] = static_cast<uint32_t>(found >> 32);
    }
    return w;
}
template <int Low, int High>
EXL_INLINE Wide states(const Wide& window) {
    return each_lane([&](int i) {
        return static_cast<uint32_t>(number(window, i / 2) >> (i % 2 == 0 ? Low : High)) & 0xffffu;
    });
}
EXL_INLINE Wide multiply(const Wide& w, uint32_t by) {
    return each_lane([&](int i) { return w.lane[i] * by; });
}
static inline uint32_t bytes_of(uint32_t v) {
    return (v & 255u) + (v >> 8 & 255u) + (v >> 16 & 255u) + (v >> 24);
}
static inline uint32_t low_half(uint32_t v) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(v & 0xffffu)));
}
static inline uint32_t high_half(uint32_t v) { return low_half(v >> 16); }
EXL_INLINE Wide add_bytes(const Wide& acc, const Wide& w, const Wide& x) {
    return each_lane([&](int i) {
        return acc.lane[i] + bytes_of(w.lane[i]) * low_half(x.lane[i]);
    });
}
EXL_INLINE Wide add_products(const Wide& acc, const Wide& w, const Wide& x) {
    return each_lane([&](int i) {
        return acc.lane[i] + low_half(w.lane[i]) * low_half(x.lane[i]) +
               high_half(w.lane[i]) * high_half(x.lane[i]);
    });
}
EXL_INLINE Wide byte_sums(const Wide& even, const Wide& odd, int zero) {
    const auto from = static_cast<uint32_t>(zero);
    return each_lane([&](int i) {
        return ((bytes_of(even.lane[i]) - from) & 0xffffu) | ((bytes_of(odd.lane[i]) - from) << 16);
    });
}
EXL_INLINE void add_scaled(const Wide& acc, float scale, float* to) {
    for (int i = 0; i < 16; ++i) {
        to[i] = fma(static_cast<float>(static_cast<int32_t>(acc.lane[i])), scale, to[i]);
    }
}
EXL_INLINE void store_half_sums(const Wide& w, float* to) {
    for (int i = 0; i < 16; ++i) {
        const auto low = static_cast<uint16_t>(w.lane[i] & 0xffffu);
        const auto high = static_cast<uint16_t>(w.lane[i] >> 16);
        to[i] = round_half(half_to_float(low) + half_to_float(high));
    }
}
EXL_INLINE Wide mask_xor(const Wide& w, uint32_t mask, uint32_t flips) {
    return each_lane([&](int i) { return (w.lane[i] & mask) ^ flips; });
}
constexpr int kTrellisRows = 1;

#endif

}  // namespace exl::EXL_ISA

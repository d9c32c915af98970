// Packed rows of the key-value cache: rotation, quantization to codes, dequantization.
//
// Layout and formulas: include/exl/formats/kv.h. The transforms of a unit's even and odd elements
// are computed as one over index bits 1 and up: butterflies of elements 2, 4, 8 .. apart.
#pragma once

#include "cpu/common/vec.h"
#include "exl/formats/kv.h"

namespace exl::EXL_ISA {

// Rounds to float16 if the format requires it at this step.
template <bool Rounds>
static inline Vec settled(Vec v) {
    if constexpr (Rounds) return round_half(v);
    return v;
}

// One stage of butterflies whose elements are in the same vector.
template <bool Rounds, int Stride, int N>
static inline void stage_within(Vec (&v)[N]) {
    if constexpr (Stride < kLanes) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            v[i] = settled<Rounds>(add(swap_lanes<Stride>(v[i]), flip_signs<Stride>(v[i])));
        }
    }
}

// Transforms a unit of `Size` elements in place.
template <bool Rounds, int Size>
static inline void rotate_unit(float* x) {
    constexpr int kCount = Size / kLanes;
    Vec v[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) v[i] = load(x + i * kLanes);
    stage_within<Rounds, 2>(v);
    stage_within<Rounds, 4>(v);
    stage_within<Rounds, 8>(v);
#pragma GCC unroll 8
    for (int stride = kLanes > 2 ? 1 : 2; stride < kCount; stride *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) {
            if ((i & stride) != 0) continue;
            const Vec low = v[i];
            const Vec high = v[i + stride];
            v[i] = settled<Rounds>(add(low, high));
            v[i + stride] = settled<Rounds>(sub(low, high));
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) store(x + i * kLanes, v[i]);
}

// Replaces each unit of a row by H x / n. Maps queries into the rotated space of the codes, and
// weighted sums of codes back.
static inline void rotate_row(float* x, int64_t d) {
    int64_t unit = 0;
    for (; unit + kKvUnit <= d; unit += kKvUnit) rotate_unit<false, kKvUnit>(x + unit);
    for (int64_t i = 0; i < unit; i += kLanes) store(x + i, mul(load(x + i), set1(2.0f / kKvUnit)));
    if (unit == d) return;
    rotate_unit<false, kKvGroup>(x + unit);
    for (int64_t i = unit; i < d; i += kLanes) {
        store(x + i, mul(load(x + i), set1(2.0f / kKvGroup)));
    }
}

// Quantizes kKvGroup rotated elements to codes and their scale.
template <int Bits>
static inline void round_group(const float* y, uint8_t* codes, uint8_t* scale) {
    constexpr float kHalfRange = 1 << (Bits - 1);
    Vec top = set1(0.0f);
    Vec odd = set1(0.0f);  // zero if all elements are finite, else NaN
    for (int64_t i = 0; i < kKvGroup; i += kLanes) {
        top = max(abs(load(y + i)), top);
        odd = fma(load(y + i), set1(0.0f), odd);
    }
    const Vec largest_one = set1(sum(odd) == 0.0f ? largest(top) : __builtin_nanf(""));
    float rounded[kKvGroup];
    for (int64_t i = 0; i < kKvGroup; i += kLanes) {
        const Vec ratio = round_half(div(load(y + i), largest_one));
        const Vec code = round_half(fma(ratio, set1(kHalfRange), set1(kHalfRange)));
        // All zeros divide by a maximum of zero, which gives NaN. With the operands in this order
        // `max` turns NaN into 0.
        const Vec not_below = max(round_even(code), set1(0.0f));
        store(rounded + i, min(not_below, set1(2.0f * kHalfRange - 1.0f)));
    }
    for (int i = 0; i < kKvGroup; i += 8 / Bits) {
        const int low = static_cast<int>(rounded[i]);
        const int high = Bits == 4 ? static_cast<int>(rounded[i + 1]) << 4 : 0;
        codes[i * Bits / 8] = static_cast<uint8_t>(low | high);
    }
    Half stored[kLanes];
    store(stored, mul(largest_one, set1(1.0f / kHalfRange)));
    std::memcpy(scale, stored, 2);
}

template <int Bits>
static inline void pack_row(const float* x, int64_t d, uint8_t* row) {
    uint8_t* scales = row + d * Bits / 8;
    for (int64_t unit = 0; unit < d; unit += kKvUnit) {
        const int64_t size = smaller(kKvUnit, d - unit);
        float y[kKvUnit];
        for (int64_t i = 0; i < size; i += kLanes) store(y + i, round_half(load(x + unit + i)));
        if (size == kKvUnit) {
            rotate_unit<true, kKvUnit>(y);
        } else {
            rotate_unit<true, kKvGroup>(y);
        }
        for (int64_t i = 0; i < size; i += kKvGroup) {
            const int64_t at = unit + i;
            round_group<Bits>(y + i, row + at * Bits / 8, scales + at / kKvGroup * 2);
        }
    }
}

// Dequantizes 8-bit codes: (code - 128) * scale.
struct Scaled8 {
    Vec scale;
    Vec base;

    explicit Scaled8(float by) : scale(set1(by)), base(set1(-128.0f * by)) {}
    Vec at(const uint8_t* row, int64_t i) const { return fma(codes8(row, i), scale, base); }
};

// Dequantizes contiguous rows exactly, without undoing the rotation: to[count][d].
// Not inlined, so that its loops do not compete with the caller for registers.
template <class Scaled>
static __attribute__((noinline)) void unpack_rows(
    const uint8_t* rows, int64_t count, int64_t row_size, int64_t d, float* to
) {
    constexpr int64_t kScales = 8;  // scales converted to fp32 at a time
    const int64_t groups = d / kKvGroup;
    for (int64_t j = 0; j < count; ++j, rows += row_size, to += d) {
        const uint8_t* scales = rows + row_size - 2 * groups;
        for (int64_t first = 0; first < groups; first += kScales) {
            const int64_t amount = smaller(kScales, groups - first);
            float widened[kScales];
            widen_last(scales + 2 * (first + amount), amount, widened);
            for (int64_t g = 0; g < amount; ++g) {
                const Scaled scaled(widened[kScales - amount + g]);
                const int64_t begin = (first + g) * kKvGroup;
#pragma GCC unroll 4
                for (int v = 0; v < kKvGroup / kLanes; ++v) {
                    store(to + begin + v * kLanes, scaled.at(rows, begin + v * kLanes));
                }
            }
        }
    }
}

}  // namespace exl::EXL_ISA

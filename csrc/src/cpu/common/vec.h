// Vector type of the instruction set being compiled, and helpers that are the same for all sets.
//
// Everything here is static inline inside the set's namespace. The linker would merge a shared
// inline function across sets, and the copy that it keeps might contain instructions that this
// processor lacks. For the same reason kernels use no function of the standard library that is not
// always inlined.
#pragma once

#include <cstdint>

#ifndef EXL_ISA
#error "compile per instruction set: -DEXL_ISA=scalar|avx2|avx512|avx512vnni|avx512vbmi|amx"
#endif

namespace exl::EXL_ISA {

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};
// E4M3 (exl/formats/kv.h). Its bits are those of float16(value / 256): the sign, then the exponent
// without its upper bit, then the mantissa without its lower seven bits.
struct Fp8 {
    uint8_t bits;
};

}  // namespace exl::EXL_ISA

#if defined(EXL_ISA_IS_avx512) || defined(EXL_ISA_IS_avx512vnni) || \
    defined(EXL_ISA_IS_avx512vbmi) || defined(EXL_ISA_IS_amx)
#include "cpu/common/vec_avx512.h"
#elif defined(EXL_ISA_IS_avx2)
#include "cpu/common/vec_avx2.h"
#else
#include "cpu/common/vec_scalar.h"
#endif

namespace exl::EXL_ISA {

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
    int64_t first;
    int64_t last;

    int64_t count() const { return last - first; }
};

// Returns share number `part` of [0, total), divided evenly into `parts` shares.
static inline Range share(int64_t total, int64_t part, int64_t parts) {
    return {total * part / parts, total * (part + 1) / parts};
}

// Calls body(offset, kLanes) for each whole vector of [0, n), then body(offset, rest) once for the
// remaining elements, if any.
template <class Body>
static inline void for_lanes(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, static_cast<int>(n - i));
}

template <class T>
static inline Vec load_some(const T* p, int count) {
    return count == kLanes ? load(p) : load_n(p, count);
}
template <class T>
static inline void store_some(T* p, Vec v, int count) {
    if (count == kLanes) {
        store(p, v);
    } else {
        store_n(p, v, count);
    }
}

// e^x, accurate to 1 ulp. Exactly 0 below -87.33, where the result would be subnormal and therefore
// slow to compute with; infinity above 88.73; NaN stays NaN.
static inline Vec exp(Vec x) {
    const Vec clamped = min(set1(89.0f), x);  // keeps NaN: `min` returns its second operand then
    const Vec n = round_even(mul(clamped, set1(1.44269504088896341f)));
    Vec r = fnma(n, set1(0.693359375f), clamped);  // ln 2 in two parts
    r = fnma(n, set1(-2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    p = add(p, set1(1.0f));
    return select(less(x, set1(-87.33654f)), set1(0.0f), scale_by_power(p, n));
}

// tanh x, accurate to a few ulp. Uses a polynomial near zero, where 1 - 2 / (e^2x + 1) cancels.
static inline Vec tanh(Vec x) {
    const Vec a = abs(x);
    const Vec square = mul(x, x);
    Vec p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    const Vec small = fma(mul(p, square), x, x);
    const Vec grown = exp(add(a, a));
    const Vec large = sub(set1(1.0f), div(set1(2.0f), add(grown, set1(1.0f))));
    return select(less(a, set1(0.625f)), small, copy_sign(large, x));
}

}  // namespace exl::EXL_ISA

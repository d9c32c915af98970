// Activation functions of gated projections, applied to one vector.
//
// Accuracy   A few ulp for every x. SiLU and GELU are computed as x / (1 + e^-t). GELU's tanh form
//            0.5 x (1 + tanh u) equals x / (1 + e^-2u), which does not cancel for negative x.
#pragma once

#include "cpu/common/vec.h"
#include "exl/ops/elementwise.h"

namespace exl::EXL_ISA {

static inline Vec silu(Vec x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

static inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    const Vec exponent = mul(cubic, set1(-1.5957691216057308f));  // -2 sqrt(2 / pi)
    const Vec grown = exp(exponent);
    // For large negative x the exponential overflows to infinity, and x / infinity gives the right
    // limit, 0. At x = -infinity the quotient is NaN although the limit is 0. torch returns NaN
    // there too, so the NaN stays visible.
    return div(x, add(set1(1.0f), grown));
}

// Comparisons with NaN are false, so that it stays visible.
static inline Vec clamped_swiglu(Vec gate, Vec up) {
    const Vec limit = set1(kSwigluLimit);
    const Vec least = set1(-kSwigluLimit);
    const Vec g = select(less(limit, gate), limit, gate);
    const Vec below = select(less(limit, up), limit, up);
    const Vec u = select(less(below, least), least, below);
    const Vec grown = exp(mul(g, set1(-kSwigluAlpha)));
    return mul(div(g, add(set1(1.0f), grown)), add(u, set1(1.0f)));
}

// Calls fn with the function of a gate and a value that `gate` names.
template <class Fn>
static inline void with_gate(Gate gate, Fn&& fn) {
    switch (gate) {
        case Gate::silu: return fn([](Vec g, Vec u) { return mul(silu(g), u); });
        case Gate::gelu_tanh: return fn([](Vec g, Vec u) { return mul(gelu_tanh(g), u); });
        case Gate::clamped_swiglu: return fn([](Vec g, Vec u) { return clamped_swiglu(g, u); });
    }
}

}  // namespace exl::EXL_ISA

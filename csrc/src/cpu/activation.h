// The activations of gated projections, on one vector.
//
// Accuracy   both are x / (1 + e^-t), a few ulp everywhere: GELU's tanh form 0.5 x (1 + tanh u)
//            equals x / (1 + e^-2u) and does not cancel for negative x.
#pragma once

#include "cpu/vec.h"
#include "exl/ops/elementwise.h"

namespace exl::EXL_ISA {

static inline Vec silu(Vec x) {
    return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x))));
}

static inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    const Vec exponent = mul(cubic, set1(-1.5957691216057308f));  // -2 sqrt(2 / pi)
    const Vec grown = exp(exponent);
    // x / infinity is the right limit, 0, except at -infinity itself, where it would be NaN; the
    // function's value there is 0 too, but so is torch's NaN: leave it visible.
    return div(x, add(set1(1.0f), grown));
}

// Runs fn(activation).
template <class Fn>
static inline void with_activation(Gate gate, Fn&& fn) {
    if (gate == Gate::silu) {
        fn([](Vec x) { return silu(x); });
    } else {
        fn([](Vec x) { return gelu_tanh(x); });
    }
}

}  // namespace exl::EXL_ISA

// Activation functions of gated projections, applied to one vector.
//
// Accuracy   A few ulp for every x. Both functions are computed as x / (1 + e^-t). GELU's tanh form
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

// Calls fn with the activation function that `gate` names.
template <class Fn>
static inline void with_activation(Gate gate, Fn&& fn) {
    if (gate == Gate::silu) {
        fn([](Vec x) { return silu(x); });
    } else {
        fn([](Vec x) { return gelu_tanh(x); });
    }
}

}  // namespace exl::EXL_ISA

// Shared parts of the recurrent ops: work items of sequences, and the scalar functions of the gates.
#pragma once

#include <cmath>

#include "cpu/common/ops.h"
#include "cpu/common/vec.h"

namespace exl::EXL_ISA {

// log(1 + e^x). Calls the functions of the C library, which are the same for all sets.
static inline float softplus(float x) {
    return (x > 0.0f ? x : 0.0f) + ::log1pf(::expf(-(x < 0.0f ? -x : x)));
}

// The same for a vector, accurate to a few ulp. log(1 + t) is 2 artanh(s) with s = t / (2 + t). As t
// is at most 1, so is 3 s, and eight terms of the series reach the precision of floats.
static inline Vec softplus_each(Vec x) {
    constexpr float kFactors[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7,
                                  1.0f / 5,  1.0f / 3,  1.0f};
    const Vec t = exp(sub(set1(0.0f), abs(x)));
    const Vec s = div(t, add(t, set1(2.0f)));
    const Vec square = mul(s, s);
    Vec p = set1(1.0f / 15);
    for (const float factor : kFactors) p = fma(p, square, set1(factor));
    return fma(add(s, s), p, max(set1(0.0f), x));
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }

// Calls body(seq, part) for each of `parts` parts of each sequence that has rows.
template <class Body>
static inline void for_sequences(
    ThreadPool& pool, const StateRows& rows, int64_t parts, Body&& body
) {
    pool.parallel_for(rows.seqs * parts, [&](int64_t item) {
        const int64_t seq = item / parts;
        if (rows.row_starts[seq] < rows.row_starts[seq + 1]) body(seq, item % parts);
    });
}

}  // namespace exl::EXL_ISA

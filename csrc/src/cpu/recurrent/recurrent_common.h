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

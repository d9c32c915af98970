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

// Rows of the longest sequence.
static inline int64_t most_rows_of(const StateRows& rows) {
    int64_t most = 0;
    for (int64_t seq = 0; seq < rows.seqs; ++seq) {
        most = larger(most, rows.row_starts[seq + 1] - rows.row_starts[seq]);
    }
    return most;
}

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

// The rows from `from` on, at most `count`, of each sequence. Numbers of the rows of a slice stay in
// the L2 or L3 cache from the pass that prepares them to the one that uses them, and the same memory
// serves all slices. Chunks divide a slice, so that no result depends on its size.
struct Slice {
    int64_t from;
    int64_t count;

    Range of(const StateRows& rows, int64_t seq) const {
        const int64_t first = rows.row_starts[seq] + from;
        return {first, smaller(rows.row_starts[seq + 1], first + count)};
    }
    // Row of scratch of a row of a sequence.
    int64_t scratch_row(int64_t row) const { return row - from; }
};

// Calls body(slice) for all slices of the longest sequence. Each thread has some chunks of a slice.
template <class Body>
static inline void for_slices(
    const ThreadPool& pool, int64_t most_rows, int64_t chunk, Body&& body
) {
    const int64_t count = chunk * larger(16, pool.threads());
    for (int64_t from = 0; from < most_rows; from += count) body(Slice{from, count});
}

// Calls body(seq, part, rows) for each of `parts` parts of each sequence that has rows in the slice.
template <class Body>
static inline void for_parts(
    ThreadPool& pool, const StateRows& rows, Slice slice, int64_t parts, Body&& body
) {
    pool.parallel_for(rows.seqs * parts, [&](int64_t item) {
        const Range range = slice.of(rows, item / parts);
        if (range.first < range.last) body(item / parts, item % parts, range);
    });
}

}  // namespace exl::EXL_ISA

// y = log(sum(exp(x))) of each row.
//
// Contract   include/exl/ops/elementwise.h.
// Bound      Memory, as long as a row fits in a core's cache, from where it is read the second
//            time.
#include <cmath>

#include "cpu/common/ops.h"
#include "cpu/common/vec.h"

namespace exl::EXL_ISA {

// Largest value of a row of n; the first `whole` of them fill whole vectors.
static float top_of(const float* x, int64_t n, int64_t whole) {
    Vec even = set1(x[0]), odd = even;
    int64_t i = 0;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
        even = max(load(x + i), even);
        odd = max(load(x + i + kLanes), odd);
    }
    if (i < whole) even = max(load(x + i), even);
    float top = largest(max(even, odd));
    for (int64_t j = whole; j < n; ++j) top = x[j] > top ? x[j] : top;
    return top;
}

// Sum of e^(x - top). Runs of kRun terms are summed in fp32 and the runs in fp64: a row has too
// many terms for one fp32 sum.
static double sum_of(const float* x, int64_t n, int64_t whole, float top) {
    constexpr int64_t kRun = 64 * kLanes;
    const Vec shift = set1(top);
    double total = 0.0;
    for (int64_t first = 0; first < whole; first += kRun) {
        const int64_t last = smaller(whole, first + kRun);
        Vec even = set1(0.0f), odd = even;
        int64_t i = first;
        for (; i + 2 * kLanes <= last; i += 2 * kLanes) {
            even = add(even, exp(sub(load(x + i), shift)));
            odd = add(odd, exp(sub(load(x + i + kLanes), shift)));
        }
        if (i < last) even = add(even, exp(sub(load(x + i), shift)));
        total += static_cast<double>(sum(add(even, odd)));
    }
    for (int64_t j = whole; j < n; ++j) total += ::exp(static_cast<double>(x[j] - top));
    return total;
}

void log_sum_exp(ThreadPool& pool, const LogSumExpArgs& args) {
    const int64_t whole = args.n - args.n % kLanes;
    const int64_t per_item = ceil_div(kValuesPerChunk, args.n);
    pool.parallel_for(ceil_div(args.m, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.m, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const float* x = args.x + row * args.x_stride;
            const float top = top_of(x, args.n, whole);
            const double total = sum_of(x, args.n, whole, top);
            args.y[row] = static_cast<float>(static_cast<double>(top) + ::log(total));
        }
    });
}

}  // namespace exl::EXL_ISA

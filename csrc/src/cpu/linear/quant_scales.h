// Steps before and after the integer sums of a span: initialization with the bias, then application
// of scales and offsets.
#pragma once

#include "cpu/linear/quant_acts.h"
#include "cpu/common/tile.h"

namespace exl::EXL_ISA {

// Prefetch distances, in bytes, of the streams of codes and of scales. Measured for codes on two
// cores with 96 MB of weights in total: 24 GB/s without prefetch; 29, 31, 44 and 43 GB/s at 2, 4, 8
// and 16 KiB.
constexpr int64_t kCodesAhead = 8192;
constexpr int64_t kGridAhead = 1024;

// Prefetches scales and offsets. Always inlined for the same reason as `prefetch` (vec_avx2.h).
static inline __attribute__((always_inline)) void prefetch_scales(
    const QuantMatrix& w, int64_t at
) {
    const int64_t size = dtype_bytes(w.scale_dtype);
    prefetch(static_cast<const uint8_t*>(w.scales) + at * size + kGridAhead);
    if (w.offset == Offset::middle) return;
    const int64_t offset_size = w.offset == Offset::zeros ? 1 : size;
    prefetch(static_cast<const uint8_t*>(w.offsets) + at * offset_size + kGridAhead);
}

// y[row] += sums of a span with scale and offset applied, for kLanes columns. `at` is the index of
// the group's scales and offsets; total(row) returns the integer sums.
template <int Bits, class Total>
static inline __attribute__((always_inline)) void apply_scales(
    const QuantMatrix& w, int64_t at, int rows, Total&& total, const Acts& acts, int64_t span,
    float* y
) {
    const Vec scale = load_grid(w.scales, w.scale_dtype, at);
    const auto for_rows = [&](auto&& value_of) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Vec value = value_of(total(r), acts.sums[span + r * acts.spans]);
            const Vec step = set1(acts.scales[span + r * acts.spans]);
            store(y + r * kPanel, fma(value, step, load(y + r * kPanel)));
        }
    };
    if (w.offset == Offset::middle) {
        for_rows([&](Codes sums, int32_t sum) {
            return mul(to_float(sub_int(sums, set_int(sum << (integer_bits(Bits) - 1)))), scale);
        });
    } else if (w.offset == Offset::zeros) {
        const Codes zeros = load_zeros(static_cast<const uint8_t*>(w.offsets) + at);
        for_rows([&](Codes sums, int32_t sum) {
            return mul(to_float(sub_int(sums, mul_int(zeros, set_int(sum)))), scale);
        });
    } else {
        const Vec minimum = load_grid(w.offsets, w.scale_dtype, at);
        for_rows([&](Codes sums, int32_t sum) {
            return fma(minimum, set1(static_cast<float>(sum)), mul(to_float(sums), scale));
        });
    }
}

// Initializes y[rows][16] of one panel with the bias, or with zero.
static void start_rows(const QuantMatrix& w, int64_t panel, int rows, float (*y)[kPanel]) {
    for (int v = 0; v < kPanelVecs; ++v) {
        const int64_t at = panel * kPanel + v * kLanes;
        const Vec bias = w.bias != nullptr ? load(w.bias + at) : set1(0.0f);
        for (int r = 0; r < rows; ++r) store(y[r] + v * kLanes, bias);
    }
}

}  // namespace exl::EXL_ISA

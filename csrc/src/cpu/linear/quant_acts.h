// Quantization of x to integers of at most 16 bits, for quant_linear.cpp. Each span of up to 128
// stored rows has its own scale, relative to its largest value.
#pragma once

#include "cpu/common/ops.h"
#include "cpu/linear/quant_vec.h"

namespace exl::EXL_ISA {

constexpr int32_t kLargestHigh = 127;  // the high part of an integer is a signed byte
constexpr int64_t kSpanRows = kSpanBlocks * kBlockRows;
// The buffers of x are rounded up to whole tiles of rows. Tile loads read past the last row; the
// results of these rows are not used.
constexpr int64_t kActRowStep = 16;

// Quantized x for one part.
struct Acts {
    uint8_t* data;  // [m] rows of row_bytes
    int64_t row_bytes;
    float* scales;  // [m][spans]
    int32_t* sums;  // [m][spans], sums of the integers
    int64_t spans;
    int low_bits;  // bits of the low part of an integer
};

struct SpanAct {
    float scale;
    int32_t sum;
};

// Quantizes one span: `count` values, a multiple of Rows and at most kSpanRows. Rows is a block, or
// half of one for a group of a pair; then `act` is the place of the half.
template <int64_t Rows>
static SpanAct quantize_span(const float* x, int64_t count, int low_bits, uint8_t* act) {
    const auto largest_act = static_cast<float>(kLargestHigh << low_bits);
    uint32_t largest = 0;  // as bits without the sign; NaN and infinity are above all numbers
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits = 0;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude = 0.0f;
    __builtin_memcpy(&magnitude, &largest, 4);
    const bool is_finite = largest < 0x7f800000u;
    // For magnitudes below 1e-33 the inverse would overflow. Such spans are quantized as if their
    // largest value were 1e-33.
    if (magnitude < 1e-33f) magnitude = 1e-33f;
    const float inverse = is_finite ? largest_act / magnitude : 0.0f;
    const float zeros[Rows] = {};
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i += Rows) {
        const float* from = is_finite ? x + i : zeros;
        sum += round_rows<Rows>(from, inverse, low_bits, act + i / kBlockRows * kActBlock);
    }
    // A NaN or an infinity in x makes the scale NaN, and so every output of the row.
    return {is_finite ? magnitude / largest_act : __builtin_nanf(""), sum};
}

// Bytes of one block of a row of x for products with w.
static inline int64_t act_bytes(const QuantMatrix& w) {
    return w.values == Values::e4m3 ? kBlockRows * static_cast<int64_t>(sizeof(float)) : kActBlock;
}

// Copies a row of x in stored order.
static void copy_row(const QuantMatrix& w, const float* x, float* to) {
    for (int64_t i = 0; i < w.blocks * kBlockRows; i += kBlockRows) {
        if (w.order.empty()) {
            for (int64_t j = 0; j < kBlockRows; j += kLanes) store(to + i + j, load(x + i + j));
        } else {
            gather_block(x, w.order.data() + i, to + i);
        }
    }
}

// Floats stay as they are, in stored order.
static void quantize_row(
    const QuantMatrix& w, const float* x, int low_bits, uint8_t* act, float* scales, int32_t* sums
) {
    if (w.values == Values::e4m3) return copy_row(w, x, reinterpret_cast<float*>(act));
    const int32_t* order = w.order.empty() ? nullptr : w.order.data();
    int64_t block = 0;
    int64_t span = 0;
    float gathered[kSpanRows];
    for (const GroupRun& run : w.runs) {
        const int64_t pieces = ceil_div(run.blocks, kSpanBlocks);  // of each unit
        for (int64_t i = 0; i < run.units * pieces; ++i) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - i % pieces * kSpanBlocks);
            const float* from = x + block * kBlockRows;
            if (order != nullptr) {
                for (int64_t b = 0; b < blocks; ++b) {
                    gather_block(x, order + (block + b) * kBlockRows, gathered + b * kBlockRows);
                }
                from = gathered;
            }
            const auto quantize = [&]<int64_t Rows>(int64_t row, int64_t count, uint8_t* to) {
                const SpanAct done = quantize_span<Rows>(from + row, count, low_bits, to);
                scales[span] = done.scale;
                sums[span++] = done.sum;
            };
            uint8_t* to = act + block * kActBlock;
            if (run.is_paired) {
                quantize.template operator()<kHalfRows>(0, kHalfRows, to);
                quantize.template operator()<kHalfRows>(kHalfRows, kHalfRows, to + kActHalf);
            } else {
                quantize.template operator()<kBlockRows>(0, blocks * kBlockRows, to);
            }
            block += blocks;
        }
    }
}

}  // namespace exl::EXL_ISA

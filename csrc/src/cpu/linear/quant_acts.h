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

// Quantizes one span: `count` values, a whole number of blocks and at most kSpanRows.
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
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i += kBlockRows) {
        uint8_t* to = act + i / kBlockRows * kActBlock;
        if (is_finite) {
            sum += round_block(x + i, inverse, low_bits, to);
        } else {
            __builtin_memset(to, 0, kActBlock);
        }
    }
    // A NaN or an infinity in x makes the scale NaN, and so every output of the row.
    return {is_finite ? magnitude / largest_act : __builtin_nanf(""), sum};
}

static void quantize_row(
    const QuantMatrix& w, const float* x, int low_bits, uint8_t* act, float* scales, int32_t* sums
) {
    const int32_t* order = w.order.empty() ? nullptr : w.order.data();
    int64_t block = 0;
    int64_t span = 0;
    float gathered[kSpanRows];
    for (const GroupRun& run : w.runs) {
        for (int64_t i = 0; i < run.groups * run.spans; ++i, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - i % run.spans * kSpanBlocks);
            const float* from = x + block * kBlockRows;
            if (order != nullptr) {
                for (int64_t b = 0; b < blocks; ++b) {
                    gather_block(x, order + (block + b) * kBlockRows, gathered + b * kBlockRows);
                }
                from = gathered;
            }
            const SpanAct done =
                quantize_span(from, blocks * kBlockRows, low_bits, act + block * kActBlock);
            scales[span] = done.scale;
            sums[span] = done.sum;
            block += blocks;
        }
    }
}

// Returns whether the two matrices can share one quantized copy of x.
static bool has_same_input(const QuantMatrix& a, const QuantMatrix& b) {
    if (a.runs.size() != b.runs.size() || !a.has_order_of(b)) return false;
    for (size_t i = 0; i < a.runs.size(); ++i) {
        if (a.runs[i].rows != b.runs[i].rows || a.runs[i].groups != b.runs[i].groups) return false;
    }
    return true;
}

// Quantizes x for every part. Parts with the same permutation and spans share one copy.
static void quantize(
    ThreadPool& pool, const QuantLinearArgs& args, const int* low_bits, Acts* acts
) {
    int64_t bytes[kMaxParts] = {};
    int64_t total = 0;
    const int64_t rows = ceil_div(args.m, kActRowStep) * kActRowStep;
    int source[kMaxParts];
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        source[p] = 0;
        while (source[p] < p &&
               (low_bits[p] != low_bits[source[p]] || !has_same_input(w, *args.parts[source[p]]))) {
            ++source[p];
        }
        const int64_t held_bytes = w.blocks * kActBlock + ceil_div(w.spans, 16) * 16 * 8;
        if (source[p] == p) bytes[p] = rows * held_bytes;
        total += bytes[p];
    }
    auto* buffer = static_cast<uint8_t*>(thread_scratch(2, total));
    int owners[kMaxParts];
    int count = 0;
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        if (source[p] != p) {
            acts[p] = acts[source[p]];
            continue;
        }
        const int64_t row_bytes = w.blocks * kActBlock;
        uint8_t* data = buffer;
        auto* scales = reinterpret_cast<float*>(buffer + rows * row_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + rows * ceil_div(w.spans, 16) * 16);
        buffer += bytes[p];
        acts[p] = {data, row_bytes, scales, sums, w.spans, low_bits[p]};
        owners[count++] = p;
    }
    // A work item is one row of one part, about 1 us.
    pool.parallel_for(count * args.m, [&](int64_t item) {
        const int part = owners[item / args.m];
        const int64_t row = item % args.m;
        const Acts& to = acts[part];
        quantize_row(
            *args.parts[part], args.x + row * args.x_stride, to.low_bits,
            to.data + row * to.row_bytes, to.scales + row * to.spans, to.sums + row * to.spans
        );
    });
}

}  // namespace exl::EXL_ISA

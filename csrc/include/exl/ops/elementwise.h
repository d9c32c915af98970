// Ops that touch each activation once: norms, rotary positions, gated activations, cache writes,
// sums of exponentials.
// All activations are fp32; the last dimension is contiguous.
#pragma once

#include <cstdint>

#include "exl/formats/kv.h"
#include "exl/tensor_view.h"

namespace exl {

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. y may be x.
struct RmsNormArgs {
    const float* x;
    int64_t rows;
    int64_t x_stride;    // between rows
    int64_t heads;       // each head of a row is normed by itself; 1 for a whole row
    int64_t d;           // heads are d apart
    const float* weight;  // [d]
    float eps;
    float* y;
    int64_t y_stride;
};

// In place, pairs (i, i + rotated/2): (a, b) -> (a cos - b sin, b cos + a sin). Where there is a
// scale, the heads so turned are then x * scale + shift.
struct RopeArgs {
    float* x;  // [rows, heads, d]
    int64_t rows;
    int64_t x_stride;
    int64_t heads;
    int64_t d;
    int64_t rotated;    // even, <= d; the rest stays
    const float* cos;  // [rows, rotated / 2]
    const float* sin;
    const float* scale = nullptr;  // [heads, d], and so is shift
    const float* shift = nullptr;
};

enum class Gate : int { silu = 0, gelu_tanh = 1 };

// y = act(first half) * second half of each row.
struct GatedActivationArgs {
    const float* x;  // [m, 2 * d], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    int64_t d;
    Gate gate;
    float* y;  // [m, d]
};

// y = log(sum(exp(x))) over the last dimension; NaN where a value is NaN or plus infinity, or all
// are minus infinity.
struct LogSumExpArgs {
    const float* x;  // [m, n], n > 0
    int64_t m;
    int64_t x_stride;
    int64_t n;
    float* y;  // [m]
};

// Key and value rows to their slots, stored as formats/kv.h says; slot = page * page_size + offset,
// each in range.
struct WriteKvArgs {
    const float* key;    // [rows, heads, d]
    const float* value;
    int64_t rows;
    int64_t key_stride;
    int64_t value_stride;
    int64_t heads;
    int64_t d;
    void* key_cache;  // [pages, heads, page_size, row]
    void* value_cache;
    DType key_dtype;  // f32, f16 or f8e4m3, and both alike; or each i8 or u8
    DType value_dtype;
    int64_t page_size;
    const int64_t* slots;  // [rows]
};

}  // namespace exl

// Elementwise and row-wise ops: norms, RoPE, gated activations, log-sum-exp.
//
// All activations are fp32; the last dimension is contiguous.
#pragma once

#include <cstdint>

namespace exl {

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. y may be x.
struct RmsNormArgs {
    const float* x;
    int64_t rows;
    int64_t x_stride;     // between rows
    int64_t heads;        // heads per row, each normalized by itself; 1 for a whole row
    int64_t d;            // heads are d apart
    const float* weight;  // [d]
    float eps;
    float* y;
    int64_t y_stride;
};

// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with the population
// variance of each row.
struct LayerNormArgs {
    const float* x;
    int64_t rows;
    int64_t x_stride;  // between rows
    int64_t d;
    const float* weight;  // [d]
    const float* bias;    // [d], or null: none
    float eps;
    float* y;  // [rows, d]
};

// RoPE in place: the pairs (i, i + rotated / 2) of each head, (a, b) -> (a cos - b sin,
// b cos + a sin). If there is a scale, the whole rotated head then becomes x * scale + shift.
struct RopeArgs {
    float* x;  // [rows, heads, d]
    int64_t rows;
    int64_t x_stride;
    int64_t heads;
    int64_t d;
    int64_t rotated;   // even, <= d; later elements are not rotated
    const float* cos;  // [rows, rotated / 2]
    const float* sin;
    const float* scale = nullptr;  // [heads, d]; both or neither
    const float* shift = nullptr;  // [heads, d]
};

// act(g) * u of a gate g and a value u. clamped_swiglu is g sigmoid(kSwigluAlpha g) * (u + 1), with
// g at most kSwigluLimit and u within it (gpt-oss).
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped_swiglu = 2 };
constexpr float kSwigluAlpha = 1.702f;
constexpr float kSwigluLimit = 7.0f;

// y = act(first half) * second half of each row.
struct GatedActivationArgs {
    const float* x;  // [m, 2 * d], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    int64_t d;
    Gate gate;
    float* y;  // [m, d]
};

enum class Activation : int { silu = 0, gelu_tanh = 1, relu2 = 2 };

// y = act(x). relu2: max(x, 0)^2.
struct ActivationArgs {
    const float* x;  // [m, d], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    int64_t d;
    Activation kind;
    float* y;  // [m, d]
};

// y = log(sum(exp(x))) over the last dimension. y is NaN if a value of the row is NaN or plus
// infinity, or if all are minus infinity.
struct LogSumExpArgs {
    const float* x;  // [m, n], n > 0
    int64_t m;
    int64_t x_stride;
    int64_t n;
    float* y;  // [m]
};

}  // namespace exl

// Mixture of experts: the choice of experts for each row, and the MLPs of quantized experts.
#pragma once

#include <cstdint>

#include "exl/ops/elementwise.h"
#include "exl/ops/quant_linear.h"

namespace exl {

enum class Scores : int { softmax = 0, sigmoid = 1 };

// exl_core/ops/moe.py describes the fields, which are those of `Routing`.
struct RouteArgs {
    const float* logits;  // [m, experts]
    int64_t m;
    int64_t experts;
    const float* bias;  // [experts], added to the scores that choose; or null
    int64_t top_k;
    Scores scores;
    int64_t groups;
    int64_t kept_groups;
    int64_t group_scores;
    bool normalizes;
    float eps;
    float factor;
    int32_t* ids;    // [m, top_k], best first
    float* weights;  // [m, top_k]
};

// One implementation for all instruction sets: a row takes some microseconds.
void route(ThreadPool& pool, const RouteArgs& args);

// One quantized matrix of each expert, of equal sizes.
struct ExpertMatrices {
    const QuantMatrix* const* experts;
    int64_t blocks;  // the largest numbers of any expert
    int64_t spans;
};

// y[row] = sum over j of weights[row, j] * down(act(gate(x[row])) * up(x[row])), with the matrices
// of expert ids[row, j]. No matrix has codes of floats (Values::e4m3).
struct ExpertMlpArgs {
    ExpertMatrices gate;
    ExpertMatrices up;
    ExpertMatrices down;
    int64_t experts;
    bool has_one_input;  // gate and up matrices of all experts can share one quantized copy of x
    const float* x;      // [m, k], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    const int32_t* ids;    // [m, top_k]
    const float* weights;  // [m, top_k]
    int64_t top_k;
    Gate kind;
    float* y;  // [m, n of down]
};

}  // namespace exl

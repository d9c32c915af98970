// Sampling of one token from one row of logits.
#pragma once

#include <cstdint>

namespace exl {

// Steps, in this order. The likeliest token is always kept; ties are ordered by id, lowest first.
//   1. value = (logit > 0 ? logit / factor : logit * factor) + offset for the edited ids, each
//      operation rounded to fp32; tokens whose mask bit is 0 are dropped (set to minus infinity)
//   2. y = temperature == 1 ? value : (value - largest) / temperature, each operation rounded
//      to fp32
//   3. keep the top_k tokens with the largest y (0: all)
//   4. if top_p < 1: keep the longest descending run of y whose weights e^(y - largest y) sum to at
//      most top_p of the total and are each at least 1e-6 of it; weights below e^kWeightFloor are 0
//   5. if min_p > 0: keep the tokens with y - largest y >= ln(min_p)
//   6. sample the first token, by id, whose running sum of weights exceeds uniform times the total
struct SampleArgs {
    const float* logits;   // [vocab]
    int64_t vocab;         // at least 1, below 2^31
    const int32_t* mask;   // [ceil(vocab / 32)], bit i % 32 of word i / 32; or null
    const int64_t* ids;    // [num_edits], distinct, each in range
    const float* factors;  // [num_edits], above 0
    const float* offsets;  // [num_edits]
    int64_t num_edits;
    float temperature;  // > 0
    int64_t top_k;
    double top_p;
    double min_p;
    double uniform;  // in [0, 1)
    int64_t num_top;
    // Output: the num_top likeliest of the kept tokens, likeliest first.
    int64_t* top_ids;  // [min(num_top, vocab)]
    double* top_probabilities;
    // Scratch; `padded` is vocab rounded up to kSampleBlock.
    float* edited;   // [padded]
    float* scaled;   // [padded]
    float* weights;  // [padded]
    float* maxima;   // [2 * padded / kSampleBlock]
    double* sums;    // [padded]
    uint64_t* keys;  // [2 * padded]
};

constexpr int64_t kSampleBlock = 64;
constexpr float kWeightFloor = -87.33654f;

// token_id is -1 if a logit is NaN or plus infinity, or if no token is kept.
struct SampleResult {
    int64_t token_id;
    double probability;
    int64_t num_top;
};

}  // namespace exl

// Drawing one token from one row of logits.
#pragma once

#include <cstdint>

namespace exl {

// Steps, in this order; the likeliest token always stays, and equal values go by id, lowest first:
//   values[ids] = new_values; tokens whose bit is 0 in the mask are dropped (minus infinity)
//   y = temperature == 1 ? value : (value - largest) / temperature, each operation rounded to fp32
//   the top_k tokens of the largest y (0: all)
//   with top_p < 1 the longest run of descending y whose weights e^(y - largest y) sum to at most
//   top_p of the total and are at least 1e-6 of it each; weights below e^kWeightFloor are 0
//   with min_p > 0 the tokens of y - largest y >= ln(min_p)
// The token is the first whose running weight, by id, exceeds uniform times the total.
struct SampleArgs {
    const float* logits;  // [vocab]
    int64_t vocab;        // at least 1, below 2^31
    const int32_t* mask;  // [ceil(vocab / 32)], bit i % 32 of word i / 32; or null
    const int64_t* ids;   // [changes], each in range; the last of equal ones counts
    const float* new_values;
    int64_t changes;
    float temperature;  // > 0
    int64_t top_k;
    double top_p;
    double min_p;
    double uniform;  // in [0, 1)
    int64_t num_top;
    // Results for the num_top likeliest tokens that are left, likeliest first.
    int64_t* top_ids;           // [min(num_top, vocab)]
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

// token_id -1: a logit is NaN or plus infinity, or no token is left.
struct SampleResult {
    int64_t token_id;
    double probability;
    int64_t num_top;
};

}  // namespace exl

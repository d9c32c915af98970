// Recurrent mixers of the CUDA library: causal convolutions, the gated delta rule, the state scan of
// Mamba-2.
//
// exl_core/ops/recurrent.py has the formulas. A sequence has its state, float32, in a slot of
// `states`, which the function updates in place. Rows, past lengths and slots are on the device, and
// the host reads none of them: passes can be captured in graphs. The results of a row depend on
// neither the other sequences nor `rows`. They depend on the division of a sequence into calls by
// rounding only, and with `is_invariant` not at all.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_MAX_TAPS 8
#define EXL_CUDA_MAX_STATE_DEPTH 256  // elements of a key, or state_size of Mamba-2

// Sequence s has the rows row_starts[s] .. row_starts[s + 1] - 1. It starts from zeros if
// past_lens[s] is 0, else from the contents of slots[s]. Sequences with rows have slots of their
// own. Rows from row_starts[seqs] on are padding: their results are zeros. With as many sequences
// as rows, work is divided for sequences of one row each.
typedef struct {
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
    const int64_t* slots;       // [seqs]
    int32_t seqs;               // less than 65535
    int32_t rows;
} ExlStateRows;

// y[p] = bias + sum of weight[t] * x[p - taps + 1 + t], each channel by itself; then SiLU.
typedef struct {
    ExlStateRows rows;
    const void* x;  // [rows, channels] float32 or float16
    int64_t x_stride;
    const float* weight;  // [taps, channels], the newest input's factor last
    const float* bias;    // [channels], or null
    float* states;        // [slots, taps - 1, channels], the newest input last
    float* y;             // [rows, channels]
    int32_t x_dtype;
    int32_t channels;
    int32_t taps;  // 2 to EXL_CUDA_MAX_TAPS
    int32_t has_silu;
} ExlCausalConv;
EXL_CUDA_API int exl_cuda_causal_conv(const ExlCausalConv* args, void* stream);

// The gated delta rule.
typedef struct {
    ExlStateRows rows;
    const float* qkv;  // [rows, 2 key_heads key_dim + value_heads value_dim]
    int64_t qkv_stride;
    const float*
        ba;  // [rows, 2 value_heads], b first; is_by_row: [rows, value_heads (1 + key_dim)]
    int64_t ba_stride;
    const float* decay;    // [value_heads]
    const float* dt_bias;  // [value_heads]; is_by_row: [value_heads, key_dim]
    float* states;         // [slots, value_heads, key_dim, value_dim]
    float* y;              // [rows, value_heads * value_dim]
    int32_t key_heads;
    int32_t value_heads;  // a multiple of key_heads, less than 65536
    int32_t key_dim;      // at most EXL_CUDA_MAX_STATE_DEPTH
    int32_t value_dim;
    int32_t is_tiled;   // value head h uses key head h % key_heads, else h / (heads per key head)
    int32_t is_by_row;  // each row of the state decays by itself
    void* workspace;    // exl_cuda_recurrence_workspace; null: every sequence token by token
    int64_t workspace_bytes;
    int32_t is_invariant;  // every sequence token by token, with the same bits in any division
    int32_t reserved;
} ExlDeltaRule;
EXL_CUDA_API int exl_cuda_delta_rule(const ExlDeltaRule* args, void* stream);

// The state scan of Mamba-2.
typedef struct {
    ExlStateRows rows;
    const float* xbc;  // [rows, heads head_dim + 2 groups state_size]
    int64_t xbc_stride;
    const float* dt;  // [rows, heads]
    int64_t dt_stride;
    const float* decay;    // [heads]
    const float* dt_bias;  // [heads]
    const float* skip;     // [heads]
    float* states;         // [slots, heads, head_dim, state_size]
    float* y;              // [rows, heads * head_dim]
    int32_t heads;         // a multiple of `groups`, less than 65536
    int32_t head_dim;
    int32_t state_size;  // at most EXL_CUDA_MAX_STATE_DEPTH
    int32_t groups;
    float least_step;
    float largest_step;
    void* workspace;  // as above
    int64_t workspace_bytes;
    int32_t is_invariant;  // every sequence token by token, with the same bits in any division
    int32_t reserved;
} ExlStateScan;
EXL_CUDA_API int exl_cuda_state_scan(const ExlStateScan* args, void* stream);

// Size of the workspace with which long sequences are computed in chunks of 64 tokens. 0 if there
// can be none among the rows, or if the device or `depth` (key_dim, or state_size) has no such form.
EXL_CUDA_API int64_t exl_cuda_recurrence_workspace(
    int32_t rows, int32_t seqs, int32_t heads, int32_t key_heads, int32_t depth
);

#ifdef __cplusplus
}
#endif

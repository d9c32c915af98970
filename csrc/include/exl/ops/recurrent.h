// Recurrent mixers: causal convolutions, the gated delta rule, the state scan of Mamba-2.
//
// Each sequence has a state of fixed size in a slot of `states`, fp32, which the op updates in
// place. All is computed in fp32, in an order that depends on neither the other sequences nor the
// number of threads. The convolution processes tokens one after the other. So do the delta rule and
// the scan if is_batch_invariant; else they may process kRecurrentChunk rows of a sequence in a call
// at once, so that the division of a sequence into calls changes the rounding.
#pragma once

#include <cstdint>

namespace exl {

constexpr int64_t kRecurrentChunk = 16;  // tokens

// Sequence s has the rows row_starts[s] .. row_starts[s + 1] - 1. It starts from zeros if
// past_lens[s] is 0, else from the contents of slots[s].
struct StateRows {
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
    const int64_t* slots;       // [seqs]
    int64_t seqs;
};

// y[p] = silu(bias + sum of weight[t] * x[p - taps + 1 + t]), each channel by itself.
struct CausalConvArgs {
    const float* x;  // [rows, channels], rows x_stride apart
    int64_t x_stride;
    int64_t channels;
    int64_t taps;
    const float* weight;  // [taps, channels], the newest input's factor last
    const float* bias;    // [channels], or null: none
    bool has_silu;
    float* states;  // [slots, taps - 1, channels], the newest input last
    StateRows rows;
    float* y;  // [rows, channels]
};

// One head: S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q, with S [key_dim, value_dim]. q and
// k are normalized, g = -decay softplus(a + dt_bias), beta = sigmoid(b). There is one g for all rows
// of S, or one for each (Kimi delta attention).
struct DeltaRuleArgs {
    const float* qkv;  // [rows, 2 key_heads key_dim + value_heads value_dim], rows qkv_stride apart
    int64_t qkv_stride;
    const float* a;  // [rows, value_heads, decays], rows a_stride apart
    int64_t a_stride;
    const float* b;  // [rows, value_heads]
    int64_t b_stride;
    int64_t num_rows;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t decays;        // of a head: 1, or key_dim
    const float* decay;    // [value_heads]
    const float* dt_bias;  // [value_heads, decays]
    bool is_tiled;  // value head h uses key head h % key_heads, else h / (heads per key head)
    float* states;  // [slots, value_heads, key_dim, value_dim]
    StateRows rows;
    bool is_batch_invariant;
    float* scratch;  // [num_rows, delta_scratch_width]
    float* y;        // [num_rows, value_heads * value_dim]
};

// Packed numbers of a head and a chunk (cpu/recurrent/delta_chunks.h).
static inline int64_t delta_pack_floats(int64_t key_dim, bool is_by_row) {
    const int64_t products = 2 * kRecurrentChunk * kRecurrentChunk;
    const int64_t by_row = is_by_row ? key_dim * (kRecurrentChunk + 1) : 0;
    return 2 * key_dim * kRecurrentChunk + products + by_row;
}

// Floats of scratch per row: the larger of a row by itself and a row's share of a chunk.
static inline int64_t delta_scratch_width(
    int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t decays
) {
    const bool is_by_row = decays != 1;
    const int64_t row = 2 * key_heads * key_dim + value_heads * (decays + 1);
    const int64_t heads = is_by_row ? value_heads : key_heads;
    const int64_t chunk =
        heads * delta_pack_floats(key_dim, is_by_row) + 2 * value_heads * kRecurrentChunk;
    const int64_t share = (chunk + kRecurrentChunk - 1) / kRecurrentChunk;
    return row > share ? row : share;
}

// One head: h = exp(-decay d) h + d x B^T; y = h C + skip x, with h [head_dim, state_size] and
// d = clamp(softplus(dt + dt_bias)). Heads share B and C in groups.
struct StateScanArgs {
    const float* xbc;  // [rows, heads head_dim + 2 groups state_size], rows xbc_stride apart
    int64_t xbc_stride;
    const float* dt;  // [rows, heads], rows dt_stride apart
    int64_t dt_stride;
    int64_t num_rows;
    int64_t heads;
    int64_t head_dim;
    int64_t state_size;
    int64_t groups;
    const float* decay;    // [heads]
    const float* dt_bias;  // [heads]
    const float* skip;     // [heads]
    float least_step;
    float largest_step;
    float* states;  // [slots, heads, head_dim, state_size]
    StateRows rows;
    bool is_batch_invariant;
    float* scratch;  // [num_rows, scan_scratch_width]
    float* y;        // [num_rows, heads * head_dim]
};

// Floats of scratch per row: the gates of the heads, and a row's share of the packed numbers of the
// groups in a chunk.
static inline int64_t scan_scratch_width(int64_t heads, int64_t groups, int64_t state_size) {
    return 2 * heads + groups * (2 * state_size + 2 * kRecurrentChunk);
}

}  // namespace exl

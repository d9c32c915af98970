// Gated delta rule, token by token.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    First, keys, queries and gates of all rows, a work item per row. Then a work item is
//            one sequence, one value head and a block of the columns of its state, which are
//            independent of each other and stay in the L1 cache over all rows.
// Accuracy   fp32. The pass over the state that adds a token also decays it for the next one and
//            multiplies it with that token's key. The operations on each number are the same
//            whether the next token is in this call or in the next one.
#include "cpu/recurrent/recurrent_common.h"
#include "exl/ops/recurrent.h"

namespace exl::EXL_ISA {

constexpr float kL2Eps = 1e-6f;
constexpr int kVecs = 2;  // of a block of columns: 128 rows of 32 floats are 16 KiB

// Copies a head, multiplied by `factor` and divided by the root of its sum of squares.
static inline void normalize(const float* x, int64_t d, float factor, float* y) {
    Vec squares = set1(0.0f);
    for_lanes(d, [&](int64_t i, int count) {
        const Vec v = load_some(x + i, count);
        squares = fma(v, v, squares);
    });
    const Vec scale = set1(factor / std::sqrt(sum(squares) + kL2Eps));
    for_lanes(d, [&](int64_t i, int count) {
        store_some(y + i, mul(load_some(x + i, count), scale), count);
    });
}

// A row of scratch: queries and keys of the key heads, then decay and beta of the value heads.
static inline void prepare_row(const DeltaRuleArgs& args, int64_t row, float* scratch) {
    const float* x = args.qkv + row * args.qkv_stride;
    const int64_t size = args.key_heads * args.key_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
    for (int64_t head = 0; head < args.key_heads; ++head) {
        const int64_t at = head * args.key_dim;
        normalize(x + at, args.key_dim, scale, scratch + at);
        normalize(x + size + at, args.key_dim, 1.0f, scratch + size + at);
    }
    float* gates = scratch + 2 * size;
    for (int64_t head = 0; head < args.value_heads; ++head) {
        const float a = args.a[row * args.a_stride + head] + args.dt_bias[head];
        gates[head] = ::expf(-args.decay[head] * softplus(a));
        gates[args.value_heads + head] = sigmoid(args.b[row * args.b_stride + head]);
    }
}

// Columns of one head's state. Vector u of them has count(u) lanes.
struct Columns {
    float* state;    // first row; rows are value_dim apart
    int64_t stride;  // value_dim
    int64_t rows;    // key_dim
    int counts[kVecs];
};

template <bool kFull>
static inline Vec load_column(const Columns& of, const float* p, int u) {
    if constexpr (kFull) return load(p + u * kLanes);
    return of.counts[u] > 0 ? load_some(p + u * kLanes, of.counts[u]) : set1(0.0f);
}

template <bool kFull>
static inline void store_column(const Columns& of, float* p, int u, Vec v) {
    if constexpr (kFull) {
        store(p + u * kLanes, v);
    } else if (of.counts[u] > 0) {
        store_some(p + u * kLanes, v, of.counts[u]);
    }
}

// Decays the state for the first token; seen[u] = its product with the token's key.
template <bool kFull>
static inline void begin_columns(
    const Columns& of, const float* k, float decay, bool is_new, Vec seen[kVecs]
) {
    for (int u = 0; u < kVecs; ++u) seen[u] = set1(0.0f);
    const Vec factor = set1(decay);
    for (int64_t i = 0; i < of.rows; ++i) {
        float* row = of.state + i * of.stride;
        const Vec key = set1(k[i]);
        for (int u = 0; u < kVecs; ++u) {
            const Vec held = is_new ? set1(0.0f) : load_column<kFull>(of, row, u);
            const Vec s = mul(factor, held);
            seen[u] = fma(key, s, seen[u]);
            store_column<kFull>(of, row, u, s);
        }
    }
}

// Adds a token to the state: out[u] = its product with the query. With `next_k`, also decays the
// state for the next token, and seen[u] = its product with that token's key.
template <bool kFull>
static inline void add_token(
    const Columns& of, const float* q, const float* k, const Vec delta[kVecs], const float* next_k,
    float next_decay, Vec out[kVecs], Vec seen[kVecs]
) {
    for (int u = 0; u < kVecs; ++u) out[u] = seen[u] = set1(0.0f);
    const Vec factor = set1(next_decay);
    for (int64_t i = 0; i < of.rows; ++i) {
        float* row = of.state + i * of.stride;
        const Vec key = set1(k[i]), query = set1(q[i]);
        const Vec next_key = next_k == nullptr ? set1(0.0f) : set1(next_k[i]);
        for (int u = 0; u < kVecs; ++u) {
            Vec s = fma(key, delta[u], load_column<kFull>(of, row, u));
            out[u] = fma(query, s, out[u]);
            if (next_k != nullptr) {
                s = mul(factor, s);
                seen[u] = fma(next_key, s, seen[u]);
            }
            store_column<kFull>(of, row, u, s);
        }
    }
}

template <bool kFull>
static inline void run_columns(
    const DeltaRuleArgs& args, const Columns& of, int64_t seq, int64_t head, int64_t column
) {
    const int64_t size = args.key_heads * args.key_dim;
    const int64_t width = 2 * size + 2 * args.value_heads;
    const int64_t shared = args.value_heads / args.key_heads;
    const int64_t key_head = args.is_tiled ? head % args.key_heads : head / shared;
    const int64_t first = args.rows.row_starts[seq];
    const int64_t last = args.rows.row_starts[seq + 1];
    const auto row_of = [&](int64_t row) { return args.scratch + row * width; };
    const auto key_of = [&](int64_t row) { return row_of(row) + size + key_head * args.key_dim; };
    const auto decay_of = [&](int64_t row) { return row_of(row)[2 * size + head]; };
    Vec seen[kVecs], out[kVecs], delta[kVecs];
    begin_columns<kFull>(of, key_of(first), decay_of(first), args.rows.past_lens[seq] == 0, seen);
    for (int64_t row = first; row < last; ++row) {
        const float* v = args.qkv + row * args.qkv_stride + 2 * size + head * args.value_dim;
        const Vec beta = set1(row_of(row)[2 * size + args.value_heads + head]);
        for (int u = 0; u < kVecs; ++u) {
            delta[u] = mul(beta, sub(load_column<kFull>(of, v + column, u), seen[u]));
        }
        const bool has_next = row + 1 < last;
        const float* next_k = has_next ? key_of(row + 1) : nullptr;
        add_token<kFull>(
            of, row_of(row) + key_head * args.key_dim, key_of(row), delta, next_k,
            has_next ? decay_of(row + 1) : 1.0f, out, seen
        );
        float* y = args.y + (row * args.value_heads + head) * args.value_dim + column;
        for (int u = 0; u < kVecs; ++u) store_column<kFull>(of, y, u, out[u]);
    }
}

void delta_rule(ThreadPool& pool, const DeltaRuleArgs& args) {
    const int64_t width = 2 * args.key_heads * args.key_dim + 2 * args.value_heads;
    pool.parallel_for(args.num_rows, [&](int64_t row) {
        prepare_row(args, row, args.scratch + row * width);
    });
    const int64_t blocks = ceil_div(args.value_dim, kVecs * kLanes);
    for_sequences(pool, args.rows, args.value_heads * blocks, [&](int64_t seq, int64_t part) {
        const int64_t head = part / blocks, column = part % blocks * kVecs * kLanes;
        const int64_t matrix = args.rows.slots[seq] * args.value_heads + head;
        float* state = args.states + matrix * args.key_dim * args.value_dim + column;
        Columns of{state, args.value_dim, args.key_dim, {}};
        const int64_t left = args.value_dim - column;
        for (int u = 0; u < kVecs; ++u) {
            const int64_t lanes = larger(0, left - u * kLanes);
            of.counts[u] = static_cast<int>(smaller(kLanes, lanes));
        }
        if (left >= kVecs * kLanes) {
            run_columns<true>(args, of, seq, head, column);
        } else {
            run_columns<false>(args, of, seq, head, column);
        }
    });
}

}  // namespace exl::EXL_ISA

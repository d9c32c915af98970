// Gated delta rule, token by token.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    First, keys, queries and gates of all rows, a work item per row. Then a work item is
//            one sequence, one value head and a block of the columns of its state, which are
//            independent of each other and stay in the L1 cache over all rows. If no sequence has
//            more than one row, blocks are wider, and the state is read twice and written once.
// Accuracy   fp32. The pass over the state that adds a token also decays it for the next one and
//            multiplies it with that token's key. The operations on each number are the same
//            whether the next token is in this call or in the next one.
#include "cpu/recurrent/recurrent_common.h"
#include "exl/ops/recurrent.h"

namespace exl::EXL_ISA {

constexpr float kL2Eps = 1e-6f;
// Vectors of a block of columns: 128 rows of 32 floats are 16 KiB.
constexpr int kVecs = 2;
// The same where each sequence has one row, and the state comes from memory: whole rows of 128
// columns with AVX-512.
constexpr int kOneVecs = kLanes == 16 ? 8 : 4;

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

// y[i] = exp(-decay * softplus(a[i] + bias[i])), for the rows of one head's state.
static inline void decays_of_rows(
    const float* a, const float* bias, float decay, int64_t count, float* y
) {
    for_lanes(count, [&](int64_t i, int lanes) {
        const Vec x = add(load_some(a + i, lanes), load_some(bias + i, lanes));
        store_some(y + i, exp(mul(set1(-decay), softplus_each(x))), lanes);
    });
}

static inline int64_t scratch_width(const DeltaRuleArgs& args) {
    return 2 * args.key_heads * args.key_dim + args.value_heads * (args.decays + 1);
}

// A row of scratch: queries and keys of the key heads, then decays and betas of the value heads.
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
        const float* a = args.a + row * args.a_stride + head * args.decays;
        const float* bias = args.dt_bias + head * args.decays;
        float* decays = gates + head * args.decays;
        if (args.decays == 1) {
            *decays = ::expf(-args.decay[head] * softplus(*a + *bias));
        } else {
            decays_of_rows(a, bias, args.decay[head], args.decays, decays);
        }
        gates[args.value_heads * args.decays + head] = sigmoid(args.b[row * args.b_stride + head]);
    }
}

// Columns of one head's state.
struct Columns {
    float* state;    // first row; rows are value_dim apart
    int64_t stride;  // value_dim
    int64_t rows;    // key_dim
    int64_t count;

    int lanes(int u) const {  // of vector u, 0 or less past the last column
        return static_cast<int>(smaller(kLanes, count - u * kLanes));
    }
};

template <bool kFull>
static inline Vec load_column(const Columns& of, const float* p, int u) {
    if constexpr (kFull) return load(p + u * kLanes);
    return of.lanes(u) > 0 ? load_some(p + u * kLanes, of.lanes(u)) : set1(0.0f);
}

template <bool kFull>
static inline void store_column(const Columns& of, float* p, int u, Vec v) {
    if constexpr (kFull) {
        store(p + u * kLanes, v);
    } else if (of.lanes(u) > 0) {
        store_some(p + u * kLanes, v, of.lanes(u));
    }
}

// Decays the state for the first token; seen[u] = its product with the token's key.
template <bool kFull, bool kByRow>
static inline void begin_columns(
    const Columns& of, const float* k, const float* decays, bool is_new, Vec seen[kVecs]
) {
    for (int u = 0; u < kVecs; ++u) seen[u] = set1(0.0f);
    Vec factor = set1(decays[0]);
    for (int64_t i = 0; i < of.rows; ++i) {
        float* row = of.state + i * of.stride;
        const Vec key = set1(k[i]);
        if constexpr (kByRow) factor = set1(decays[i]);
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
template <bool kFull, bool kByRow>
static inline void add_token(
    const Columns& of, const float* q, const float* k, const Vec delta[kVecs], const float* next_k,
    const float* next_decays, Vec out[kVecs], Vec seen[kVecs]
) {
    for (int u = 0; u < kVecs; ++u) out[u] = seen[u] = set1(0.0f);
    Vec factor = set1(next_k == nullptr ? 0.0f : next_decays[0]);
    for (int64_t i = 0; i < of.rows; ++i) {
        float* row = of.state + i * of.stride;
        const Vec key = set1(k[i]), query = set1(q[i]);
        const Vec next_key = next_k == nullptr ? set1(0.0f) : set1(next_k[i]);
        if (kByRow && next_k != nullptr) factor = set1(next_decays[i]);
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

// Numbers of one token for one value head.
struct Token {
    const float* q;
    const float* k;
    const float* v;
    const float* decays;  // one for all rows of the state, or one for each
    float beta;
    float* y;
};

// The tokens of a sequence for one value head; columns start at `column`.
struct Tokens {
    Tokens(const DeltaRuleArgs& of, int64_t seq, int64_t value_head, int64_t column)
        : args(of), head(value_head), first_column(column) {
        const int64_t shared = args.value_heads / args.key_heads;
        key_head = args.is_tiled ? head % args.key_heads : head / shared;
        first = args.rows.row_starts[seq];
        last = args.rows.row_starts[seq + 1];
        is_new = args.rows.past_lens[seq] == 0;
    }

    Token at(int64_t row) const {
        const int64_t size = args.key_heads * args.key_dim;
        const float* numbers = args.scratch + row * scratch_width(args);
        const float* gates = numbers + 2 * size;
        const float* q = numbers + key_head * args.key_dim;
        const int64_t column = head * args.value_dim + first_column;
        return {
            q,
            q + size,
            args.qkv + row * args.qkv_stride + 2 * size + column,
            gates + head * args.decays,
            gates[args.value_heads * args.decays + head],
            args.y + row * args.value_heads * args.value_dim + column
        };
    }

    const DeltaRuleArgs& args;
    int64_t head;
    int64_t first_column;
    int64_t key_head;
    int64_t first;  // rows
    int64_t last;
    bool is_new;
};

template <bool kFull, bool kByRow>
static inline void run_columns(const Columns& of, const Tokens& tokens) {
    Vec seen[kVecs], out[kVecs], delta[kVecs];
    Token token = tokens.at(tokens.first);
    begin_columns<kFull, kByRow>(of, token.k, token.decays, tokens.is_new, seen);
    for (int64_t row = tokens.first; row < tokens.last; ++row) {
        for (int u = 0; u < kVecs; ++u) {
            const Vec change = sub(load_column<kFull>(of, token.v, u), seen[u]);
            delta[u] = mul(set1(token.beta), change);
        }
        const bool has_next = row + 1 < tokens.last;
        const Token next = has_next ? tokens.at(row + 1) : Token{};
        add_token<kFull, kByRow>(of, token.q, token.k, delta, next.k, next.decays, out, seen);
        for (int u = 0; u < kVecs; ++u) store_column<kFull>(of, token.y, u, out[u]);
        token = next;
    }
}

// The only token of a sequence, with the operations of run_columns. Decays the state in both passes
// instead of storing it twice.
template <bool kFull, bool kByRow>
static inline void run_one_token(const Columns& of, const Tokens& tokens) {
    const Token token = tokens.at(tokens.first);
    const Vec common = set1(token.decays[0]);
    const auto decayed = [&](int64_t i, int u) __attribute__((always_inline)) {
        const float* row = of.state + i * of.stride;
        return mul(
            kByRow ? set1(token.decays[i]) : common,
            tokens.is_new ? set1(0.0f) : load_column<kFull>(of, row, u)
        );
    };
    Vec seen[kOneVecs], out[kOneVecs], delta[kOneVecs];
    for (int u = 0; u < kOneVecs; ++u) seen[u] = out[u] = set1(0.0f);
    for (int64_t i = 0; i < of.rows; ++i) {
        const Vec key = set1(token.k[i]);
        for (int u = 0; u < kOneVecs; ++u) seen[u] = fma(key, decayed(i, u), seen[u]);
    }
    for (int u = 0; u < kOneVecs; ++u) {
        const Vec change = sub(load_column<kFull>(of, token.v, u), seen[u]);
        delta[u] = mul(set1(token.beta), change);
    }
    for (int64_t i = 0; i < of.rows; ++i) {
        const Vec key = set1(token.k[i]), query = set1(token.q[i]);
        for (int u = 0; u < kOneVecs; ++u) {
            const Vec s = fma(key, delta[u], decayed(i, u));
            out[u] = fma(query, s, out[u]);
            store_column<kFull>(of, of.state + i * of.stride, u, s);
        }
    }
    for (int u = 0; u < kOneVecs; ++u) store_column<kFull>(of, token.y, u, out[u]);
}

template <bool kByRow>
static void run_block(const Columns& of, const Tokens& tokens, bool is_decode, bool is_full) {
    if (is_decode) {
        return is_full ? run_one_token<true, kByRow>(of, tokens)
                       : run_one_token<false, kByRow>(of, tokens);
    }
    is_full ? run_columns<true, kByRow>(of, tokens) : run_columns<false, kByRow>(of, tokens);
}

void delta_rule(ThreadPool& pool, const DeltaRuleArgs& args) {
    const int64_t width = scratch_width(args);
    pool.parallel_for(args.num_rows, [&](int64_t row) {
        prepare_row(args, row, args.scratch + row * width);
    });
    bool is_decode = true;
    for (int64_t seq = 0; seq < args.rows.seqs; ++seq) {
        is_decode = is_decode && args.rows.row_starts[seq + 1] - args.rows.row_starts[seq] <= 1;
    }
    const int64_t columns = (is_decode ? kOneVecs : kVecs) * kLanes;
    const int64_t blocks = ceil_div(args.value_dim, columns);
    for_sequences(pool, args.rows, args.value_heads * blocks, [&](int64_t seq, int64_t part) {
        const int64_t head = part / blocks, column = part % blocks * columns;
        const int64_t matrix = args.rows.slots[seq] * args.value_heads + head;
        float* state = args.states + matrix * args.key_dim * args.value_dim + column;
        const Columns of{state, args.value_dim, args.key_dim, args.value_dim - column};
        const Tokens tokens(args, seq, head, column);
        const bool is_full = of.count >= columns;
        args.decays == 1 ? run_block<false>(of, tokens, is_decode, is_full)
                         : run_block<true>(of, tokens, is_decode, is_full);
    });
}

}  // namespace exl::EXL_ISA

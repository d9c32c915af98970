// Gated delta rule: token by token, and with AVX2 a call's whole chunks of tokens at once.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    In slices of the rows: first keys, queries and gates, a work item per chunk. Then a
//            work item is one sequence, one value head and a strip of the columns of its state,
//            which are independent of each other and stay in the L1 cache over all rows. If no
//            sequence has more than one row, strips are wider, and the state is read twice and
//            written once.
// Chunks     delta_chunks.h. With AVX-512 and in the batch-invariant mode there are none.
// Accuracy   fp32. Token by token, the pass over the state that adds a token also decays it for the
//            next one and multiplies it with that token's key. The operations on each number are
//            the same whether the next token is in this call or in the next one.
#include "cpu/recurrent/delta_chunks.h"
#include "cpu/recurrent/recurrent_common.h"

namespace exl::EXL_ISA {

constexpr float kL2Eps = 1e-6f;
// Vectors of a strip where each sequence has one row, and the state comes from memory: whole rows of
// 128 columns with AVX-512.
constexpr int kOneVecs = kLanes == 16 ? 8 : 4;
// Rows from which on a strip is copied to memory of its own, and back. The copies take the time of
// one or two rows, and each row then takes 0.75 times as long.
constexpr int64_t kCopyRows = 8;
// With AVX-512, chunks take 0.93 to 1.03 of the time of single tokens (docs/experiments/cpu.md),
// whose bits do not depend on the division of a sequence into calls. With AVX2 they take 0.83 to
// 0.93 of it.
constexpr bool kHasChunks = kLanes < 16;
constexpr int kStripSlot = 0;  // thread_scratch
constexpr int kRowsSlot = 1;

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
    return delta_scratch_width(args.key_heads, args.value_heads, args.key_dim, args.decays);
}

static inline bool in_chunks(const DeltaRuleArgs& args) {
    return kHasChunks && !args.is_batch_invariant;
}

static inline float* scratch_of(const DeltaRuleArgs& args, Slice slice, int64_t row) {
    return args.scratch + slice.scratch_row(row) * scratch_width(args);
}

// Decays of the rows of the state of one value head: one number, or key_dim.
static inline void set_row_decays(const DeltaRuleArgs& args, int64_t row, int64_t head, float* to) {
    const float* a = args.a + row * args.a_stride + head * args.decays;
    const float* bias = args.dt_bias + head * args.decays;
    if (args.decays == 1) {
        *to = ::expf(-args.decay[head] * softplus(*a + *bias));
    } else {
        decays_of_rows(a, bias, args.decay[head], args.decays, to);
    }
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
        set_row_decays(args, row, head, gates + head * args.decays);
        gates[args.value_heads * args.decays + head] = sigmoid(args.b[row * args.b_stride + head]);
    }
}

// Key head of a value head.
static inline int64_t key_head_of(const DeltaRuleArgs& args, int64_t head) {
    const int64_t shared = args.value_heads / args.key_heads;
    return args.is_tiled ? head % args.key_heads : head / shared;
}

// The rows of a chunk from `first` on, packed in scratch.
static void prepare_chunk(const DeltaRuleArgs& args, int64_t first, float* chunk) {
    const DeltaPack pack(args);
    const int64_t depth = args.key_dim, size = kChunk * depth;
    const float scale = 1.0f / std::sqrt(static_cast<float>(depth));
    auto* rows = static_cast<float*>(thread_scratch(kRowsSlot, 4 * size * 4));
    for (int64_t head = 0; head < pack.heads; ++head) {
        const int64_t key_head = pack.is_by_row ? key_head_of(args, head) : head;
        for (int t = 0; t < kChunk; ++t) {
            const float* q = args.qkv + (first + t) * args.qkv_stride + key_head * depth;
            for (int64_t i = depth; i < 2 * depth; i += 16) {  // of the next head
                prefetch(q + i);
                prefetch(q + args.key_heads * depth + i);
            }
            normalize(q + args.key_heads * depth, depth, 1.0f, rows + t * depth);
            normalize(q, depth, scale, rows + size + t * depth);
            if (pack.is_by_row) {
                set_row_decays(args, first + t, head, rows + 2 * size + t * depth);
            }
        }
        if (pack.is_by_row) {
            pack_by_row(pack, rows, pack.head(chunk, head));
        } else {
            float* to = pack.head(chunk, head);
            float* queries = pack.queries(to);
            float* products = pack.products(to);
            transpose_chunk(rows, depth, depth, to);
            transpose_chunk(rows + size, depth, depth, queries);
            multiply_keys(to, to, depth, products);
            multiply_keys(queries, to, depth, products + kChunk * kChunk);
        }
    }
    for (int64_t head = 0; head < args.value_heads; ++head) {
        for (int t = 0; t < kChunk; ++t) {
            const float b = args.b[(first + t) * args.b_stride + head];
            pack.betas(chunk, head)[t] = sigmoid(b);
            if (pack.is_by_row) continue;
            set_row_decays(args, first + t, head, pack.decays(chunk, head) + t);
        }
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
    Tokens(
        const DeltaRuleArgs& of, Slice part, Range rows, int64_t value_head, int64_t column,
        bool has_no_state
    )
        : args(of),
          slice(part),
          head(value_head),
          first_column(column),
          key_head(key_head_of(of, value_head)),
          first(rows.first),
          last(rows.last),
          is_new(has_no_state) {}

    Token at(int64_t row) const {
        const int64_t size = args.key_heads * args.key_dim;
        const float* numbers = scratch_of(args, slice, row);
        const float* gates = numbers + 2 * size;
        const float* q = numbers + key_head * args.key_dim;
        return {
            q,
            q + size,
            values(row),
            gates + head * args.decays,
            gates[args.value_heads * args.decays + head],
            args.y + row * args.value_heads * args.value_dim + column()
        };
    }
    // Rows are too far apart for the processor to predict.
    void prefetch_row(int64_t row) const {
        const Token token = at(row);
        for (int u = 0; u < kStrip; u += 16) {
            prefetch(token.v + u);
            prefetch(token.y + u);
        }
        for (int64_t i = 0; i < args.key_dim; i += 16) {
            prefetch(token.k + i);
            prefetch(token.q + i);
        }
    }
    int64_t column() const { return head * args.value_dim + first_column; }
    const float* values(int64_t row) const {
        const int64_t size = args.key_heads * args.key_dim;
        return args.qkv + row * args.qkv_stride + 2 * size + column();
    }

    const DeltaRuleArgs& args;
    Slice slice;
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
        if (row + 2 < tokens.last) tokens.prefetch_row(row + 2);
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

// Copies a strip of a state [depth][stride] to memory of its own, or zeros if it is new.
static inline void load_strip(const Strip& to, const float* state, int64_t stride, bool is_new) {
    for (int64_t k = 0; k < to.depth; ++k) {
        for (int u = 0; u < kVecs; ++u) {
            const Vec s = is_new ? set1(0.0f) : to.load_columns(state + k * stride, u);
            store(to.state + k * kStrip + u * kLanes, s);
        }
    }
}

static inline void store_strip(const Strip& strip, float* state, int64_t stride) {
    for (int64_t k = 0; k < strip.depth; ++k) {
        for (int u = 0; u < kVecs; ++u) {
            const Vec s = load(strip.state + k * kStrip + u * kLanes);
            strip.store_columns(state + k * stride, u, s);
        }
    }
}

// Whole chunks of a sequence at once, then the other rows, for a strip of one value head's state.
template <bool kByRow>
static void run_strip(const Columns& of, Tokens tokens) {
    const DeltaRuleArgs& args = tokens.args;
    const int64_t bytes = Strip::floats(of.rows) * 4;
    const Strip strip(static_cast<float*>(thread_scratch(kStripSlot, bytes)), of.rows, of.count);
    load_strip(strip, of.state, of.stride, tokens.is_new);
    tokens.is_new = false;
    const DeltaPack pack(args);
    const int64_t packed_head = kByRow ? tokens.head : tokens.key_head;
    const int64_t width = args.value_heads * args.value_dim;
    for (; in_chunks(args) && tokens.first + kChunk <= tokens.last; tokens.first += kChunk) {
        const int64_t row = tokens.first;
        const DeltaRows rows{
            tokens.values(row), args.qkv_stride, args.y + row * width + tokens.column(), width
        };
        const bool has_next = row + 2 * kChunk <= tokens.last;
        if (has_next) {
            prefetch_rows(rows.v + kChunk * args.qkv_stride, args.qkv_stride);
            prefetch_rows(rows.y + kChunk * width, width);
        }
        float* chunk = scratch_of(args, tokens.slice, row);
        float* ahead = has_next ? scratch_of(args, tokens.slice, row + kChunk) : chunk;
        run_delta_chunk<kByRow>(pack, chunk, ahead, packed_head, tokens.head, strip, rows);
    }
    const Columns held{strip.state, kStrip, of.rows, of.count};
    if (tokens.first < tokens.last) {
        of.count >= kStrip ? run_columns<true, kByRow>(held, tokens)
                           : run_columns<false, kByRow>(held, tokens);
    }
    store_strip(strip, of.state, of.stride);
}

// Keys, queries and gates of a slice. The rows of a chunk are packed, others stand by themselves.
static void prepare(ThreadPool& pool, const DeltaRuleArgs& args, Slice slice, int64_t most_rows) {
    const int64_t blocks = ceil_div(smaller(most_rows, slice.count), kChunk);
    for_parts(pool, args.rows, slice, blocks, [&](int64_t, int64_t block, Range rows) {
        const int64_t first = rows.first + block * kChunk;
        const int64_t last = smaller(rows.last, first + kChunk);
        if (in_chunks(args) && last - first == kChunk) {
            return prepare_chunk(args, first, scratch_of(args, slice, first));
        }
        for (int64_t row = first; row < last; ++row) {
            prepare_row(args, row, scratch_of(args, slice, row));
        }
    });
}

void delta_rule(ThreadPool& pool, const DeltaRuleArgs& args) {
    const int64_t most_rows = most_rows_of(args.rows);
    const bool is_decode = most_rows <= 1, is_by_row = args.decays != 1;
    const int64_t columns = (is_decode ? kOneVecs : kVecs) * kLanes;
    const int64_t blocks = ceil_div(args.value_dim, columns), parts = args.value_heads * blocks;
    for_slices(pool, most_rows, kChunk, [&](Slice slice) {
        prepare(pool, args, slice, most_rows);
        for_parts(pool, args.rows, slice, parts, [&](int64_t seq, int64_t part, Range rows) {
            const int64_t head = part / blocks, column = part % blocks * columns;
            const int64_t matrix = args.rows.slots[seq] * args.value_heads + head;
            float* state = args.states + matrix * args.key_dim * args.value_dim + column;
            const Columns of{state, args.value_dim, args.key_dim, args.value_dim - column};
            const bool is_new = slice.from == 0 && args.rows.past_lens[seq] == 0;
            const Tokens tokens(args, slice, rows, head, column, is_new);
            if (rows.count() >= kCopyRows) {
                return is_by_row ? run_strip<true>(of, tokens) : run_strip<false>(of, tokens);
            }
            const bool is_full = of.count >= columns;
            is_by_row ? run_block<true>(of, tokens, is_decode, is_full)
                      : run_block<false>(of, tokens, is_decode, is_full);
        });
    });
}

}  // namespace exl::EXL_ISA

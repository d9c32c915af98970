// Decode attention: dot products of up to 16 query vectors per kv head with the cache rows in
// place.
//
// Every key and value is loaded and converted once for all query heads of its kv head. Four keys
// are scored together, so that one shuffle tree reduces four sums. attention_prefill.h adds up the
// terms of a score in the same order.
#pragma once

#include "cpu/attention/attention_common.h"

namespace exl::EXL_ISA {

// Query vectors per pass over the keys: the sums of 4 keys x 4 vectors take half of AVX-512's
// registers.
constexpr int kPassVectors = kLanes == 16 ? 4 : 2;
// SIMD vectors of value columns per pass over the values.
constexpr int kValueVecs = 4;

// Computes scores[v][0..4) of V query vectors and 4 keys. Keys past `count` repeat the last one.
template <int V, class T>
static inline void score_keys(
    const float* queries, const T* keys, int64_t count, int64_t d, float* scores
) {
    const T* key[4];
    for (int j = 0; j < 4; ++j) key[j] = keys + smaller(j, count - 1) * d;
    Vec sums[V][4];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[v][j] = set1(0.0f);
    }
    const auto step = [&](int64_t i, auto load_at) __attribute__((always_inline)) {
        Vec k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) k[j] = load_at(key[j] + i);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Vec q = load_at(queries + v * d + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sums[v][j] = fma(q, k[j], sums[v][j]);
        }
    };
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) step(i, [](auto* p) { return load(p); });
    if (i < d) {
        const int rest = static_cast<int>(d - i);
        step(i, [rest](auto* p) { return load_n(p, rest); });
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum4(sums[v], scores + v * kKeyBlock);
}

// values[v][c] = values[v][c] * factor[v] + sum_j weights[v][j] * rows[j][c], for N SIMD vectors of
// columns. Calls at_row(j) before it reads row j.
template <int V, int N, class T, class AtRow>
static inline __attribute__((always_inline)) void add_values(
    const float* weights, const float* factors, const T* rows, int64_t count, int64_t d,
    float* values, int64_t width, AtRow&& at_row
) {
    Vec sums[V][N];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) {
            sums[v][c] = mul(load(values + v * width + c * kLanes), set1(factors[v]));
        }
    }
    for (int64_t j = 0; j < count; ++j) {
        at_row(j);
        Vec row[N];
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) row[c] = load(rows + j * d + c * kLanes);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Vec weight = set1(weights[v * kKeyBlock + j]);
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) sums[v][c] = fma(weight, row[c], sums[v][c]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) store(values + v * width + c * kLanes, sums[v][c]);
    }
}

// add_values for the `rest` columns past the last whole SIMD vector.
template <class T>
static inline void add_value_tail(
    int vectors, const float* weights, const float* factors, const T* rows, int64_t count,
    int64_t d, int rest, float* values, int64_t width
) {
    for (int v = 0; v < vectors; ++v) {
        Vec sum = mul(load(values + v * width), set1(factors[v]));
        for (int64_t j = 0; j < count; ++j) {
            sum = fma(set1(weights[v * kKeyBlock + j]), load_n(rows + j * d, rest), sum);
        }
        store(values + v * width, sum);
    }
}

// add_values for all d columns. Only the first pass over the rows calls at_row.
template <int V, class T, class AtRow>
static inline __attribute__((always_inline)) void add_all_values(
    const float* weights, const float* factors, const T* rows, int64_t count, int64_t d,
    float* values, int64_t width, AtRow&& at_row
) {
    const auto nothing = [](int64_t) {};
    int64_t c = 0;
    for (; c + kValueVecs * kLanes <= d; c += kValueVecs * kLanes) {
        if (c == 0) {
            add_values<V, kValueVecs>(weights, factors, rows, count, d, values, width, at_row);
        } else {
            add_values<V, kValueVecs>(
                weights, factors, rows + c, count, d, values + c, width, nothing
            );
        }
    }
    for (; c + kLanes <= d; c += kLanes) {
        add_values<V, 1>(weights, factors, rows + c, count, d, values + c, width, nothing);
    }
    if (c < d) {
        add_value_tail(
            V, weights, factors, rows + c, count, d, static_cast<int>(d - c), values + c, width
        );
    }
}

template <int V, class Fn>
static inline void with_vectors(int64_t vectors, Fn&& fn) {
    if constexpr (V > 1) {
        if (vectors < V) return with_vectors<V - 1>(vectors, fn);
    }
    fn.template operator()<V>();
}

// Four keys are scored together, so up to three scores are written past the last one.
constexpr int64_t kSpareScores = 4;

static inline int64_t decode_scratch_floats(int64_t vectors, int64_t d, bool is_packed) {
    return ceil_div(vectors * (padded(d) + kKeyBlock + 1) + kSpareScores, 16) * 16 + 64 +
           (is_packed ? kKeyBlock * d : 0);
}

// Contiguous cache rows that this thread is likely to read in its next work item. They have not
// been touched since the previous forward pass, so prefetching them pays.
template <class T>
struct NextRows {
    using Cell = typename Stored<T>::Cell;

    struct Part {
        const Cell* rows;
        int64_t row_size;
    };
    Part keys;
    Part values;
    int64_t count;

    // Prefetches rows [first, first + amount) of `part`. Always inlined for the same reason as
    // `prefetch` (vec_avx2.h).
    inline __attribute__((always_inline)) void prefetch_rows(
        const Part& part, int64_t first, int64_t amount
    ) const {
        const int64_t end = smaller(first + amount, count) * part.row_size;
        for (int64_t i = first * part.row_size; i < end;
             i += 64 / static_cast<int64_t>(sizeof(Cell))) {
            prefetch_l2(part.rows + i);  // L2: a work item reads up to 64 KiB, more than L1 holds
        }
    }
};

// Accumulates the keys and values of a work item, for one kv head, into `run`. Prefetches the rows
// of `next` one by one, as it reads its own: prefetched all at once, they would delay its own reads.
template <class T>
static void attend_decode(
    const AttentionArgs& args, const Work& work, int64_t kv_head, float* scratch,
    const Running& run, const NextRows<T>& next
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t vectors = work.rows * group;
    const int64_t width = padded(args.d);
    float* scores = scratch;
    float* queries = scores + vectors * kKeyBlock + kSpareScores;
    float* factors = queries + vectors * width;
    // Unpacked rows of a key block. Starts on a cache line; the other parts need not.
    float* unpacked = scores + ceil_div(factors + vectors - scores, 16) * 16;
    load_queries(args, work, kv_head, queries);
    const PagedRows<T> keys = paged_keys<T>(args, work, kv_head);
    const PagedRows<T> values = paged_values<T>(args, work, kv_head);
    using Cell = typename Stored<T>::Cell;
    using Value = typename Stored<T>::Value;

    // Scores of the keys from position `begin` on, which are contiguous in the cache.
    const auto score = [&](const Cell* cells, int64_t begin, int64_t count) {
        const int64_t done = begin - work.key_begin;
        const Value* key_rows = keys.read(cells, count, unpacked);
        for (int64_t first = 0; first < vectors; first += kPassVectors) {
            float* to = scores + first * kKeyBlock + begin % kKeyBlock;
            with_vectors<kPassVectors>(vectors - first, [&]<int V>() {
                for (int64_t j = 0; j < count; j += 4) {
                    if (first == 0) next.prefetch_rows(next.keys, done + j, 4);
                    score_keys<V>(
                        queries + first * args.d, key_rows + j * args.d, count - j, args.d, to + j
                    );
                }
            });
        }
    };
    // Adds the same keys' values.
    const auto add_run = [&](const Cell* cells, int64_t begin, int64_t count) {
        const int64_t done = begin - work.key_begin;
        const Value* value_rows = values.read(cells, count, unpacked);
        for (int64_t first = 0; first < vectors; first += kPassVectors) {
            const float* weights = scores + first * kKeyBlock + begin % kKeyBlock;
            with_vectors<kPassVectors>(vectors - first, [&]<int V>() {
                add_all_values<V>(
                    weights, factors + first, value_rows, count, args.d, run.values + first * width,
                    width, [&](int64_t j) {
                        if (first == 0) next.prefetch_rows(next.values, done + j, 1);
                    }
                );
            });
        }
    };
    int64_t end = 0;
    for (int64_t begin = work.key_begin; begin < work.key_end; begin = end) {
        const int64_t border = begin / kKeyBlock * kKeyBlock;
        end = smaller(border + kKeyBlock, work.key_end);
        keys.for_runs(begin, end, score);
        for (int64_t i = 0; i < vectors; ++i) {
            const Visible seen =
                visible(work.position + i / group, args.window, border, end - border);
            factors[i] = softmax_step(
                scores + i * kKeyBlock, ceil_div(end - border, kPanel) * kPanel, seen, args.softcap,
                run.peak[i], run.weight[i]
            );
        }
        values.for_runs(begin, end, [&](const Cell* cells, int64_t at, int64_t count) {
            add_run(cells, at, count);
            for (int64_t i = 0; i < vectors; ++i) factors[i] = 1.0f;  // rescaled once per block
        });
    }
}

}  // namespace exl::EXL_ISA

// Gated delta rule in chunks of kChunk tokens (Yang et al., "Gated Delta Networks", 2024).
//
// With the state S before a chunk, and A[i][j] = beta[i] (k[i] k[j]) (decay from token j to i), j < i:
//
//   (1 + A) delta = diag(beta) (v - diag(grown) K S)     unit lower triangular, substituted forward
//
// The rest is in chunks.h. With a decay per row of the state, keys and queries are packed with the
// decays from before the chunk, and the keys of the update with those to its end.
#pragma once

#include "cpu/recurrent/chunks.h"

namespace exl::EXL_ISA {

// Packed numbers of a chunk: those of each head that has keys of its own, then the gates.
struct DeltaPack {
    explicit DeltaPack(const DeltaRuleArgs& args)
        : depth(args.key_dim),
          is_by_row(args.decays != 1),
          heads(is_by_row ? args.value_heads : args.key_heads),
          value_heads(args.value_heads),
          head_floats(delta_pack_floats(args.key_dim, is_by_row)) {}

    float* head(float* chunk, int64_t index) const { return chunk + index * head_floats; }
    float* betas(float* chunk, int64_t value_head) const {
        return head(chunk, heads) + value_head * kChunk;
    }
    float* decays(float* chunk, int64_t value_head) const {  // one per token
        return head(chunk, heads) + (value_heads + value_head) * kChunk;
    }

    // Within a head: keys and queries [depth][kChunk], their products with keys, and by row of the
    // state the keys with the decay to the end of the chunk [depth][kChunk], and the decay of the
    // state [depth].
    float* queries(float* head) const { return head + depth * kChunk; }
    float* products(float* head) const { return head + 2 * depth * kChunk; }
    float* left(float* head) const { return products(head) + kProducts; }
    float* kept(float* head) const { return left(head) + depth * kChunk; }

    int64_t depth;
    bool is_by_row;
    int64_t heads;
    int64_t value_heads;
    int64_t head_floats;
};

// Decays four keys of earlier tokens by those of a token, and multiplies them with its key and query.
static inline void multiply_decayed(
    const float* key, const float* query, const float* decays, float* decayed, int64_t depth,
    float* key_products, float* query_products
) {
    Vec by_key[4], by_query[4];
    for (int r = 0; r < 4; ++r) by_key[r] = by_query[r] = set1(0.0f);
    for_lanes(depth, [&](int64_t i, int lanes) {
        const Vec d = load_some(decays + i, lanes);
        const Vec k = load_some(key + i, lanes), q = load_some(query + i, lanes);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            float* p = decayed + r * depth + i;
            const Vec x = mul(d, load_some(p, lanes));
            store_some(p, x, lanes);
            by_key[r] = fma(k, x, by_key[r]);
            by_query[r] = fma(q, x, by_query[r]);
        }
    });
    sum4(by_key, key_products);
    sum4(by_query, query_products);
}

// Products of keys and queries [kChunk][depth] with the earlier keys, whose decays differ by row of
// the state. `decayed` [kChunk][depth] is overwritten. Products with later tokens are undefined.
static inline void multiply_by_row(
    const float* keys, const float* queries, const float* decays, int64_t depth, float* decayed,
    float* products
) {
    float* query_products = products + kChunk * kChunk;
    for (int64_t i = 0; i < kChunk * depth; ++i) decayed[i] = keys[i];
    for (int i = 0; i < kChunk; ++i) {
        const float* key = keys + i * depth;
        const float* query = queries + i * depth;
        for (int j = 0; j < i; j += 4) {
            multiply_decayed(
                key, query, decays + i * depth, decayed + j * depth, depth,
                products + i * kChunk + j, query_products + i * kChunk + j
            );
        }
        Vec own = set1(0.0f);
        for_lanes(depth, [&](int64_t k, int lanes) {
            const Vec x = load_some(key + k, lanes);
            store_some(decayed + i * depth + k, x, lanes);  // a group of four may have decayed it
            own = fma(load_some(query + k, lanes), x, own);
        });
        query_products[i * kChunk + i] = sum(own);
    }
}

// Packs a chunk of one value head whose decays differ by row of the state. rows: keys, queries,
// decays, then memory of the same size for decayed keys, [kChunk][depth] each.
static inline void pack_by_row(const DeltaPack& pack, float* rows, float* head) {
    const int64_t size = kChunk * pack.depth;
    float* keys = rows;
    float* queries = rows + size;
    const float* decays = rows + 2 * size;
    float* decayed = rows + 3 * size;
    multiply_by_row(keys, queries, decays, pack.depth, decayed, pack.products(head));
    for_lanes(pack.depth, [&](int64_t k, int lanes) {
        Vec left = set1(1.0f);
        for (int t = kChunk - 1; t >= 0; --t) {
            const int64_t at = t * pack.depth + k;
            store_some(decayed + at, mul(left, load_some(keys + at, lanes)), lanes);
            left = mul(left, load_some(decays + at, lanes));
        }
        store_some(pack.kept(head) + k, left, lanes);
        Vec grown = set1(1.0f);
        for (int t = 0; t < kChunk; ++t) {
            const int64_t at = t * pack.depth + k;
            grown = mul(grown, load_some(decays + at, lanes));
            store_some(keys + at, mul(grown, load_some(keys + at, lanes)), lanes);
            store_some(queries + at, mul(grown, load_some(queries + at, lanes)), lanes);
        }
    });
    transpose_chunk(keys, pack.depth, pack.depth, head);
    transpose_chunk(queries, pack.depth, pack.depth, pack.queries(head));
    transpose_chunk(decayed, pack.depth, pack.depth, pack.left(head));
}

// inner[i][j] of a chunk whose products contain the decays.
static inline void set_products(const float* products, const float* betas, ChunkDecays& to) {
    for (int i = 0; i < kChunk; ++i) {
        for (int v = 0; v < kChunk; v += kLanes) {
            const float* row = products + i * kChunk + v;
            store(to.inner[i] + v, mul(set1(betas[i]), load(row)));
            store(to.outer[i] + v, load(row + kChunk * kChunk));
        }
    }
}

// Values and outputs of a chunk at the first column of a strip.
struct DeltaRows {
    const float* v;
    int64_t v_stride;
    float* y;
    int64_t y_stride;
};

// delta[i] = beta[i] (v[i] - grown[i] S^T k[i]). Without `grown`, the keys are decayed already.
// Prefetches the keys of the next chunk.
static inline void begin_deltas(
    const Strip& strip, const float* keys, const float* grown, const float* betas,
    const DeltaRows& rows, const float* ahead
) {
    for (int first = 0; first < kChunk; first += kTile) {
        TileSums sums;
        multiply_strip(strip, keys + first, ahead + first * strip.depth, sums);
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
            const int i = first + r;
            const Vec by = set1(grown == nullptr ? 1.0f : grown[i]), beta = set1(betas[i]);
#pragma GCC unroll 2
            for (int u = 0; u < kVecs; ++u) {
                const Vec value = strip.load_columns(rows.v + i * rows.v_stride, u);
                store(
                    strip.delta + i * kStrip + u * kLanes, mul(beta, fnma(by, sums[r][u], value))
                );
            }
        }
    }
}

// Solves (1 + inner) delta = delta in place. A tile of solved rows is subtracted from all later
// ones at once.
static inline void solve_deltas(const Strip& strip, const float (&inner)[kChunk][kChunk]) {
    for (int u = 0; u < kVecs; ++u) {
        float* delta = strip.delta + u * kLanes;
        for (int first = 0; first < kChunk; first += kTile) {
            Vec own[kTile];
#pragma GCC unroll 8
            for (int r = 0; r < kTile; ++r) own[r] = load(delta + (first + r) * kStrip);
            for (int j = 0; j < first; ++j) {
                const Vec d = load(delta + j * kStrip);
#pragma GCC unroll 8
                for (int r = 0; r < kTile; ++r) own[r] = fnma(set1(inner[first + r][j]), d, own[r]);
            }
#pragma GCC unroll 8
            for (int j = 0; j < kTile; ++j) {
#pragma GCC unroll 8
                for (int r = j + 1; r < kTile; ++r) {
                    own[r] = fnma(set1(inner[first + r][first + j]), own[j], own[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < kTile; ++r) store(delta + (first + r) * kStrip, own[r]);
        }
    }
}

static inline void store_rows(const Strip& strip, const DeltaRows& rows) {
    for (int i = 0; i < kChunk; ++i) {
        for (int u = 0; u < kVecs; ++u) {
            const Vec y = load(strip.out + i * kStrip + u * kLanes);
            strip.store_columns(rows.y + i * rows.y_stride, u, y);
        }
    }
}

// Adds a chunk to a strip of the state of one value head. `ahead` is the next chunk, or this one.
template <bool kByRow>
static inline void run_delta_chunk(
    const DeltaPack& pack, float* chunk, float* ahead, int64_t packed_head, int64_t value_head,
    const Strip& strip, const DeltaRows& rows
) {
    float* head = pack.head(chunk, packed_head);
    float* next = pack.head(ahead, packed_head);
    const float* products = pack.products(head);
    const float* betas = pack.betas(chunk, value_head);
    ChunkDecays decays;
    if constexpr (kByRow) {
        set_products(products, betas, decays);
    } else {
        const float* by_token = pack.decays(chunk, value_head);
        set_decays(products, products + kChunk * kChunk, by_token, betas, decays);
    }
    for (int64_t i = 0; i < kProducts; i += 16) prefetch_l2(pack.products(next) + i);
    const float* grown = kByRow ? nullptr : decays.grown;
    begin_deltas(strip, head, grown, betas, rows, next);
    solve_deltas(strip, decays.inner);
    query_strip(strip, pack.queries(head), grown, pack.queries(next));
    add_own_tokens(strip, decays.outer);
    store_rows(strip, rows);
    if constexpr (kByRow) {
        update_strip<true>(strip, pack.left(head), pack.kept(head));
    } else {
        decay_deltas(strip, decays.left);
        update_strip<false>(strip, head, &decays.grown[kChunk - 1]);
    }
}

}  // namespace exl::EXL_ISA

// Matrix products of the chunked form, shared by the delta rule and the state scan.
//
//   out[i]  = grown[i] S^T q[i] + sum over j <= i of outer[i][j] delta[j]
//   S       = kept S + sum over j of k[j] (left[j] delta[j])^T
//
// A chunk is kChunk tokens. S [depth, columns] is a strip of the columns of one head's state, in
// memory of its own: rows of a whole state are a power of two apart and fall into few sets of the
// L1 cache. Keys and queries are packed by row of the state: [depth][kChunk] keys, then as many
// queries.
//
// Decays between tokens are running products of the decays of single tokens, each at most 1. They
// underflow to 0 and never overflow, and no difference of large logarithms cancels.
#pragma once

#include "cpu/common/vec.h"
#include "exl/ops/recurrent.h"

namespace exl::EXL_ISA {

constexpr int kChunk = static_cast<int>(kRecurrentChunk);
// Vectors of a strip: 128 rows of 32 floats are 16 KiB, half of the smallest L1 cache.
constexpr int kVecs = 2;
constexpr int kStrip = kVecs * kLanes;
// Rows of a register tile. Its 8 or 16 sums hide the latency of multiply-adds.
constexpr int kTile = kLanes == 16 ? 8 : 4;
constexpr int kChunkVecs = kChunk / kLanes;
constexpr int64_t kProducts = int64_t{2} * kChunk * kChunk;

// Decays within a chunk, of one head.
struct ChunkDecays {
    alignas(64) float inner[kChunk][kChunk];  // of the delta rule; j < i
    alignas(64) float outer[kChunk][kChunk];  // j <= i
    float grown[kChunk];                      // from before the chunk to token i
    float left[kChunk];                       // from token j to the end of the chunk
};

// Strip of a state and of the numbers of a chunk.
struct Strip {
    float* state;  // [depth][kStrip]
    float* delta;  // [kChunk][kStrip]
    float* out;    // [kChunk][kStrip]
    int64_t depth;
    int64_t columns;  // valid ones

    static int64_t floats(int64_t depth) { return (padded(depth) + 2 * kChunk) * kStrip; }
    static int64_t padded(int64_t depth) { return ceil_div(depth, kLanes) * kLanes; }

    Strip(float* memory, int64_t state_depth, int64_t count)
        : state(memory),
          delta(memory + padded(state_depth) * kStrip),
          out(delta + kChunk * kStrip),
          depth(state_depth),
          columns(count) {}

    int lanes(int u) const {  // of vector u, 0 or less past the last column
        return static_cast<int>(smaller(kLanes, columns - u * kLanes));
    }
    Vec load_columns(const float* p, int u) const {
        const int count = lanes(u);
        return count > 0 ? load_some(p + u * kLanes, count) : set1(0.0f);
    }
    void store_columns(float* p, int u, Vec v) const {
        if (lanes(u) > 0) store_some(p + u * kLanes, v, lanes(u));
    }
};

// to[k * kChunk + t] = x[t * stride + k] for kChunk rows t.
static inline void transpose_chunk(const float* x, int64_t stride, int64_t depth, float* to) {
    for (int64_t k = 0; k < depth; k += kLanes) {
        const int count = static_cast<int>(smaller(kLanes, depth - k));
        for (int t = 0; t < kChunk; t += kLanes) {
            Vec rows[kLanes];
            for (int r = 0; r < kLanes; ++r) rows[r] = load_some(x + (t + r) * stride + k, count);
            if (count == kLanes) {
                transpose_block(rows, to + k * kChunk + t, kChunk);
                continue;
            }
            float block[kLanes * kLanes];
            transpose_block(rows, block, kLanes);
            for (int r = 0; r < count; ++r) {
                store(to + (k + r) * kChunk + t, load(block + r * kLanes));
            }
        }
    }
}

// products[i][j] = x[i] times key j, packed both. Ignores decays.
static inline void multiply_keys(
    const float* x, const float* keys, int64_t depth, float* products
) {
    for (int first = 0; first < kChunk; first += kTile) {
        Vec sums[kTile][kChunkVecs];
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < kChunkVecs; ++v) sums[r][v] = set1(0.0f);
        }
        for (int64_t k = 0; k < depth; ++k) {
            Vec columns[kChunkVecs];
#pragma GCC unroll 16
            for (int v = 0; v < kChunkVecs; ++v) columns[v] = load(keys + k * kChunk + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < kTile; ++r) {
                const Vec factor = set1(x[k * kChunk + first + r]);
#pragma GCC unroll 16
                for (int v = 0; v < kChunkVecs; ++v) {
                    sums[r][v] = fma(factor, columns[v], sums[r][v]);
                }
            }
        }
        for (int r = 0; r < kTile; ++r) {
            for (int v = 0; v < kChunkVecs; ++v) {
                store(products + (first + r) * kChunk + v * kLanes, sums[r][v]);
            }
        }
    }
}

// Applies the decays of the tokens, one per token, to the products of a chunk: those of keys, whose
// rows are also multiplied by `factors`, and those of queries. `of_keys` may be null.
static inline void set_decays(
    const float* of_keys, const float* of_queries, const float* decays, const float* factors,
    ChunkDecays& to
) {
    // unit[kChunk - i + j] is 1 for j = i, else 0.
    static constexpr float unit[2 * kChunk + 1] = {0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                   0, 0, 0, 0, 0, 0, 0, 1};
    float grown = 1.0f;
    for (int i = 0; i < kChunk; ++i) to.grown[i] = grown *= decays[i];
    for (int v = 0; v < kChunk; v += kLanes) {
        Vec between = set1(0.0f);  // from tokens j = v to v + kLanes - 1 to token i
        for (int i = 0; i < kChunk; ++i) {
            between = fma(set1(decays[i]), between, load(unit + kChunk - i + v));
            store(to.outer[i] + v, mul(between, load(of_queries + i * kChunk + v)));
            if (of_keys == nullptr) continue;
            const Vec product = mul(between, load(of_keys + i * kChunk + v));
            store(to.inner[i] + v, mul(set1(factors[i]), product));
        }
        store(to.left + v, between);
    }
}

// Prefetches kChunk rows of a strip's columns. They are too far apart for the processor to predict.
static inline void prefetch_rows(const float* p, int64_t stride) {
    for (int i = 0; i < kChunk; ++i) {
        for (int u = 0; u < kStrip; u += 16) prefetch(p + i * stride + u);
    }
}

using TileSums = Vec[kTile][kVecs];

// sums[r] = packed column r times the strip. Prefetches as many numbers as it uses, from `ahead` on.
static inline __attribute__((always_inline)) void multiply_strip(
    const Strip& strip, const float* pack, const float* ahead, TileSums& sums
) {
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) sums[r][0] = sums[r][1] = set1(0.0f);
    const float* state = strip.state;
    for (int64_t k = 0; k < strip.depth; ++k, pack += kChunk, state += kStrip) {
        const Vec s0 = load(state), s1 = load(state + kLanes);
        prefetch_l2(ahead + k * kTile);
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
            const Vec x = set1(pack[r]);
            sums[r][0] = fma(x, s0, sums[r][0]);
            sums[r][1] = fma(x, s1, sums[r][1]);
        }
    }
}

// out[i] = grown[i] S^T q[i]. Without `grown`, the queries are decayed already. Prefetches the
// queries of the next chunk.
static inline void query_strip(
    const Strip& strip, const float* queries, const float* grown, const float* ahead
) {
    for (int first = 0; first < kChunk; first += kTile) {
        TileSums sums;
        multiply_strip(strip, queries + first, ahead + first * strip.depth, sums);
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
            const Vec by = set1(grown == nullptr ? 1.0f : grown[first + r]);
#pragma GCC unroll 2
            for (int u = 0; u < kVecs; ++u) {
                store(strip.out + (first + r) * kStrip + u * kLanes, mul(by, sums[r][u]));
            }
        }
    }
}

// out[i] += sum over j <= i of outer[i][j] delta[j].
static inline void add_own_tokens(const Strip& strip, const float (&outer)[kChunk][kChunk]) {
    for (int u = 0; u < kVecs; ++u) {
        const float* delta = strip.delta + u * kLanes;
        for (int first = 0; first < kChunk; first += kTile) {
            Vec sums[kTile];
            float* out = strip.out + first * kStrip + u * kLanes;
#pragma GCC unroll 8
            for (int r = 0; r < kTile; ++r) sums[r] = load(out + r * kStrip);
            for (int j = 0; j < first; ++j) {
                const Vec d = load(delta + j * kStrip);
#pragma GCC unroll 8
                for (int r = 0; r < kTile; ++r)
                    sums[r] = fma(set1(outer[first + r][j]), d, sums[r]);
            }
#pragma GCC unroll 8
            for (int j = 0; j < kTile; ++j) {
                const Vec d = load(delta + (first + j) * kStrip);
#pragma GCC unroll 8
                for (int r = j; r < kTile; ++r) {
                    sums[r] = fma(set1(outer[first + r][first + j]), d, sums[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < kTile; ++r) store(out + r * kStrip, sums[r]);
        }
    }
}

// delta[j] *= left[j].
static inline void decay_deltas(const Strip& strip, const float* left) {
    for (int j = 0; j < kChunk; ++j) {
        float* delta = strip.delta + j * kStrip;
        for (int u = 0; u < kVecs; ++u) {
            store(delta + u * kLanes, mul(set1(left[j]), load(delta + u * kLanes)));
        }
    }
}

// S = kept S + sum over j of k[j] delta[j]^T, keys packed. `kept` is one number, or with
// kByRow one of each row.
template <int kRows, bool kByRow>
static inline __attribute__((always_inline)) void update_tile(
    const float* delta, const float* keys, const float* kept, float* state
) {
    Vec sums[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const Vec by = set1(kByRow ? kept[r] : kept[0]);
        sums[r][0] = mul(by, load(state + r * kStrip));
        sums[r][1] = mul(by, load(state + r * kStrip + kLanes));
    }
    for (int j = 0; j < kChunk; ++j) {
        const Vec d0 = load(delta + j * kStrip), d1 = load(delta + j * kStrip + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec x = set1(keys[r * kChunk + j]);
            sums[r][0] = fma(x, d0, sums[r][0]);
            sums[r][1] = fma(x, d1, sums[r][1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        store(state + r * kStrip, sums[r][0]);
        store(state + r * kStrip + kLanes, sums[r][1]);
    }
}

template <bool kByRow>
static inline void update_strip(const Strip& strip, const float* keys, const float* kept) {
    int64_t k = 0;
    for (; k + kTile <= strip.depth; k += kTile) {
        update_tile<kTile, kByRow>(
            strip.delta, keys + k * kChunk, kByRow ? kept + k : kept, strip.state + k * kStrip
        );
    }
    for (; k < strip.depth; ++k) {
        update_tile<1, kByRow>(
            strip.delta, keys + k * kChunk, kByRow ? kept + k : kept, strip.state + k * kStrip
        );
    }
}

}  // namespace exl::EXL_ISA

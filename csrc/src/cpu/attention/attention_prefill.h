// Prefill attention: repacks blocks of 64 keys and values into fp32 panels, which stay in the CPU
// cache, and computes both products with the register tiles of the linear (tile.h).
//
//   scores[vectors, 64] = queries @ keys^T      keys in panels of 16 keys:      [4][d][16]
//   values[vectors, d] += weights @ values      values in panels of 16 columns: [d/16][64][16]
#pragma once

#include "cpu/attention/attention_common.h"
#include "cpu/common/tile.h"

namespace exl::EXL_ISA {

// Query vectors of a work item: 8 tiles of 14 with AVX-512. That is enough to amortize the cost of
// making the panels.
constexpr int64_t kTileVectors = 112;

static inline int64_t prefill_scratch_floats(int64_t vectors, int64_t d, bool is_packed) {
    return vectors * (padded(d) + kKeyBlock) + (is_packed ? 3 : 2) * kKeyBlock * padded(d);
}

// Transposes keys[count, d] into columns [column, column + count) of the key panels.
template <class T>
static inline void key_columns(
    const T* keys, int64_t count, int64_t d, int64_t column, float* panels
) {
    const int64_t panel_stride = padded(d) * kPanel;
    int64_t j = 0;
    // Whole SIMD vectors, as long as they start on a vector boundary of a panel.
    for (; column % kLanes == 0 && j + kLanes <= count; j += kLanes) {
        float* to = panels + (column + j) / kPanel * panel_stride + (column + j) % kPanel;
        for_lanes(d, [&](int64_t i, int lanes) {
            Vec block[kLanes];
            for (int r = 0; r < kLanes; ++r) block[r] = load_some(keys + (j + r) * d + i, lanes);
            transpose_block(block, to + i * kPanel, kPanel);
        });
    }
    for (; j < count; ++j) {
        float* to = panels + (column + j) / kPanel * panel_stride + (column + j) % kPanel;
        for_lanes(d, [&](int64_t i, int lanes) {
            float row[kLanes];
            store(row, load_some(keys + j * d + i, lanes));
            for (int r = 0; r < lanes; ++r) to[(i + r) * kPanel] = row[r];
        });
    }
}

// Copies values[count, d] to rows [row, row + count) of the value panels.
template <class T>
static inline void value_rows(
    const T* values, int64_t count, int64_t d, int64_t row, float* panels
) {
    for (int64_t j = 0; j < count; ++j) {
        for_lanes(d, [&](int64_t i, int lanes) {
            float* to = panels + i / kPanel * kKeyBlock * kPanel + (row + j) * kPanel + i % kPanel;
            store(to, load_some(values + j * d + i, lanes));
        });
    }
}

// Zeroes columns [first, last) of the key panels, the padding of an incomplete last panel.
static inline void clear_columns(int64_t d, int64_t first, int64_t last, float* panels) {
    for (int64_t j = first; j < last; ++j) {
        float* to = panels + j / kPanel * padded(d) * kPanel + j % kPanel;
        for (int64_t i = 0; i < d; ++i) to[i * kPanel] = 0.0f;
    }
}

// Accumulates one block of keys and values into the results of one tile of R query vectors.
template <int R>
static inline void fold_tile(
    const AttentionArgs& args, const Work& work, int64_t first, int64_t begin, int64_t count,
    const float* queries, const float* key_panels, const float* value_panels, float* scores,
    const Running& run
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t width = padded(args.d);
    const int64_t oldest = work.position + first / group;
    const int64_t newest = work.position + (first + R - 1) / group;
    if (begin > newest) return;
    if (args.window > 0 && begin + count <= oldest - args.window + 1) return;
    const int64_t columns = ceil_div(count, kPanel) * kPanel;
    tile_columns<R>(
        PackedRows<R>{queries + first * args.d}, key_panels, width * kPanel, columns / kPanel,
        args.d, TileOut{scores, kKeyBlock, columns, false, nullptr}
    );
    for (int64_t r = 0; r < R; ++r) {
        const int64_t i = first + r;
        const Visible seen = visible(work.position + i / group, args.window, begin, count);
        const float factor = softmax_step(
            scores + r * kKeyBlock, columns, seen, args.softcap, run.peak[i], run.weight[i]
        );
        if (factor == 1.0f) continue;
        float* values = run.values + i * width;
        const Vec by = set1(factor);
        for (int64_t c = 0; c < width; c += kLanes) store(values + c, mul(load(values + c), by));
    }
    tile_columns<R>(
        FixedRows<kKeyBlock>{scores}, value_panels, kKeyBlock * kPanel, width / kPanel, count,
        TileOut{run.values + first * width, width, width, true, nullptr}
    );
}

template <class T>
static void attend_prefill(
    const AttentionArgs& args, const Work& work, int64_t kv_head, float* scratch, const Running& run
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t vectors = work.rows * group;
    const int64_t width = padded(args.d);
    float* key_panels = scratch;
    float* value_panels = key_panels + kKeyBlock * width;
    float* queries = value_panels + kKeyBlock * width;
    float* scores = queries + vectors * width;
    float* unpacked = scores + vectors * kKeyBlock;  // unpacked rows of a key block
    const Tiling tiling(vectors);
    load_queries(args, work, kv_head, run.values);  // row-major there, then packed into `queries`
    for (int64_t tile = 0; tile < tiling.count; ++tile) {
        const int64_t first = tiling.first_row(tile);
        pack_rows(
            run.values + first * args.d, args.d, tiling.rows_of(tile), args.d,
            queries + first * args.d
        );
    }
    start(run, vectors, width);
    const PagedRows<T> keys = paged_keys<T>(args, work, kv_head);
    const PagedRows<T> values = paged_values<T>(args, work, kv_head);
    using Cell = typename Stored<T>::Cell;
    int64_t count = 0;
    for (int64_t begin = work.key_begin; begin < work.key_end; begin += count) {
        // Blocks end on multiples of kKeyBlock, so that they rarely cross a page boundary.
        count = smaller(kKeyBlock - begin % kKeyBlock, work.key_end - begin);
        keys.for_runs(begin, begin + count, [&](const Cell* rows, int64_t at, int64_t run_length) {
            key_columns(
                keys.read(rows, run_length, unpacked), run_length, args.d, at - begin, key_panels
            );
            value_rows(
                values.read(values.at(at), run_length, unpacked), run_length, args.d, at - begin,
                value_panels
            );
        });
        clear_columns(args.d, count, ceil_div(count, kPanel) * kPanel, key_panels);
        for (int64_t tile = 0; tile < tiling.count; ++tile) {
            with_rows<kTileRows>(tiling.rows_of(tile), [&]<int R>() {
                fold_tile<R>(
                    args, work, tiling.first_row(tile), begin, count, queries, key_panels,
                    value_panels, scores, run
                );
            });
        }
    }
}

}  // namespace exl::EXL_ISA

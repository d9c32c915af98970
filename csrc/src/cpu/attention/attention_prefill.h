// Prefill attention: repacks blocks of 64 keys and values into fp32 panels, which stay in the CPU
// cache, and computes both products with register tiles.
//
//   scores[vectors, 64] = queries @ keys^T      keys in panels of 16 keys:      [4][d'][16]
//   values[vectors, d] += weights @ values      values in panels of 16 columns: [d/16][64][16]
//
// d' is the head's elements in the order in which score_keys (attention_decode.h) adds them up: a
// SIMD lane there sums the elements lane, lane + kLanes, ..., and a tree adds the lanes. Here each
// lane's elements are adjacent, [kLanes][d / kLanes rounded up], padded with zeros, and their sums
// are added in the tree's order. A score therefore has the same bits in both kernels.
#pragma once

#include "cpu/attention/attention_common.h"
#include "cpu/common/tile.h"

namespace exl::EXL_ISA {

// Query vectors of a work item: 8 tiles of 14 with AVX-512. That is enough to amortize the cost of
// making the panels.
constexpr int64_t kTileVectors = 112;

static inline int64_t prefill_scratch_floats(int64_t vectors, int64_t d, bool is_packed) {
    return vectors * (2 * padded(d) + kKeyBlock) + (is_packed ? 3 : 2) * kKeyBlock * padded(d);
}

static inline int64_t lane_elements(int64_t d) { return ceil_div(d, kLanes); }

// Transposes keys[count, d] into columns [column, column + count) of the key panels.
template <class T>
static inline void key_columns(
    const T* keys, int64_t count, int64_t d, int64_t column, float* panels
) {
    const int64_t panel_stride = padded(d) * kPanel;
    const int64_t lane_stride = lane_elements(d) * kPanel;
    int64_t j = 0;
    // Whole SIMD vectors, as long as they start on a vector boundary of a panel.
    for (; column % kLanes == 0 && j + kLanes <= count; j += kLanes) {
        float* to = panels + (column + j) / kPanel * panel_stride + (column + j) % kPanel;
        for_lanes(d, [&](int64_t i, int lanes) {
            Vec block[kLanes];
            for (int r = 0; r < kLanes; ++r) block[r] = load_some(keys + (j + r) * d + i, lanes);
            transpose_block(block, to + i / kLanes * kPanel, lane_stride);
        });
    }
    for (; j < count; ++j) {
        float* to = panels + (column + j) / kPanel * panel_stride + (column + j) % kPanel;
        for_lanes(d, [&](int64_t i, int lanes) {
            float row[kLanes];
            store(row, load_some(keys + j * d + i, lanes));
            for (int r = 0; r < kLanes; ++r) to[i / kLanes * kPanel + r * lane_stride] = row[r];
        });
    }
}

// Packs queries[rows, d] for dot_tile: [kLanes][lane_elements][rows].
static inline void pack_queries(const float* queries, int rows, int64_t d, float* packed) {
    const int64_t lane_stride = lane_elements(d) * rows;
    for_lanes(d, [&](int64_t i, int lanes) {
        for (int r = 0; r < rows; ++r) {
            float row[kLanes];
            store(row, load_some(queries + r * d + i, lanes));
            for (int l = 0; l < kLanes; ++l)
                packed[l * lane_stride + i / kLanes * rows + r] = row[l];
        }
    });
}

// Most rows whose sums of two lanes stay in registers.
constexpr int kDotRows = kLanes == 16 ? 6 : kTileRows / 2;

// sums[Rows][16 P] = terms of one lane: queries [elements][R], keys in P panels.
template <int R, int Rows, int P>
static inline __attribute__((always_inline)) void lane_sums(
    const float* queries, const float* keys, int64_t panel_stride, int64_t elements,
    Vec (&sums)[Rows][P * kPanelVecs]
) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 32
        for (int v = 0; v < P * kPanelVecs; ++v) sums[r][v] = set1(0.0f);
    }
    for (int64_t step = 0; step < elements; ++step) {
        Vec weights[P * kPanelVecs];
#pragma GCC unroll 32
        for (int v = 0; v < P * kPanelVecs; ++v) {
            weights[v] = load(
                keys + v / kPanelVecs * panel_stride + step * kPanel + v % kPanelVecs * kLanes
            );
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const Vec value = set1(queries[step * R + r]);
#pragma GCC unroll 32
            for (int v = 0; v < P * kPanelVecs; ++v)
                sums[r][v] = fma(value, weights[v], sums[r][v]);
        }
    }
}

// scores[Rows][kKeyBlock] = queries @ keys^T for P panels of keys, terms in the order described at
// the head of this file.
template <int R, int Rows, int P>
static inline void dot_rows(
    const float* queries, const float* keys, int64_t panel_stride, int64_t elements, float* scores
) {
    Vec sums[Rows][P * kPanelVecs];
    if constexpr (kLanes == 1) {
        lane_sums<R, Rows, P>(queries, keys, panel_stride, elements, sums);
    } else {
        // Sums of 2^level lanes that wait for the next 2^level lanes.
        float waiting[kSumLevels][Rows][P * kPanel];
        for (int pair = 0; pair < kLanes / 2; ++pair) {
            Vec others[Rows][P * kPanelVecs];
            const int64_t a = sum_leaf(2 * pair) * elements;
            const int64_t b = sum_leaf(2 * pair + 1) * elements;
            lane_sums<R, Rows, P>(
                queries + a * R, keys + a * kPanel, panel_stride, elements, others
            );
            lane_sums<R, Rows, P>(queries + b * R, keys + b * kPanel, panel_stride, elements, sums);
            const auto add_to_sums = [&](auto&& other) __attribute__((always_inline)) {
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 32
                    for (int v = 0; v < P * kPanelVecs; ++v)
                        sums[r][v] = add(other(r, v), sums[r][v]);
                }
            };
            add_to_sums([&](int r, int v) { return others[r][v]; });
            int level = 1;
            for (; (pair >> (level - 1) & 1) != 0; ++level) {
                add_to_sums([&](int r, int v) { return load(waiting[level][r] + v * kLanes); });
            }
            if (level == kSumLevels) break;
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 32
                for (int v = 0; v < P * kPanelVecs; ++v)
                    store(waiting[level][r] + v * kLanes, sums[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 32
        for (int v = 0; v < P * kPanelVecs; ++v) {
            store(scores + r * kKeyBlock + v * kLanes, sums[r][v]);
        }
    }
}

// dot_rows for all R rows of a tile, in even parts.
template <int R, int P, int First = 0>
static inline void dot_tile(
    const float* queries, const float* keys, int64_t panel_stride, int64_t elements, float* scores
) {
    constexpr int kLeft = R - First;
    constexpr int kParts = (kLeft + kDotRows - 1) / kDotRows;
    constexpr int kRows = (kLeft + kParts - 1) / kParts;
    dot_rows<R, kRows, P>(
        queries + First, keys, panel_stride, elements, scores + First * kKeyBlock
    );
    if constexpr (kRows < kLeft) {
        dot_tile<R, P, First + kRows>(queries, keys, panel_stride, elements, scores);
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
        for (int64_t i = 0; i < padded(d); ++i) to[i * kPanel] = 0.0f;
    }
}

// A block of keys and values in panels. Column 0 is the key at position `border`; the keys of
// positions [begin, end) are present.
struct KeyBlock {
    int64_t border;
    int64_t begin;
    int64_t end;
    const float* key_panels;
    const float* value_panels;
};

// Accumulates a block into the results of one tile of R query vectors, from number `first` on.
template <int R>
static inline void fold_tile(
    const AttentionArgs& args, const Work& work, int64_t first, const KeyBlock& block,
    const float* queries, float* scores, const Running& run
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t width = padded(args.d);
    const int64_t oldest = work.position + first / group;
    const int64_t newest = work.position + (first + R - 1) / group;
    if (block.begin > newest) return;
    if (args.window > 0 && block.end <= oldest - args.window + 1) return;
    const int64_t columns = ceil_div(block.end - block.border, kPanel) * kPanel;
    int64_t column = 0;
    for (; column + kTilePanels * kPanel <= columns; column += kTilePanels * kPanel) {
        dot_tile<R, kTilePanels>(
            queries, block.key_panels + column * width, width * kPanel, lane_elements(args.d),
            scores + column
        );
    }
    if (column < columns) {
        dot_tile<R, 1>(
            queries, block.key_panels + column * width, width * kPanel, lane_elements(args.d),
            scores + column
        );
    }
    for (int64_t r = 0; r < R; ++r) {
        const int64_t i = first + r;
        const Visible seen =
            visible(work.position + i / group, args.window, block.border, block.end - block.border);
        const float factor = softmax_step(
            scores + r * kKeyBlock, columns, seen, args.softcap, run.peak[i], run.weight[i]
        );
        if (factor == 1.0f) continue;
        float* values = run.values + i * width;
        const Vec by = set1(factor);
        for (int64_t c = 0; c < width; c += kLanes) store(values + c, mul(load(values + c), by));
    }
    const int64_t skipped = block.begin - block.border;
    tile_columns<R>(
        FixedRows<kKeyBlock>{scores + skipped}, block.value_panels + skipped * kPanel,
        kKeyBlock * kPanel, width / kPanel, block.end - block.begin,
        TileOut{run.values + first * width, width, width, false, nullptr, true}
    );
}

// A work item of prefill for one kv head, with its queries packed in tiles.
template <class T>
class PrefillItem {
  public:
    PrefillItem(const AttentionArgs& args, const Work& work, int64_t kv_head, float* scratch)
        : args_(args),
          work_(work),
          keys_(paged_keys<T>(args, work, kv_head)),
          values_(paged_values<T>(args, work, kv_head)),
          vectors_(work.rows * (args.q_heads / args.kv_heads)),
          tiling_(vectors_) {
        const int64_t width = padded(args.d);
        key_panels_ = scratch;
        value_panels_ = key_panels_ + kKeyBlock * width;
        queries_ = value_panels_ + kKeyBlock * width;
        float* plain = queries_ + vectors_ * width;
        scores_ = plain + vectors_ * width;
        unpacked_ = scores_ + vectors_ * kKeyBlock;
        load_queries(args, work, kv_head, plain);
        for (int64_t tile = 0; tile < tiling_.count; ++tile) {
            const int64_t first = tiling_.first_row(tile);
            pack_queries(
                plain + first * args.d, tiling_.rows_of(tile), args.d, queries_ + first * width
            );
        }
    }

    // Accumulates the keys and values of positions [begin, end) into `run`.
    void attend(int64_t begin, int64_t end, const Running& run) const {
        using Cell = typename Stored<T>::Cell;
        const int64_t d = args_.d;
        while (begin < end) {
            const int64_t border = begin / kKeyBlock * kKeyBlock;
            const KeyBlock block{
                border, begin, smaller(border + kKeyBlock, end), key_panels_, value_panels_
            };
            keys_.for_runs(begin, block.end, [&](const Cell* rows, int64_t at, int64_t count) {
                key_columns(keys_.read(rows, count, unpacked_), count, d, at - border, key_panels_);
                value_rows(
                    values_.read(values_.at(at), count, unpacked_), count, d, at - border,
                    value_panels_
                );
            });
            clear_columns(d, 0, begin - border, key_panels_);
            const int64_t columns = block.end - border;
            clear_columns(d, columns, ceil_div(columns, kPanel) * kPanel, key_panels_);
            for (int64_t tile = 0; tile < tiling_.count; ++tile) {
                const int64_t first = tiling_.first_row(tile);
                with_rows<kTileRows>(tiling_.rows_of(tile), [&]<int R>() {
                    fold_tile<R>(
                        args_, work_, first, block, queries_ + first * padded(d), scores_, run
                    );
                });
            }
            begin = block.end;
        }
    }

  private:
    const AttentionArgs& args_;
    const Work& work_;
    const PagedRows<T> keys_;
    const PagedRows<T> values_;
    const int64_t vectors_;
    const Tiling tiling_;
    float* key_panels_;
    float* value_panels_;
    float* queries_;
    float* scores_;
    float* unpacked_;  // rows of a key block
};

}  // namespace exl::EXL_ISA

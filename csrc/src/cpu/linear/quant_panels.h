// Integer products of panels of quantized weights with quantized activations, for quant_linear.cpp
// and moe/experts.cpp. quant_linear.cpp describes them.
#pragma once

#include "cpu/elementwise/activation.h"
#include "cpu/linear/quant_e4m3.h"

#if defined(__AMX_INT8__)
#include "cpu/linear/quant_tiles_int8.h"
#define EXL_HAS_INT_TILES 1
#else
#define EXL_HAS_INT_TILES 0
#endif

namespace exl::EXL_ISA {

// Rows whose quantized activations stay in L2 while they are multiplied with all panels of an item.
constexpr int64_t kActRows = 128;
#if EXL_HAS_INT_TILES
constexpr int64_t kTileRowsOut = 2 * kIntTileRows;
#else
constexpr int64_t kTileRowsOut = kTileSums;
struct IntTileScope {
    explicit IntTileScope(int) {}
};
#endif

// Prefetch distance of P panels that are read side by side. The panels after them begin P panels
// later, so short panels are prefetched whole sets of P ahead.
static inline int64_t codes_ahead(int P, int64_t panel_bytes) {
    const int64_t set = P * panel_bytes;
    return panel_bytes > kCodesAhead ? kCodesAhead : ceil_div(kCodesAhead, set) * set;
}

// Computes the exact integer sums of one span: kLanes columns of each of P panels, R rows. Of each
// block it takes steps First .. First + Count - 1.
template <int Bits, int R, int P, int First = 0, int Count = kSteps>
static inline __attribute__((always_inline)) void span_product(
    const uint8_t* codes, int64_t panel_bytes, int64_t ahead, int64_t blocks, const uint8_t* act,
    int64_t row_bytes, DotSum (&sums)[P][R]
) {
    for (int64_t b = 0; b < blocks; ++b) {
        if constexpr (First == 0) {
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) {
                for (int64_t line = 0; line < width_of(Bits); ++line) {
                    prefetch(codes + p * panel_bytes + ahead + 64 * line);
                }
            }
        }
        unrolled<Count>([&]<int I>() __attribute__((always_inline)) {
            constexpr int Step = First + I;
            Codes step[P];
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) step[p] = block_codes<Bits, Step>(codes + p * panel_bytes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p) {
                    sums[p][r].template add<Step>(step[p], act + r * row_bytes);
                }
            }
        });
        codes += width_of(Bits) * 4 * kPanel;
        act += kActBlock;
    }
}

template <int Bits, int R, int P>
static void run_product(
    const QuantMatrix& w, const GroupRun& run, int64_t panel, const Acts& acts, int64_t row,
    float (*y)[kPanel]
) {
    const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
    const uint8_t* act = acts.data + row * acts.row_bytes + run.first_block * kActBlock;
    const int64_t ahead = codes_ahead(P, w.panel_bytes);
    int64_t span = row * acts.spans + run.first_span;
    for (int64_t group = 0; group < run.groups; ++group) {
        const int64_t at = w.scale_index(panel) + (run.first_group + group) * kPanel;
        for (int p = 0; p < P; ++p) prefetch_scales(w, at + p * w.groups * kPanel);
        for (int64_t first = 0; first < run.blocks; first += kSpanBlocks, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - first);
#pragma GCC unroll 1
            for (int v = 0; v < kPanelVecs; ++v) {
                DotSum sums[P][R];
                span_product<Bits, R, P>(
                    codes + v * kCodeBytes, w.panel_bytes, ahead, blocks, act, acts.row_bytes, sums
                );
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p) {
                    const auto total = [&](int r) { return sums[p][r].total(); };
                    apply_scales<Bits>(
                        w, at + p * w.groups * kPanel + v * kLanes, R, total, acts, span,
                        y[p * R] + v * kLanes
                    );
                }
            }
            codes += blocks * width_of(Bits) * 4 * kPanel;
            act += blocks * kActBlock;
        }
    }
}

// As run_product, for a run whose groups share blocks in pairs: each half of a block is a span.
template <int Bits, int R, int P>
static void pairs_product(
    const QuantMatrix& w, const GroupRun& run, int64_t panel, const Acts& acts, int64_t row,
    float (*y)[kPanel]
) {
    const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
    const uint8_t* act = acts.data + row * acts.row_bytes + run.first_block * kActBlock;
    const int64_t ahead = codes_ahead(P, w.panel_bytes);
    int64_t span = row * acts.spans + run.first_span;
    int64_t at = w.scale_index(panel) + run.first_group * kPanel;
    for (int64_t pair = 0; pair < run.units; ++pair) {
        for (int p = 0; p < P; ++p) {
            prefetch_scales(w, at + p * w.groups * kPanel);
            prefetch_scales(w, at + (p * w.groups + 1) * kPanel);
        }
#pragma GCC unroll 1
        for (int v = 0; v < kPanelVecs; ++v) {
            unrolled<2>([&]<int Half>() __attribute__((always_inline)) {
                DotSum sums[P][R];
                span_product<Bits, R, P, Half * kSteps / 2, kSteps / 2>(
                    codes + v * kCodeBytes, w.panel_bytes, ahead, 1, act, acts.row_bytes, sums
                );
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p) {
                    const auto total = [&](int r) { return sums[p][r].total(); };
                    apply_scales<Bits>(
                        w, at + (p * w.groups + Half) * kPanel + v * kLanes, R, total, acts,
                        span + Half, y[p * R] + v * kLanes
                    );
                }
            });
        }
        codes += width_of(Bits) * 4 * kPanel;
        act += kActBlock;
        span += 2;
        at += 2 * kPanel;
    }
}

// Computes the columns of P panels for R rows: y[P][R][16].
template <int R, int P>
static void panel_product(
    const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row, float (*y)[kPanel]
) {
    if (w.values == Values::e4m3) return e4m3_product<R, P>(w, panel, acts, row, y);
    for (int p = 0; p < P; ++p) start_rows(w, panel + p, R, y + p * R);
    for (const GroupRun& run : w.runs) {
        with_form(w, run.bits, [&]<int Bits>() {
            if constexpr (is_integer(Bits)) {
                if (run.is_paired) return pairs_product<Bits, R, P>(w, run, panel, acts, row, y);
            }
            if constexpr (Bits != kE4m3) run_product<Bits, R, P>(w, run, panel, acts, row, y);
        });
    }
}

#if EXL_HAS_INT_TILES

// As run_product, in AMX tiles. IsWhole: 12-bit activations, whose product gives the whole sum.
template <int Bits, int P, bool IsWhole>
static void run_tiles(
    const QuantMatrix& w, const GroupRun& run, int64_t panel, const Acts& acts, int64_t row,
    int rows, float (*y)[kPanel]
) {
    const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
    const uint8_t* act = acts.data + row * acts.row_bytes + run.first_block * kActBlock;
    int64_t span = row * acts.spans + run.first_span;
    // Software pipeline: the sums of a span are scaled after the tile products of the next span
    // have been issued.
    IntTileSums sums[2];
    int64_t at[2] = {};
    int64_t done = span;
    const auto scale_span = [&] {
        for (int p = 0; p < P; ++p) {
            const auto total = [&](int r) { return sums[done & 1].total<IsWhole>(p, r); };
            apply_scales<Bits>(
                w, at[done & 1] + p * w.groups * kPanel, rows, total, acts, done, y[p * rows]
            );
        }
        ++done;
    };
    for (int64_t group = 0; group < run.groups; ++group) {
        const int64_t grid = w.scale_index(panel) + (run.first_group + group) * kPanel;
        for (int p = 0; p < P; ++p) prefetch_scales(w, grid + p * w.groups * kPanel);
        for (int64_t first = 0; first < run.blocks; first += kSpanBlocks, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - first);
            at[span & 1] = grid;
            tile_span<Bits, P, IsWhole>(
                codes, w.panel_bytes, blocks, act, acts.row_bytes, sums[span & 1]
            );
            if (done < span) scale_span();
            codes += blocks * width_of(Bits) * 4 * kPanel;
            act += blocks * kActBlock;
        }
    }
    scale_span();
}

// As panel_product, in AMX tiles, for up to 16 rows: y[P][rows][16].
template <int P>
static void panel_tiles(
    const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row, int rows, float (*y)[kPanel]
) {
    for (int p = 0; p < P; ++p) start_rows(w, panel + p, rows, y + p * rows);
    for (const GroupRun& run : w.runs) {
        with_form(w, run.bits, [&]<int Bits>() {
            if constexpr (Bits <= kIntTileLowBits) {
                if (acts.low_bits == kIntTileLowBits) {
                    return run_tiles<Bits, P, true>(w, run, panel, acts, row, rows, y);
                }
            }
            run_tiles<Bits, P, false>(w, run, panel, acts, row, rows, y);
        });
    }
}

#endif

// Picks the product for one or two adjacent panels and as many of the `left` rows as fit into a
// tile. Calls done(product, rows, panels), where product(w, panel, acts, row, y) computes
// y[panels][rows][16]. Sums stay in registers. Two panels are read as two parallel streams and
// share the loads of x.
// `has_tiles`: AMX tiles may be used.
template <class Done>
static inline void with_tile(
    int64_t left, int64_t panels, [[maybe_unused]] int low_bits, [[maybe_unused]] bool has_tiles,
    Done&& done
) {
    const auto of = [&]<int R, int P>() {
        done(
            [](const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row,
               float (*y)[kPanel]) { panel_product<R, P>(w, panel, acts, row, y); },
            R, P
        );
    };
#if EXL_HAS_INT_TILES
    if (has_tiles && left >= (low_bits == kIntTileLowBits ? 1 : kIntTileMinRows)) {
        const int rows = static_cast<int>(smaller(left, kIntTileRows));
        return done(
            [&](const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row,
                float (*y)[kPanel]) {
                if (panels > 1) return panel_tiles<2>(w, panel, acts, row, rows, y);
                panel_tiles<1>(w, panel, acts, row, rows, y);
            },
            rows, static_cast<int>(panels)
        );
    }
#endif
    if constexpr (kTileSums >= 12 && !EXL_HAS_INT_TILES) {
        if (left >= 6 && panels >= 2) return of.template operator()<6, 2>();
    }
    if constexpr (kTileSums >= 8) {
        if (left >= 4 && panels >= 2) return of.template operator()<4, 2>();
    }
    if constexpr (kTileSums >= 4) {
        if (left >= 4) return of.template operator()<4, 1>();
        if (left >= 3) return of.template operator()<3, 1>();
    }
    if (left >= 2) return of.template operator()<2, 1>();
    if constexpr (kTileSums >= 4) {
        if (panels >= 2) return of.template operator()<1, 2>();
    }
    of.template operator()<1, 1>();
}

// Writes values[rows][16] of one panel to y, from row `row` on.
static void write_rows(
    const QuantLinearArgs& args, int64_t row, int rows, int64_t column, int64_t columns,
    const float (*values)[kPanel]
) {
    for (int r = 0; r < rows; ++r) {
        float* to = args.y + (row + r) * args.y_stride + column;
        for_lanes(columns, [&](int64_t i, int count) {
            Vec value = load(values[r] + i);
            if (args.epilogue == Epilogue::add) value = add(value, load_some(to + i, count));
            store_some(to + i, value, count);
        });
    }
}

// y[count][16] = act(y) * ups.
static void gate_values(Gate gate, int count, const float (*ups)[kPanel], float (*y)[kPanel]) {
    with_gate(gate, [&](auto gated) {
        for (int i = 0; i < count; ++i) {
            for (int c = 0; c < kPanel; c += kLanes) {
                store(y[i] + c, gated(load(y[i] + c), load(ups[i] + c)));
            }
        }
    });
}

// Computes `rows` of the given panels of w and writes them to y, from `first_column` on. The
// callback values(product, panel, row, count, y) computes y[count][16], where `product` comes from
// with_tile and `count` is rows times panels. Panels are the outer loop, so that their codes stay
// in the cache while they are multiplied with all row tiles.
template <class Values>
static void write_panels(
    const QuantLinearArgs& args, const QuantMatrix& w, int low_bits, Range rows, Range panels,
    int64_t first_column, Values&& values
) {
    const IntTileScope scope(low_bits);
    // A block of a pair has two sums, which an AMX tile would add up. Floats have no integer tiles.
    const bool is_gated = args.epilogue == Epilogue::gated;
    const bool has_tiles = w.values != exl::Values::e4m3 && !w.has_pairs() &&
                           !(is_gated && args.parts[1]->has_pairs());
    alignas(64) float y[kTileRowsOut][kPanel];
    for (int64_t panel = panels.first; panel < panels.last; panel += 2) {
        const int64_t side = smaller(2, panels.last - panel);
        for (int64_t row = rows.first; row < rows.last;) {
            const int64_t left = rows.last - row;
            with_tile(left, side, low_bits, has_tiles, [&](auto&& product, int count, int wide) {
                for (int64_t p = 0; p < side; p += wide) {
                    values(product, panel + p, row, count * wide, y);
                    for (int q = 0; q < wide; ++q) {
                        const int64_t column = (panel + p + q) * kPanel;
                        write_rows(
                            args, row, count, first_column + column, smaller(kPanel, w.n - column),
                            y + q * count
                        );
                    }
                }
                row += count;
            });
        }
    }
}

static void part_panels(
    const QuantLinearArgs& args, const Acts* acts, int part, Range rows, Range panels,
    int64_t first_column
) {
    const QuantMatrix& w = *args.parts[part];
    write_panels(
        args, w, acts[part].low_bits, rows, panels, first_column,
        [&](auto&& product, int64_t panel, int64_t row, int, float (*y)[kPanel]) {
            product(w, panel, acts[part], row, y);
        }
    );
}

static void gated_panels(const QuantLinearArgs& args, const Acts* acts, Range rows, Range panels) {
    const QuantMatrix& w = *args.parts[0];
    alignas(64) float ups[kTileRowsOut][kPanel];
    write_panels(
        args, w, acts[0].low_bits, rows, panels, 0,
        [&](auto&& product, int64_t panel, int64_t row, int count, float (*y)[kPanel]) {
            product(w, panel, acts[0], row, y);
            product(*args.parts[1], panel, acts[1], row, ups);
            gate_values(args.gate, count, ups, y);
        }
    );
}

}  // namespace exl::EXL_ISA

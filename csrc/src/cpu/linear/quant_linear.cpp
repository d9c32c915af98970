// y = x @ w for quantized w, with integer dot products. Calls with more rows than integers are good
// for, on instruction sets where floats are then faster, go to quant_prefill.cpp.
//
// Contract   include/exl/ops/quant_linear.h, which draws the layout.
// Integers   x is quantized once to 16-bit integers, each span of up to 128 stored rows relative to
//            its largest value. Integer dot products of codes and activations are exact within a
//            span. Then the group's scale and offset and the span's own scale apply in fp32.
//            8-bit activations would be fast enough but too inaccurate: the output of SmolLM2
//            changes by 2.7e-3 (mean KL divergence) with 8-bit blocks of 32, by 5e-6 with 16 bits.
//            Codes of at most 4 bits in AMX tiles use 12-bit activations: 1e-4
//            (quant_tiles_int8.h).
// Rows       Every tile of every set gives the same integer sums, and scales apply in one order. A row
//            therefore has the same bits for any m whose activations have the same number of bits.
//            With is_batch_invariant these are 16 for every m, and quant_prefill.cpp is not used.
// Mapping    A work item is a range of panels, read as one stream of codes and one of scales. Every
//            column is summed by one thread in one order, for any number of threads.
#include "cpu/elementwise/activation.h"
#include "cpu/linear/quant_prefill.h"
#include "cpu/linear/quant_scales.h"

#if defined(__AMX_INT8__)
#include "cpu/linear/quant_tiles_int8.h"
#define EXL_HAS_INT_TILES 1
#else
#define EXL_HAS_INT_TILES 0
#endif

namespace exl::EXL_ISA {

// Smallest work item, in bytes of weights. Larger matrices have up to 8 items per thread.
constexpr int64_t kItemBytes = 256 << 10;
// Rows whose quantized activations stay in L2 while they are multiplied with all panels of an item.
constexpr int64_t kActRows = 128;
// kIntegerRows is the largest number of rows for which integer products are faster than
// dequantizing the codes. Measured at k = 576, n = 3072 on two cores, in GFLOP/s: byte dot products
// 420 at any number of rows; AMX 490 at 16 rows, 1150 at 64, 1370 at 512; without either, 16-bit
// words 220 and fp32 300.
#if EXL_HAS_INT_TILES
constexpr int64_t kIntegerRows = 32;
constexpr int64_t kTileRowsOut = 2 * kIntTileRows;
#else
constexpr int64_t kTileRowsOut = kTileSums;
struct IntTileScope {
    explicit IntTileScope(int) {}
};
#endif
#if !EXL_HAS_BYTE_DOT
constexpr int64_t kIntegerRows = 8;
#endif

// Computes the exact integer sums of one span: kLanes columns of each of P panels, R rows.
template <int Bits, int R, int P>
static inline __attribute__((always_inline)) void span_product(
    const uint8_t* codes, int64_t panel_bytes, int64_t blocks, const uint8_t* act,
    int64_t row_bytes, DotSum (&sums)[P][R]
) {
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
            for (int64_t line = 0; line < width_of(Bits); ++line) {
                prefetch(codes + p * panel_bytes + kCodesAhead + 64 * line);
            }
        }
        unrolled<kBlockRows / 4>([&]<int Step>() __attribute__((always_inline)) {
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
                    codes + v * kCodeBytes, w.panel_bytes, blocks, act, acts.row_bytes, sums
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

// Computes the columns of P panels for R rows: y[P][R][16].
template <int R, int P>
static void panel_product(
    const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row, float (*y)[kPanel]
) {
    for (int p = 0; p < P; ++p) start_rows(w, panel + p, R, y + p * R);
    for (const GroupRun& run : w.runs) {
        with_form(w, run.bits, [&]<int Bits>() {
            run_product<Bits, R, P>(w, run, panel, acts, row, y);
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
template <class Done>
static inline void with_tile(
    int64_t left, int64_t panels, [[maybe_unused]] int low_bits, Done&& done
) {
    const auto of = [&]<int R, int P>() {
        done(
            [](const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row,
               float (*y)[kPanel]) { panel_product<R, P>(w, panel, acts, row, y); },
            R, P
        );
    };
#if EXL_HAS_INT_TILES
    if (left >= (low_bits == kIntTileLowBits ? 1 : kIntTileMinRows)) {
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

// y[count][16] = activation(y) * ups.
static void gate_values(Gate gate, int count, const float (*ups)[kPanel], float (*y)[kPanel]) {
    with_activation(gate, [&](auto active) {
        for (int i = 0; i < count; ++i) {
            for (int c = 0; c < kPanel; c += kLanes) {
                store(y[i] + c, mul(active(load(y[i] + c)), load(ups[i] + c)));
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
    alignas(64) float y[kTileRowsOut][kPanel];
    for (int64_t panel = panels.first; panel < panels.last; panel += 2) {
        const int64_t side = smaller(2, panels.last - panel);
        for (int64_t row = rows.first; row < rows.last;) {
            with_tile(rows.last - row, side, low_bits, [&](auto&& product, int count, int wide) {
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

// Chooses 12-bit activations for parts whose product runs in the AMX tiles for narrow codes; other
// parts keep 16 bits. The choice depends on the part alone, not on the parts it is joined with. The
// exception is a gate and its up projection, which share their tiles and therefore one width.
static void choose_low_bits(
    [[maybe_unused]] const QuantLinearArgs& args, [[maybe_unused]] int* low_bits
) {
#if EXL_HAS_INT_TILES
    if (args.m < kIntTileMinRows || args.is_batch_invariant) return;
    for (int p = 0; p < args.count; ++p) {
        if (has_narrow_codes(*args.parts[p])) low_bits[p] = kIntTileLowBits;
    }
    if (args.epilogue == Epilogue::gated && low_bits[0] != low_bits[1]) {
        low_bits[0] = low_bits[1] = kLowBits;
    }
#endif
}

static void integer_product(ThreadPool& pool, const QuantLinearArgs& args) {
    Acts acts[kMaxParts];
    int low_bits[kMaxParts] = {kLowBits, kLowBits, kLowBits};
    choose_low_bits(args, low_bits);
    quantize(pool, args, low_bits, acts);
    int64_t panels = 0;
    int64_t bytes = 0;
    for (int p = 0; p < args.count; ++p) {
        panels += args.parts[p]->panels();
        bytes += args.parts[p]->size_bytes;
    }
    const bool is_gated = args.epilogue == Epilogue::gated;
    if (is_gated) panels = args.parts[0]->panels();
    const int64_t threads = pool.threads();
    const int64_t rounds = smaller(8, larger(1, bytes / (threads * kItemBytes)));
    const int64_t splits = smaller(panels, threads * rounds);
    const int64_t row_blocks = ceil_div(args.m, kActRows);
    pool.parallel_for(splits * row_blocks, [&](int64_t item) {
        const Range rows{
            item % row_blocks * kActRows, smaller(args.m, (item % row_blocks + 1) * kActRows)
        };
        const int64_t split = item / row_blocks;
        const Range mine = share(panels, split, splits);
        if (is_gated) return gated_panels(args, acts, rows, mine);
        int64_t before = 0;
        int64_t column = 0;
        for (int p = 0; p < args.count; ++p) {
            const int64_t count = args.parts[p]->panels();
            const Range part{larger(mine.first - before, 0), smaller(mine.last - before, count)};
            if (part.first < part.last) part_panels(args, acts, p, rows, part, column);
            before += count;
            column += args.parts[p]->n;
        }
    });
}

void quant_linear(ThreadPool& pool, const QuantLinearArgs& args) {
    if (args.m == 0) return;
    for (int p = 0; p < args.count; ++p) {
        // Floats have no integer product.
        if (args.parts[p]->values == Values::e4m3) return quant_prefill(pool, args);
    }
#if EXL_HAS_INT_TILES || !EXL_HAS_BYTE_DOT
    if (args.m > kIntegerRows && !args.is_batch_invariant) return quant_prefill(pool, args);
#endif
    integer_product(pool, args);
}

}  // namespace exl::EXL_ISA

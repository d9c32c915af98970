// y = x @ w for quantized w, in integers; where floats are faster for many rows, these go to
// quant_prefill.cpp.
//
// Contract   include/exl/ops/quantized.h, which draws the layout.
// Integers   x is rounded once to 16-bit integers, each span of up to 128 stored rows relative to
//            its largest value; codes meet them in integer dot products, exact within a span; then
//            scale, offset and the span's own scale apply in fp32. 8 bits would do for speed, but
//            not for the results: SmolLM2 moves by 2.7e-3 (mean KL divergence) with 8-bit blocks of
//            32, by 5e-6 with this.
// Mapping    A work item is some panels, read as one stream of codes and one of scales; every
//            column is summed by one thread in one order, whatever the number of threads.
#include "cpu/activation.h"
#include "cpu/quant_acts.h"
#include "cpu/quant_prefill.h"

namespace exl::EXL_ISA {

constexpr int kVecs = static_cast<int>(kPanel) / kLanes;
// How far ahead of use the streams of codes and of scales are asked for.
constexpr int64_t kCodesAhead = 4096;
constexpr int64_t kGridAhead = 512;
// Work items: several a thread where there is much to read, and no less than this each.
constexpr int64_t kItemBytes = 256 << 10;
// Rows whose integers stay in L2 while panels pass over them.
constexpr int64_t kActRows = 128;
// Up to here integers cost less than making floats of the codes. Measured at k = 576, n = 3072, two
// cores: byte dot products 420 GFLOP/s at any number of rows, and AMX 490 at 16, 1150 at 64, 1370 at
// 512; without either, words 220 and fp32 300.
#if defined(__AMX_BF16__)
constexpr int64_t kIntegerRows = 12;
#elif !EXL_HAS_BYTE_DOT
constexpr int64_t kIntegerRows = 8;
#endif

static Vec load_grid(const void* grid, DType dtype, int64_t index) {
    return dtype == DType::f32 ? load(static_cast<const float*>(grid) + index)
                               : load(static_cast<const Half*>(grid) + index);
}

static inline void ask_for_grids(const QuantMatrix& w, int64_t at) {
    const int64_t size = w.scale_dtype == DType::f32 ? 4 : 2;
    prefetch(static_cast<const uint8_t*>(w.scales) + at * size + kGridAhead);
    if (w.offset == Offset::middle) return;
    const int64_t offset_size = w.offset == Offset::zeros ? 1 : size;
    prefetch(static_cast<const uint8_t*>(w.offsets) + at * offset_size + kGridAhead);
}

// One span of kLanes columns of P panels for R rows: exact integer sums.
template <int Bits, int R, int P>
static inline __attribute__((always_inline)) void span_product(const uint8_t* codes,
                                                               int64_t panel_bytes, int64_t blocks,
                                                               const uint8_t* act,
                                                               int64_t row_bytes,
                                                               DotSum (&sums)[P][R]) {
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
            for (int64_t line = 0; line < Bits; ++line) {
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
        codes += Bits * 4 * kPanel;
        act += kActBlock;
    }
}

// y += the span's sums, with scale and offset; `at` is the group's place in the grids.
template <int Bits, int R>
static inline void apply_scales(const QuantMatrix& w, int64_t at, const DotSum (&sums)[R],
                                const Acts& acts, int64_t span, float* y) {
    const Vec scale = load_grid(w.scales, w.scale_dtype, at);
    const int32_t middle = w.offset == Offset::middle ? 1 << (Bits - 1) : 0;
    Codes zeros = zero_codes();
    Vec minimum = set1(0.0f);
    if (w.offset == Offset::zeros) {
        zeros = load_zeros(static_cast<const uint8_t*>(w.offsets) + at);
    } else if (w.offset == Offset::minimums) {
        minimum = load_grid(w.offsets, w.scale_dtype, at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const int32_t sum = acts.sums[span + r * acts.spans];
        const Vec step = set1(acts.scales[span + r * acts.spans]);
        const Codes zero = w.offset == Offset::zeros ? mul_int(zeros, set_int(sum))
                                                     : set_int(middle * sum);
        Vec value = mul(to_float(sub_int(sums[r].total(), zero)), scale);
        value = fma(minimum, set1(static_cast<float>(sum)), value);
        store(y + r * kPanel, fma(value, step, load(y + r * kPanel)));
    }
}

template <int Bits, int R, int P>
static void run_product(const QuantMatrix& w, const GroupRun& run, int64_t panel, const Acts& acts,
                        int64_t row, float (*y)[kPanel]) {
    const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
    const uint8_t* act = acts.data + row * acts.row_bytes + run.first_block * kActBlock;
    int64_t span = row * acts.spans + run.first_span;
    for (int64_t group = 0; group < run.groups; ++group) {
        const int64_t at = w.scale_index(panel) + (run.first_group + group) * kPanel;
        for (int p = 0; p < P; ++p) ask_for_grids(w, at + p * w.groups * kPanel);
        for (int64_t first = 0; first < run.blocks; first += kSpanBlocks, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - first);
#pragma GCC unroll 1
            for (int v = 0; v < kVecs; ++v) {
                DotSum sums[P][R];
                span_product<Bits, R, P>(codes + v * kCodeBytes, w.panel_bytes, blocks, act,
                                         acts.row_bytes, sums);
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p) {
                    apply_scales<Bits, R>(w, at + p * w.groups * kPanel + v * kLanes, sums[p], acts,
                                          span, y[p * R] + v * kLanes);
                }
            }
            codes += blocks * Bits * 4 * kPanel;
            act += blocks * kActBlock;
        }
    }
}

// Columns of P panels for R rows, y[P][R][16].
template <int R, int P>
static void panel_product(const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row,
                          float (*y)[kPanel]) {
    for (int p = 0; p < P; ++p) {
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < kVecs; ++v) {
                const int64_t at = (panel + p) * kPanel + v * kLanes;
                store(y[p * R + r] + v * kLanes, w.bias != nullptr ? load(w.bias + at) : set1(0.0f));
            }
        }
    }
    for (const GroupRun& run : w.runs) {
        switch (run.bits) {
            case 2: run_product<2, R, P>(w, run, panel, acts, row, y); break;
            case 3: run_product<3, R, P>(w, run, panel, acts, row, y); break;
            case 4: run_product<4, R, P>(w, run, panel, acts, row, y); break;
            case 5: run_product<5, R, P>(w, run, panel, acts, row, y); break;
            case 6: run_product<6, R, P>(w, run, panel, acts, row, y); break;
            default: run_product<8, R, P>(w, run, panel, acts, row, y); break;
        }
    }
}

// Tiles of rows and panels: with_tile<Tile>(rows, panels, fn) runs fn<R, P>() for the largest tile
// that fits. Sums of R rows and P panels stay in registers; panels side by side are read as streams
// side by side and share the broadcasts of x.
template <class Fn>
static inline void with_tile(int64_t rows, int64_t panels, Fn&& fn) {
    if constexpr (kTileSums >= 12) {
        if (rows >= 6 && panels >= 2) return fn.template operator()<6, 2>();
    }
    if constexpr (kTileSums >= 8) {
        if (rows >= 4 && panels >= 2) return fn.template operator()<4, 2>();
    }
    if constexpr (kTileSums >= 4) {
        if (rows >= 4) return fn.template operator()<4, 1>();
        if (rows >= 3) return fn.template operator()<3, 1>();
    }
    if (rows >= 2) return fn.template operator()<2, 1>();
    if constexpr (kTileSums >= 4) {
        if (panels >= 2) return fn.template operator()<1, 2>();
    }
    fn.template operator()<1, 1>();
}

static void gate(Gate kind, float* value, const float* up) {
    for (int v = 0; v < kVecs; ++v) {
        const Vec x = load(value + v * kLanes);
        const Vec active = kind == Gate::silu ? silu(x) : gelu_tanh(x);
        store(value + v * kLanes, mul(active, load(up + v * kLanes)));
    }
}

// values[R][16] of one panel, to rows `row` .. of y.
static void write_rows(const QuantLinearArgs& args, int64_t row, int rows, int64_t column,
                       int64_t columns, const float (*values)[kPanel]) {
    for (int r = 0; r < rows; ++r) {
        float* to = args.y + (row + r) * args.y_stride + column;
        for_lanes(columns, [&](int64_t i, int count) {
            Vec value = load(values[r] + i);
            if (args.epilogue == Epilogue::add) value = add(value, load_some(to + i, count));
            store_some(to + i, value, count);
        });
    }
}

struct Range {
    int64_t first, last;
};

// Panels of one part. They are the outer loop: their codes stay in the cache while the tiles of
// rows pass over them.
static void part_panels(const QuantLinearArgs& args, const Acts* acts, int part, Range rows,
                        Range panels, int64_t first_column) {
    const QuantMatrix& w = *args.parts[part];
    alignas(64) float y[kTileSums][kPanel];
    for (int64_t panel = panels.first; panel < panels.last; panel += 2) {
        const int64_t side = smaller(2, panels.last - panel);
        for (int64_t row = rows.first; row < rows.last;) {
            with_tile(rows.last - row, side, [&]<int R, int P>() {
                for (int64_t p = 0; p < side; p += P) {
                    panel_product<R, P>(w, panel + p, acts[part], row, y);
                    for (int q = 0; q < P; ++q) {
                        const int64_t column = (panel + p + q) * kPanel;
                        write_rows(args, row, R, first_column + column,
                                   smaller(kPanel, w.n - column), y + q * R);
                    }
                }
                row += R;
            });
        }
    }
}

static void gated_panels(const QuantLinearArgs& args, const Acts* acts, Range rows,
                         Range panels) {
    alignas(64) float gates[kTileSums][kPanel];
    alignas(64) float ups[kTileSums][kPanel];
    for (int64_t panel = panels.first; panel < panels.last; panel += 2) {
        const int64_t side = smaller(2, panels.last - panel);
        for (int64_t row = rows.first; row < rows.last;) {
            with_tile(rows.last - row, side, [&]<int R, int P>() {
                for (int64_t p = 0; p < side; p += P) {
                    panel_product<R, P>(*args.parts[0], panel + p, acts[0], row, gates);
                    panel_product<R, P>(*args.parts[1], panel + p, acts[1], row, ups);
                    for (int i = 0; i < R * P; ++i) gate(args.gate, gates[i], ups[i]);
                    for (int q = 0; q < P; ++q) {
                        const int64_t column = (panel + p + q) * kPanel;
                        write_rows(args, row, R, column,
                                   smaller(kPanel, args.parts[0]->n - column), gates + q * R);
                    }
                }
                row += R;
            });
        }
    }
}

static void integer_product(ThreadPool& pool, const QuantLinearArgs& args) {
    Acts acts[kMaxParts];
    quantize(pool, args, acts);
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
        const Range rows{item % row_blocks * kActRows,
                         smaller(args.m, (item % row_blocks + 1) * kActRows)};
        const int64_t split = item / row_blocks;
        const Range mine{panels * split / splits, panels * (split + 1) / splits};
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
#if defined(__AMX_BF16__) || !EXL_HAS_BYTE_DOT
    if (args.m > kIntegerRows) return quant_prefill(pool, args);
#endif
    integer_product(pool, args);
}

}  // namespace exl::EXL_ISA

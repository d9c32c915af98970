// y = x @ w for quantized w: few rows of x in integers; many rows go to quant_prefill.cpp.
//
// Contract   include/exl/ops/quantized.h, which draws the layout.
// Few rows   x is rounded once to 16-bit integers, each span of up to 128 stored rows relative to
//            its largest value; codes meet them in integer dot products, exact within a span; then
//            scale, offset and the span's own scale apply in fp32. 8 bits would do for speed, but
//            not for the results: SmolLM2 moves by 2.7e-3 (mean KL divergence) with 8-bit blocks of
//            32, by 5e-6 with this.
// Mapping    A work item is some panels, read as one stream of codes and one of scales; every
//            column is summed by one thread in one order, whatever the number of threads.
#include "cpu/activation.h"
#include "cpu/ops.h"
#include "cpu/quant_prefill.h"
#include "cpu/quant_vec.h"

namespace exl::EXL_ISA {

constexpr int kVecs = static_cast<int>(kPanel) / kLanes;
constexpr float kLargestAct = 32512.0f;  // 127 * 256, so that the high part fits a signed byte
constexpr int64_t kSpanRows = kSpanBlocks * kBlockRows;
// How far ahead of use the stream of codes is asked for.
constexpr int64_t kCodesAhead = 2048;
// Work items: several a thread where there is much to read, and no less than this each.
constexpr int64_t kItemBytes = 48 << 10;

// x in integers, for one part.
struct Acts {
    const uint8_t* data;  // [m] rows of row_bytes
    int64_t row_bytes;
    const float* scales;  // [m][spans]
    const int32_t* sums;  // [m][spans] of the integers
    int64_t spans;
};

struct SpanAct {
    float scale;
    int32_t sum;
};

// Rounds up to kSpanRows values, a whole number of blocks.
static SpanAct quantize_span(const float* x, int64_t count, uint8_t* act) {
    uint32_t largest = 0;  // of the bits without sign: NaN and infinity are above all numbers
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits = 0;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude = 0.0f;
    __builtin_memcpy(&magnitude, &largest, 4);
    const bool is_finite = largest < 0x7f800000u;
    // Below 1e-33 the inverse would overflow; what is so small is rounded more coarsely.
    const float inverse = is_finite ? kLargestAct / (magnitude > 1e-33f ? magnitude : 1e-33f) : 0.0f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer below
    int32_t q[kSpanRows];
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float shifted = x[i] * inverse + kRound;
        int32_t bits = 0;
        __builtin_memcpy(&bits, &shifted, 4);
        q[i] = is_finite ? bits - 0x4b400000 : 0;
        sum += q[i];
    }
    for (int64_t b = 0; b < count / kBlockRows; ++b) {
        store_act(q + b * kBlockRows, act + b * kActBlock);
    }
    // NaN reaches every output of the row, as a NaN or an infinity in x should.
    const float scale = is_finite ? (magnitude > 1e-33f ? magnitude : 1e-33f) / kLargestAct
                                  : __builtin_nanf("");
    return {scale, sum};
}

static void quantize_row(const QuantMatrix& w, const float* x, uint8_t* act, float* scales,
                         int32_t* sums) {
    const int32_t* order = w.order.empty() ? nullptr : w.order.data();
    int64_t block = 0;
    int64_t span = 0;
    float gathered[kSpanRows];
    for (const GroupRun& run : w.runs) {
        for (int64_t i = 0; i < run.groups * run.spans; ++i, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - i % run.spans * kSpanBlocks);
            const float* from = x + block * kBlockRows;
            if (order != nullptr) {
                const int32_t* features = order + block * kBlockRows;
                for (int64_t r = 0; r < blocks * kBlockRows; ++r) {
                    gathered[r] = features[r] < 0 ? 0.0f : x[features[r]];
                }
                from = gathered;
            }
            const SpanAct done = quantize_span(from, blocks * kBlockRows, act + block * kActBlock);
            scales[span] = done.scale;
            sums[span] = done.sum;
            block += blocks;
        }
    }
}

static Vec load_grid(const void* grid, DType dtype, int64_t index) {
    return dtype == DType::f32 ? load(static_cast<const float*>(grid) + index)
                               : load(static_cast<const Half*>(grid) + index);
}

// One span of kLanes columns for R rows: exact integer sums, then scale and offset.
template <int Bits, int R>
static inline __attribute__((always_inline)) void span_product(const uint8_t* codes, int64_t blocks,
                                                               const uint8_t* act,
                                                               int64_t row_bytes,
                                                               DotSum (&sums)[R]) {
    for (int64_t b = 0; b < blocks; ++b) {
        prefetch(codes + kCodesAhead);
        unrolled<kBlockRows / 4>([&]<int Step>() __attribute__((always_inline)) {
            const Codes step = block_codes<Bits, Step>(codes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r].template add<Step>(step, act + r * row_bytes);
        });
        for (int64_t line = 1; line < Bits; ++line) prefetch(codes + kCodesAhead + 64 * line);
        codes += Bits * 4 * kPanel;
        act += kActBlock;
    }
}

template <int Bits, int R>
static void run_product(const QuantMatrix& w, const GroupRun& run, int64_t panel, const Acts& acts,
                        int64_t row, float (*y)[kPanel]) {
    const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
    const uint8_t* act = acts.data + row * acts.row_bytes + run.first_block * kActBlock;
    int64_t span = row * acts.spans + run.first_span;
    const int32_t middle = w.offset == Offset::middle ? 1 << (Bits - 1) : 0;
    for (int64_t group = 0; group < run.groups; ++group) {
        const int64_t at = w.scale_index(panel) + (run.first_group + group) * kPanel;
        for (int64_t first = 0; first < run.blocks; first += kSpanBlocks, ++span) {
            const int64_t blocks = smaller(kSpanBlocks, run.blocks - first);
#pragma GCC unroll 1
            for (int v = 0; v < kVecs; ++v) {
                DotSum sums[R];
                span_product<Bits, R>(codes + v * kCodeBytes, blocks, act, acts.row_bytes, sums);
                const Vec scale = load_grid(w.scales, w.scale_dtype, at + v * kLanes);
                Codes zeros = zero_codes();
                Vec minimum = set1(0.0f);
                if (w.offset == Offset::zeros) {
                    zeros = load_zeros(static_cast<const uint8_t*>(w.offsets) + at + v * kLanes);
                } else if (w.offset == Offset::minimums) {
                    minimum = load_grid(w.offsets, w.scale_dtype, at + v * kLanes);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const int32_t sum = acts.sums[span + r * acts.spans];
                    const Vec step = set1(acts.scales[span + r * acts.spans]);
                    const Codes zero = w.offset == Offset::zeros ? mul_int(zeros, set_int(sum))
                                                                 : set_int(middle * sum);
                    const Codes centered = sub_int(sums[r].total(), zero);
                    Vec value = mul(to_float(centered), scale);
                    value = fma(minimum, set1(static_cast<float>(sum)), value);
                    float* to = y[r] + v * kLanes;
                    store(to, fma(value, step, load(to)));
                }
            }
            codes += blocks * Bits * 4 * kPanel;
            act += blocks * kActBlock;
        }
    }
}

// Columns of one panel for R rows, y[R][16].
template <int R>
static void panel_product(const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row,
                          float (*y)[kPanel]) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecs; ++v) {
            const Vec start = w.bias != nullptr ? load(w.bias + panel * kPanel + v * kLanes) : set1(0.0f);
            store(y[r] + v * kLanes, start);
        }
    }
    for (const GroupRun& run : w.runs) {
        switch (run.bits) {
            case 2: run_product<2, R>(w, run, panel, acts, row, y); break;
            case 3: run_product<3, R>(w, run, panel, acts, row, y); break;
            case 4: run_product<4, R>(w, run, panel, acts, row, y); break;
            case 5: run_product<5, R>(w, run, panel, acts, row, y); break;
            case 6: run_product<6, R>(w, run, panel, acts, row, y); break;
            default: run_product<8, R>(w, run, panel, acts, row, y); break;
        }
    }
}

template <int R, class Fn>
static inline void with_few_rows(int64_t rows, Fn&& fn) {
    if constexpr (R > 1) {
        if (rows < R) return with_few_rows<(R > 4 ? 4 : R - 1)>(rows, fn);
    }
    fn.template operator()<R>();
}

// All rows of one panel; `done(row, rows, values)` gets them tile by tile.
template <class Done>
static inline void panel_rows(const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t m,
                              Done&& done) {
    alignas(64) float y[kTileFew][kPanel];
    for (int64_t row = 0; row < m;) {
        with_few_rows<kTileFew>(m - row, [&]<int R>() {
            panel_product<R>(w, panel, acts, row, y);
            done(row, R, y);
            row += R;
        });
    }
}

static void gate(Gate kind, float* value, const float* up) {
    for (int v = 0; v < kVecs; ++v) {
        const Vec x = load(value + v * kLanes);
        const Vec active = kind == Gate::silu ? silu(x) : gelu_tanh(x);
        store(value + v * kLanes, mul(active, load(up + v * kLanes)));
    }
}

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

static void one_panel(const QuantLinearArgs& args, const Acts* acts, int part, int64_t panel,
                      int64_t first_column) {
    const QuantMatrix& w = *args.parts[part];
    const int64_t column = panel * kPanel;
    const int64_t columns = smaller(kPanel, w.n - column);
    panel_rows(w, panel, acts[part], args.m, [&](int64_t row, int rows, float (*y)[kPanel]) {
        write_rows(args, row, rows, first_column + column, columns, y);
    });
}

static void one_gated_panel(const QuantLinearArgs& args, const Acts* acts, int64_t panel) {
    const QuantMatrix& up = *args.parts[1];
    const int64_t column = panel * kPanel;
    const int64_t columns = smaller(kPanel, up.n - column);
    panel_rows(*args.parts[0], panel, acts[0], args.m,
               [&](int64_t row, int rows, float (*gates)[kPanel]) {
        alignas(64) float ups[kTileFew][kPanel];
        with_few_rows<kTileFew>(rows, [&]<int R>() {
            panel_product<R>(up, panel, acts[1], row, ups);
        });
        for (int r = 0; r < rows; ++r) gate(args.gate, gates[r], ups[r]);
        write_rows(args, row, rows, column, columns, gates);
    });
}

static bool has_same_input(const QuantMatrix& a, const QuantMatrix& b) {
    if (!a.order.empty() || !b.order.empty() || a.runs.size() != b.runs.size()) return false;
    for (size_t i = 0; i < a.runs.size(); ++i) {
        if (a.runs[i].rows != b.runs[i].rows || a.runs[i].groups != b.runs[i].groups) return false;
    }
    return true;
}

// x in integers for every part; parts that read the same input share one copy.
static void quantize(ThreadPool& pool, const QuantLinearArgs& args, Acts* acts) {
    int64_t bytes[kMaxParts] = {};
    int64_t total = 0;
    int source[kMaxParts];
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        source[p] = p;
        for (int q = p - 1; q >= 0; --q) {
            if (has_same_input(w, *args.parts[q])) source[p] = q;
        }
        bytes[p] = source[p] == p ? args.m * (w.blocks * kActBlock + ceil_div(w.spans, 16) * 16 * 8) : 0;
        total += bytes[p];
    }
    auto* room = static_cast<uint8_t*>(thread_scratch(2, total));
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        if (source[p] != p) {
            acts[p] = acts[source[p]];
            continue;
        }
        const int64_t row_bytes = w.blocks * kActBlock;
        uint8_t* data = room;
        auto* scales = reinterpret_cast<float*>(room + args.m * row_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + args.m * ceil_div(w.spans, 16) * 16);
        room += bytes[p];
        acts[p] = {data, row_bytes, scales, sums, w.spans};
        const int64_t per_item = larger(1, kValuesPerChunk / w.k);
        pool.parallel_for(ceil_div(args.m, per_item), [&](int64_t item) {
            const int64_t last = smaller(args.m, (item + 1) * per_item);
            for (int64_t row = item * per_item; row < last; ++row) {
                quantize_row(w, args.x + row * args.x_stride, data + row * row_bytes,
                             scales + row * w.spans, sums + row * w.spans);
            }
        });
    }
}

static void few_rows(ThreadPool& pool, const QuantLinearArgs& args) {
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
    const int64_t items = smaller(panels, threads * rounds);
    pool.parallel_for(items, [&](int64_t item) {
        const int64_t last = panels * (item + 1) / items;
        for (int64_t panel = panels * item / items; panel < last; ++panel) {
            if (is_gated) {
                one_gated_panel(args, acts, panel);
                continue;
            }
            int part = 0;
            int64_t before = 0;
            int64_t column = 0;
            while (panel - before >= args.parts[part]->panels()) {
                before += args.parts[part]->panels();
                column += args.parts[part]->n;
                ++part;
            }
            one_panel(args, acts, part, panel - before, column);
        }
    });
}

void quant_linear(ThreadPool& pool, const QuantLinearArgs& args) {
    // Up to here one pass over the codes, again for each tile of rows, costs less than making
    // floats of them.
    constexpr int64_t kFewRows = kTileFew == 8 ? 32 : 16;
    if (args.m == 0) return;
    if (args.m <= kFewRows) {
        few_rows(pool, args);
    } else {
        quant_prefill(pool, args);
    }
}

}  // namespace exl::EXL_ISA

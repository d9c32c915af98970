// y = x @ w for quantized w and many rows of x: weights become numbers that stay in the cache.
//
// Contract   include/exl/ops/quantized.h.
// Used for   more rows than the integer products of quant_linear.cpp are good for.
// Numbers    by instruction set: bf16 in AMX tiles (amx), or fp32. See quant_tiles_amx.h and
//            quant_tiles_fp32.h. Where byte dot products are fast they take any number of rows. Dot
//            products of bf16 pairs are not used: the Intel processors measured start one every two
//            cycles, so that their peak is half of fp32's.
// Blocks     x goes through in passes of up to kPassRows rows, packed in stored order in units of
//            kUnitRows. A strip is two panels: neighbors, or a gate and its up. k is cut into
//            chunks of up to kChunkBlocks blocks; the weights of one chunk of one strip are made,
//            and all units pass over them:
//
//                  chunk of k              strip
//            units [ x  x ... ]   chunk of [ w w ]      sums [unit][32] per strip, in scratch while
//                  [ x  x ... ]       k    [ w w ]      there are chunks to come
//
// Mapping    A work item is some strips and, where strips are few, some of the units. Every sum
//            runs over k in one order, so results do not depend on the number of threads.
// Accuracy   fp32 sums. fp32: products of fp32 weights. bf16: weights and x rounded once each.
#include "cpu/activation.h"
#include "cpu/quant_prefill.h"
#if defined(__AMX_BF16__)
#include "cpu/quant_tiles_amx.h"
#else
#include "cpu/quant_tiles_fp32.h"
#endif

namespace exl::EXL_ISA {

// Making the weights costs as much as multiplying some 40 rows with AMX, so little of a full pass.
constexpr int64_t kPassRows = 512;
// Strips of a work item share what they read of x; their sums take up to 512 KiB. 8 instead of 4:
// 980 instead of 870 GFLOP/s at k = n = 4096 (AMX, one core).
constexpr int64_t kItemStrips = 8;
// Scratch slots.
constexpr int kPackedSlot = 4;
constexpr int kWeightSlot = 5;
constexpr int kSumSlot = 6;

// One panel and the activations that meet it.
struct Side {
    const QuantMatrix* w;
    int64_t panel;
    const Element* packed;  // [unit][block]; see block_elements
};

struct Strip {
    Side sides[2];
    int count;
    int64_t column;  // of y
    int64_t columns;
};

struct Pass {
    const QuantLinearArgs& args;
    int64_t first_row;
    int64_t rows;
    const Element* packed[kMaxParts];

    int64_t units() const { return ceil_div(rows, kUnitRows); }
    int rows_of(int64_t unit) const {
        return static_cast<int>(smaller(kUnitRows, rows - unit * kUnitRows));
    }
};

static bool is_gated(const QuantLinearArgs& args) { return args.epilogue == Epilogue::gated; }

static int64_t strips_of(const QuantMatrix& w) { return ceil_div(w.panels(), 2); }

static int64_t count_strips(const QuantLinearArgs& args) {
    if (is_gated(args)) return args.parts[0]->panels();
    int64_t strips = 0;
    for (int p = 0; p < args.count; ++p) strips += strips_of(*args.parts[p]);
    return strips;
}

static Strip strip_at(const Pass& pass, int64_t strip) {
    const QuantLinearArgs& args = pass.args;
    if (is_gated(args)) {
        return {{{args.parts[0], strip, pass.packed[0]}, {args.parts[1], strip, pass.packed[1]}},
                2, strip * kPanel, smaller(kPanel, args.parts[0]->n - strip * kPanel)};
    }
    int p = 0;
    int64_t column = 0;
    for (; strip >= strips_of(*args.parts[p]); ++p) {
        strip -= strips_of(*args.parts[p]);
        column += args.parts[p]->n;
    }
    const QuantMatrix* w = args.parts[p];
    const int64_t panel = 2 * strip;
    return {{{w, panel, pass.packed[p]}, {w, panel + 1, pass.packed[p]}},
            panel + 1 < w->panels() ? 2 : 1, column + panel * kPanel,
            smaller(2 * kPanel, w->n - panel * kPanel)};
}

// x in stored order for every part; parts of the same order share one copy.
static void pack(ThreadPool& pool, Pass& pass) {
    const QuantLinearArgs& args = pass.args;
    const int64_t unit_count = pass.units();
    int64_t offsets[kMaxParts] = {};
    const QuantMatrix* distinct[kMaxParts];
    int copies = 0;
    int copy_of[kMaxParts] = {};
    int64_t elements = 0;
    for (int p = 0; p < args.count; ++p) {
        int copy = 0;
        while (copy < copies && !args.parts[p]->has_order_of(*distinct[copy])) ++copy;
        copy_of[p] = copy;
        if (copy < copies) continue;
        distinct[copies] = args.parts[p];
        offsets[copies++] = elements;
        elements += unit_count * args.parts[p]->blocks * block_elements(kUnitRows);
    }
    auto* packed = static_cast<Element*>(
        thread_scratch(kPackedSlot, elements * static_cast<int64_t>(sizeof(Element))));
    for (int p = 0; p < args.count; ++p) pass.packed[p] = packed + offsets[copy_of[p]];
    pool.parallel_for(copies * unit_count, [&](int64_t item) {
        const int64_t copy = item / unit_count;
        const int64_t unit = item % unit_count;
        const QuantMatrix& w = *distinct[copy];
        const int64_t row = pass.first_row + unit * kUnitRows;
        pack_unit(args.x + row * args.x_stride, args.x_stride, pass.rows_of(unit), w,
                  packed + offsets[copy] + unit * w.blocks * block_elements(kUnitRows));
    });
}

template <class Act>
static void write_gated(const Strip& strip, int rows, const float* acc, float* y, int64_t y_stride,
                        Act act) {
    const float* gate_bias = strip.sides[0].w->bias;
    const float* up_bias = strip.sides[1].w->bias;
    for (int r = 0; r < rows; ++r) {
        for_lanes(strip.columns, [&](int64_t c, int count) {
            Vec gate = load(acc + r * kAccColumns + c);
            Vec up = load(acc + r * kAccColumns + kPanel + c);
            if (gate_bias != nullptr) gate = add(gate, load(gate_bias + strip.column + c));
            if (up_bias != nullptr) up = add(up, load(up_bias + strip.column + c));
            store_some(y + r * y_stride + c, mul(act(gate), up), count);
        });
    }
}

static void write_unit(const Pass& pass, const Strip& strip, int64_t unit, const float* acc) {
    const QuantLinearArgs& args = pass.args;
    const int rows = pass.rows_of(unit);
    float* y = args.y + (pass.first_row + unit * kUnitRows) * args.y_stride + strip.column;
    if (is_gated(args)) {
        return with_activation(args.gate, [&](auto act) {
            write_gated(strip, rows, acc, y, args.y_stride, act);
        });
    }
    const Side& side = strip.sides[0];
    const float* bias = side.w->bias == nullptr ? nullptr : side.w->bias + side.panel * kPanel;
    for (int r = 0; r < rows; ++r) {
        for_lanes(strip.columns, [&](int64_t c, int count) {
            Vec value = load(acc + r * kAccColumns + c);
            if (bias != nullptr) value = add(value, load(bias + c));
            float* to = y + r * args.y_stride + c;
            if (args.epilogue == Epilogue::add) value = add(value, load_some(to, count));
            store_some(to, value, count);
        });
    }
}

static int64_t chunks_of(const QuantMatrix& w) { return ceil_div(w.blocks, kChunkBlocks); }

// Of both sides; one may have fewer.
static int64_t chunks_of(const Strip& strip) {
    const int64_t chunks = chunks_of(*strip.sides[0].w);
    return strip.count == 1 ? chunks : larger(chunks, chunks_of(*strip.sides[1].w));
}

// Blocks of a matrix: even shares, which depend on nothing else, so that parts joined give the sums
// of each alone. Empty past its last chunk.
static Range blocks_of(const QuantMatrix& w, int64_t chunk) {
    const int64_t chunks = chunks_of(w);
    return chunk < chunks ? share(w.blocks, chunk, chunks) : Range{w.blocks, w.blocks};
}

// One chunk of a strip's weights times one unit.
static void multiply(const Pass& pass, const Strip& strip, int64_t chunk, int64_t unit,
                     const Element* weights, float* acc) {
    const int rows = pass.rows_of(unit);
    const bool accumulate = chunk > 0;
    const auto at = [&](const Side& side, const Range& blocks) {
        return side.packed + unit * side.w->blocks * block_elements(kUnitRows) +
               blocks.first * block_elements(rows);
    };
    const Side* sides = strip.sides;
    if (strip.count == 2 && sides[0].packed == sides[1].packed) {
        const Range blocks = blocks_of(*sides[0].w, chunk);
        multiply_unit<2>(at(sides[0], blocks), rows, weights, blocks.count(), accumulate, acc);
        return;
    }
    for (int s = 0; s < strip.count; ++s) {
        const Range blocks = blocks_of(*sides[s].w, chunk);
        if (blocks.count() == 0) continue;
        multiply_unit<1>(at(sides[s], blocks), rows, weights, blocks.count(), accumulate,
                         acc + s * kPanel);
        weights += blocks.count() * kBlockRows * kPanel;
    }
}

// The weights of a chunk of a strip, one side after the other.
static void make_weights(const Strip& strip, int64_t chunk, Element* weights) {
    for (int s = 0; s < strip.count; ++s) {
        const Side& side = strip.sides[s];
        const Range blocks = blocks_of(*side.w, chunk);
        weights_of(*side.w, side.panel, blocks.first, blocks.last, weights);
        weights += blocks.count() * kBlockRows * kPanel;
    }
}

// Some strips and units of a pass.
static void item_product(const Pass& pass, const Range& strips, const Range& units) {
    constexpr int64_t kWeightElements = 2 * kChunkBlocks * kBlockRows * kPanel;
    auto* weights = static_cast<Element*>(
        thread_scratch(kWeightSlot, kWeightElements * static_cast<int64_t>(sizeof(Element))));
    int64_t chunks = 1;
    for (int p = 0; p < pass.args.count; ++p) {
        chunks = larger(chunks, chunks_of(*pass.args.parts[p]));
    }
    constexpr int64_t kSums = kUnitRows * kAccColumns;  // of one unit
    const int64_t kept = chunks == 1 ? 1 : strips.count() * units.count();
    auto* sums = static_cast<float*>(thread_scratch(kSumSlot, kept * kSums * 4));
    const TileScope scope;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t s = strips.first; s < strips.last; ++s) {
            const Strip strip = strip_at(pass, s);
            if (chunk >= chunks_of(strip)) continue;
            make_weights(strip, chunk, weights);
            for (int64_t unit = units.first; unit < units.last; ++unit) {
                const int64_t at = (s - strips.first) * units.count() + unit - units.first;
                float* acc = sums + (chunks == 1 ? 0 : at * kSums);
                multiply(pass, strip, chunk, unit, weights, acc);
                if (chunk + 1 == chunks_of(strip)) write_unit(pass, strip, unit, acc);
            }
        }
    }
}

static void run_pass(ThreadPool& pool, Pass& pass) {
    pack(pool, pass);
    const int64_t strips = count_strips(pass.args);
    const int64_t threads = pool.threads();
    // As many items for every thread, as far as that goes.
    int64_t columns = ceil_div(strips, kItemStrips);
    while (columns < strips && columns % threads != 0 && columns < 8 * threads) ++columns;
    const int64_t rows = columns >= threads ? 1 : smaller(pass.units(), ceil_div(threads, columns));
    pool.parallel_for(rows * columns, [&](int64_t item) {
        item_product(pass, share(strips, item / rows, columns),
                     share(pass.units(), item % rows, rows));
    });
}

void quant_prefill(ThreadPool& pool, const QuantLinearArgs& args) {
    // Passes of about as many rows, in whole units.
    const int64_t passes = ceil_div(args.m, kPassRows);
    const int64_t rows = ceil_div(ceil_div(args.m, passes), kUnitRows) * kUnitRows;
    for (int64_t row = 0; row < args.m; row += rows) {
        Pass pass{args, row, smaller(rows, args.m - row), {}};
        run_pass(pool, pass);
    }
}

}  // namespace exl::EXL_ISA

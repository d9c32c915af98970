// y = x @ w for quantized w and many rows of x: dequantizes blocks of w that stay in the cache.
//
// Contract   include/exl/ops/quant_linear.h.
// Used for   more rows than kIntegerRows in quant_linear.cpp, unless results must not depend on the
//            number of rows; and more than kFloatRows rows with FP8 (any number with AMX, if
//            results must not depend on it). Sets with fast byte dot products but without AMX use
//            integers otherwise, for any number of rows.
// Numbers    bf16 in AMX tiles (set amx, quant_tiles_amx.h), else fp32 (quant_tiles_fp32.h). Dot
//            products of bf16 pairs (AVX-512 BF16) are not used: the measured Intel processors
//            start one every two cycles, so that their peak is half of fp32's.
// Blocks     x is processed in passes of up to kPassRows rows, packed in stored order in row tiles
//            of kRowTile rows. A panel pair is two adjacent panels, or a panel of a gate and the
//            same panel of its up projection. k is divided into chunks of up to kChunkBlocks
//            blocks. The weights of one chunk of one pair are dequantized once and multiplied with
//            all row tiles:
//
//                  chunk of k              pair
//        row tiles [ x  x ... ]   chunk of [ w w ]      sums [row tile][32] per pair, kept in
//                  [ x  x ... ]       k    [ w w ]      scratch until the last chunk
//
// Mapping    A work item is a range of pairs. If there are too few pairs for all threads, it is a
//            range of row tiles as well. Every sum runs over k in one order, so results do not
//            depend on the number of threads.
// Accuracy   fp32 sums. fp32: products of fp32 weights. bf16: weights and x rounded once each.
#include "cpu/elementwise/activation.h"
#include "cpu/linear/quant_prefill.h"
#if defined(__AMX_BF16__)
#include "cpu/linear/quant_tiles_amx.h"
#else
#include "cpu/linear/quant_tiles_fp32.h"
#endif

namespace exl::EXL_ISA {

// Dequantizing the weights costs as much as multiplying about 40 rows with AMX, a small part of a
// pass of 512 rows.
constexpr int64_t kPassRows = 512;
// The pairs of a work item share their reads of x; their sums take up to 512 KiB. 8 pairs reach 980
// GFLOP/s at k = n = 4096 (AMX, one core), 4 pairs 870.
constexpr int64_t kItemPairs = 8;
// Scratch slots.
constexpr int kPackedSlot = 4;
constexpr int kWeightSlot = 5;
constexpr int kSumSlot = 6;

// One panel of a pair and the activations that it is multiplied with.
struct Side {
    const QuantMatrix* w;
    int64_t panel;
    const Element* packed;  // [row tile][block] of block_elements() elements
};

struct PanelPair {
    Side sides[2];
    int count;       // panels; 1 for an odd last panel
    int64_t column;  // first column in y
    int64_t columns;
};

struct Pass {
    const QuantLinearArgs& args;
    int64_t first_row;
    int64_t rows;
    const Element* packed[kMaxParts];

    int64_t tiles() const { return ceil_div(rows, kRowTile); }
    int rows_of(int64_t tile) const {
        return static_cast<int>(smaller(kRowTile, rows - tile * kRowTile));
    }
};

static bool is_gated(const QuantLinearArgs& args) { return args.epilogue == Epilogue::gated; }

static int64_t pairs_of(const QuantMatrix& w) { return ceil_div(w.panels(), 2); }

static int64_t count_pairs(const QuantLinearArgs& args) {
    if (is_gated(args)) return args.parts[0]->panels();
    int64_t pairs = 0;
    for (int p = 0; p < args.count; ++p) pairs += pairs_of(*args.parts[p]);
    return pairs;
}

static PanelPair pair_at(const Pass& pass, int64_t pair) {
    const QuantLinearArgs& args = pass.args;
    if (is_gated(args)) {
        return {
            {{args.parts[0], pair, pass.packed[0]}, {args.parts[1], pair, pass.packed[1]}},
            2,
            pair * kPanel,
            smaller(kPanel, args.parts[0]->n - pair * kPanel)
        };
    }
    int p = 0;
    int64_t column = 0;
    for (; pair >= pairs_of(*args.parts[p]); ++p) {
        pair -= pairs_of(*args.parts[p]);
        column += args.parts[p]->n;
    }
    const QuantMatrix* w = args.parts[p];
    const int64_t panel = 2 * pair;
    return {
        {{w, panel, pass.packed[p]}, {w, panel + 1, pass.packed[p]}},
        panel + 1 < w->panels() ? 2 : 1,
        column + panel * kPanel,
        smaller(2 * kPanel, w->n - panel * kPanel)
    };
}

// Packs x in stored order for every part. Parts with the same permutation share one copy.
static void pack(ThreadPool& pool, Pass& pass) {
    const QuantLinearArgs& args = pass.args;
    const int64_t tile_count = pass.tiles();
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
        elements += tile_count * args.parts[p]->blocks * block_elements(kRowTile);
    }
    auto* packed = static_cast<Element*>(
        thread_scratch(kPackedSlot, elements * static_cast<int64_t>(sizeof(Element)))
    );
    for (int p = 0; p < args.count; ++p) pass.packed[p] = packed + offsets[copy_of[p]];
    pool.parallel_for(copies * tile_count, [&](int64_t item) {
        const int64_t copy = item / tile_count;
        const int64_t tile = item % tile_count;
        const QuantMatrix& w = *distinct[copy];
        const int64_t row = pass.first_row + tile * kRowTile;
        pack_row_tile(
            args.x + row * args.x_stride, args.x_stride, pass.rows_of(tile), w,
            packed + offsets[copy] + tile * w.blocks * block_elements(kRowTile)
        );
    });
}

template <class Act>
static void write_gated(
    const PanelPair& pair, int rows, const float* acc, float* y, int64_t y_stride, Act act
) {
    const float* gate_bias = pair.sides[0].w->bias;
    const float* up_bias = pair.sides[1].w->bias;
    for (int r = 0; r < rows; ++r) {
        for_lanes(pair.columns, [&](int64_t c, int count) {
            Vec gate = load(acc + r * kAccColumns + c);
            Vec up = load(acc + r * kAccColumns + kPanel + c);
            if (gate_bias != nullptr) gate = add(gate, load(gate_bias + pair.column + c));
            if (up_bias != nullptr) up = add(up, load(up_bias + pair.column + c));
            store_some(y + r * y_stride + c, act(gate, up), count);
        });
    }
}

static void write_row_tile(
    const Pass& pass, const PanelPair& pair, int64_t tile, const float* acc
) {
    const QuantLinearArgs& args = pass.args;
    const int rows = pass.rows_of(tile);
    float* y = args.y + (pass.first_row + tile * kRowTile) * args.y_stride + pair.column;
    if (is_gated(args)) {
        return with_gate(args.gate, [&](auto act) {
            write_gated(pair, rows, acc, y, args.y_stride, act);
        });
    }
    const Side& side = pair.sides[0];
    const float* bias = side.w->bias == nullptr ? nullptr : side.w->bias + side.panel * kPanel;
    for (int r = 0; r < rows; ++r) {
        for_lanes(pair.columns, [&](int64_t c, int count) {
            Vec value = load(acc + r * kAccColumns + c);
            if (bias != nullptr) value = add(value, load(bias + c));
            float* to = y + r * args.y_stride + c;
            if (args.epilogue == Epilogue::add) value = add(value, load_some(to, count));
            store_some(to, value, count);
        });
    }
}

static int64_t chunks_of(const QuantMatrix& w) { return ceil_div(w.blocks, kChunkBlocks); }

// Number of chunks of a pair: that of the side with more.
static int64_t chunks_of(const PanelPair& pair) {
    const int64_t chunks = chunks_of(*pair.sides[0].w);
    return pair.count == 1 ? chunks : larger(chunks, chunks_of(*pair.sides[1].w));
}

// Range of blocks in a chunk of a matrix; empty past its last chunk. Chunks are even shares and
// depend on the matrix alone, so that a joined part gives the same sums as the part by itself.
static Range blocks_of(const QuantMatrix& w, int64_t chunk) {
    const int64_t chunks = chunks_of(w);
    return chunk < chunks ? share(w.blocks, chunk, chunks) : Range{w.blocks, w.blocks};
}

// Multiplies one row tile with the weights of one chunk of a pair.
static void multiply(
    const Pass& pass, const PanelPair& pair, int64_t chunk, int64_t tile, const Element* weights,
    float* acc
) {
    const int rows = pass.rows_of(tile);
    const bool accumulate = chunk > 0;
    const auto at = [&](const Side& side, const Range& blocks) {
        return side.packed + tile * side.w->blocks * block_elements(kRowTile) +
               blocks.first * block_elements(rows);
    };
    const Side* sides = pair.sides;
    if (pair.count == 2 && sides[0].packed == sides[1].packed) {
        const Range blocks = blocks_of(*sides[0].w, chunk);
        multiply_row_tile<2>(at(sides[0], blocks), rows, weights, blocks.count(), accumulate, acc);
        return;
    }
    for (int s = 0; s < pair.count; ++s) {
        const Range blocks = blocks_of(*sides[s].w, chunk);
        if (blocks.count() == 0) continue;
        multiply_row_tile<1>(
            at(sides[s], blocks), rows, weights, blocks.count(), accumulate, acc + s * kPanel
        );
        weights += blocks.count() * kBlockRows * kPanel;
    }
}

// Dequantizes the weights of one chunk of a pair, one side after the other.
static void make_weights(const PanelPair& pair, int64_t chunk, Element* weights) {
    for (int s = 0; s < pair.count; ++s) {
        const Side& side = pair.sides[s];
        const Range blocks = blocks_of(*side.w, chunk);
        weights_of(*side.w, side.panel, blocks.first, blocks.last, weights);
        weights += blocks.count() * kBlockRows * kPanel;
    }
}

// Computes one work item: ranges of pairs and of row tiles of a pass.
static void item_product(const Pass& pass, const Range& pairs, const Range& tiles) {
    constexpr int64_t kWeightElements = 2 * kChunkBlocks * kBlockRows * kPanel;
    auto* weights = static_cast<Element*>(
        thread_scratch(kWeightSlot, kWeightElements * static_cast<int64_t>(sizeof(Element)))
    );
    int64_t chunks = 1;
    for (int p = 0; p < pass.args.count; ++p) {
        chunks = larger(chunks, chunks_of(*pass.args.parts[p]));
    }
    constexpr int64_t kSums = kRowTile * kAccColumns;  // sums of one row tile
    const int64_t kept = chunks == 1 ? 1 : pairs.count() * tiles.count();
    auto* sums = static_cast<float*>(thread_scratch(kSumSlot, kept * kSums * 4));
    const TileScope scope;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t s = pairs.first; s < pairs.last; ++s) {
            const PanelPair pair = pair_at(pass, s);
            if (chunk >= chunks_of(pair)) continue;
            make_weights(pair, chunk, weights);
            for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
                const int64_t at = (s - pairs.first) * tiles.count() + tile - tiles.first;
                float* acc = sums + (chunks == 1 ? 0 : at * kSums);
                multiply(pass, pair, chunk, tile, weights, acc);
                if (chunk + 1 == chunks_of(pair)) write_row_tile(pass, pair, tile, acc);
            }
        }
    }
}

static void run_pass(ThreadPool& pool, Pass& pass) {
    pack(pool, pass);
    const int64_t pairs = count_pairs(pass.args);
    const int64_t threads = pool.threads();
    // The number of items is raised until it divides evenly among the threads, up to 8 per thread.
    int64_t columns = ceil_div(pairs, kItemPairs);
    while (columns < pairs && columns % threads != 0 && columns < 8 * threads) ++columns;
    const int64_t rows = columns >= threads ? 1 : smaller(pass.tiles(), ceil_div(threads, columns));
    pool.parallel_for(rows * columns, [&](int64_t item) {
        item_product(
            pass, share(pairs, item / rows, columns), share(pass.tiles(), item % rows, rows)
        );
    });
}

void quant_prefill(ThreadPool& pool, const QuantLinearArgs& args) {
    // All passes have about the same number of rows, in whole row tiles.
    const int64_t passes = ceil_div(args.m, kPassRows);
    const int64_t rows = ceil_div(ceil_div(args.m, passes), kRowTile) * kRowTile;
    for (int64_t row = 0; row < args.m; row += rows) {
        Pass pass{args, row, smaller(rows, args.m - row), {}};
        run_pass(pool, pass);
    }
}

}  // namespace exl::EXL_ISA

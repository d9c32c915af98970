// y[m, n] = x[m, k] @ w[n, k]^T and the rows of w, from one packed copy.
//
// Contract   include/exl/ops/linear.h, which draws the layout.
// Used for   m = 1: weights are read once and converted in registers; bound by memory.
//            m <= kTileRows: the same with one register tile of m rows.
//            above: each panel block is converted to fp32 once per kBlockRows rows and stays in
//            the cache while the tiles of x pass over it.
// Mapping    Threads share column blocks (and row blocks); every sum runs over k in one order, so
//            results do not depend on the number of threads.
// Accuracy   fp32 products and sums over k.
#include "cpu/ops.h"
#include "cpu/tile.h"

namespace exl::EXL_ISA {

// Steps along k per pass: 32 columns x 256 steps of fp32 are 32 KiB and share L1 with a tile of x.
constexpr int64_t kBlockSteps = 256;
// Rows that one conversion of a weight block serves; 256 rows x 256 steps are 256 KiB of L2.
constexpr int64_t kBlockRows = 256;
// Columns of a work item above one tile: 4 panels.
constexpr int64_t kBlockPanels = 4;
// Bytes of weights in a decode work item: about 4 us of reading, against 0.1 us to hand it out.
constexpr int64_t kDecodeItemBytes = 48 << 10;

// One row: four sums per panel hide the latency of the multiply-add.
template <class T>
static inline void one_row(const float* x, const T* b, int64_t k, const TileOut& out) {
    constexpr int kSums = 4;
    Vec sums[kSums][kPanelVecs];
    for (int u = 0; u < kSums; ++u) {
        for (int v = 0; v < kPanelVecs; ++v) sums[u][v] = set1(0.0f);
    }
    int64_t step = 0;
    for (; step + kSums <= k; step += kSums) {
#pragma GCC unroll 4
        for (int u = 0; u < kSums; ++u) {
            const Vec value = set1(x[step + u]);
#pragma GCC unroll 16
            for (int v = 0; v < kPanelVecs; ++v) {
                sums[u][v] = fma(value, load(b + (step + u) * kPanel + v * kLanes), sums[u][v]);
            }
        }
    }
    for (; step < k; ++step) {
        for (int v = 0; v < kPanelVecs; ++v) {
            sums[0][v] = fma(set1(x[step]), load(b + step * kPanel + v * kLanes), sums[0][v]);
        }
    }
    Vec total[1][kPanelVecs];
    for (int v = 0; v < kPanelVecs; ++v) {
        total[0][v] = add(add(sums[0][v], sums[1][v]), add(sums[2][v], sums[3][v]));
    }
    store_tile<1, 1>(total, out);
}

template <class T>
static void decode_one(ThreadPool& pool, const LinearArgs& args) {
    const PackedMatrix& w = *args.w;
    const T* weights = static_cast<const T*>(w.data);
    const int64_t panel_bytes = w.k * kPanel * static_cast<int64_t>(sizeof(T));
    const int64_t per_item = larger(1, kDecodeItemBytes / panel_bytes);
    const int64_t panels = w.panels();
    pool.parallel_for(ceil_div(panels, per_item), [&](int64_t item) {
        const int64_t last = smaller(panels, (item + 1) * per_item);
        for (int64_t panel = item * per_item; panel < last; ++panel) {
            const int64_t column = panel * kPanel;
            one_row(args.x, weights + column * w.k, w.k,
                    TileOut{args.y + column, w.n, w.n - column, false,
                            w.bias != nullptr ? w.bias + column : nullptr});
        }
    });
}

// 2 <= m <= kTileRows: weights go from memory through the conversion straight into the sums.
template <class T>
static void decode_few(ThreadPool& pool, const LinearArgs& args) {
    const PackedMatrix& w = *args.w;
    const int rows = static_cast<int>(args.m);
    float* packed_x = static_cast<float*>(thread_scratch(0, args.m * w.k * 4));
    pack_rows(args.x, args.x_stride, rows, w.k, packed_x);
    const T* weights = static_cast<const T*>(w.data);
    const int64_t panel_bytes = w.k * kPanel * static_cast<int64_t>(sizeof(T));
    const int64_t panels = w.panels();
    const int64_t per_item =
        larger(1, kDecodeItemBytes / (kTilePanels * panel_bytes)) * kTilePanels;
    pool.parallel_for(ceil_div(panels, per_item), [&](int64_t item) {
        const int64_t first = item * per_item;
        const int64_t column = first * kPanel;
        const TileOut out{args.y + column, w.n, w.n - column, false,
                          w.bias != nullptr ? w.bias + column : nullptr};
        with_rows<kTileRows>(rows, [&]<int R>() {
            tile_columns<R>(PackedRows<R>{packed_x}, weights + column * w.k, kPanel * w.k,
                            smaller(per_item, panels - first), w.k, out);
        });
    });
}

template <class T>
static inline void convert_block(const T* from, int64_t steps, float* to) {
    for (int64_t i = 0; i < steps * kPanel; i += kLanes) store(to + i, load(from + i));
}

// Rows [first_tile, last_tile) x kBlockPanels panels, over the whole of k.
template <class T>
static void block_product(const LinearArgs& args, const Tiling& tiling, const float* packed_x,
                          int64_t first_tile, int64_t last_tile, int64_t first_panel) {
    const PackedMatrix& w = *args.w;
    const T* weights = static_cast<const T*>(w.data);
    const int64_t panels = smaller(kBlockPanels, w.panels() - first_panel);
    const int64_t column = first_panel * kPanel;
    float* block =
        static_cast<float*>(thread_scratch(1, kBlockPanels * kPanel * kBlockSteps * 4));
    for (int64_t step = 0; step < w.k; step += kBlockSteps) {
        const int64_t steps = smaller(kBlockSteps, w.k - step);
        for (int64_t p = 0; p < panels; ++p) {
            convert_block(weights + ((first_panel + p) * w.k + step) * kPanel, steps,
                          block + p * steps * kPanel);
        }
        const bool is_last = step + steps == w.k;
        for (int64_t tile = first_tile; tile < last_tile; ++tile) {
            const int64_t row = tiling.first_row(tile);
            const int rows = tiling.rows_of(tile);
            const TileOut out{args.y + row * w.n + column, w.n, w.n - column, step > 0,
                              is_last && w.bias != nullptr ? w.bias + column : nullptr};
            with_rows<kTileRows>(rows, [&]<int R>() {
                tile_columns<R>(PackedRows<R>{packed_x + row * w.k + step * rows}, block,
                                steps * kPanel, panels, steps, out);
            });
        }
    }
}

template <class T>
static void prefill(ThreadPool& pool, const LinearArgs& args) {
    const PackedMatrix& w = *args.w;
    const Tiling tiling(args.m);
    float* packed_x = static_cast<float*>(thread_scratch(0, args.m * w.k * 4));
    pool.parallel_for(tiling.count, [&](int64_t tile) {
        const int64_t row = tiling.first_row(tile);
        pack_rows(args.x + row * args.x_stride, args.x_stride, tiling.rows_of(tile), w.k,
                  packed_x + row * w.k);
    });
    const int64_t row_blocks = ceil_div(args.m, kBlockRows);
    const int64_t column_blocks = ceil_div(w.panels(), kBlockPanels);
    pool.parallel_for(row_blocks * column_blocks, [&](int64_t item) {
        // Row blocks of one column block follow each other, so that its weights are still near.
        const int64_t block = item % row_blocks;
        block_product<T>(args, tiling, packed_x, tiling.count * block / row_blocks,
                         tiling.count * (block + 1) / row_blocks,
                         item / row_blocks * kBlockPanels);
    });
}

template <class T>
static void linear_of(ThreadPool& pool, const LinearArgs& args) {
    if (args.m == 1) {
        decode_one<T>(pool, args);
    } else if (args.m <= kTileRows) {
        decode_few<T>(pool, args);
    } else {
        prefill<T>(pool, args);
    }
}

void linear(ThreadPool& pool, const LinearArgs& args) {
    if (args.m == 0) return;
    switch (args.w->dtype) {
        case DType::f32: return linear_of<float>(pool, args);
        case DType::f16: return linear_of<Half>(pool, args);
        default: return linear_of<BFloat>(pool, args);
    }
}

template <class T>
static void embedding_of(ThreadPool& pool, const EmbeddingArgs& args) {
    const int64_t k = args.w->k;
    const int64_t per_item = larger(1, kValuesPerChunk / larger(1, k));
    pool.parallel_for(ceil_div(args.m, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.m, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const int64_t id = args.token_ids[row];
            const T* column = static_cast<const T*>(args.w->data) + id / kPanel * kPanel * k +
                              id % kPanel;
            T gathered[kLanes];
            for_lanes(k, [&](int64_t i, int count) {
                for (int j = 0; j < count; ++j) gathered[j] = column[(i + j) * kPanel];
                for (int j = count; j < kLanes; ++j) gathered[j] = T{};
                store_some(args.y + row * k + i, load(gathered), count);
            });
        }
    });
}

void embedding(ThreadPool& pool, const EmbeddingArgs& args) {
    switch (args.w->dtype) {
        case DType::f32: return embedding_of<float>(pool, args);
        case DType::f16: return embedding_of<Half>(pool, args);
        default: return embedding_of<BFloat>(pool, args);
    }
}

}  // namespace exl::EXL_ISA

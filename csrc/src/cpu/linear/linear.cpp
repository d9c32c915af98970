// y[m, n] = x[m, k] @ w[n, k]^T, and the embedding lookup in w; both read the same packed copy of
// w.
//
// Contract   include/exl/ops/linear.h, which draws the layout.
// Used for   m = 1: weights are read once and converted in registers; memory-bound.
//            m <= kTileRows: the same with one register tile of m rows.
//            larger m: each block of panels is converted to fp32 once per kPassRows rows and stays
//            in the cache while it is multiplied with all row tiles of x.
// Mapping    Threads share column blocks, in prefill row blocks too.
// Order      Every sum runs over blocks of kBlockSteps values of k. A block is summed from zero in
//            one chain of multiply-adds, then added to the output. This order is the same for every
//            m, so no bit of a row depends on the other rows, nor on the number of threads.
// Accuracy   fp32 products and sums over k.
#include "cpu/common/ops.h"
#include "cpu/common/tile.h"

namespace exl::EXL_ISA {

// Block sizes for m > kTileRows. A block of 8 panels x 384 steps of fp32 (192 KiB) stays in L2
// while the row tiles of up to 256 rows are multiplied with it. Each row tile (14 x 384, 21 KiB)
// stays in L1. Measured on one core with AVX-512 at m = 512, k = 576, n = 1536: 4 panels x 256
// steps give 170 GFLOP/s, 8 x 384 give 185, 8 x 768 the same.
constexpr int64_t kBlockPanels = 8;
constexpr int64_t kBlockSteps = 384;
constexpr int64_t kPassRows = 256;
// Bytes of weights in a decode work item. Reading them takes about 4 us, assigning the item to a
// thread 0.1 us.
constexpr int64_t kDecodeItemBytes = 48 << 10;

// The output of steps [first, last) of a block product: the first block overwrites y unless the call
// accumulates, the last one adds the bias.
static inline TileOut block_out(
    const LinearArgs& args, int64_t row, int64_t column, int64_t first, int64_t last
) {
    const PackedMatrix& w = *args.w;
    return {
        args.y + row * args.y_stride + column, args.y_stride, w.n - column,
        first > 0 || args.accumulate, last == w.k && w.bias != nullptr ? w.bias + column : nullptr
    };
}

// Multiplies one row with P panels, from `column` on. The panels are read as P parallel streams.
// This hides the latency of the multiply-add and keeps the hardware prefetcher busy.
template <int P, class T>
static inline void one_row(const LinearArgs& args, int64_t column) {
    const int64_t k = args.w->k;
    const T* b = static_cast<const T*>(args.w->data) + column * k;
    for (int64_t first = 0; first < k; first += kBlockSteps) {
        const int64_t last = smaller(k, first + kBlockSteps);
        Vec sums[1][P * kPanelVecs];
#pragma GCC unroll 32
        for (int v = 0; v < P * kPanelVecs; ++v) sums[0][v] = set1(0.0f);
        for (int64_t step = first; step < last; ++step) {
            const Vec value = set1(args.x[step]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const T* weights = b + (p * k + step) * kPanel;
#pragma GCC unroll 16
                for (int v = 0; v < kPanelVecs; ++v) {
                    Vec& sum = sums[0][p * kPanelVecs + v];
                    sum = fma(value, load(weights + v * kLanes), sum);
                }
            }
        }
        store_tile<1, P>(sums, block_out(args, 0, column, first, last));
    }
}

// Number of panels that one thread reads in parallel. Measured on one core with AVX-512 and weights
// in memory: at k = 576 (panels of 18 KiB) 4 streams reach 16.9 GB/s and 2 streams 16.4; at k =
// 1536 (48 KiB) 4 streams reach 16.3 GB/s and 2 streams 19.5. With AVX2 the registers hold the sums
// of two panels only.
constexpr int kManyStreams = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr int kFewStreams = kLanes >= 8 ? 2 : 1;
constexpr int64_t kManyStreamSteps = 1024;

template <int P, class T>
static void decode_one(ThreadPool& pool, const LinearArgs& args) {
    const PackedMatrix& w = *args.w;
    const int64_t panel_bytes = w.k * kPanel * static_cast<int64_t>(sizeof(T));
    const int64_t per_item = larger(1, kDecodeItemBytes / (P * panel_bytes)) * P;
    const int64_t panels = w.panels();
    pool.parallel_for(ceil_div(panels, per_item), [&](int64_t item) {
        const int64_t last = smaller(panels, (item + 1) * per_item);
        int64_t panel = item * per_item;
        const auto next = [&]<int N>() {
            one_row<N, T>(args, panel * kPanel);
            panel += N;
        };
        while (panel + P <= last) next.template operator()<P>();
        while (panel < last) next.template operator()<1>();
    });
}

// Product for 2 <= m <= kTileRows: weights are loaded, converted and multiplied in registers.
template <class T>
static void decode_rows(ThreadPool& pool, const LinearArgs& args) {
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
        const int64_t last_panel = smaller(panels, (item + 1) * per_item);
        with_rows<kTileRows>(rows, [&]<int R>() {
            for (int64_t panel = item * per_item; panel < last_panel; panel += kTilePanels) {
                const int64_t column = panel * kPanel;
                for (int64_t first = 0; first < w.k; first += kBlockSteps) {
                    const int64_t last = smaller(w.k, first + kBlockSteps);
                    tile_columns<R>(
                        PackedRows<R>{packed_x + first * R},
                        weights + column * w.k + first * kPanel, kPanel * w.k,
                        smaller(kTilePanels, last_panel - panel), last - first,
                        block_out(args, 0, column, first, last)
                    );
                }
            }
        });
    });
}

// Converts `steps` rows of a panel to fp32.
template <class T>
static inline void convert_block(const T* from, int64_t steps, float* to) {
    for (int64_t i = 0; i < steps * kPanel; i += kLanes) {
        prefetch(reinterpret_cast<const char*>(from + i) + kAheadBytes);
        store(to + i, load(from + i));
    }
}

// A block of outputs.
struct Block {
    int64_t first_tile, last_tile;    // row tiles
    int64_t first_panel, last_panel;  // column panels, at most kBlockPanels
};

// Computes one block of outputs, over the whole of k.
template <class T>
static void block_product(
    const LinearArgs& args, const Tiling& tiling, const float* packed_x, const Block& at
) {
    const PackedMatrix& w = *args.w;
    const T* weights = static_cast<const T*>(w.data);
    const int64_t panels = at.last_panel - at.first_panel;
    const int64_t column = at.first_panel * kPanel;
    float* block = static_cast<float*>(thread_scratch(1, kBlockPanels * kPanel * kBlockSteps * 4));
    for (int64_t step = 0; step < w.k; step += kBlockSteps) {
        const int64_t steps = smaller(kBlockSteps, w.k - step);
        for (int64_t p = 0; p < panels; ++p) {
            convert_block(
                weights + ((at.first_panel + p) * w.k + step) * kPanel, steps,
                block + p * steps * kPanel
            );
        }
        for (int64_t tile = at.first_tile; tile < at.last_tile; ++tile) {
            const int64_t row = tiling.first_row(tile);
            const int rows = tiling.rows_of(tile);
            const TileOut out = block_out(args, row, column, step, step + steps);
            with_rows<kTileRows>(rows, [&]<int R>() {
                tile_columns<R>(
                    PackedRows<R>{packed_x + row * w.k + step * rows}, block, steps * kPanel,
                    panels, steps, out
                );
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
        pack_rows(
            args.x + row * args.x_stride, args.x_stride, tiling.rows_of(tile), w.k,
            packed_x + row * w.k
        );
    });
    const int64_t row_blocks = ceil_div(args.m, kPassRows);
    // Column blocks consist of whole register tiles. Their number is raised until the blocks divide
    // evenly among the threads, or there are at least 8 per thread.
    const int64_t groups = ceil_div(w.panels(), kTilePanels);
    int64_t column_blocks = ceil_div(w.panels(), kBlockPanels);
    while (column_blocks < groups && row_blocks * column_blocks % pool.threads() != 0 &&
           row_blocks * column_blocks < 8 * pool.threads()) {
        ++column_blocks;
    }
    pool.parallel_for(row_blocks * column_blocks, [&](int64_t item) {
        // The row blocks of one column block are consecutive items, so that its weights are still
        // in the cache.
        const int64_t rows = item % row_blocks;
        const int64_t columns = item / row_blocks;
        const Block at{
            tiling.count * rows / row_blocks, tiling.count * (rows + 1) / row_blocks,
            groups * columns / column_blocks * kTilePanels,
            smaller(w.panels(), groups * (columns + 1) / column_blocks * kTilePanels)
        };
        block_product<T>(args, tiling, packed_x, at);
    });
}

template <class T>
static void linear_of(ThreadPool& pool, const LinearArgs& args) {
    if (args.m == 1 && args.w->k <= kManyStreamSteps) {
        decode_one<kManyStreams, T>(pool, args);
    } else if (args.m == 1) {
        decode_one<kFewStreams, T>(pool, args);
    } else if (args.m <= kTileRows) {
        decode_rows<T>(pool, args);
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
            const T* column =
                static_cast<const T*>(args.w->data) + id / kPanel * kPanel * k + id % kPanel;
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

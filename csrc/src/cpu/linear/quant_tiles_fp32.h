// Product of quant_prefill.cpp in fp32, for sets without bf16 tiles. Uses the register tiles of
// tile.h.
//
// Activations of a row tile of R rows are [block][32][R]; weights are panels of [row][16].
#pragma once

#include "cpu/linear/quant_dequant.h"
#include "cpu/common/tile.h"

namespace exl::EXL_ISA {

using Element = float;
constexpr int kRowTile = kTileRows;
constexpr int64_t kChunkBlocks = kFloatBlocks;

// Stands in for the tile configuration of amx.h; fp32 products need none.
struct TileScope {
    TileScope() {}
};

// Number of elements in one block of a packed row tile of `rows` rows.
static inline int64_t block_elements(int rows) { return rows * kBlockRows; }

static inline void pack_row_tile(
    const float* x, int64_t x_stride, int rows, const QuantMatrix& w, float* packed
) {
    if (w.order.empty()) return pack_rows(x, x_stride, rows, w.k, packed);
    const int32_t* order = w.order.data();
    for (int64_t i = 0; i < w.blocks * kBlockRows; ++i, packed += rows) {
        const int32_t feature = order[i];
        for (int r = 0; r < rows; ++r) packed[r] = feature < 0 ? 0.0f : x[r * x_stride + feature];
    }
}

static inline void weights_of(
    const QuantMatrix& w, int64_t panel, int64_t first_block, int64_t last_block, float* to
) {
    dequantize(w, panel, first_block, last_block, FloatRows{to});
}

// acc[rows][kAccColumns] (+)= a @ b over `blocks` blocks of each panel of b.
template <int Panels>
static void multiply_row_tile(
    const float* a, int rows, const float* b, int64_t blocks, bool accumulate, float* acc
) {
    const int64_t steps = blocks * kBlockRows;
    const TileOut out{acc, kAccColumns, Panels * kPanel, accumulate, nullptr};
    with_rows<kTileRows>(rows, [&]<int R>() {
        tile_columns<R>(PackedRows<R>{a}, b, steps * kPanel, Panels, steps, out);
    });
}

}  // namespace exl::EXL_ISA

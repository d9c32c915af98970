// Product of quant_prefill.cpp in AMX tiles: bf16 operands, fp32 sums. An AMX tile is 1 KiB. One
// block of 32 values of k takes:
//
//   activations   row tile of 32 rows: [block][32 rows][32 k]   two AMX tiles, one above the other
//   weights       panel: [block][16 pairs of k][16 columns][2]  one AMX tile
//
// A row tile times two panels gives a result of 32 x 32. Its four AMX tiles stay in registers along
// k, which leaves two tile registers for each operand. Activations are rounded to bf16, nearest
// even.
#pragma once

#include "cpu/common/amx.h"
#include "cpu/linear/quant_dequant.h"

namespace exl::EXL_ISA {

using Element = BFloat;
constexpr int kRowTile = 32;
// At most 640 rows of two panels, 40 KiB, which stay in L1 while they are multiplied with all row
// tiles of x.
constexpr int64_t kChunkBlocks = 20;
constexpr int64_t kTileElements = kBlockRows * kPanel;  // of activations or weights

static inline int64_t block_elements(int) { return kRowTile * kBlockRows; }

// Packs one row tile of x in stored order, rounded to bf16. Rows from `rows` on become zero.
static inline void pack_row_tile(
    const float* x, int64_t x_stride, int rows, const QuantMatrix& w, BFloat* packed
) {
    const int32_t* order = w.order.empty() ? nullptr : w.order.data();
    for (int64_t block = 0; block < w.blocks; ++block, packed += kRowTile * kBlockRows) {
        const int64_t first = block * kBlockRows;
        const auto pack = [&](auto&& load_half) __attribute__((always_inline)) {
            for (int r = 0; r < rows; ++r) {
                const float* row = x + r * x_stride;
                const __m512bh pair = _mm512_cvtne2ps_pbh(load_half(row, 1), load_half(row, 0));
                _mm512_storeu_si512(packed + r * kBlockRows, reinterpret_cast<__m512i>(pair));
            }
        };
        if (order == nullptr) {
            pack([&](const float* row, int half) { return load(row + first + half * kLanes); });
        } else {
            const __m512i index[2] = {
                _mm512_loadu_si512(order + first), _mm512_loadu_si512(order + first + kLanes)
            };
            pack([&](const float* row, int half) { return gather_features(row, index[half]); });
        }
        for (int r = rows; r < kRowTile; ++r) {
            _mm512_storeu_si512(packed + r * kBlockRows, _mm512_setzero_si512());
        }
    }
}

static inline void weights_of(
    const QuantMatrix& w, int64_t panel, int64_t first_block, int64_t last_block, BFloat* to
) {
    dequantize(w, panel, first_block, last_block, BFloatPairs{to});
}

// AMX tiles 0 to 3 are the result, 4 and 5 activations, 6 and 7 weights. Streaming loads keep the
// activations out of L1, which holds the weights: 2400 instead of 1650 GFLOP/s, measured on one
// core with chunks of 18 blocks.
template <int RowTiles, int Panels>
static void multiply_tiles(
    const BFloat* a, const BFloat* b, int64_t blocks, bool accumulate, float* acc
) {
    constexpr int64_t kAccBytes = kAccColumns * 4;
    float* below = acc + 16 * kAccColumns;
    const BFloat* b1 = b + blocks * kTileElements;
    // The compiler does not know that tile instructions touch memory.
    asm volatile("" ::: "memory");
    if (accumulate) {
        _tile_loadd(0, acc, kAccBytes);
        if constexpr (Panels > 1) _tile_loadd(1, acc + kPanel, kAccBytes);
        if constexpr (RowTiles > 1) _tile_loadd(2, below, kAccBytes);
        if constexpr (RowTiles > 1 && Panels > 1) _tile_loadd(3, below + kPanel, kAccBytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t block = 0; block < blocks; ++block) {
        _tile_loadd(6, b, 64);
        _tile_stream_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Panels > 1) _tile_loadd(7, b1, 64);
        if constexpr (Panels > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (RowTiles > 1) _tile_stream_loadd(5, a + kTileElements, 64);
        if constexpr (RowTiles > 1) _tile_dpbf16ps(2, 5, 6);
        if constexpr (RowTiles > 1 && Panels > 1) _tile_dpbf16ps(3, 5, 7);
        a += kRowTile * kBlockRows;
        b += kTileElements;
        b1 += kTileElements;
    }
    _tile_stored(0, acc, kAccBytes);
    if constexpr (Panels > 1) _tile_stored(1, acc + kPanel, kAccBytes);
    if constexpr (RowTiles > 1) _tile_stored(2, below, kAccBytes);
    if constexpr (RowTiles > 1 && Panels > 1) _tile_stored(3, below + kPanel, kAccBytes);
    asm volatile("" ::: "memory");
}

// acc[32][kAccColumns] (+)= a @ b over `blocks` blocks of each panel of b.
template <int Panels>
static void multiply_row_tile(
    const BFloat* a, int rows, const BFloat* b, int64_t blocks, bool accumulate, float* acc
) {
    if (rows > 16) {
        multiply_tiles<2, Panels>(a, b, blocks, accumulate, acc);
    } else {
        multiply_tiles<1, Panels>(a, b, blocks, accumulate, acc);
    }
}

}  // namespace exl::EXL_ISA

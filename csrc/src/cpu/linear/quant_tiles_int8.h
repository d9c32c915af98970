// Integer sums of quant_linear.cpp in AMX tiles: 16 rows of x at a time, signed bytes of x times
// unsigned codes.
//
// One step is a block of 32 stored rows. It multiplies a tile of x (16 rows of 32 high and 32 low
// parts, laid out as in quant_vec.h) with a tile of codes for each of two panels. The codes are
// unpacked to bytes in L1.
//
//   16 bits   x = 256 high + low. High and low parts are multiplied separately, in tiles of 32
//             columns, and their sums are combined afterwards.
//   12 bits   x = 16 high + low, for codes of at most 4 bits. The tile of codes holds them twice,
//             times 16 and unchanged, so that one product gives the whole sum. This halves the
//             products and saves steps after them. The output of SmolLM2 changes by 1e-4 or less
//             (mean KL divergence).
//
// Tiles 0 to 3 are the sums of a span (high and low of each panel, or the whole of each), 4 and 5
// are x, 6 and 7 are codes.
#pragma once

#include "cpu/common/amx.h"
#include "cpu/linear/quant_scales.h"

namespace exl::EXL_ISA {

constexpr int kIntTileRows = 16;
// Smallest number of rows for which tiles are faster than dot products.
constexpr int kIntTileMinRows = 5;

constexpr int kIntTileLowBits = 4;  // low bits of 12-bit integers

static inline bool has_narrow_codes(const QuantMatrix& w) {
    if (w.values != Values::integers) return false;  // 8-bit integers from a table
    if (w.has_pairs()) return false;                 // not multiplied in tiles
    for (const GroupRun& run : w.runs) {
        if (run.bits > kIntTileLowBits) return false;
    }
    return true;
}

// Tile configuration for 12-bit or 16-bit integers.
struct IntTileScope : TileScope {
    explicit IntTileScope(int low_bits)
        : TileScope(
              low_bits == kIntTileLowBits ? 2 * kBlockRows : kBlockRows,
              low_bits == kIntTileLowBits ? 16 : 8
          ) {}
};

struct IntTileSums {
    alignas(64) int32_t high[2][kIntTileRows][kPanel];  // the whole sum with 12 bits
    alignas(64) int32_t low[2][kIntTileRows][kPanel];

    template <bool IsWhole>
    Codes total(int panel, int row) const {
        const Codes above = _mm512_load_si512(high[panel][row]);
        if constexpr (IsWhole) return above;
        return _mm512_add_epi32(
            _mm512_slli_epi32(above, kLowBits), _mm512_load_si512(low[panel][row])
        );
    }
};

// Unpacks one block of codes into the rows of a tile.
template <int Bits, bool IsWhole>
static inline void unpack_block(const uint8_t* block, uint8_t* bytes) {
    unrolled<kBlockRows / 4>([&]<int Step>() __attribute__((always_inline)) {
        const Codes codes = block_codes<Bits, Step>(block);
        if constexpr (IsWhole) {
            _mm512_store_si512(bytes + Step * 64, _mm512_slli_epi16(codes, kIntTileLowBits));
            _mm512_store_si512(bytes + kBlockRows / 4 * 64 + Step * 64, codes);
        } else {
            _mm512_store_si512(bytes + Step * 64, codes);
        }
    });
}

// Computes the sums of one span of one or two panels, `panel_bytes` apart.
template <int Bits, int Panels, bool IsWhole>
static inline void tile_span(
    const uint8_t* codes, int64_t panel_bytes, int64_t blocks, const uint8_t* act,
    int64_t row_bytes, IntTileSums& sums
) {
    alignas(64) uint8_t bytes[2][16 * 64];
    const auto x_stride = static_cast<size_t>(row_bytes);
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (!IsWhole) _tile_zero(1);
    if constexpr (!IsWhole) _tile_zero(3);
    for (int64_t b = 0; b < blocks; ++b) {
        for (int p = 0; p < Panels; ++p) {
            const uint8_t* block = codes + p * panel_bytes;
            for (int64_t line = 0; line < width_of(Bits); ++line)
                prefetch(block + kCodesAhead + 64 * line);
            unpack_block<Bits, IsWhole>(block, bytes[p]);
        }
        // The compiler does not know that tile instructions touch memory.
        asm volatile("" ::: "memory");
        _tile_loadd(4, act, x_stride);
        if constexpr (!IsWhole) _tile_loadd(5, act + kBlockRows, x_stride);
        _tile_loadd(6, bytes[0], 64);
        _tile_dpbsud(0, 4, 6);
        if constexpr (!IsWhole) _tile_dpbsud(1, 5, 6);
        if constexpr (Panels > 1) {
            _tile_loadd(7, bytes[1], 64);
            _tile_dpbsud(2, 4, 7);
            if constexpr (!IsWhole) _tile_dpbsud(3, 5, 7);
        }
        codes += width_of(Bits) * 4 * kPanel;
        act += kActBlock;
    }
    _tile_stored(0, sums.high[0], 64);
    if constexpr (!IsWhole) _tile_stored(1, sums.low[0], 64);
    if constexpr (Panels > 1) _tile_stored(2, sums.high[1], 64);
    if constexpr (Panels > 1 && !IsWhole) _tile_stored(3, sums.low[1], 64);
    asm volatile("" ::: "memory");
}

}  // namespace exl::EXL_ISA

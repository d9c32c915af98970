// The shapes of the AMX tiles that products use: 0 to 3 results, 4 and 5 activations, 6 and 7
// weights, of 16 rows of 64 bytes unless said.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace exl::EXL_ISA {

// For the calling thread, while it lives. `x_bytes`: of a row of activations; `weight_rows`: of a
// tile of weights.
struct TileScope {
    explicit TileScope(uint16_t x_bytes = 64, uint8_t weight_rows = 16) {
        struct alignas(64) {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        static_assert(sizeof shape == 64);
        shape.row_bytes[4] = shape.row_bytes[5] = x_bytes;
        shape.rows[6] = shape.rows[7] = weight_rows;
        _tile_loadconfig(&shape);
    }
    // The next switch of this thread need not save 8 KiB.
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

}  // namespace exl::EXL_ISA

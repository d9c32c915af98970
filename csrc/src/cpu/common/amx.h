// AMX tile configuration of the matrix products.
//
// Tiles 0 to 3 hold results, 4 and 5 activations, 6 and 7 weights. A tile has 16 rows of 64 bytes
// unless the arguments of TileScope give another shape.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace exl::EXL_ISA {

// Configures the tiles of the calling thread and releases them when it goes out of scope.
// `x_bytes` is the row size of an activation tile, `weight_rows` the row count of a weight tile.
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
    // A thread without live tiles is cheaper to switch: the system need not save their 8 KiB.
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

}  // namespace exl::EXL_ISA

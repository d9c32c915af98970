// Linears of trellis codes: EXL3.
//
//   w[i, n] = in_scales[i] * (H V H)[i, n] * out_scales[n]
//   y[m, n] = x[m, :] @ w[:, n] + bias[n]
//
// H has normalized Hadamard matrices of 128 rows on its diagonal. V consists of tiles of 16 x 16
// values. A tile is a ring of 256 * rate bits. The 16 bits that end with position p of the ring
// give its value: exl_core/formats/codecs/exl3/layout.py describes rings, places and codebooks.
//
// The bits of a ring are kept, as 64-bit numbers, first bit most significant. The same number of 8
// rings, those of 128 adjacent columns, are side by side. Position p = 8 t + j has row
// 2 (t % 4) + j % 2 + 8 (j / 2 % 2) and column t / 4 + 8 (j / 4), so that a pair of states
// (p, p + 4) of each of 8 rings are 16 columns of one row:
//
//   block   128 columns, stored input features
//   span    128 input features: 8 rows of tiles
//   unit    64 positions of each ring, as many numbers as the rate, 32 columns. For half rates 128
//           positions, twice the rate, 64 columns
//   codes   [block][span][unit][row of tiles][number][ring]
//   panel   16 columns of a unit, by t / 4. Lane l of a vector is column 16 (l / 2) + 8 (l % 2) of
//           the block, plus the panel of the block
#pragma once

#include <cstdint>

#include "exl/ops/linear.h"
#include "exl/ops/quant_linear.h"

namespace exl {

constexpr int64_t kTileSize = 16;
constexpr int64_t kRotation = 128;  // rows of the Hadamard matrices
constexpr int64_t kRings = kRotation / kTileSize;
constexpr int64_t kSpanTiles = kRotation / kTileSize;

enum class Codebook : int { three_inst = 0, mcg = 1, mul1 = 2 };

struct TrellisLayout {
    int64_t n;  // the matrix: columns [first_out, first_out + n) of the stored one
    int64_t k;  // features [first_in, first_in + k)
    int64_t first_out;
    int64_t first_in;
    int64_t tile_words;  // 16 * rate
    Codebook codebook;
    bool has_bias;
};

// A whole stored matrix, in a file's layout.
struct TrellisColumns {
    const uint16_t* words;  // [stored in / 16][stored out / 16][tile_words]
    int64_t row_stride;     // of words, in elements
    const uint16_t* in_scales;
    const uint16_t* out_scales;
    const float* bias;  // [n] or null
};

class TrellisMatrix {
  public:
    explicit TrellisMatrix(const TrellisLayout& layout);
    ~TrellisMatrix();
    TrellisMatrix(const TrellisMatrix&) = delete;
    TrellisMatrix& operator=(const TrellisMatrix&) = delete;

    void fill(const TrellisColumns& columns);

    int64_t blocks() const { return (layout.first_out + layout.n + kRotation - 1) / kRotation; }
    int64_t spans() const { return (layout.first_in + layout.k + kRotation - 1) / kRotation; }
    bool has_half_rate() const { return layout.tile_words % kTileSize != 0; }
    // Units of a ring, and 64-bit numbers of a unit.
    int64_t units() const { return has_half_rate() ? 2 : 4; }
    int64_t numbers() const {
        return has_half_rate() ? layout.tile_words / 8 : layout.tile_words / 16;
    }
    int64_t panels_of_unit() const { return has_half_rate() ? 4 : 2; }
    // Codes of one span of one block, in 64-bit numbers.
    int64_t span_numbers() const { return units() * kSpanTiles * numbers() * kRings; }
    const uint64_t* span_codes(int64_t block, int64_t span) const {
        return codes + (block * spans() + span) * span_numbers();
    }

    const TrellisLayout layout;
    int64_t size_bytes = 0;
    uint64_t* codes = nullptr;
    uint16_t* in_scales = nullptr;   // float16 [spans * 128]
    uint16_t* out_scales = nullptr;  // float16 [blocks * 128]
    float* bias = nullptr;           // null, or [blocks * 128], in stored columns

  private:
    MemoryBlock* block_;
};

// y[:, columns of the parts] (+)= x @ parts, whose outputs are side by side.
struct TrellisLinearArgs {
    const TrellisMatrix* parts[kMaxParts];
    int count;
    const float* x;  // [m, k], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    float* y;  // rows y_stride apart
    int64_t y_stride;
    bool accumulate;  // add to y instead of overwriting it
};

}  // namespace exl

// Allocation and filling of matrices of trellis codes. Filling reorders the 64-bit numbers of the
// rings, whose bits stay as they are.
#include <cstring>

#include "exl/ops/trellis.h"
#include "exl/weight_memory.h"

namespace exl {

TrellisMatrix::TrellisMatrix(const TrellisLayout& described) : layout(described) {
    const int64_t code_bytes = blocks() * spans() * span_numbers() * 8;
    const int64_t in_bytes = spans() * kRotation * 2;
    const int64_t out_bytes = blocks() * kRotation * 2;
    const int64_t bias_bytes = layout.has_bias ? blocks() * kRotation * 4 : 0;
    size_bytes = code_bytes + in_bytes + out_bytes + bias_bytes;
    void* data = nullptr;
    block_ = claim_memory(size_bytes, &data);
    auto* bytes = static_cast<uint8_t*>(data);
    codes = reinterpret_cast<uint64_t*>(bytes);
    in_scales = reinterpret_cast<uint16_t*>(bytes + code_bytes);
    out_scales = reinterpret_cast<uint16_t*>(bytes + code_bytes + in_bytes);
    if (layout.has_bias) {
        bias = reinterpret_cast<float*>(bytes + code_bytes + in_bytes + out_bytes);
    }
}

TrellisMatrix::~TrellisMatrix() { release_memory(block_); }

// The number `index` of a ring: bits 64 * index and up. A file stores 32-bit words, low half first.
static uint64_t number_at(const uint16_t* ring, int64_t index) {
    const uint16_t* word = ring + 4 * index;
    return uint64_t{word[1]} << 48 | uint64_t{word[0]} << 32 | uint64_t{word[3]} << 16 | word[2];
}

void TrellisMatrix::fill(const TrellisColumns& from) {
    const int64_t tile_words = layout.tile_words;
    uint64_t* to = codes;
    for (int64_t block = 0; block < blocks(); ++block) {
        for (int64_t span = 0; span < spans(); ++span) {
            const uint16_t* tiles =
                from.words + span * kSpanTiles * from.row_stride + block * kRings * tile_words;
            for (int64_t unit = 0; unit < units(); ++unit) {
                for (int64_t row = 0; row < kSpanTiles; ++row) {
                    for (int64_t i = unit * numbers(); i < (unit + 1) * numbers(); ++i) {
                        for (int64_t ring = 0; ring < kRings; ++ring) {
                            *to++ = number_at(tiles + row * from.row_stride + ring * tile_words, i);
                        }
                    }
                }
            }
        }
    }
    std::memcpy(in_scales, from.in_scales, static_cast<size_t>(spans() * kRotation * 2));
    std::memcpy(out_scales, from.out_scales, static_cast<size_t>(blocks() * kRotation * 2));
    if (bias != nullptr) {
        std::memcpy(bias + layout.first_out, from.bias, static_cast<size_t>(layout.n * 4));
    }
}

}  // namespace exl

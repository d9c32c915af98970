// Bits of trellis codes: from the words of a step to the 16-bit states of a tile, and back.
//
// Layout: exl/cuda/trellis.h. A lane reads its own words of a step, and gets those of the lane
// before it (and for rates below 2, of the one before that) by shuffles: its first states begin in
// their pieces. A host compiler
// accepts all functions, so that a program without a GPU can check them bit by bit.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define EXL_HD __device__ __forceinline__
#else
#define EXL_HD inline
#endif

namespace exl::cuda::trellis {

constexpr int kTiles = 8;      // tiles of a step
constexpr int kPositions = 8;  // positions of a lane in a tile

// Bits of the pieces and new bits per position, for a rate given as 16-bit words of a tile.
template <int kTileWords>
struct Rate {
    static constexpr int kBits = kTileWords / 2;   // of a piece
    static constexpr int kWords = kTileWords / 8;  // of a lane and step
    static constexpr int kWhole = kTileWords / 16;
    static constexpr bool kIsHalf = kTileWords % 16 != 0;
    // Lanes before this one whose bits its first states need.
    static constexpr int kBefore = kBits < 16 ? 2 : 1;

    // Bits of positions 0 .. j of a lane. Of a half rate, odd positions have one bit more.
    static EXL_HD constexpr int end(int j) {
        return kWhole * (j + 1) + (kIsHalf ? (j + 1) / 2 : 0);
    }

    // Words before the fields of a size.
    static constexpr int kFields32 = kBits / 32, kFirst16 = 8 * kFields32;
    static constexpr bool kHas16 = kBits % 32 >= 16, kHas8 = kBits % 16 >= 8,
                          kHas4 = kBits % 8 >= 4;
    static constexpr int kFirst8 = kFirst16 + (kHas16 ? 4 : 0);
    static constexpr int kFirst4 = kFirst8 + (kHas8 ? 2 : 0);
};

EXL_HD uint32_t funnel_right(uint32_t low, uint32_t high, int shift) {
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, shift);
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift);
#endif
}

// Selects bytes of (y, x), one hexadecimal digit each: 0 .. 3 are those of x, 4 .. 7 those of y.
EXL_HD uint32_t bytes_of(uint32_t x, uint32_t y, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, selector);
#else
    const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return result;
#endif
}

// Bits of one tile for a lane: the stream (before, high, low) ends with its piece, `kPad` bits
// above the end of `low`. Bits above those that a state needs, and the pad, are undefined.
struct Window {
    uint32_t before, high, low;
    bool is_high_upper = false;  // the stream has the upper half of `high` instead of all of it
};

// 16 bits of the stream (before, high, low) that end `shift` bits above the end of `low`, as a
// number. `shift` is a constant after unrolling.
//
// A left shift puts the bits at whole bytes, and a permutation moves them to the low half. Left
// shifts can run on the pipeline of the multiplications, and those by the same count are shared. A
// right shift and a mask would both take the pipeline of the logical operations, which limits the
// kernels.
EXL_HD uint32_t state_at(
    uint32_t before, uint32_t high, bool is_high_upper, uint32_t low, int shift
) {
    // The bits are in one word: `low`, `high`, or one across the border of two words.
    if (shift > 32) return state_at(0, before, false, high, shift - 32);
    const uint32_t word = shift > 16 ? bytes_of(low, high, is_high_upper ? 0x7632 : 0x5432) : low;
    const int in_word = shift > 16 ? shift - 16 : shift;  // 0 .. 16
    const int left = (8 - in_word % 8) % 8, byte = (in_word + left) / 8;
    return bytes_of(word << left, 0, 0x4400 | (byte + 1) << 4 | byte);
}

// `own`, `before`, `earlier`: words of this lane, of the lane before it, of the lane before that.
template <int kTileWords>
EXL_HD Window window_of(
    const uint32_t (&own)[Rate<kTileWords>::kWords],
    const uint32_t (&before)[Rate<kTileWords>::kWords],
    const uint32_t (&earlier)[Rate<kTileWords>::kWords], int tile
) {
    using R = Rate<kTileWords>;
    const int half = R::kFirst16 + tile / 2, byte = R::kFirst8 + tile / 4;
    const int high_half = tile % 2, of_word = tile % 4;
    if constexpr (R::kBits == 64) {
        return {before[tile], own[8 + tile], own[tile]};
    } else if constexpr (R::kBits == 56) {
        // high: 8 bits of the lane before, 8 and 16 bits of the piece.
        const uint32_t selector = (high_half ? 0x0032 : 0x0010) | (4 + of_word) << 8;
        const uint32_t with_byte = bytes_of(own[half], own[byte], selector);
        return {before[tile] >> 8, bytes_of(with_byte, before[tile], 0x4210), own[tile]};
    } else if constexpr (R::kBits == 48) {
        const uint32_t high = bytes_of(own[half], before[tile], high_half ? 0x5432 : 0x5410);
        return {0, high, own[tile]};
    } else if constexpr (R::kBits == 40) {
        const uint32_t high = bytes_of(own[byte], before[tile], 0x0540 | of_word);
        return {0, high, own[tile]};
    } else if constexpr (R::kBits == 32) {
        return {0, before[tile], own[tile]};
    } else if constexpr (R::kBits == 16) {
        return {0, 0, bytes_of(own[half], before[half], high_half ? 0x7632 : 0x5410)};
    } else if constexpr (R::kBits == 8) {
        const uint32_t pair = bytes_of(own[byte], before[byte], 0x0040 + of_word * 0x0011);
        return {0, 0, bytes_of(pair, earlier[byte], 0x0010 | (4 + of_word) << 8)};
    } else {
        // 24: 8, 16 bits and a pad of 8. 28: 4, 8, 16 and a pad of 4. 20: 4, 16 and a pad of 12.
        const uint32_t nibbles = R::kHas4 ? own[R::kFirst4] >> 4 * tile : 0;
        if constexpr (R::kBits == 12) {
            // 4 and 8 bits of the earlier lane, of the one before, of the own.
            const uint32_t of_before = before[R::kFirst4] >> 4 * tile & 15;
            const uint32_t pair = bytes_of(own[byte], before[byte], 0x0040 + of_word * 0x0011);
            const uint32_t low = (pair & 255) | (nibbles & 15) << 8 | (pair >> 8 & 255) << 12;
            const uint32_t of_earlier = earlier[byte] >> 8 * of_word & 255;
            return {0, 0, low | of_before << 20 | of_earlier << 24};
        } else {
            // The fields above the lowest byte, which is a pad.
            const uint32_t fields =
                R::kHas8
                    ? bytes_of(
                          own[half], own[byte], (high_half ? 0x0320 : 0x0100) | (4 + of_word) << 12
                      )
                    : (high_half ? own[half] : own[half] << 16);
            const uint32_t low = R::kHas4 ? funnel_right(fields, nibbles, 4) : fields;
            // The last 16 bits of the piece of the lane before are in one half of the word.
            return {0, before[half], low, high_half == 1};
        }
    }
}

// States of a lane's eight positions.
template <int kTileWords>
EXL_HD void states_of(const Window& window, uint32_t (&states)[kPositions]) {
    using R = Rate<kTileWords>;
    // The piece ends this many bits above the end of `low`.
    constexpr int kPad = R::kBits >= 20 && R::kBits < 32 ? 32 - R::kBits : 0;
#pragma unroll
    for (int j = 0; j < kPositions; ++j) {
        const int shift = kPad + R::kBits - R::end(j);
        states[j] = state_at(window.before, window.high, window.is_high_upper, window.low, shift);
    }
}

// Word `word` of a lane's step, from the pieces of its eight tiles.
template <int kTileWords>
EXL_HD uint32_t word_of(const uint64_t (&pieces)[kTiles], int word) {
    using R = Rate<kTileWords>;
    int size = 32, first = 0, bit = 0;  // of the fields of the word; `bit`: of a piece
    if (word < R::kFirst16) {
        first = 0, bit = word / 8 * 32, word %= 8;
    } else if (word < R::kFirst8) {
        size = 16, first = R::kFirst16, bit = 32 * R::kFields32;
    } else if (word < R::kFirst4) {
        size = 8, first = R::kFirst8, bit = 32 * R::kFields32 + (R::kHas16 ? 16 : 0);
    } else {
        size = 4, first = R::kFirst4;
        bit = 32 * R::kFields32 + (R::kHas16 ? 16 : 0) + (R::kHas8 ? 8 : 0);
    }
    const int count = 32 / size;
    uint32_t result = 0;
    for (int i = 0; i < count; ++i) {
        const uint64_t field = pieces[(word - first) * count + i] >> bit & ((1ull << size) - 1);
        result |= static_cast<uint32_t>(field) << i * size;
    }
    return result;
}

}  // namespace exl::cuda::trellis

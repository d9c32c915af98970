// Decoding of one unit of a row of tiles: states of all positions, then the values of a codebook.
#pragma once

#include <utility>

#include "cpu/linear/trellis_vec.h"

namespace exl::EXL_ISA {

// Twice is twice the rate.
template <int Twice>
struct Ring {
    static constexpr bool kIsHalf = Twice % 2 != 0;
    static constexpr int kNumbers = kIsHalf ? Twice : Twice / 2;  // of a unit
    static constexpr int kPanels = kIsHalf ? 4 : 2;
    static constexpr int kUnits = kIsHalf ? 2 : 4;
    // Bits of a unit up to and with those of position p.
    static constexpr int end(int p) { return Twice / 2 * (p + 1) + (kIsHalf ? (p + 1) / 2 : 0); }
};

// States of the positions p and p + 4: two columns of one row of 8 tiles.
template <int Twice, int Position>
EXL_INLINE Wide pair_states(Wide before, const uint64_t* codes) {
    using R = Ring<Twice>;
    // A window for all 8 positions of a piece if it has their bits, else one for the pair.
    constexpr int kPiece = Position / 8 * 8;
    constexpr bool kFits = R::end(kPiece + 7) - R::end(kPiece) + 16 <= 64;
    constexpr int kEnd = kFits ? R::end(kPiece + 7) : R::end(Position / 2 * 2 + 5);
    constexpr int kNumber = (kEnd - 1) / 64;
    const Wide now = load_wide(codes + kNumber * kRings);
    const Wide last = kNumber == 0 ? before : load_wide(codes + (kNumber - 1) * kRings);
    return states<kEnd - R::end(Position), kEnd - R::end(Position + 4)>(
        window<kEnd - 64 * kNumber>(last, now)
    );
}

// Calls sink<panel, pair of rows>(states of the even row, states of the odd row) for one row of
// tiles. `before` is the number before those of the unit in the ring.
template <int Twice, class Sink>
static inline void walk_unit(Wide before, const uint64_t* codes, Sink&& sink) {
    [&]<int... I>(std::integer_sequence<int, I...>) EXL_LAMBDA {
        // I counts pairs of rows: piece t = I / 2, rows 2 (t % 4) + 8 (I % 2) and the one after.
        (sink.template operator()<I / 8, I / 2 % 4 + 4 * (I % 2)>(
             pair_states<Twice, I / 2 * 8 + I % 2 * 2>(before, codes),
             pair_states<Twice, I / 2 * 8 + I % 2 * 2 + 1>(before, codes)
         ),
         ...);
    }(std::make_integer_sequence<int, Ring<Twice>::kPanels * 8>{});
}

constexpr uint32_t kMul1 = 0x83DCD12Du;
constexpr uint32_t kMcg = 0xCBAC1FEDu;
constexpr uint32_t kThreeInst = 89226354u;
constexpr int32_t kThreeInstAddend = 64248484;
// value = kStep * (sum of bytes) + kBase, before its rounding to float16. The sums are 0 to 1005,
// with a mean of about kMiddle.
constexpr int kMiddle = 510;
constexpr float kStep = 1774.0f / (1 << 18);
constexpr float kBase = 1024.0f * kStep - 1329.0f / 128;

// Returns the number before those of a unit: the last one of the unit before, around the ring.
template <int Twice>
static inline const uint64_t* before_unit(const uint64_t* span, int unit) {
    using R = Ring<Twice>;
    const int last = (unit + R::kUnits - 1) % R::kUnits;
    return span + ((last * kSpanTiles + 1) * R::kNumbers - 1) * kRings;
}

// sums[16 * panel + lane] += scale * (row of integers @ the unit's bytes - `middle` of each span).
// `row` has each integer in both halves of a lane.
template <int Twice>
static void multiply_row(
    const uint64_t* span, int unit, const int32_t* row, int32_t start, float scale, float* sums
) {
    using R = Ring<Twice>;
    const uint64_t* codes = span + unit * kSpanTiles * R::kNumbers * kRings;
    const uint64_t* before = before_unit<Twice>(span, unit);
    Wide acc[R::kPanels][2];
    for (auto& pair : acc) {
        pair[0] = set_wide(start);
        pair[1] = set_wide(0);
    }
    for (int64_t tile = 0; tile < kSpanTiles; ++tile) {
        walk_unit<Twice>(
            load_wide(before), codes, [&]<int Panel, int Pair>(Wide even, Wide odd) EXL_LAMBDA {
                Wide* to = acc[Panel];
                to[0] = add_bytes(to[0], multiply(even, kMul1), set_wide(row[2 * Pair]));
                to[1] = add_bytes(to[1], multiply(odd, kMul1), set_wide(row[2 * Pair + 1]));
            }
        );
        codes += R::kNumbers * kRings;
        before += R::kNumbers * kRings;
        row += kTileSize;
    }
    for (int p = 0; p < R::kPanels; ++p) {
        add_scaled(add_wide(acc[p][0], acc[p][1]), scale, sums + p * kPanel);
    }
}

// Byte sums less kMiddle of one span of a unit: int16 [panel][pair of rows][16][2].
template <int Twice>
static void decode_words(const uint64_t* span, int unit, int16_t* to) {
    using R = Ring<Twice>;
    const uint64_t* codes = span + unit * kSpanTiles * R::kNumbers * kRings;
    const uint64_t* before = before_unit<Twice>(span, unit);
    for (int64_t tile = 0; tile < kSpanTiles; ++tile) {
        walk_unit<Twice>(
            load_wide(before), codes, [&]<int Panel, int Pair>(Wide even, Wide odd) EXL_LAMBDA {
                const Wide sums = byte_sums(multiply(even, kMul1), multiply(odd, kMul1), kMiddle);
                store_wide(to + Panel * kRotation * kPanel + Pair * 2 * kPanel, sums);
            }
        );
        codes += R::kNumbers * kRings;
        before += R::kNumbers * kRings;
        to += kTileSize * kPanel;
    }
}

// Values of one span of a unit, as float16 rounds them: float [panel][row][16].
template <int Twice>
static void decode_floats(const uint64_t* span, int unit, Codebook book, float* to) {
    using R = Ring<Twice>;
    const uint64_t* codes = span + unit * kSpanTiles * R::kNumbers * kRings;
    const uint64_t* before = before_unit<Twice>(span, unit);
    const uint32_t factor = book == Codebook::mcg ? kMcg : kThreeInst;
    const int32_t addend = book == Codebook::mcg ? 0 : kThreeInstAddend;
    for (int64_t tile = 0; tile < kSpanTiles; ++tile) {
        walk_unit<Twice>(
            load_wide(before), codes, [&]<int Panel, int Pair>(Wide even, Wide odd) EXL_LAMBDA {
                float* at = to + Panel * kRotation * kPanel + Pair * 2 * kPanel;
                const auto value = [&](Wide s, float* cell) EXL_LAMBDA {
                    const Wide hash = add_wide(multiply(s, factor), set_wide(addend));
                    store_half_sums(mask_xor(hash, 0x8fff8fffu, 0x3b603b60u), cell);
                };
                value(even, at);
                value(odd, at + kPanel);
            }
        );
        codes += R::kNumbers * kRings;
        before += R::kNumbers * kRings;
        to += kTileSize * kPanel;
    }
}

// Calls fn<Twice>() for a rate that only the run knows.
template <class Fn>
static inline void with_rate(int64_t tile_words, Fn&& fn) {
    switch (tile_words / 8) {
        case 2: return fn.template operator()<2>();
        case 3: return fn.template operator()<3>();
        case 4: return fn.template operator()<4>();
        case 5: return fn.template operator()<5>();
        case 6: return fn.template operator()<6>();
        case 7: return fn.template operator()<7>();
        case 8: return fn.template operator()<8>();
        case 10: return fn.template operator()<10>();
        case 12: return fn.template operator()<12>();
        case 14: return fn.template operator()<14>();
        default: return fn.template operator()<16>();
    }
}

// The normalized Hadamard transform of 128 numbers, in place. The order of the bits of an index
// does not matter if it is the same before and after.
static inline void rotate(float* x) {
    constexpr int kCount = kRotation / kLanes;
    Vec v[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) v[i] = load(x + i * kLanes);
    if constexpr (kLanes > 1) {
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) {
#if defined(__AVX2__)
            v[i] = add(swap_neighbors(v[i]), flip_odd(v[i]));
            v[i] = add(swap_lanes<2>(v[i]), flip_signs<2>(v[i]));
            v[i] = add(swap_lanes<4>(v[i]), flip_signs<4>(v[i]));
            if constexpr (kLanes > 8) v[i] = add(swap_lanes<8>(v[i]), flip_signs<8>(v[i]));
#endif
        }
    }
#pragma GCC unroll 8
    for (int stride = 1; stride < kCount; stride *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) {
            if ((i & stride) != 0) continue;
            const Vec low = v[i];
            const Vec high = v[i + stride];
            v[i] = add(low, high);
            v[i + stride] = sub(low, high);
        }
    }
    const Vec scale = set1(0.08838834764831845f);  // 128^-0.5
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) store(x + i * kLanes, mul(v[i], scale));
}

}  // namespace exl::EXL_ISA

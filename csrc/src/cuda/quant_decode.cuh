// Codes of a block of 32 rows, as they lie in a tile (exl/cuda.h), to A fragments of mma.m16n8k16.
//
// A lane has 16 pairs of codes. A pair is cut out of its planes' words in place, into the mantissas
// of two float16 numbers 1024 + 2^bit * code, and one multiply-add of pairs makes it
// code - 2^(bits - 1), exactly: every number on the way is an integer below 2048, or such a one
// over a power of two. What a matrix has in place of that zero is the caller's to add.
#pragma once

#include "common.cuh"

namespace exl::cuda {

// Bits of the low plane of a code; the rest are the high plane.
__host__ __device__ constexpr int low_plane(int bits) { return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits; }

// The float16 of that value in both halves; for values of at most 11 significant bits, normal.
__host__ __device__ constexpr uint32_t half_twice(double value) {
    const double magnitude = value < 0 ? -value : value;
    int exponent = 0;
    double mantissa = magnitude;
    while (mantissa >= 2) mantissa /= 2, ++exponent;
    while (mantissa < 1) mantissa *= 2, --exponent;
    const auto bits = static_cast<uint32_t>((exponent + 15) * 1024 + (mantissa - 1) * 1024) |
                      (value < 0 ? 0x8000u : 0u);
    return bits | bits << 16;
}

// (a & mask) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t add_pair(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// A lane's words of a plane of `bits` bits, 128 * bits bytes of shared memory.
template <int bits>
__device__ __forceinline__ void load_plane(uint32_t (&words)[bits], const uint8_t* plane, int lane) {
    if constexpr (bits == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(plane)[i * kWarp + lane];
            words[4 * i] = four.x, words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    } else if constexpr (bits == 4) {
        const uint4 four = reinterpret_cast<const uint4*>(plane)[lane];
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (bits == 2) {
        const uint2 two = reinterpret_cast<const uint2*>(plane)[lane];
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = reinterpret_cast<const uint32_t*>(plane)[lane];
    }
}

template <int kBits>
struct BlockCodes {
    static constexpr int kLow = low_plane(kBits);
    static constexpr int kHigh = kBits - kLow;
    uint32_t low[kLow];
    uint32_t high[kHigh ? kHigh : 1];

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        load_plane<kLow>(low, block, lane);
        if constexpr (kHigh > 0) load_plane<kHigh>(high, block + 128 * kLow, lane);
    }

    // Codes of one pair less 2^(kBits - 1), float16.
    template <int kPair>
    __device__ __forceinline__ uint32_t pair() const {
        constexpr uint32_t kBias = 0x64006400u;  // 1024 twice
        constexpr int kMiddle = 1 << (kBits - 1);
        if constexpr (kBits == 8) {
            const uint32_t biased = __byte_perm(low[kPair / 2], kBias, kPair % 2 ? 0x5351 : 0x5250);
            constexpr uint32_t kZero = half_twice(-1024 - kMiddle);
            return add_pair(biased, kZero);
        } else {
            // Fields must end at bit 10 at the latest, where the mantissa does.
            constexpr int kAt = kLow * (kPair % (16 / kLow));
            constexpr int kShift = kAt + kBits > 10 ? 8 : 0;
            constexpr int kBit = kAt - kShift;
            constexpr uint32_t kLowMask = 0x00010001u * ((1u << kLow) - 1) << kBit;
            uint32_t biased = and_or(low[kPair / (16 / kLow)] >> kShift, kLowMask, kBias);
            if constexpr (kHigh > 0) {
                constexpr int kUp = kBit + kLow - kHigh * (kPair % (16 / kHigh));
                constexpr uint32_t kHighMask = 0x00010001u * ((1u << kHigh) - 1) << (kBit + kLow);
                const uint32_t word = high[kPair / (16 / kHigh)];
                const uint32_t moved = kUp >= 0 ? word << (kUp & 31) : word >> (-kUp & 31);
                biased = and_or(moved, kHighMask, biased);
            }
            constexpr uint32_t kUnit = half_twice(1.0 / (1 << kBit));
            constexpr uint32_t kZero = half_twice(-1024.0 / (1 << kBit) - kMiddle);
            return kBit == 0 ? add_pair(biased, kZero) : multiply_add_pair(biased, kUnit, kZero);
        }
    }

    // The fragment of columns 16 kColumns .. + 15 and of step kStep.
    template <int kColumns, int kStep>
    __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
        constexpr int kFirst = 8 * kColumns + 4 * kStep;
        a[0] = pair<kFirst>();
        a[1] = pair<kFirst + 1>();
        a[2] = pair<kFirst + 2>();
        a[3] = pair<kFirst + 3>();
    }
};

}  // namespace exl::cuda

// A unit of some strips times the inputs that meet it, a strip to a warp.
//
// Four neighbouring warps work as one: a strip's columns 0 .. 15 of each of them are the rows of
// one product of 64 rows, and columns 16 .. 31 those of another. Codes become weights in registers,
// rounded to float16 as dequantized matrices are, while the products of the block before are under
// way; the inputs are read from shared memory by the products themselves, once for four warps.
//
// A code is cut out of its word as the subnormal float16 number that its bits are, 2^-24 times the
// code. One multiplication with 2^24 times the scale and addition of the offset makes it a weight,
// which a power of two for each strip keeps in range (exl/cuda.h). Sums need no factors then, and no
// sums of inputs, and go on from unit to unit in the registers of the products.
#pragma once

#include "quant_unit.cuh"
#include "quant_wide_ring.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

// Sums of a warp's 32 columns and kRows rows of the batch: of columns 16 i and up number 4 q + c is
// that of column 8 (c / 2) + lane / 4 and of row 8 q + 2 (lane % 4) + c % 2.
template <int kRows>
using WideSums = float[2][kRows / 2];

// What weights of a strip are multiplied with; 1 where there is no such strip.
__device__ __forceinline__ float weight_unit(const WidePart& part, int strip) {
    if (strip >= part.strips) return 1.0f;
    return __ldg(reinterpret_cast<const float*>(part.tiles + strip * part.strip_bytes));
}

__device__ __forceinline__ uint32_t bits_of(__half2 two) {
    return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ __forceinline__ __half2 halves_of(uint32_t bits) {
    return *reinterpret_cast<const __half2*>(&bits);
}

// What codes of a unit become weights with, code * scale + offset, of the lane's columns g and g + 8,
// and g + 16 and g + 24; the scales 2^24 times what they are.
struct WideFactors {
    __half2 scales[2], offsets[2];

    __device__ __forceinline__ void load(
        const WidePart& part, const uint8_t* head, int bits, float unit, int g
    ) {
        const bool has_floats = part.scale_bytes == 4;
        const uint8_t* behind = head + 32 * part.scale_bytes;
        load_two(scales, head, has_floats, g, unit * (1 << 24));
        if (part.offset_kind == EXL_OFFSET_MINIMUMS) {
            load_two(offsets, behind, has_floats, g, unit);
            return;
        }
        uint32_t zeros = (1u << (bits - 1)) * 0x01010101u;
        if (part.offset_kind == EXL_OFFSET_ZEROS) {
            zeros = reinterpret_cast<const uint32_t*>(behind)[g];
        }
        // Zeros, too, are subnormal numbers, and negative ones.
        offsets[0] = __hmul2(halves_of(__byte_perm(zeros, 0x80, 0x4140)), scales[0]);
        offsets[1] = __hmul2(halves_of(__byte_perm(zeros, 0x80, 0x4342)), scales[1]);
    }

    // Codes of a width begin at some position of the mantissa.
    template <int kBits>
    __device__ __forceinline__ void divide_by_positions() {
        constexpr float kUnits[4] = {
            1.0f / (1 << position_of(kBits, 0)), 1.0f / (1 << position_of(kBits, 1)),
            1.0f / (1 << position_of(kBits, 2)), 1.0f / (1 << position_of(kBits, 3))
        };
        scales[0] = __hmul2(scales[0], __floats2half2_rn(kUnits[0], kUnits[1]));
        scales[1] = __hmul2(scales[1], __floats2half2_rn(kUnits[2], kUnits[3]));
    }

private:
    __device__ __forceinline__ static void load_two(
        __half2 (&to)[2], const uint8_t* from, bool has_floats, int g, float times
    ) {
        float factors[4];
        load_factors(factors, from, has_floats, g);
        to[0] = __floats2half2_rn(factors[0] * times, factors[1] * times);
        to[1] = __floats2half2_rn(factors[2] * times, factors[3] * times);
    }
};

// A fragment of weights out of one of codes.
template <int kColumns>
__device__ __forceinline__ void make_weights(uint32_t (&a)[4], const WideFactors& of) {
    const __half2 scales = of.scales[kColumns], offsets = of.offsets[kColumns];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        a[i] = bits_of(__hfma2(halves_of(a[i]), __low2half2(scales), __low2half2(offsets)));
        a[i + 1] =
            bits_of(__hfma2(halves_of(a[i + 1]), __high2half2(scales), __high2half2(offsets)));
    }
}

// The weights of a block: of columns 16 i and up, of a step of 16 rows.
using WideWeights = uint32_t[2][2][4];

template <int kBits>
__device__ __forceinline__ void unpack_weights(
    WideWeights& a, const BlockCodes<kBits>& codes, const WideFactors& of
) {
    codes.template fragment<0, 0>(a[0][0]);
    codes.template fragment<0, 1>(a[0][1]);
    codes.template fragment<1, 0>(a[1][0]);
    codes.template fragment<1, 1>(a[1][1]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        make_weights<0>(a[0][step], of);
        make_weights<1>(a[1][step], of);
    }
}

// total += the block's weights times its inputs, from now on.
template <int kRows, bool is_by_rows>
__device__ __forceinline__ void begin_products(
    WideSums<kRows>& total, WideWeights& a, uint32_t inputs
) {
    group_fence(a[0]);
    group_fence(a[1]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            group_product<is_by_rows>(total[i], a[i][step], inputs + 2 * kRows * step);
        }
    }
    group_commit();
}

template <int kBits, int kRows, bool is_by_rows>
__device__ __forceinline__ void add_blocks(
    WideSums<kRows>& total, const WidePart& part, const uint8_t* head, int count, float unit,
    uint32_t inputs, int lane
) {
    const uint8_t* blocks = head + part.header_bytes;
    BlockCodes<kBits> codes[4];
    codes[0].load(blocks, lane);  // ahead of the factors, whose branches no load passes
    WideFactors of;
    of.load(part, head, kBits, unit, lane / 4);
    of.divide_by_positions<kBits>();
    if (count == 4) {
        WideWeights a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unpack_weights<kBits>(a[i], codes[i], of);
            // The next codes ahead of the products, unless so many registers are there only once the
            // products before these are done.
            constexpr bool kIsEarly = kBits <= 5;
            const auto load_next = [&] { codes[i + 1].load(blocks + (i + 1) * 128 * kBits, lane); };
            if (kIsEarly && i + 1 < 4) load_next();
            begin_products<kRows, is_by_rows>(total, a[i], inputs + 4 * kRows * i);
            if (i + 1 < 4) group_wait<1>();
            if (!kIsEarly && i + 1 < 4) load_next();
        }
        group_wait<0>();
    } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            WideWeights a;
            if (i > 0) codes[0].load(blocks + i * 128 * kBits, lane);
            unpack_weights<kBits>(a, codes[0], of);
            begin_products<kRows, is_by_rows>(total, a, inputs + 4 * kRows * i);
            group_wait<0>();
        }
    }
    group_results(total[0]);
    group_results(total[1]);
}

// total += the unit, whose bytes have come, times its inputs.
template <int kRows, bool is_by_rows>
__device__ __forceinline__ void add_wide_unit(
    WideSums<kRows>& total, const WidePart& part, const WideEntry& entry, const uint8_t* ring,
    int strip, float unit, int lane
) {
    const int count = entry.blocks(), bits = entry.bits();
    const uint8_t* head = ring + entry.at + strip * (part.header_bytes + 128 * bits * count);
    const uint32_t inputs = matrix_start(ring + entry.inputs, 16 * kRows);
// The commonest width first.
#define EXL_WIDTH(width)                                                              \
    if (bits == width) {                                                              \
        add_blocks<width, kRows, is_by_rows>(                                         \
            total, part, head, count, unit, inputs, lane                              \
        );                                                                            \
    } else
    EXL_WIDTH(4)
    EXL_WIDTH(3)
    EXL_WIDTH(5)
    EXL_WIDTH(6)
    EXL_WIDTH(8)
    EXL_WIDTH(2) {}
#undef EXL_WIDTH
}

}  // namespace exl::cuda

#endif

// A unit of some strips times the inputs that meet it, a strip to a warp.
//
// Four neighbouring warps work as one: a strip's columns 0 .. 15 of each of them are the rows of
// one product of 64 rows, and columns 16 .. 31 those of another. Codes become fragments in
// registers while the products before are under way; the inputs are read from shared memory by the
// products themselves, once for four warps.
#pragma once

#include "quant_unit.cuh"
#include "quant_wide_ring.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

// Sums of a warp's 32 columns and kRows rows of the batch: of columns 16 i and up number 4 q + c is
// that of column 8 (c / 2) + lane / 4 and of row 8 q + 2 (lane % 4) + c % 2.
template <int kRows>
using WideSums = float[2][kRows / 2];

// sums (+)= kCount blocks times their inputs, of columns 16 kColumns .. + 15.
template <int kColumns, int kCount, int kBits, int kRows>
__device__ __forceinline__ void multiply_some(
    float (&sums)[kRows / 2], const uint8_t* blocks, uint64_t inputs, bool adds, int lane
) {
    BlockCodes<kBits> codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i].load(blocks + i * 128 * kBits, lane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        uint32_t a[2][4];
        codes[i].template fragment<kColumns, 0>(a[0]);
        codes[i].template fragment<kColumns, 1>(a[1]);
        group_fence(a);
        group_product(sums, a[0], inputs + 4 * kRows * i, adds || i > 0);
        group_product(sums, a[1], inputs + 4 * kRows * i + 2 * kRows, true);
        group_commit();
        if (i + 1 < kCount) group_wait<1>();
    }
    group_wait<0>();
    group_results(sums);
}

// total += scales of those columns * (the unit's blocks times their inputs)
template <int kColumns, int kBits, int kRows>
__device__ __forceinline__ void add_columns(
    WideSums<kRows>& total, const float (&scales)[4], const uint8_t* blocks, int count,
    uint64_t inputs, int lane
) {
    float sums[kRows / 2];
    if (count == 4) {
        multiply_some<kColumns, 4, kBits, kRows>(sums, blocks, inputs, false, lane);
    } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            multiply_some<kColumns, 1, kBits, kRows>(
                sums, blocks + i * 128 * kBits, inputs + 4 * kRows * i, i > 0, lane
            );
        }
    }
    const float factors[2] = {
        scales[2 * kColumns] * unit_of_code(kBits, 2 * kColumns),
        scales[2 * kColumns + 1] * unit_of_code(kBits, 2 * kColumns + 1)
    };
#pragma unroll
    for (int n = 0; n < kRows / 2; ++n) {
        total[kColumns][n] = fmaf(factors[n % 4 / 2], sums[n], total[kColumns][n]);
    }
}

// What a lane's columns g, g + 8, g + 16, g + 24 add for each input.
__device__ __forceinline__ void load_offsets(
    float (&to)[4], const float (&scales)[4], const WidePart& part, int bits, const uint8_t* from,
    int g
) {
    if (part.offset_kind == EXL_OFFSET_MINIMUMS) {
        load_factors(to, from, part.scale_bytes == 4, g);
        return;
    }
    uint32_t zeros = (1u << (bits - 1)) * 0x01010101u;
    if (part.offset_kind == EXL_OFFSET_ZEROS) zeros = reinterpret_cast<const uint32_t*>(from)[g];
#pragma unroll
    for (int q = 0; q < 4; ++q) to[q] = -scales[q] * static_cast<float>(zeros >> 8 * q & 255);
}

// total += the unit, whose bytes have come, times its inputs.
template <int kRows>
__device__ __forceinline__ void add_wide_unit(
    WideSums<kRows>& total, const WidePart& part, const WideEntry& entry, const uint8_t* ring,
    WideState<kRows>& state, uint32_t slot, uint32_t parity, int strip, int lane
) {
    const int count = entry.blocks(), bits = entry.bits();
    const uint8_t* head = ring + entry.at + strip * (part.header_bytes + 128 * bits * count);
    const uint8_t* blocks = head + part.header_bytes;
    const uint64_t inputs = matrix_descriptor(ring + entry.inputs, 16 * kRows);
    float scales[4], offsets[4];
    load_factors(scales, head, part.scale_bytes == 4, lane / 4);
    load_offsets(offsets, scales, part, bits, head + 32 * part.scale_bytes, lane / 4);
// The commonest width first.
#define EXL_WIDTH(width)                                                            \
    if (bits == width) {                                                            \
        add_columns<0, width, kRows>(total, scales, blocks, count, inputs, lane);   \
        add_columns<1, width, kRows>(total, scales, blocks, count, inputs, lane);   \
    } else
    EXL_WIDTH(4)
    EXL_WIDTH(3)
    EXL_WIDTH(5)
    EXL_WIDTH(6)
    EXL_WIDTH(8)
    EXL_WIDTH(2) {}
#undef EXL_WIDTH
    barrier_wait(&state.summed[slot], parity);
    const float* input_sums = state.input_sums[slot] + 2 * (lane % 4);
#pragma unroll
    for (int q = 0; q < kRows / 8; ++q) {
        const float2 of_inputs = *reinterpret_cast<const float2*>(input_sums + 8 * q);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float* to = total[i] + 4 * q;
            to[0] = fmaf(offsets[2 * i], of_inputs.x, to[0]);
            to[1] = fmaf(offsets[2 * i], of_inputs.y, to[1]);
            to[2] = fmaf(offsets[2 * i + 1], of_inputs.x, to[2]);
            to[3] = fmaf(offsets[2 * i + 1], of_inputs.y, to[3]);
        }
    }
}

}  // namespace exl::cuda

#endif

// A unit of a quantized matrix times the inputs' rows that meet it, by one warp.
//
// total += scale * codes @ x + offset * sum(x), for 32 columns and 8 rows of the batch or a few times
// 8; the offset is -scale * zero or a minimum, the sum of inputs a product with ones.
#pragma once

#include "quant_decode.cuh"
#include "quant_stream.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

// Sums of 32 columns and 8 * kTiles rows of the batch, as the C fragments lie.
template <int kTiles>
using Sums = float[kTiles][2][4];

// Rows of a block of the inputs, for this lane: 8 halves of each tile.
template <int kTiles>
struct InputRows {
    uint4 of_tile[kTiles];

    __device__ __forceinline__ void load(const __half* x) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            of_tile[i] = *reinterpret_cast<const uint4*>(x + i * 8 * 32);
        }
    }
};

template <int kStep, class Codes, int kTiles>
__device__ __forceinline__ void add_step(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const Codes& codes,
    const InputRows<kTiles>& rows
) {
    uint32_t left[4], right[4];
    codes.template fragment<0, kStep>(left);
    codes.template fragment<1, kStep>(right);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const uint4& of = rows.of_tile[i];
        const uint32_t b0 = kStep ? of.z : of.x, b1 = kStep ? of.w : of.y;
        mma_16816(sums[i][0], left, b0, b1);
        mma_16816(sums[i][1], right, b0, b1);
        constexpr uint32_t kOnes = 0x3c003c00;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        mma_16816(input_sums[i], ones, b0, b1);
    }
}

template <int kCount, int kBits, int kTiles, class Stream>
__device__ __forceinline__ void add_some(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const Stream& stream, const uint8_t* blocks,
    const __half* x, int block_halves, int lane
) {
    InputRows<kTiles> rows[kCount];
    BlockCodes<kBits> codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) rows[i].load(x + i * block_halves);
    stream.wait();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        codes[i].load(blocks + i * 128 * kBits, lane);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        add_step<0, BlockCodes<kBits>, kTiles>(sums, input_sums, codes[i], rows[i]);
        add_step<1, BlockCodes<kBits>, kTiles>(sums, input_sums, codes[i], rows[i]);
    }
}

template <int kBits, int kTiles, class Stream>
__device__ __forceinline__ void add_blocks(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const Stream& stream, const uint8_t* blocks,
    int count, const __half* x, int block_halves, int lane
) {
    constexpr int kAtOnce = 4 / kTiles;
    if constexpr (kAtOnce > 1) {
        for (; count >= kAtOnce; count -= kAtOnce) {
            add_some<kAtOnce, kBits, kTiles>(
                sums, input_sums, stream, blocks, x, block_halves, lane
            );
            blocks += kAtOnce * 128 * kBits;
            x += kAtOnce * block_halves;
        }
    }
#pragma unroll 1
    for (; count > 0; --count) {
        add_some<1, kBits, kTiles>(
            sums, input_sums, stream, blocks, x, block_halves, lane
        );
        blocks += 128 * kBits;
        x += block_halves;
    }
}

// Scales or minimums of the lane's columns g, g + 8, g + 16, g + 24.
__device__ __forceinline__ void load_factors(
    float (&to)[4], const uint8_t* from, int scale_bytes, int g
) {
    if (scale_bytes == 4) {
        const float4 four = reinterpret_cast<const float4*>(from)[g];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const uint2 four = reinterpret_cast<const uint2*>(from)[g];
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
        const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
        to[0] = first.x, to[1] = first.y, to[2] = second.x, to[3] = second.y;
    }
}

// total += the unit at `bytes`, times the inputs at `x` (of this lane in block 0 of the matrix).
template <int kTiles, class Stream>
__device__ __forceinline__ void add_unit(
    Sums<kTiles>& total, const QuantPart& part, const Stream& stream, const RingEntry& entry,
    const __half* x, int block_halves, int lane
) {
    const uint32_t unit = entry.unit;
    const uint8_t* bytes = stream.bytes(entry);
    const int count = unit >> 24, bits = unit >> 16 & 0xff, first_block = unit & 0xffff;
    const uint8_t* blocks = bytes + part.header_bytes;
    x += first_block * block_halves;
    Sums<kTiles> sums = {};
    float input_sums[kTiles][4] = {};
// The commonest width first.
#define EXL_WIDTH(width)                                                             \
    if (bits == width) {                                                             \
        add_blocks<width, kTiles>(                                      \
            sums, input_sums, stream, blocks, count, x, block_halves, lane           \
        );                                                                           \
    } else
    EXL_WIDTH(4)
    EXL_WIDTH(3)
    EXL_WIDTH(5)
    EXL_WIDTH(6)
    EXL_WIDTH(8)
    EXL_WIDTH(2) {}
#undef EXL_WIDTH
    float scales[4], offsets[4];
    load_factors(scales, bytes, part.scale_bytes, lane / 4);
    const uint8_t* from = bytes + 32 * part.scale_bytes;
    if (part.offset_kind == EXL_OFFSET_MINIMUMS) {
        load_factors(offsets, from, part.scale_bytes, lane / 4);
    } else {
        uint32_t zeros = (1u << (bits - 1)) * 0x01010101u;
        if (part.offset_kind == EXL_OFFSET_ZEROS) {
            zeros = reinterpret_cast<const uint32_t*>(from)[lane / 4];
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            offsets[q] = -scales[q] * static_cast<float>(zeros >> 8 * q & 255);
        }
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) scales[q] *= unit_of_code(bits, q);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float& to = total[i][c / 4][c % 4];
            to = fmaf(scales[c / 2], sums[i][c / 4][c % 4], to);
            to = fmaf(offsets[c / 2], input_sums[i][c % 2], to);
        }
    }
}

}  // namespace exl::cuda

#endif  // __CUDACC__

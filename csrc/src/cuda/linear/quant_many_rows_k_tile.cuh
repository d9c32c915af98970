// Inner loop of the many-rows kernel: a warpgroup multiplies 16 columns of each of four panels with
// two chunks of 64 rows.
//
// The products are those of the small-batch kernel (quant_small_batch_k_tile.cuh), in the same order
// along k, so that the sums have the same bits. They differ in what shares a weight: the fragments
// of a block are multiplied with both chunks. The last products of a k-tile run while the first
// weights of the next one are unpacked.
#pragma once

#include "cuda/linear/quant_small_batch_k_tile.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

constexpr int kTileChunks = 2;
// Inputs of one block of 32 rows of k and one chunk, and of a k-tile of four blocks.
constexpr int kBlockInputBytes = 64 * EXL_CUDA_CHUNK_ROWS;
constexpr int kChunkInputBytes = 4 * kBlockInputBytes;

// Stage of the next k-tile, and the parity of its barriers.
struct StageCounter {
    uint32_t stage = 0, phase = 0;

    __device__ __forceinline__ void advance(int num_stages) {
        if (++stage == static_cast<uint32_t>(num_stages)) stage = 0, phase ^= 1;
    }
};

// A lane's sums. Element [i][4 q + c] is row 8 q + 2 (lane % 4) + c % 2 of chunk i and column
// 16 kColumns + 8 (c / 2) + lane / 4 of the warp's panel.
using ManyRowsSums = float[kTileChunks][EXL_CUDA_CHUNK_ROWS / 2];

// Weights of a block: [k16 step][registers of the A fragment].
using ColumnFragments = uint32_t[2][4];

template <int kColumns, int kBits>
__device__ __forceinline__ void convert_columns(
    ColumnFragments& a, const BlockCodes<kBits>& codes, const WeightFactors& factors
) {
    codes.template fragment<kColumns, 0>(a[0]);
    codes.template fragment<kColumns, 1>(a[1]);
    codes_to_weights<kColumns>(a[0], factors);
    codes_to_weights<kColumns>(a[1], factors);
}

// Starts sums += weights * inputs for one block of all chunks. `inputs` is the first word of the
// descriptor of the block's inputs in the first chunk.
__device__ __forceinline__ void issue_chunks(
    ManyRowsSums& sums, ColumnFragments& a, uint32_t inputs
) {
    group_fence(a);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < kTileChunks; ++i) {
            const uint32_t at = inputs + (i * kChunkInputBytes + step * kBlockInputBytes / 2) / 16;
            group_product<false>(sums[i], a[step], at);
        }
    }
    group_commit();
}

// Adds the products of a k-tile to `sums`, and calls `release_previous` once the products that were
// started before it have ended. Those of the last block may still be running on return.
template <int kColumns, int kBits, class Release>
__device__ __forceinline__ void multiply_columns(
    ManyRowsSums& sums, const SmallBatchPart& part, const uint8_t* k_tile, int num_blocks,
    float panel_scale, uint32_t inputs, int lane, const Release& release_previous
) {
    const uint8_t* blocks = k_tile + part.header_bytes;
    BlockCodes<kBits> codes[4];
    codes[0].load(blocks, lane);
    WeightFactors factors;
    factors.load(part, k_tile, kBits, panel_scale, lane / 4);
    factors.undo_mantissa_shift<kBits>();
    if (num_blocks == 4) {
        ColumnFragments a[4];
        convert_columns<kColumns>(a[0], codes[0], factors);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < 3) codes[i + 1].load(blocks + (i + 1) * 128 * kBits, lane);
            issue_chunks(sums, a[i], inputs + i * kBlockInputBytes / 16);
            group_wait<1>();
            if (i == 0) release_previous();
            if (i < 3) convert_columns<kColumns>(a[i + 1], codes[i + 1], factors);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < num_blocks; ++i) {
            ColumnFragments a;
            if (i > 0) codes[0].load(blocks + i * 128 * kBits, lane);
            convert_columns<kColumns>(a, codes[0], factors);
            issue_chunks(sums, a, inputs + i * kBlockInputBytes / 16);
            group_wait<0>();
            if (i == 0) release_previous();
        }
    }
}

// Adds the products of a k-tile, whose stage has arrived, with its inputs to `sums`.
template <int kColumns, class Release>
__device__ __forceinline__ void add_columns(
    ManyRowsSums& sums, const SmallBatchPart& part, const StageEntry& entry, const uint8_t* buffer,
    int panel, float panel_scale, int lane, const Release& release_previous
) {
    const int num_blocks = entry.blocks(), bits = entry.bits();
    const int k_tile_bytes = part.header_bytes + 128 * bits * num_blocks;
    const uint8_t* k_tile = buffer + entry.weights + panel * k_tile_bytes;
    const uint32_t inputs = matrix_start(buffer + entry.inputs, 16 * EXL_CUDA_CHUNK_ROWS);
// Tests the most frequent bit width first.
#define EXL_WIDTH(width)                                                                \
    if (bits == width) {                                                                \
        multiply_columns<kColumns, width>(                                              \
            sums, part, k_tile, num_blocks, panel_scale, inputs, lane, release_previous \
        );                                                                              \
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

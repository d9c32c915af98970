// Inner loop of the small-batch kernel: a warpgroup multiplies a k-tile of four panels with its
// inputs.
//
// Each warp of a warpgroup has one panel. Columns 0 .. 15 of the four panels are the 64 rows of one
// wgmma, columns 16 .. 31 those of another. The warps convert codes to weights in registers,
// rounded to float16 like dequantized matrices, while the products of the previous block are
// executing. The wgmma reads the inputs from shared memory, once for four warps.
//
// A code is masked out of its word as a subnormal float16 number, 2^-24 times the code. One fused
// multiply-add, with 2^24 times the scale and with the offset, makes it a weight. A power of two
// per panel keeps the weights in float16's range (exl/cuda/linear.h). The sums then need neither
// scales nor sums of inputs, and continue from k-tile to k-tile in the accumulator registers.
#pragma once

#include <type_traits>

#include "cuda/linear/quant_k_tile.cuh"
#include "cuda/linear/quant_small_batch_pipeline.cuh"

#if defined(__CUDACC__) && EXL_IS_HOPPER

namespace exl::cuda {

// A lane's sums for the 32 columns of its panel and kRows rows of the batch. Element [i][4 q + c]
// is column 16 i + 8 (c / 2) + lane / 4 and row 8 q + 2 (lane % 4) + c % 2.
template <int kRows>
using SmallBatchSums = float[2][kRows / 2];

// Loads the power of two that scales a panel's weights, from the panel's header. 1 if there is no
// such panel.
__device__ __forceinline__ float load_panel_scale(const SmallBatchPart& part, int panel) {
    if (panel >= part.num_panels) return 1.0f;
    return __ldg(reinterpret_cast<const float*>(part.packed + panel * part.panel_bytes));
}

__device__ __forceinline__ uint32_t as_bits(__half2 two) {
    return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ __forceinline__ __half2 as_halves(uint32_t bits) {
    return *reinterpret_cast<const __half2*>(&bits);
}

// Factors that turn the codes of a k-tile into weights: code * scale + offset. [0] has those of the
// lane's columns g and g + 8, [1] those of g + 16 and g + 24. The scales are multiplied by 2^24.
struct WeightFactors {
    __half2 scales[2], offsets[2];

    __device__ __forceinline__ void load(
        const SmallBatchPart& part, const uint8_t* k_tile, int bits, float panel_scale, int g
    ) {
        const bool has_floats = part.scale_bytes == 4;
        const uint8_t* stored_offsets = k_tile + 32 * part.scale_bytes;
        load_halves(scales, k_tile, has_floats, g, panel_scale * (1 << 24));
        if (part.offset_kind == EXL_OFFSET_MINIMUMS) {
            load_halves(offsets, stored_offsets, has_floats, g, panel_scale);
            return;
        }
        uint32_t zeros = (1u << (bits - 1)) * 0x01010101u;
        if (part.offset_kind == EXL_OFFSET_ZEROS) {
            zeros = reinterpret_cast<const uint32_t*>(stored_offsets)[g];
        }
        // Interprets the zeros as negative subnormal numbers, -2^-24 * zero, so that the products
        // with the scales are -scale * zero.
        offsets[0] = __hmul2(as_halves(__byte_perm(zeros, 0x80, 0x4140)), scales[0]);
        offsets[1] = __hmul2(as_halves(__byte_perm(zeros, 0x80, 0x4342)), scales[1]);
    }

    // Divides the scales by 2^mantissa_shift, the factor in each code of that quarter.
    template <int kBits>
    __device__ __forceinline__ void undo_mantissa_shift() {
        constexpr float kFactors[4] = {
            1.0f / (1 << mantissa_shift(kBits, 0)), 1.0f / (1 << mantissa_shift(kBits, 1)),
            1.0f / (1 << mantissa_shift(kBits, 2)), 1.0f / (1 << mantissa_shift(kBits, 3))
        };
        scales[0] = __hmul2(scales[0], __floats2half2_rn(kFactors[0], kFactors[1]));
        scales[1] = __hmul2(scales[1], __floats2half2_rn(kFactors[2], kFactors[3]));
    }

    // Factors of one small group, from those of the k-tile.
    template <int kBits>
    __device__ __forceinline__ void set(
        const float (&factors)[4], const float (&minimum_factors)[4],
        const SmallMultipliers<kSmallGroups>& multipliers, int group
    ) {
        float weights[4], lows[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const bool has_minimums = kBits == 2;
            const float scale = factors[q] * (has_minimums ? multipliers.low(group, q)
                                                           : multipliers.whole(group, q));
            lows[q] = has_minimums ? -minimum_factors[q] * multipliers.high(group, q)
                                   : -scale * (1 << (kBits - 1));
            weights[q] = scale * (1 << (24 - mantissa_shift(kBits, q)));
        }
        scales[0] = __floats2half2_rn(weights[0], weights[1]);
        scales[1] = __floats2half2_rn(weights[2], weights[3]);
        offsets[0] = __floats2half2_rn(lows[0], lows[1]);
        offsets[1] = __floats2half2_rn(lows[2], lows[3]);
    }

  private:
    __device__ __forceinline__ static void load_halves(
        __half2 (&to)[2], const uint8_t* from, bool has_floats, int g, float factor
    ) {
        float values[4];
        load_factors(values, from, has_floats, g);
        to[0] = __floats2half2_rn(values[0] * factor, values[1] * factor);
        to[1] = __floats2half2_rn(values[2] * factor, values[3] * factor);
    }
};

// Converts a fragment of codes to weights, in place.
template <int kColumns>
__device__ __forceinline__ void codes_to_weights(uint32_t (&a)[4], const WeightFactors& factors) {
    const __half2 scales = factors.scales[kColumns], offsets = factors.offsets[kColumns];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        a[i] = as_bits(__hfma2(as_halves(a[i]), __low2half2(scales), __low2half2(offsets)));
        a[i + 1] =
            as_bits(__hfma2(as_halves(a[i + 1]), __high2half2(scales), __high2half2(offsets)));
    }
}

// Weights of a block: [columns 16 i .. 16 i + 15][k16 step][registers of the A fragment].
using WeightFragments = uint32_t[2][2][4];

// Factors of a k-tile by its blocks of 32 rows and their k16 steps: the same for all, or those of
// small groups.
template <int kBits, bool is_small>
struct KTileWeights {
    WeightFactors factors;

    __device__ __forceinline__ void load(
        const SmallBatchPart& part, const uint8_t* k_tile, float panel_scale, int g
    ) {
        factors.load(part, k_tile, kBits, panel_scale, g);
        factors.undo_mantissa_shift<kBits>();
    }
    __device__ __forceinline__ WeightFactors of(int, int) const { return factors; }
};
template <int kBits>
struct KTileWeights<kBits, true> {
    float factors[4], minimum_factors[4];
    SmallMultipliers<kSmallGroups> multipliers;

    __device__ __forceinline__ void load(
        const SmallBatchPart& part, const uint8_t* k_tile, float panel_scale, int g
    ) {
        load_factors(factors, k_tile, false, g);
        if constexpr (kBits == 2) load_factors(minimum_factors, k_tile + 64, false, g);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            factors[q] *= panel_scale;
            minimum_factors[q] = kBits == 2 ? minimum_factors[q] * panel_scale : 0.0f;
        }
        multipliers.load(k_tile + part.header_bytes - kPanelColumns * kSmallGroups, g);
    }
    __device__ __forceinline__ WeightFactors of(int block, int step) const {
        WeightFactors found;
        found.set<kBits>(factors, minimum_factors, multipliers, 2 * block + step);
        return found;
    }
};

template <int kBits, bool is_small>
__device__ __forceinline__ void convert_block(
    WeightFragments& a, const BlockCodes<kBits>& codes,
    const KTileWeights<kBits, is_small>& weights, int block
) {
    codes.template fragment<0, 0>(a[0][0]);
    codes.template fragment<0, 1>(a[0][1]);
    codes.template fragment<1, 0>(a[1][0]);
    codes.template fragment<1, 1>(a[1][1]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const WeightFactors factors = weights.of(block, step);
        codes_to_weights<0>(a[0][step], factors);
        codes_to_weights<1>(a[1][step], factors);
    }
}

// Starts total += weights * inputs for one block. `inputs` is the first word of the descriptor of
// the block's inputs. The products run asynchronously.
template <int kRows, bool is_by_rows>
__device__ __forceinline__ void issue_products(
    SmallBatchSums<kRows>& total, WeightFragments& a, uint32_t inputs
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

// Adds the products of kBlocks blocks. `first` has the codes of the first one. Codes are loaded and
// converted while the products of the previous block are executing.
template <int kBlocks, int kBits, bool is_small, int kRows, bool is_by_rows>
__device__ __forceinline__ void multiply_in_turn(
    SmallBatchSums<kRows>& total, const BlockCodes<kBits>& first,
    const KTileWeights<kBits, is_small>& weights, const uint8_t* blocks, uint32_t inputs, int lane
) {
    BlockCodes<kBits> codes[kBlocks];
    codes[0] = first;
    WeightFragments a[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        convert_block<kBits>(a[i], codes[i], weights, i);
        // Loads the next codes ahead of the products. Wider codes have to wait: their registers
        // are free only once the products of the previous block are done.
        constexpr bool kLoadsEarly = kBits <= 5;
        const auto load_next = [&] { codes[i + 1].load(blocks + (i + 1) * 128 * kBits, lane); };
        if (kLoadsEarly && i + 1 < kBlocks) load_next();
        issue_products<kRows, is_by_rows>(total, a[i], inputs + 4 * kRows * i);
        if (i + 1 < kBlocks) group_wait<1>();
        if (!kLoadsEarly && i + 1 < kBlocks) load_next();
    }
    group_wait<0>();
}

template <int kBits, bool is_small, int kRows, bool is_by_rows>
__device__ __forceinline__ void multiply_blocks(
    SmallBatchSums<kRows>& total, const SmallBatchPart& part, const uint8_t* k_tile, int num_blocks,
    float panel_scale, uint32_t inputs, int lane
) {
    const uint8_t* blocks = k_tile + part.header_bytes;
    BlockCodes<kBits> codes;
    // Loads the first codes ahead of the factors. The compiler does not move loads across the
    // branches of `factors.load`.
    codes.load(blocks, lane);
    KTileWeights<kBits, is_small> weights;
    weights.load(part, k_tile, panel_scale, lane / 4);
    const auto multiply = [&](auto count) {
        multiply_in_turn<count.value, kBits, is_small, kRows, is_by_rows>(
            total, codes, weights, blocks, inputs, lane
        );
    };
    if (is_small || num_blocks == 4) {
        multiply(std::integral_constant<int, 4>());
    } else if (num_blocks == 3) {
        multiply(std::integral_constant<int, 3>());
    } else if (num_blocks == 2) {
        multiply(std::integral_constant<int, 2>());
    } else {
        multiply(std::integral_constant<int, 1>());
    }
    group_results(total[0]);
    group_results(total[1]);
}

// Adds the products of a k-tile, whose stage has arrived, with its inputs to `total`. has_small: a
// part may have small groups. Kernels without them keep their registers.
template <int kRows, bool is_by_rows, bool has_small>
__device__ __forceinline__ void add_k_tile(
    SmallBatchSums<kRows>& total, const SmallBatchPart& part, const StageEntry& entry,
    const uint8_t* buffer, int panel, float panel_scale, int lane
) {
    const int num_blocks = entry.blocks(), bits = entry.bits();
    const int k_tile_bytes = part.header_bytes + 128 * bits * num_blocks;
    const uint8_t* k_tile = buffer + entry.weights + panel * k_tile_bytes;
    const uint32_t inputs = matrix_start(buffer + entry.inputs, 16 * kRows);
// Tests the most frequent bit width first.
#define EXL_WIDTH(width, is_small)                                     \
    if (bits == width) {                                               \
        multiply_blocks<width, is_small, kRows, is_by_rows>(           \
            total, part, k_tile, num_blocks, panel_scale, inputs, lane \
        );                                                             \
    } else
    if constexpr (has_small) {
        if (has_small_groups(part.offset_kind)) {
            EXL_WIDTH(6, true)
            EXL_WIDTH(3, true)
            EXL_WIDTH(2, true) {}
            return;
        }
    }
    EXL_WIDTH(4, false)
    EXL_WIDTH(3, false)
    EXL_WIDTH(5, false)
    EXL_WIDTH(6, false)
    EXL_WIDTH(8, false)
    EXL_WIDTH(2, false) {}
#undef EXL_WIDTH
}

}  // namespace exl::cuda

#endif

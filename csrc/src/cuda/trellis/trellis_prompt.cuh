// Rows of prompts around a product with trellis codes: Hadamard transform and plain inputs.
//
// A lane has the 16 adjacent values of a tile, eight lanes a block of 128, a warp four adjacent blocks
// of a row. A transform has three shuffles per value, where a lane with four values (trellis_rows.cuh)
// has five. The additions, and their order, are the same.
#pragma once

#include "cuda/trellis/trellis_finish.cuh"
#include "cuda/trellis/trellis_prepare.cuh"

namespace exl::cuda::trellis {

constexpr int kTileValues = 16;
constexpr int kBlockLanes = EXL_TRELLIS_BLOCK / kTileValues;
constexpr int kWarpBlocks = kWarp / kBlockLanes;
constexpr int kWarpValues = kWarp * kTileValues;

// Whether the kernels for prompts take these operands: plain inputs, and whole aligned tiles. The
// number of rows does not matter, so that no row depends on it.
bool takes_prompt(const PrepareArgs& args);
bool takes_prompt(const FinishArgs& args);

cudaError_t launch_prompt_prepare(const PrepareArgs& args, int rows, int64_t x_bytes, void* stream);
cudaError_t launch_prompt_finish(const FinishArgs& args, void* stream);

#ifdef __CUDACC__

// The transform of trellis_rows.cuh.
__device__ __forceinline__ void transform_tile(float (&v)[kTileValues], int lane) {
#pragma unroll
    for (int step = 1; step < kTileValues; step *= 2) {
#pragma unroll
        for (int i = 0; i < kTileValues; ++i) {
            if ((i & step) != 0) continue;
            const float one = v[i], other = v[i + step];
            v[i] = one + other, v[i + step] = one - other;
        }
    }
#pragma unroll
    for (int step = 1; step < kBlockLanes; step *= 2) {
#pragma unroll
        for (float& one : v) {
            const float other = __shfl_xor_sync(0xffffffffu, one, step);
            one = lane & step ? other - one : one + other;
        }
    }
}

// 16 values as they are in memory.
template <class T>
struct Tile {
    static constexpr int kLoads = kTileValues * sizeof(T) / 16;
    uint4 raw[kLoads];

    __device__ __forceinline__ void load(const void* from) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) raw[i] = static_cast<const uint4*>(from)[i];
    }
    __device__ __forceinline__ void store(void* to) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) static_cast<uint4*>(to)[i] = raw[i];
    }
    __device__ __forceinline__ float operator[](int i) const {
        const uint4& four = raw[i * sizeof(T) / 16];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        const int at = i % (16 / static_cast<int>(sizeof(T)));
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[at]);
        } else {
            const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[at / 2]));
            return at % 2 ? two.y : two.x;
        }
    }
    __device__ __forceinline__ void set(const float (&v)[kTileValues]) {
        uint32_t words[4 * kLoads];
#pragma unroll
        for (int i = 0; i < 4 * kLoads; ++i) {
            if constexpr (sizeof(T) == 4) {
                words[i] = __float_as_uint(v[i]);
            } else {
                words[i] = half_pair(v[2 * i], v[2 * i + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            raw[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
};

// Stores v * factor as plain inputs of a row, for the tile `lane` of this warp's blocks, which exists
// or not. Two lanes have the 32 values between which the order differs (store_block). Each gets half
// of the other's pairs, so that it stores 32 adjacent bytes.
__device__ __forceinline__ void store_plain(
    const Target& to, int64_t row, int first, bool exists, const float (&v)[kTileValues],
    float factor, int lane
) {
    constexpr int kPairs = 4;  // of each half of a tile
    uint32_t pairs[2][kPairs];
#pragma unroll
    for (int i = 0; i < kTileValues / 2; ++i) {
        pairs[i / kPairs][i % kPairs] = half_pair(v[2 * i] * factor, v[2 * i + 1] * factor);
    }
    const bool is_second = lane % 2 != 0;
    Tile<__half> out;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t own[2], other[2];
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            own[high] = is_second ? pairs[high][r + 2] : pairs[high][r];
            const uint32_t sent = is_second ? pairs[high][r] : pairs[high][r + 2];
            other[high] = __shfl_xor_sync(0xffffffffu, sent, 1);
        }
        out.raw[r] = is_second ? make_uint4(other[0], other[1], own[0], own[1])
                               : make_uint4(own[0], own[1], other[0], other[1]);
    }
    if (exists) out.store(reinterpret_cast<__half*>(to.out) + row * to.k + first);
}

#endif  // __CUDACC__

}  // namespace exl::cuda::trellis

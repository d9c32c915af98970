// The layout of quantized matrices (cuda.h) as code: planes of a block, pairs of a lane.
#pragma once

#include "common.cuh"

namespace exl::cuda {

constexpr int kBlockRows = 32;
constexpr int kStripColumns = 32;
constexpr int kUnitBlocks = 4;

inline int64_t scale_bytes_of(int type) { return type == kF32 ? 4 : 2; }

#ifdef __CUDACC__

// Widths of a block's planes, low bits first; the second is 0 where there is one.
__host__ __device__ constexpr int low_plane(int bits) {
    return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits;
}
__host__ __device__ constexpr int high_plane(int bits) { return bits - low_plane(bits); }

// Pair P = 8 i + 4 s + r of lane 4 g + t, by what it is in the matrix: column 8 `quarter` + g, and
// rows 8 t + 2 `rows` and the one after it.
__host__ __device__ constexpr int pair_of(int quarter, int rows) {
    return 8 * (quarter / 2) + 4 * (rows / 2) + 2 * (rows % 2) + quarter % 2;
}

// A lane's words of a plane of p bits: together, and with p = 8 in two halves.
template <int p>
__device__ __forceinline__ void load_words(const uint8_t* plane, int lane, uint32_t (&words)[p]) {
    if constexpr (p == 1) {
        words[0] = reinterpret_cast<const uint32_t*>(plane)[lane];
    } else if constexpr (p == 2) {
        const uint2 both = reinterpret_cast<const uint2*>(plane)[lane];
        words[0] = both.x;
        words[1] = both.y;
    } else {
#pragma unroll
        for (int i = 0; i < p / 4; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(plane)[kWarp * i + lane];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    }
}
template <int p>
__device__ __forceinline__ void store_words(const uint32_t (&words)[p], uint8_t* plane, int lane) {
    if constexpr (p == 1) {
        reinterpret_cast<uint32_t*>(plane)[lane] = words[0];
    } else if constexpr (p == 2) {
        reinterpret_cast<uint2*>(plane)[lane] = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < p / 4; ++i) {
            reinterpret_cast<uint4*>(plane)[kWarp * i + lane] =
                make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
}

// Two codes of a pair, 16 bits apart, out of a lane's words of a plane.
template <int p>
__device__ __forceinline__ uint32_t codes_of(const uint32_t (&words)[p], int pair) {
    constexpr int kPerWord = 16 / p;
    constexpr uint32_t kMask = ((1u << p) - 1) * 0x00010001u;
    return words[pair / kPerWord] >> p * (pair % kPerWord) & kMask;
}

// Index of a column's scale among the 32 of its strip.
__host__ __device__ constexpr int scale_index(int column) {
    return 4 * (column % 8) + column / 8;
}

// Bytes of a unit before its blocks, and of these the scales'.
struct UnitHead {
    int scale_bytes;  // of one scale
    int offset_kind;

    __host__ __device__ int offsets() const { return kStripColumns * scale_bytes; }
    __host__ __device__ int blocks() const {
        const int offset_bytes = offset_kind == EXL_OFFSET_MIDDLE  ? 0
                                 : offset_kind == EXL_OFFSET_ZEROS ? 1
                                                                   : scale_bytes;
        return kStripColumns * (scale_bytes + offset_bytes);
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

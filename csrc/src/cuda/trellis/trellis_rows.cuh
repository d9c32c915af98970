// Rows of activations around a product with trellis codes: Hadamard transform, and prepared inputs.
//
// A warp has a block of 128 values: lane i has values 4 i .. 4 i + 3.
#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "exl/cuda/trellis.h"

namespace exl::cuda::trellis {

constexpr int kValues = EXL_TRELLIS_BLOCK / kWarp;  // of a lane
constexpr int kSetRows = 4;                         // of the form `integers`
constexpr float kLargest = 127 * 256;               // integer

inline __host__ __device__ int row_tiles(int rows) { return rows <= 8 ? 1 : 4; }

// Bytes of the float16 numbers of the form `halves`, which sums follow.
inline int64_t halves_bytes(int rows, int k) {
    return ceil_div(rows, 32) * (k / EXL_TRELLIS_BLOCK) * kSteps * row_tiles(rows) * 512;
}

// Where prepared inputs go.
struct Target {
    uint8_t* out;
    float2* scales;  // of integers
    float* sums;     // of halves for MUL1: [rows][blocks], else null
    const __half* suh;
    int form;
    int row_tiles;
    int blocks;  // k / 128
    int k, first_in, in_features;

    Target() = default;
    __host__ explicit Target(const ExlTrellisInputs& to)
        : out(static_cast<uint8_t*>(to.out)),
          scales(nullptr),
          sums(nullptr),
          suh(static_cast<const __half*>(to.matrix->suh)),
          form(to.form),
          row_tiles(trellis::row_tiles(to.rows)),
          blocks(to.matrix->k / EXL_TRELLIS_BLOCK),
          k(to.matrix->k),
          first_in(to.matrix->first_in),
          in_features(to.matrix->in_features) {
        const int64_t sets = ceil_div(to.rows, kSetRows);
        scales = reinterpret_cast<float2*>(out + sets * blocks * 1024);
        if (form == EXL_TRELLIS_HALVES && to.matrix->codebook == EXL_CODEBOOK_MUL1) {
            sums = reinterpret_cast<float*>(out + halves_bytes(to.rows, k));
        }
    }
};

#ifdef __CUDACC__

// Hadamard transform of a warp's block, without the factor 1 / sqrt(128).
__device__ __forceinline__ void transform(float (&v)[kValues], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
        for (float& one : v) {
            const float other = __shfl_xor_sync(0xffffffffu, one, step);
            one = lane & step ? other - one : one + other;
        }
    }
}
constexpr float kNormalize = 0.08838834764831845f;  // 1 / sqrt(128)

// Factors of a lane's values in float16, as they are in memory: a conversion would wait for the load.
struct Halves {
    uint2 raw = {};

    Halves() = default;
    __device__ __forceinline__ explicit Halves(const __half* from)
        : raw(*reinterpret_cast<const uint2*>(from)) {}
    __device__ __forceinline__ void to_floats(float (&to)[kValues]) const {
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
        to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
    }
};
__device__ __forceinline__ void load_halves(const __half* from, float (&to)[kValues]) {
    Halves(from).to_floats(to);
}

// Values first .. first + 3 of a row of `count`; zero outside of it.
template <class T>
__device__ __forceinline__ void load_values(
    const T* row, int first, int count, bool is_aligned, float (&to)[kValues]
) {
    if (is_aligned && first >= 0 && first + kValues <= count) {
        if constexpr (sizeof(T) == 2) {
            load_halves(row + first, to);
        } else {
            const float4 v = *reinterpret_cast<const float4*>(row + first);
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const bool exists = first + i >= 0 && first + i < count;
        to[i] = exists ? to_float(row[first + i]) : 0.0f;
    }
}

__device__ __forceinline__ uint32_t half_pair(float x, float y) {
    const __half2 pair = __halves2half2(from_float<__half>(x), from_float<__half>(y));
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Stores a block of prepared inputs: v * factor, after the transform.
__device__ __forceinline__ void store_block(
    const Target& to, int row, int block, const float (&v)[kValues], float factor, int lane
) {
    const int tile = lane / 4, step = tile / 2;
    // Pair p of the lane has values 4 lane + 2 p and the next one: q + p, at half `high` of a tile.
    const int q = lane % 2 * 2, high = lane / 2 % 2;
    if (to.form == EXL_TRELLIS_INTEGERS) {
        float largest = 0.0f;
        bool is_finite = true;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            largest = fmaxf(largest, fabsf(v[i]));
            is_finite &= fabsf(v[i]) <= 3.4e38f;
        }
        largest = warp_max(largest);
        const float inverse = largest > 0.0f ? kLargest / largest : 0.0f;
        int whole[kValues], sum = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            whole[i] = max(-32512, min(32512, __float2int_rn(v[i] * inverse)));
            sum += whole[i];
        }
#pragma unroll
        for (int i = kWarp / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
        is_finite = __all_sync(0xffffffffu, is_finite);
        const int64_t unit = static_cast<int64_t>(row / kSetRows) * to.blocks + block;
        uint8_t* out = to.out + unit * 1024 + step * 256 + tile % 2 * 4 + high * 2;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const uint32_t x = whole[2 * p], y = whole[2 * p + 1];
            const uint32_t high_x = (x + 128) >> 8, high_y = (y + 128) >> 8;
            const int to_lane = 8 * (row % kSetRows) + q + p;
            *reinterpret_cast<uint16_t*>(out + to_lane * 8) = (high_x & 255) | (high_y & 255) << 8;
            *reinterpret_cast<uint16_t*>(out + (to_lane + 4) * 8) = (x & 255) | (y & 255) << 8;
        }
        if (lane == 0) {
            const float scale =
                is_finite ? largest / kLargest * factor : __int_as_float(0x7fffffff);
            to.scales[unit * kSetRows + row % kSetRows] = make_float2(scale, kZero * sum);
        }
        return;
    }
    float sum = 0.0f;  // of the rounded numbers
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const uint32_t pair = half_pair(v[2 * p] * factor, v[2 * p + 1] * factor);
        int64_t at;  // in bytes
        if (to.form == EXL_TRELLIS_HALVES) {
            const int64_t unit = static_cast<int64_t>(row / 32) * to.blocks + block;
            at = ((unit * kSteps + step) * to.row_tiles + row % 32 / 8) * 512 +
                 (4 * (row % 8) + q + p) * 16 + tile % 2 * 8 + high * 4;
        } else {
            const int place = 32 * step + 8 * (q + p) + 4 * (tile % 2) + 2 * high;
            at = 2 * (static_cast<int64_t>(row) * to.k + EXL_TRELLIS_BLOCK * block + place);
        }
        *reinterpret_cast<uint32_t*>(to.out + at) = pair;
        const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&pair));
        sum += rounded.x + rounded.y;
    }
    if (to.sums != nullptr) {
        sum = warp_sum(sum);
        if (lane == 0) to.sums[static_cast<int64_t>(row) * to.blocks + block] = sum;
    }
}

// Multiplies a block by its suh, transforms it and stores it.
__device__ __forceinline__ void prepare_block(
    const Target& to, int row, int block, float (&v)[kValues], const Halves& suh, float factor,
    int lane
) {
    float factors[kValues];
    suh.to_floats(factors);
#pragma unroll
    // Rounded, so that no compiler contracts it with the first sums of the transform in some of
    // the kernels.
    for (int i = 0; i < kValues; ++i) v[i] = __fmul_rn(v[i], factors[i]);
    transform(v, lane);
    store_block(to, row, block, v, factor * kNormalize, lane);
}

#endif  // __CUDACC__

}  // namespace exl::cuda::trellis

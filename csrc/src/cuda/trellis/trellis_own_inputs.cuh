// Inputs that the decode kernel prepares itself: form `integers`, in shared memory.
//
// Mapping    A block prepares the units of 128 inputs that its items need, a warp one unit of a row at
//            a time. With a norm, it reads the whole rows for their sums of squares.
// Layout     [parts][k / 128][4 steps][m rows][8 lanes][2 tiles][4 bytes], then [parts][k / 128]
//            [m rows] pairs of a scale and an offset (exl/cuda/trellis.h), then sums of squares
//            [m rows][warps]. The norm's factor is not in the scales: it multiplies the results.
// Overlap    A first pass over old or unwritten rows runs before the wait for the previous kernel. It
//            loads the code, suh and the norm's weights into caches. Rows bypass the L1 cache, so
//            that the second pass reads what the previous kernel has written.
#pragma once

#include "cuda/trellis/trellis_decode_shape.cuh"
#include "cuda/trellis/trellis_rows.cuh"

namespace exl::cuda::trellis {

constexpr int kOwnUnitBytes = 256;  // of a row

#ifdef __CUDACC__

struct OwnInputs {
    uint8_t* bytes;
    float2* scales;
    float* squares;
    int k_units;

    __device__ __forceinline__ OwnInputs(const WorkArgs& args, uint8_t* memory)
        : bytes(memory), k_units(args.division.group_items / 2) {
        const int units = args.count * k_units * args.m;
        scales = reinterpret_cast<float2*>(memory + units * kOwnUnitBytes);
        squares = reinterpret_cast<float*>(scales + units);
    }
    // Factor of the norm of a row.
    __device__ __forceinline__ float factor(const OwnRows& rows, int row) const {
        if (rows.norm == nullptr) return 1.0f;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kDecodeWarps; ++i) sum += squares[row * kDecodeWarps + i];
        return rsqrtf(sum / rows.features + rows.eps);
    }
};

// Values first .. first + 3 of an aligned row of `count`, a multiple of 4; zero outside of it.
template <class X>
__device__ __forceinline__ void load_new(const X* row, int first, int count, float (&to)[kValues]) {
    to[0] = to[1] = to[2] = to[3] = 0.0f;
    if (first < 0 || first >= count) return;
    if constexpr (sizeof(X) == 2) {
        const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(row + first));
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
        to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
    } else {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(row + first));
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
}

// Stores a transformed block of a row as integers. `to`: its first step, of `step_stride` bytes each.
__device__ __forceinline__ void store_own(
    const float (&v)[kValues], uint8_t* to, int step_stride, float2* scale, int lane
) {
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
    const int tile = lane / 4, q = lane % 2 * 2, high = lane / 2 % 2;
    uint8_t* out = to + tile / 2 * step_stride + tile % 2 * 4 + high * 2;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const uint32_t x = whole[2 * p], y = whole[2 * p + 1];
        const uint32_t high_x = (x + 128) >> 8, high_y = (y + 128) >> 8;
        *reinterpret_cast<uint16_t*>(out + (q + p) * 8) = (high_x & 255) | (high_y & 255) << 8;
        *reinterpret_cast<uint16_t*>(out + (q + p + 4) * 8) = (x & 255) | (y & 255) << 8;
    }
    if (lane == 0) {
        const float one = is_finite ? largest / kLargest * kNormalize : __int_as_float(0x7fffffff);
        *scale = make_float2(one, kZero * sum);
    }
}

template <class X>
__device__ __forceinline__ void prepare_own_rows(
    const WorkArgs& args, const OwnInputs& own, uint32_t first, uint32_t last, int warp, int lane
) {
    const OwnRows& rows = args.rows;
    const uint32_t group_items = args.division.group_items, k_units = own.k_units;
    const X* x = static_cast<const X*>(rows.x);
    const int m = args.m;
    if (rows.norm != nullptr) {
#pragma unroll 1
        for (int row = 0; row < m; ++row) {
            float sum = 0.0f;
#pragma unroll 4
            for (int i = kValues * threadIdx.x; i < rows.features;
                 i += kValues * kDecodeWarps * kWarp) {
                float v[kValues];
                load_new(x + row * rows.x_stride, i, rows.features, v);
#pragma unroll
                for (float one : v) sum += one * one;
            }
            sum = warp_sum(sum);
            if (lane == 0) own.squares[row * kDecodeWarps + warp] = sum;
        }
    }
#pragma unroll 1
    for (int p = 0; p < args.count; ++p) {
        const WorkPart& part = args.parts[p];
        const uint32_t begin = part.first_group * group_items;
        const uint32_t from = max(first, begin), to = min(last, part.last_group * group_items);
        if (from >= to) continue;
        const uint32_t of_part = from - begin;
        const uint32_t k_item =
            of_part - args.division.by_group_items.divide(of_part) * group_items;
        const uint32_t start = k_item / 2, end = (k_item + to - from + 1) / 2;
        const uint32_t count = min(k_units, end - start);
#pragma unroll 1
        for (uint32_t i = warp; i < count; i += kDecodeWarps) {
            const uint32_t unit = start + i < k_units ? start + i : start + i - k_units;
            const int value = EXL_TRELLIS_BLOCK * unit + kValues * lane;
            const int of_row = value - rows.first_in[p];
            float factors[kValues];
            load_halves(rows.suh[p] + value, factors);
            if (rows.norm != nullptr) {
                float norm[kValues];
                load_new(rows.norm, of_row, rows.features, norm);
#pragma unroll
                for (int j = 0; j < kValues; ++j) factors[j] *= norm[j];
            }
            const uint32_t place = p * k_units + unit;
#pragma unroll 1
            for (int row = 0; row < m; ++row) {
                float v[kValues];
                load_new(x + row * rows.x_stride, of_row, rows.features, v);
#pragma unroll
                for (int j = 0; j < kValues; ++j) v[j] *= factors[j];
                transform(v, lane);
                store_own(
                    v, own.bytes + (place * kSteps * m + row) * 64, 64 * m,
                    own.scales + place * m + row, lane
                );
            }
        }
    }
}

// Prepares the inputs of items first .. last - 1 of the launch.
__device__ __forceinline__ void prepare_own(
    const WorkArgs& args, const OwnInputs& own, uint32_t first, uint32_t last, int warp, int lane
) {
    if (args.rows.is_half) {
        prepare_own_rows<__half>(args, own, first, last, warp, lane);
    } else {
        prepare_own_rows<float>(args, own, first, last, warp, lane);
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda::trellis

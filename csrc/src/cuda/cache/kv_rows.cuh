// Rows of the key-value cache on the device: Hadamard transform, encoding, and conversion of codes
// to float16.
//
// Contract   Layout and formulas: exl/formats/kv.h. Codes equal the reference's bit for bit, so
//            every stage of the transform rounds to float16.
// Mapping    A warp holds a row as `HeadRow`. Lane l has elements 2 l and 2 l + 1 of each unit of
//            64, so that a unit's two transforms are butterflies between lanes.
#pragma once

#include "cuda/common/common.cuh"

namespace exl::cuda {

constexpr int kMaxHead = 256;    // of the kernels that hold a head per warp
constexpr int kWideHead = 512;   // of the others
constexpr int kSharedRow = 576;  // of shared rows, which are keys and values at once
constexpr int kUnit = 64;        // elements that are transformed together
constexpr int kScaleGroup = 32;  // elements that share a scale

__host__ __device__ constexpr bool is_codes(int type) { return type == kI8 || type == kU8; }
// Bytes of a row's values or codes, excluding scales.
__host__ __device__ constexpr int value_bytes(int type, int d) {
    return type == kF32 ? 4 * d : type == kF16 ? 2 * d : type == kU8 ? d / 2 : d;
}
__host__ __device__ constexpr int row_bytes(int type, int d) {
    return value_bytes(type, d) + (is_codes(type) ? d / kScaleGroup * 2 : 0);
}

#ifdef __CUDACC__

template <int width>
using HeadRow = float2[width / kUnit];  // row of a head of at most `width` elements

// Loads one lane's elements of `count` rows. All loads are in flight before the first one is used.
// Elements past a row's end are zero, and so are all elements of a null row. `d` and the offsets of
// the rows are even numbers of elements.
template <int count, int units>
__device__ __forceinline__ void load_rows(
    float2 (&to)[count][units], const void* const (&from)[count], int type, int d, int lane
) {
    if (type == kF16) {
        uint32_t two[count][units] = {};
#pragma unroll
        for (int n = 0; n < count; ++n) {
            const auto* row = static_cast<const uint32_t*>(from[n]) + lane;
#pragma unroll
            for (int u = 0; u < units; ++u) {
                if (from[n] != nullptr && u * kUnit + 2 * lane < d) two[n][u] = row[u * kUnit / 2];
            }
        }
#pragma unroll
        for (int n = 0; n < count; ++n) {
#pragma unroll
            for (int u = 0; u < units; ++u) {
                to[n][u] = __half22float2(*reinterpret_cast<const __half2*>(&two[n][u]));
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < count; ++n) {
        const auto* row = static_cast<const float2*>(from[n]) + lane;
#pragma unroll
        for (int u = 0; u < units; ++u) {
            to[n][u] = make_float2(0.0f, 0.0f);
            if (from[n] != nullptr && u * kUnit + 2 * lane < d) to[n][u] = row[u * kUnit / 2];
        }
    }
}

template <int units>
__device__ __forceinline__ void load_row(
    float2 (&to)[units], const void* from, int type, int d, int lane
) {
    float2 rows[1][units];
    const void* const only[1] = {from};
    load_rows<1>(rows, only, type, d, lane);
#pragma unroll
    for (int u = 0; u < units; ++u) to[u] = rows[0][u];
}

template <int units>
__device__ __forceinline__ void store_row(
    void* to, const float2 (&x)[units], int type, int d, int lane
) {
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) continue;
        if (type == kF16) {
            *reinterpret_cast<__half2*>(static_cast<__half*>(to) + i) =
                __halves2half2(from_float<__half>(x[u].x), from_float<__half>(x[u].y));
        } else {
            *reinterpret_cast<float2*>(static_cast<float*>(to) + i) = x[u];
        }
    }
}

// Replaces each unit x by H x / n, its normalized Hadamard transform. This maps queries into the
// space of the codes, and sums of codes back.
template <int units>
__device__ __forceinline__ void hadamard_row(float2 (&x)[units], int d, int lane) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int u = 0; u < units; ++u) {
            if (step == kWarp / 2 && d - u * kUnit < kUnit) continue;  // a unit of 32: 16 points
            const float a = __shfl_xor_sync(0xffffffffu, x[u].x, step);
            const float b = __shfl_xor_sync(0xffffffffu, x[u].y, step);
            x[u].x = upper ? a - x[u].x : x[u].x + a;
            x[u].y = upper ? b - x[u].y : x[u].y + b;
        }
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const float norm = d - u * kUnit < kUnit ? 2.0f / kWarp : 1.0f / kWarp;
        x[u].x *= norm;
        x[u].y *= norm;
    }
}

__device__ __forceinline__ uint8_t to_f8e4m3(float x) {
    if (!isfinite(x)) return signbit(x) ? 0xff : 0x7f;
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// round(fp16(fp16(y / largest) * h + h)), clamped to the range of codes. NaN, the result of 0 / 0,
// becomes code 0.
__device__ __forceinline__ int code_of(float y, float largest, float half_range) {
    const float ratio = __half2float(__float2half_rn(__fdiv_rn(y, largest)));
    const float code = __half2float(__float2half_rn(__fadd_rn(ratio * half_range, half_range)));
    return static_cast<int>(fminf(fmaxf(rintf(code), 0.0f), 2.0f * half_range - 1.0f));
}

// Stores one unit of a row, which has `points` pairs of elements, as codes of `bits` bits and
// scales.
template <int bits>
__device__ __forceinline__ void encode_unit(
    uint8_t* row, float2 x, int unit, int points, int d, int lane
) {
    constexpr float kHalfRange = 1 << (bits - 1);
    __half2 y = __floats2half2_rn(x.x, x.y);
    for (int step = 1; step < points; step *= 2) {
        const __half2 other = __shfl_xor_sync(0xffffffffu, y, step);
        y = (lane & step) != 0 ? __hsub2_rn(other, y) : __hadd2_rn(y, other);
    }
    const float2 wide = __half22float2(y);
    const bool finite = isfinite(wide.x) && isfinite(wide.y);
    float largest = finite ? fmaxf(fabsf(wide.x), fabsf(wide.y)) : INFINITY;
#pragma unroll
    for (int step = 1; step < kScaleGroup / 2; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    if (lane >= points) return;
    if (largest == INFINITY) largest = NAN;
    const int even = code_of(wide.x, largest, kHalfRange);
    const int odd = code_of(wide.y, largest, kHalfRange);
    if (bits == 4) {
        row[unit * kUnit / 2 + lane] = static_cast<uint8_t>(even | odd << 4);
    } else {
        reinterpret_cast<uint16_t*>(row)[unit * kUnit / 2 + lane] =
            static_cast<uint16_t>(even | odd << 8);
    }
    if (lane % 16 == 0) {
        uint8_t* scales = row + d * bits / 8;
        reinterpret_cast<__half*>(scales)[unit * 2 + lane / 16] =
            __float2half_rn(largest * (1.0f / kHalfRange));
    }
}

// Stores a row in the format of the cache. Values beyond float16's range become infinite there, as
// in the reference.
template <int units>
__device__ __forceinline__ void encode_row(
    uint8_t* row, const float2 (&x)[units], int type, int d, int lane
) {
#pragma unroll
    for (int u = 0; u < units; ++u) {
        if (u * kUnit >= d) break;
        const int points = d - u * kUnit >= kUnit ? 32 : 16;
        const int i = u * kUnit + 2 * lane;
        if (type == kU8) {
            encode_unit<4>(row, x[u], u, points, d, lane);
        } else if (type == kI8) {
            encode_unit<8>(row, x[u], u, points, d, lane);
        } else if (i >= d) {
            continue;
        } else if (type == kF16) {
            reinterpret_cast<__half2*>(row)[i / 2] = __floats2half2_rn(x[u].x, x[u].y);
        } else if (type == kF32) {
            reinterpret_cast<float2*>(row)[i / 2] = x[u];
        } else {
            reinterpret_cast<uint16_t*>(row)[i / 2] =
                static_cast<uint16_t>(to_f8e4m3(x[u].x) | to_f8e4m3(x[u].y) << 8);
        }
    }
}

// ---- codes as float16 ---------------------------------------------------------------------------

__device__ __forceinline__ uint32_t bits_of(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Masks of two 4-bit codes, one in each half of a word, that start at bit 0 or at bit 4.
constexpr uint32_t kLowCodes = 0x000f000f, kNextCodes = 0x00f000f0;
// Bytes 0 and 1 (pair 0) or 2 and 3 (pair 1) of w, as the low bytes of two halves. The high bytes
// come from `above`.
template <int pair>
__device__ __forceinline__ uint32_t byte_pair(uint32_t w, uint32_t above = 0) {
    return __byte_perm(w, above, pair == 0 ? 0x4140 : 0x4342);
}

// `low_codes` and `next_codes` convert the 4-bit codes at bits 0 to 3, or 4 to 7, of each half of w
// to float16 and subtract 8. Both are exact. 0x6400 is the float16 number 1024, whose last bit
// counts 1, so that OR with a code adds the code. A code at bit 4 counts 16 times as much.
template <uint32_t mask>
__device__ __forceinline__ __half2 masked_codes(uint32_t w) {
    uint32_t x;  // (w & mask) | 0x64006400 in one instruction; the compiler would emit two
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(w), "n"(mask), "r"(0x64006400u));
    return halves(x);
}
__device__ __forceinline__ __half2 low_codes(uint32_t w) {
    return __hsub2(masked_codes<kLowCodes>(w), __half2half2(__ushort_as_half(0x6408)));
}
__device__ __forceinline__ __half2 next_codes(uint32_t w) {
    const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00));
    const __half2 offset = __half2half2(__ushort_as_half(0xd480));  // -72 = -(1024 / 16 + 8)
    return __hfma2(masked_codes<kNextCodes>(w), sixteenth, offset);
}
// Converts the 8-bit codes in bytes 0 and 1, or 2 and 3, of w to float16 and subtracts 128. Exact.
template <int pair>
__device__ __forceinline__ __half2 byte_codes(uint32_t w) {
    return __hsub2(halves(byte_pair<pair>(w, 0x64646464u)), __half2half2(__ushort_as_half(0x6480)));
}
// Converts the f8e4m3 numbers in bytes 0 and 1, or 2 and 3, of w to float16.
template <int pair>
__device__ __forceinline__ __half2 byte_floats(uint32_t w) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(pair == 0 ? w & 0xffffu : w >> 16);
    return static_cast<__half2>(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
}

#endif  // __CUDACC__

}  // namespace exl::cuda

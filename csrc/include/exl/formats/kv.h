// Rows of the key-value cache: how one head's key or value at one position is stored.
//
//   f32, f16   d values
//   f8e4m3     d values: sign, 4 bits of exponent (bias 7), 3 bits of mantissa. Rounded to nearest,
//              ties to even, saturated at 448. 0x7f and 0xff are NaN. Infinities and NaN are stored
//              as NaN.
//   i8         d codes of 8 bits, then d / 32 float16 scales
//   u8         d / 2 bytes of two 4-bit codes, the even element low, then d / 32 float16 scales
//
// The tensor's type names the format. Rows of i8 and of u8 are plain bytes: the sign of the type
// has no meaning.
//
// Codes encode a row y after a Hadamard transform. The transform works on units of 64 consecutive
// elements of a head. If the head dimension is no multiple of 64, its last 32 elements form a unit
// of their own. Elements of even index and elements of odd index are transformed separately, by an
// unnormalized Walsh-Hadamard transform H of half a unit: n = 32 or 16 points, natural order, every
// stage rounded to float16. Each 32 consecutive elements of y share a scale:
//
//   A = max |y|    code = clamp(rint(fp16(fp16(y / A) * h + h)), 0, 2 h - 1)    scale = fp16(A / h)
//   x = H ((code - h) * scale) / n
//
// with h = 128 for i8 and h = 8 for u8. A group of zeros has scale 0 and codes 0. A value that is
// not finite makes the scales of its unit NaN.
#pragma once

#include <cstdint>

#include "exl/tensor_view.h"

namespace exl {

constexpr int64_t kKvUnit = 64;   // elements that are transformed together
constexpr int64_t kKvGroup = 32;  // elements that share a scale

// Functions are static: the linker would merge shared ones across instruction sets.
static constexpr bool is_packed_kv(DType dtype) { return dtype == DType::i8 || dtype == DType::u8; }

static constexpr int64_t kv_code_bytes(DType dtype, int64_t d) {
    return dtype == DType::i8 ? d : d / 2;
}

// Tensor elements per row.
static constexpr int64_t kv_row_size(DType dtype, int64_t d) {
    return is_packed_kv(dtype) ? kv_code_bytes(dtype, d) + d / kKvGroup * 2 : d;
}

// Head dimension of rows of this size, or -1 if no head has such rows.
static constexpr int64_t kv_head_dim(DType dtype, int64_t row_size) {
    if (!is_packed_kv(dtype)) return row_size;
    const int64_t group = kv_row_size(dtype, kKvGroup);
    return row_size % group == 0 ? row_size / group * kKvGroup : -1;
}

}  // namespace exl

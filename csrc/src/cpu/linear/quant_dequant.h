// Dequantization of panels, block by block, into one of two layouts:
//
//   FloatRows    [rows][16]
//   BFloatPairs  [rows / 2][16][2]   rows 2 i and 2 i + 1 of a column are adjacent, as AMX tiles
//                                    of weights require
//
// Accuracy   (code - zero) * scale + minimum, or E4M3 number * scale. The difference and the number
//            are exact; the fused multiply-add rounds once. BFloatPairs rounds that result once more to bf16 (nearest even).
#pragma once

#include "cpu/linear/quant_vec.h"

namespace exl::EXL_ISA {

// Output columns of a pair of panels, whose products are computed together.
constexpr int kAccColumns = 2 * static_cast<int>(kPanel);

// Scale and offset of one group's 16 columns.
struct alignas(64) GroupColumns {
    float scale[kPanel];
    float bias[kPanel];  // 2^23 + zero; subtracted from 2^23 + code, see based_row
    float minimum[kPanel];
};

// Bit pattern of the float 2^23. OR-ing an integer below 2^23 into it gives the float 2^23 +
// integer.
constexpr int32_t kFloatBits = 0x4b000000;
constexpr float kFloatBase = 8388608.0f;

// Returns 2^23 + the code in byte Row of each lane.
template <int Row>
static inline Vec based_row(Codes v) {
#if defined(__AVX512F__)
    const __m512i moved = _mm512_srli_epi32(v, 8 * Row);
    // (moved & 0xff) | kFloatBits
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        moved, _mm512_set1_epi32(0xff), _mm512_set1_epi32(kFloatBits), 0xea
    ));
#elif defined(__AVX2__)
    const __m256i code =
        Row == 3 ? _mm256_srli_epi32(v, 24)
                 : _mm256_and_si256(_mm256_srli_epi32(v, 8 * Row), _mm256_set1_epi32(0xff));
    return _mm256_castsi256_ps(_mm256_or_si256(code, _mm256_set1_epi32(kFloatBits)));
#else
    return kFloatBase + static_cast<float>(v.lane >> 8 * Row & 0xff);
#endif
}

// Returns 2^-8 times the E4M3 number in byte Row of each lane: the float16 number with the same
// exponent and mantissa bits. Conversion from float16 is exact for subnormal numbers as well.
template <int Row>
static inline Vec e4m3_row(Codes v) {
#if defined(__AVX512F__)
    const __m512i number = _mm512_srli_epi32(v, 8 * Row);
    const __m512i half = _mm512_or_si512(
        _mm512_slli_epi32(_mm512_and_si512(number, _mm512_set1_epi32(0x7f)), 7),
        _mm512_slli_epi32(_mm512_and_si512(number, _mm512_set1_epi32(0x80)), 8)
    );
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half));
#elif defined(__AVX2__)
    const __m256i number = _mm256_srli_epi32(v, 8 * Row);
    const __m256i half = _mm256_or_si256(
        _mm256_slli_epi32(_mm256_and_si256(number, _mm256_set1_epi32(0x7f)), 7),
        _mm256_slli_epi32(_mm256_and_si256(number, _mm256_set1_epi32(0x80)), 8)
    );
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
    const uint32_t number = v.lane >> 8 * Row;
    return half_to_float(static_cast<uint16_t>((number & 0x7f) << 7 | (number & 0x80) << 8));
#endif
}

// Loads scales and offsets of a group. `at` is the index of its first column in both arrays.
static inline GroupColumns load_group(const QuantMatrix& w, int64_t at, int form) {
    const auto widen = [&](const void* grid, float* to) {
        for (int c = 0; c < kPanel; c += kLanes) {
            store(to + c, load_grid(grid, w.scale_dtype, at + c));
        }
    };
    GroupColumns group;
    widen(w.scales, group.scale);
    if (form == kE4m3) {
        for (float& scale : group.scale) scale *= 256.0f;  // undoes the factor of e4m3_row
    }
    const float middle =
        w.offset == Offset::middle ? static_cast<float>(1 << (integer_bits(form) - 1)) : 0.0f;
    for (int c = 0; c < kPanel; ++c) {
        group.bias[c] = kFloatBase + middle;
        group.minimum[c] = 0.0f;
    }
    if (w.offset == Offset::zeros) {
        const uint8_t* zeros = static_cast<const uint8_t*>(w.offsets) + at;
        for (int c = 0; c < kPanel; ++c) group.bias[c] = kFloatBase + static_cast<float>(zeros[c]);
    }
    if (w.offset == Offset::minimums) widen(w.offsets, group.minimum);
    return group;
}

struct FloatRows {
    float* to;  // destination of the current block

    void put(int step, int column, Vec a, Vec b, Vec c, Vec d) const {
        float* row = to + 4 * step * kPanel + column;
        store(row, a);
        store(row + kPanel, b);
        store(row + 2 * kPanel, c);
        store(row + 3 * kPanel, d);
    }
    void next_block() { to += kBlockRows * kPanel; }
};

#if defined(__AMX_BF16__)

struct BFloatPairs {
    BFloat* to;

    static __m512i pairs(Vec even, Vec odd) {
        // The conversion yields the 16 columns of the even row, then those of the odd row. The
        // permutation interleaves them.
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
        const __m512i turns = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
            4, 19, 3, 18, 2, 17, 1, 16, 0
        );
        return _mm512_permutexvar_epi16(turns, both);
    }
    void put(int step, int, Vec a, Vec b, Vec c, Vec d) const {
        BFloat* rows = to + 4 * step * kPanel;
        _mm512_storeu_si512(rows, pairs(a, b));
        _mm512_storeu_si512(rows + 2 * kPanel, pairs(c, d));
    }
    void next_block() { to += kBlockRows * kPanel; }
};

#endif

// Dequantizes steps First .. First + Count - 1, of 4 rows each, of a block.
template <int Bits, int First, int Count, class Out>
static inline void dequantize_steps(const uint8_t* codes, const GroupColumns& group, Out out) {
    for (int c = 0; c < kPanel; c += kLanes) {
        const Vec scale = load(group.scale + c);
        const Vec bias = load(group.bias + c);
        const Vec minimum = load(group.minimum + c);
        const auto weight = [&](Vec based) __attribute__((always_inline)) {
            return fma(sub(based, bias), scale, minimum);
        };
        unrolled<Count>([&]<int I>() __attribute__((always_inline)) {
            constexpr int Step = First + I;
            const Codes step = block_codes<Bits, Step>(codes + 4 * c);
            if constexpr (Bits == kE4m3) {
                out.put(
                    Step, c, mul(e4m3_row<0>(step), scale), mul(e4m3_row<1>(step), scale),
                    mul(e4m3_row<2>(step), scale), mul(e4m3_row<3>(step), scale)
                );
                return;
            }
            out.put(
                Step, c, weight(based_row<0>(step)), weight(based_row<1>(step)),
                weight(based_row<2>(step)), weight(based_row<3>(step))
            );
        });
    }
}

// Dequantizes blocks [block, last), all of them within one run.
template <int Bits, class Out>
static void dequantize_run(
    const QuantMatrix& w, const GroupRun& run, int64_t panel, int64_t block, int64_t last, Out& out
) {
    constexpr int64_t kBytes = width_of(Bits) * 4 * kPanel;
    const uint8_t* codes =
        w.panel_codes(panel) + run.code_offset + (block - run.first_block) * kBytes;
    const auto group_at = [&](int64_t group) {
        return load_group(w, w.scale_index(panel) + (run.first_group + group) * kPanel, Bits);
    };
    if constexpr (is_integer(Bits)) {
        if (run.is_paired) {
            for (; block < last; ++block, codes += kBytes, out.next_block()) {
                const int64_t group = 2 * (block - run.first_block);
                dequantize_steps<Bits, 0, kSteps / 2>(codes, group_at(group), out);
                dequantize_steps<Bits, kSteps / 2, kSteps / 2>(codes, group_at(group + 1), out);
            }
            return;
        }
    }
    while (block < last) {
        const int64_t group = (block - run.first_block) / run.blocks;
        const int64_t end = smaller(last, run.first_block + (group + 1) * run.blocks);
        const GroupColumns columns = group_at(group);
        for (; block < end; ++block, codes += kBytes, out.next_block()) {
            dequantize_steps<Bits, 0, kSteps>(codes, columns, out);
        }
    }
}

// Dequantizes blocks [first_block, last_block) of a panel into `out`.
template <class Out>
static void dequantize(
    const QuantMatrix& w, int64_t panel, int64_t first_block, int64_t last_block, Out out
) {
    for (const GroupRun& run : w.runs) {
        const int64_t first = larger(first_block, run.first_block);
        const int64_t last = smaller(last_block, run.first_block + run.units * run.blocks);
        if (first >= last) continue;
        with_form(w, run.bits, [&]<int Bits>() {
            dequantize_run<Bits>(w, run, panel, first, last, out);
        });
    }
}

}  // namespace exl::EXL_ISA

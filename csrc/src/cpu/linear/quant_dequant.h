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

// Most blocks of a chunk, the part of k that fp32 products sum in one chain: 640 rows, of two panels
// 80 KiB in L2. Chunks of 6, 9 and 12 blocks were no faster.
constexpr int64_t kFloatBlocks = 20;
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

// Factor of the numbers that e4m3_rows returns.
constexpr float kE4m3Factor = 256.0f;

// Sets rows[i] to the E4M3 number in byte i of each lane, divided by kE4m3Factor: the float16 number
// with the same exponent and mantissa bits. Conversion from float16 is exact for subnormal numbers.
static inline __attribute__((always_inline)) void e4m3_rows(Codes v, Vec (&rows)[4]) {
#if defined(__AVX512F__)
    // Words of rows 0 and 2, and of 1 and 3. An arithmetic shift makes space for a fifth bit of
    // exponent, which the mask clears.
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 1), mask);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(v, 1), mask);
    const __m512i turns = _mm512_set_epi16(
        31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18, 16,
        14, 12, 10, 8, 6, 4, 2, 0
    );
    const __m512i a = _mm512_permutexvar_epi16(turns, even);
    const __m512i b = _mm512_permutexvar_epi16(turns, odd);
    rows[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(a));
    rows[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(b));
    rows[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1));
    rows[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1));
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), mask);
    const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(v, 1), mask);
    const __m256i turns = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
    );
    const __m256i a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(even, turns), 0xd8);
    const __m256i b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(odd, turns), 0xd8);
    rows[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
    rows[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(b));
    rows[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    rows[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1));
#else
    for (int i = 0; i < 4; ++i) {
        const uint32_t number = v.lane >> 8 * i;
        rows[i] = half_to_float(static_cast<uint16_t>((number & 0x7f) << 7 | (number & 0x80) << 8));
    }
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
        for (float& scale : group.scale) scale *= kE4m3Factor;
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
                Vec rows[4];
                e4m3_rows(step, rows);
                for (Vec& row : rows) row = mul(row, scale);
                return out.put(Step, c, rows[0], rows[1], rows[2], rows[3]);
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

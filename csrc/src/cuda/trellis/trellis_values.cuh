// Values of trellis states, and the words of a step in registers.
//
// Every codebook multiplies the state by a constant. The product of MUL1 is four bytes whose sum t
// is the value, but for a scale and an offset: (1024 + t) * 1774 / 2^18 - 1329 / 128, rounded to
// float16. The products of 3INST and MCG become two float16 numbers, whose rounded sum is the value.
#pragma once

#include "cuda/common/common.cuh"
#include "cuda/trellis/trellis_window.cuh"
#include "exl/cuda/trellis.h"

namespace exl::cuda::trellis {

constexpr int kSteps = 4;  // of a unit
constexpr int kUnitRows = EXL_TRELLIS_BLOCK, kUnitColumns = EXL_TRELLIS_COLUMNS;
constexpr int kUnitTiles = 4;  // tiles across the columns of a unit

// Value of MUL1 without its rounding: kAlpha * (t - kZero).
constexpr float kAlpha = 1774.0f / 262144.0f;
constexpr float kZero = 510.26833f;          // 1329 / 128 / kAlpha - 1024
constexpr float kRawZero = 1024.0f + kZero;  // of raw_fragment_of

__host__ __device__ constexpr int step_bytes(int tile_words) { return 16 * tile_words; }
__host__ __device__ constexpr int unit_bytes(int tile_words) { return kSteps * 16 * tile_words; }

// Bytes from the start of a step to word `word` of lane `lane`.
__host__ __device__ __forceinline__ int word_offset(int words, int word, int lane) {
    const int whole = words / 4 * 4;
    if (word < whole) return word / 4 * 512 + lane * 16 + word % 4 * 4;
    if (words - whole >= 2 && word < whole + 2) return whole * 128 + lane * 8 + (word - whole) * 4;
    return (words - 1) * 128 + lane * 4;
}

#ifdef __CUDACC__

// Words of a step, of this lane and of those before it.
template <int kTileWords>
struct StepWords {
    using R = Rate<kTileWords>;
    uint32_t own[R::kWords], before[R::kWords], earlier[R::kWords];

    __device__ __forceinline__ void load(const uint8_t* step, int lane) {
        constexpr int kVectors = R::kWords / 4, kRest = R::kWords % 4;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 v = *reinterpret_cast<const uint4*>(step + i * 512 + lane * 16);
            own[4 * i] = v.x, own[4 * i + 1] = v.y, own[4 * i + 2] = v.z, own[4 * i + 3] = v.w;
        }
        if constexpr (kRest >= 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(step + kVectors * 512 + lane * 8);
            own[4 * kVectors] = v.x, own[4 * kVectors + 1] = v.y;
        }
        if constexpr (kRest % 2 == 1) {
            constexpr int kLast = R::kWords - 1;
            own[kLast] = *reinterpret_cast<const uint32_t*>(step + kLast * 128 + lane * 4);
        }
        // Only fields at the ends of pieces are needed from other lanes.
        constexpr int kLowest = R::kFields32 > 0 ? 8 : R::kHas16 ? 4 : R::kWords;
#pragma unroll
        for (int i = 0; i < kLowest; ++i) {
            before[i] = __shfl_sync(0xffffffffu, own[i], lane + 31);
            if constexpr (R::kBefore == 2) {
                if (i < 2) earlier[i] = __shfl_sync(0xffffffffu, own[i], lane + 30);
            }
        }
    }

    __device__ __forceinline__ void states(int tile, uint32_t (&to)[kPositions]) const {
        states_of<kTileWords>(window_of<kTileWords>(own, before, earlier, tile), to);
    }
};

// The product of a state: four bytes of MUL1, or two float16 numbers of the other codebooks.
template <int kCodebook>
__device__ __forceinline__ uint32_t product_of(uint32_t state) {
    if constexpr (kCodebook == EXL_CODEBOOK_MUL1) return state * 0x83DCD12Du;
    const uint32_t x =
        kCodebook == EXL_CODEBOOK_MCG ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
    uint32_t pair;  // one instruction, which the compiler would make two
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(pair) : "r"(x), "r"(0x8FFF8FFFu), "r"(0x3B603B60u));
    return pair;
}

// Bits of the float16 number 1024 + t, for a state of MUL1.
__device__ __forceinline__ uint32_t number_of_mul1(uint32_t state) {
    return __dp4a(product_of<EXL_CODEBOOK_MUL1>(state), 0x01010101u, 0x6400u);
}

// Exact values of two states, as float16.
template <int kCodebook>
__device__ __forceinline__ uint32_t values_of(uint32_t first, uint32_t second) {
    __half2 values;
    if constexpr (kCodebook == EXL_CODEBOOK_MUL1) {
        const uint32_t pair = __byte_perm(number_of_mul1(first), number_of_mul1(second), 0x5410);
        const __half2 scale = __half2half2(__ushort_as_half(0x1EEE));
        const __half2 offset = __half2half2(__ushort_as_half(0xC931));
        values = __hfma2(*reinterpret_cast<const __half2*>(&pair), scale, offset);
    } else {
        const uint32_t x = product_of<kCodebook>(first), y = product_of<kCodebook>(second);
        const uint32_t low = __byte_perm(x, y, 0x5410), high = __byte_perm(x, y, 0x7632);
        // The intrinsic that no compiler fuses.
        values = __hadd2_rn(
            *reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high)
        );
    }
    return *reinterpret_cast<const uint32_t*>(&values);
}

// A operand of mma.m16n8k16 with the exact values of a tile.
template <int kCodebook>
__device__ __forceinline__ void fragment_of(
    const uint32_t (&states)[kPositions], uint32_t (&a)[4]
) {
    a[0] = values_of<kCodebook>(states[0], states[1]);
    a[1] = values_of<kCodebook>(states[4], states[5]);
    a[2] = values_of<kCodebook>(states[2], states[3]);
    a[3] = values_of<kCodebook>(states[6], states[7]);
}

// A operand of mma.m16n8k16 without the scale, the offset and the rounding of MUL1: it has 1024 + t
// instead of kAlpha * (t - kZero). Exact values of the other codebooks.
template <int kCodebook>
__device__ __forceinline__ void raw_fragment_of(
    const uint32_t (&states)[kPositions], uint32_t (&a)[4]
) {
    if constexpr (kCodebook != EXL_CODEBOOK_MUL1) {
        fragment_of<kCodebook>(states, a);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = 4 * (i % 2) + 2 * (i / 2);
            a[i] = __byte_perm(
                number_of_mul1(states[first]), number_of_mul1(states[first + 1]), 0x5410
            );
        }
    }
}

// c [16, 8] int32 += a [16, 32] uint8 (row-major) * b [32, 8] int8 (column-major).
__device__ __forceinline__ void mma_16832(
    int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
    );
#else
    const auto add = [](int& c0, int& c1, uint32_t a, uint32_t b) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+r"(c0), "+r"(c1)
                     : "r"(a), "r"(b));
    };
    add(c[0], c[1], a0, b0);
    add(c[0], c[1], a2, b1);
    add(c[2], c[3], a1, b0);
    add(c[2], c[3], a3, b1);
#endif
}

#endif  // __CUDACC__

}  // namespace exl::cuda::trellis

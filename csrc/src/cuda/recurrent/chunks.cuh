// Chunked form of the gated delta rule and of the state scan of Mamba-2: what its two kernels share.
//
// Formulas   Tokens are divided into chunks of 64. Within a chunk, decay(i, j) is the product of the
//            decays from token j to token i, and grown(i) that from before the chunk. With the state
//            S before the chunk, keys K and queries Q by row, and values V:
//              delta rule   (I + A) D = beta (V - grown K S),  A(i, j) = beta_i decay k_i k_j, j < i
//              scan         D = step V
//              Y = grown Q S + P D,  P(i, j) = decay(i, j) q_i k_j, j <= i
//              S = decay(63, before) S + sum over j of decay(63, j) k_j d_j^T
//            This is the WY form of arXiv 2412.06464, with D instead of W and U.
// Kernels    `chunk_products.cuh` computes P and the inverse of I + A of every chunk, all at once.
//            `chunk_pass.cuh` goes through the chunks of a sequence with the state in registers.
// Numbers    Products run on tensor cores, with operands split into two float16 numbers: 22 bits of
//            each. Three of the four products are computed. Powers of two bring operands into the
//            range of float16: one per column of the state and chunk, and of the scan one per key and
//            query. Sums, the state and the inverse are float32.
// Slots      Chunk c of sequence s has slot row_starts[s] / 64 + s + c of the workspace. No two chunks
//            have the same slot, and no kernel needs the lengths of all sequences.
#pragma once

#include "cuda/recurrent/matrix_state.cuh"

namespace exl::cuda {

constexpr int kChunk = 64;
constexpr int kChunkDepth = 128;  // elements of a key; shorter ones are padded with zeros
constexpr int kPlaneBytes = kChunk * kChunkDepth * 2;  // upper or lower halves of a chunk's keys
constexpr int kTriangleTiles = 10;                     // 16 x 16, on and below the diagonal
constexpr int kTriangleTileBytes = 16 * 64;            // rows of 16 upper halves and 16 lower ones
constexpr int kTriangleBytes = kTriangleTiles * kTriangleTileBytes;

// Sequences with fewer rows go through their tokens one by one. Measured on an H100.
constexpr int kLeastChunkedRows = 64;

// Numbers of a chunk's tokens.
struct ChunkFactors {
    float grown[kChunk];  // decay from before the chunk to the token
    float left[kChunk];   // decay from the token to the end of the chunk
    float beta[kChunk];   // of the scan: its step, times the scale of the key
    float scale
        [kChunk];  // of the query; of the delta rule, whose queries have norm 1, it is not read
};

// Keys and queries of a chunk, normalized: upper halves, then lower ones.
struct alignas(16) ChunkVectors {
    uint8_t keys[2 * kPlaneBytes], queries[2 * kPlaneBytes];
};

// Products of a chunk of one head.
struct alignas(16) ChunkHead {
    uint8_t inverse[kTriangleBytes], outer[kTriangleBytes];
    ChunkFactors factors;
};

struct ChunkSpace {
    ChunkVectors* vectors;  // [slots, key_heads]
    ChunkHead* heads;       // [slots, heads]
};

inline int64_t chunk_slots(int64_t rows, int64_t seqs) { return rows / kChunk + seqs; }

#ifdef __CUDACC__

// Byte of an element in a plane of keys. 16-byte parts are permuted, so that eight rows of one
// column are in different banks.
__device__ __forceinline__ int vector_place(int token, int element) {
    return token * (kChunkDepth * 2) + ((element / 8) ^ (token & 7)) * 16 + element % 8 * 2;
}

// Byte of an element (i, j) of a triangle, j <= i or in the same tile; `half` is 1 for lower halves.
__device__ __forceinline__ int triangle_place(int i, int j, int half) {
    const int tile = (i / 16) * (i / 16 + 1) / 2 + j / 16, row = i % 16;
    const int part = (half * 2 + j % 16 / 8) ^ ((row >> 1) & 3);
    return tile * kTriangleTileBytes + row * 64 + part * 16 + j % 8 * 2;
}

// Two numbers as upper and lower halves.
__device__ __forceinline__ void split(float a, float b, uint32_t& high, uint32_t& low) {
    const __half2 upper = __floats2half2_rn(a, b);
    const float2 back = __half22float2(upper);
    const __half2 lower = __floats2half2_rn(a - back.x, b - back.y);
    high = reinterpret_cast<const uint32_t&>(upper);
    low = reinterpret_cast<const uint32_t&>(lower);
}

// The power of two that brings `largest` to between 2^exponent and 2^(exponent + 1), and its inverse.
__device__ __forceinline__ float2 scale_to(float largest, int exponent) {
    const int bits = static_cast<int>(__float_as_uint(largest) >> 23) & 255;
    const int own = min(max(254 + exponent - bits, 1), 253);
    return make_float2(
        __uint_as_float(static_cast<uint32_t>(own) << 23),
        __uint_as_float(static_cast<uint32_t>(254 - own) << 23)
    );
}

struct SplitRows {
    uint32_t high[4], low[4];  // operand a of a product, [16, 16]
};

// Two results [16, 8] next to each other as the operand a of a product.
__device__ __forceinline__ SplitRows split_rows(const float (&left)[4], const float (&right)[4]) {
    SplitRows rows;
    split(left[0], left[1], rows.high[0], rows.low[0]);
    split(left[2], left[3], rows.high[1], rows.low[1]);
    split(right[0], right[1], rows.high[2], rows.low[2]);
    split(right[2], right[3], rows.high[3], rows.low[3]);
    return rows;
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
#endif
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
#endif
}

// c [16, 8] += a [16, 16] * b [16, 8], for the compiler to order as it likes.
__device__ __forceinline__ void mma_halves(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// c [16, 8] += a [16, 16] * b [16, 8]. b: upper halves, then lower ones.
__device__ __forceinline__ void mma_split(
    float (&c)[4], const SplitRows& a, const uint32_t (&b)[4]
) {
    mma_halves(c, a.low, b[0], b[1]);
    mma_halves(c, a.high, b[2], b[3]);
    mma_halves(c, a.high, b[0], b[1]);
}

struct ChunkOfSequence {
    int seq, first, count;  // first row and number of rows; no rows: the slot is not used
};

// The chunk in a slot of the workspace, if its sequence has at least kLeastChunkedRows rows.
__device__ __forceinline__ ChunkOfSequence chunk_in_slot(const ExlStateRows& rows, int slot) {
    int low = 0, high = rows.seqs;  // the first sequence whose slots follow is in between
    while (low < high) {
        const int middle = (low + high) / 2;
        if (rows.row_starts[middle] / kChunk + middle <= slot) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const int seq = low - 1;
    if (seq < 0) return {0, 0, 0};
    const int first = rows.row_starts[seq], last = rows.row_starts[seq + 1];
    const int row = first + (slot - first / kChunk - seq) * kChunk;
    if (last - first < kLeastChunkedRows || row >= last) return {seq, row, 0};
    return {seq, row, min(kChunk, last - row)};
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// Linears with trellis codes (EXL3) of the CUDA library: packed layout, prepared inputs, functions.
//
//   y = svh * H(V^T H(suh * x)) + bias
//
// H is the normalized Hadamard transform of 128 values, block by block. V [k, n] has the values of
// the codes, in tiles of 16 x 16. A tile is a ring of 16 * 16 * rate bits. The value at a position
// of a ring is a function of a state: the 16 bits that end there. Lane t of a warp has positions
// 8 t .. 8 t + 7, which are B = 8 * rate bits of the ring: its piece. Position 8 t + j is in row
// 2 (t % 4) + j % 2 + 8 (j / 2 % 2) and column t / 4 + 8 (j / 4). This is the A operand of
// mma.m16n8k16 with columns as m.
//
// words: [n / 64][k / 128] units of 64 columns and 128 rows, 1024 * rate bytes each. A unit has 4
// steps of 32 rows, and a step has 8 tiles: tile i has rows 16 (i / 4) .. and columns 16 (i % 4) ..
// of the step. A step has W = 2 * rate words of 32 bits for every lane. B is a sum of at most one
// 32 (two with rate 8), one 16, one 8 and one 4, and a piece is cut into fields of these sizes,
// the largest first, from its end (the lowest bits) on. The words are first the 32-bit fields, one
// tile per word; then the 16-bit fields, two tiles per word; then the 8-bit fields, four per word;
// then the 4-bit fields, eight per word. The first tile of a word has its lowest bits.
//
// The W words of a lane are stored in vectors of 4 words, then 2, then 1: [lane] vectors of a kind
// follow one another.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_TRELLIS_BLOCK 128   // values per Hadamard transform
#define EXL_TRELLIS_COLUMNS 64  // columns of a unit
#define EXL_TRELLIS_MAX_PARTS 3

enum { EXL_CODEBOOK_3INST = 0, EXL_CODEBOOK_MCG = 1, EXL_CODEBOOK_MUL1 = 2 };

// A matrix of stored size k x n, both multiples of 128. Inputs are features first_in ..
// first_in + in_features - 1 of the k; the others are zero. Outputs are columns first_out ..
// first_out + out_features - 1 of the n; the others are dropped.
typedef struct {
    uint32_t* words;
    const void* suh;    // float16 [k]
    const void* svh;    // float16 [n]
    const float* bias;  // [out_features], or null
    int32_t k;
    int32_t n;
    int32_t in_features;
    int32_t out_features;
    int32_t first_in;
    int32_t first_out;
    int32_t tile_words;  // 16-bit words of a stored tile: 16 * rate
    int32_t codebook;
} ExlTrellisMatrix;

// Repacks stored tiles int16 [k / 16, n / 16, tile_words], in device memory, into w->words.
EXL_CUDA_API int exl_cuda_trellis_pack(
    const ExlTrellisMatrix* w, const void* tiles, int64_t row_stride, void* stream
);

// out [columns, k] float16 = columns first_column .. of V^T, columns and first_column multiples of
// 64, rows of `out` k apart. The order of the k is that of EXL_TRELLIS_PLAIN inputs: place
// 8 q + 4 h + 2 e + b of 32 successive ones is input 16 h + 2 q + 8 e + b.
EXL_CUDA_API int exl_cuda_trellis_unpack(
    const ExlTrellisMatrix* w, int32_t first_column, int32_t columns, void* out, void* stream
);

// Forms of prepared inputs, which are H(suh * x) of m rows:
//
//   integers  Integers of 16 bits with one scale per row and block of 128: a = 256 high + low, both
//             int8. [sets of 4 rows][k / 128][4 steps][32 lanes][2 tiles][4 bytes]: lane 4 g + q has
//             row g / 2 of the set, its high parts if g is even, of inputs 2 q, 2 q + 1, 2 q + 8,
//             2 q + 9 of the tile. After all sets, [sets][k / 128][4 rows] pairs of float32: the
//             scale, and 510.268 times the sum of the block's integers. For MUL1, up to 4 rows.
//   halves    float16 [chunks of 32 rows][k / 128][4 steps][T][32 lanes][2 tiles][4]: lane 4 g + q
//             has row g of a row tile of 8, the same inputs. T is 1 with up to 8 rows, 4 otherwise.
//             With MUL1, float32 [rows][k / 128] follows: the sum of each block of inputs.
//   plain     float16 [m, k] in the order of exl_cuda_trellis_unpack. For any product.
//
// Rows past the last one are undefined.
enum { EXL_TRELLIS_INTEGERS = 0, EXL_TRELLIS_HALVES = 1, EXL_TRELLIS_PLAIN = 2 };

typedef struct {
    const ExlTrellisMatrix* matrix;
    void* out;
    int32_t form;
    int32_t rows;  // that the form has space for: m, or more
} ExlTrellisInputs;

EXL_CUDA_API int64_t exl_cuda_trellis_inputs_bytes(int32_t form, int32_t rows, int32_t k);

// x [m, in_features] float32 or float16 -> `count` (1 to 3) prepared forms of x, or of
// rms_norm(x, norm, eps). All matrices have the same in_features.
typedef struct {
    const void* x;
    int64_t x_stride;
    const float* norm;  // [in_features], or null: no norm
    float eps;
    int32_t x_dtype;
    int32_t m;
    int32_t count;
    ExlTrellisInputs to[EXL_TRELLIS_MAX_PARTS];
} ExlTrellisPrepare;
EXL_CUDA_API int exl_cuda_trellis_prepare(const ExlTrellisPrepare* args, void* stream);

// Most rows of forms other than plain. Forms with more than 8 rows need a kernel whose shared
// memory not every device has.
EXL_CUDA_API int exl_cuda_trellis_max_rows(int* rows);

// y = x @ parts (+ bias), epilogues as in exl/cuda/linear.h. Sums are deterministic. With the form
// `halves` and at least 9 rows, no bit of a row of y depends on m or on the other rows.
typedef struct {
    ExlTrellisInputs parts[EXL_TRELLIS_MAX_PARTS];  // `out`: prepared inputs, which are read
    // Null, or instead of products: x^ @ V [m, n] float16 of each part, from plain inputs.
    const void* sums[EXL_TRELLIS_MAX_PARTS];
    void* y;
    int64_t y_stride;
    int32_t count;
    int32_t m;
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t reserved;
    void* workspace;
    int64_t workspace_bytes;
    // Matrix not null, and gated: the result becomes prepared inputs, and y is not used. The
    // matrix's inputs are the outputs of the parts, at the same places of their blocks.
    ExlTrellisInputs next;
    // Null, or with one part that is added: inputs that are prepared from y afterwards, with a norm.
    // x, x_stride, x_dtype and m are those of y.
    const ExlTrellisPrepare* then;
} ExlTrellisLinear;
// Workspace for parts of n columns in total and `rows` rows of a form other than plain.
EXL_CUDA_API int64_t exl_cuda_trellis_linear_workspace(int32_t n, int32_t rows);
EXL_CUDA_API int exl_cuda_trellis_linear(const ExlTrellisLinear* args, void* stream);

#ifdef __cplusplus
}
#endif

// Linears and embeddings of the CUDA library: packed layout of quantized matrices, layout of
// prepared inputs, and their functions.
//
//   w[row, c] = scale[g, c] * (code[row, c] - zero[g, c])      or  scale * code + minimum
//   w[row, c] = scale[g, c] * number(code[row, c])             E4M3, or an entry of a table
//
// Rows run along k in stored order. Every group starts a new block of 32 rows. The rows of a block
// past the end of its group are padding, and their inputs are zero. Small groups of 16 rows are an
// exception: two of them share a block (below). A k-tile
// is up to 4 consecutive blocks of one group: the rows that are summed before a scale is applied. A
// column panel is 32 adjacent columns. All panels of a matrix have the same layout. The last one is
// padded with columns whose scales are zero.
//
// tiles: [panels][panel_bytes]. A panel starts with a head of 32 bytes. Its k-tiles follow one
// after the other, without gaps. The head holds one float32, then zeros. The float32 is a power of
// two that weights are multiplied by, and their sums divided by, where weights are computed in
// float16 (small batches on 9.0). There a code's bits are used as a float16 number, which is 2^-24
// times the code, and 2^24 times the scale has to fit in float16 as well. Let L be the largest of
// |scale| and 2^-20 |minimum| in the panel (for small groups, those of the largest multipliers that
// the format has), clamped to 2^-100 .. 2^100. The power of two is
// 2^-(10 + floor(log2 L)).
//
// A k-tile has:
//
//   scales     32 of scale_dtype (float16 or float32). The scale of column c is at index
//              4 (c % 8) + c / 8.
//   offsets    In the same order: for zeros 32 uint8, for minimums 32 of scale_dtype. Nothing for
//              middle, whose zero is 2^(bits - 1).
//   blocks     128 * bits bytes each
//
// Small groups (EXL_OFFSET_SMALL_MIDDLE, EXL_OFFSET_SMALL_MINIMUMS) have 16 rows and scales that are
// products of a factor and a multiplier, an integer of at most 8 bits:
//
//   w[row, c] = factor[f, c] * multiplier[g, c] * (code[row, c] - 2^(bits - 1))            middle
//   w[row, c] = factor[f, c] * low[g, c] * code[row, c] - minimum_factor[f, c] * high[g, c]
//
// 256 rows share their factors. A k-tile has 4 blocks, 8 groups. Rows 8 t + 4 s + j of a block, for
// t, j = 0 .. 3, are rows 4 t + j of its group s: a k16 step multiplies one group. The header is
//
//   factors          32 float16, in the order of scales
//   minimum factors  the same; only for minimums
//   multipliers      [8][8 groups][4] bytes: [c % 8][g][c / 8]. A signed byte, or for minimums
//                    `low` in the low half and `high` in the high half
//
// In a block, each of the 32 lanes of a warp has 32 codes in `bits` words of 32 bits. These are the
// codes that the lane feeds to mma.m16n8k16 with columns as m: two m16 tiles, two k16 steps. The
// codes of lane 4 g + t form 16 pairs, numbered n = 4 q + j, of two codes h = 0, 1. Code h of pair
// n belongs to column 8 q + g and to row 8 t + 2 j + h of the block. So q / 2 is the m16 tile,
// q % 2 and j % 2 select the A register, and j / 2 is the k16 step. The table lists word and bit
// (word.bit) at which code 0 of pair n starts. Code 1 starts 16 bits later:
//
//   bits  n = 0      1     2     3     4     5     6     7     8     9     10    11    12    13    14
//   2     0.0   0.8   1.0   1.8   and 2 bits higher for each q
//   3     0.0   0.3   1.0   2.0   1.3   1.9   2.3   2.9   0.6   0.9   0.12  1.6   1.12  2.6   2.12
//   4     0.0   1.0   2.0   3.0   and 4 bits higher for each q
//   5     0.0   1.0   2.0   3.0   4.0   0.10  1.10  2.10  0.5   1.5   2.5   3.5   4.5   3.10  4.10
//   6     0.0   1.0   2.0   3.0   4.0   5.0   0.10  1.10  2.10  3.10  4.10  5.10
//   8     0.0   1.0   2.0   3.0   q = 1: 8 bits higher; q = 2, 3: 4 words later
//
// The codes of the remaining pairs are split. Pair 15 with 3 bits, and likewise with 5 bits: bit i
// of the code is at i.15. Pairs 12, 13, 14, 15 with 6 bits: the two low bits are at 4.6, 4.8, 5.6,
// 5.8, the four high bits at 0.6, 1.6, 2.6, 3.6.
//
// Words are stored in two parts. The first part has the first 2 words (2 and 3 bits) or 4 words
// (other widths) of all lanes, with the words of a lane adjacent. The second part has the remaining
// words in the same order.
//
// For row g of the batch, lane 4 g + t therefore needs the inputs of rows 8 t .. 8 t + 7 of a
// block, which are 16 bytes. Halves 4 s and 4 s + 1 are operand b0, halves 4 s + 2 and 4 s + 3 are
// operand b1 of k16 step s.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_PANEL_HEAD 32  // bytes of a panel before its k-tiles

enum {
    EXL_OFFSET_MIDDLE = 0,
    EXL_OFFSET_ZEROS = 1,
    EXL_OFFSET_MINIMUMS = 2,
    EXL_OFFSET_SMALL_MIDDLE = 3,   // 3 or 6 bits, float16 factors
    EXL_OFFSET_SMALL_MINIMUMS = 4  // 2 bits, float16 factors
};
#define EXL_CUDA_FACTOR_ROWS 256  // rows of small groups that share their factors
// Numbers that codes stand for; other than integers only with EXL_OFFSET_MIDDLE, and nothing stored.
// exl_cuda_quant_linear multiplies at most 8 rows with such a matrix.
enum {
    EXL_VALUES_INTEGERS = 0,
    EXL_VALUES_E4M3 = 1,    // 8 bits: OCP FP8 E4M3
    EXL_VALUES_IQ4_NL = 2,  // 4 bits: exl::kIq4Values
    EXL_VALUES_MXFP4 = 3    // 4 bits: exl::kMxfp4Values; scales are floats, halved
};
enum {  // same numbers as exl::Packing; exl_core/ops/weights.py describes the packings
    EXL_PACKING_WORDS = 0,
    EXL_PACKING_BYTES,
    EXL_PACKING_Q4_0,
    EXL_PACKING_Q4_1,
    EXL_PACKING_Q5_0,
    EXL_PACKING_Q5_1,
    EXL_PACKING_Q8_0
};

// One k-tile.
typedef struct {
    uint32_t offset;       // bytes from the start of a panel
    uint16_t first_block;  // number of its first block in the matrix
    uint8_t bits;
    uint8_t blocks;  // 1 to 4
    uint32_t group;
} ExlQuantKTile;

// Run of consecutive groups that have the same bit width and the same number of rows. The kernel
// for decode (quant_linear.cu) reads runs instead of k-tiles.
typedef struct {
    uint32_t first_k_tile;
    uint32_t offset;         // bytes from the start of a panel
    uint16_t first_block;    // number of its first block in the matrix
    uint16_t group_k_tiles;  // k-tiles per group; all but the last one of a group have 4 blocks
    uint8_t bits;
    uint8_t last_blocks;  // blocks of a group's last k-tile
    uint16_t reserved;
} ExlQuantRun;

typedef struct {
    uint8_t* tiles;
    const ExlQuantKTile* k_tiles;  // [num_k_tiles]
    const ExlQuantRun* runs;       // [num_runs], in host memory
    const ExlQuantRun* device_runs;
    const int32_t* permutation;  // [32 * num_blocks]: feature of each row, -1: padding
    const float* bias;           // [n], or null
    int64_t panel_bytes;         // a multiple of 32
    int32_t n;
    int32_t k;
    int32_t num_k_tiles;
    int32_t num_blocks;
    int32_t num_runs;
    int32_t scale_dtype;
    int32_t offset_kind;
    int32_t values;
} ExlQuantMatrix;

// Some columns in the form of the file, in device memory. See GroupedColumns in
// exl_core/ops/weights.py.
typedef struct {
    int32_t packing;
    int32_t first_column;  // a multiple of 32
    int32_t columns;       // a multiple of 32 unless they are the last ones
    int32_t scale_dtype;   // of scales and of minimums; the same as the matrix's
    const void* codes;
    int64_t row_stride;          // of codes, in elements
    const int32_t* stored_rows;  // [32 * num_blocks] stored row of each padded row, -1: padding
    const int32_t* source_rows;  // [k] row of `codes` of each stored row, or null: the same
    const int64_t* bit_offsets;  // packing words, source_rows null: [num_k_tiles] bit at which the
                                 // k-tile's first stored row starts in a column of `codes`
    const void* scales;          // [groups, columns]; null for GGML blocks
    const void* offsets;         // [groups, columns] uint8 zeros or minimums, or null
    // Small groups: [groups, columns] bytes, and `scales` and `offsets` are factors and minimum
    // factors, [rows / EXL_CUDA_FACTOR_ROWS, columns]. Otherwise null.
    const uint8_t* multipliers;
} ExlQuantColumns;

// Repacks columns. Writes every byte of their panels, including padding.
EXL_CUDA_API int exl_cuda_quant_pack(
    const ExlQuantMatrix* w, const ExlQuantColumns* columns, void* stream
);

// out [k, columns] float16 = dequantized columns of w, rows in the order of the input features.
// Rows of `out` are out_stride elements apart.
EXL_CUDA_API int exl_cuda_quant_unpack(
    const ExlQuantMatrix* w, int32_t first_column, int32_t columns, void* out, int64_t out_stride,
    void* stream
);

// y [m, k] float32 = rows token_ids of w^T. token_ids are int64 and in [0, n).
EXL_CUDA_API int exl_cuda_quant_embedding(
    const ExlQuantMatrix* w, const int64_t* token_ids, int32_t m, float* y, void* stream
);

// Prepared inputs are inputs in the layout that exl_cuda_quant_linear reads: float16, in the
// matrix's permutation, and divided into chunks of up to 64 rows of the batch that follow one
// another. A chunk of one row is [num_blocks][32]. A chunk of more rows is [num_blocks][T][8][32]
// with T = 1, 2, 4 or 8 tiles of 8 rows, and rows past the last one are zero. On compute capability
// 9.0, a chunk with T of 2 or more is [num_blocks][4][8 T][8] instead: index 2 s + h of the
// dimension of 4 stands for half h of k16 step s. Its 8 halves are rows 8 t + 4 s + 2 h and
// 8 t + 4 s + 2 h + 1 of the block, for t = 0 .. 3.
#define EXL_CUDA_CHUNK_ROWS 64
#define EXL_CUDA_TILE_ROWS 8
static inline int exl_cuda_row_tiles(int rows) {
    return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
}
static inline int64_t exl_cuda_chunk_halves(int rows, int num_blocks) {
    return (int64_t)num_blocks * 32 * (rows == 1 ? 1 : 8 * exl_cuda_row_tiles(rows));
}
// Size of prepared inputs, in float16 numbers. The last chunk is followed by a pad: kernels may
// read it, and its content has no effect.
#define EXL_CUDA_PAD_BLOCKS 3
static inline int64_t exl_cuda_prepared_halves(int rows, int num_blocks) {
    const int whole = rows / EXL_CUDA_CHUNK_ROWS, rest = rows % EXL_CUDA_CHUNK_ROWS;
    return whole * exl_cuda_chunk_halves(EXL_CUDA_CHUNK_ROWS, num_blocks) +
           (rest ? exl_cuda_chunk_halves(rest, num_blocks) : 0) +
           exl_cuda_chunk_halves(rest ? rest : EXL_CUDA_CHUNK_ROWS, EXL_CUDA_PAD_BLOCKS);
}

// Attention, and linears with an activation, can store their result as prepared inputs of the next linear,
// provided that no row of its matrix is padding. `inverse_permutation` [k] is then that of this
// matrix: the row of each feature. Rows of a tile past the last row of the batch are left undefined.
//
// Gated linears support this for up to `*rows` rows on the current device: a tile of 8 or a chunk
// of 64. Attention supports a tile: with more rows, scattered stores take longer than a separate
// call of exl_cuda_prepare. With more than 8 rows, a gated linear stores inputs interleaved by
// rows, so that rows of the batch are adjacent: [num_blocks][4][T][8][8], where each 8 x 8 square
// of rows and halves is transposed to halves and rows.
EXL_CUDA_API int exl_cuda_max_prepared_rows(int* rows);

typedef struct {
    const int32_t* permutation;  // [32 * num_blocks], -1: zero; null: row r is feature r
    void* out;                   // prepared inputs
    int32_t num_blocks;
    int32_t plain;  // 1: out is float16 [m, k], rows k apart, and permutation is ignored
} ExlPrepared;

// x [m, k] float32 or float16 -> `count` (1 to 3) prepared forms of x, of its RMSNorm, or of its
// LayerNorm.
typedef struct {
    const void* x;
    int64_t x_stride;
    const float* norm;       // [k], or null: no norm
    const float* norm_bias;  // [k], or null; LayerNorm only
    int32_t is_layer_norm;
    float eps;
    int32_t x_dtype;
    int32_t m;
    int32_t k;
    int32_t count;
    ExlPrepared to[3];
    // Prepared forms have the layout of at least this many rows, at most EXL_CUDA_CHUNK_ROWS. The
    // rows from m on are zero. 0 or 1: the layout of m rows.
    int32_t least_rows;
} ExlPrepare;
EXL_CUDA_API int exl_cuda_prepare(const ExlPrepare* args, void* stream);

enum {
    EXL_EPILOGUE_STORE = 0,
    EXL_EPILOGUE_ADD = 1,
    EXL_EPILOGUE_GATED = 2,
    EXL_EPILOGUE_ACTIVATED = 3
};

// y[:, columns of all parts] = x @ parts (+ bias). The columns of the parts follow one another.
//   store  y is float16 or float32
//   add    y float32 += x @ parts
//   gated  two parts of equal n, gate then up: y [m, n] = act(gate) * up, float16 or float32
//   activated  one part: y [m, n] = act(x @ part), float16 or float32
// Rows of y are y_stride elements apart. Sums are deterministic: the same inputs give the same
// bits, whatever else runs on the device.
typedef struct {
    const ExlQuantMatrix* parts[3];
    const void* inputs[3];  // prepared for each part; parts of one permutation may share them
    void* y;
    int64_t y_stride;
    int32_t count;
    int32_t m;  // 1 to 128
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;        // EXL_GATE_* of a gated or an activated product
    int32_t is_by_rows;  // one part, more than 8 rows: its inputs are interleaved by rows
    void* workspace;     // zero before the first call; kernels leave its counters zero
    int64_t workspace_bytes;
    // Null, or gated or activated: [n], and y receives prepared inputs (float16).
    const int32_t* inverse_permutation;
    // Batch-invariant mode: no bit of a row of y depends on m or on the other rows. m has no upper
    // limit. Inputs are prepared with exl_cuda_least_rows, or have more rows than that. On compute
    // capability 9.0 all parts have integers, or m is at most EXL_CUDA_TILE_ROWS.
    int32_t is_invariant;
} ExlQuantLinear;
// `least_rows` of inputs for the batch-invariant mode on the current device.
EXL_CUDA_API int exl_cuda_least_rows(int32_t has_integers, int* rows);
EXL_CUDA_API int64_t exl_cuda_quant_linear_workspace(int32_t max_n, int32_t max_m);
EXL_CUDA_API int exl_cuda_quant_linear(const ExlQuantLinear* args, void* stream);

// y [m, k] float32 = rows token_ids (int64) of weight [n, k], which is float16, bfloat16 or
// float32.
EXL_CUDA_API int exl_cuda_embedding(
    const void* weight, int32_t dtype, const int64_t* token_ids, int32_t m, int32_t k, float* y,
    void* stream
);

#ifdef __cplusplus
}
#endif

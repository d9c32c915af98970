// The CUDA kernels as a C library: what crosses the border, and the layouts that both sides share.
//
// The library knows neither Python nor torch. It allocates nothing on the device: all memory is the
// caller's, weights and workspaces too. All work goes to `stream` and is not waited for. A function
// returns 0, or the cudaError_t that stopped it (1, cudaErrorInvalidValue, for operands outside
// what it says it takes); after an error nothing was launched.
//
// Shapes are checked by the caller (exl_core/ops/cuda.py). Pointers are device pointers, aligned to
// 16 bytes unless another alignment is named. Types are numbers of exl::DType (exl/tensor_view.h):
// 0 float32, 1 float16, 2 bfloat16, 5 uint8, 6 int8, 7 float8_e4m3fn.
//
// Every kernel may begin before the one before it in the stream has ended (programmatic dependent
// launch): until it has waited (griddepcontrol.wait) it touches nothing but weights, which no
// kernel writes once a model runs, and every block waits before it ends. Cache kernels also read
// ahead what no function of this library writes (page tables, lengths, slots, cosines and sines)
// and keys and values of earlier passes: between the passes of one cache the stream does something
// else, such as a copy of the next tokens, or begins another graph.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_API __attribute__((visibility("default")))
#define EXL_CUDA_ABI 7

// ---- the library and its devices -------------------------------------------------------------

EXL_CUDA_API int exl_cuda_abi(void);
EXL_CUDA_API const char* exl_cuda_error_name(int code);
EXL_CUDA_API const char* exl_cuda_error_text(int code);
// Versions as CUDA counts them (13000); a driver of 0 is none.
EXL_CUDA_API int exl_cuda_versions(int* driver, int* runtime);
// Space-separated compute capabilities that machine code was made for, as in "80 86 89 90".
EXL_CUDA_API const char* exl_cuda_architectures(void);
// Starts a device: its context, which all libraries of the process share. The calling thread's
// current device is that one from here on.
EXL_CUDA_API int exl_cuda_open_device(int device);
// Opens the current device for the library: function attributes, the number of multiprocessors.
// Done by the first call that needs it; calling it ahead keeps it out of a graph's capture.
EXL_CUDA_API int exl_cuda_prepare_device(void);

// ---- quantized matrices ------------------------------------------------------------------------
//
//   w[row, c] = scale[g, c] * (code[row, c] - zero[g, c])      or  scale * code + minimum
//
// Rows lie along k in stored order; every group starts a block of 32 rows of its own, and a block's
// rows past the group's end are padding, which meets inputs of zero. A unit is up to 4 consecutive
// blocks of one group: what is summed before a scale is applied. A strip is 32 columns; all strips
// of a matrix have the same layout, and the last one is padded (scales of zero).
//
// tiles: [strips][strip_bytes]; in a strip 32 bytes for all of it, then its units one after the
// other, without gaps. The 32 bytes are a float32, and zeros: the power of two that weights are
// multiplied with where they are float16 numbers. A code's bits are a float16 number as they are,
// 2^-24 times the code, and 2^24 times the scale has to be one too. With L the largest of |scale|
// and 2^-20 |minimum| in the strip, within 2^-100 .. 2^100, it is 2^-(10 + floor(log2 L)). A unit:
//
//   scales     32 of scale_dtype (float16 or float32); that of column c at index 4 (c % 8) + c / 8
//   offsets    in that order: zeros 32 uint8; minimums 32 of scale_dtype; middle none, where the
//              zero is 2^(bits - 1)
//   blocks     128 * bits bytes each
//
// In a block each of the 32 lanes of a warp has 32 codes in `bits` words of 32 bits: those that it
// feeds to two rows of mma.m16n8k16 tiles, columns as m. Lane 4 g + t has, numbered n = 4 q + j, 16
// pairs of two codes h: column 8 q + g, row of the block 8 t + 2 j + h. So q / 2 says which m16 tile,
// q % 2 and j % 2 which A register, j / 2 which k16 step. Of pair n the code h begins at this bit of
// this word (w.bit), 16 h later:
//
//   bits  n = 0      1     2     3     4     5     6     7     8     9     10    11    12    13    14
//   2     0.0   0.8   1.0   1.8   and 2 bits up for each q
//   3     0.0   0.3   1.0   2.0   1.3   1.9   2.3   2.9   0.6   0.9   0.12  1.6   1.12  2.6   2.12
//   4     0.0   1.0   2.0   3.0   and 4 bits up for each q
//   5     0.0   1.0   2.0   3.0   4.0   0.10  1.10  2.10  0.5   1.5   2.5   3.5   4.5   3.10  4.10
//   6     0.0   1.0   2.0   3.0   4.0   5.0   0.10  1.10  2.10  3.10  4.10  5.10
//   8     0.0   1.0   2.0   3.0   q = 1: 8 bits up; q = 2, 3: 4 words on
//
// The rest is cut up. Pair 15: with 3 bits, bit i at i.15, and so with 5. Pairs 12, 13, 14, 15 of 6:
// their two low bits at 4.6, 4.8, 5.6, 5.8, their four high ones at 0.6, 1.6, 2.6, 3.6.
//
// Of words the first 2 (2 and 3 bits) or 4 (others) of all lanes come first, those of a lane
// together; then, in the same way, the rest.
//
// So lane 4 g + t needs of the inputs rows 8 t .. 8 t + 7 of a block, 16 bytes, for row g of the
// batch: halves 4 s, 4 s + 1 are b0 and 4 s + 2, 4 s + 3 are b1 of step s.

#define EXL_CUDA_STRIP_HEAD 32  // bytes ahead of a strip's units

enum { EXL_OFFSET_MIDDLE = 0, EXL_OFFSET_ZEROS = 1, EXL_OFFSET_MINIMUMS = 2 };
enum {  // as exl::Packing; see exl_core/ops/quantized.py
    EXL_PACKING_WORDS = 0,
    EXL_PACKING_BYTES,
    EXL_PACKING_Q4_0,
    EXL_PACKING_Q4_1,
    EXL_PACKING_Q5_0,
    EXL_PACKING_Q5_1,
    EXL_PACKING_Q8_0
};

typedef struct {
    uint32_t offset;       // bytes from the start of a strip
    uint16_t first_block;  // of the matrix
    uint8_t bits;
    uint8_t blocks;        // 1 to 4
    uint32_t group;
} ExlQuantUnit;

// Groups of one width and one number of rows, one after the other: what the kernel for few rows
// reads instead of units.
typedef struct {
    uint32_t first_unit;
    uint32_t offset;       // bytes from the start of a strip
    uint16_t first_block;  // of the matrix
    uint16_t group_units;  // units of a group: all but the last one have 4 blocks
    uint8_t bits;
    uint8_t last_blocks;   // of a group's last unit
    uint16_t reserved;
} ExlQuantRun;

typedef struct {
    uint8_t* tiles;
    const ExlQuantUnit* units;  // [num_units]
    const ExlQuantRun* runs;    // [num_runs], in the host's memory
    const ExlQuantRun* device_runs;
    const int32_t* order;       // [32 * num_blocks] input feature of each padded row, -1: padding
    const float* bias;          // [n], or null
    int64_t strip_bytes;        // a multiple of 32
    int32_t n;
    int32_t k;
    int32_t num_units;
    int32_t num_blocks;
    int32_t num_runs;
    int32_t scale_dtype;
    int32_t offset_kind;
    int32_t reserved;
} ExlQuantMatrix;

// Some columns as a file holds them, on the device; QuantColumns of exl_core/ops/quantized.py.
typedef struct {
    int32_t packing;
    int32_t first_column;        // a multiple of 32
    int32_t columns;             // a multiple of 32 unless they are the last ones
    int32_t scale_dtype;         // of scales and of minimums, as the matrix's
    const void* codes;
    int64_t row_stride;          // of codes, in elements
    const int32_t* stored_rows;  // [32 * num_blocks] stored row of each padded row, -1: padding
    const int32_t* source_rows;  // [k] row of `codes` of each stored row, or null: the same
    const int64_t* bit_offsets;  // packing words: [num_units] bit at which the unit's first stored
                                 // row begins in a column of `codes` (source_rows null)
    const void* scales;          // [groups, columns]; null for GGML blocks
    const void* offsets;         // [groups, columns] uint8 zeros or minimums, or null
} ExlQuantColumns;

// Repacks columns; every byte of their strips is written, padding too.
EXL_CUDA_API int exl_cuda_quant_pack(
    const ExlQuantMatrix* w, const ExlQuantColumns* columns, void* stream
);

// out [k, columns] float16, rows out_stride elements apart: w in the order of the input features.
EXL_CUDA_API int exl_cuda_quant_unpack(
    const ExlQuantMatrix* w, int32_t first_column, int32_t columns, void* out, int64_t out_stride,
    void* stream
);

// Rows token_ids of w^T: y [m, k] float32. ids int64, each in [0, n).
EXL_CUDA_API int exl_cuda_quant_embedding(
    const ExlQuantMatrix* w, const int64_t* token_ids, int32_t m, float* y, void* stream
);

// Inputs as the kernels for few rows read them: float16, in the matrix's order, in chunks of up to
// 64 rows of the batch, one after the other. A chunk of one row is [num_blocks][32]; of more rows
// [num_blocks][T][8][32] with T = 1, 2, 4 or 8 tiles of 8 rows, those past the last row zero. With
// T of 2 and more on compute capability 9.0 it is [num_blocks][4][8 T][8]: the 8 halves numbered
// 2 s + h (s: which k16 step, h: which half of it) are rows 8 t + 4 s + 2 h and the one after it of
// the block, t = 0 .. 3.
#define EXL_CUDA_CHUNK_ROWS 64
#define EXL_CUDA_TILE_ROWS 8
static inline int exl_cuda_row_tiles(int rows) {
    return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
}
static inline int64_t exl_cuda_chunk_halves(int rows, int num_blocks) {
    return (int64_t)num_blocks * 32 * (rows == 1 ? 1 : 8 * exl_cuda_row_tiles(rows));
}
// Room for prepared inputs: behind the last one lies a pad, which kernels may read, whatever it holds.
#define EXL_CUDA_PAD_BLOCKS 3
static inline int64_t exl_cuda_prepared_halves(int rows, int num_blocks) {
    const int whole = rows / EXL_CUDA_CHUNK_ROWS, rest = rows % EXL_CUDA_CHUNK_ROWS;
    return whole * exl_cuda_chunk_halves(EXL_CUDA_CHUNK_ROWS, num_blocks) +
           (rest ? exl_cuda_chunk_halves(rest, num_blocks) : 0) +
           exl_cuda_chunk_halves(rest ? rest : EXL_CUDA_CHUNK_ROWS, EXL_CUDA_PAD_BLOCKS);
}

// Attention and gated products can leave their result prepared for the linear behind them, where
// every padded row is a feature. `places` [k] is then the row in the matrix's order of each feature.
// What lies in rows of a tile past the batch's is of no consequence. Gated products take up to so
// many rows on the current device, a tile or a chunk; attention a tile: of more it takes longer to
// write a row here and there than to prepare them all. Of more than a tile a gated product leaves
// inputs by rows, so that rows of the batch lie beside each other: [num_blocks][4][T][8][8], where
// the 8 halves of a row have become 8 rows of a half.
EXL_CUDA_API int exl_cuda_most_placed_rows(int* rows);

typedef struct {
    const int32_t* order;  // [32 * num_blocks], -1: zero; null: row r is feature r
    void* out;             // prepared halves
    int32_t num_blocks;
    int32_t plain;         // 1: out is float16 [m, k], rows k apart, and order is ignored
} ExlPrepared;

// What inputs go through before they are prepared.
enum { EXL_INPUT_PLAIN = 0, EXL_INPUT_NORM = 1 };

// x [m, k] float32 or float16 -> `count` (1 to 3) prepared forms of x, or of rms_norm(x, norm, eps).
typedef struct {
    const void* x;
    int64_t x_stride;
    const float* norm;  // [k], or null: x as it is
    float eps;
    int32_t x_dtype;
    int32_t m;
    int32_t k;
    int32_t count;
    ExlPrepared to[3];
} ExlPrepare;
EXL_CUDA_API int exl_cuda_prepare(const ExlPrepare* args, void* stream);

enum { EXL_EPILOGUE_STORE = 0, EXL_EPILOGUE_ADD = 1, EXL_EPILOGUE_GATED = 2 };
enum { EXL_GATE_SILU = 0, EXL_GATE_GELU_TANH = 1 };

// y[:, columns of the parts] = x @ parts (+ bias), the parts' columns one after the other.
//   store  y float16 or float32
//   add    y float32 += ; y_stride is its row
//   gated  two parts of equal n, gate then up: y [m, n] = act(gate) * up, float16 or float32
// Sums do not depend on what else runs: the same inputs give the same bits.
typedef struct {
    const ExlQuantMatrix* parts[3];
    const void* inputs[3];  // prepared for that part; parts of one order may share them
    void* y;
    int64_t y_stride;
    int32_t count;
    int32_t m;              // 1 to 128
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t is_by_rows;     // the inputs of the one part, of more rows than a tile
    void* workspace;        // zero when first passed in, and its counters left zero
    int64_t workspace_bytes;
    const int32_t* places;  // [n], gated: y is prepared inputs of float16; or null
} ExlQuantLinear;
EXL_CUDA_API int64_t exl_cuda_quant_linear_workspace(int32_t max_n, int32_t max_m);
EXL_CUDA_API int exl_cuda_quant_linear(const ExlQuantLinear* args, void* stream);

// ---- elementwise -------------------------------------------------------------------------------

// out [m, d] = rms_norm(x [m, d]) * weight; types float32 or float16 each; in place is allowed.
EXL_CUDA_API int exl_cuda_rms_norm(
    const void* x, int32_t x_dtype, int64_t x_stride, const float* weight, float eps, int32_t m,
    int32_t d, void* out, int32_t out_dtype, int64_t out_stride, void* stream
);
// As above, of heads [rows, heads, d], rows apart by the stride, heads by d; in place.
EXL_CUDA_API int exl_cuda_rms_norm_heads(
    void* x, int32_t dtype, int64_t row_stride, const float* weight, float eps, int32_t rows,
    int32_t heads, int32_t d, void* stream
);
// x [rows, heads, d] in place; cos, sin float32 [rows, half] turn the pairs (i, i + half).
EXL_CUDA_API int exl_cuda_rope(
    void* x, int32_t dtype, int64_t row_stride, const float* cos, const float* sin, int32_t half,
    int32_t rows, int32_t heads, int32_t d, void* stream
);
// gate_up [m, 2 d] -> act(first half) * second half, [m, d]; types float32 or float16 each.
EXL_CUDA_API int exl_cuda_gated_activation(
    const void* gate_up, int32_t x_dtype, int64_t x_stride, int32_t gate, int32_t m, int32_t d,
    void* out, int32_t out_dtype, int64_t out_stride, void* stream
);
// Rows token_ids (int64) of weight [n, k] float16, bfloat16 or float32: y [m, k] float32.
EXL_CUDA_API int exl_cuda_embedding(
    const void* weight, int32_t dtype, const int64_t* token_ids, int32_t m, int32_t k, float* y,
    void* stream
);

// ---- cache and attention -------------------------------------------------------------------------
//
// Caches are [pages][kv_heads][page_size][row]; rows as exl/formats/kv.h has them, codes the same to
// the bit as on the CPU. head_dim is a multiple of 8 (of 32 where there are codes) up to 256.

typedef struct {
    void* key_cache;
    void* value_cache;
    int32_t key_dtype;
    int32_t value_dtype;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t page_size;
    int32_t num_pages;
} ExlCache;

// key, value [rows, kv_heads, d] float32 or float16 -> the cache, at slots int64 [rows].
EXL_CUDA_API int exl_cuda_write_kv(
    const ExlCache* cache, const void* key, const void* value, int32_t dtype, int64_t row_stride,
    const int64_t* slots, int32_t rows, void* stream
);

// Queries, keys and values of rows side by side, [rows, (q_heads + 2 kv_heads) d], in place: head
// norms where there are any, rope of queries and keys, x * scale + shift of each of their elements
// where that is asked for; then keys and values go to the cache.
typedef struct {
    void* qkv;
    int64_t qkv_stride;
    int32_t qkv_dtype;  // float16 or float32
    int32_t rows;
    int32_t q_heads;
    int32_t rotary_half;
    const float* cos;     // [rows, rotary_half]
    const float* sin;
    const float* q_norm;  // [d], or null
    const float* k_norm;
    const float* head_scale;  // [(q_heads + kv_heads) d], or null; and then head_shift too
    const float* head_shift;
    float eps;
    float reserved;
    const int64_t* slots;
} ExlRopeWrite;
EXL_CUDA_API int exl_cuda_rope_write(const ExlRopeWrite* args, const ExlCache* cache, void* stream);

// paged_attention of exl_core/ops/table.py. q and out may be the same memory. The page size is a
// power of two from 16, and a kv head has at most 16 query heads.
typedef struct {
    const void* q;
    int64_t q_stride;  // of rows, in elements; heads lie d apart
    void* out;
    int64_t out_stride;
    int32_t dtype;     // of q and out: float16 or float32
    int32_t rows;
    int32_t q_heads;
    int32_t seqs;
    const int32_t* page_table;  // [seqs, table_stride]
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
    int32_t table_stride;
    int32_t max_rows;  // of one sequence
    int32_t max_keys;  // of one sequence, this pass's included; an upper bound will do
    int32_t window;
    float scale;
    float softcap;
    void* workspace;   // zero when first passed in, and left zero where it must be
    int64_t workspace_bytes;
    const int32_t* places;  // [q_heads * d]: out is prepared inputs of float16; or null
} ExlAttention;
EXL_CUDA_API int64_t exl_cuda_attention_workspace(int32_t rows, int32_t q_heads, int32_t head_dim);
EXL_CUDA_API int exl_cuda_attention(
    const ExlAttention* args, const ExlCache* cache, void* stream
);

// ---- sampling ------------------------------------------------------------------------------------

// Settings of one row, on the device; `sample` of exl_core/ops/table.py says what they mean.
typedef struct {
    double top_p;
    double min_p;
    double uniform;
    float temperature;  // > 0
    int32_t top_k;
    int32_t num_top;
    int32_t first_edit;  // logits[edit_ids[i]] = edit_values[i] for i in first_edit .. last_edit - 1
    int32_t last_edit;
    int32_t row;         // of the logits
    int64_t mask;        // words from the start of `masks`, or -1: none
} ExlSampleRow;

typedef struct {
    const float* logits;  // [, vocab], left as they are
    int64_t logits_stride;
    int32_t rows;         // that are drawn from
    int32_t vocab;        // at most 262144
    const ExlSampleRow* settings;  // [rows]
    const int64_t* edit_ids;
    const float* edit_values;
    const uint32_t* masks;
    int32_t max_top;         // at most 512; no num_top is above it
    int32_t reserved;
    int32_t* token_ids;      // [rows], -1: nothing can be drawn
    int64_t* next_ids;       // [rows], the same with 0 for -1; may be NULL
    float* probabilities;    // [rows]
    int32_t* top_ids;        // [rows, max_top]; past a row's tokens -1
    float* top_probabilities;
    void* workspace;
    int64_t workspace_bytes;
} ExlSample;
EXL_CUDA_API int64_t exl_cuda_sample_workspace(int32_t rows, int32_t vocab);
EXL_CUDA_API int exl_cuda_sample(const ExlSample* args, void* stream);

#ifdef __cplusplus
}
#endif

// Mixture of experts in the CUDA library: the choice of experts for each row, and products of rows
// with the quantized matrices of their experts.
//
// A pair is a row with one of its experts: pair top_k * row + slot. One MLP of experts takes four
// calls: exl_cuda_expert_inputs, exl_cuda_expert_linear for gate and up, exl_cuda_expert_linear for
// down, exl_cuda_expert_sum. One row takes one call of exl_cuda_expert_row. The host never knows
// which experts the rows use: launches are sized for the worst case, and surplus thread blocks end
// at once.
#pragma once

#include "exl/cuda/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_MAX_EXPERTS 768  // their scores fit into 48 KiB of shared memory

enum { EXL_SCORES_SOFTMAX = 0, EXL_SCORES_SIGMOID = 1 };  // same numbers as exl::Scores

// exl_core/ops/moe.py describes the choice (`Routing`).
//
// logits [m, experts] float32 = x @ weight^T + logit_bias, and the choice from them. With x null,
// `logits` are inputs. All sums have an order that depends on the sizes alone: no bit of a row's
// results depends on the other rows. A logit that is NaN ranks last.
//
// Every row also has `shared` experts, whose numbers follow those of the others: they are the last
// ones of its ids. Their weights are 1, or with `shared_weight` the sigmoid of its product with x,
// which is one more logit of the row. [m, slots] is [m, top_k + shared].
typedef struct {
    const void* x;              // [m, d] float32 or float16, or null
    int64_t x_stride;           // in elements
    const void* weight;         // [experts, d] float16
    const float* logit_bias;    // [experts], or null
    const void* shared_weight;  // [d] float16, or null
    float* logits;              // [m, experts], or with `shared_weight` [m, experts + 1]
    uint32_t* counters;         // [m], zero, and left zero
    const float* bias;          // [experts], added to the scores that choose; or null
    // RMS norm of x, float32 [d], or null. Then the logits are those of the normed rows, which
    // `normed` [m, d] gets unless it is null.
    const float* norm;
    float* normed;
    // [m, slots], best first. Null: only the logits are computed, and exl_cuda_expert_row chooses.
    int32_t* ids;
    float* weights;  // [m, slots]
    int32_t x_dtype;
    int32_t m;
    int32_t d;
    int32_t experts;  // at most EXL_CUDA_MAX_EXPERTS
    int32_t top_k;    // at most `experts`
    int32_t scores;
    int32_t groups;
    int32_t kept_groups;
    int32_t group_scores;
    int32_t normalizes;
    float eps;
    float factor;
    float norm_eps;
    int32_t shared;
    int32_t logits_stride;  // numbers from row to row of the logits; 0: there is nothing in between
} ExlRoute;
EXL_CUDA_API int exl_cuda_route(const ExlRoute* args, void* stream);

// Consecutive k-tiles of one run that a warp loads at once: one k-tile, or several short ones of
// the same shape, up to four blocks. They are contiguous in a panel.
typedef struct {
    uint32_t offset;       // bytes from the start of a panel
    uint16_t first_block;  // number of its first block in the matrix
    uint16_t bytes;
    uint8_t bits;
    uint8_t k_tiles;
    uint8_t k_tile_blocks;
    uint8_t blocks;  // k_tiles * k_tile_blocks
    uint32_t reserved;
} ExlQuantLoad;

// How the matrices of a call store their weights.
enum {
    EXL_EXPERTS_CODES = 0,
    EXL_EXPERTS_SMALL_GROUPS = 1,  // some have small groups (exl/cuda/linear.h); at most 8 rows
    EXL_EXPERTS_DENSE = 2          // float16 [n, k], k a multiple of 32
};

// Matrix of one expert, in device memory. A dense one has its weights at `tiles`, and as many loads
// as blocks of 32 rows of k, without a table.
typedef struct {
    const uint8_t* tiles;
    const ExlQuantLoad* loads;           // [num_loads]
    const int32_t* permutation;          // [32 * num_blocks]: feature of each row, -1: padding
    const int32_t* inverse_permutation;  // [k]: row of each feature; null if rows are padding
    const float* bias;                   // [n], or null
    int64_t panel_bytes;
    int32_t num_loads;
    // values << 14 | offset_kind << 16 | (scale_dtype is float32) << 19
    uint32_t kind;
    int32_t num_blocks;
    int32_t header_bytes;  // of a k-tile: its scales and offsets
} ExlExpertMatrix;

// Rows of one expert that one thread block multiplies: pairs[first .. first + count - 1].
typedef struct {
    int32_t expert;
    int32_t first;
    int32_t count;
    int32_t reserved;
} ExlExpertItem;

// Most items that a list can have.
static inline int64_t exl_cuda_max_items(int64_t pairs, int experts, int tile_rows) {
    return (pairs < experts ? pairs : experts) + pairs / tile_rows;
}

// Sorts pairs by expert, and by number within an expert. Rounds rows to float16, in the order of
// the rows of their matrices: out[i] [rows or pairs, 32 * num_blocks].
typedef struct {
    const void* x;  // [m, k] float32 or float16
    int64_t x_stride;
    const int32_t* ids;  // [m, top_k]
    // Forms of x, one for each different order of rows: with `matrices` one row per pair, in the
    // order of matrices[i + stride * expert]. Otherwise one row per row of x, in the order of
    // `permutation`, or in that of the features if it is null.
    const ExlExpertMatrix* matrices;
    int32_t matrix_stride;
    int32_t num_blocks;  // the largest number of any matrix
    const int32_t* permutation;
    void* out[2];
    int32_t count;  // of forms: 1 or 2; 0: the pairs are sorted only
    int32_t x_dtype;
    int32_t m;
    int32_t k;
    int32_t top_k;
    int32_t experts;
    int32_t tile_rows;  // most rows of an item
    int32_t reserved;
    int32_t* num_items;    // null: nothing is sorted
    ExlExpertItem* items;  // [exl_cuda_max_items]
    int32_t* pairs;        // [m * top_k]
} ExlExpertInputs;
EXL_CUDA_API int exl_cuda_expert_inputs(const ExlExpertInputs* args, void* stream);

// Tiles of successive experts at equal distances: those of a part of the i-th expert are at
// tiles + i * expert_bytes + part * part_bytes.
typedef struct {
    const uint8_t* tiles;  // null: only the table of matrices says where they are
    int64_t expert_bytes;
    int64_t part_bytes;
    int64_t panel_bytes;
} ExlExpertPlaces;

// y[pair] = x[pair] @ matrix of its expert (+ bias), or an activation of one or two such products.
//   store      y [pairs, n] float32
//   gated      y [pairs, n] float16 = act(gate) * up, in the order of the rows of `next`
//   activated  y [pairs, n] float16 = act(x[pair] @ matrix), in the same order
// Sums are deterministic, and no bit of a row depends on the other rows.
typedef struct {
    const ExlExpertMatrix* matrices;  // [experts, parts]
    // The loads of all matrices, if they are the same ones; then they are read early. Or null.
    const ExlQuantLoad* loads;
    const int32_t* num_items;
    const ExlExpertItem* items;
    const int32_t* pairs;
    const void* x[2];  // float16, for each part; see exl_cuda_expert_inputs
    void* y;
    // Gated or activated: matrices [experts] whose inverse permutations order the columns of y, or null: the
    // order of the columns.
    const ExlExpertMatrix* next;
    int64_t max_items;
    int32_t num_loads;  // with `loads`; otherwise the largest number of any matrix
    int32_t x_stride;   // in elements, a multiple of 8
    int32_t y_stride;
    int32_t n;  // columns of each part
    int32_t parts;
    int32_t epilogue;  // EXL_EPILOGUE_*: gated with two parts, others with one
    int32_t gate;
    int32_t pairs_per_row;  // of x: top_k if x has one row per row, 1 if it has one per pair
    int32_t load_bytes;     // the largest number of any load
    int32_t tile_rows;      // most rows of an item: 8 or 32
    int32_t k;              // exl_cuda_expert_row: numbers of a row of x, a multiple of 32
    int32_t x_dtype;        // exl_cuda_expert_row: float16, or float32 in the order of the features
    int32_t source;         // EXL_EXPERTS_*
    // Whether an earlier kernel than the previous one wrote items and pairs, so that the first
    // weights are loaded before the previous kernel has ended.
    int32_t is_early;
    // bits | values << 8 | (kind >> 16) << 16 | k_tile_blocks << 24, where these are the same for all
    // loads of all matrices, and loads of four blocks follow each other (the last one may have
    // fewer); otherwise 0. exl_cuda_expert_row has smaller code for some of them, which reads no
    // table of loads.
    uint32_t only;
    int32_t has_bias;  // whether a matrix has one
    // With `only`: of the experts before number `shared_from`, and of the others.
    ExlExpertPlaces places[2];
    int32_t shared_from;
    int32_t reserved;
} ExlExpertLinear;
EXL_CUDA_API int exl_cuda_expert_linear(const ExlExpertLinear* args, void* stream);

// The same for prompts, on compute capability 9.0. Items have up to EXL_CUDA_EXPERT_ITEM_ROWS rows.
// Inputs are those of exl_cuda_expert_gather, and x_stride is the number of rows of their matrices.
// All matrices have integer codes and the k-tiles `k_tiles`; `num_loads` and `loads` are not used.
// Gated or activated products are stored as exl_cuda_expert_gather stores inputs, of y_stride
// numbers per row; `next` is null and n even. Weights are rounded to float16, so that the bits are
// not those of exl_cuda_expert_linear.
#define EXL_CUDA_EXPERT_ITEM_ROWS 128
EXL_CUDA_API int exl_cuda_expert_many_rows(
    const ExlExpertLinear* args, const ExlQuantKTile* k_tiles, int32_t num_k_tiles, void* stream
);

// Inputs of the rows of each item, out[0] [max_items][2 chunks][num_blocks][4][64 rows][8] float16:
// prepared inputs of two chunks of 64 rows (exl/cuda/linear.h). Items and pairs are inputs;
// `permutation` is the order of all matrices. Rows that an item does not have are not written.
EXL_CUDA_API int exl_cuda_expert_gather(
    const ExlExpertInputs* args, int64_t max_items, void* stream
);

#define EXL_CUDA_MAX_ROW_EXPERTS 32     // their sums fit into shared memory
#define EXL_CUDA_ROW_COUNTER_BYTES 256  // of each counter of exl_cuda_expert_row

// exl_cuda_expert_linear for one row, with the same bits: `first` is gated or activated, `down` one of
//
//   store   y [n] float32: the sum over the experts, as exl_cuda_expert_sum
//   add     y [n] += that sum
//
// Either may be null; with both, `down` reads what `first` stores, and both are dense or both are
// not. The experts are `ids` [top_k], at most EXL_CUDA_MAX_ROW_EXPERTS, with `weights`; with `route`
// not null they are chosen from its logits instead, and top_k is its number of slots. Without `first`,
// an earlier kernel than the previous one wrote the ids, weights or logits. `counters`, of
// (top_k + 1) * EXL_CUDA_ROW_COUNTER_BYTES bytes at a multiple of 8, are zero, and left zero. Items
// and pairs are not needed.
EXL_CUDA_API int exl_cuda_expert_row(
    const ExlExpertLinear* first, const ExlExpertLinear* down, const ExlRoute* route,
    const int32_t* ids, const float* weights, int32_t top_k, uint32_t* counters, void* stream
);

// y [m, n] float32, rows y_stride elements apart: y[row] = sum over j of weights[row, j] *
// x[top_k * row + j], in order of j. With `is_added`, y[row] += that sum.
EXL_CUDA_API int exl_cuda_expert_sum(
    const float* x, const float* weights, int32_t m, int32_t top_k, int32_t n, int32_t is_added,
    float* y, int64_t y_stride, void* stream
);

#ifdef __cplusplus
}
#endif

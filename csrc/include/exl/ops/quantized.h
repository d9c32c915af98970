// Quantized linears: EXL2, GPTQ and GGUF blocks in one run-time layout.
//
//   w[row, n] = scale[g, n] * (code[row, n] - zero)        y[m, n] = x[m, :] @ w[:, n] + bias[n]
//
// Rows lie along k in stored order. Groups of rows share a scale and an offset for each column; a
// run is consecutive groups of one width and size. Every group starts a block of 32 rows of its
// own; a block's rows past the group's end are padding, which meets activations of zero.
//
// Codes: panels of 16 columns, blocks of 32 rows inside, one stream from first row to last:
//
//   a block of b bits   64 * b bytes, as planes of 1, 2, 4 or 8 bits, low bits first:
//                       2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 8 = 8
//   a plane of p bits   row 4 i + j, column c: byte 64 * (i / (8 / p)) + 4 c + j,
//                       bits p * (i % (8 / p)) and up
//
// so that a load of 64 bytes, shifted and masked, holds 4 rows of each of 16 columns: the operand of
// a byte dot product with 4 activations. Scales and offsets follow in panels of their own:
// [panel][group][16].
//
// A span is what is summed in integers before scales apply: up to 4 blocks of one group. x is
// rounded to integers span by span; or, where that is faster for many rows, the codes made floats.
#pragma once

#include <cstdint>
#include <vector>

#include "exl/ops/elementwise.h"
#include "exl/ops/linear.h"

namespace exl {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kSpanBlocks = 4;
constexpr int kMaxParts = 3;

enum class Offset : int { middle = 0, zeros = 1, minimums = 2 };
enum class Packing : int { words = 0, bytes, q4_0, q4_1, q5_0, q5_1, q8_0 };

// One of GGML's blocks of 32 values of a column: what its codes are, and at which byte a float16
// minimum, the fifth bits and the codes lie (-1: it has none). A float16 scale comes first.
struct GgmlBlock {
    Packing packing;
    const char* name;
    int bits;
    Offset offset;
    int64_t bytes;
    int64_t minimum;
    int64_t high_bits;
    int64_t codes;
};
constexpr GgmlBlock kGgmlBlocks[] = {
    {Packing::q4_0, "q4_0", 4, Offset::middle, 18, -1, -1, 2},
    {Packing::q4_1, "q4_1", 4, Offset::minimums, 20, 2, -1, 4},
    {Packing::q5_0, "q5_0", 5, Offset::middle, 22, -1, 2, 6},
    {Packing::q5_1, "q5_1", 5, Offset::minimums, 24, 2, 4, 8},
    {Packing::q8_0, "q8_0", 8, Offset::middle, 34, -1, -1, 2},
};

struct GroupRun {
    int bits;
    int64_t groups;
    int64_t rows;  // of each group
    // Derived.
    int64_t blocks;       // of each group
    int64_t spans;        // of each group
    int64_t first_group;
    int64_t first_block;
    int64_t first_span;
    int64_t first_row;    // stored
    int64_t code_offset;  // bytes from the start of a panel
};

struct QuantLayout {
    int64_t n;
    int64_t k;
    std::vector<GroupRun> runs;
    const int32_t* features;  // [k], null where stored row r is feature r
    DType scale_dtype;        // f16 or f32; also of minimums
    Offset offset;
    bool has_bias;
};

// Some columns of a matrix as a file has them; see exl_core/ops/quantized.py.
struct QuantColumns {
    Packing packing;
    const void* codes;
    int64_t row_stride;  // of codes, in elements
    int64_t columns;
    const int32_t* source_rows;  // [k] or null
    const void* scales;          // [groups, columns]
    const void* offsets;
    const float* bias;           // [columns] or null
};

class QuantMatrix {
public:
    explicit QuantMatrix(const QuantLayout& layout);
    ~QuantMatrix();
    QuantMatrix(const QuantMatrix&) = delete;
    QuantMatrix& operator=(const QuantMatrix&) = delete;

    // Columns [first_column, first_column + columns.columns); whole panels, or the last columns.
    void fill(int64_t first_column, const QuantColumns& columns);

    // Are the same features in the same padded rows?
    bool has_order_of(const QuantMatrix& other) const;

    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    const uint8_t* panel_codes(int64_t panel) const { return codes + panel * panel_bytes; }
    // Of a panel's first scale and offset; [groups][16] follow.
    int64_t scale_index(int64_t panel) const { return panel * groups * kPanel; }

    const int64_t n;
    const int64_t k;
    const DType scale_dtype;
    const Offset offset;
    std::vector<GroupRun> runs;
    int64_t groups = 0;
    int64_t blocks = 0;  // padded rows are 32 * blocks
    int64_t spans = 0;
    int64_t panel_bytes = 0;
    int64_t size_bytes = 0;
    // Feature of each padded row, -1 for padding; empty where padded row r is feature r.
    std::vector<int32_t> order;
    uint8_t* codes = nullptr;
    void* scales = nullptr;
    void* offsets = nullptr;  // uint8 zeros, or minimums of scale_dtype; null in the middle
    float* bias = nullptr;    // null, or [panels * 16]

private:
    MemoryBlock* block_;
};

enum class Epilogue : int { store = 0, add = 1, gated = 2 };

// y[:, columns of the parts] = x @ parts, each part [m, its n], one after the other.
// add: added to what y holds. gated: two parts of equal n, gate then up; y [m, n of one].
struct QuantLinearArgs {
    const QuantMatrix* parts[kMaxParts];
    int count;
    const float* x;  // [m, k], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    Epilogue epilogue;
    Gate gate;
    float* y;  // rows y_stride apart
    int64_t y_stride;
};

struct QuantEmbeddingArgs {
    const QuantMatrix* w;
    const int64_t* token_ids;  // [m], each in [0, n)
    int64_t m;
    float* y;  // [m, k]
};

// The same on every instruction set: it reads a few hundred codes.
void quant_embedding(ThreadPool& pool, const QuantEmbeddingArgs& args);

}  // namespace exl

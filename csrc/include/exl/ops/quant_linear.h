// Quantized linears: groups of codes from EXL2, GPTQ, AWQ, compressed-tensors, GGUF and FP8 files.
//
//   w[row, n] = scale[g, n] * (code[row, n] - zero)        y[m, n] = x[m, :] @ w[:, n] + bias[n]
//   w[row, n] = scale[g, n] * value(code[row, n])          for codes that are not integers (Values)
//
// Rows run along k in stored order. A group is consecutive rows that share a scale and an offset
// for each column. A run is consecutive groups of one bit width and one size. A group starts a new
// block of 32 rows, except that two groups of 16 rows of integers share a block (a pair). The rows
// of a block past the end of its group are padding; they are multiplied by activations of zero.
//
// Codes are stored in panels of 16 columns. In a panel, blocks of 32 rows follow each other without
// gaps, from the first row to the last:
//
//   a block of b bits   64 * b bytes, as planes of 1, 2, 4 or 8 bits, low bits first:
//                       2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 8 = 8
//   a plane of p bits   row 4 i + j, column c: byte 64 * (i / (8 / p)) + 4 c + j,
//                       bits p * (i % (8 / p)) and up
//
// A load of 64 bytes, shifted and masked, therefore yields 4 rows of each of 16 columns: the
// operand of a byte dot product with 4 activations. Scales and offsets are stored in separate
// arrays, also by panel: [panel][group][16].
//
// A span is the range of rows that is summed in integers before the scale is applied: up to 4
// blocks of one group, or a group of a pair. x is quantized to integers per span. For many rows,
// where that is faster, the kernels convert the codes to floats instead.
#pragma once

#include <cstdint>
#include <vector>

#include "exl/ops/elementwise.h"
#include "exl/ops/linear.h"

namespace exl {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kHalfRows = kBlockRows / 2;  // rows of each group of a pair
constexpr int64_t kSpanBlocks = 4;
constexpr int kMaxParts = 3;

// zeros: scale * (code - zero). middle: the same with zero = 2^(bits - 1), not stored.
// minimums: scale * code + minimum.
enum class Offset : int { middle = 0, zeros = 1, minimums = 2 };
// Numbers that the codes stand for. e4m3: 8-bit floats without infinities (OCP FP8 E4M3). iq4_nl and
// mxfp4: the tables kIq4Values and kMxfp4Values, indexed by 4 bits. All have Offset::middle, with
// nothing stored. The scales of mxfp4 are exponents (E8M0): 2^(e - 127).
enum class Values : int { integers = 0, e4m3 = 1, iq4_nl = 2, mxfp4 = 3 };
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
// Twice the 4-bit floats of OCP MXFP4 (E2M1), which makes them integers. Kernels halve the scales.
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Added to the entries of a table, which then are 8-bit codes whose zero is 128.
constexpr int kTableZero = 128;
enum class Packing : int { words = 0, bytes, q4_0, q4_1, q5_0, q5_1, q8_0 };

// GGML block type: 32 values of one column, in `bytes` bytes. A float16 scale comes first.
// `minimum`, `high_bits` and `codes` are the byte offsets of a float16 minimum, of the fifth bits
// and of the codes (-1: the type has none).
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
    // Derived from the fields above by the constructor of QuantMatrix. A unit is a group, or a pair
    // of groups; it consists of whole blocks.
    bool is_paired;  // groups of kHalfRows rows; their number is even
    int64_t units;
    int64_t unit_rows;
    int64_t blocks;  // of each unit
    int64_t spans;   // of each unit
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
    const int32_t* features;  // [k] input feature of each stored row; null: row r is feature r
    DType scale_dtype;        // f16 or f32, u8 for mxfp4; minimums have the same type
    Offset offset;
    Values values;
    bool has_bias;
};

// A range of columns in a file's layout. exl_core/ops/weights.py describes the fields.
struct QuantColumns {
    Packing packing;
    const void* codes;
    int64_t row_stride;  // of codes, in elements
    int64_t columns;
    const int32_t* source_rows;  // [k] or null
    const void* scales;          // [groups, columns]
    const void* offsets;
    const float* bias;  // [columns] or null
};

class QuantMatrix {
  public:
    explicit QuantMatrix(const QuantLayout& layout);
    ~QuantMatrix();
    QuantMatrix(const QuantMatrix&) = delete;
    QuantMatrix& operator=(const QuantMatrix&) = delete;

    // Repacks columns [first_column, first_column + columns.columns). The range covers whole
    // panels, except that it may end with the last column of the matrix.
    void fill(int64_t first_column, const QuantColumns& columns);

    // Returns whether both matrices have the same input features in the same padded rows.
    bool has_order_of(const QuantMatrix& other) const;

    // Returns whether both matrices can share one quantized copy of their inputs: the same order of
    // the features, and the same spans.
    bool has_input_of(const QuantMatrix& other) const;

    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    const uint8_t* panel_codes(int64_t panel) const { return codes + panel * panel_bytes; }
    // Whether some groups share a block.
    bool has_pairs() const;
    // Index of the first scale, and of the first offset, of a panel; [groups][16] follow.
    int64_t scale_index(int64_t panel) const { return panel * groups * kPanel; }

    const int64_t n;
    const int64_t k;
    const DType scale_dtype;
    const Offset offset;
    const Values values;
    std::vector<GroupRun> runs;
    int64_t groups = 0;
    int64_t blocks = 0;  // number of padded rows / 32
    int64_t spans = 0;
    int64_t panel_bytes = 0;
    int64_t size_bytes = 0;
    // Permutation: input feature of each padded row, -1 for padding. Empty where padded row r is
    // feature r.
    std::vector<int32_t> order;
    uint8_t* codes = nullptr;
    void* scales = nullptr;
    void* offsets = nullptr;  // uint8 zeros, or minimums of scale_dtype; null for middle
    float* bias = nullptr;    // null, or [panels * 16]

  private:
    MemoryBlock* block_;
};

enum class Epilogue : int { store = 0, add = 1, gated = 2 };

// y[:, columns of the parts] = x @ parts. The parts' outputs, [m, n of the part] each, are side by
// side.
//   store  y = x @ parts
//   add    y += x @ parts
//   gated  two parts of equal n, gate then up: y [m, n] = act(x @ gate) * (x @ up)
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
    // Computes every row as decode does, so that no bit of a row depends on the number of rows.
    // Kernels whose rows never depend on it ignore this.
    bool is_batch_invariant;
};

struct QuantEmbeddingArgs {
    const QuantMatrix* w;
    const int64_t* token_ids;  // [m], each in [0, n)
    int64_t m;
    float* y;  // [m, k]
};

// Bits of 2^(exponent - 128), half of the scale of mxfp4. The two smallest are subnormal.
constexpr uint32_t half_scale_bits(uint32_t exponent) {
    return exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
}

// One implementation for all instruction sets: it reads only a few hundred codes.
void quant_embedding(ThreadPool& pool, const QuantEmbeddingArgs& args);

}  // namespace exl

// y[m, n] = x[m, k] @ w[n, k]^T + bias[n] (+ y), fp32 accumulation, one rounding per product and
// sum.
//
// Packed layout, the same for decode and prefill: panels of 16 output columns, k-major within a
// panel, in the stored type. Columns past n are zero.
//
//          column  0 1 2 ... 15 | 16 17 ... 31 | ...
//     k = 0        w w w      w |  w  w      w |
//     k = 1        w w w      w |  w  w      w |      panel p starts at element p * k * 16
//     ...                       |              |
//
// Reason: a step along k is one vector load of 16 columns and one broadcast of x for each row, for
// every m, and decode reads each panel as one stream.
#pragma once

#include <cstdint>

#include "exl/tensor_view.h"
#include "exl/thread_pool.h"

namespace exl {

constexpr int64_t kPanel = 16;

struct MemoryBlock;

// Weights of one linear in the run-time layout. Owns its memory, which is zero until filled.
class PackedMatrix {
  public:
    PackedMatrix(int64_t out_features, int64_t in_features, DType dtype, bool has_bias);
    ~PackedMatrix();
    PackedMatrix(const PackedMatrix&) = delete;
    PackedMatrix& operator=(const PackedMatrix&) = delete;

    // Packs rows [row_offset, row_offset + rows) of w[n, k]. Several threads may fill disjoint
    // ranges at the same time.
    void fill(int64_t row_offset, int64_t rows, const void* weight, const float* bias);

    int64_t panels() const { return (n + kPanel - 1) / kPanel; }

    const int64_t n;
    const int64_t k;
    const DType dtype;
    int64_t size_bytes = 0;
    void* data = nullptr;
    float* bias = nullptr;  // null, or [panels * 16]

  private:
    MemoryBlock* block_;  // contains `data`
};

struct LinearArgs {
    const PackedMatrix* w;
    const float* x;  // [m, k], rows x_stride apart
    int64_t m;
    int64_t x_stride;
    float* y;  // [m, n], rows y_stride apart
    int64_t y_stride;
    bool accumulate;  // add to y instead of overwriting it
};

struct EmbeddingArgs {
    const PackedMatrix* w;
    const int64_t* token_ids;  // [m], each in [0, n)
    int64_t m;
    float* y;  // [m, k]
};

}  // namespace exl

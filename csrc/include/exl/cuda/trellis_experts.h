// MLPs of experts with trellis codes (EXL3) in the CUDA library.
//
//   y[row] = sum over j of weights[row, j] * down(act(gate(x[row])) * up(x[row]))
//
// with the experts ids[row, j]: a pair of a row and an expert is pair top_k * row + j. Every matrix
// has factors suh of its own, so that the inputs of a pair are prepared for its expert. One call
// launches all kernels. The host never knows which experts the rows use.
#pragma once

#include "exl/cuda/moe.h"
#include "exl/cuda/trellis.h"

#ifdef __cplusplus
extern "C" {
#endif

// Kernels of the products, by the rows of an expert that they multiply at a time: 4 or 8 without
// decoding the weights, 32, or 64. The second one needs a device on which exl_cuda_trellis_max_rows
// exceeds 8, the third one compute capability 9.0.
enum { EXL_EXPERTS_DECODE = 0, EXL_EXPERTS_BATCH = 1, EXL_EXPERTS_PROMPT = 2 };

// Matrices of one kind (gate, up, down) have the same sizes, places in their blocks and codebook;
// the codebook is that of all kinds. Rates may differ. Sums are deterministic. With one
// kernel and one value of is_split, no bit of a row depends on the other rows.
typedef struct {
    const ExlTrellisMatrix* wide;    // in device memory [experts, parts]: gate and up, or up alone
    const ExlTrellisMatrix* narrow;  // in device memory [experts]: down
    // Any matrix of each table. Pointers and rate are not used.
    ExlTrellisMatrix of_wide, of_narrow;
    // Rates of each table: bit tile_words / 8 is set for every tile_words that occurs.
    uint32_t wide_rates, narrow_rates;
    const void* x;  // [m, in_features] float32 or float16
    int64_t x_stride;
    const int32_t* ids;    // [m, top_k], below `experts`
    const float* weights;  // [m, top_k]
    float* y;              // [m, out_features]
    int64_t y_stride;
    void* workspace;
    int64_t workspace_bytes;
    int32_t x_dtype;
    int32_t m;
    int32_t top_k;
    int32_t experts;   // at most EXL_CUDA_MAX_EXPERTS
    int32_t parts;     // 2: gated, 1: y = sum of weights * down(act(up(x)))
    int32_t gate;      // the activation
    int32_t is_added;  // y += instead of y =
    int32_t kernel;    // EXL_EXPERTS_DECODE, _BATCH or _PROMPT
    // The division of the work suits few rows, also if the kernel is not that for decode.
    int32_t is_split;
    int32_t reserved;
} ExlTrellisExperts;

// Workspace of a call; `workspace`, `x` and `y` are not used.
EXL_CUDA_API int64_t exl_cuda_trellis_experts_workspace(const ExlTrellisExperts* args);
EXL_CUDA_API int exl_cuda_trellis_experts(const ExlTrellisExperts* args, void* stream);

#ifdef __cplusplus
}
#endif

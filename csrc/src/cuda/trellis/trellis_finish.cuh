// Arguments of the kernels that finish products (trellis_finish.cu, trellis_join.cu).
#pragma once

#include "cuda/trellis/trellis_prepare.cuh"
#include "cuda/trellis/trellis_work.cuh"
#include "exl/cuda/exchange.h"

namespace exl::cuda::trellis {

// Where the sums of a matrix are.
struct Sums {
    const void* from;   // float32 slots of a launch, or float16 [m, n]
    Division division;  // of slots
    uint32_t first_group;
    int columns;  // of a slot; 0: float16 [m, n]
    int rows;     // of a slot
};

struct FinishPart {
    Sums sums;
    const __half* svh;
    const float* bias;
    const float* input_sums;  // [rows][k_blocks], if the product was with raw_fragment_of, or null
    int k_blocks;
    int n, first_out, out_features;
    int first_block;  // of all parts
    int y_column;
};

struct FinishArgs {
    FinishPart parts[EXL_TRELLIS_MAX_PARTS];
    void* y;
    int64_t y_stride;
    int y_dtype;
    int count;
    int m;
    int first_row;  // of a chunk, in `next` and `input_sums`
    int epilogue, gate;
    int blocks;  // tasks per row
    bool has_next;
    Target next;
    // y has partial sums, which are also sent to the same elements of the copies.
    bool sends;
    ExlPartialCopies copies;
};

cudaError_t launch_finish(const FinishArgs& args, void* stream);

// Whether `launch_join` takes a product that is added to y, and the preparation of y that follows.
bool can_join(const FinishArgs& finish, const PrepareArgs& prepare, const DeviceInfo& info);
// Finishes the product and prepares y in one launch (trellis_join.cu).
cudaError_t launch_join(const FinishArgs& finish, const PrepareArgs& prepare, void* stream);

}  // namespace exl::cuda::trellis

// Arguments of the kernels around products with experts of trellis codes (trellis_experts_rows.cu).
#pragma once

#include "cuda/moe/sort.cuh"
#include "cuda/trellis/trellis_experts.cuh"
#include "cuda/trellis/trellis_rows.cuh"

namespace exl::cuda::trellis {

// Form of prepared inputs beside those of exl/cuda/trellis.h: float16 [pairs, k] in the order of k.
constexpr int kNaturalForm = 3;

// Prepares x, one row for `pairs_per_row` successive pairs, for each pair and part of its expert.
struct ExpertPrepareArgs {
    const void* x;
    int64_t x_stride;
    int x_dtype;
    bool is_aligned;
    int pairs, pairs_per_row, parts;
    const int32_t* ids;                // [pairs]
    const ExlTrellisMatrix* matrices;  // [experts, parts]
    Target to[2];                      // of each part, one row per pair
    bool sorts;
    PairSort sort;
};
cudaError_t launch_expert_prepare(const ExpertPrepareArgs& args, void* stream);

// Slots of the products of a launch.
struct ExpertSlots {
    const float* from;
    Shares shares;
    int columns, rows;  // of a slot
};

// Activation of the sums of gate and up, or of up alone.
struct ExpertInnerArgs {
    ExpertItems items;
    ExpertSlots slots;
    const ExlTrellisMatrix* matrices;  // [experts, parts]
    int parts, gate;
    int blocks;  // of 128 columns
    int first_out, out_features;
    // The result: prepared inputs of the experts' next matrices, or without these
    // float16 [pairs, out_features].
    const ExlTrellisMatrix* next;
    Target to;
    __half* plain;
};
cudaError_t launch_expert_inner(const ExpertInnerArgs& args, void* stream);

// Weighted sum of the outputs of each row's experts.
struct ExpertOuterArgs {
    ExpertSlots slots;
    const ExlTrellisMatrix* matrices;  // [experts]
    const int32_t* ids;
    const int32_t* places;  // PairSort; null: each pair is an item
    const float* weights;
    int m, top_k;
    int blocks;  // of 128 columns
    int first_out, out_features;
    float* y;
    int64_t y_stride;
    bool is_added;
};
cudaError_t launch_expert_outer(const ExpertOuterArgs& args, void* stream);

}  // namespace exl::cuda::trellis

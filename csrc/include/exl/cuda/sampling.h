// Sampling of tokens in the CUDA library.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sampling settings of one row, in device memory. `sample` of exl_core/ops/sampling.py defines them.
typedef struct {
    double top_p;
    double min_p;
    double uniform;
    float temperature;  // > 0
    int32_t top_k;
    int32_t num_top;
    int32_t first_edit;  // the row's edits are first_edit .. last_edit - 1
    int32_t last_edit;
    int32_t row;   // row of the logits
    int64_t mask;  // offset of its bitmask in `masks`, in words; -1: none
} ExlSampleRow;

typedef struct {
    const float* logits;  // [any, vocab]; not modified
    int64_t logits_stride;
    int32_t rows;                  // rows to sample, at most 65535
    int32_t vocab;                 // at most 262144
    const ExlSampleRow* settings;  // [rows]
    const int64_t* edit_ids;       // distinct in each row
    const float* edit_factors;
    const float* edit_offsets;
    const uint32_t* masks;
    int32_t max_top;  // at most 512; upper bound of num_top
    int32_t reserved;
    int32_t* token_ids;    // [rows], -1: no token can be sampled
    int64_t* next_ids;     // [rows], the same with 0 instead of -1; may be NULL
    float* probabilities;  // [rows]
    int32_t* top_ids;      // [rows, max_top]; -1 after the last of a row
    float* top_probabilities;
    void* workspace;
    int64_t workspace_bytes;
} ExlSample;
EXL_CUDA_API int64_t exl_cuda_sample_workspace(int32_t rows, int32_t vocab);
EXL_CUDA_API int exl_cuda_sample(const ExlSample* args, void* stream);

#ifdef __cplusplus
}
#endif

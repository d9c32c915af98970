// Attention over a paged cache in the CUDA library.
#pragma once

#include "exl/cuda.h"
#include "exl/cuda/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

// paged_attention of exl_core/ops/attention.py. q and out may be the same memory. The page size is a
// power of two and at least 16. A kv head of at most 256 elements has at most 16 query heads.
typedef struct {
    const void* q;
    int64_t q_stride;  // elements between rows; heads are contiguous
    void* out;
    int64_t out_stride;
    int32_t dtype;  // of q and out: float16 or float32
    int32_t rows;
    int32_t q_heads;
    int32_t seqs;
    const int32_t* page_table;  // [seqs, table_stride]
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
    int32_t table_stride;
    int32_t max_rows;  // most rows of one sequence
    int32_t max_keys;  // most keys of one sequence, those of this pass included, or an upper bound
    int32_t window;
    float scale;
    float softcap;
    const float* sinks;  // [q_heads], or null: none. Null if heads are larger than 256
    void* workspace;     // zero before the first call; kernels leave its counters zero
    int64_t workspace_bytes;
    // Null, or [q_heads * d], and out receives prepared inputs (float16).
    const int32_t* inverse_permutation;
    // Batch-invariant mode: no bit of a row of `out` depends on the other rows. The workspace is
    // that of is_invariant too.
    int32_t is_invariant;
} ExlAttention;
EXL_CUDA_API int64_t exl_cuda_attention_workspace(int32_t is_invariant, int32_t head_dim);
EXL_CUDA_API int exl_cuda_attention(const ExlAttention* args, const ExlCache* cache, void* stream);

// exl_cuda_rope_write, then exl_cuda_attention, for queries that are those of rope->qkv. The results
// and the cache have the same bits. Where possible this is one launch, which leaves the keys of
// rope->qkv as they are. No sequence may see keys that this call writes for another sequence.
EXL_CUDA_API int exl_cuda_attend(
    const ExlRopeWrite* rope, const ExlAttention* args, const ExlCache* cache, void* stream
);

#ifdef __cplusplus
}
#endif

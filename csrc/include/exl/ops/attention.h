// Causal attention of query rows over paged keys and values; decode and prefill in one call.
//
//   position     row r of sequence s has position p = past_lens[s] + (r - row_starts[s])
//   mask         it attends to keys j <= p; if window > 0, only to those with j > p - window
//   score        softcap(scale * q.k), where softcap(x) = c tanh(x / c) if c > 0, else x
//   sink         exp of the sink of a row's head is added to the sum of its weights; no value
//   heads        query head h reads kv head h / (q_heads / kv_heads)
//   pages        page i of sequence s is page_table[s, i]
//
// The keys and values of this pass are already in the cache.
//
// Cache rows are stored in the format of formats/kv.h. Packed rows are dequantized exactly, without
// the float16 roundings of the format's decoder. Kernels do not invert the transform of a unit in
// the rows; they apply it to the query and to the result instead.
#pragma once

#include <cstdint>

#include "exl/formats/kv.h"
#include "exl/tensor_view.h"

namespace exl {

struct AttentionArgs {
    const float* q;  // [rows, q_heads, d]
    int64_t rows;
    int64_t q_stride;
    int64_t q_heads;
    int64_t kv_heads;
    int64_t d;
    const void* key_cache;  // [pages, kv_heads, page_size, row]
    const void* value_cache;
    DType key_dtype;  // both f32, both f16 or both f8e4m3; or each of them i8 or u8
    DType value_dtype;
    int64_t page_size;
    const int32_t* page_table;  // [seqs, table_width]
    int64_t table_width;
    int64_t seqs;
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
    float scale;
    int64_t window;
    float softcap;
    const float* sinks;  // [q_heads], or null: none
    // [rows, q_heads * d]; may be q, because a work item reads its queries before it writes
    // results.
    float* y;
    int64_t y_stride;
};

}  // namespace exl

// Causal attention of query rows over paged keys and values; decode and prefill in one call.
//
// Row r of sequence s has position p = past_lens[s] + (r - row_starts[s]) and sees keys j <= p, of
// these only j > p - window if window > 0. score = softcap(scale * q.k), softcap(x) = c tanh(x / c)
// if c > 0. Query head h reads kv head h / (q_heads / kv_heads). Page i of sequence s is
// page_table[s, i]; the keys of this pass are already in the cache.
//
// Rows are stored as formats/kv.h says. Packed ones are read as what they stand for, without the
// float16 roundings of decoding: a unit's transform is done to the query and to the result instead.
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
    DType key_dtype;  // f32, f16 or f8e4m3, and both alike; or each i8 or u8
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
    float* y;  // [rows, q_heads * d]; may be q: an item's queries are read before it writes there
    int64_t y_stride;
};

}  // namespace exl

// Writes of keys and values to the paged cache.
#pragma once

#include <cstdint>

#include "exl/formats/kv.h"
#include "exl/tensor_view.h"

namespace exl {

// Writes key and value rows to their cache slots in the format of formats/kv.h. A slot is
// page * page_size + offset; every slot is in range.
struct WriteKvArgs {
    const float* key;  // [rows, heads, d]
    const float* value;
    int64_t rows;
    int64_t key_stride;
    int64_t value_stride;
    int64_t heads;
    int64_t d;
    void* key_cache;    // [pages, heads, page_size, row]
    void* value_cache;  // may be key_cache: rows are keys and values at once, and value is key
    DType key_dtype;    // both f32, both f16 or both f8e4m3; or each of them i8 or u8
    DType value_dtype;
    int64_t page_size;
    const int64_t* slots;  // [rows]
};

}  // namespace exl

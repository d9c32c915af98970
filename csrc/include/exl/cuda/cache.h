// Cache of keys and values in the CUDA library, writes to it, and reads of whole rows.
//
// Caches are [pages][kv_heads][page_size][row]. exl/formats/kv.h describes rows; codes are equal to
// those of the CPU kernels bit for bit. head_dim is at most 512 and a multiple of 8, or of 32 if
// keys or values are codes. If value_cache is key_cache, the cache is shared: rows are keys and
// values at once, of up to 576 elements.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    void* key_cache;
    void* value_cache;
    int32_t key_dtype;
    int32_t value_dtype;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t page_size;
    int32_t num_pages;
} ExlCache;

// Writes key and value, [rows, kv_heads, d] float32 or float16, to the slots (int64 [rows]) of the
// cache.
EXL_CUDA_API int exl_cuda_write_kv(
    const ExlCache* cache, const void* key, const void* value, int32_t dtype, int64_t row_stride,
    const int64_t* slots, int32_t rows, void* stream
);

// Processes queries, keys and values [rows, (q_heads + 2 kv_heads) d], or queries and keys alone
// [rows, (q_heads + kv_heads) d] with a shared cache, in place: head norms if
// given, RoPE of queries and keys, then key smoothing (x * scale + shift of each of their elements)
// if given. Writes keys and values to the cache afterwards.
typedef struct {
    void* qkv;
    int64_t qkv_stride;
    int32_t qkv_dtype;  // float16 or float32
    int32_t rows;
    int32_t q_heads;
    int32_t rotary_half;
    const float* cos;  // [rows, rotary_half]
    const float* sin;
    const float* q_norm;  // [d], or null
    const float* k_norm;
    const float* head_scale;  // [(q_heads + kv_heads) d] and head_shift too, or both null
    const float* head_shift;
    float eps;
    float reserved;
    const int64_t* slots;
} ExlRopeWrite;
EXL_CUDA_API int exl_cuda_rope_write(const ExlRopeWrite* args, const ExlCache* cache, void* stream);

// Decodes the keys of the first `positions` positions of a sequence, whose pages (int32) are on the
// device: out [positions, kv_heads, d] float16.
EXL_CUDA_API int exl_cuda_read_keys(
    const ExlCache* cache, const int32_t* pages, int32_t positions, void* out, void* stream
);

#ifdef __cplusplus
}
#endif

// Keys and values into the cache, and all that happens to them and to queries before attention.
//
// One warp for each head of each row: head norm, rope, then queries go back to where they were and
// keys and values to the cache. Sums and rotations are float32; codes are rounded as the format
// says. Floor: the bytes of qkv read and those of queries and cache rows written; for few rows
// latency.
#include "kv_rows.cuh"

namespace exl::cuda {
namespace {

constexpr int kWarps = 4;

// Heads of a row in the order queries, keys, values; any of them may be none.
struct WriteArgs {
    void* queries;
    const void* keys;
    const void* values;
    int64_t query_stride;  // of rows, in elements
    int64_t key_stride;
    int dtype;
    int rows;
    int q_heads;
    int rotary_half;  // 0: no rope
    const float* cos;
    const float* sin;
    const float* q_norm;
    const float* k_norm;
    const float* head_scale;  // of query and key heads, or null
    const float* head_shift;
    float eps;
    bool is_in_place;  // keys are written back, as queries are
    const int64_t* slots;
    ExlCache cache;
};

__device__ __forceinline__ void norm_row(Row& x, const float* weight, float eps, int d, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) squares += x[u].x * x[u].x + x[u].y * x[u].y;
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x *= factor * weight[i];
        x[u].y *= factor * weight[i + 1];
    }
}

__device__ __forceinline__ void fit_row(
    Row& x, const float* scale, const float* shift, int d, int lane
) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x = fmaf(x[u].x, scale[i], shift[i]);
        x[u].y = fmaf(x[u].y, scale[i + 1], shift[i + 1]);
    }
}

// Cosines and signed sines of a lane's elements: 1 and 0 where nothing turns.
__device__ __forceinline__ void load_angles(
    Row& cos, Row& sin, const float* cos_from, const float* sin_from, int half, int lane
) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        float c[2], s[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = u * kUnit + 2 * lane + e;
            c[e] = i < half ? cos_from[i] : i < 2 * half ? cos_from[i - half] : 1.0f;
            s[e] = i < half ? -sin_from[i] : i < 2 * half ? sin_from[i - half] : 0.0f;
        }
        cos[u] = make_float2(c[0], c[1]);
        sin[u] = make_float2(s[0], s[1]);
    }
}

// Partners are `half` apart, wherever that is: through `room`, the warp's own.
__device__ __forceinline__ void rope_row(
    Row& x, const Row& cos, const Row& sin, int half, int d, float* room, int lane
) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i < d) *reinterpret_cast<float2*>(room + i) = x[u];
    }
    __syncwarp();
    const auto partner = [&](int i) {
        return i >= 2 * half ? 0.0f : room[i < half ? i + half : i - half];
    };
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x = x[u].x * cos[u].x + partner(i) * sin[u].x;
        x[u].y = x[u].y * cos[u].y + partner(i + 1) * sin[u].y;
    }
}

__device__ __forceinline__ uint8_t* cache_row(
    void* cache, int type, const ExlCache& shape, int64_t slot, int head
) {
    const int64_t page = slot / shape.page_size;
    const int64_t row = (page * shape.kv_heads + head) * shape.page_size + slot % shape.page_size;
    return static_cast<uint8_t*>(cache) + row * row_bytes(type, shape.head_dim);
}

__device__ __forceinline__ const void* element(const void* base, int type, int64_t index) {
    return static_cast<const uint8_t*>(base) + index * (type == kF16 ? 2 : 4);
}

__global__ void __launch_bounds__(kWarps * kWarp) write_kernel(const WriteArgs args) {
    __shared__ float room[kWarps][kMaxHead];
    let_next_begin();
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const int heads = args.q_heads + 2 * args.cache.kv_heads;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    if (index >= static_cast<int64_t>(args.rows) * heads) {
        wait_for_inputs();
        return;
    }
    const int row = static_cast<int>(index / heads);
    const int head = static_cast<int>(index % heads);
    const int d = args.cache.head_dim;
    const bool is_query = head < args.q_heads;
    const bool is_key = !is_query && head < args.q_heads + args.cache.kv_heads;
    // What the pass is made of was there before it began.
    const int64_t slot = is_query ? 0 : args.slots[row];
    const bool turns = (is_query || is_key) && args.rotary_half > 0;
    Row cos, sin;
    if (turns) {
        const int64_t angles = static_cast<int64_t>(row) * args.rotary_half;
        load_angles(cos, sin, args.cos + angles, args.sin + angles, args.rotary_half, lane);
    }
    const int kv_head = (head - args.q_heads) % args.cache.kv_heads;
    const void* base = is_query ? args.queries : is_key ? args.keys : args.values;
    const int64_t stride = is_query ? args.query_stride : args.key_stride;
    void* const from = const_cast<void*>(
        element(base, args.dtype, row * stride + (is_query ? head : kv_head) * d)
    );
    const int type = is_key ? args.cache.key_dtype : args.cache.value_dtype;
    void* cache = is_key ? args.cache.key_cache : args.cache.value_cache;
    uint8_t* const cached = cache_row(cache, type, args.cache, slot, kv_head);
    // What is not real is the rehearsal (common.cuh): of zeros, to the warp's room.
#pragma unroll 1
    for (bool is_real = args.rows > kRehearsedRows;; is_real = true) {
        Row x = {};
        if (is_real) {
            wait_for_inputs();
            load_row(x, from, args.dtype, d, lane);
        }
        if (is_query || is_key) {
            const float* weight = is_query ? args.q_norm : args.k_norm;
            if (weight != nullptr) norm_row(x, weight, args.eps, d, lane);
        }
        if (turns) rope_row(x, cos, sin, args.rotary_half, d, room[warp], lane);
        if ((is_query || is_key) && args.head_scale != nullptr) {
            fit_row(x, args.head_scale + head * d, args.head_shift + head * d, d, lane);
        }
        __syncwarp();
        void* const nowhere = room[warp];
        if (is_query || (is_key && args.is_in_place)) {
            store_row(is_real ? from : nowhere, x, args.dtype, d, lane);
        }
        if (!is_query) {
            encode_row(
                is_real ? cached : static_cast<uint8_t*>(nowhere), x, type, d, lane
            );
        }
        if (is_real) return;
        __syncwarp();
    }
}

bool fits(const ExlCache& cache, int dtype) {
    const int d = cache.head_dim;
    const bool some_codes = is_codes(cache.key_dtype) || is_codes(cache.value_dtype);
    return (dtype == kF16 || dtype == kF32) && d > 0 && d <= kMaxHead && d % 8 == 0 &&
           (!some_codes || d % kScaleGroup == 0);
}

int write(const WriteArgs& args, void* stream) {
    if (!fits(args.cache, args.dtype)) return cudaErrorInvalidValue;
    if (args.rows <= 0) return cudaSuccess;
    const int64_t heads = args.q_heads + 2 * args.cache.kv_heads;
    const auto blocks = static_cast<unsigned>(ceil_div(args.rows * heads, kWarps));
    return launch(write_kernel, dim3(blocks), dim3(kWarps * kWarp), 0, stream, args);
}

}  // namespace
}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_write_kv(
    const ExlCache* cache, const void* key, const void* value, int32_t dtype, int64_t row_stride,
    const int64_t* slots, int32_t rows, void* stream
) {
    WriteArgs args = {};
    args.keys = key;
    args.values = value;
    args.key_stride = row_stride;
    args.dtype = dtype;
    args.rows = rows;
    args.slots = slots;
    args.cache = *cache;
    return write(args, stream);
}

extern "C" int exl_cuda_rope_write(
    const ExlRopeWrite* rope, const ExlCache* cache, void* stream
) {
    const int64_t width = rope->qkv_dtype == kF16 ? 2 : 4;
    const int64_t keys = static_cast<int64_t>(rope->q_heads) * cache->head_dim;
    const int64_t values = keys + static_cast<int64_t>(cache->kv_heads) * cache->head_dim;
    WriteArgs args = {};
    args.queries = rope->qkv;
    args.keys = static_cast<uint8_t*>(rope->qkv) + keys * width;
    args.values = static_cast<uint8_t*>(rope->qkv) + values * width;
    args.query_stride = rope->qkv_stride;
    args.key_stride = rope->qkv_stride;
    args.dtype = rope->qkv_dtype;
    args.rows = rope->rows;
    args.q_heads = rope->q_heads;
    args.rotary_half = rope->rotary_half;
    args.cos = rope->cos;
    args.sin = rope->sin;
    args.q_norm = rope->q_norm;
    args.k_norm = rope->k_norm;
    args.head_scale = rope->head_scale;
    args.head_shift = rope->head_shift;
    args.is_in_place = true;
    args.eps = rope->eps;
    args.slots = rope->slots;
    args.cache = *cache;
    return write(args, stream);
}

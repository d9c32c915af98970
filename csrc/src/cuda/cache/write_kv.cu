// Writes keys and values to the cache, after everything that happens to them and to queries between
// the QKV projection and attention: head norm, RoPE, key smoothing.
//
// Contract   exl/cuda/cache.h. Cache format: exl/formats/kv.h.
// Mapping    A warp takes one head of a row or, with many rows, several adjacent ones. Queries are
//            written back in place, keys and values go to the cache.
// Accuracy   Sums and rotations are float32. Codes are rounded as the format says.
// Floor      The bytes of qkv read, and of queries and cache rows written, at memory bandwidth.
//            With few rows, latency.
#include "cuda/cache/kv_rows.cuh"
#include "exl/cuda/cache.h"

namespace exl::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsPerWarp = 4;    // with many rows
constexpr int kNarrowHead = 128;    // half of the registers, and less code
constexpr int kResidentWarps = 32;  // per multiprocessor, approximately

// The heads of a row are in the order queries, keys, values. Any of the three may be absent.
struct WriteArgs {
    void* queries;
    const void* keys;
    const void* values;
    int64_t query_stride;  // elements between rows
    int64_t key_stride;
    int dtype;
    int rows;
    int q_heads;
    int rotary_half;  // 0: no RoPE
    const float* cos;
    const float* sin;
    const float* q_norm;
    const float* k_norm;
    const float* head_scale;  // of query and key heads (key smoothing), or null
    const float* head_shift;
    float eps;
    bool is_in_place;  // keys are written back to their source, like queries
    bool is_shared;    // cache rows are keys and values at once, and there are no value heads
    const int64_t* slots;
    ExlCache cache;
};

template <int units>
__device__ __forceinline__ void norm_row(
    float2 (&x)[units], const float* weight, float eps, int d, int lane
) {
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < units; ++u) squares += x[u].x * x[u].x + x[u].y * x[u].y;
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x *= factor * weight[i];
        x[u].y *= factor * weight[i + 1];
    }
}

// Key smoothing: x * scale + shift.
template <int units>
__device__ __forceinline__ void smooth_row(
    float2 (&x)[units], const float* scale, const float* shift, int d, int lane
) {
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u].x = fmaf(x[u].x, scale[i], shift[i]);
        x[u].y = fmaf(x[u].y, scale[i + 1], shift[i + 1]);
    }
}

// Cosines and signed sines of a lane's elements; 1 and 0 for elements that RoPE does not rotate.
template <int units>
__device__ __forceinline__ void load_angles(
    float2 (&cos)[units], float2 (&sin)[units], const float* cos_from, const float* sin_from,
    int half, int lane
) {
    if (half == kUnit) {  // heads of 128: an element's partner is in the same lane
        cos[0] = cos[1] = reinterpret_cast<const float2*>(cos_from)[lane];
        sin[1] = reinterpret_cast<const float2*>(sin_from)[lane];
        sin[0] = make_float2(-sin[1].x, -sin[1].y);
        return;
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
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

__device__ __forceinline__ float2 rotated(float2 x, float2 partner, float2 cos, float2 sin) {
    return make_float2(x.x * cos.x + partner.x * sin.x, x.y * cos.y + partner.y * sin.y);
}

// Applies RoPE to a row. The two elements of a pair are `half` apart. Unless they are in the same
// lane, they are exchanged through `scratch`, shared memory of this warp. The caller synchronizes
// the warp before the next call.
template <int units>
__device__ __forceinline__ void rope_row(
    float2 (&x)[units], const float2 (&cos)[units], const float2 (&sin)[units], int half, int d,
    float* scratch, int lane
) {
    if (half == kUnit) {
        const float2 low = x[0];
        x[0] = rotated(low, x[1], cos[0], sin[0]);
        x[1] = rotated(x[1], low, cos[1], sin[1]);
        return;
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i < d) *reinterpret_cast<float2*>(scratch + i) = x[u];
    }
    __syncwarp();
    const auto partner = [&](int i) {
        return i >= 2 * half ? 0.0f : scratch[i < half ? i + half : i - half];
    };
#pragma unroll
    for (int u = 0; u < units; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i >= d) break;
        x[u] = rotated(x[u], make_float2(partner(i), partner(i + 1)), cos[u], sin[u]);
    }
}

// One head of a row: its kind, source and destination.
struct Head {
    bool is_query, is_key;
    int type;         // type of the cache that the head goes to
    uint8_t* from;    // source; destination too if the head is written back
    uint8_t* cached;  // row of the cache; unused for queries

    __device__ __forceinline__ Head(const WriteArgs& args, int row, int head, uint32_t slot) {
        const ExlCache& cache = args.cache;
        const int width = args.dtype == kF16 ? 2 : 4, d = cache.head_dim;
        is_query = head < args.q_heads;
        is_key = !is_query && head < args.q_heads + cache.kv_heads;
        // Index of the head among those of its kind.
        const int index = head - (is_query ? 0 : args.q_heads + (is_key ? 0 : cache.kv_heads));
        const void* base = is_query ? args.queries : is_key ? args.keys : args.values;
        const int64_t stride = is_query ? args.query_stride : args.key_stride;
        from = static_cast<uint8_t*>(const_cast<void*>(base));
        from += (row * stride + index * d) * width;
        type = is_key ? cache.key_dtype : cache.value_dtype;
        const uint32_t page = slot / cache.page_size, offset = slot % cache.page_size;
        const int64_t cache_row =
            (static_cast<int64_t>(page) * cache.kv_heads + index) * cache.page_size + offset;
        cached = static_cast<uint8_t*>(is_key ? cache.key_cache : cache.value_cache) +
                 cache_row * row_bytes(type, d);
    }
};

// A warp handles `kHeads` adjacent heads of a row. All their loads are in flight before the first
// value is used.
template <int kHeads, int width>
__global__ void __launch_bounds__(kWarps* kWarp) write_kernel(const WriteArgs args) {
    using Row = HeadRow<width>;
    __shared__ float scratch[kWarps][width];
    let_next_begin();
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const int keys_end = args.q_heads + args.cache.kv_heads;
    const int heads = args.is_shared ? keys_end : keys_end + args.cache.kv_heads;
    const int row = blockIdx.x;
    const int first = (blockIdx.y * kWarps + warp) * kHeads;
    if (first >= heads) {
        wait_for_inputs();
        return;
    }
    const int d = args.cache.head_dim;
    // Slots, cosines and sines are read before the wait: they were written before the pass began.
    // No cache has 2^32 slots.
    const bool is_cached = first + kHeads > args.q_heads;
    const uint32_t slot = is_cached ? uniform(static_cast<uint32_t>(args.slots[row])) : 0;
    Row cos, sin;
    const bool has_rope = args.rotary_half > 0 && first < keys_end;
    if (has_rope) {
        const int64_t angles = static_cast<int64_t>(row) * args.rotary_half;
        load_angles(cos, sin, args.cos + angles, args.sin + angles, args.rotary_half, lane);
    }
    const Head own(args, row, first, slot);
    const auto head_at = [&](int i) {
        return kHeads == 1 ? own : Head(args, row, first + i, slot);
    };
    // A first iteration with `is_real` false is the warm-up pass (kWarmUpRows in common.cuh). It
    // computes on zeros and stores to the warp's scratch memory.
#pragma unroll 1
    for (bool is_real = kHeads > 1 || args.rows > kWarmUpRows;; is_real = true) {
        Row rows[kHeads] = {};
        if (is_real) {
            const void* from[kHeads];
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                from[i] = first + i < heads ? head_at(i).from : nullptr;
            }
            wait_for_inputs();
            load_rows<kHeads>(rows, from, args.dtype, d, lane);
        }
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            if (first + i >= heads) break;
            const Head head = head_at(i);
            Row& x = rows[i];
            if (head.is_query || head.is_key) {
                const float* weight = head.is_query ? args.q_norm : args.k_norm;
                if (weight != nullptr) norm_row(x, weight, args.eps, d, lane);
                if (has_rope) rope_row(x, cos, sin, args.rotary_half, d, scratch[warp], lane);
                if (args.head_scale != nullptr) {
                    const int at = (first + i) * d;
                    smooth_row(x, args.head_scale + at, args.head_shift + at, d, lane);
                }
            }
            __syncwarp();
            auto* const discarded = reinterpret_cast<uint8_t*>(scratch[warp]);
            if (head.is_query || (head.is_key && args.is_in_place)) {
                store_row(is_real ? head.from : discarded, x, args.dtype, d, lane);
            }
            if (!head.is_query) {
                encode_row(is_real ? head.cached : discarded, x, head.type, d, lane);
            }
        }
        if (is_real) return;
        __syncwarp();
    }
}

// Shared rows in float16, of which RoPE rotates the first elements, at most one unit: nothing else of
// a query changes, and the rest of a key is copied. A warp takes one head, as above.
__global__ void __launch_bounds__(kWarps* kWarp) write_shared_kernel(const WriteArgs args) {
    let_next_begin();
    const int lane = threadIdx.x % kWarp, row = blockIdx.x;
    const int head = blockIdx.y * kWarps + uniform(threadIdx.x / kWarp);
    const int d = args.cache.head_dim, half = args.rotary_half;
    const bool is_key = head == args.q_heads, is_rotated = lane < half;
    float cos = 1.0f, sin = 0.0f;
    if (is_rotated) {
        cos = args.cos[row * half + lane];
        sin = args.sin[row * half + lane];
    }
    const uint32_t slot = is_key ? static_cast<uint32_t>(args.slots[row]) : 0;
    wait_for_inputs();
    if (head > args.q_heads) return;
    const Head own(args, row, head, slot);
    auto* x = reinterpret_cast<__half*>(own.from);
    auto* to = reinterpret_cast<__half*>(own.cached);
    if (is_rotated) {
        const float a = __half2float(x[lane]), b = __half2float(x[lane + half]);
        const __half low = from_float<__half>(a * cos - b * sin);
        const __half high = from_float<__half>(b * cos + a * sin);
        x[lane] = low, x[lane + half] = high;
        if (is_key) to[lane] = low, to[lane + half] = high;
    }
    if (!is_key) return;
    const auto* from = reinterpret_cast<const uint32_t*>(x);
#pragma unroll 9
    for (int i = half + lane; i < d / 2; i += kWarp) reinterpret_cast<uint32_t*>(to)[i] = from[i];
}

bool is_shared(const ExlCache& cache) { return cache.key_cache == cache.value_cache; }

bool is_supported(const ExlCache& cache, int dtype) {
    const int d = cache.head_dim;
    const bool has_codes = is_codes(cache.key_dtype) || is_codes(cache.value_dtype);
    const int most = is_shared(cache) ? kSharedRow : kWideHead;
    return (dtype == kF16 || dtype == kF32) && d > 0 && d <= most && d % 8 == 0 &&
           (!has_codes || d % kScaleGroup == 0);
}

int write(WriteArgs args, void* stream) {
    args.is_shared = is_shared(args.cache);
    if (!is_supported(args.cache, args.dtype)) return cudaErrorInvalidValue;
    if (args.rows <= 0) return cudaSuccess;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const int64_t heads = args.q_heads + (args.is_shared ? 1 : 2) * args.cache.kv_heads;
    const int d = args.cache.head_dim;
    const auto launch_with = [&](auto kernel, int heads_per_warp) {
        const dim3 grid(
            static_cast<unsigned>(args.rows),
            static_cast<unsigned>(ceil_div(heads, heads_per_warp * kWarps))
        );
        return launch(kernel, grid, dim3(kWarps * kWarp), 0, stream, args);
    };
    const bool is_plain = args.dtype == kF16 && args.cache.key_dtype == kF16 && args.is_in_place &&
                          args.q_norm == nullptr && args.k_norm == nullptr &&
                          args.head_scale == nullptr;
    if (args.is_shared && is_plain && args.rotary_half <= kWarp && args.cache.kv_heads == 1) {
        return launch_with(write_shared_kernel, 1);
    }
    // One head per warp as long as all warps fit on the device at about the same time.
    if (args.rows * heads <= kResidentWarps * info.multiprocessors) {
        return d <= kNarrowHead ? launch_with(write_kernel<1, kNarrowHead>, 1)
               : d <= kMaxHead  ? launch_with(write_kernel<1, kMaxHead>, 1)
               : d <= kWideHead ? launch_with(write_kernel<1, kWideHead>, 1)
                                : launch_with(write_kernel<1, kSharedRow>, 1);
    }
    if (d > kWideHead) return launch_with(write_kernel<2, kSharedRow>, 2);
    if (d > kMaxHead) return launch_with(write_kernel<2, kWideHead>, 2);
    if (d <= kNarrowHead)
        return launch_with(write_kernel<kHeadsPerWarp, kNarrowHead>, kHeadsPerWarp);
    return launch_with(write_kernel<kHeadsPerWarp, kMaxHead>, kHeadsPerWarp);
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

extern "C" int exl_cuda_rope_write(const ExlRopeWrite* rope, const ExlCache* cache, void* stream) {
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

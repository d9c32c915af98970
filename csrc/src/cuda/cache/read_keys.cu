// Reads cache rows of one sequence as float16 rows, in the order of positions.
//
// Contract   exl/cuda/cache.h. Cache format: exl/formats/kv.h.
// Used for   Latent attention of prompts: keys and values of all heads are computed from the rows.
// Mapping    A warp takes one row.
// Accuracy   Codes are transformed in float32 and rounded once.
// Floor      The bytes of rows read and written, at memory bandwidth.
#include "cuda/cache/kv_rows.cuh"
#include "exl/cuda/cache.h"

namespace exl::cuda {
namespace {

constexpr int kWarps = 4;

struct ReadArgs {
    ExlCache cache;
    const int32_t* pages;
    __half* out;
    int positions;
};

// Elements 2 lane and 2 lane + 1 of unit `unit` of a row, before the transform of codes.
__device__ __forceinline__ float2 stored_pair(
    const uint8_t* row, int type, int d, int unit, int lane
) {
    const int i = unit * kUnit + 2 * lane;
    if (type == kF32) return reinterpret_cast<const float2*>(row)[i / 2];
    if (type == kF16) return __half22float2(reinterpret_cast<const __half2*>(row)[i / 2]);
    if (type == kF8e4m3) {
        return __half22float2(byte_floats<0>(reinterpret_cast<const uint16_t*>(row)[i / 2]));
    }
    const auto* scales = reinterpret_cast<const __half*>(row + value_bytes(type, d));
    const float scale = __half2float(scales[i / kScaleGroup]);
    int even, odd, middle;
    if (type == kU8) {
        even = row[i / 2] & 15, odd = row[i / 2] >> 4, middle = 8;
    } else {
        even = row[i], odd = row[i + 1], middle = 128;
    }
    return make_float2(scale * (even - middle), scale * (odd - middle));
}

__global__ void __launch_bounds__(kWarps* kWarp) read_kernel(const ReadArgs args) {
    let_next_begin();
    wait_for_inputs();
    const int lane = threadIdx.x % kWarp;
    const int position = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int head = blockIdx.y;
    if (position >= args.positions) return;
    const ExlCache& cache = args.cache;
    const int d = cache.head_dim, type = cache.key_dtype;
    const int64_t page = args.pages[position / cache.page_size];
    const int64_t slot =
        (page * cache.kv_heads + head) * cache.page_size + position % cache.page_size;
    const auto* row = static_cast<const uint8_t*>(cache.key_cache) + slot * row_bytes(type, d);
    HeadRow<kSharedRow> x = {};
#pragma unroll
    for (int unit = 0; unit < kSharedRow / kUnit; ++unit) {
        if (unit * kUnit + 2 * lane < d) x[unit] = stored_pair(row, type, d, unit, lane);
    }
    if (is_codes(type)) hadamard_row(x, d, lane);
    const int64_t at = (static_cast<int64_t>(position) * cache.kv_heads + head) * d;
    store_row(args.out + at, x, kF16, d, lane);
}

}  // namespace
}  // namespace exl::cuda

extern "C" int exl_cuda_read_keys(
    const ExlCache* cache, const int32_t* pages, int32_t positions, void* out, void* stream
) {
    using namespace exl::cuda;
    const int d = cache->head_dim;
    const bool fits = d > 0 && d <= kSharedRow && d % 8 == 0 && cache->kv_heads > 0 &&
                      (!is_codes(cache->key_dtype) || d % kScaleGroup == 0);
    if (!fits) return cudaErrorInvalidValue;
    if (positions <= 0) return cudaSuccess;
    const ReadArgs args = {*cache, pages, static_cast<__half*>(out), positions};
    const dim3 grid(
        static_cast<unsigned>(ceil_div(positions, kWarps)), static_cast<unsigned>(cache->kv_heads)
    );
    return launch(read_kernel, grid, dim3(kWarps * kWarp), 0, stream, args);
}

// Attention over a paged cache: choice of the kernel for each sequence, and the workspace.
//
// Contract   exl/cuda/attention.h; paged_attention of exl_core/ops/attention.py.
// Used for   Sequences with up to kDecodeRows rows in this pass run in the decode kernel
//            (attention_decode.cuh), longer ones in the prefill kernel (attention_prefill.cuh).
//            Lengths are known on the device only. If a pass may contain both kinds, both kernels
//            are launched, and blocks without work return at once. The batch-invariant mode has a
//            kernel for longer sequences whose results have the bits of the decode kernel
//            (attention_prompt.cuh). Heads of more than 256 elements have a kernel of their own
//            (attention_wide.cuh).
#include "cuda/attention/attention_decode_step.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda {
namespace {

bool is_supported(const ExlAttention& args, const ExlCache& cache) {
    const int keys = cache.key_dtype, values = cache.value_dtype;
    const bool plain = keys == kF32 || keys == kF16 || keys == kF8e4m3;
    const bool types =
        plain ? values == keys
              : (keys == kI8 && (values == kI8 || values == kU8)) || (keys == kU8 && values == kU8);
    const int d = cache.head_dim;
    const bool shared = cache.key_cache == cache.value_cache;
    const int most = shared ? kSharedRow : kWideHead;
    const bool head = d > 0 && d <= most && d % 8 == 0 && (plain || d % kScaleGroup == 0);
    const bool pages = cache.page_size >= kChunk && (cache.page_size & (cache.page_size - 1)) == 0;
    const bool group = cache.kv_heads > 0 && args.q_heads % cache.kv_heads == 0 &&
                       (args.q_heads / cache.kv_heads <= 16 || d > kMaxHead);
    const bool permuted = args.inverse_permutation == nullptr ||
                          (d <= kMaxHead && args.rows <= EXL_CUDA_TILE_ROWS && args.dtype == kF16);
    const bool sinks = args.sinks == nullptr || d <= kMaxHead;
    return types && head && pages && group && permuted && sinks &&
           (args.dtype == kF16 || args.dtype == kF32) &&
           args.workspace_bytes >= exl_cuda_attention_workspace(args.is_invariant, d);
}

AttentionParams params_of(
    const ExlAttention& args, const ExlCache& cache, const NewRows& new_rows
) {
    AttentionParams params = {};
    params.q = args.q;
    params.out = args.out;
    params.permutation = args.inverse_permutation;
    params.rows = args.rows;
    params.q_stride = args.q_stride;
    params.out_stride = args.out_stride;
    params.dtype = args.dtype;
    params.q_heads = args.q_heads;
    params.kv_heads = cache.kv_heads;
    params.group = args.q_heads / cache.kv_heads;
    params.d = cache.head_dim;
    params.key_cache = static_cast<const uint8_t*>(cache.key_cache);
    params.value_cache = static_cast<const uint8_t*>(cache.value_cache);
    while (1 << params.page_bits < cache.page_size) ++params.page_bits;
    params.page_table = args.page_table;
    params.row_starts = args.row_starts;
    params.past_lens = args.past_lens;
    params.table_stride = args.table_stride;
    params.window = args.window;
    const bool is_capped = args.softcap > 0.0f;
    params.scale = kLog2e * args.scale * (is_capped ? 2.0f / args.softcap : 1.0f);
    params.cap = is_capped ? kLog2e * args.softcap : 0.0f;
    params.sinks = args.sinks;
    params.is_shared = cache.key_cache == cache.value_cache;
    params.first_value = params.d > kWideHead ? kSharedRow - kWideHead : 0;
    params.new_rows = new_rows;
    return params;
}

// Whether the decode kernel can process the rows of this pass and write them to the cache itself:
// each sequence has one row, and rows of the cache fill a row in shared memory.
bool can_write(const ExlAttention& args, const ExlRopeWrite& rope, const ExlCache& cache) {
    const int d = cache.head_dim;
    return args.rows == args.seqs && args.max_rows == 1 && (d == 64 || d == 128 || d == 256) &&
           cache.key_dtype != kF32 && cache.key_cache != cache.value_cache &&
           rope.rotary_half % 2 == 0;
}

}  // namespace

// With few work items, blocks of the next linear shall fit on a multiprocessor beside those of
// attention, so that they start early and copy their first weights.
int decode_stages(int64_t items, const DeviceInfo& info) {
    return items <= info.multiprocessors ? 2 : kMaxStages;
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int64_t exl_cuda_attention_workspace(int32_t is_invariant, int32_t head_dim) {
    const int width = head_dim <= 64    ? 64
                      : head_dim <= 128 ? 128
                      : head_dim <= 256 ? 256
                                        : kWideHead;
    const int64_t vectors = is_invariant ? kInvariantVectors : kPartialVectors;
    return kCounters * 4 + vectors * (width + 2) * 4;
}

static int attend(
    const ExlAttention* args, const ExlCache* cache, const NewRows& new_rows, void* stream
) {
    if (!is_supported(*args, *cache)) return cudaErrorInvalidValue;
    if (args->rows <= 0 || args->seqs <= 0 || args->max_rows <= 0) return cudaSuccess;
    const AttentionParams params = params_of(*args, *cache, new_rows);
    const AttentionSize size = {args->seqs,       args->max_rows,       args->max_keys,
                                cache->key_dtype, cache->value_dtype,   args->is_invariant != 0,
                                args->workspace,  args->workspace_bytes};
    if (cache->head_dim > kMaxHead) {
        return params.is_shared ? attend_shared(params, size, stream)
                                : attend_wide(params, size, stream);
    }
    if (size.is_invariant) return attend_invariant(params, size, stream);
    if (args->max_rows > kDecodeRows) {
        const cudaError_t error = attend_prefill(params, size, stream);
        // A single long sequence leaves nothing for the decode kernel.
        if (error != cudaSuccess || (args->seqs == 1 && args->rows > kDecodeRows)) return error;
    }
    return attend_decode(params, size, stream);
}

extern "C" int exl_cuda_attention(const ExlAttention* args, const ExlCache* cache, void* stream) {
    return attend(args, cache, {}, stream);
}

extern "C" int exl_cuda_attend(
    const ExlRopeWrite* rope, const ExlAttention* args, const ExlCache* cache, void* stream
) {
    if (args->q != rope->qkv || args->q_stride != rope->qkv_stride ||
        args->dtype != rope->qkv_dtype || args->rows != rope->rows ||
        args->q_heads != rope->q_heads) {
        return cudaErrorInvalidValue;
    }
    if (!can_write(*args, *rope, *cache)) {
        const int error = exl_cuda_rope_write(rope, cache, stream);
        return error != cudaSuccess ? error : attend(args, cache, {}, stream);
    }
    const NewRows new_rows = {rope->slots,       rope->cos,        rope->sin,
                              rope->rotary_half, rope->eps,        rope->q_norm,
                              rope->k_norm,      rope->head_scale, rope->head_shift};
    return attend(args, cache, new_rows, stream);
}

// Instances of the attention kernel for wide heads (attention_wide.cuh), for all cache formats.
#include "cuda/attention/attention_wide.cuh"

namespace exl::cuda {

cudaError_t attend_wide(const AttentionParams& params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return wide_with<kF16, kF16>(params, size, stream);
        case kF32: return wide_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return wide_with<kF8e4m3, kF8e4m3>(params, size, stream);
        case kU8: return wide_with<kU8, kU8>(params, size, stream);
        default: break;
    }
    if (size.value_dtype == kU8) return wide_with<kI8, kU8>(params, size, stream);
    return wide_with<kI8, kI8>(params, size, stream);
}

}  // namespace exl::cuda

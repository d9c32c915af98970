// Instances of the prefill attention kernel (attention_prefill.cuh) for all cache formats.
#include "cuda/attention/attention_prefill.cuh"

namespace exl::cuda {

cudaError_t attend_prefill(const AttentionParams& params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return prefill_with<kF16, kF16>(params, size, stream);
        case kF32: return prefill_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return prefill_with<kF8e4m3, kF8e4m3>(params, size, stream);
        case kU8: return prefill_with<kU8, kU8>(params, size, stream);
        default: break;
    }
    if (size.value_dtype == kU8) return prefill_with<kI8, kU8>(params, size, stream);
    return prefill_with<kI8, kI8>(params, size, stream);
}

}  // namespace exl::cuda

// Instances of the attention kernel for wide heads (attention_wide.cuh) over shared rows, which are
// keys and values at once, for all cache formats.
#include "cuda/attention/attention_wide.cuh"

namespace exl::cuda {

cudaError_t attend_shared(const AttentionParams& params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return wide_with<kF16, kF16, kSharedRow>(params, size, stream);
        case kF32: return wide_with<kF32, kF32, kSharedRow>(params, size, stream);
        case kF8e4m3: return wide_with<kF8e4m3, kF8e4m3, kSharedRow>(params, size, stream);
        case kU8: return wide_with<kU8, kU8, kSharedRow>(params, size, stream);
        default: return wide_with<kI8, kI8, kSharedRow>(params, size, stream);
    }
}

}  // namespace exl::cuda

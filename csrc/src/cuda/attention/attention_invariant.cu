// Instances of the attention kernels of the batch-invariant mode, for prompts (attention_prompt.cuh)
// and for decode (attention_decode.cuh), for caches of values. Those for codes are in
// attention_invariant_codes.cu.
#include "cuda/attention/attention_prompt.cuh"

namespace exl::cuda {

cudaError_t attend_invariant_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
);

cudaError_t attend_invariant(
    const AttentionParams& params, const AttentionSize& size, void* stream
) {
    switch (size.key_dtype) {
        case kF16: return invariant_with<kF16, kF16>(params, size, stream);
        case kF32: return invariant_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return invariant_with<kF8e4m3, kF8e4m3>(params, size, stream);
        default: return attend_invariant_codes(params, size, stream);
    }
}

}  // namespace exl::cuda

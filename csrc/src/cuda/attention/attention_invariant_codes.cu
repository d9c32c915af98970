// Instances of the attention kernels of the batch-invariant mode, for prompts (attention_prompt.cuh)
// and for decode (attention_decode.cuh), for caches of codes.
#include "cuda/attention/attention_prompt.cuh"

namespace exl::cuda {

cudaError_t attend_invariant_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
) {
    if (size.key_dtype == kU8) return invariant_with<kU8, kU8>(params, size, stream);
    if (size.value_dtype == kU8) return invariant_with<kI8, kU8>(params, size, stream);
    return invariant_with<kI8, kI8>(params, size, stream);
}

}  // namespace exl::cuda

// Instances of the attention kernel for prompts in the batch-invariant mode (attention_prompt.cuh),
// for caches of codes.
#include "cuda/attention/attention_prompt.cuh"

namespace exl::cuda {

cudaError_t attend_prompt_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
) {
    if (size.key_dtype == kU8) return prompt_with<kU8, kU8>(params, size, stream);
    if (size.value_dtype == kU8) return prompt_with<kI8, kU8>(params, size, stream);
    return prompt_with<kI8, kI8>(params, size, stream);
}

}  // namespace exl::cuda

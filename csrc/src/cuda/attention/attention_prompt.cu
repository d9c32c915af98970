// Instances of the attention kernel for prompts in the batch-invariant mode (attention_prompt.cuh),
// for caches of values. Those for codes are in attention_prompt_codes.cu.
#include "cuda/attention/attention_prompt.cuh"

namespace exl::cuda {

cudaError_t attend_prompt_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
);

cudaError_t attend_prompt(const AttentionParams& params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return prompt_with<kF16, kF16>(params, size, stream);
        case kF32: return prompt_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return prompt_with<kF8e4m3, kF8e4m3>(params, size, stream);
        default: return attend_prompt_codes(params, size, stream);
    }
}

}  // namespace exl::cuda

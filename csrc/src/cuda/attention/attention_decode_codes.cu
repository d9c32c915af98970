// Instances of the decode attention kernel (attention_decode.cuh) for caches of codes.
#include "cuda/attention/attention_decode_launch.cuh"

namespace exl::cuda {

cudaError_t attend_decode_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
) {
    if (size.key_dtype == kU8) return decode_with<kU8, kU8>(params, size, stream);
    if (size.value_dtype == kU8) return decode_with<kI8, kU8>(params, size, stream);
    return decode_with<kI8, kI8>(params, size, stream);
}

}  // namespace exl::cuda

// Instances of the decode attention kernel (attention_decode.cuh) for caches of values. Those for
// codes are in attention_decode_codes.cu.
#include "cuda/attention/attention_decode_launch.cuh"

namespace exl::cuda {

cudaError_t attend_decode_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
);

cudaError_t attend_decode(AttentionParams params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return decode_with<kF16, kF16>(params, size, stream);
        case kF32: return decode_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return decode_with<kF8e4m3, kF8e4m3>(params, size, stream);
        default: return attend_decode_codes(params, size, stream);
    }
}

}  // namespace exl::cuda

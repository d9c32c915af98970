// attention_decode.cuh's kernel for caches of values; attention_decode_codes.cu has it for codes.
#include "attention_decode_launch.cuh"

namespace exl::cuda {

cudaError_t attend_few_codes(
    const AttentionParams& params, const AttentionSize& size, void* stream
);

cudaError_t attend_few(AttentionParams params, const AttentionSize& size, void* stream) {
    switch (size.key_dtype) {
        case kF16: return decode_with<kF16, kF16>(params, size, stream);
        case kF32: return decode_with<kF32, kF32>(params, size, stream);
        case kF8e4m3: return decode_with<kF8e4m3, kF8e4m3>(params, size, stream);
        default: return attend_few_codes(params, size, stream);
    }
}

}  // namespace exl::cuda

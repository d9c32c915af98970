// Stores with a condition, for the warm-up pass of a kernel (kWarmUpRows in common.cuh). It executes
// all instructions, and its stores have no effect. With an ordinary condition the compiler would skip
// the computation of the stored value as well.
#pragma once

#include "cuda/common/common.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

__device__ __forceinline__ void store_if(bool is_wanted, float* to, float x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.f32 [%1], %2; }" ::"r"(
                     static_cast<uint32_t>(is_wanted)
                 ),
                 "l"(to), "f"(x)
                 : "memory");
}
__device__ __forceinline__ void store_if(bool is_wanted, __half* to, __half x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.u16 [%1], %2; }" ::"r"(
                     static_cast<uint32_t>(is_wanted)
                 ),
                 "l"(to), "h"(__half_as_ushort(x))
                 : "memory");
}

}  // namespace exl::cuda

#endif  // __CUDACC__

// Partial sums of several GPUs: how they are sent, awaited and emptied (exl/cuda/exchange.h).
//
// Accesses to the buffers are relaxed, with the scope of the system: other GPUs access them at the
// same time. No order between them is needed, because every value says by itself whether it has
// arrived. Large sums alone have flags (exchange.cu).
#pragma once

#include "cuda/common/rows.cuh"
#include "exl/cuda/exchange.h"

namespace exl::cuda {

#ifdef __CUDACC__

// `let_next_begin` if `is_now`. The condition is a predicate and no branch: kernels at their limit of
// registers would lose some.
__device__ __forceinline__ void let_next_begin_if(bool is_now) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n .reg .pred now;\n setp.ne.s32 now, %0, 0;\n @now "
        "griddepcontrol.launch_dependents;\n}" ::"r"(static_cast<int>(is_now))
        : "memory"
    );
#endif
}

// The bits of x for a buffer.
__device__ __forceinline__ uint32_t sent_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits == EXL_CUDA_UNSENT ? 0x7fffffffu : bits;
}

__device__ __forceinline__ void store_part(void* to, uint32_t bits) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
__device__ __forceinline__ void store_parts(float* to, const uint4& bits) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
}
__device__ __forceinline__ uint32_t load_part(const void* from) {
    uint32_t bits;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
    return bits;
}
__device__ __forceinline__ uint4 load_parts(const float* from) {
    uint4 bits;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from)
                 : "memory");
    return bits;
}

// Stores x, element `offset` of a rank's partial sums, to all copies.
__device__ __forceinline__ void send_part(
    const ExlPartialCopies& copies, int64_t offset, uint32_t bits
) {
#pragma unroll 1
    for (int i = 0; i < copies.count; ++i) store_part(copies.to[i] + offset, bits);
}

// The largest of four words: EXL_CUDA_UNSENT if one of them has not arrived.
__device__ __forceinline__ uint32_t largest(const uint4& bits) {
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// Whether a reader gives up after `spins` attempts. Once one has, all others do. `since`: 0 at first.
inline __device__ __noinline__ bool gives_up(
    int32_t* ended, int32_t timeout_ms, uint32_t spins, uint64_t& since
) {
    if (spins % 1024 != 0) return false;
    auto* const has_ended = static_cast<volatile int32_t*>(ended);
    if (*has_ended != 0) return true;
    if (timeout_ms == 0) return false;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (since == 0) since = now;
    if (now - since < static_cast<uint64_t>(timeout_ms) * 1000000u) return false;
    *has_ended = 1;
    return true;
}

// Waits with one thread until a value has arrived. The other threads would take issue slots and
// bandwidth of the L2 cache from the kernel that sends.
__device__ __forceinline__ void await_first(const ExlPartialSums& sums, const float* value) {
    if (threadIdx.x == 0) {
        uint32_t spins = 0;
        uint64_t since = 0;
        while (load_part(value) == EXL_CUDA_UNSENT &&
               !gives_up(sums.ended, sums.timeout_ms, ++spins, since)) {
            __nanosleep(50);
        }
    }
    __syncthreads();
}

// values[n] += the parts of all ranks of `kVectors` vectors of 4 * kQuads values. The first vector
// starts at element `first` of the rank's sums, and the next ones follow at a distance of `stride`
// elements, as long as they start before `end`. Without `is_real` the same instructions read at
// `ready`, without waiting.
template <int kVectors, int kQuads>
__device__ __forceinline__ void add_parts(
    const ExlPartialSums& sums, int64_t rank_stride, int64_t row, int start, int stride, int end,
    float (&values)[kVectors][4 * kQuads], bool is_real, const float* ready
) {
    constexpr int kAtOnce = 2;  // ranks whose loads are in flight together
#pragma unroll 1
    for (int rank = 0; rank < sums.ranks; rank += kAtOnce) {
        uint4 parts[kAtOnce][kVectors][kQuads];
        uint32_t spins = 0, unsent;
        uint64_t since = 0;
        do {
            unsent = 0;
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
                for (int n = 0; n < kVectors; ++n) {
                    const int at = start + n * stride;
                    if (at >= end || rank + r >= sums.ranks) continue;
                    const float* from =
                        is_real ? sums.parts + (rank + r) * rank_stride + row + at : ready + at;
#pragma unroll
                    for (int q = 0; q < kQuads; ++q) {
                        parts[r][n][q] = load_parts(from + 4 * q);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
                for (int n = 0; n < kVectors; ++n) {
                    if (start + n * stride >= end || rank + r >= sums.ranks) continue;
#pragma unroll
                    for (int q = 0; q < kQuads; ++q) {
                        unsent = max(unsent, largest(parts[r][n][q]));
                    }
                }
            }
        } while (unsent == EXL_CUDA_UNSENT && is_real &&
                 !gives_up(sums.ended, sums.timeout_ms, ++spins, since));
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
            for (int n = 0; n < kVectors; ++n) {
                if (start + n * stride >= end || rank + r >= sums.ranks) continue;
#pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    values[n][4 * q] += __uint_as_float(parts[r][n][q].x);
                    values[n][4 * q + 1] += __uint_as_float(parts[r][n][q].y);
                    values[n][4 * q + 2] += __uint_as_float(parts[r][n][q].z);
                    values[n][4 * q + 3] += __uint_as_float(parts[r][n][q].w);
                }
            }
        }
    }
}

// Empties k values. `count` threads share the work, and this one is `index`.
__device__ __forceinline__ void empty_values(float* values, int k, int index, int count) {
    constexpr uint32_t kUnsent = EXL_CUDA_UNSENT;
    for (int i = 4 * index; i < k; i += 4 * count) {
        store_parts(values + i, make_uint4(kUnsent, kUnsent, kUnsent, kUnsent));
    }
}

// Empties a row of the spent stage, likewise.
__device__ __forceinline__ void empty_row(
    const ExlPartialSums& sums, int64_t rank_stride, int64_t row, int k, int index, int count
) {
#pragma unroll 1
    for (int rank = 0; rank < sums.ranks; ++rank) {
        empty_values(sums.spent + rank * rank_stride + row, k, index, count);
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda

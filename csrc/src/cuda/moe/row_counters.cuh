// Messages between the thread blocks of one row's experts, in global memory: which tiles of gate and
// up are stored, and which experts the row has.
//
// The memory has a cell of EXL_CUDA_ROW_COUNTER_BYTES for each slot, in different slices of the L2
// cache, and one more. It is zero before and after a launch.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/moe.h"

#ifdef __CUDACC__

namespace exl::cuda {

class RowCounters {
  public:
    __device__ __forceinline__ explicit RowCounters(uint32_t* memory) : memory_(memory) {}

    // Counts a stored tile of the pair of a slot.
    __device__ __forceinline__ void add_stored_tile(int slot) const {
        __syncthreads();
        if (threadIdx.x != 0) return;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(cell(slot)) : "memory");
    }
    // Waits until `count` tiles of a slot are stored. For one warp.
    __device__ __forceinline__ void wait_for_tiles(int slot, uint32_t count, int lane) const {
        if (lane == 0) {
            uint32_t stored;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                             : "=r"(stored)
                             : "l"(cell(slot))
                             : "memory");
            } while (stored != count);
        }
        __syncwarp();
    }
    // Publishes the experts of all slots, with their weights. For one warp.
    __device__ __forceinline__ void publish(
        const int32_t* ids, const float* weights, int slots, int lane
    ) const {
        if (lane >= slots) return;
        const uint64_t weight = __float_as_uint(weights[lane]);
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(expert_of(lane)),
                     "l"(weight << 32 | static_cast<uint32_t>(ids[lane] + 1))
                     : "memory");
    }
    // Waits for them. For one warp.
    __device__ __forceinline__ void read_published(
        int32_t* ids, float* weights, int slots, int lane
    ) const {
        if (lane >= slots) return;
        uint64_t word;
        do {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                         : "=l"(word)
                         : "l"(expert_of(lane))
                         : "memory");
        } while (word == 0);
        ids[lane] = static_cast<int32_t>(static_cast<uint32_t>(word)) - 1;
        weights[lane] = __uint_as_float(static_cast<uint32_t>(word >> 32));
    }
    // Called by one thread for each of `panels` panels of down that need nothing any more. The last
    // one clears the memory.
    __device__ __forceinline__ void end(uint32_t panels, int slots) const {
        if (atomicInc(cell(slots), panels - 1) != panels - 1) return;
#pragma unroll 1
        for (int slot = 0; slot < slots; ++slot) *cell(slot) = 0, *expert_of(slot) = 0;
    }

  private:
    __device__ __forceinline__ uint32_t* cell(int slot) const {
        return memory_ + slot * (EXL_CUDA_ROW_COUNTER_BYTES / sizeof(uint32_t));
    }
    // The weight of a slot's expert and, in the lower half, its number plus 1. Both are read at once,
    // so that no flag has to be read before.
    __device__ __forceinline__ uint64_t* expert_of(int slot) const {
        return reinterpret_cast<uint64_t*>(cell(slot) + 2);
    }

    uint32_t* memory_;
};

}  // namespace exl::cuda

#endif  // __CUDACC__

// Loads of one warp: their entries in a table, and a ring of stages in shared memory to which it copies
// the bytes of the loads.
#pragma once

#include "cuda/linear/quant_stream.cuh"
#include "exl/cuda/moe.h"

#ifdef __CUDACC__

namespace exl::cuda {

constexpr int kMaxRingStages = 6;

struct WarpBarriers {
    uint64_t stages[kMaxRingStages];
};

// Entry of the table of loads (ExlQuantLoad), in registers.
struct Load {
    uint32_t offset, position, shape;

    __device__ __forceinline__ static Load at(const ExlQuantLoad* loads, int index) {
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(loads + index));
        return {words.x, words.y, words.z};
    }
    __device__ __forceinline__ int first_block() const { return position & 0xffff; }
    __device__ __forceinline__ int bytes() const { return position >> 16; }
    __device__ __forceinline__ int bits() const { return shape & 0xff; }
    __device__ __forceinline__ int k_tile_blocks() const { return shape >> 16 & 0xff; }
    __device__ __forceinline__ int blocks() const { return shape >> 24; }
};

// Ring of stages in shared memory, for one warp. Devices before 9.0 copy 16 bytes per lane, and
// wait for all copies in flight.
class Ring {
  public:
    __device__ __forceinline__ Ring(
        uint8_t* buffers, WarpBarriers* barriers, int num_stages, int stage_bytes, int lane
    )
        : buffers_(buffers),
          barriers_(barriers),
          num_stages_(num_stages),
          stage_bytes_(stage_bytes),
          lane_(lane) {
#if __CUDA_ARCH__ >= 900
        if (is_elected()) {
#pragma unroll
            for (uint64_t& stage : barriers->stages) {
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&stage))
                             : "memory");
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncwarp();
    }
    __device__ __forceinline__ const uint8_t* data() const {
        return buffers_ + stage_ * stage_bytes_;
    }
    // Starts the copy of a load to a stage whose bytes have all been read. All lanes call it.
    __device__ __forceinline__ void issue(int stage, const uint8_t* source, int bytes) {
#if __CUDA_ARCH__ >= 900
        if (is_elected()) issue_alone(stage, source, bytes);
#else
        for (int byte = 16 * lane_; byte < bytes; byte += 16 * kWarp) {
            copy_async_16(buffers_ + stage * stage_bytes_ + byte, source + byte);
        }
        commit_copies();
#endif
    }
#if __CUDA_ARCH__ >= 900
    // The same by one lane.
    __device__ __forceinline__ void issue_alone(int stage, const uint8_t* source, int bytes) {
        const uint32_t barrier = shared_address(&barriers_->stages[stage]);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                     : "memory");
        copy_weights(shared_address(buffers_ + stage * stage_bytes_), source, bytes, barrier);
    }
#endif
    // Waits until the bytes of the current stage have arrived.
    __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
        const uint32_t barrier = shared_address(&barriers_->stages[stage_]);
        uint32_t is_done = 0;
        while (!is_done) {
            asm volatile(
                "{\n .reg .pred done;\n"
                " mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
                " selp.u32 %0, 1, 0, done;\n}"
                : "=r"(is_done)
                : "r"(barrier), "r"(phase_)
                : "memory"
            );
        }
#else
        wait_copies<0>();
        __syncwarp();
#endif
    }
    __device__ __forceinline__ int stage() const { return stage_; }
    // Stage of the n-th load from now on.
    __device__ __forceinline__ int stage_after(int n) const {
        return stage_ + n < num_stages_ ? stage_ + n : stage_ + n - num_stages_;
    }
    __device__ __forceinline__ void advance() {
        const bool wraps = ++stage_ == num_stages_;
        if (wraps) stage_ = 0;
        phase_ ^= wraps;
    }

  private:
    uint8_t* buffers_;
    WarpBarriers* barriers_;
    int num_stages_, stage_bytes_, lane_;
    int stage_ = 0;
    uint32_t phase_ = 0;
};

}  // namespace exl::cuda

#endif  // __CUDACC__

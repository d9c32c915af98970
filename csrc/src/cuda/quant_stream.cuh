// Units of quantized strips through a ring in shared memory, one ring for each warp.
//
// A warp copies whole units ahead of their use, as many as its ring holds, across the ends of
// strips; nothing but that warp waits for them. Units lie in the ring without wrapping: what does
// not fit before its end begins at 0. A unit's copy is one bulk copy on 9.0 and 16 bytes a lane
// before; either way a barrier in shared memory says when its bytes have come.
#pragma once

#include "quant_work.cuh"

namespace exl::cuda {

constexpr int kRingSlots = 16;           // units on their way or in use, of one warp
constexpr int kMostUnitBytes = 4096 + 256;  // 4 blocks of 8 bits, float32 scales and minimums

struct RingEntry {
    uint32_t unit;  // as ExlQuantUnit has it: first_block, bits, blocks; 0: no unit, a share's end
    int32_t at;
    int32_t end;
    int32_t is_last;  // of the warp's share of a tile
};

// Shared memory of one warp ahead of its ring.
struct RingState {
    RingEntry entries[kRingSlots];
    uint64_t barriers[kRingSlots];
};

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <int kRingBytes, int kWarps>
class UnitStream {
    static_assert(kRingBytes >= 2 * kMostUnitBytes, "else a unit may never find room");

public:
    __device__ __forceinline__ UnitStream(
        const QuantLinearArgs& args, const TileWalk& walk, RingState* state, uint8_t* ring,
        int warp, int lane
    )
        : args_(args), walk_(walk), state_(state), ring_(ring), warp_(warp),
          lane_(lane) {
#if __CUDA_ARCH__ >= 800
        if (lane < kRingSlots) {
            constexpr int kArrivals = __CUDA_ARCH__ >= 900 ? 1 : kWarp;
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(
                             shared_address(&state->barriers[lane])
                         ),
                         "r"(kArrivals)
                         : "memory");
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
#endif
        __syncwarp();
    }

    // Begins as many copies as there is room for.
    __device__ __forceinline__ void fill() {
        while (issued_ - taken_ < kRingSlots) {
            if (left_ == 0) {
                if (walk_.left == 0) return;
                open_share();
                if (left_ == 0) {
                    push(0, write_, write_, 1);
                    continue;
                }
            }
            const int blocks = unit_ >> 24, bits = unit_ >> 16 & 0xff;
            const int size = header_bytes_ + 128 * bits * blocks;
            const bool wraps = write_ + size > kRingBytes;
            const int at = wraps ? 0 : write_;
            if (is_ahead_ ? wraps || at + size > read_ : wraps && size > read_) return;
            copy(at, size);
            push(unit_, at, at + size, left_ == 1);
            is_ahead_ |= wraps;
            write_ = at + size;
            from_ += size;
            if (--left_ > 0) unit_ = unit_word(++next_);
        }
    }

    // The next unit, or the mark of a share without any; its bytes have come.
    __device__ __forceinline__ RingEntry front() {
        __syncwarp();
        const uint32_t slot = taken_ % kRingSlots;
        const RingEntry entry = state_->entries[slot];
        if (entry.unit != 0) wait(slot);
        return entry;
    }
    __device__ __forceinline__ const uint8_t* bytes(const RingEntry& entry) const {
        return ring_ + entry.at;
    }
    // Gives that unit's room back.
    __device__ __forceinline__ void pop(const RingEntry& entry) {
        __syncwarp();
        if (entry.at < read_) is_ahead_ = false;
        read_ = entry.end;
        ++taken_;
        fill();
    }

private:
    __device__ __forceinline__ static uint32_t unit_word(const ExlQuantUnit* unit) {
        return __ldg(reinterpret_cast<const uint32_t*>(unit) + 1);
    }

    // This warp's share of the tile that the walk is at; the walk goes on to the next one.
    __device__ void open_share() {
        const uint32_t along_k = kWarps / args_.wide;
        const uint32_t across = warp_ % args_.wide, along = warp_ / args_.wide;
        const uint32_t length = args_.groups[walk_.group].length;
        const uint32_t begin = walk_.begin, share = walk_.end(args_) - begin;
        const StripPlace place(args_, walk_.group, walk_.tile, across);
        const QuantPart& part = args_.parts[place.part];
        if (share != length || walk_.group != whole_group_) {
            first_ = unit_of(part, begin + share * along / along_k, length);
            last_ = unit_of(part, begin + share * (along + 1) / along_k, length);
            whole_group_ = share == length ? walk_.group : ~0u;
        }
        walk_.advance(args_);
        left_ = place.strip < part.strips ? last_ - first_ : 0;
        if (left_ == 0) return;
        next_ = part.units + first_;
        unit_ = unit_word(next_);
        header_bytes_ = part.header_bytes;
        from_ = part.tiles + static_cast<int64_t>(place.strip) * part.strip_bytes +
                __ldg(&next_->offset);
    }

    // Lengths of a gated pair are its gate's; its up part may have other widths.
    __device__ __forceinline__ int unit_of(
        const QuantPart& part, uint32_t place, uint32_t length
    ) const {
        if (part.strip_bytes != length) {
            place = static_cast<uint64_t>(place) * part.strip_bytes / length;
        }
        return first_unit_at(part, place, lane_);
    }

    __device__ __forceinline__ void push(uint32_t unit, int at, int end, int is_last) {
        if (lane_ == 0) state_->entries[issued_ % kRingSlots] = {unit, at, end, is_last};
        // A mark has no bytes and its barrier no arrival: `rounds_` tells each slot's phase.
        if (unit != 0) rounds_ ^= 1u << issued_ % kRingSlots;
        ++issued_;
    }

    __device__ __forceinline__ void copy(int at, int size) {
        const uint32_t to = shared_address(ring_ + at);
        const uint32_t barrier = shared_address(&state_->barriers[issued_ % kRingSlots]);
#if __CUDA_ARCH__ >= 900
        if (lane_ == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(size)
                         : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
                "[%3];" ::"r"(to),
                "l"(from_), "r"(size), "r"(barrier)
                : "memory"
            );
        }
#else
        for (int byte = 16 * lane_; byte < size; byte += 16 * kWarp) {
            copy_async_16(ring_ + at + byte, from_ + byte);
        }
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
#endif
    }

    __device__ __forceinline__ void wait(uint32_t slot) {
#if __CUDA_ARCH__ >= 800
        const uint32_t barrier = shared_address(&state_->barriers[slot]);
        const uint32_t phase = (rounds_ >> slot & 1) ^ 1;  // a slot's first copy has phase 0
        uint32_t is_done = 0;
        while (!is_done) {
#if __CUDA_ARCH__ >= 900
            asm volatile(
                "{\n .reg .pred done;\n"
                " mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
                " selp.u32 %0, 1, 0, done;\n}"
                : "=r"(is_done)
                : "r"(barrier), "r"(phase)
                : "memory"
            );
#else
            asm volatile(
                "{\n .reg .pred done;\n .reg .b64 state;\n"
                " mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                " selp.u32 %0, 1, 0, done;\n}"
                : "=r"(is_done)
                : "r"(barrier), "r"(phase)
                : "memory"
            );
#endif
        }
#endif
    }

    const QuantLinearArgs& args_;
    TileWalk walk_;  // of the tile to copy from next
    RingState* state_;
    uint8_t* ring_;
    uint32_t warp_;
    int lane_;
    // The share that is being copied.
    const uint8_t* from_ = nullptr;
    const ExlQuantUnit* next_ = nullptr;
    uint32_t unit_ = 0;
    int left_ = 0, header_bytes_ = 0;
    int first_ = 0, last_ = 0;         // its units
    uint32_t whole_group_ = ~0u;       // they are those of any whole tile of that group
    // The ring.
    uint32_t issued_ = 0, taken_ = 0;
    int write_ = 0, read_ = 0;
    bool is_ahead_ = false;  // writing has begun again at 0, reading not yet
    uint32_t rounds_ = 0;    // bit of each slot: the number of its copies, modulo 2
};

#endif  // __CUDACC__

}  // namespace exl::cuda

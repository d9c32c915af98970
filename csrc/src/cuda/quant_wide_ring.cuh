// Units of eight neighbouring strips and the inputs that meet them, through one ring for a block.
//
// One warp copies: a unit of each strip, and the prepared inputs of the unit's rows behind them.
// The ring holds as many units as fit, laid without wrapping. Of each unit two barriers: all bytes
// have come; all warps are done. The copying warp also sums up the inputs of each unit,
// and a third barrier says that this is done.
#pragma once

#include "hopper.cuh"
#include "quant_decode.cuh"
#include "quant_wide_work.cuh"

#if defined(__CUDACC__)

namespace exl::cuda {

constexpr int kRingUnits = 8;  // on their way or in use
constexpr int kConsumers = 8;  // warps

constexpr uint32_t kLastOfShare = 1u << 31;  // beside the unit's blocks

struct WideEntry {
    uint32_t unit;  // as ExlQuantUnit has it: first_block, bits, blocks; blocks 0: no unit
    int32_t at;
    int32_t end;
    int32_t part;

    __device__ __forceinline__ int blocks() const { return unit >> 24 & 0x7f; }
    __device__ __forceinline__ int bits() const { return unit >> 16 & 0xff; }
    __device__ __forceinline__ int first_block() const { return unit & 0xffff; }
    __device__ __forceinline__ bool is_last() const { return unit & kLastOfShare; }
};

template <int kRows>
struct WideRing {
    WideEntry entries[kRingUnits];
    uint64_t full[kRingUnits];
    uint64_t empty[kRingUnits];
    uint64_t summed[kRingUnits];
    float input_sums[kRingUnits][kRows];
    uint32_t is_last_to_come;
};

#if EXL_IS_HOPPER

template <int kRows>
class WideProducer {
public:
    static constexpr int kBlockBytes = 64 * kRows;  // of the inputs

    __device__ __forceinline__ WideProducer(
        const WideArgs& args, WideRing<kRows>& ring, uint8_t* bytes, int lane
    )
        : args_(args), walk_(args, blockIdx.x), ring_(ring), bytes_(bytes), lane_(lane) {}

    __device__ void run() {
        // Weights before what the kernel ahead writes.
        while (open_share() && make_room(false)) issue(false);
        wait_for_inputs();
        for (uint32_t i = 0; i < issued_; ++i) copy_inputs(i % kRingUnits);
        while (open_share()) {
            make_room(true);
            issue(true);
        }
        sum_up_to(issued_);
    }

private:
    // The next unit of the share that is being copied, or of the next share; false at the end.
    __device__ __forceinline__ bool open_share() {
        if (is_open_) return true;
        WideShare share = {};
        for (;;) {
            if (walk_.left == 0) return false;
            share = walk_.share(args_, half_);
            const uint32_t tile = walk_.tile;
            if (args_.is_gated() && half_ == 0) {
                half_ = 1;
            } else {
                half_ = 0;
                walk_.advance(args_);
            }
            tile_ = tile;
            if (share.begin < share.end) break;
        }
        part_ = share.part;
        const WidePart& part = args_.parts[part_];
        next_ = first_unit_from(part, share.begin, lane_);
        last_ = first_unit_from(part, share.end, lane_);
        read_unit();
        is_open_ = true;
        return true;
    }

    __device__ __forceinline__ void read_unit() {
        unit_ = 0;
        size_ = inputs_ = 0;
        if (next_ == last_) return;
        const WidePart& part = args_.parts[part_];
        offset_ = __ldg(&part.units[next_].offset);
        unit_ = __ldg(reinterpret_cast<const uint32_t*>(&part.units[next_]) + 1);
        const int blocks = unit_ >> 24, bits = unit_ >> 16 & 0xff;
        size_ = part.header_bytes + 128 * bits * blocks;
        inputs_ = kBlockBytes * blocks;
    }

    __device__ __forceinline__ bool make_room(bool may_wait) {
        const int size = kTileStrips * size_ + inputs_;
        for (;;) {
            if (issued_ - freed_ < kRingUnits) {
                const bool wraps = write_ + size > args_.ring_bytes;
                const bool fits = is_ahead_ ? !wraps && write_ + size <= read_
                                            : !wraps || size <= read_;
                if (fits) return true;
            }
            if (!may_wait) return false;
            sum_up_to(min(freed_ + 2, issued_));
            const uint32_t slot = freed_ % kRingUnits;
            barrier_wait(&ring_.empty[slot], freed_ / kRingUnits & 1);
            if (ring_.entries[slot].at < read_) is_ahead_ = false;
            read_ = ring_.entries[slot].end;
            if (++freed_ == issued_) write_ = read_ = 0, is_ahead_ = false;
        }
    }

    // Begins the copies of the unit, for which there is room.
    __device__ __forceinline__ void issue(bool with_inputs) {
        const WidePart& part = args_.parts[part_];
        const uint32_t slot = issued_ % kRingUnits;
        const int size = kTileStrips * size_ + inputs_;
        const bool wraps = write_ + size > args_.ring_bytes;
        const int at = wraps ? 0 : write_;
        const int first_strip = kTileStrips * tile_;
        const int strips = min(kTileStrips, part.strips - first_strip);
        const bool is_last = next_ + 1 >= last_;
        __syncwarp();
        if (lane_ == 0) {
            ring_.entries[slot] = {unit_ | (is_last ? kLastOfShare : 0u), at, at + size, part_};
            barrier_arrive_expecting(&ring_.full[slot], strips * size_ + inputs_);
        }
        __syncwarp();
        if (lane_ < strips && size_ > 0) {
            copy_bulk(
                bytes_ + at + lane_ * size_,
                part.tiles + (first_strip + lane_) * part.strip_bytes + offset_, size_,
                &ring_.full[slot]
            );
        }
        if (with_inputs) copy_inputs(slot);
        is_ahead_ |= wraps;
        write_ = at + size;
        ++issued_;
        is_open_ = !is_last;
        if (is_open_) {
            ++next_;
            read_unit();
        }
    }

    __device__ __forceinline__ void copy_inputs(uint32_t slot) {
        const WideEntry entry = ring_.entries[slot];
        const uint32_t bytes = kBlockBytes * entry.blocks();
        if (lane_ == kTileStrips && bytes > 0) {
            const __half* inputs = args_.parts[entry.part].inputs;
            copy_bulk(
                bytes_ + entry.end - bytes,
                inputs + static_cast<int64_t>(entry.first_block()) * args_.block_halves, bytes,
                &ring_.full[slot]
            );
        }
    }

    // Sums of the inputs of units that have come, each of them a product with ones.
    __device__ __forceinline__ void sum_up_to(uint32_t last) {
        for (; summed_ < last; ++summed_) {
            const uint32_t slot = summed_ % kRingUnits;
            barrier_wait(&ring_.full[slot], summed_ / kRingUnits & 1);
            const WideEntry entry = ring_.entries[slot];
            const int bytes = kBlockBytes * entry.blocks();
            const auto* words =
                reinterpret_cast<const uint32_t*>(bytes_ + entry.end - bytes) + lane_;
            float sums[kRows / 8][4] = {};
#pragma unroll 2
            for (int step = 0; step < 2 * entry.blocks(); ++step) {
#pragma unroll
                for (int i = 0; i < kRows / 8; ++i) {
                    constexpr uint32_t kOnes = 0x3c003c00;
                    const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
                    mma_16816(sums[i], ones, words[32 * i], words[32 * i + 4 * kRows]);
                }
                words += 8 * kRows;
            }
            if (lane_ < 4) {
#pragma unroll
                for (int i = 0; i < kRows / 8; ++i) {
                    *reinterpret_cast<float2*>(&ring_.input_sums[slot][8 * i + 2 * lane_]) =
                        make_float2(sums[i][0], sums[i][1]);
                }
            }
            __syncwarp();
            if (lane_ == 0) barrier_arrive(&ring_.summed[slot]);
        }
    }

    const WideArgs& args_;
    WideWalk walk_;  // of the share to open next
    WideRing<kRows>& ring_;
    uint8_t* bytes_;
    int lane_;
    int half_ = 0;
    // The share that is being copied, and its next unit.
    bool is_open_ = false;
    int part_ = 0;
    uint32_t tile_ = 0;
    int next_ = 0, last_ = 0;
    uint32_t unit_ = 0, offset_ = 0;
    int size_ = 0, inputs_ = 0;  // bytes of a strip's unit, and of the unit's inputs
    // The ring.
    uint32_t issued_ = 0, freed_ = 0, summed_ = 0;
    int write_ = 0, read_ = 0;
    bool is_ahead_ = false;  // writing has begun again at 0, reading not yet
};

#endif  // EXL_IS_HOPPER

}  // namespace exl::cuda

#endif  // __CUDACC__

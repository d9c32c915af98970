// Units of neighbouring strips and the inputs that meet them, through one ring for a block.
//
// One warp copies: a unit of each strip, and the prepared inputs of the unit's rows behind them.
// The ring holds as many units as fit, laid without wrapping. Each unit has two barriers: all its
// bytes have come; all warps are done with it.
#pragma once

#include "hopper.cuh"
#include "quant_decode.cuh"
#include "quant_wide_work.cuh"

#if defined(__CUDACC__)

namespace exl::cuda {

constexpr int kRingUnits = 8;    // on their way or in use
constexpr int kMultipliers = 8;  // warps, a strip each; then one that copies and one that rehearses
constexpr int kMultiplierThreads = kMultipliers * kWarp;
constexpr int kWideThreads = kMultiplierThreads + 2 * kWarp;

struct WideEntry {
    uint32_t unit;  // as ExlQuantUnit has it: first_block, bits, blocks
    int32_t at;
    int32_t inputs;  // where they begin
    int32_t end;

    __device__ __forceinline__ int blocks() const { return unit >> 24; }
    __device__ __forceinline__ int bits() const { return unit >> 16 & 0xff; }
};

// Shared memory behind the ring.
struct WideState {
    alignas(128) WideEntry entries[kRingUnits];
    uint64_t full[kRingUnits];
    uint64_t empty[kRingUnits];
    uint64_t sums;  // all that this block adds up have come
    uint32_t is_last;  // of the clusters that meet

#if EXL_IS_HOPPER
    // The block gets so many bytes of sums.
    __device__ __forceinline__ void begin(int teams, uint32_t sums_bytes) {
        const int warp = uniform(threadIdx.x / kWarp);
        if (threadIdx.x % kWarp != 0 || warp > kRingUnits) return;
        if (warp == kRingUnits) {
            barrier_init(&sums, 1);
            barrier_arrive_expecting(&sums, sums_bytes);
        } else {
            barrier_init(&full[warp], 1);
            barrier_init(&empty[warp], kMultipliers / teams);
        }
        fence_barrier_init();
    }
#endif
};

#if EXL_IS_HOPPER

// What the copying warp does.
template <int kRows>
class WideCopies {
public:
    static constexpr int kBlockBytes = 64 * kRows;  // of the inputs

    __device__ __forceinline__ WideCopies(
        const WideArgs& args, WideState& state, uint8_t* ring, int lane
    )
        : args_(args), walk_(args), state_(state), ring_(ring), lane_(lane) {}

    __device__ __forceinline__ void run() {
        // A unit's weights before the kernel ahead has ended, their inputs once it has: no more of
        // them, since the inputs would have to wait for all that was asked for before.
        if (open_share()) issue(false);
        wait_for_inputs();
        if (issued_ > 0) copy_first_inputs();
        while (open_share()) {
            make_room();
            issue(true);
        }
    }

private:
    // The share that is being copied, or the next one that is not empty; false at the end.
    __device__ __forceinline__ bool open_share() {
        if (is_open_) return true;
        WideShare share;
        uint32_t tile;
        do {
            if (walk_.is_over(args_)) return false;
            share = walk_.share(args_, half_);
            tile = walk_.tile;
            half_ = args_.is_gated() ? 1 - half_ : 0;
            if (half_ == 0) walk_.advance(args_);
        } while (share.begin == share.end);
        const WidePart& part = args_.parts[share.part];
        next_ = static_cast<int>(share.begin);
        last_ = static_cast<int>(share.end);
        const int first_strip = args_.tile_strips() * static_cast<int>(tile);
        units_ = part.units;
        inputs_ = part.inputs;
        header_bytes_ = part.header_bytes;
        strips_ = min(args_.tile_strips(), part.strips - first_strip);
        strip_bytes_ = part.strip_bytes;
        from_ = part.tiles + first_strip * part.strip_bytes;
        is_open_ = true;
        const WidePart::First& first = part.first[WideWalk::rank(args_)];
        offset_ = first.offset;
        unit_ = first.unit;
        return true;
    }

    __device__ __forceinline__ void read_unit() {
        offset_ = uniform(__ldg(&units_[next_].offset));
        unit_ = uniform(__ldg(reinterpret_cast<const uint32_t*>(&units_[next_]) + 1));
    }

    // Bytes of the unit in a strip, and of its inputs.
    __device__ __forceinline__ int strip_size() const {
        const int blocks = unit_ >> 24, bits = unit_ >> 16 & 0xff;
        return header_bytes_ + 128 * bits * blocks;
    }
    __device__ __forceinline__ int inputs_size() const { return kBlockBytes * (unit_ >> 24); }

    __device__ __forceinline__ void make_room() {
        const int size = args_.tile_strips() * strip_size() + inputs_size();
        for (;;) {
            if (issued_ - freed_ < kRingUnits) {
                const bool wraps = write_ + size > args_.ring_bytes;
                if (is_ahead_ ? !wraps && write_ + size <= read_ : !wraps || size <= read_) return;
            }
            const uint32_t slot = freed_ % kRingUnits;
            barrier_wait(&state_.empty[slot], freed_ / kRingUnits & 1);
            if (state_.entries[slot].at < read_) is_ahead_ = false;
            read_ = state_.entries[slot].end;
            if (++freed_ == issued_) write_ = read_ = 0, is_ahead_ = false;
        }
    }

    // Begins the copies of the unit, for which there is room.
    __device__ __forceinline__ void issue(bool with_inputs) {
        const uint32_t slot = issued_ % kRingUnits;
        const int size = strip_size(), inputs_bytes = inputs_size();
        const int whole = args_.tile_strips() * size + inputs_bytes;
        const bool wraps = write_ + whole > args_.ring_bytes;
        const int at = wraps ? 0 : write_;
        uint64_t* barrier = &state_.full[uniform(slot)];
        if (lane_ == 0) {
            state_.entries[slot] = {unit_, at, at + whole - inputs_bytes, at + whole};
            barrier_arrive_expecting(barrier, strips_ * size + inputs_bytes);
        }
        __syncwarp();
        // Addresses that all lanes have: those of single lanes would take some 60 cycles each.
        const uint8_t* from = from_ + offset_;
        const int each = static_cast<int>(uniform(size));
        int to = static_cast<int>(uniform(at));
#pragma unroll 1
        for (int i = 0; i < strips_; ++i, from += strip_bytes_, to += each) {
            if (lane_ == 0) {
                copy_weights(shared_offset(ring_ + to), from, each, shared_offset(barrier));
            }
        }
        const __half* inputs = inputs_ + (unit_ & 0xffff) * (kBlockBytes / 2);
        if (!with_inputs) {
            first_inputs_ = inputs;
        } else if (lane_ == 0) {
            copy_bulk(ring_ + at + whole - inputs_bytes, inputs, inputs_bytes, barrier);
        }
        is_ahead_ |= wraps;
        write_ = at + whole;
        ++issued_;
        is_open_ = ++next_ < last_;
        if (is_open_) read_unit();
    }

    __device__ __forceinline__ void copy_first_inputs() {
        if (lane_ == 0) {
            const WideEntry entry = state_.entries[0];
            copy_bulk(
                ring_ + entry.inputs, first_inputs_, entry.end - entry.inputs, &state_.full[0]
            );
        }
        __syncwarp();
    }

    const WideArgs& args_;
    WideWalk walk_;  // of the share to open next
    WideState& state_;
    uint8_t* ring_;
    int lane_;
    int half_ = 0;
    // The share that is being copied.
    bool is_open_ = false;
    const ExlQuantUnit* units_ = nullptr;
    const __half* inputs_ = nullptr;
    const uint8_t* from_ = nullptr;  // of the first strip
    int64_t strip_bytes_ = 0;
    int header_bytes_ = 0, strips_ = 0;
    int next_ = 0, last_ = 0;  // units: the one to copy next, and the share's end
    uint32_t unit_ = 0, offset_ = 0;
    // The ring.
    const __half* first_inputs_ = nullptr;
    uint32_t issued_ = 0, freed_ = 0;
    int write_ = 0, read_ = 0;
    bool is_ahead_ = false;  // writing has begun again at 0, reading not yet
};

#endif  // EXL_IS_HOPPER

}  // namespace exl::cuda

#endif  // __CUDACC__

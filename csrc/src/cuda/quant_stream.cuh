// Chunks of quantized strips through a ring in shared memory, one ring for each warp.
//
// A chunk is one unit, or several short ones: up to four blocks of 32 rows. A warp has as many on
// their way as its ring has slots, across the ends of tiles; nothing but that warp waits for them.
// A chunk's copy is one bulk copy on 9.0 and 16 bytes a lane before; either way a barrier in shared
// memory says when its bytes have come. Chunks that are alike and follow each other are a series:
// what it is lies beside the slot that it begins in, and is worked out once for all of them.
#pragma once

#include "quant_work.cuh"

namespace exl::cuda {

constexpr int kWarpBits = 3;
constexpr int kWarps = 1 << kWarpBits;  // of a thread block
constexpr int kMostSlots = 8;
constexpr int kChunkBlocks = 4;

// Chunks that are alike, one after the other; or the first one of them.
struct Chunks {
    uint32_t what;
    uint32_t place;

    static constexpr uint32_t kIsLast = 1u << 20;  // of the warp's share of a tile

    __device__ __forceinline__ static uint32_t of(const QuantPart& part, int index) {
        return index << 12 | part.offset_kind << 16 | (part.scale_dtype == kF32) << 18;
    }
    __device__ __forceinline__ static uint32_t of(int bits, int units, int blocks) {
        return bits | units << 4 | blocks << 8;
    }
    __device__ __forceinline__ static uint32_t place_of(uint32_t block, uint32_t count) {
        return block | count << 16;
    }
    __device__ __forceinline__ int bits() const { return what & 15; }
    __device__ __forceinline__ int units() const { return what >> 4 & 15; }
    __device__ __forceinline__ int unit_blocks() const { return what >> 8 & 15; }
    __device__ __forceinline__ int blocks() const { return units() * unit_blocks(); }
    __device__ __forceinline__ int part() const { return what >> 12 & 3; }
    __device__ __forceinline__ int offset_kind() const { return what >> 16 & 3; }
    __device__ __forceinline__ bool has_floats() const { return what >> 18 & 1; }
    // Float16 scales, zeros in the middle: EXL2's.
    __device__ __forceinline__ bool is_plain() const { return (what >> 16 & 7) == 0; }
    __device__ __forceinline__ bool is_last() const { return what & kIsLast; }
    __device__ __forceinline__ bool is_empty() const { return units() == 0; }
    // Of one unit of four blocks, as most are.
    __device__ __forceinline__ bool is_whole() const { return (what & 0xff0) == 0x410; }
    __device__ __forceinline__ uint32_t block() const { return place & 0xffff; }  // of the matrix
    __device__ __forceinline__ int count() const { return place >> 16; }
    // The last `left` ones of them.
    __device__ __forceinline__ Chunks last(int left) const {
        return {what, place_of(block() + (count() - left) * blocks(), left)};
    }
};

// Shared memory of one warp ahead of its ring.
struct RingState {
    Chunks chunks[kMostSlots];  // where a series begins
    uint64_t barriers[kMostSlots];
};

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

class ChunkStream {
public:
    __device__ __forceinline__ ChunkStream(
        const QuantLinearArgs& args, RingState* state, uint8_t* ring, int warp, int lane
    )
        : args_(args), state_(state), ring_(ring), warp_(warp), lane_(lane),
          tile_(blockIdx.x >> args.split_bits) {
#if __CUDA_ARCH__ >= 800
        if (lane < kMostSlots) {
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
        for (int slot = 0; slot < args.slots; ++slot) {
            if (must_open()) open_series(slot);
            issue(slot);
        }
    }

    // The series that begins with the chunk at hand, whose bytes may be on their way. Units of 0
    // mark the end.
    __device__ __forceinline__ Chunks front() const { return series_at(slot_); }
    // The one that begins with the chunk after it, where the ring has several slots.
    __device__ __forceinline__ Chunks next() const {
        if (args_.slots == 1) return {0, 0};
        return series_at(slot_ + 1 == args_.slots ? 0 : slot_ + 1);
    }
    __device__ __forceinline__ const uint8_t* bytes() const {
        return ring_ + slot_ * args_.slot_bytes;
    }
    // Until its bytes have come.
    __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 800
        const uint32_t barrier = shared_address(&state_->barriers[slot_]);
        uint32_t is_done = 0;
        while (!is_done) {
#if __CUDA_ARCH__ >= 900
            asm volatile(
                "{\n .reg .pred done;\n"
                " mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
                " selp.u32 %0, 1, 0, done;\n}"
                : "=r"(is_done)
                : "r"(barrier), "r"(phase_)
                : "memory"
            );
#else
            asm volatile(
                "{\n .reg .pred done;\n"
                " mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                " selp.u32 %0, 1, 0, done;\n}"
                : "=r"(is_done)
                : "r"(barrier), "r"(phase_)
                : "memory"
            );
#endif
        }
#endif
    }
    // Whether `pop` has a series to open, which it is told apart for: that is a lot of code.
    __device__ __forceinline__ bool must_open() const {
        return series_left_ == 0 && tile_ < args_.tiles;
    }
    // Whether what `pop` copies is of the same series as what was copied before.
    __device__ __forceinline__ bool goes_on() const { return series_left_ > 0; }
    // Gives its slot to the next copy; all its bytes have been read.
    template <bool may_open>
    __device__ __forceinline__ void pop() {
        __syncwarp();
        if (may_open && must_open()) open_series(slot_);
        issue(slot_);
        step();
    }
    // Where the series goes on.
    __device__ __forceinline__ void pop_on() {
        __syncwarp();
        issue_next(slot_);
        step();
    }

private:
    __device__ __forceinline__ void step() {
        const bool wraps = ++slot_ == args_.slots;
        if (wraps) slot_ = 0;
        phase_ ^= wraps;
    }

    __device__ __forceinline__ Chunks series_at(int slot) const {
        __syncwarp();
        const Chunks& chunks = state_->chunks[slot];
        return {uniform(chunks.what), uniform(chunks.place)};
    }

    // Begins the copy of the next chunk, if there is one.
    __device__ __forceinline__ void issue(int slot) {
        if (series_left_ == 0) {
            if (lane_ == 0) state_->chunks[slot] = {0, 0};
            return;
        }
        issue_next(slot);
    }
    __device__ __forceinline__ void issue_next(int slot) {
        --series_left_;
        copy(slot, size_);
        from_ += size_;
    }

    // The next chunks that are alike.
    __device__ __forceinline__ void open_series(int slot) {
        if (run_left_ == 0) {
            if (left_ > 0) {
                const QuantPart& part = args_.parts[part_];
                ++run_;
                open_run(part, run_at(part, run_).first_unit);
                in_group_ = 0;
            } else {
                open_share();
            }
        }
        int units = 1, blocks = last_blocks_, count = 1;
        if (group_units_ == 1) {
            units = min(chunk_units_, run_left_);
            if (units > 0) count = run_left_ / units;
        } else if (last_blocks_ == kChunkBlocks) {
            count = run_left_;
        } else if (in_group_ + 1 < group_units_) {
            blocks = kChunkBlocks;
            count = min(group_units_ - 1 - in_group_, run_left_);
            in_group_ += count;
        } else {
            in_group_ = 0;
        }
        series_left_ = count;
        size_ = units * (header_bytes_ + 128 * bits_ * blocks);
        run_left_ -= count * units;
        const bool is_at_end = run_left_ == 0 && left_ == 0;
        if (is_at_end) tile_ += gridDim.x >> args_.split_bits;
        if (lane_ == 0) {
            const uint32_t what = Chunks::of(units > 0 ? bits_ : 0, units, blocks);
            state_->chunks[slot] = {
                part_word_ | what | (is_at_end ? Chunks::kIsLast : 0),
                Chunks::place_of(block_, count)
            };
        }
        block_ += count * units * blocks;
    }

    // This warp's share of the tile.
    __device__ __forceinline__ void open_share() {
        const StripPlace place(args_, TilePlace(args_, tile_), warp_ & (args_.wide() - 1));
        const QuantPart& part = args_.parts[place.part];
        const int slice_bits = kWarpBits - args_.wide_bits + args_.split_bits;
        const uint32_t rank = blockIdx.x & (args_.splits() - 1);
        const uint32_t slice = (rank << kWarpBits | warp_) >> args_.wide_bits;
        const uint32_t first = part.num_units * slice >> slice_bits;
        left_ = static_cast<int>((part.num_units * (slice + 1) >> slice_bits) - first);
        if (place.strip >= part.strips) left_ = 0;
        part_ = place.part;
        part_word_ = Chunks::of(part, place.part);
        header_bytes_ = part.header_bytes;
        if (left_ == 0) {  // a chunk of no units
            chunk_units_ = 0, group_units_ = 1;
            return;
        }
        run_ = run_of(part, first);
        const ExlQuantRun run = run_at(part, run_);
        const uint32_t in_run = first - run.first_unit;
        const uint32_t groups = run.group_units == 1 ? in_run : in_run / run.group_units;
        const uint32_t in_group = in_run - groups * run.group_units;
        const uint32_t group_blocks = (run.group_units - 1) * kChunkBlocks + run.last_blocks;
        const uint32_t blocks = groups * group_blocks + in_group * kChunkBlocks;
        block_ = run.first_block + blocks;
        from_ = part.tiles + static_cast<int64_t>(place.strip) * part.strip_bytes + run.offset +
                in_run * header_bytes_ + blocks * 128 * run.bits;
        open_run(part, first);
        in_group_ = static_cast<int>(in_group);
    }

    // The run `run_` of the share's part, from that unit on.
    __device__ __forceinline__ void open_run(const QuantPart& part, uint32_t unit) {
        const ExlQuantRun run = run_at(part, run_);
        const uint32_t end =
            run_ + 1 < part.num_runs ? run_at(part, run_ + 1).first_unit : part.num_units;
        bits_ = run.bits;
        group_units_ = run.group_units;
        last_blocks_ = run.last_blocks;
        chunk_units_ = last_blocks_ == 1 ? 4 : last_blocks_ == 2 ? 2 : 1;  // kChunkBlocks in all
        run_left_ = min(static_cast<int>(end - unit), left_);
        left_ -= run_left_;
    }

    __device__ __forceinline__ void copy(int slot, int size) {
        const uint32_t to = shared_address(ring_ + slot * args_.slot_bytes);
        const uint32_t barrier = shared_address(&state_->barriers[slot]);
#if __CUDA_ARCH__ >= 900
        if (lane_ == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(size)
                         : "memory");
            if (size > 0) copy_weights(to, from_, size, barrier);
        }
#else
        for (int byte = 16 * lane_; byte < size; byte += 16 * kWarp) {
            copy_async_16(ring_ + slot * args_.slot_bytes + byte, from_ + byte);
        }
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
#endif
    }

    const QuantLinearArgs& args_;
    RingState* state_;
    uint8_t* ring_;
    uint32_t warp_;
    int lane_;
    // What is copied next: of a tile, and what is left of the warp's share past the run at hand.
    uint32_t tile_;
    uint32_t part_word_ = 0;
    int part_ = 0, header_bytes_ = 0, left_ = 0;
    const uint8_t* from_ = nullptr;
    uint32_t block_ = 0;
    // Of the run.
    int run_ = 0, run_left_ = 0, bits_ = 0, group_units_ = 1, last_blocks_ = 1, chunk_units_ = 0;
    int in_group_ = 0;  // units that have passed of a group of several
    // Of the series: chunks to copy, and the bytes of each.
    int series_left_ = 0, size_ = 0;
    // The slot at hand.
    int slot_ = 0;
    uint32_t phase_ = 0;
};

#endif  // __CUDACC__

}  // namespace exl::cuda

// Weight pipeline of the small-batch kernel: one producer warp copies for a thread block.
//
// A stage holds one k-tile in every panel of the output tile (for a gated pair: in every panel of
// the gate or of up), followed by the prepared inputs of the k-tile's rows. Stages vary in
// size. They are allocated from a circular buffer in shared memory, as many as fit, and none wraps
// around the end of the buffer. Each stage has two mbarriers: `full` (all its bytes have arrived)
// and `empty` (all warps that use it have read it).
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/linear/quant_decode.cuh"
#include "cuda/linear/quant_small_batch_work.cuh"

#if defined(__CUDACC__)

namespace exl::cuda {

constexpr int kSmallBatchStages = 8;  // at most, in flight or in use
// Warps of a thread block: consumers, one panel each; then the producer; then one warp that warms
// up the instruction cache.
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = kConsumerWarps * kWarp;
constexpr int kSmallBatchThreads = kConsumerThreads + 2 * kWarp;

// Contents of a stage. Offsets are bytes from the start of the circular buffer.
struct StageEntry {
    uint32_t descriptor;  // second word of ExlQuantKTile: first_block, bits, blocks
    int32_t weights;
    int32_t inputs;
    int32_t end;

    __device__ __forceinline__ int blocks() const { return descriptor >> 24; }
    __device__ __forceinline__ int bits() const { return descriptor >> 16 & 0xff; }
};

// Shared memory after the circular buffer.
struct SmallBatchState {
    alignas(128) StageEntry entries[kSmallBatchStages];
    uint64_t full[kSmallBatchStages];
    uint64_t empty[kSmallBatchStages];
    uint64_t sums_ready;       // barrier: all partial sums of this block's portion have arrived
    uint32_t is_last_cluster;  // this cluster was the last one of the tile to arrive

#if EXL_IS_HOPPER
    // received_bytes: size of the partial sums that other warps and blocks send to this block.
    __device__ __forceinline__ void init_barriers(int slices, uint32_t received_bytes) {
        const int warp = uniform(threadIdx.x / kWarp);
        if (warp > kSmallBatchStages || !is_elected()) return;
        if (warp == kSmallBatchStages) {
            barrier_init(&sums_ready, 1);
            barrier_arrive_expecting(&sums_ready, received_bytes);
        } else {
            barrier_init(&full[warp], 1);
            barrier_init(&empty[warp], kConsumerWarps / slices);
        }
        fence_barrier_init();
    }
#endif
};

#if EXL_IS_HOPPER

// The producer warp.
template <int kRows>
class SmallBatchProducer {
  public:
    static constexpr int kBlockBytes = 64 * kRows;  // inputs of one block of 32 rows of k

    __device__ __forceinline__ SmallBatchProducer(
        const SmallBatchArgs& args, SmallBatchState& state, uint8_t* buffer, int lane
    )
        : args_(args), scheduler_(args), state_(state), buffer_(buffer), lane_(lane) {}

    __device__ __forceinline__ void run() {
        // Copies the weights of the first k-tile before the previous kernel has ended, and its
        // inputs afterwards. More weights are not requested early, because the inputs would queue
        // behind them.
        if (open_k_range()) issue(false);
        wait_for_inputs();
        if (issued_ > 0) copy_first_inputs();
        // The reader of sums does not wait for this kernel (exl_cuda_prepare_sums). All kernels
        // before this one have ended here.
        let_next_begin_if(args_.copies.count > 0);
        while (open_k_range()) {
            wait_for_space();
            issue(true);
        }
    }

  private:
    // Opens the next range of k-tiles that is not empty, unless one is open. Returns false after
    // the last one.
    __device__ __forceinline__ bool open_k_range() {
        if (is_open_) return true;
        KRange range;
        uint32_t tile, chunk;
        do {
            if (scheduler_.is_done(args_)) return false;
            range = scheduler_.k_range(args_, pair_index_);
            tile = scheduler_.tile, chunk = scheduler_.chunk;
            pair_index_ = args_.is_gated() ? 1 - pair_index_ : 0;
            if (pair_index_ == 0) scheduler_.advance(args_);
        } while (range.begin == range.end);
        const SmallBatchPart& part = args_.parts[range.part];
        next_ = static_cast<int>(range.begin);
        end_ = static_cast<int>(range.end);
        const int first_panel = args_.tile_panels() * static_cast<int>(tile);
        k_tiles_ = part.k_tiles;
        inputs_ = part.inputs + chunk * part.chunk_halves;
        header_bytes_ = part.header_bytes;
        num_panels_ = min(args_.tile_panels(), part.num_panels - first_panel);
        panel_bytes_ = part.panel_bytes;
        source_ = part.packed + first_panel * part.panel_bytes;
        is_open_ = true;
        const SmallBatchPart::FirstKTile& first = part.first[TileScheduler::split_rank(args_)];
        offset_ = first.offset;
        descriptor_ = first.descriptor;
        return true;
    }

    __device__ __forceinline__ void read_k_tile() {
        offset_ = uniform(__ldg(&k_tiles_[next_].offset));
        descriptor_ = uniform(__ldg(reinterpret_cast<const uint32_t*>(&k_tiles_[next_]) + 1));
    }

    // Size of the k-tile in one panel.
    __device__ __forceinline__ int k_tile_bytes() const {
        const int blocks = descriptor_ >> 24, bits = descriptor_ >> 16 & 0xff;
        return header_bytes_ + 128 * bits * blocks;
    }
    // Size of the inputs of the k-tile.
    __device__ __forceinline__ int input_bytes() const { return kBlockBytes * (descriptor_ >> 24); }

    // Waits for consumers to release stages until the next one fits into the circular buffer.
    __device__ __forceinline__ void wait_for_space() {
        const int size = args_.tile_panels() * k_tile_bytes() + input_bytes();
        for (;;) {
            if (issued_ - freed_ < kSmallBatchStages) {
                const bool wraps = write_ + size > args_.pipeline_bytes;
                if (has_wrapped_ ? !wraps && write_ + size <= read_ : !wraps || size <= read_) {
                    return;
                }
            }
            const uint32_t stage = freed_ % kSmallBatchStages;
            barrier_wait(&state_.empty[stage], freed_ / kSmallBatchStages & 1);
            if (state_.entries[stage].weights < read_) has_wrapped_ = false;
            read_ = state_.entries[stage].end;
            if (++freed_ == issued_) write_ = read_ = 0, has_wrapped_ = false;
        }
    }

    // Starts the copies of the k-tile into the next stage, for which there is space.
    __device__ __forceinline__ void issue(bool with_inputs) {
        const uint32_t stage = issued_ % kSmallBatchStages;
        const int size = k_tile_bytes(), inputs_bytes = input_bytes();
        const int total = args_.tile_panels() * size + inputs_bytes;
        const bool wraps = write_ + total > args_.pipeline_bytes;
        const int at = wraps ? 0 : write_;
        uint64_t* barrier = &state_.full[uniform(stage)];
        if (lane_ == 0) {
            state_.entries[stage] = {descriptor_, at, at + total - inputs_bytes, at + total};
            barrier_arrive_expecting(barrier, num_panels_ * size + inputs_bytes);
        }
        __syncwarp();
        // The addresses are warp-uniform. Per-lane addresses would cost about 60 cycles each.
        const uint8_t* source = source_ + offset_;
        const int each = static_cast<int>(uniform(size));
        int to = static_cast<int>(uniform(at));
#pragma unroll 4
        for (int i = 0; i < num_panels_; ++i, source += panel_bytes_, to += each) {
            if (is_elected()) {
                copy_weights(shared_offset(buffer_ + to), source, each, shared_offset(barrier));
            }
        }
        const __half* inputs = inputs_ + (descriptor_ & 0xffff) * (kBlockBytes / 2);
        if (!with_inputs) {
            first_inputs_ = inputs;
        } else if (is_elected()) {
            copy_bulk(buffer_ + at + total - inputs_bytes, inputs, inputs_bytes, barrier);
        }
        has_wrapped_ |= wraps;
        write_ = at + total;
        ++issued_;
        is_open_ = ++next_ < end_;
        if (is_open_) read_k_tile();
    }

    __device__ __forceinline__ void copy_first_inputs() {
        if (is_elected()) {
            const StageEntry entry = state_.entries[0];
            copy_bulk(
                buffer_ + entry.inputs, first_inputs_, entry.end - entry.inputs, &state_.full[0]
            );
        }
        __syncwarp();
    }

    const SmallBatchArgs& args_;
    TileScheduler scheduler_;  // tile of the next range
    SmallBatchState& state_;
    uint8_t* buffer_;
    int lane_;
    int pair_index_ = 0;
    // Range of k-tiles that is being copied.
    bool is_open_ = false;
    const ExlQuantKTile* k_tiles_ = nullptr;
    const __half* inputs_ = nullptr;
    const uint8_t* source_ = nullptr;  // address of the tile's first panel
    int64_t panel_bytes_ = 0;
    int header_bytes_ = 0, num_panels_ = 0;
    int next_ = 0, end_ = 0;  // next k-tile to copy, and the end of the range
    uint32_t descriptor_ = 0, offset_ = 0;
    // Circular buffer: number of stages issued and freed, and the positions up to which the
    // producer has written and the consumers have read.
    const __half* first_inputs_ = nullptr;
    uint32_t issued_ = 0, freed_ = 0;
    int write_ = 0, read_ = 0;
    bool has_wrapped_ = false;  // write_ has wrapped around to 0, read_ has not
};

#endif  // EXL_IS_HOPPER

}  // namespace exl::cuda

#endif  // __CUDACC__

// Weight pipeline of the decode kernel: copies k-tiles from global to shared memory, per warp.
//
// Every warp has a pipeline of its own and never waits for another warp. A stage holds one load:
// one k-tile, or several short k-tiles of the same shape, up to four blocks of 32 rows. All stages
// are in flight at once, also across the ends of output tiles. A load is one bulk copy on compute
// capability 9.0; earlier devices copy 16 bytes per lane (cp.async). An mbarrier per stage signals
// that the bytes have arrived (7.5 copies synchronously and has none).
//
// A load run is a sequence of loads of the same shape, one after the other in the panel. Its
// description is computed once and stored beside the stage that receives its first load.
#pragma once

#include "cuda/linear/quant_work.cuh"

namespace exl::cuda {

constexpr int kWarpBits = 3;
constexpr int kWarps = 1 << kWarpBits;  // of a thread block
constexpr int kMaxStages = 8;
constexpr int kStageBlocks = 4;  // blocks of a load, at most

// Description of a load run, and of its first load. `shape` holds, from bit 0: bit width (4 bits),
// k-tiles per load (4), blocks per k-tile (4), part (2), values (2), offset kind (3), float32 scales
// (1), and kIsLast. `position` holds the first block (16 bits) and the number of loads.
struct LoadRun {
    uint32_t shape;
    uint32_t position;

    static constexpr uint32_t kIsLast = 1u << 20;  // the run ends the warp's k-slice of a tile

    __device__ __forceinline__ static uint32_t part_shape(const QuantPart& part, int index) {
        return index << 12 | part.values << 14 | part.offset_kind << 16 |
               (part.scale_dtype == kF32) << 19;
    }
    __device__ __forceinline__ static uint32_t load_shape(int bits, int k_tiles, int blocks) {
        return bits | k_tiles << 4 | blocks << 8;
    }
    __device__ __forceinline__ static uint32_t position_of(uint32_t block, uint32_t count) {
        return block | count << 16;
    }
    __device__ __forceinline__ int bits() const { return shape & 15; }
    __device__ __forceinline__ int form() const {
        return has_small_groups(offset_kind()) ? small_form(bits())
                                               : form_of(bits(), shape >> 14 & 3);
    }
    __device__ __forceinline__ int k_tiles() const { return shape >> 4 & 15; }
    __device__ __forceinline__ int k_tile_blocks() const { return shape >> 8 & 15; }
    __device__ __forceinline__ int blocks() const { return k_tiles() * k_tile_blocks(); }
    __device__ __forceinline__ int part() const { return shape >> 12 & 3; }
    __device__ __forceinline__ int offset_kind() const { return shape >> 16 & 7; }
    __device__ __forceinline__ bool has_floats() const { return shape >> 19 & 1; }
    // Float16 scales and no stored offsets, as in EXL2.
    __device__ __forceinline__ bool is_plain() const { return (shape >> 16 & 15) == 0; }
    __device__ __forceinline__ bool is_last() const { return shape & kIsLast; }
    __device__ __forceinline__ bool is_empty() const { return k_tiles() == 0; }
    // One k-tile of four blocks per load, the most frequent shape.
    __device__ __forceinline__ bool is_full_k_tile() const { return (shape & 0xff0) == 0x410; }
    // First block, counted from the start of the matrix.
    __device__ __forceinline__ uint32_t block() const { return position & 0xffff; }
    __device__ __forceinline__ int count() const { return position >> 16; }
    // The last n loads of the run, as a run.
    __device__ __forceinline__ LoadRun last(int n) const {
        return {shape, position_of(block() + (count() - n) * blocks(), n)};
    }
};

// Shared memory of one warp beside its stages.
struct PipelineState {
    LoadRun load_runs[kMaxStages];  // valid for stages that hold the first load of a run
    uint64_t barriers[kMaxStages];
};

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
#endif

// Pipeline of one warp. The constructor issues loads into all stages.
class WeightPipeline {
  public:
    __device__ __forceinline__ WeightPipeline(
        const QuantLinearArgs& args, PipelineState* state, uint8_t* buffers, int warp, int lane
    )
        : args_(args),
          state_(state),
          buffers_(buffers),
          warp_(warp),
          lane_(lane),
          tile_(blockIdx.x >> args.split_bits) {
#if __CUDA_ARCH__ >= 900
        if (is_elected()) {
#pragma unroll
            for (uint64_t& barrier : state->barriers) init_barrier(&barrier, 1);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif __CUDA_ARCH__ >= 800
        if (lane < kMaxStages) init_barrier(&state->barriers[lane], kWarp);
#endif
        __syncwarp();
        for (int stage = 0; stage < args.num_stages; ++stage) {
            if (needs_load_run()) open_load_run(stage);
            issue(stage);
        }
    }

    // The load run that begins in the current stage; its bytes may still be in flight. It is empty
    // after the last load.
    __device__ __forceinline__ LoadRun front() const { return load_run_at(stage_); }
    // The load run that begins in the next stage. Empty if the pipeline has one stage only: there
    // the next load is not known before `release`.
    __device__ __forceinline__ LoadRun next() const {
        if (args_.num_stages == 1) return {0, 0};
        return load_run_at(stage_ + 1 == args_.num_stages ? 0 : stage_ + 1);
    }
    __device__ __forceinline__ const uint8_t* data() const {
        return buffers_ + stage_ * args_.stage_bytes;
    }
    // Waits until the bytes of the current stage have arrived.
    __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 800
        const uint32_t barrier = shared_address(&state_->barriers[stage_]);
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
    // Returns whether `release` has to open a load run. The consumer loop tests it and calls
    // `release<true>` at one place only, because `open_load_run` is long and is inlined there.
    __device__ __forceinline__ bool needs_load_run() const {
        return loads_left_ == 0 && tile_ < args_.num_tiles;
    }
    // Returns whether the next load to be issued belongs to the same run as the previous one.
    __device__ __forceinline__ bool continues_run() const { return loads_left_ > 0; }
    // Releases the current stage, whose bytes have all been read, issues the next load into it and
    // advances to the next stage. may_open: opens a new load run if the current one has ended.
    template <bool may_open>
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (may_open && needs_load_run()) open_load_run(stage_);
        issue(stage_);
        advance();
    }
    // Shorter version of `release` for the case that `continues_run` is true.
    __device__ __forceinline__ void release_in_run() {
        __syncwarp();
        issue_next(stage_);
        advance();
    }

  private:
    __device__ __forceinline__ void advance() {
        const bool wraps = ++stage_ == args_.num_stages;
        if (wraps) stage_ = 0;
        phase_ ^= wraps;
    }

    __device__ __forceinline__ LoadRun load_run_at(int stage) const {
        __syncwarp();
        const LoadRun& run = state_->load_runs[stage];
        return {uniform(run.shape), uniform(run.position)};
    }

    // Starts the copy of the next load. Without one, marks the stage as empty.
    __device__ __forceinline__ void issue(int stage) {
        if (loads_left_ == 0) {
            if (lane_ == 0) state_->load_runs[stage] = {0, 0};
            return;
        }
        issue_next(stage);
    }
    __device__ __forceinline__ void issue_next(int stage) {
        --loads_left_;
        copy(stage, load_bytes_);
        source_ += load_bytes_;
    }

    // Determines the next load run and stores its description for `stage`.
    __device__ __forceinline__ void open_load_run(int stage) {
        if (run_left_ == 0) {
            if (slice_left_ > 0) {
                const QuantPart& part = args_.parts[part_];
                ++run_;
                open_run(part, run_at(part, run_).first_k_tile);
                in_group_ = 0;
            } else {
                open_k_slice();
            }
        }
        int k_tiles = 1, blocks = last_blocks_, count = 1;
        if (group_k_tiles_ == 1) {
            k_tiles = min(load_k_tiles_, run_left_);
            if (k_tiles > 0) count = run_left_ / k_tiles;
        } else if (last_blocks_ == kStageBlocks) {
            count = run_left_;
        } else if (in_group_ + 1 < group_k_tiles_) {
            blocks = kStageBlocks;
            count = min(group_k_tiles_ - 1 - in_group_, run_left_);
            in_group_ += count;
        } else {
            in_group_ = 0;
        }
        loads_left_ = count;
        load_bytes_ = k_tiles * (header_bytes_ + 128 * bits_ * blocks);
        run_left_ -= count * k_tiles;
        const bool is_at_end = run_left_ == 0 && slice_left_ == 0;
        if (is_at_end) tile_ += gridDim.x >> args_.split_bits;
        if (lane_ == 0) {
            const uint32_t shape = LoadRun::load_shape(k_tiles > 0 ? bits_ : 0, k_tiles, blocks);
            state_->load_runs[stage] = {
                part_shape_ | shape | (is_at_end ? LoadRun::kIsLast : 0),
                LoadRun::position_of(block_, count)
            };
        }
        block_ += count * k_tiles * blocks;
    }

    // Begins this warp's k-slice of the output tile `tile_`. A warp whose panel does not exist, or
    // whose slice is empty, gets one load without k-tiles.
    __device__ __forceinline__ void open_k_slice() {
        const PanelLocation location(
            args_, TileLocation(args_, tile_), warp_ & (args_.panels() - 1)
        );
        const QuantPart& part = args_.parts[location.part];
        const int slice_bits = kWarpBits - args_.panel_bits + args_.split_bits;
        const uint32_t rank = blockIdx.x & (args_.splits() - 1);
        const uint32_t slice = (rank << kWarpBits | warp_) >> args_.panel_bits;
        const uint32_t first = part.num_k_tiles * slice >> slice_bits;
        slice_left_ = static_cast<int>((part.num_k_tiles * (slice + 1) >> slice_bits) - first);
        if (location.panel >= part.num_panels) slice_left_ = 0;
        part_ = location.part;
        part_shape_ = LoadRun::part_shape(part, location.part);
        header_bytes_ = part.header_bytes;
        if (slice_left_ == 0) {
            load_k_tiles_ = 0, group_k_tiles_ = 1;
            return;
        }
        run_ = find_run(part, first);
        const ExlQuantRun run = run_at(part, run_);
        const uint32_t in_run = first - run.first_k_tile;
        const uint32_t groups = run.group_k_tiles == 1 ? in_run : in_run / run.group_k_tiles;
        const uint32_t in_group = in_run - groups * run.group_k_tiles;
        const uint32_t group_blocks = (run.group_k_tiles - 1) * kStageBlocks + run.last_blocks;
        const uint32_t blocks = groups * group_blocks + in_group * kStageBlocks;
        block_ = run.first_block + blocks;
        source_ = part.packed + static_cast<int64_t>(location.panel) * part.panel_bytes +
                  run.offset + in_run * header_bytes_ + blocks * 128 * run.bits;
        open_run(part, first);
        in_group_ = static_cast<int>(in_group);
    }

    // Begins run number `run_` of the part at a k-tile.
    __device__ __forceinline__ void open_run(const QuantPart& part, uint32_t k_tile) {
        const ExlQuantRun run = run_at(part, run_);
        const uint32_t end =
            run_ + 1 < part.num_runs ? run_at(part, run_ + 1).first_k_tile : part.num_k_tiles;
        bits_ = run.bits;
        group_k_tiles_ = run.group_k_tiles;
        last_blocks_ = run.last_blocks;
        load_k_tiles_ = last_blocks_ == 1 ? 4 : last_blocks_ == 2 ? 2 : 1;  // at most kStageBlocks
        run_left_ = min(static_cast<int>(end - k_tile), slice_left_);
        slice_left_ -= run_left_;
    }

    __device__ __forceinline__ void copy(int stage, int size) {
        const uint32_t to = shared_address(buffers_ + stage * args_.stage_bytes);
        const uint32_t barrier = shared_address(&state_->barriers[stage]);
#if __CUDA_ARCH__ >= 900
        if (is_elected()) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(size)
                         : "memory");
            if (size > 0) copy_weights(to, source_, size, barrier);
        }
#else
        for (int byte = 16 * lane_; byte < size; byte += 16 * kWarp) {
            copy_async_16(buffers_ + stage * args_.stage_bytes + byte, source_ + byte);
        }
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
#endif
    }

    const QuantLinearArgs& args_;
    PipelineState* state_;
    uint8_t* buffers_;
    uint32_t warp_;
    int lane_;
    // The next load to be issued: its output tile, part, address and first block.
    uint32_t tile_;
    uint32_t part_shape_ = 0;
    int part_ = 0, header_bytes_ = 0;
    int slice_left_ = 0;  // k-tiles of the k-slice after the current run
    const uint8_t* source_ = nullptr;
    uint32_t block_ = 0;
    // Current run (ExlQuantRun): run_left_ of its k-tiles are left in the k-slice, and a load takes
    // load_k_tiles_ of them if each k-tile is a whole group.
    int run_ = 0, run_left_ = 0, bits_ = 0, group_k_tiles_ = 1, last_blocks_ = 1, load_k_tiles_ = 0;
    int in_group_ = 0;  // k-tiles of the current group that precede the next load
    // Current load run: loads to be issued, and the bytes of each.
    int loads_left_ = 0, load_bytes_ = 0;
    // Stage to be consumed next, and the parity of its barrier's phase.
    int stage_ = 0;
    uint32_t phase_ = 0;
};

#endif  // __CUDACC__

}  // namespace exl::cuda

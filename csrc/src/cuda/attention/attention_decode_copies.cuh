// Work item of one block of attention_decode_kernel.cuh, and the copies of its keys and values to
// shared memory.
#pragma once

#include "cuda/attention/attention_decode_step.cuh"
#include "cuda/common/hopper.cuh"

namespace exl::cuda {

// Rows and keys of one block. `splits` is 0 if the block has no work.
struct WorkItem {
    int seq;
    int first_row;  // in the pass
    int vectors;    // rows times query heads of the group
    int first_position;
    int rows;
    int begin_key;  // keys begin_key .. end_key - 1 are seen by at least one row
    int end_key;
    int past_len;  // keys before this one were written by earlier passes
    int splits;    // blocks that share these keys
    int split;     // this block's number, from first_split on
    int first_split;
    int begin;  // this block's steps are begin .. end - 1
    int end;
    // Batch-invariant mode: steps of each chain of the partition, and the first step of the first
    // one.
    int chain_steps;
    int first_step;
};

// Steps of one warp: begin, begin + stride, ... before end.
struct WarpSteps {
    int begin, stride, end;
};

// Normally the warps take turns. In the batch-invariant mode each takes a chain, of which the steps
// before work.begin are left out: no row sees their keys.
template <bool is_invariant>
__device__ __forceinline__ WarpSteps steps_of(const WorkItem& work, int warp, int warps) {
    if constexpr (!is_invariant) return {work.begin + warp, warps, work.end};
    const int first = work.first_step + warp * work.chain_steps;
    const int end = warp == warps - 1 ? work.end : min(work.end, first + work.chain_steps);
    return {max(work.begin, first), 1, end};
}

// Sets the split of a block: in the batch-invariant mode a partition.
__device__ __forceinline__ void set_partition(WorkItem& work, int step_keys, int warps) {
    const int first = partition_of(work.begin_key), last = partition_of(work.end_key - 1);
    const int split = static_cast<int>(blockIdx.x);
    if (split < first || split > last) return;
    work.splits = last - first + 1;
    work.split = split;
    work.first_split = first;
    work.begin = max(partition_begin(split), work.begin_key) / step_keys;
    work.end = (min(work.end_key, partition_begin(split + 1)) + step_keys - 1) / step_keys;
    work.chain_steps = chain_keys(split, warps) / step_keys;
    work.first_step = partition_begin(split) / step_keys;
}

template <bool is_invariant>
__device__ __forceinline__ WorkItem work_item_of(
    const AttentionParams& params, int queries, int step_keys, int warps
) {
    WorkItem work = {};
    const int tile_rows = queries / params.group;
    const int item = params.first_item + static_cast<int>(blockIdx.z);
    const int seq = work.seq = item / params.row_tiles;
    const int seq_begin = uniform(params.row_starts[seq]);
    const int seq_rows = uniform(params.row_starts[seq + 1]) - seq_begin;
    const int first = item % params.row_tiles * tile_rows;
    if (seq_rows > kDecodeRows || first >= seq_rows) return work;
    work.first_row = seq_begin + first;
    work.rows = min(tile_rows, seq_rows - first);
    work.vectors = work.rows * params.group;
    work.past_len = uniform(params.past_lens[seq]);
    work.first_position = work.past_len + first;
    work.end_key = work.first_position + work.rows;
    work.begin_key = params.window > 0 ? max(0, work.first_position - params.window + 1) : 0;
    if constexpr (is_invariant) {
        set_partition(work, step_keys, warps);
        return work;
    }
    const int first_step = work.begin_key / step_keys;
    const int steps = (work.end_key + step_keys - 1) / step_keys - first_step;
    const int min_steps = min(kMinSteps, warps);
    const bool is_short = work.end_key - work.begin_key <= kUnsplitKeys;
    const unsigned splits = is_short ? 1 : min(params.splits, (steps + min_steps - 1) / min_steps);
    const unsigned split = blockIdx.x;
    if (split >= splits) return work;
    work.splits = static_cast<int>(splits);
    work.split = static_cast<int>(split);
    work.begin = first_step + static_cast<unsigned>(steps) * split / splits;
    work.end = first_step + static_cast<unsigned>(steps) * (split + 1) / splits;
    return work;
}

__device__ __forceinline__ const int32_t* pages_of(
    const AttentionParams& params, const WorkItem& work
) {
    return params.page_table + static_cast<int64_t>(work.seq) * params.table_stride;
}

// Each warp prefetches the keys and values of its own steps (no producer warp).
template <int key_type, int value_type, int width, bool has_producer, bool is_invariant>
class StepCopies {
    using Shape = DecodeShape<key_type, value_type, width, 1>;
    static constexpr int kKeys = Shape::kKeys;

  public:
    __device__ __forceinline__ StepCopies(
        const AttentionParams& params, const WorkItem& work, uint8_t* staged, int warp, int warps,
        int lane
    )
        : params_(params),
          work_(work),
          pages_(pages_of(params, work)),
          staged_(staged + warp * params.stages * Shape::kStepBytes),
          lane_(lane),
          steps_(steps_of<is_invariant>(work, warp, warps)),
          copy_stage_(params.stages - 1) {
        if (params.d == width) return;
        clear(staged_, params.stages * Shape::kStepBytes, lane, kWarp);
        __syncwarp();
    }

    __device__ __forceinline__ void produce() const {}
    __device__ __forceinline__ void prefetch_past() const {
        for (int stage = 0; stage < params_.stages - 1; ++stage) {
            const int step = steps_.begin + stage * steps_.stride;
            if ((step + 1) * kKeys <= work_.past_len) start_copy(step, stage);
        }
    }
    __device__ __forceinline__ void prefetch_new() {
        for (int stage = 0; stage < params_.stages - 1; ++stage, steps_.begin += steps_.stride) {
            if ((steps_.begin + 1) * kKeys > work_.past_len) start_copy(steps_.begin, stage);
            commit_copies();
        }
    }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    // Waits for the rows of the next step and returns them.
    __device__ __forceinline__ uint8_t* acquire() {
        start_copy(steps_.begin, copy_stage_);
        commit_copies();
        steps_.begin += steps_.stride;
        copy_stage_ = copy_stage_ + 1 == params_.stages ? 0 : copy_stage_ + 1;
        if (params_.stages >= kMaxStages) {
            wait_copies<kMaxStages - 1>();
        } else if (params_.stages == 2) {
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncwarp();
        return staged_ + stage_ * Shape::kStepBytes;
    }
    // Frees the buffer of the current step. No lane reads its rows afterwards.
    __device__ __forceinline__ void release() {
        __syncwarp();
        stage_ = stage_ + 1 == params_.stages ? 0 : stage_ + 1;
    }
    __device__ __forceinline__ void fence() const {}
    __device__ __forceinline__ void finish() const { wait_copies<0>(); }

  private:
    __device__ __forceinline__ void start_copy(int step, int stage) const {
        if (step >= steps_.end) return;
        uint8_t* to = staged_ + stage * Shape::kStepBytes;
        if (1 << params_.page_bits >= kKeys) {  // the whole step is in one page
            copy<kKeys>(to, to + Shape::kKeyBytes, step * kKeys);
            return;
        }
        for (int c = 0; c < Shape::kChunks; ++c) {
            const int position = step * kKeys + c * kChunk;
            if (position >= work_.end_key || position + kChunk <= work_.begin_key) continue;
            copy<kChunk>(
                to + c * kChunk * staged_bytes(key_type, width),
                to + Shape::kKeyBytes + c * kChunk * staged_bytes(value_type, width), position
            );
        }
    }
    template <int rows>
    __device__ __forceinline__ void copy(uint8_t* keys, uint8_t* values, int position) const {
        const int64_t row = cache_row(params_, pages_, blockIdx.y, position);
        copy_rows<key_type, width, rows>(keys, params_.key_cache, row, params_.d, lane_);
        copy_rows<value_type, width, rows>(values, params_.value_cache, row, params_.d, lane_);
    }

    const AttentionParams& params_;
    const WorkItem& work_;
    const int32_t* pages_;
    uint8_t* staged_;
    int lane_;
    WarpSteps steps_;  // that are still to be copied
    int copy_stage_;   // of the next one
    int stage_ = 0;    // of the current step
};

#if EXL_IS_HOPPER
// A producer warp copies for all warps that compute. This requires that the keys of a step, and its
// values, are contiguous in the cache exactly as they are staged, so that one bulk copy each is
// enough. Every stage of every warp has two mbarriers: the stage is full; the stage is free.
template <int key_type, int value_type, int width, bool is_invariant>
class StepCopies<key_type, value_type, width, true, is_invariant> {
    using Shape = DecodeShape<key_type, value_type, width, 1>;
    static constexpr int kStartBarrier = 1;  // named barrier of the block

  public:
    __device__ __forceinline__ StepCopies(
        const AttentionParams& params, const WorkItem& work, uint8_t* staged, int warp, int warps,
        int lane
    )
        : params_(params),
          work_(work),
          staged_(staged),
          barriers_(reinterpret_cast<uint64_t*>(staged - Shape::kBarrierBytes)),
          warp_(warp),
          warps_(warps),
          lane_(lane) {}

    // Body of the producer warp.
    __device__ __forceinline__ void produce() const {
        if (is_elected()) {
#pragma unroll 8
            for (int i = 0; i < 2 * kDecodeWarps * kMaxStages; ++i) barrier_init(barriers_ + i, 1);
        }
        fence_barrier_init();
        __syncwarp();
        asm volatile("bar.arrive %0, %1;" ::"n"(kStartBarrier), "r"(blockDim.x) : "memory");
        const int32_t* pages = pages_of(params_, work_);
        const bool is_reread = work_.end_key - work_.begin_key <= kL2Keys;
        const uint64_t hint = is_reread ? kEvictNormal : kEvictFirst;
        if constexpr (is_invariant) {
            produce_chains(pages, hint);
            return;
        }
        int warp = 0, stage = 0;
        uint32_t parity = 1;  // of the phase before a barrier's first one, which counts as complete
        bool has_inputs = false;
        for (int step = work_.begin; step < work_.end; ++step) {
            if (!has_inputs && is_new(step)) {
                wait_for_inputs();
                has_inputs = true;
            }
            copy_step(step, warp, stage, parity, pages, hint);
            if (++warp < warps_) continue;
            warp = 0;
            if (++stage < params_.stages) continue;
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ void prefetch_past() const {}
    __device__ __forceinline__ void prefetch_new() const {}
    // The producer warp has arrived at this barrier once the mbarriers were initialized.
    __device__ __forceinline__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"n"(kStartBarrier), "r"(blockDim.x) : "memory");
    }
    __device__ __forceinline__ uint8_t* acquire() const {
        barrier_wait(full_barrier(warp_, stage_), parity_);
        return stage_of(warp_, stage_);
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (lane_ == 0) barrier_arrive(free_barrier(warp_, stage_));
        if (++stage_ < params_.stages) return;
        stage_ = 0;
        parity_ ^= 1;
    }
    __device__ __forceinline__ void fence() const { fence_copies(); }
    __device__ __forceinline__ void finish() const {}  // every copy has been waited for already

  private:
    // True if the step has keys of this pass.
    __device__ __forceinline__ bool is_new(int step) const {
        return (step + 1) * Shape::kKeys > work_.past_len;
    }
    // Copies the first steps of all chains, those with new keys last: they are written by the
    // previous kernel. The other steps follow, one of each chain in turn.
    __device__ __forceinline__ void produce_chains(const int32_t* pages, uint64_t hint) const {
        // Lane l holds the steps of warp l.
        const WarpSteps own = steps_of<true>(work_, min(lane_, warps_ - 1), warps_);
        const int rounds = static_cast<int>(
            __reduce_max_sync(0xffffffffu, static_cast<unsigned>(max(own.end - own.begin, 0)))
        );
        const auto copy_rounds = [&](int first, int last, bool has_new, bool has_old) {
            int stage = first % params_.stages;
            uint32_t parity = first / params_.stages % 2 == 0 ? 1 : 0;
#pragma unroll 1
            for (int round = first; round < last; ++round) {
#pragma unroll 1
                for (int warp = 0; warp < warps_; ++warp) {
                    const int step = __shfl_sync(0xffffffffu, own.begin, warp) + round;
                    const int end = __shfl_sync(0xffffffffu, own.end, warp);
                    const bool is_wanted = is_new(step) ? has_new : has_old;
                    if (step < end && is_wanted) copy_step(step, warp, stage, parity, pages, hint);
                }
                if (++stage < params_.stages) continue;
                stage = 0;
                parity ^= 1;
            }
        };
        const int ahead = min(rounds, params_.stages);
        copy_rounds(0, ahead, false, true);
        wait_for_inputs();
        copy_rounds(0, ahead, true, false);
        copy_rounds(ahead, rounds, true, true);
    }
    __device__ __forceinline__ void copy_step(
        int step, int warp, int stage, uint32_t parity, const int32_t* pages, uint64_t hint
    ) const {
        const int position = step * Shape::kKeys;
        const uint32_t page = uniform(pages[position >> params_.page_bits]);
        const int offset = position & ((1 << params_.page_bits) - 1);
        const int64_t head = static_cast<int64_t>(page) * params_.kv_heads + blockIdx.y;
        const int64_t row = (head << params_.page_bits) + offset;
        const uint32_t to = shared_offset(stage_of(warp, stage));
        constexpr int kKeyBytes = Shape::kKeyBytes, kValueBytes = Shape::kStepBytes - kKeyBytes;
        barrier_wait(free_barrier(warp, stage), parity);
        if (!is_elected()) return;
        uint64_t* full = full_barrier(warp, stage);
        barrier_arrive_expecting(full, Shape::kStepBytes);
        copy_run(
            to, params_.key_cache + row * staged_bytes(key_type, width), kKeyBytes,
            shared_offset(full), hint
        );
        copy_run(
            to + kKeyBytes, params_.value_cache + row * staged_bytes(value_type, width),
            kValueBytes, shared_offset(full), hint
        );
    }
    __device__ __forceinline__ uint8_t* stage_of(int warp, int stage) const {
        return staged_ + (warp * params_.stages + stage) * Shape::kStepBytes;
    }
    __device__ __forceinline__ uint64_t* full_barrier(int warp, int stage) const {
        return barriers_ + warp * kMaxStages + stage;
    }
    __device__ __forceinline__ uint64_t* free_barrier(int warp, int stage) const {
        return full_barrier(kDecodeWarps + warp, stage);
    }

    const AttentionParams& params_;
    const WorkItem& work_;
    uint8_t* staged_;
    uint64_t* barriers_;
    int warp_, warps_, lane_;
    int stage_ = 0;
    uint32_t parity_ = 0;
};
#endif

}  // namespace exl::cuda

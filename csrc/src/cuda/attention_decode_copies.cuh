// What a block of attention_decode_kernel.cuh has to do, and how its keys and values come.
#pragma once

#include "attention_decode_step.cuh"
#include "hopper.cuh"

namespace exl::cuda {

// A block's rows and keys. Nothing to do where `splits` is 0.
struct Piece {
    int first_row;  // of the pass
    int vectors;    // rows times the group's heads
    int first_position;
    int rows;
    int begin_key;  // what any of the rows sees
    int end_key;
    int known;   // keys before this one are of earlier passes
    int splits;  // that share these keys
    int begin;   // steps of this one
    int end;
};

__device__ __forceinline__ Piece piece_of(
    const AttentionParams& params, int queries, int step_keys, int warps
) {
    Piece piece = {};
    const int seq = static_cast<int>(blockIdx.z) / params.row_tiles;
    const int tile_rows = queries / params.group;
    const int seq_begin = uniform(params.row_starts[seq]);
    const int seq_rows = uniform(params.row_starts[seq + 1]) - seq_begin;
    const int first = static_cast<int>(blockIdx.z) % params.row_tiles * tile_rows;
    if (seq_rows > kFewRows || first >= seq_rows) return piece;
    piece.first_row = seq_begin + first;
    piece.rows = min(tile_rows, seq_rows - first);
    piece.vectors = piece.rows * params.group;
    piece.known = uniform(params.past_lens[seq]);
    piece.first_position = piece.known + first;
    piece.end_key = piece.first_position + piece.rows;
    piece.begin_key = params.window > 0 ? max(0, piece.first_position - params.window + 1) : 0;
    const int first_step = piece.begin_key / step_keys;
    const int steps = (piece.end_key + step_keys - 1) / step_keys - first_step;
    const int least = min(kLeastSteps, warps);
    const bool is_alone = piece.end_key - piece.begin_key <= kAloneKeys;
    const unsigned splits = is_alone ? 1 : min(params.splits, (steps + least - 1) / least);
    const unsigned split = blockIdx.x;
    if (split >= splits) return piece;
    piece.splits = static_cast<int>(splits);
    piece.begin = first_step + static_cast<unsigned>(steps) * split / splits;
    piece.end = first_step + static_cast<unsigned>(steps) * (split + 1) / splits;
    return piece;
}

__device__ __forceinline__ const int32_t* pages_of(const AttentionParams& params) {
    const int seq = static_cast<int>(blockIdx.z) / params.row_tiles;
    return params.page_table + static_cast<int64_t>(seq) * params.table_stride;
}

// Keys and values of a warp's own steps, which it copies ahead by itself.
template <int key_type, int value_type, int width, bool is_runs>
class StepCopies {
    using Shape = DecodeShape<key_type, value_type, width, 1>;
    static constexpr int kKeys = Shape::kKeys;

public:
    __device__ __forceinline__ StepCopies(
        const AttentionParams& params, const Piece& piece, uint8_t* staged, int warp, int warps,
        int lane
    )
        : params_(params), piece_(piece), pages_(pages_of(params)),
          staged_(staged + warp * params.stages * Shape::kStepBytes), lane_(lane), warps_(warps),
          next_(piece.begin + warp), free_(params.stages - 1) {
        if (params.d == width) return;
        clear(staged_, params.stages * Shape::kStepBytes, lane, kWarp);
        __syncwarp();
    }

    __device__ __forceinline__ void run() const {}
    __device__ __forceinline__ void begin_known() const {
        for (int stage = 0; stage < params_.stages - 1; ++stage) {
            const int step = next_ + stage * warps_;
            if ((step + 1) * kKeys <= piece_.known) begin(step, stage);
        }
    }
    __device__ __forceinline__ void begin_others() {
        for (int stage = 0; stage < params_.stages - 1; ++stage, next_ += warps_) {
            if ((next_ + 1) * kKeys > piece_.known) begin(next_, stage);
            commit_copies();
        }
    }
    __device__ __forceinline__ void meet() const { __syncthreads(); }
    // The rows of the next step, when they have come.
    __device__ __forceinline__ uint8_t* take() {
        begin(next_, free_);
        commit_copies();
        next_ += warps_;
        free_ = free_ + 1 == params_.stages ? 0 : free_ + 1;
        if (params_.stages >= kMostStages) {
            wait_copies<kMostStages - 1>();
        } else if (params_.stages == 2) {
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncwarp();
        return staged_ + stage_ * Shape::kStepBytes;
    }
    // Nobody reads the step's rows any more.
    __device__ __forceinline__ void give_back() {
        __syncwarp();
        stage_ = stage_ + 1 == params_.stages ? 0 : stage_ + 1;
    }
    __device__ __forceinline__ void fence() const {}
    __device__ __forceinline__ void finish() const { wait_copies<0>(); }

private:
    __device__ __forceinline__ void begin(int step, int stage) const {
        if (step >= piece_.end) return;
        uint8_t* to = staged_ + stage * Shape::kStepBytes;
        if (1 << params_.page_bits >= kKeys) {  // all of it in one page
            copy<kKeys>(to, to + Shape::kKeyBytes, step * kKeys);
            return;
        }
        for (int c = 0; c < Shape::kChunks; ++c) {
            const int position = step * kKeys + c * kChunk;
            if (position >= piece_.end_key || position + kChunk <= piece_.begin_key) continue;
            copy<kChunk>(to + c * kChunk * staged_bytes(key_type, width),
                         to + Shape::kKeyBytes + c * kChunk * staged_bytes(value_type, width),
                         position);
        }
    }
    template <int rows>
    __device__ __forceinline__ void copy(uint8_t* keys, uint8_t* values, int position) const {
        const int64_t row = cache_row(params_, pages_, blockIdx.y, position);
        copy_rows<key_type, width, rows>(keys, params_.key_cache, row, params_.d, lane_);
        copy_rows<value_type, width, rows>(values, params_.value_cache, row, params_.d, lane_);
    }

    const AttentionParams& params_;
    const Piece& piece_;
    const int32_t* pages_;
    uint8_t* staged_;
    int lane_, warps_;
    int next_;  // the step that is copied next, and where to
    int free_;
    int stage_ = 0;  // of the step at hand
};

#if EXL_IS_HOPPER
// Where a step's keys, and its values, lie on end as they are staged: a bulk copy each, which a warp
// beside those that compute begins. Barriers say of each stage of each warp that it is full, and that
// it can be filled again.
template <int key_type, int value_type, int width>
class StepCopies<key_type, value_type, width, true> {
    using Shape = DecodeShape<key_type, value_type, width, 1>;
    static constexpr int kMeeting = 1;  // of the block's barriers

public:
    __device__ __forceinline__ StepCopies(
        const AttentionParams& params, const Piece& piece, uint8_t* staged, int warp, int warps,
        int lane
    )
        : params_(params), piece_(piece), staged_(staged),
          barriers_(reinterpret_cast<uint64_t*>(staged - Shape::kBarrierBytes)), warp_(warp),
          warps_(warps), lane_(lane) {}

    // The copying warp's part.
    __device__ __forceinline__ void run() const {
        for (int i = lane_; i < 2 * kDecodeWarps * kMostStages; i += kWarp) {
            barrier_init(barriers_ + i, 1);
        }
        fence_barrier_init();
        __syncwarp();
        asm volatile("bar.arrive %0, %1;" ::"n"(kMeeting), "r"(blockDim.x) : "memory");
        const int32_t* pages = pages_of(params_);
        const bool is_reread = piece_.end_key - piece_.begin_key <= kRereadKeys;
        const uint64_t hint = is_reread ? kEvictNormal : kEvictFirst;
        int warp = 0, stage = 0;
        uint32_t parity = 1;  // of the phase before a barrier's first one, which is over
        bool has_inputs = false;
        for (int step = piece_.begin; step < piece_.end; ++step) {
            if (!has_inputs && (step + 1) * Shape::kKeys > piece_.known) {
                wait_for_inputs();
                has_inputs = true;
            }
            const int position = step * Shape::kKeys;
            const uint32_t page = uniform(pages[position >> params_.page_bits]);
            const int offset = position & ((1 << params_.page_bits) - 1);
            const int64_t head = static_cast<int64_t>(page) * params_.kv_heads + blockIdx.y;
            const int64_t row = (head << params_.page_bits) + offset;
            const uint32_t to = shared_offset(stage_of(warp, stage));
            constexpr int kKeyBytes = Shape::kKeyBytes, kValueBytes = Shape::kStepBytes - kKeyBytes;
            barrier_wait(free_barrier(warp, stage), parity);
            if (lane_ == 0) {
                uint64_t* full = full_barrier(warp, stage);
                barrier_arrive_expecting(full, Shape::kStepBytes);
                copy_run(to, params_.key_cache + row * staged_bytes(key_type, width), kKeyBytes,
                         shared_offset(full), hint);
                copy_run(to + kKeyBytes, params_.value_cache + row * staged_bytes(value_type, width),
                         kValueBytes, shared_offset(full), hint);
            }
            if (++warp < warps_) continue;
            warp = 0;
            if (++stage < params_.stages) continue;
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ void begin_known() const {}
    __device__ __forceinline__ void begin_others() const {}
    // The copying warp was there when barriers had been begun.
    __device__ __forceinline__ void meet() const {
        asm volatile("bar.sync %0, %1;" ::"n"(kMeeting), "r"(blockDim.x) : "memory");
    }
    __device__ __forceinline__ uint8_t* take() const {
        barrier_wait(full_barrier(warp_, stage_), parity_);
        return stage_of(warp_, stage_);
    }
    __device__ __forceinline__ void give_back() {
        __syncwarp();
        if (lane_ == 0) barrier_arrive(free_barrier(warp_, stage_));
        if (++stage_ < params_.stages) return;
        stage_ = 0;
        parity_ ^= 1;
    }
    __device__ __forceinline__ void fence() const { fence_copies(); }
    __device__ __forceinline__ void finish() const {}  // what was begun was taken

private:
    __device__ __forceinline__ uint8_t* stage_of(int warp, int stage) const {
        return staged_ + (warp * params_.stages + stage) * Shape::kStepBytes;
    }
    __device__ __forceinline__ uint64_t* full_barrier(int warp, int stage) const {
        return barriers_ + warp * kMostStages + stage;
    }
    __device__ __forceinline__ uint64_t* free_barrier(int warp, int stage) const {
        return full_barrier(kDecodeWarps + warp, stage);
    }

    const AttentionParams& params_;
    const Piece& piece_;
    uint8_t* staged_;
    uint64_t* barriers_;
    int warp_, warps_, lane_;
    int stage_ = 0;
    uint32_t parity_ = 0;
};
#endif

}  // namespace exl::cuda

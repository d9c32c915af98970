// y[m, n] = x[m, k] @ w (+ bias) for quantized w: the many-rows kernel, for prompts in the
// batch-invariant mode on compute capability 9.0.
//
// Contract   exl/cuda/linear.h. The results have the bits of the small-batch kernel
//            (quant_small_batch.cu), which computes fewer rows.
// Floor      2 * m * n * k operations divided by the throughput of the tensor cores.
// Mapping    The grid has one thread block per multiprocessor. A block loops over output tiles of
//            64 rows and 8 column panels, and computes all of k for each. A producer warp copies
//            k-tiles and their inputs into the stages of a pipeline. Eight consumer warps, two
//            warpgroups, have one panel each and multiply with wgmma
//            (quant_small_batch_k_tile.cuh).
// Accuracy   The small-batch kernel divides k among slices and thread blocks, and adds up their
//            partial sums in a fixed order. This kernel computes the same partial sums one after
//            the other, each from zero over the same k-tiles, and adds them up in the same order.
// Overlap    The producer runs ahead into the next output tile. Blocks at the same time work on
//            chunks of the same tile, so that they share weights in the L2 cache.
#include <algorithm>

#include "cuda/linear/quant_many_rows.cuh"
#include "cuda/linear/quant_small_batch_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int kRows = EXL_CUDA_CHUNK_ROWS;
constexpr int kTilePanels = 8;
constexpr int kManyRowsThreads = kConsumerThreads + kWarp;
constexpr int kBlockInputBytes = 64 * kRows;  // inputs of one block of 32 rows of k
constexpr int kGateSumsBytes = kRows / 4 * kConsumerThreads * static_cast<int>(sizeof(float4));

struct ManyRowsArgs {
    // One slice and one split: the output tiles are those of blocks that compute all of k.
    SmallBatchArgs common;
    // Partition of k of the small-batch kernel.
    uint32_t num_partials;  // splits times slices
    uint32_t slice_bits;
    int32_t num_stages;
    int32_t stage_bytes;
    // Offsets in shared memory, after the stages.
    int32_t gate_sums_offset;
    int32_t state_offset;
};

struct ManyRowsState {
    StageEntry entries[kSmallBatchStages];
    uint64_t full[kSmallBatchStages];
    uint64_t empty[kSmallBatchStages];
};

#if EXL_IS_HOPPER

using Sums = SmallBatchSums<kRows>;

// K-tiles first, first + step, and so on below `end`: those of one partial sum.
struct PartialRange {
    uint32_t first, end, step;

    __device__ __forceinline__ PartialRange(
        const ManyRowsArgs& args, const SmallBatchPart& part, uint32_t index
    ) {
        const uint32_t split = index >> args.slice_bits;
        const uint32_t begin = split * part.split_k_tiles;
        step = 1u << args.slice_bits;
        first = begin + (index & (step - 1));
        end = min(part.num_k_tiles, begin + part.split_k_tiles);
    }
};

// Stage of the next k-tile, and the parity of its barriers.
struct StageCounter {
    uint32_t stage = 0, phase = 0;

    __device__ __forceinline__ void advance(const ManyRowsArgs& args) {
        if (++stage == static_cast<uint32_t>(args.num_stages)) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ void init_barriers(ManyRowsState& state) {
    if (threadIdx.x < kSmallBatchStages) {
        barrier_init(&state.full[threadIdx.x], 1);
        barrier_init(&state.empty[threadIdx.x], kConsumerWarps);
        fence_barrier_init();
    }
}

// The producer warp. A stage holds the inputs of a k-tile, followed by the k-tile in every panel.
__device__ __forceinline__ void run_producer(
    const ManyRowsArgs& args, ManyRowsState& state, uint8_t* buffer, int lane
) {
    const SmallBatchArgs& common = args.common;
    wait_for_inputs();
    StageCounter next;
    for (TileScheduler scheduler(common); !scheduler.is_done(common); scheduler.advance(common)) {
        for (int pair = 0; pair < (common.is_gated() ? 2 : 1); ++pair) {
            const SmallBatchPart& part = common.parts[common.is_gated() ? pair : scheduler.group];
            const int first_panel = kTilePanels * static_cast<int>(scheduler.tile);
            const int num_panels = min(kTilePanels, part.num_panels - first_panel);
            const uint8_t* const source = part.packed + first_panel * part.panel_bytes;
            const __half* const inputs = part.inputs + scheduler.chunk * part.chunk_halves;
            for (uint32_t index = 0; index < args.num_partials; ++index) {
                const PartialRange range(args, part, index);
                for (uint32_t k_tile = range.first; k_tile < range.end; k_tile += range.step) {
                    const uint32_t offset = uniform(__ldg(&part.k_tiles[k_tile].offset));
                    const uint32_t descriptor = uniform(
                        __ldg(reinterpret_cast<const uint32_t*>(&part.k_tiles[k_tile]) + 1)
                    );
                    const int blocks = descriptor >> 24, bits = descriptor >> 16 & 0xff;
                    const int size = part.header_bytes + 128 * bits * blocks;
                    const int input_bytes = kBlockInputBytes * blocks;
                    const uint32_t stage = uniform(next.stage);
                    barrier_wait(&state.empty[stage], next.phase ^ 1);
                    uint64_t* const barrier = &state.full[stage];
                    int to = static_cast<int>(stage) * args.stage_bytes;
                    if (lane == 0) {
                        state.entries[stage] = {descriptor, to + input_bytes, to, 0};
                        barrier_arrive_expecting(barrier, num_panels * size + input_bytes);
                        copy_bulk(
                            buffer + to, inputs + (descriptor & 0xffff) * (kBlockInputBytes / 2),
                            input_bytes, barrier
                        );
                    }
                    __syncwarp();
                    // The addresses are warp-uniform, as in SmallBatchProducer::issue.
                    const uint8_t* from = source + offset;
                    to += input_bytes;
#pragma unroll 1
                    for (int i = 0; i < num_panels; ++i, from += part.panel_bytes, to += size) {
                        if (lane == 0) copy_bulk(buffer + to, from, size, barrier);
                    }
                    next.advance(args);
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) sums[i][n] = 0.0f;
    }
}

// Computes this warp's sums of one part of an output tile.
__device__ __forceinline__ void sum_part(
    Sums& total, const ManyRowsArgs& args, const SmallBatchPart& part, ManyRowsState& state,
    const uint8_t* buffer, StageCounter& next, int warp, float panel_scale, int lane
) {
    clear(total);
#pragma unroll 1
    for (uint32_t index = 0; index < args.num_partials; ++index) {
        const PartialRange range(args, part, index);
        Sums partial;
        clear(partial);
#pragma unroll 1
        for (uint32_t k_tile = range.first; k_tile < range.end; k_tile += range.step) {
            barrier_wait(&state.full[next.stage], next.phase);
            StageEntry entry = state.entries[next.stage];
            entry.descriptor = uniform(entry.descriptor);
            entry.weights = uniform(entry.weights);
            entry.inputs = uniform(entry.inputs);
            add_k_tile<kRows, false, false>(partial, part, entry, buffer, warp, panel_scale, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(&state.empty[next.stage]);
            next.advance(args);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < kRows / 2; ++n) total[i][n] += partial[i][n];
        }
    }
}

// Writes this warp's panel of an output tile to y. `total` has the sums, for a gated pair those of
// up, and `gate_sums` those of the gate. The operations are those of `write_tile`.
__device__ __forceinline__ void write_panel(
    const SmallBatchArgs& args, const TileScheduler& scheduler, const Sums& total,
    const float4* gate_sums, int panel, int lane
) {
    const SmallBatchPart& part = args.parts[scheduler.group];
    const SmallBatchPart& last_part = args.parts[args.is_gated() ? 1 : scheduler.group];
    const float factor = inverse(load_panel_scale(part, panel));
    const float last_factor = inverse(load_panel_scale(last_part, panel));
    const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
#pragma unroll
    for (int half = 0; half < 4; ++half) {  // columns 8 * half .. 8 * half + 7 of the panel
        const int column = 32 * panel + 8 * half + lane / 4;
        const bool is_valid = column < part.n;
        const int64_t first_row = scheduler.chunk * kRows + 2 * (lane % 4);
        const int64_t first = first_row * args.y_stride + part.first_column + column;
        const bool has_bias = is_valid && part.bias != nullptr;
        const bool has_last_bias = is_valid && last_part.bias != nullptr;
        const float bias = has_bias ? part.bias[column] : 0.0f;
        const float last_bias = has_last_bias ? last_part.bias[column] : 0.0f;
        float addends[16] = {};
        if (is_added && is_valid) {
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                const int row = 8 * (r / 2) + r % 2;
                addends[r] = static_cast<const float*>(args.y)[first + row * args.y_stride];
            }
        }
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int q = r / 2, vector = kRows / 8 * (half / 2) + q, c = 2 * (half % 2) + r % 2;
            const float last = total[half / 2][4 * q + c] * last_factor;
            float y = addends[r];
            if (args.is_gated()) {
                const float* const four =
                    reinterpret_cast<const float*>(&gate_sums[vector * kConsumerThreads]);
                y += four[c] * factor;
            } else {
                y += last;
            }
            if (has_bias) y += bias;
            if (args.is_gated()) y = gated(args.gate, y, has_last_bias ? last + last_bias : last);
            if (!is_valid) continue;
            const int64_t at = first + (8 * q + r % 2) * args.y_stride;
            if (args.y_dtype == kF16) {
                static_cast<__half*>(args.y)[at] = from_float<__half>(y);
            } else {
                static_cast<float*>(args.y)[at] = y;
            }
        }
    }
}

__device__ __forceinline__ void run_consumers(
    const ManyRowsArgs& args, ManyRowsState& state, uint8_t* buffer, int warp, int lane
) {
    const SmallBatchArgs& common = args.common;
    auto* const gate_sums = reinterpret_cast<float4*>(buffer + args.gate_sums_offset);
    wait_for_inputs();
    StageCounter next;
#pragma unroll 1
    for (TileScheduler scheduler(common); !scheduler.is_done(common); scheduler.advance(common)) {
        const int panel = kTilePanels * static_cast<int>(scheduler.tile) + warp;
        Sums total;
#pragma unroll 1
        for (int pair = 0; pair < (common.is_gated() ? 2 : 1); ++pair) {
            const SmallBatchPart& part = common.parts[common.is_gated() ? pair : scheduler.group];
            if (pair == 1) store_sums<kRows>(total, gate_sums);
            sum_part(
                total, args, part, state, buffer, next, warp, load_panel_scale(part, panel), lane
            );
        }
        write_panel(common, scheduler, total, gate_sums + threadIdx.x, panel, lane);
    }
}

#endif

__global__ void __launch_bounds__(kManyRowsThreads, 1) many_rows_kernel(
    const __grid_constant__ ManyRowsArgs args
) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& state = *reinterpret_cast<ManyRowsState*>(shared + args.state_offset);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    let_next_begin();
    init_barriers(state);
    __syncthreads();
    if (warp == kConsumerWarps) {
        run_producer(args, state, shared, lane);
    } else {
        run_consumers(args, state, shared, warp, lane);
    }
#endif
}

// Output tiles of 8 panels, of all parts.
uint32_t count_tiles(SmallBatchArgs& args) {
    args.num_tiles = 0;
    for (int i = 0; i < args.num_groups; ++i) {
        args.group_tiles[i] =
            static_cast<uint32_t>(ceil_div(args.parts[i].num_panels, kTilePanels));
        args.num_tiles += args.group_tiles[i];
    }
    return args.num_tiles;
}

}  // namespace

bool suits_many_rows(const SmallBatchArgs& args, const DeviceInfo& info) {
    // With fewer output tiles than half the multiprocessors, dividing them along k is faster.
    SmallBatchArgs counted = args;
    const uint32_t tiles = count_tiles(counted) * args.num_chunks;
    return args.num_chunks > 1 && args.inverse_permutation == nullptr &&
           2 * tiles >= static_cast<uint32_t>(info.multiprocessors);
}

cudaError_t quant_many_rows(
    const SmallBatchArgs& args, int max_k_tile_bytes, const DeviceInfo& info, void* stream
) {
    ManyRowsArgs own = {};
    own.common = args;
    own.num_partials = static_cast<uint32_t>(args.num_partials());
    own.slice_bits = static_cast<uint32_t>(args.slice_bits);
    for (int i = 0; i < 3; ++i) {
        SmallBatchPart& part = own.common.parts[i];
        part.split_k_tiles = static_cast<uint32_t>(ceil_div(part.num_k_tiles, args.splits));
    }
    own.common.slice_bits = 0;
    own.common.splits = 1;
    own.common.global_split_bits = 0;
    const uint32_t tiles = count_tiles(own.common) * args.num_chunks;
    own.common.num_clusters = std::min(tiles, static_cast<uint32_t>(info.multiprocessors));
    own.stage_bytes = static_cast<int>(
        ceil_div(kTilePanels * max_k_tile_bytes + 4 * kBlockInputBytes, 128) * 128
    );
    const int state = static_cast<int>(sizeof(ManyRowsState));
    const int beside = state + (args.is_gated() ? kGateSumsBytes : 0);
    own.num_stages =
        std::min(kSmallBatchStages, (info.shared_per_block - beside) / own.stage_bytes);
    if (own.num_stages < 1) return cudaErrorInvalidConfiguration;
    own.gate_sums_offset = own.num_stages * own.stage_bytes;
    own.state_offset = own.gate_sums_offset + beside - state;
    return launch_clusters(
        many_rows_kernel, dim3(own.common.num_clusters), dim3(kManyRowsThreads), 1,
        own.state_offset + state, stream, own
    );
}

}  // namespace exl::cuda

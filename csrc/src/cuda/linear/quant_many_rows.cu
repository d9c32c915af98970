// y[m, n] = x[m, k] @ w (+ bias) for quantized w: the many-rows kernel, for prompts in the
// batch-invariant mode on compute capability 9.0.
//
// Contract   exl/cuda/linear.h. The results have the bits of the small-batch kernel
//            (quant_small_batch.cu), which computes fewer rows.
// Floor      2 * m * n * k operations divided by the throughput of the tensor cores.
// Mapping    The grid has one thread block per multiprocessor. A block loops over output tiles of
//            two chunks of 64 rows and 4 column panels, and computes all of k for each. Producer
//            warps copy k-tiles and their inputs into the stages of a pipeline. Two warpgroups of
//            consumers have 16 columns of each panel and multiply with wgmma
//            (quant_many_rows_k_tile.cuh). The two blocks of a cluster have adjacent panels and the
//            same chunks: each copies half of the inputs for both.
// Accuracy   The small-batch kernel divides k among slices and thread blocks, and adds up their
//            partial sums in a fixed order. This kernel computes the same partial sums one after
//            the other, each from zero over the same k-tiles, and adds them up in the same order.
// Overlap    The producers run ahead into the next output tile. Clusters at the same time work on
//            chunks of the same panels, so that they share weights in the L2 cache.
#include <algorithm>

#include "cuda/linear/quant_many_rows.cuh"
#include "cuda/linear/quant_many_rows_k_tile.cuh"
#include "cuda/linear/quant_small_batch_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int kRows = EXL_CUDA_CHUNK_ROWS;
constexpr int kChunks = 2;            // of an output tile
constexpr int kTilePanels = 4;        // of a thread block
constexpr uint32_t kClusterBits = 1;  // two blocks share the inputs that they copy
constexpr int kGroupThreads = 4 * kWarp;
constexpr int kManyRowsThreads = kConsumerThreads + kGroupThreads;
constexpr int kStageInputBytes = kChunks * 4 * 64 * kRows;
constexpr int kGateSumsBytes = kChunks * kRows / 2 * kConsumerThreads * 4;

struct ManyRowsArgs {
    // One slice and one split: the output tiles are those of clusters that compute all of k, and
    // the chunks are those of output tiles.
    SmallBatchArgs common;
    uint32_t num_row_chunks;  // chunks of 64 rows
    uint32_t cluster_bits;    // log2 of the thread blocks of a cluster
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

static_assert(kChunks == kTileChunks);
// Registers of a thread. A multiprocessor has 64 Ki: 384 threads of 168 before they are divided.
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

// K-tiles first, first + step, and so on below `end`: those of one partial sum.
struct PartialRange {
    uint32_t first, end, step;

    __device__ __forceinline__ PartialRange(
        const ManyRowsArgs& args, const SmallBatchPart& part, uint32_t index
    ) {
        const SmallBatchPart::FirstKTile* of_split = part.first + (index >> args.slice_bits);
        step = 1u << args.slice_bits;
        first = of_split[0].k_tile + (index & (step - 1));
        end = of_split[1].k_tile;
    }
};

// First panel of this block in an output tile of its cluster.
__device__ __forceinline__ int first_panel_of(const ManyRowsArgs& args, uint32_t tile) {
    return kTilePanels * static_cast<int>((tile << args.cluster_bits) + cluster_rank());
}

__device__ __forceinline__ void init_barriers(const ManyRowsArgs& args, ManyRowsState& state) {
    if (uniform(threadIdx.x / kWarp) > 0 || !is_elected()) return;
#pragma unroll
    for (int i = 0; i < kSmallBatchStages; ++i) {
        barrier_init(&state.full[i], 1);
        barrier_init(&state.empty[i], kConsumerWarps << args.cluster_bits);
    }
    fence_barrier_init();
}

// Copies of the producer warps for one part of an output tile. One warp copies weights and writes
// the descriptions of the stages, the other one copies inputs. A stage holds the inputs of a k-tile
// for each chunk, followed by the k-tile in every panel.
struct PartCopies {
    const ManyRowsArgs& args;
    const SmallBatchPart& part;
    ManyRowsState& state;
    uint8_t* buffer;
    int lane;
    const uint8_t* weights;  // address of the block's first panel
    const __half* inputs;    // of the output tile's first chunk
    int num_panels, num_chunks;

    __device__ __forceinline__ void copy_weights_of(
        uint32_t stage, uint32_t descriptor, uint32_t offset
    ) const {
        const int blocks = descriptor >> 24, bits = descriptor >> 16 & 0xff;
        const int size = part.header_bytes + 128 * bits * blocks;
        const int inputs_at = static_cast<int>(stage) * args.stage_bytes;
        int to = inputs_at + kStageInputBytes;
        uint64_t* const barrier = &state.full[stage];
        if (lane == 0) {
            state.entries[stage] = {descriptor, to, inputs_at, 0};
            barrier_arrive_expecting(
                barrier, num_panels * size + num_chunks * kBlockInputBytes * blocks
            );
        }
        __syncwarp();
        // The addresses are warp-uniform, as in SmallBatchProducer::issue.
        const uint8_t* from = weights + offset;
#pragma unroll 1
        for (int i = 0; i < num_panels; ++i, from += part.panel_bytes, to += size) {
            if (is_elected()) copy_bulk(buffer + to, from, size, barrier);
        }
    }

    // Copies this block's share of the inputs, to all blocks of the cluster.
    __device__ __forceinline__ void copy_inputs_of(uint32_t stage, uint32_t descriptor) const {
        const uint32_t share = kBlockInputBytes * (descriptor >> 24) >> args.cluster_bits;
        const uint32_t skipped = cluster_rank() * share;
        int to = static_cast<int>(stage) * args.stage_bytes + skipped;
        const auto* from = reinterpret_cast<const uint8_t*>(inputs) +
                           (descriptor & 0xffff) * kBlockInputBytes + skipped;
        uint64_t* const barrier = &state.full[stage];
#pragma unroll 1
        for (int i = 0; i < num_chunks; ++i) {
            if (args.cluster_bits == 0) {
                if (is_elected()) copy_bulk(buffer + to, from, share, barrier);
            } else {
                if (is_elected()) copy_bulk_to(3, buffer + to, from, share, barrier);
            }
            from += 2 * part.chunk_halves, to += kChunkInputBytes;
        }
    }
};

__device__ __forceinline__ void run_producer(
    const ManyRowsArgs& args, ManyRowsState& state, uint8_t* buffer, bool copies_inputs, int lane
) {
    const SmallBatchArgs& common = args.common;
    wait_for_inputs();
    StageCounter next;
    for (TileScheduler scheduler(common); !scheduler.is_done(common); scheduler.advance(common)) {
        for (int pair = 0; pair < (common.is_gated() ? 2 : 1); ++pair) {
            const SmallBatchPart& part = common.parts[common.is_gated() ? pair : scheduler.group];
            const int first_panel = first_panel_of(args, scheduler.tile);
            const uint32_t first_chunk = kChunks * scheduler.chunk;
            const PartCopies copies = {
                args,
                part,
                state,
                buffer,
                lane,
                part.packed + first_panel * part.panel_bytes,
                part.inputs + first_chunk * part.chunk_halves,
                max(0, min(kTilePanels, part.num_panels - first_panel)),
                static_cast<int>(min(kChunks, args.num_row_chunks - first_chunk))
            };
            for (uint32_t index = 0; index < args.num_partials; ++index) {
                const PartialRange range(args, part, index);
                for (uint32_t k_tile = range.first; k_tile < range.end; k_tile += range.step) {
                    const uint32_t offset = uniform(__ldg(&part.k_tiles[k_tile].offset));
                    const uint32_t descriptor = uniform(
                        __ldg(reinterpret_cast<const uint32_t*>(&part.k_tiles[k_tile]) + 1)
                    );
                    const uint32_t stage = uniform(next.stage);
                    barrier_wait(&state.empty[stage], next.phase ^ 1);
                    if (copies_inputs) {
                        copies.copy_inputs_of(stage, descriptor);
                    } else {
                        copies.copy_weights_of(stage, descriptor, offset);
                    }
                    next.advance(args.num_stages);
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(ManyRowsSums& sums) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) sums[i][n] = 0.0f;
    }
}

// Computes this warp's sums of one part of an output tile.
template <int kColumns>
__device__ __forceinline__ void sum_part(
    ManyRowsSums& total, const ManyRowsArgs& args, const SmallBatchPart& part, ManyRowsState& state,
    const uint8_t* buffer, StageCounter& next, int panel, float panel_scale, int lane
) {
    clear(total);
#pragma unroll 1
    for (uint32_t index = 0; index < args.num_partials; ++index) {
        const PartialRange range(args, part, index);
        ManyRowsSums partial;
        clear(partial);
        int in_use = -1;  // stage whose products may still be running
        // Lets the producers of the cluster's blocks overwrite the stage.
        const auto release = [&] {
            __syncwarp();
            if (in_use >= 0 && lane < 1 << args.cluster_bits) {
                barrier_arrive_at(&state.empty[in_use], lane);
            }
        };
#pragma unroll 1
        for (uint32_t k_tile = range.first; k_tile < range.end; k_tile += range.step) {
            barrier_wait(&state.full[next.stage], next.phase);
            StageEntry entry = state.entries[next.stage];
            entry.descriptor = uniform(entry.descriptor);
            entry.weights = uniform(entry.weights);
            entry.inputs = uniform(entry.inputs);
            add_columns<kColumns>(partial, part, entry, buffer, panel, panel_scale, lane, release);
            in_use = static_cast<int>(next.stage);
            next.advance(args.num_stages);
        }
        group_wait<0>();
        release();
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            group_results(partial[i]);
#pragma unroll
            for (int n = 0; n < kRows / 2; ++n) total[i][n] += partial[i][n];
        }
    }
}

// Sums of a quarter of an output tile: 4 tiles of 8 rows of a chunk.
using QuarterSums = float[16];
constexpr int kQuarters = 2 * kChunks;

__device__ __forceinline__ void load_quarter(
    QuarterSums& to, const ManyRowsSums& total, int quarter
) {
#pragma unroll
    for (int n = 0; n < 16; ++n) to[n] = total[0][n];
#pragma unroll
    for (int other = 1; other < kQuarters; ++other) {
        if (quarter != other) continue;
#pragma unroll
        for (int n = 0; n < 16; ++n) to[n] = total[other / 2][16 * (other % 2) + n];
    }
}

// Writes this warp's columns of an output tile to y. `total` has the sums, for a gated pair those
// of up, and `gate_sums` those of the gate. The operations are those of `write_tile`. The code is a
// loop over quarters, because fetching the instructions of all sums would take longer.
__device__ __forceinline__ void write_columns(
    const ManyRowsArgs& own, const TileScheduler& scheduler, const ManyRowsSums& total,
    const float4* gate_sums, int panel, int columns, int lane
) {
    const SmallBatchArgs& args = own.common;
    const SmallBatchPart& part = args.parts[scheduler.group];
    const SmallBatchPart& last_part = args.parts[args.is_gated() ? 1 : scheduler.group];
    const float factor = inverse(load_panel_scale(part, panel));
    const float last_factor = inverse(load_panel_scale(last_part, panel));
    const bool is_added = args.epilogue == EXL_EPILOGUE_ADD;
    const int first_column = 32 * panel + 16 * columns + lane / 4;
    bool is_column[2];
    float bias[2] = {}, last_bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = first_column + 8 * half;
        is_column[half] = column < part.n;
        if (is_column[half] && part.bias != nullptr) bias[half] = part.bias[column];
        if (is_column[half] && last_part.bias != nullptr) last_bias[half] = last_part.bias[column];
    }
#pragma unroll 1
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
        const uint32_t chunk = kChunks * scheduler.chunk + quarter / 2;
        if (chunk >= own.num_row_chunks) break;
        const int64_t first_row =
            static_cast<int64_t>(chunk) * kRows + 32 * (quarter % 2) + 2 * (lane % 4);
        const int64_t first = first_row * args.y_stride + part.first_column + first_column;
        const auto at = [&](int n) {
            return first + (8 * (n / 4) + n % 2) * args.y_stride + 8 * (n / 2 % 2);
        };
        QuarterSums y = {}, last;
        if (is_added) {
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                if (is_column[n / 2 % 2]) y[n] = static_cast<const float*>(args.y)[at(n)];
            }
        }
        load_quarter(last, total, quarter);
        float4 gates[4];
        if (args.is_gated()) {
#pragma unroll
            for (int q = 0; q < 4; ++q) gates[q] = gate_sums[(4 * quarter + q) * kConsumerThreads];
        }
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const int half = n / 2 % 2;
            last[n] *= last_factor;
            if (args.is_gated()) {
                y[n] += reinterpret_cast<const float*>(&gates[n / 4])[n % 4] * factor;
            } else {
                y[n] += last[n];
            }
            if (part.bias != nullptr) y[n] += bias[half];
            if (args.has_activation()) {
                float up = 1.0f;
                if (args.is_gated()) up = last[n];
                if (args.is_gated() && last_part.bias != nullptr) up += last_bias[half];
                y[n] = gated(args.gate, y[n], up);
            }
        }
        if (args.y_dtype == kF16) {
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                if (!is_column[n / 2 % 2]) continue;
                static_cast<__half*>(args.y)[at(n)] = from_float<__half>(y[n]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                if (is_column[n / 2 % 2]) static_cast<float*>(args.y)[at(n)] = y[n];
            }
        }
    }
}

template <int kColumns>
__device__ __forceinline__ void run_consumers(
    const ManyRowsArgs& args, ManyRowsState& state, uint8_t* buffer, int warp, int lane
) {
    const SmallBatchArgs& common = args.common;
    auto* const gate_sums = reinterpret_cast<float4*>(buffer + args.gate_sums_offset) + threadIdx.x;
    const int panel_in_tile = warp % kTilePanels;
    wait_for_inputs();
    StageCounter next;
#pragma unroll 1
    for (TileScheduler scheduler(common); !scheduler.is_done(common); scheduler.advance(common)) {
        const int panel = first_panel_of(args, scheduler.tile) + panel_in_tile;
        ManyRowsSums total;
#pragma unroll 1
        for (int pair = 0; pair < (common.is_gated() ? 2 : 1); ++pair) {
            const SmallBatchPart& part = common.parts[common.is_gated() ? pair : scheduler.group];
            if (pair == 1) {
#pragma unroll
                for (int n = 0; n < kChunks * kRows / 8; ++n) {
                    const float* four = &total[n / (kRows / 8)][4 * (n % (kRows / 8))];
                    gate_sums[n * kConsumerThreads] =
                        make_float4(four[0], four[1], four[2], four[3]);
                }
            }
            sum_part<kColumns>(
                total, args, part, state, buffer, next, panel_in_tile,
                load_panel_scale(part, panel), lane
            );
        }
        write_columns(args, scheduler, total, gate_sums, panel, kColumns, lane);
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
    init_barriers(args, state);
    __syncthreads();
    if (args.cluster_bits > 0) {
        cluster_arrive();
        cluster_wait();  // until the barriers of all blocks are initialized
    }
    if (warp >= kConsumerWarps) {
        give_registers<kProducerRegisters>();
        const int role = warp - kConsumerWarps;
        if (role < 2) run_producer(args, state, shared, role == 1, lane);
    } else {
        take_registers<kConsumerRegisters>();
        if (warp < kTilePanels) {
            run_consumers<0>(args, state, shared, warp, lane);
        } else {
            run_consumers<1>(args, state, shared, warp, lane);
        }
    }
    if (args.cluster_bits > 0) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();  // until no block copies to this one, or arrives at its barriers
    }
#endif
}

// Output tiles of a cluster, of all parts.
uint32_t count_tiles(SmallBatchArgs& args, uint32_t cluster_bits) {
    args.num_tiles = 0;
    for (int i = 0; i < args.num_groups; ++i) {
        args.group_tiles[i] =
            static_cast<uint32_t>(ceil_div(args.parts[i].num_panels, kTilePanels << cluster_bits));
        args.num_tiles += args.group_tiles[i];
    }
    return args.num_tiles;
}

}  // namespace

bool suits_many_rows(const SmallBatchArgs& args, const DeviceInfo& info) {
    // With fewer output tiles than half the multiprocessors, dividing them along k is faster.
    SmallBatchArgs counted = args;
    const auto row_tiles = static_cast<uint32_t>(ceil_div(args.num_chunks, kChunks));
    const uint32_t tiles = count_tiles(counted, 0) * row_tiles;
    return args.num_chunks > 1 && args.inverse_permutation == nullptr &&
           2 * tiles >= static_cast<uint32_t>(info.multiprocessors);
}

cudaError_t quant_many_rows(
    const SmallBatchArgs& args, int max_k_tile_bytes, const DeviceInfo& info, void* stream
) {
    ManyRowsArgs own = {};
    own.common = args;
    own.num_row_chunks = args.num_chunks;
    own.cluster_bits = kClusterBits;
    own.num_partials = static_cast<uint32_t>(args.num_partials());
    own.slice_bits = static_cast<uint32_t>(args.slice_bits);
    own.common.slice_bits = 0;
    own.common.splits = 1;
    own.common.global_split_bits = 0;
    own.common.num_chunks = static_cast<uint32_t>(ceil_div(args.num_chunks, kChunks));
    const uint32_t tiles = count_tiles(own.common, own.cluster_bits) * own.common.num_chunks;
    own.common.num_clusters =
        std::min(tiles, static_cast<uint32_t>(info.multiprocessors) >> own.cluster_bits);
    own.stage_bytes =
        static_cast<int>(ceil_div(kTilePanels * max_k_tile_bytes + kStageInputBytes, 128) * 128);
    const int state = static_cast<int>(sizeof(ManyRowsState));
    const int beside = state + (args.is_gated() ? kGateSumsBytes : 0);
    own.num_stages =
        std::min(kSmallBatchStages, (info.shared_per_block - beside) / own.stage_bytes);
    if (own.num_stages < 2) return cudaErrorInvalidConfiguration;
    own.gate_sums_offset = own.num_stages * own.stage_bytes;
    own.state_offset = own.gate_sums_offset + beside - state;
    return launch_clusters(
        many_rows_kernel, dim3(own.common.num_clusters << own.cluster_bits), dim3(kManyRowsThreads),
        1 << own.cluster_bits, own.state_offset + state, stream, own
    );
}

}  // namespace exl::cuda

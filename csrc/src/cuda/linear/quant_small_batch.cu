// y[m, n] = x[m, k] @ w (+ bias) for quantized w: the small-batch kernel, for 9 to 64 rows on
// compute capability 9.0.
//
// Contract   exl/cuda/linear.h. One launch reads the weights once.
// Floor      panels * panel_bytes bytes divided by the memory bandwidth.
// Mapping    The grid has one or two thread blocks per multiprocessor. A cluster of up to eight
//            thread blocks computes an output tile (quant_small_batch_work.cuh). In each block a
//            producer warp copies k-tiles of adjacent panels and their inputs into the stages of a
//            pipeline (quant_small_batch_pipeline.cuh). Eight consumer warps, two warpgroups,
//            multiply them with wgmma, which reads the inputs from shared memory
//            (quant_small_batch_k_tile.cuh).
// Accuracy   Weights are rounded to float16. float32 sums, in a fixed order: the k-tiles of a
//            slice, then slices and thread blocks (quant_small_batch_tile.cuh). The order
//            depends on the partition alone, which the batch-invariant mode chooses without regard
//            to the rows.
// Overlap    The first weights are copied before the previous kernel has ended, and a spare warp
//            warms up the instruction cache for the epilogue. With up to 32 rows two thread blocks
//            fit on a multiprocessor: two of one launch, or one of this launch and one of the next.
#include <algorithm>
#include <limits>

#include "cuda/linear/quant_many_rows.cuh"
#include "cuda/linear/quant_small_batch.cuh"
#include "cuda/linear/quant_small_batch_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int blocks_per_multiprocessor(int rows, bool has_small) {
    // With two blocks, 32 rows of small groups would lack registers for asynchronous products.
    return rows <= (has_small ? 16 : 32) ? 2 : 1;
}

#if EXL_IS_HOPPER

__device__ __forceinline__ float4* sums_at(const SmallBatchArgs& args, uint8_t* buffer) {
    return reinterpret_cast<float4*>(buffer + args.sums_offset);
}
__device__ __forceinline__ float4* gate_sums_at(const SmallBatchArgs& args, uint8_t* buffer) {
    return reinterpret_cast<float4*>(buffer + args.gate_sums_offset);
}

// Loads the weight scale of one panel of an output tile, for a gated pair those of gate and up.
// Called early, because the loads go to memory.
__device__ __forceinline__ void load_panel_scales(
    const SmallBatchArgs& args, const TileScheduler& scheduler, int panel, float (&scales)[2]
) {
    if (scheduler.is_done(args)) return;
    const int part_panel = args.tile_panels() * static_cast<int>(scheduler.tile) + panel;
    scales[0] = load_panel_scale(args.parts[scheduler.group], part_panel);
    if (args.is_gated()) scales[1] = load_panel_scale(args.parts[1], part_panel);
}

// Main loop of the consumer warps over all output tiles of the block.
//
// The spare warp (not is_consumer) runs the epilogue once, with stores disabled, while the inputs
// load. This warms the instruction cache: fetching that code takes longer than executing it.
template <int kRows, bool is_by_rows, bool has_small>
__device__ __forceinline__ void run_consumers(
    const SmallBatchArgs& args, SmallBatchState& state, uint8_t* buffer, int warp, int lane
) {
    const int panel = warp & (args.tile_panels() - 1);
    const int slice = warp * args.slices() / kMaxTilePanels;
    const bool is_consumer = warp < kConsumerWarps;
    TileScheduler scheduler(args);
    float panel_scales[2];
    load_panel_scales(args, scheduler, panel, panel_scales);
    if (is_consumer) wait_for_inputs();
    uint32_t consumed = 0;
    while (!scheduler.is_done(args)) {
        SmallBatchSums<kRows> total;
        for (int pair_index = 0; is_consumer && pair_index < (args.is_gated() ? 2 : 1);
             ++pair_index) {
            const KRange range = scheduler.k_range(args, pair_index);
            const SmallBatchPart& part = args.parts[range.part];
            if (pair_index == 1 && args.is_split()) {
                cluster_wait();  // until all blocks of the cluster have started
                scatter_sums<kRows>(args, total, gate_sums_at(args, buffer), &state.sums_ready);
            } else if (pair_index == 1) {
                store_sums<kRows>(total, gate_sums_at(args, buffer));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < kRows / 2; ++n) total[i][n] = 0.0f;
            }
            const float panel_scale = pair_index == 0 ? panel_scales[0] : panel_scales[1];
            const uint32_t count = range.end - range.begin;
            for (uint32_t k_tile = slice; k_tile < count; k_tile += args.slices()) {
                const uint32_t stage = (consumed + k_tile) % kSmallBatchStages;
                barrier_wait(&state.full[stage], (consumed + k_tile) / kSmallBatchStages & 1);
                StageEntry entry = state.entries[stage];
                entry.descriptor = uniform(entry.descriptor);
                entry.weights = uniform(entry.weights);
                entry.inputs = uniform(entry.inputs);
                add_k_tile<kRows, is_by_rows, has_small>(
                    total, part, entry, buffer, panel, panel_scale, lane
                );
                __syncwarp();
                if (lane == 0) barrier_arrive(&state.empty[stage]);
            }
            consumed += count;
        }
        if (!is_consumer) {
            // The warm-up warp has no sums.
        } else if (args.is_split()) {
            if (!args.is_gated()) cluster_wait();  // until all blocks have started
            if (args.sums_offset == 0) {
                cluster_arrive();
                cluster_wait();  // until all blocks have consumed their stages
            }
            scatter_sums<kRows>(args, total, sums_at(args, buffer), &state.sums_ready);
        } else {
            // Until all consumer warps have consumed their stages.
            if (args.sums_offset == 0) named_barrier<1, kConsumerThreads>();
            store_sums<kRows>(total, sums_at(args, buffer));
        }
        TileScheduler next = scheduler;
        next.advance(args);
        load_panel_scales(args, next, panel, panel_scales);
        write_tile<kRows>(
            args, scheduler, sums_at(args, buffer), gate_sums_at(args, buffer), state, is_consumer
        );
        if (!is_consumer) break;
        scheduler = next;
    }
}

#endif

template <int kRows, bool is_by_rows, bool has_small>
__global__ void __launch_bounds__(
    kSmallBatchThreads, blocks_per_multiprocessor(kRows, has_small)
) small_batch_kernel(const __grid_constant__ SmallBatchArgs args) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& state = *reinterpret_cast<SmallBatchState*>(shared + args.pipeline_bytes);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;

    let_next_begin_if(args.copies.count == 0);
    state.init_barriers(args.slices(), args.received_bytes<kRows>());
    __syncthreads();
    if (args.is_split()) cluster_arrive();
    if (warp == kConsumerWarps) {
        SmallBatchProducer<kRows>(args, state, shared, lane).run();
    } else {
        run_consumers<kRows, is_by_rows, has_small>(args, state, shared, warp, lane);
    }
    if (warp >= kConsumerWarps && args.is_split()) {
        __syncwarp();
        cluster_wait();
        if (args.sums_offset == 0) {
            cluster_arrive();  // this block has consumed its stages
            cluster_wait();
        }
    }
    // Sums that a block has sent may be lost if it exits before they arrive. After this barrier all
    // blocks of the cluster have received theirs.
    if (args.is_split()) {
        cluster_arrive();
        cluster_wait();
    }
#endif
}

// ---- host --------------------------------------------------------------------------------------

SmallBatchPart make_part(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    SmallBatchPart part = {};
    part.packed = w.tiles;
    part.k_tiles = w.k_tiles;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.panel_bytes = w.panel_bytes;
    part.num_panels = static_cast<int>(ceil_div(w.n, 32));
    part.num_k_tiles = static_cast<uint32_t>(w.num_k_tiles);
    part.n = w.n;
    part.first_column = first_column;
    part.scale_bytes = static_cast<int>(scale_bytes_of(w.scale_dtype));
    part.offset_kind = w.offset_kind;
    part.header_bytes = KTileHeader{part.scale_bytes, w.offset_kind}.size_bytes();
    return part;
}

// Blocks of 32 rows of the k-tile `in_run` of a run.
uint32_t blocks_of(const ExlQuantRun& run, uint32_t in_run) {
    return (in_run + 1) % run.group_k_tiles == 0 ? run.last_blocks : 4;
}

// Entry `index` of the matrix's k-tile table, computed from its runs.
SmallBatchPart::FirstKTile k_tile_at(
    const ExlQuantMatrix& w, uint32_t index, uint32_t header_bytes
) {
    const ExlQuantRun* run = w.runs;
    while (run + 1 < w.runs + w.num_runs && index >= run[1].first_k_tile) ++run;
    const uint32_t in_run = index - run->first_k_tile, group_k_tiles = run->group_k_tiles;
    const uint32_t group = in_run / group_k_tiles, in_group = in_run % group_k_tiles;
    const uint32_t group_blocks = 4 * (group_k_tiles - 1) + run->last_blocks;
    const uint32_t first_block = run->first_block + group * group_blocks + 4 * in_group;
    const uint32_t blocks = blocks_of(*run, in_run);
    const uint32_t block_bytes = 128 * run->bits;
    return {
        index,
        run->offset + in_run * header_bytes + (group * group_blocks + 4 * in_group) * block_bytes,
        first_block | static_cast<uint32_t>(run->bits) << 16 | blocks << 24
    };
}

// Time of a k-tile with that many blocks. Beside them, a k-tile takes as long as four blocks do.
constexpr uint32_t k_tile_cost(uint32_t blocks) { return 4 + blocks; }

// Calls `visit` with the number and the cost of every k-tile.
template <class Visit>
void visit_k_tiles(const ExlQuantMatrix& w, const Visit& visit) {
    for (int i = 0; i < w.num_runs; ++i) {
        const auto end =
            static_cast<uint32_t>(i + 1 < w.num_runs ? w.runs[i + 1].first_k_tile : w.num_k_tiles);
        const uint32_t first = w.runs[i].first_k_tile;
        for (uint32_t k_tile = first; k_tile < end; ++k_tile) {
            visit(k_tile, k_tile_cost(blocks_of(w.runs[i], k_tile - first)));
        }
    }
}

uint32_t cost_of_k_tiles(const ExlQuantMatrix& w) {
    uint32_t cost = 0;
    visit_k_tiles(w, [&](uint32_t, uint32_t own) { cost += own; });
    return cost;
}

// Divides the k-tiles of a part among the thread blocks of a tile. A k-tile belongs to the block in
// whose share of the time its middle lies.
void divide_k_tiles(SmallBatchPart& part, const ExlQuantMatrix& w, uint32_t cost, uint32_t blocks) {
    uint32_t rank = 0, before = 0;
    visit_k_tiles(w, [&](uint32_t k_tile, uint32_t own) {
        const uint64_t middle = 2 * before + own;
        while (rank < blocks && middle * blocks >= uint64_t{2} * rank * cost) {
            part.first[rank++] = k_tile_at(w, k_tile, part.header_bytes);
        }
        before += own;
    });
    while (rank <= blocks) part.first[rank++] = {part.num_k_tiles, 0, 0};
}

// Size of the largest k-tile of a panel in all parts.
int max_k_tile_bytes(const ExlQuantLinear& call) {
    int largest = 0;
    for (int i = 0; i < call.count; ++i) {
        const ExlQuantMatrix& w = *call.parts[i];
        const int scale_bytes = static_cast<int>(scale_bytes_of(w.scale_dtype));
        const int header_bytes = KTileHeader{scale_bytes, w.offset_kind}.size_bytes();
        for (const ExlQuantRun* run = w.runs; run < w.runs + w.num_runs; ++run) {
            const int blocks = run->group_k_tiles > 1 ? 4 : run->last_blocks;
            largest = std::max(largest, header_bytes + 128 * run->bits * blocks);
        }
    }
    return largest;
}

// Sets the number of slices and the resulting output tiles. Returns the number of tiles.
int divide_tiles(SmallBatchArgs& args, int slice_bits) {
    args.slice_bits = slice_bits;
    args.num_tiles = 0;
    for (int i = 0; i < args.num_groups; ++i) {
        args.group_tiles[i] =
            static_cast<uint32_t>(ceil_div(args.parts[i].num_panels, args.tile_panels()));
        args.num_tiles += args.group_tiles[i];
    }
    return static_cast<int>(args.num_tiles);
}

// Number of clusters of 1 to kMaxSplits blocks that run at once. Queried once per device.
struct ClusterOccupancy {
    int device = -1;
    int max_active[kMaxSplits + 1];
};
template <int kRows, bool is_by_rows, bool has_small>
cudaError_t cluster_occupancy(
    ClusterOccupancy* occupancy, const DeviceInfo& info, int shared_bytes
) {
    thread_local ClusterOccupancy known;
    if (known.device != info.device) {
        cudaError_t error = cudaFuncSetAttribute(
            small_batch_kernel<kRows, is_by_rows, has_small>,
            cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes
        );
        for (int splits = 1; splits <= kMaxSplits && error == cudaSuccess; ++splits) {
            cudaLaunchAttribute cluster = {};
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3(static_cast<unsigned>(splits));
            config.blockDim = dim3(kSmallBatchThreads);
            config.dynamicSmemBytes = shared_bytes;
            config.attrs = &cluster;
            config.numAttrs = 1;
            error = cudaOccupancyMaxActiveClusters(
                &known.max_active[splits], small_batch_kernel<kRows, is_by_rows, has_small>, &config
            );
        }
        if (error != cudaSuccess) {
            cudaGetLastError();  // clears the error, which this function returns
            return error;
        }
        known.device = info.device;
    }
    *occupancy = known;
    return cudaSuccess;
}

// Vectors of four sums per lane that a thread block adds up in the reduction.
int portion_of(const SmallBatchArgs& args, int rows) {
    return static_cast<int>(ceil_div(rows / 4 * args.tile_panels(), args.splits));
}

struct Partition {
    int slice_bits, splits, global_split_bits;
};

void set_partition(SmallBatchArgs& args, const Partition& partition) {
    divide_tiles(args, partition.slice_bits);
    args.splits = partition.splits;
    args.global_split_bits = partition.global_split_bits;
}

// Whether a launch can have the partition of `args`. All clusters of divided tiles run at once.
bool can_run(const SmallBatchArgs& args, int max_clusters, int rows) {
    const int clusters = static_cast<int>(args.num_tiles) << args.global_split_bits;
    // The reduction sends sums within a cluster: a lone block cannot.
    if (args.splits == 1) return args.slice_bits == 0 && args.global_split_bits == 0;
    if (clusters > max_clusters) return false;
    if (args.global_split_bits == 0) return true;
    const int sums = portion_of(args, rows) * kWarp * static_cast<int>(sizeof(float4));
    return sums <= kGlobalSumBytes && clusters * args.splits <= kMaxGlobalBlocks;
}

// Time of the slowest thread block in k-tiles, of which an output tile has `k_tiles`.
//
// Fitted to all partitions of the matrices of seven models with 32 rows on an H100
// (docs/experiments/cuda-linear.md). Two blocks on a multiprocessor do not slow each other down. Two
// slices, which read different inputs, do by 5 %. A reduction costs half a k-tile, through global
// memory three more. If nearly as many large clusters run as fit, some start late, above all beside
// the end of another kernel.
double cost_of(const SmallBatchArgs& args, int64_t k_tiles, int max_clusters) {
    const int clusters = static_cast<int>(args.num_tiles) << args.global_split_bits;
    const int64_t rounds = args.is_split() ? 1 : ceil_div(clusters, max_clusters);
    const auto own = static_cast<double>(rounds * ceil_div(k_tiles, args.slices() * args.blocks()));
    const bool is_late = args.splits >= 5 && 20 * clusters > 19 * max_clusters;
    return own * (args.slices() == 2 ? 1.05 : 1.0) + (args.is_split() ? 0.5 : 0.0) +
           (args.has_global_split() ? 3.0 : 0.0) + (is_late ? 3.0 : 0.0);
}

// Costs of all k-tiles of each part.
struct KTileCosts {
    uint32_t of[3] = {};
};

// Chooses the partition whose slowest thread block finishes first. `rows`: kRows of the kernel.
void choose_partition(
    SmallBatchArgs& args, const KTileCosts& costs, const ClusterOccupancy& occupancy, int rows,
    bool can_split_globally
) {
    const uint32_t cost_of_tile = args.is_gated()
                                      ? costs.of[0] + costs.of[1]
                                      : std::max({costs.of[0], costs.of[1], costs.of[2]});
    const int64_t k_tiles = ceil_div(cost_of_tile, k_tile_cost(4));
    double least = std::numeric_limits<double>::infinity();
    Partition best = {0, 1, 0};
    const auto consider = [&](const Partition& partition) {
        set_partition(args, partition);
        const int max_clusters = std::max(1, occupancy.max_active[partition.splits]);
        if (!can_run(args, max_clusters, rows)) return;
        const double cost = cost_of(args, k_tiles, max_clusters);
        // Among equals the most blocks, which have fewer k-tiles on average.
        if (cost <= least) least = cost, best = partition;
    };
    for (int splits = 1; splits <= kMaxSplits; ++splits) consider({0, splits, 0});
    for (int splits = 1; splits <= kMaxSplits && !args.is_gated(); ++splits) {
        for (int bits = 0; splits << bits <= (can_split_globally ? kMaxSplits : splits); ++bits) {
            consider({1, splits, bits});
        }
    }
    set_partition(args, best);
}

// Rows of the launch for which the batch-invariant mode chooses its partition.
constexpr int kInvariantRows = 32;

template <int kRows, bool is_by_rows, bool has_small>
cudaError_t launch_shape(
    SmallBatchArgs& args, const ExlQuantLinear& call, const DeviceInfo& info, void* stream
) {
    const int resident = blocks_per_multiprocessor(kRows, has_small);
    const int shared_bytes = std::min(228 * 1024 / resident - 1024, info.shared_per_block);
    const int state = static_cast<int>(sizeof(SmallBatchState));
    KTileCosts costs;
    for (int i = 0; i < call.count; ++i) costs.of[i] = cost_of_k_tiles(*call.parts[i]);
    const auto divide = [&] {
        for (int i = 0; i < call.count; ++i) {
            divide_k_tiles(args.parts[i], *call.parts[i], costs.of[i], args.blocks());
        }
    };
    ClusterOccupancy occupancy;
    const cudaError_t error =
        cluster_occupancy<kRows, is_by_rows, has_small>(&occupancy, info, shared_bytes);
    if (error != cudaSuccess) return error;
    if (call.is_invariant) {
        constexpr int kShared =
            228 * 1024 / blocks_per_multiprocessor(kInvariantRows, has_small) - 1024;
        ClusterOccupancy chosen;
        const cudaError_t failure = cluster_occupancy<kInvariantRows, false, has_small>(
            &chosen, info, std::min(kShared, info.shared_per_block)
        );
        if (failure != cudaSuccess) return failure;
        choose_partition(args, costs, chosen, kInvariantRows, false);
        divide();
        if (!is_by_rows && !has_small && suits_many_rows(args, info)) {
            return quant_many_rows(args, max_k_tile_bytes(call), info, stream);
        }
    } else {
        choose_partition(args, costs, occupancy, kRows, kRows <= 32);
        divide();
    }
    args.workspace = static_cast<uint8_t*>(call.workspace);
    const auto max_clusters = static_cast<uint32_t>(std::max(1, occupancy.max_active[args.splits]));
    const uint32_t num_clusters = args.num_tiles * args.num_chunks << args.global_split_bits;
    // The clusters of divided tiles have one tile each. If they do not all fit at once, as in the
    // batch-invariant mode, the last ones start when others have ended.
    const bool has_one_tile = args.is_split() || num_clusters <= max_clusters;
    args.portion = portion_of(args, kRows);
    args.portion_reciprocal = static_cast<uint32_t>(ceil_div(1 << 16, args.portion));
    const int partial_bytes =
        args.num_partials() * args.portion * kWarp * static_cast<int>(sizeof(float4));
    const int gate_sums = args.is_gated() ? partial_bytes : 0;
    // If sums have a buffer of their own, a block sends them without waiting until all blocks have
    // consumed their stages. Otherwise they overwrite the stages, which can be larger then. That is
    // possible with one tile per block only: with several, the stages already receive the next
    // tile.
    const bool sums_in_stages = has_one_tile && (args.is_gated() || !args.is_split());
    const int sums = sums_in_stages ? 0 : partial_bytes;
    args.pipeline_bytes = (shared_bytes - state - gate_sums - sums) / 128 * 128;
    args.gate_sums_offset = args.pipeline_bytes + state;
    args.sums_offset = sums_in_stages ? 0 : args.gate_sums_offset + gate_sums;
    args.num_clusters = has_one_tile ? num_clusters : max_clusters;
    return launch_clusters(
        small_batch_kernel<kRows, is_by_rows, has_small>, dim3(args.num_clusters * args.splits),
        dim3(kSmallBatchThreads), args.splits, args.pipeline_bytes + state + gate_sums + sums,
        stream, args
    );
}

template <bool is_by_rows, bool has_small>
cudaError_t launch_rows(
    SmallBatchArgs& args, const ExlQuantLinear& call, const DeviceInfo& info, void* stream
) {
    if (args.m <= 16) return launch_shape<16, is_by_rows, has_small>(args, call, info, stream);
    if (args.m <= 32) return launch_shape<32, is_by_rows, has_small>(args, call, info, stream);
    return launch_shape<64, is_by_rows, has_small>(args, call, info, stream);
}

}  // namespace

int64_t small_batch_workspace() { return kCounterBytes + kMaxGlobalBlocks * kGlobalSumBytes; }

cudaError_t quant_small_batch(
    const ExlQuantLinear& call, const ExlPartialCopies& copies, int first, int rows,
    const DeviceInfo& info, void* stream
) {
    SmallBatchArgs args = {};
    const bool is_gated = call.epilogue == EXL_EPILOGUE_GATED;
    bool has_small = false;
    int columns = 0;
    args.epilogue = call.epilogue;
    args.num_groups = is_gated ? 1 : call.count;
    for (int i = 0; i < call.count; ++i) {
        const ExlQuantMatrix& w = *call.parts[i];
        has_small |= has_small_groups(w.offset_kind);
        const auto* inputs =
            static_cast<const __half*>(call.inputs[i]) +
            first / EXL_CUDA_CHUNK_ROWS * exl_cuda_chunk_halves(EXL_CUDA_CHUNK_ROWS, w.num_blocks);
        args.parts[i] = make_part(w, inputs, is_gated ? 0 : columns);
        args.parts[i].chunk_halves = exl_cuda_chunk_halves(EXL_CUDA_CHUNK_ROWS, w.num_blocks);
        columns += w.n;
    }
    args.y = static_cast<uint8_t*>(call.y) + first * call.y_stride * (call.y_dtype == kF16 ? 2 : 4);
    args.y_stride = call.y_stride;
    args.copies = copies;
    args.row_shift = copies.is_divided ? copies.row_shift : -1;
    args.inverse_permutation = call.inverse_permutation;
    args.y_dtype = call.y_dtype;
    args.gate = call.gate;
    args.m = std::min(rows, EXL_CUDA_CHUNK_ROWS);
    args.num_chunks = static_cast<uint32_t>(rows / args.m);
    if (has_small) {
        return call.is_by_rows ? launch_rows<true, true>(args, call, info, stream)
                               : launch_rows<false, true>(args, call, info, stream);
    }
    return call.is_by_rows ? launch_rows<true, false>(args, call, info, stream)
                           : launch_rows<false, false>(args, call, info, stream);
}

}  // namespace exl::cuda

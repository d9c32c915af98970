// Products of one row with the matrices of its experts.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_row).
// Mapping    One launch. Pairs need no sorting: pair j is slot j of the row. The first thread blocks
//            compute gate and up: each takes a pair and a tile of column panels, as `experts.cu`. The
//            last ones compute down: a cluster takes a column panel of all pairs, and its warps take
//            slices of pairs, successive ones if there are more slices than warps. The cluster's first
//            block adds up the weighted outputs, in the order of the slots. In every block of gate
//            and up the first warp chooses the experts again, as far as its own. The first block of
//            the last slot chooses all of them and publishes them to the blocks of down, which may
//            begin late (row_counters.cuh).
// Accuracy   The sums of `experts.cu` and of exl_cuda_expert_sum, in the same order: the same bits.
// Order      The blocks of down start the copies of their weights. A warp then waits until a counter
//            says that all tiles of gate and up of its pair are stored. Blocks start in the order of
//            their numbers, so that all blocks that are waited for have started before.
// Overlap    Registers and shared memory are limited so that three thread blocks fit on a
//            multiprocessor: those of down copy while those of gate and up multiply.
// Floor      The bytes of top_k experts, at memory bandwidth. Latency dominates: a chain of the
//            choice, the first loads, the tiles' counters and the inputs of down.
#include "cuda/common/hopper.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/moe/choice.cuh"
#include "cuda/moe/experts.cuh"
#include "cuda/moe/row_counters.cuh"

namespace exl::cuda {

namespace {

constexpr int kThreads = kWarps * kWarp;
constexpr int kClusterBlocks = 2, kMaxClusterBlocks = 4;
// Three thread blocks fit on a multiprocessor of 9.0.
constexpr int kThirdOfShared = 75 << 10;

// Thread blocks of a multiprocessor for which registers are limited. Dense matrices have four blocks
// of weights in flight in registers; with three thread blocks there would be room for two.
constexpr int blocks_per_multiprocessor(int source) { return source == EXL_EXPERTS_CODES ? 3 : 2; }

extern __shared__ __align__(128) uint8_t shared[];

// The products of a launch. Blocks 0 .. num_tiles * top_k - 1 of the grid, which `first_blocks` rounds
// up to whole clusters, compute gate and up, the others down.
struct RowArgs {
    ExpertArgs parts[2];  // gate and up; down
    const int32_t* ids;
    const float* weights;
    uint32_t* counters;  // of RowCounters; null: no block waits
    int32_t top_k;
    int32_t num_tiles;  // of a pair
    int32_t first_blocks;
    int32_t unit_slices;  // of a pair of down, that a warp adds one after the other
    int32_t is_early;     // down alone: its weights are copied before the previous kernel has ended
    int32_t sums_offset, rows_offset, experts_offset;  // in shared memory, in bytes
};

// Sums of a slice of a pair, for the 32 columns of a panel.
struct SliceSums {
    float columns[32];
};

// Experts of the row, in shared memory.
struct RowExperts {
    int32_t* ids;    // [top_k]
    float* weights;  // [top_k]
    Scratch scratch;

    __host__ __device__ static int bytes(const ExlRoute& route, int top_k) {
        const bool chooses = route.logits != nullptr;
        const size_t choice = chooses ? Scratch::bytes(route.experts) : 0;
        return 2 * padded(top_k) * static_cast<int>(sizeof(float)) + static_cast<int>(choice);
    }
    __device__ __forceinline__ RowExperts(uint8_t* memory, const ExlRoute& route, int top_k)
        : ids(reinterpret_cast<int32_t*>(memory)),
          weights(reinterpret_cast<float*>(ids + padded(top_k))),
          scratch(weights + padded(top_k), route.experts) {}

    // Reads or chooses the first `count` ids and, with `has_weights`, all weights. Without weights, a
    // last id that is a shared expert is known without a choice, and the only one written. For one
    // warp.
    __device__ __forceinline__ void load(
        const ExlRoute& route, const int32_t* from_ids, const float* from_weights, int count,
        bool has_weights, int lane
    ) {
        if (route.logits != nullptr && has_weights) {
            choose_experts(route, route.logits, route.top_k, ids, weights, scratch, lane);
            add_shared_experts(route, route.logits, ids, weights, lane);
        } else if (route.logits != nullptr && count <= route.top_k) {
            choose_experts(route, route.logits, count, ids, nullptr, scratch, lane);
        } else if (route.logits != nullptr) {
            if (lane == 0) ids[count - 1] = route.experts + count - 1 - route.top_k;
        } else if (lane < count) {
            ids[lane] = __ldcg(from_ids + lane);
            if (has_weights) weights[lane] = __ldcg(from_weights + lane);
        }
    }

  private:
    __host__ __device__ static int padded(int top_k) { return (top_k + 3) / 4 * 4; }
};

// ---- the kernel --------------------------------------------------------------------------------

// Copies a row to shared memory as float16, by all warps except the first one, which chooses.
template <class X>
__device__ __forceinline__ void copy_row(__half* to, const void* x, int64_t offset, int k) {
    constexpr int kCopying = kThreads - kWarp;
    const X* const from = static_cast<const X*>(x) + offset;
    for (int i = (threadIdx.x - kWarp) * kVector; i < k; i += kCopying * kVector) {
        float values[kVector];
        load_floats(from + i, kVector, true, values);
        store_vector(to + i, kVector, true, values);
    }
}

// This block's place in its cluster, and the number of blocks of the cluster.
struct Cluster {
    int rank = 0, size = 1;

    __device__ __forceinline__ Cluster() {
#if EXL_IS_HOPPER
        uint32_t blocks;
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
        rank = static_cast<int>(cluster_rank()), size = static_cast<int>(uniform(blocks));
        if (size > 1) cluster_arrive();  // this block has started
#endif
    }
    // Stores a number in the first block's shared memory, at the offset that `to` has in this block.
    __device__ __forceinline__ static void store_in_first(float* to, float value) {
#if EXL_IS_HOPPER
        asm volatile(
            "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, 0;\n"
            " st.shared::cluster.f32 [there], %1;\n}" ::"r"(shared_offset(to)),
            "f"(value)
            : "memory"
        );
#endif
    }
    // Waits until all blocks have started.
    __device__ __forceinline__ void wait_for_start() const {
#if EXL_IS_HOPPER
        if (size > 1) cluster_wait();
#endif
    }
    // Waits for all blocks; what they have stored is visible afterwards.
    __device__ __forceinline__ void sync() const {
#if EXL_IS_HOPPER
        if (size > 1) {
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }
};

// Blocks of k that some consecutive loads of a matrix have.
struct Blocks {
    int first, end;
};

template <class Shape>
__device__ __forceinline__ Blocks blocks_of(
    const ExlExpertLinear& call, const ExlExpertMatrix& w, int first, int last
) {
    if (Shape::kIsDense || first >= last) return {first, last};
    const Load last_one = load_of<Shape>(call, w, last - 1);
    const Load first_one = load_of<Shape>(call, w, first);
    return {first_one.first_block(), last_one.first_block() + last_one.blocks()};
}

// Copies those blocks of a row to shared memory, by one warp. The previous kernel or other thread
// blocks of this one have written the row.
__device__ __forceinline__ void copy_inputs(
    __half* to, const __half* row, const Blocks& blocks, int lane
) {
    const auto* const from = reinterpret_cast<const uint4*>(row + 32 * blocks.first);
    __syncwarp();  // all have read the inputs of the last unit
#pragma unroll 2
    for (int i = lane; i < 4 * (blocks.end - blocks.first); i += kWarp) {
        reinterpret_cast<uint4*>(to)[i] = __ldcg(from + i);
    }
    __syncwarp();
}

// A warp's unit of work: successive slices of the k of a column panel, for one pair.
struct Unit {
    int pair;
    WarpWork work;
    ExlExpertMatrix w;  // `tiles` are those of the panel, except of a dense matrix
    int first, last;    // loads
};

// Adds the slices and the bias of each pair, with all warps. The sums replace those of the first
// slice.
__device__ __forceinline__ void add_pairs(
    SliceSums* sums, int top_k, int slices, int warp, int lane
) {
    const SliceSums* const biases = sums + top_k * slices;
    for (int pair = warp; pair < top_k; pair += kWarps) {
        float& to = sums[pair * slices].columns[lane];
        to = add_slices(&to, slices, 0, 32) + biases[pair].columns[lane];
    }
}
// Weighted sum of the pairs of a lane's column, in order.
__device__ __forceinline__ float weighted_sum(
    const SliceSums* sums, const float* weights, int top_k, int slices, int lane
) {
    float y = 0.0f;
#pragma unroll 4
    for (int pair = 0; pair < top_k; ++pair) {
        y = fmaf(weights[pair], sums[pair * slices].columns[lane], y);
    }
    return y;
}

template <class X, int source, uint32_t only>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(source)) row_kernel(
    const __grid_constant__ RowArgs args, const __grid_constant__ ExlRoute route
) {
    using Shape = ExpertShape<1, true, source, only>;
    const Cluster cluster;
    const int block = static_cast<int>(blockIdx.x);
    const bool is_down = block >= args.first_blocks;
    const ExpertArgs& own = args.parts[is_down];
    const ExlExpertLinear& call = own.call;
    auto* const barriers = reinterpret_cast<WarpBarriers*>(shared + args.sums_offset) - kWarps;
    auto* const sums = reinterpret_cast<SliceSums*>(shared + args.sums_offset);
    auto* const rows = reinterpret_cast<__half*>(shared + args.rows_offset);
    RowExperts experts(shared + args.experts_offset, route, args.top_k);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    Ring ring(
        shared + warp * own.num_stages * own.stage_bytes, barriers + warp, own.num_stages,
        own.stage_bytes, lane
    );
    const bool has_two = !is_down && call.x[1] != call.x[0];  // each part has its own order
    const int tile_pair = is_down ? 0 : block / args.num_tiles;
    const int tile =
        is_down ? (block - args.first_blocks) / cluster.size : block - tile_pair * args.num_tiles;
    const int slices = kWarps >> own.unit_bits;
    const int unit_slices = is_down && !Shape::kIsDense ? args.unit_slices : 1;
    const int pair_units = slices / unit_slices;
    const bool has_tile = is_down || tile_pair < args.top_k;
    const int num_units = is_down ? args.top_k * pair_units : has_tile ? kWarps : 0;
    const int first_unit = is_down ? cluster.rank * kWarps + warp : warp;
    const RowCounters counters(args.counters);
    const bool is_published = args.counters != nullptr && route.logits != nullptr;
    cluster.wait_for_start();
    if (!args.is_early) wait_for_inputs();
    let_next_begin();
    if (warp == 0 && is_down && is_published) {
        counters.read_published(experts.ids, experts.weights, args.top_k, lane);
    } else if (warp == 0) {
        const bool publishes = is_published && block == (route.top_k - 1) * args.num_tiles;
        const bool needs_all = is_down || publishes;
        const int count = needs_all ? args.top_k : min(tile_pair + 1, args.top_k);
        experts.load(route, args.ids, args.weights, count, needs_all, lane);
        __syncwarp();
        if (publishes) counters.publish(experts.ids, experts.weights, args.top_k, lane);
    } else if (!is_down && has_tile) {
        const int64_t row = static_cast<int64_t>(tile_pair / call.pairs_per_row) * call.x_stride;
        copy_row<X>(rows, call.x[0], row, call.k);
        if (has_two) copy_row<X>(rows + call.k, call.x[1], row, call.k);
    }
    __syncthreads();
    const auto start = [&](int number) {
        Unit unit = {tile_pair, WarpWork::of(own, tile, warp), {}, 0, 0};
        if (is_down) {
            unit.pair = number / pair_units;
            unit.work = {0, tile, number % pair_units, pair_units};
        }
        const int expert = static_cast<int>(uniform(experts.ids[unit.pair]));
        unit.w = matrix_of<Shape>(call, expert, unit.work.part);
        unit.first = unit.work.first(unit.w);
        unit.last = unit.work.panel * 32 < call.n ? unit.work.last(unit.w) : unit.first;
        if constexpr (!Shape::kIsDense) {
            unit.w.tiles += unit.work.panel * unit.w.panel_bytes;
            fill_ring<Shape>(own, unit.w, ring, unit.w.tiles, unit.first, unit.last);
        }
        return unit;
    };
    Unit unit = {};
    const int step = cluster.size * kWarps;
    if (first_unit < num_units) unit = start(first_unit);
    // Operands of the epilogues are read while the weights arrive.
    const int column = 32 * tile + lane;
    const bool adds_up = is_down && cluster.rank == 0;
    const bool stores = adds_up && warp == 0 && column < call.n;
    const ExlExpertItem item = {has_tile ? experts.ids[tile_pair] : 0, tile_pair, 1, 0};
    const TileOutputs outputs(own, item);
    for (int pair = warp; adds_up && pair < args.top_k; pair += kWarps) {
        float bias = 0.0f;
        if (call.has_bias && column < call.n) {
            const float* const from = call.matrices[experts.ids[pair]].bias;
            if (from != nullptr) bias = from[column];
        }
        sums[args.top_k * slices + pair].columns[lane] = bias;
    }
    if (args.is_early) wait_for_inputs();
    float before = 0.0f;
    if (stores && call.epilogue == EXL_EPILOGUE_ADD) before = static_cast<float*>(call.y)[column];
#pragma unroll 1
    for (int number = first_unit; number < num_units; number += step) {
        if (number != first_unit) unit = start(number);
        Blocks blocks = {};
        __half* inputs = rows + (has_two ? unit.work.part * call.k : 0);
        if (is_down) {
            inputs = rows + warp * own.warp_inputs;
            blocks = blocks_of<Shape>(call, unit.w, unit.first, unit.last);
        }
        bool is_prepared = !is_down;
        const auto prepare = [&] {
            if (is_prepared) return;
            is_prepared = true;
            if (args.counters != nullptr) {
                counters.wait_for_tiles(unit.pair, args.num_tiles, lane);
            }
            const int64_t row = static_cast<int64_t>(unit.pair / call.pairs_per_row);
            const auto* const x = static_cast<const __half*>(call.x[0]);
            copy_inputs(inputs, x + row * call.x_stride, blocks, lane);
        };
        const SharedRow x(inputs, blocks.first, lane);
        int first = unit.first;
#pragma unroll 1
        for (int i = 0; i < unit_slices; ++i) {
            const int slice = unit.work.slice * unit_slices + i;
            const int last = is_down ? unit.w.num_loads * (slice + 1) / slices : unit.last;
            PanelSums<Shape> total = {};
            if constexpr (Shape::kIsDense) {
                sum_dense<Shape>(
                    total, own, unit.w, unit.work.panel, first, last, x, lane, prepare
                );
            } else {
                sum_loads<Shape>(
                    total, own, unit.w, ring, unit.w.tiles, first, last, unit.last, x, lane, prepare
                );
            }
            first = last;
            float* const to = sums[number * unit_slices + i].columns;
            store_sums<Shape>(total, to, 1, lane);
            if (!is_down || cluster.rank == 0) continue;
            __syncwarp();
            Cluster::store_in_first(to + lane, to[lane]);
        }
    }
    if (is_down) {
        cluster.sync();
        if (cluster.rank != 0) return;
        if (args.counters != nullptr && threadIdx.x == kThreads - 1) {
            counters.end((gridDim.x - args.first_blocks) / cluster.size, args.top_k);
        }
        add_pairs(sums, args.top_k, slices, warp, lane);
        __syncthreads();
        if (!stores) return;
        const float y = weighted_sum(sums, experts.weights, args.top_k, slices, lane);
        static_cast<float*>(call.y)[column] = before + y;
        return;
    }
    __syncthreads();
    if (!has_tile) return;
    store_tile(own, item, outputs, tile, sums->columns, 32);
    if (args.counters != nullptr) counters.add_stored_tile(tile_pair);
}

// ---- host --------------------------------------------------------------------------------------

// Common kinds of loads that have kernels of their own. The kernel of all kinds has 240 KB of code and
// spills registers.
constexpr uint32_t kGptq = only_loads(4, EXL_VALUES_INTEGERS, kPlainFactors, kStageBlocks);
constexpr uint32_t kAwq = only_loads(4, EXL_VALUES_INTEGERS, EXL_OFFSET_ZEROS, kStageBlocks);
constexpr uint32_t kQ40 = only_loads(4, EXL_VALUES_INTEGERS, kPlainFactors, 1);
constexpr uint32_t kMxfp4Loads = only_loads(4, EXL_VALUES_MXFP4, kFloatFactors, 1);

template <class X>
auto kernel_for(int source, uint32_t only) {
    switch (source) {
        case EXL_EXPERTS_DENSE: return row_kernel<X, EXL_EXPERTS_DENSE, 0>;
        case EXL_EXPERTS_SMALL_GROUPS: return row_kernel<X, EXL_EXPERTS_SMALL_GROUPS, 0>;
    }
    switch (only) {
        case kGptq: return row_kernel<X, EXL_EXPERTS_CODES, kGptq>;
        case kAwq: return row_kernel<X, EXL_EXPERTS_CODES, kAwq>;
        case kQ40: return row_kernel<X, EXL_EXPERTS_CODES, kQ40>;
        case kMxfp4Loads: return row_kernel<X, EXL_EXPERTS_CODES, kMxfp4Loads>;
        default: return row_kernel<X, EXL_EXPERTS_CODES, 0>;
    }
}

// ExlExpertLinear::only of all products together; 0 if they differ.
uint32_t common_loads(const RowArgs& args, bool has_first, bool has_down) {
    const uint32_t first = args.parts[0].call.only, down = args.parts[1].call.only;
    if (has_first && has_down) return first == down ? first : 0;
    return has_first ? first : down;
}

// Whether the loads of a matrix cover its rows with four blocks each; the last one may have fewer.
bool has_four_blocks(const ExlExpertLinear& call) {
    return call.num_loads == ceil_div(call.k / 32, kStageBlocks);
}

// The most loads that a warp copies one after the other.
int max_warp_loads(const ExpertArgs& args, int unit_slices) {
    return static_cast<int>(
        ceil_div(args.call.num_loads, (kWarps >> args.unit_bits) / unit_slices)
    );
}

// Sets the number of stages beside `rest` bytes. Returns the bytes of the rings; 0 if none fit.
int size_rings(ExpertArgs& args, int unit_slices, int rest, int most) {
    args.stage_bytes = static_cast<int>(ceil_div(args.call.load_bytes, 128) * 128);
    const auto stages_in = [&](int bytes) { return (bytes - rest) / (kWarps * args.stage_bytes); };
    // Fewer stages let more thread blocks fit, and two are enough to hide latency.
    const int few = stages_in(std::min(kThirdOfShared, most));
    const int stages = few >= 2 ? few : stages_in(most);
    const int loads = max_warp_loads(args, unit_slices);
    args.num_stages = std::min({kMaxRingStages, stages, std::max(loads, 1)});
    return std::max(args.num_stages, 0) * kWarps * args.stage_bytes;
}

bool is_valid(const ExlExpertLinear& call, bool is_down) {
    const bool is_gated = call.epilogue == EXL_EPILOGUE_GATED;
    const bool has_epilogue =
        is_down ? call.epilogue == EXL_EPILOGUE_STORE || call.epilogue == EXL_EPILOGUE_ADD
                : is_gated || call.epilogue == EXL_EPILOGUE_ACTIVATED;
    return has_epilogue && call.parts == (is_gated ? 2 : 1) && call.n >= 1 && call.num_loads >= 1 &&
           call.load_bytes >= 16 && call.pairs_per_row >= 1 && call.x_stride % 8 == 0 &&
           call.k >= 32 && call.k % 32 == 0 && call.pairs == nullptr &&
           (call.only == 0 || has_four_blocks(call)) &&
           (call.x_dtype == kF16 || (!is_down && call.x_dtype == kF32));
}

// Source of both products: kernels of small groups know all codes. -1 if there is none.
int common_source(const ExlExpertLinear* first, const ExlExpertLinear* down) {
    if (first == nullptr || down == nullptr) return (first == nullptr ? down : first)->source;
    const bool is_dense = first->source == EXL_EXPERTS_DENSE;
    if (is_dense != (down->source == EXL_EXPERTS_DENSE)) return -1;
    return std::max(first->source, down->source);
}

// Thread blocks of a cluster. With enough of them, each warp has fewer units of down or a smaller one,
// which then take less time. The blocks of down have to fit on the device together: those of gate and
// up have ended when the last ones of down begin.
int cluster_blocks(const RowArgs& args, bool has_down, int source, const DeviceInfo& info) {
    if (!has_down) return kClusterBlocks;
    const ExpertArgs& down = args.parts[1];
    const int64_t wanted = ceil_div(args.top_k * (kWarps >> down.unit_bits), kWarps);
    const int64_t panels = ceil_div(down.call.n, 32);
    const int64_t places = blocks_per_multiprocessor(source) * info.multiprocessors;
    const bool fits = kMaxClusterBlocks * panels <= places;
    return fits && wanted > kClusterBlocks
               ? static_cast<int>(std::min<int64_t>(wanted, kMaxClusterBlocks))
               : kClusterBlocks;
}

// Numbers of a row that a warp of down needs for its unit.
int unit_inputs(const ExpertArgs& down, int unit_slices, int source) {
    const int load_blocks = source == EXL_EXPERTS_DENSE ? 1 : kStageBlocks;
    return 32 * load_blocks * max_warp_loads(down, unit_slices);
}

// Slices that a warp of down adds one after the other, so that each warp has one unit: it would copy
// the weights of a second one after it has multiplied the first. Dense matrices have no ring. Inputs
// of large units would leave no space for weights in flight.
int unit_slices_for(const ExpertArgs& down, int top_k, int cluster, int source) {
    constexpr int kMostInputs = (16 << 10) / (kWarps * sizeof(__half));
    const int slices = kWarps >> down.unit_bits;
    int unit = 1;
    while (source != EXL_EXPERTS_DENSE && unit < slices &&
           top_k * (slices / unit) > cluster * kWarps &&
           unit_inputs(down, 2 * unit, source) <= kMostInputs) {
        unit *= 2;
    }
    return unit;
}

cudaError_t launch_row(
    RowArgs& args, bool has_first, bool has_down, int source, const ExlRoute& route,
    const DeviceInfo& info, void* stream
) {
    const int most = std::min(kMaxSharedBytes, info.shared_per_block), top_k = args.top_k;
    const int cluster = info.capability == 90 ? cluster_blocks(args, has_down, source, info) : 1;
    int row_bytes = 0, num_sums = kWarps, blocks = 0;
    if (has_first) {
        const ExlExpertLinear& call = args.parts[0].call;
        const int64_t panels = ceil_div(call.n, 32);
        row_bytes = (call.x[0] != call.x[1] ? 4 : 2) * call.k;
        args.num_tiles = static_cast<int>(ceil_div(panels, 1 << args.parts[0].part_bits()));
        args.first_blocks = static_cast<int>(ceil_div(args.num_tiles * top_k, cluster) * cluster);
        blocks = args.first_blocks;
    }
    if (has_down) {
        ExpertArgs& down = args.parts[1];
        args.unit_slices = unit_slices_for(down, top_k, cluster, source);
        down.warp_inputs = unit_inputs(down, args.unit_slices, source);
        row_bytes = std::max(row_bytes, 2 * kWarps * down.warp_inputs);
        num_sums = std::max(num_sums, top_k * ((kWarps >> down.unit_bits) + 1));
        blocks += static_cast<int>(ceil_div(down.call.n, 32) * cluster);
    }
    row_bytes = static_cast<int>(ceil_div(row_bytes, 16) * 16);
    const int barrier_bytes = kWarps * static_cast<int>(sizeof(WarpBarriers));
    const int sums_bytes = num_sums * static_cast<int>(sizeof(SliceSums));
    const int rest = barrier_bytes + sums_bytes + row_bytes + RowExperts::bytes(route, top_k);
    int ring_bytes = 0;
    for (int i = has_first ? 0 : 1; i < (has_down ? 2 : 1); ++i) {
        const int bytes = size_rings(args.parts[i], i == 0 ? 1 : args.unit_slices, rest, most);
        if (bytes == 0) return cudaErrorInvalidValue;
        ring_bytes = std::max(ring_bytes, bytes);
    }
    args.sums_offset = ring_bytes + barrier_bytes;
    args.rows_offset = args.sums_offset + sums_bytes;
    args.experts_offset = args.rows_offset + row_bytes;
    const bool is_float = has_first && args.parts[0].call.x_dtype == kF32;
    const uint32_t only = common_loads(args, has_first, has_down);
    const auto kernel =
        is_float ? kernel_for<float>(source, only) : kernel_for<__half>(source, only);
    if (cudaError_t error = prefer_shared_memory(kernel); error != cudaSuccess) return error;
    return launch_clusters(
        kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), cluster, ring_bytes + rest,
        stream, args, route
    );
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_row(
    const ExlExpertLinear* first, const ExlExpertLinear* down, const ExlRoute* route,
    const int32_t* ids, const float* weights, int32_t top_k, uint32_t* counters, void* stream
) {
    using namespace exl::cuda;
    const bool has_first = first != nullptr, has_down = down != nullptr;
    const bool has_experts =
        route == nullptr ? ids != nullptr && (weights != nullptr || !has_down)
                         : route->logits != nullptr && route->m == 1 && slots_of(*route) == top_k &&
                               route->shared >= 0 && route->top_k <= route->experts &&
                               route->experts <= EXL_CUDA_MAX_EXPERTS;
    const bool fits =
        (has_first || has_down) && has_experts && (!has_first || is_valid(*first, false)) &&
        (!has_down || is_valid(*down, true)) && top_k >= 1 && top_k <= EXL_CUDA_MAX_ROW_EXPERTS &&
        (counters != nullptr || !(has_first && has_down));
    if (!fits) return cudaErrorInvalidValue;
    const int source = common_source(first, down);
    if (source < 0) return cudaErrorInvalidValue;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    RowArgs args = {};
    for (int i = 0; i < 2; ++i) {
        const ExlExpertLinear* const call = i == 0 ? first : down;
        if (call == nullptr) continue;
        args.parts[i].call = *call;
        args.parts[i].unit_bits = unit_bits_for(*call);
    }
    args.ids = ids;
    args.weights = weights;
    args.counters = has_first && has_down ? counters : nullptr;
    args.top_k = top_k;
    args.is_early = !has_first;
    const ExlRoute choice = route == nullptr ? ExlRoute{} : *route;
    return launch_row(args, has_first, has_down, source, choice, info, stream);
}

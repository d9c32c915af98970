// Products of one row with the matrices of its experts.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_row).
// Mapping    Pairs need no sorting: pair j is slot j of the row. `gate_up_kernel` has a thread block
//            per pair and tile of column panels, as `experts.cu`. Its first warp chooses the experts,
//            in every thread block again, while the other ones round the row to float16 in shared
//            memory. `down_kernel` has a cluster of thread blocks per column panel. Their warps take
//            the pairs' slices, and the first block adds up the weighted outputs, in the order of
//            the slots.
// Accuracy   The sums of `experts.cu` and of exl_cuda_expert_sum, in the same order: the same bits.
// Overlap    `gate_up_kernel` lets the next kernel begin only after its own wait. All kernels before
//            it have ended then, so that `down_kernel` may read the ids or logits before its wait,
//            and loads its first weights while those of gate and up are multiplied. Registers and
//            shared memory are limited so that thread blocks of both kernels fit on a
//            multiprocessor.
// Floor      The bytes of top_k experts, at memory bandwidth. Latency dominates: the logits, the
//            table of matrices, and the first loads are read one after another.
#include "cuda/common/hopper.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/moe/choice.cuh"
#include "cuda/moe/experts.cuh"

namespace exl::cuda {

namespace {

template <int source>
using Shape = ExpertShape<1, true, source>;

constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxDownBlocks = 4;  // of a cluster of `down_kernel`
// Three thread blocks fit on a multiprocessor of 9.0.
constexpr int kThirdOfShared = 75 << 10;

extern __shared__ __align__(128) uint8_t shared[];

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

    // Reads or chooses the first `count` ids and, with `has_weights`, all weights. For one warp.
    __device__ __forceinline__ void load(
        const ExlRoute& route, const int32_t* from_ids, const float* from_weights, int count,
        bool has_weights, int lane
    ) {
        if (route.logits != nullptr) {
            float* const to = has_weights ? weights : nullptr;
            choose_experts(route, route.logits, count, ids, to, scratch, lane);
        } else if (lane < count) {
            ids[lane] = __ldcg(from_ids + lane);
            if (has_weights) weights[lane] = __ldcg(from_weights + lane);
        }
    }

  private:
    __host__ __device__ static int padded(int top_k) { return (top_k + 3) / 4 * 4; }
};

// ---- gate and up -------------------------------------------------------------------------------

// Copies a row to shared memory as float16, by all warps except the first one, which chooses.
template <class X>
__device__ __forceinline__ void copy_row(__half* to, const void* x, int k) {
    constexpr int kCopying = kThreads - kWarp;
    const X* const from = static_cast<const X*>(x);
    for (int i = (threadIdx.x - kWarp) * kVector; i < k; i += kCopying * kVector) {
        float values[kVector];
        load_floats(from + i, kVector, true, values);
        store_vector(to + i, kVector, true, values);
    }
}

template <class X, int source>
__global__ void __launch_bounds__(kThreads, source == EXL_EXPERTS_CODES ? 3 : 2) gate_up_kernel(
    const __grid_constant__ ExpertArgs args, const __grid_constant__ ExlRoute route,
    const int32_t* const ids, const int top_k
) {
    using Shape = Shape<source>;
    const ExlExpertLinear& call = args.call;
    auto* const barriers = reinterpret_cast<WarpBarriers*>(shared + args.ring_bytes);
    auto* const rows = reinterpret_cast<__half*>(barriers + kWarps);
    const bool has_two = call.x[1] != call.x[0];  // each part has its own order
    RowExperts experts(reinterpret_cast<uint8_t*>(rows + (has_two ? 2 : 1) * call.k), route, top_k);
    const int pair = static_cast<int>(blockIdx.y);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const WarpWork work = WarpWork::of(args, blockIdx.x, warp);
    Ring ring(
        shared + warp * args.num_stages * args.stage_bytes, barriers + warp, args.num_stages,
        args.stage_bytes, lane
    );
    wait_for_inputs();
    let_next_begin();
    if (warp == 0) {
        experts.load(route, ids, nullptr, pair + 1, false, lane);
    } else {
        const int64_t row = static_cast<int64_t>(pair / call.pairs_per_row) * call.x_stride;
        copy_row<X>(rows, static_cast<const X*>(call.x[0]) + row, call.k);
        if (has_two) copy_row<X>(rows + call.k, static_cast<const X*>(call.x[1]) + row, call.k);
    }
    __syncthreads();
    const ExlExpertItem item = {static_cast<int32_t>(uniform(experts.ids[pair])), pair, 1, 0};
    const ExlExpertMatrix w = matrix_of(call, item.expert, work.part);
    const int first = work.first(w), last = work.panel * 32 < call.n ? work.last(w) : first;
    const uint8_t* const bytes = w.tiles + work.panel * w.panel_bytes;
    if constexpr (!Shape::kIsDense) fill_ring(args, w, ring, bytes, first, last);
    const TileOutputs outputs(args, item);
    PanelSums<Shape> total = {};
    const SharedRow own(rows + (has_two ? work.part * call.k : 0), 0, lane);
    if constexpr (Shape::kIsDense) {
        sum_dense<Shape>(total, args, w, work.panel, first, last, own, lane);
    } else {
        sum_loads<Shape>(total, args, w, ring, bytes, first, last, own, lane);
    }
    __syncthreads();  // the sums overwrite the stages
    auto* const sums = reinterpret_cast<float*>(shared);
    store_sums<Shape>(total, sums + warp * kPitch, 1, lane);
    __syncthreads();
    store_tile(args, item, outputs, sums, kPitch);
}

// ---- down --------------------------------------------------------------------------------------

// Sums of one unit, a slice of a pair, for the 32 columns of a panel.
struct UnitSums {
    float columns[32];
};

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

template <bool is_dense>
__device__ __forceinline__ Blocks blocks_of(const ExlExpertMatrix& w, int first, int last) {
    if (is_dense || first >= last) return {first, last};
    const Load last_one = Load::at(w.loads, last - 1);
    return {Load::at(w.loads, first).first_block(), last_one.first_block() + last_one.blocks()};
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

template <int source>
__global__ void __launch_bounds__(kThreads, 2) down_kernel(
    const __grid_constant__ ExpertArgs args, const __grid_constant__ ExlRoute route,
    const int32_t* const ids, const float* const weights, const int top_k
) {
    using Shape = Shape<source>;
    const ExlExpertLinear& call = args.call;
    let_next_begin();
    const Cluster cluster;
    const int slices = kWarps >> args.unit_bits, units = top_k * slices;
    auto* const sums = reinterpret_cast<UnitSums*>(shared + args.ring_bytes);
    auto* const biases = sums + units;
    auto* const barriers = reinterpret_cast<WarpBarriers*>(biases + top_k);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    auto* const inputs = reinterpret_cast<__half*>(barriers + kWarps) + warp * args.warp_inputs;
    RowExperts experts(
        reinterpret_cast<uint8_t*>(barriers + kWarps) + 2 * kWarps * args.warp_inputs, route, top_k
    );
    const int panel = static_cast<int>(blockIdx.x) / cluster.size, column = 32 * panel + lane;
    Ring ring(
        shared + warp * args.num_stages * args.stage_bytes, barriers + warp, args.num_stages,
        args.stage_bytes, lane
    );
    if (warp == 0) experts.load(route, ids, weights, top_k, true, lane);
    __syncthreads();
    const auto start = [&](int unit) {
        const int expert = static_cast<int>(uniform(experts.ids[unit / slices]));
        const ExlExpertMatrix w = matrix_of(call, expert, 0);
        const WarpWork work = {0, panel, unit % slices, slices};
        const uint8_t* const bytes = w.tiles + panel * w.panel_bytes;
        if constexpr (!Shape::kIsDense) {
            fill_ring(args, w, ring, bytes, work.first(w), work.last(w));
        }
        return w;
    };
    const int first_unit = cluster.rank * kWarps + warp;
    ExlExpertMatrix w = {};
    if (first_unit < units) w = start(first_unit);
    for (int pair = warp; cluster.rank == 0 && pair < top_k; pair += kWarps) {
        const float* const bias = matrix_of(call, experts.ids[pair], 0).bias;
        const bool has_bias = bias != nullptr && column < call.n;
        biases[pair].columns[lane] = has_bias ? bias[column] : 0.0f;
    }
    cluster.wait_for_start();
    wait_for_inputs();
    float* const to = static_cast<float*>(call.y) + column;
    const bool stores = cluster.rank == 0 && warp == 0 && column < call.n;
    const float before = stores && call.epilogue == EXL_EPILOGUE_ADD ? __ldcg(to) : 0.0f;
    for (int unit = first_unit; unit < units; unit += cluster.size * kWarps) {
        if (unit != first_unit) w = start(unit);
        const int pair = unit / slices;
        const WarpWork work = {0, panel, unit % slices, slices};
        const int first = work.first(w), last = work.last(w);
        const Blocks blocks = blocks_of<Shape::kIsDense>(w, first, last);
        const int64_t row = static_cast<int64_t>(pair / call.pairs_per_row) * call.x_stride;
        copy_inputs(inputs, static_cast<const __half*>(call.x[0]) + row, blocks, lane);
        const SharedRow rows(inputs, blocks.first, lane);
        PanelSums<Shape> total = {};
        if constexpr (Shape::kIsDense) {
            sum_dense<Shape>(total, args, w, panel, first, last, rows, lane);
        } else {
            const uint8_t* const bytes = w.tiles + panel * w.panel_bytes;
            sum_loads<Shape>(total, args, w, ring, bytes, first, last, rows, lane);
        }
        float* const own = sums[unit].columns;
        store_sums<Shape>(total, own, 1, lane);
        if (cluster.rank == 0) continue;
        __syncwarp();
        Cluster::store_in_first(own + lane, own[lane]);
    }
    cluster.sync();
    if (!stores) return;
    float y = 0.0f;
    for (int pair = 0; pair < top_k; ++pair) {
        const float* from = sums[pair * slices].columns + lane;
        float one = add_slices(from, slices, 0, 32);
        one += biases[pair].columns[lane];
        y = fmaf(experts.weights[pair], one, y);
    }
    *to = call.epilogue == EXL_EPILOGUE_ADD ? before + y : y;
}

// Stages of the warps' rings, and their bytes, beside `rest` bytes.
bool size_rings(ExpertArgs& args, int rest, int most) {
    const int slices = kWarps >> args.unit_bits;
    const int warp_loads = static_cast<int>(ceil_div(args.call.num_loads, slices));
    args.stage_bytes = static_cast<int>(ceil_div(args.call.load_bytes, 128) * 128);
    const auto stages_in = [&](int bytes) { return (bytes - rest) / (kWarps * args.stage_bytes); };
    // Fewer stages let more thread blocks fit, and two are enough to hide latency.
    const int stages = stages_in(kThirdOfShared) >= 2 ? stages_in(kThirdOfShared) : stages_in(most);
    args.num_stages = std::min({kMaxRingStages, stages, std::max(warp_loads, 1)});
    const int sums_bytes = kWarps * kPitch * static_cast<int>(sizeof(float));
    args.ring_bytes = std::max(kWarps * args.num_stages * args.stage_bytes, sums_bytes);
    return args.num_stages >= 1;
}

template <class X>
auto gate_up_kernel_for(int source) {
    switch (source) {
        case EXL_EXPERTS_DENSE: return gate_up_kernel<X, EXL_EXPERTS_DENSE>;
        case EXL_EXPERTS_SMALL_GROUPS: return gate_up_kernel<X, EXL_EXPERTS_SMALL_GROUPS>;
        default: return gate_up_kernel<X, EXL_EXPERTS_CODES>;
    }
}
auto down_kernel_for(int source) {
    switch (source) {
        case EXL_EXPERTS_DENSE: return down_kernel<EXL_EXPERTS_DENSE>;
        case EXL_EXPERTS_SMALL_GROUPS: return down_kernel<EXL_EXPERTS_SMALL_GROUPS>;
        default: return down_kernel<EXL_EXPERTS_CODES>;
    }
}

cudaError_t launch_first(
    ExpertArgs& args, const ExlRoute& route, const int32_t* ids, int top_k, const DeviceInfo& info,
    void* stream
) {
    const ExlExpertLinear& call = args.call;
    const int row_bytes = (call.x[0] != call.x[1] ? 4 : 2) * call.k;
    const int rest = kWarps * static_cast<int>(sizeof(WarpBarriers)) + row_bytes +
                     RowExperts::bytes(route, top_k);
    const int most = std::min(kMaxSharedBytes, info.shared_per_block);
    if (!size_rings(args, rest, most)) return cudaErrorInvalidValue;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(ceil_div(call.n, 32), 1 << args.part_bits())),
        static_cast<unsigned>(top_k)
    );
    const auto kernel = call.x_dtype == kF32 ? gate_up_kernel_for<float>(call.source)
                                             : gate_up_kernel_for<__half>(call.source);
    if (cudaError_t error = prefer_shared_memory(kernel); error != cudaSuccess) return error;
    const size_t bytes = args.ring_bytes + rest;
    return launch(kernel, grid, dim3(kThreads), bytes, stream, args, route, ids, top_k);
}

cudaError_t launch_down(
    ExpertArgs& args, const ExlRoute& route, const int32_t* ids, const float* weights, int top_k,
    const DeviceInfo& info, void* stream
) {
    const int units = top_k * (kWarps >> args.unit_bits);
    // A slice has at most this many loads, of up to kStageBlocks blocks, or blocks of a dense matrix.
    const int warp_loads =
        static_cast<int>(ceil_div(args.call.num_loads, kWarps >> args.unit_bits));
    const bool is_dense = args.call.source == EXL_EXPERTS_DENSE;
    args.warp_inputs = 32 * (is_dense ? 1 : kStageBlocks) * warp_loads;
    const int rest = static_cast<int>(
        (units + top_k) * sizeof(UnitSums) + kWarps * sizeof(WarpBarriers) +
        2 * kWarps * args.warp_inputs + RowExperts::bytes(route, top_k)
    );
    const int most = std::min(kMaxSharedBytes, info.shared_per_block);
    if (!size_rings(args, rest, most)) return cudaErrorInvalidValue;
    int blocks = 1;
    while (info.capability == 90 && blocks < kMaxDownBlocks && blocks * kWarps < units) blocks *= 2;
    const dim3 grid(static_cast<unsigned>(ceil_div(args.call.n, 32) * blocks));
    const auto kernel = down_kernel_for(args.call.source);
    if (cudaError_t error = prefer_shared_memory(kernel); error != cudaSuccess) return error;
    const size_t bytes = args.ring_bytes + rest;
    return launch_clusters(
        kernel, grid, dim3(kThreads), blocks, bytes, stream, args, route, ids, weights, top_k
    );
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_row(
    const ExlExpertLinear* call, const ExlRoute* route, const int32_t* ids, const float* weights,
    int32_t top_k, void* stream
) {
    using namespace exl::cuda;
    const bool is_gated = call->epilogue == EXL_EPILOGUE_GATED;
    const bool is_first = is_gated || call->epilogue == EXL_EPILOGUE_ACTIVATED;
    const bool is_last = call->epilogue == EXL_EPILOGUE_STORE || call->epilogue == EXL_EPILOGUE_ADD;
    const bool chooses = route != nullptr;
    const bool has_experts = chooses ? ids == nullptr && weights == nullptr &&
                                           route->logits != nullptr && route->m == 1 &&
                                           route->top_k == top_k && top_k <= route->experts &&
                                           route->experts <= EXL_CUDA_MAX_EXPERTS
                                     : ids != nullptr && is_first == (weights == nullptr);
    const bool fits = call->parts == (is_gated ? 2 : 1) && has_experts && (is_first || is_last) &&
                      call->n >= 1 && call->num_loads >= 1 && call->load_bytes >= 16 &&
                      call->pairs_per_row >= 1 && call->x_stride % 8 == 0 && call->k >= 32 &&
                      call->k % 32 == 0 && top_k >= 1 && top_k <= EXL_CUDA_MAX_ROW_EXPERTS &&
                      call->pairs == nullptr &&
                      (call->x_dtype == kF16 || (is_first && call->x_dtype == kF32));
    if (!fits) return cudaErrorInvalidValue;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const ExlRoute choice = chooses ? *route : ExlRoute{};
    ExpertArgs args = {};
    args.call = *call;
    args.unit_bits = unit_bits_for(*call);
    return is_first ? launch_first(args, choice, ids, top_k, info, stream)
                    : launch_down(args, choice, ids, weights, top_k, info, stream);
}

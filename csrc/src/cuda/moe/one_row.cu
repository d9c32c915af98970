// Products of one row with the matrices of its experts.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_row).
// Mapping    Pairs need no sorting: pair j is slot j of the row. `gate_up_kernel` has a thread block
//            per pair and tile of column panels, as `experts.cu`. It rounds the row to float16 in
//            shared memory while the first weights arrive. `down_kernel` has a thread block per
//            column panel. Its warps take the pairs' slices, and the block adds up the weighted
//            outputs, in the order of the slots.
// Accuracy   The sums of `experts.cu` and of exl_cuda_expert_sum, in the same order: the same bits.
// Overlap    `gate_up_kernel` lets the next kernel begin only after its own wait. All kernels before
//            it have ended then, so that `down_kernel` may read the ids before its wait, and loads
//            its first weights while those of gate and up are multiplied.
// Floor      The bytes of top_k experts, at memory bandwidth. Latency dominates: the ids, the table
//            of matrices, and the first loads are read one after another.
#include "cuda/common/rows.cuh"
#include "cuda/moe/experts.cuh"

namespace exl::cuda {

namespace {

template <int source>
using Shape = ExpertShape<1, true, source>;

constexpr int kThreads = kWarps * kWarp;
constexpr int kDownWarps = 16;  // most warps of a thread block of `down_kernel`

extern __shared__ __align__(128) uint8_t shared[];

// ---- gate and up -------------------------------------------------------------------------------

// Copies a row to shared memory as float16.
template <class X>
__device__ __forceinline__ void copy_row(__half* to, const void* x, int k) {
    const X* const from = static_cast<const X*>(x);
    for (int i = threadIdx.x * kVector; i < k; i += kThreads * kVector) {
        float values[kVector];
        load_floats(from + i, kVector, true, values);
        store_vector(to + i, kVector, true, values);
    }
}

template <class X, int source>
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(
    const __grid_constant__ ExpertArgs args, const int32_t* const ids
) {
    using Shape = Shape<source>;
    const ExlExpertLinear& call = args.call;
    auto* const barriers = reinterpret_cast<WarpBarriers*>(shared + args.ring_bytes);
    auto* const rows = reinterpret_cast<__half*>(barriers + kWarps);
    wait_for_inputs();
    let_next_begin();
    const int pair = static_cast<int>(blockIdx.y);
    const ExlExpertItem item = {static_cast<int32_t>(uniform(__ldcg(ids + pair))), pair, 1, 0};
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const WarpWork work = WarpWork::of(args, blockIdx.x, warp);
    const ExlExpertMatrix w = matrix_of(call, item.expert, work.part);
    const int first = work.first(w), last = work.panel * 32 < call.n ? work.last(w) : first;
    Ring ring(
        shared + warp * args.num_stages * args.stage_bytes, barriers + warp, args.num_stages,
        args.stage_bytes, lane
    );
    const uint8_t* const bytes = w.tiles + work.panel * w.panel_bytes;
    if constexpr (!Shape::kIsDense) fill_ring(args, w, ring, bytes, first, last);
    const int64_t row = static_cast<int64_t>(pair / call.pairs_per_row) * call.x_stride;
    copy_row<X>(rows, static_cast<const X*>(call.x[0]) + row, call.k);
    const bool has_two = call.x[1] != call.x[0];  // each part has its own order
    if (has_two) copy_row<X>(rows + call.k, static_cast<const X*>(call.x[1]) + row, call.k);
    __syncthreads();
    PanelSums<Shape> total = {};
    const SharedRow own(rows + (has_two ? work.part * call.k : 0), lane);
    if constexpr (Shape::kIsDense) {
        sum_dense<Shape>(total, args, w, work.panel, first, last, own, lane);
    } else {
        sum_loads<Shape>(total, args, w, ring, bytes, first, last, own, lane);
    }
    __syncthreads();  // the sums overwrite the stages
    auto* const sums = reinterpret_cast<float*>(shared);
    store_sums<Shape>(total, sums + warp * kPitch, 1, lane);
    __syncthreads();
    store_tile(args, item, sums, kPitch);
}

// ---- down --------------------------------------------------------------------------------------

// Sums of one unit, a slice of a pair, for the 32 columns of a panel.
struct UnitSums {
    float columns[32];
};

template <int source>
__global__ void __launch_bounds__(kDownWarps* kWarp, 1) down_kernel(
    const __grid_constant__ ExpertArgs args, const int32_t* const ids, const float* const weights,
    const int top_k
) {
    using Shape = Shape<source>;
    const ExlExpertLinear& call = args.call;
    const int num_warps = blockDim.x / kWarp, slices = kWarps >> args.unit_bits;
    auto* const sums = reinterpret_cast<UnitSums*>(shared + args.ring_bytes);
    auto* const biases = sums + top_k * slices;
    auto* const barriers = reinterpret_cast<WarpBarriers*>(biases + top_k);
    let_next_begin();
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int panel = static_cast<int>(blockIdx.x), column = 32 * panel + lane;
    Ring ring(
        shared + warp * args.num_stages * args.stage_bytes, barriers + warp, args.num_stages,
        args.stage_bytes, lane
    );
    for (int unit = warp; unit < top_k * slices; unit += num_warps) {
        const int pair = unit / slices, slice = unit % slices;
        const int expert = static_cast<int>(uniform(__ldcg(ids + pair)));
        const ExlExpertItem item = {expert, pair, 1, 0};
        const ExlExpertMatrix w = matrix_of(call, expert, 0);
        const WarpWork work = {0, panel, slice, slices};
        const int first = work.first(w), last = work.last(w);
        const uint8_t* const bytes = w.tiles + panel * w.panel_bytes;
        if constexpr (!Shape::kIsDense) fill_ring(args, w, ring, bytes, first, last);
        if (unit == warp) wait_for_inputs();  // every warp has a first unit
        const LaneRows<Shape> rows(call, item, call.x[0], lane);
        PanelSums<Shape> total = {};
        if constexpr (Shape::kIsDense) {
            sum_dense<Shape>(total, args, w, panel, first, last, rows, lane);
        } else {
            sum_loads<Shape>(total, args, w, ring, bytes, first, last, rows, lane);
        }
        store_sums<Shape>(total, sums[unit].columns, 1, lane);
        if (slice == 0) {
            const bool has_bias = w.bias != nullptr && column < call.n;
            biases[pair].columns[lane] = has_bias ? w.bias[column] : 0.0f;
        }
    }
    __syncthreads();
    if (warp != 0 || column >= call.n) return;
    float y = 0.0f;
    for (int pair = 0; pair < top_k; ++pair) {
        const float* from = sums[pair * slices].columns + lane;
        float one = add_slices(from, slices, 0, 32);
        one += biases[pair].columns[lane];
        y = fmaf(__ldcg(weights + pair), one, y);
    }
    float* const to = static_cast<float*>(call.y) + column;
    *to = call.epilogue == EXL_EPILOGUE_ADD ? *to + y : y;
}

// Stages of a warp's ring, and the bytes of the rings of `warps` warps that fit beside `rest` bytes.
bool size_rings(ExpertArgs& args, int warps, int rest, int most) {
    const int slices = kWarps >> args.unit_bits;
    const int warp_loads = static_cast<int>(ceil_div(args.call.num_loads, slices));
    args.stage_bytes = static_cast<int>(ceil_div(args.call.load_bytes, 128) * 128);
    args.num_stages = std::min(
        {kMaxRingStages, (most - rest) / (warps * args.stage_bytes), std::max(warp_loads, 1)}
    );
    const int sums_bytes = kWarps * kPitch * static_cast<int>(sizeof(float));
    args.ring_bytes = std::max(warps * args.num_stages * args.stage_bytes, sums_bytes);
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

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_row(
    const ExlExpertLinear* call, const int32_t* ids, const float* weights, int32_t top_k,
    void* stream
) {
    using namespace exl::cuda;
    const bool is_gated = call->epilogue == EXL_EPILOGUE_GATED;
    const bool is_first = is_gated || call->epilogue == EXL_EPILOGUE_ACTIVATED;
    const bool is_last = call->epilogue == EXL_EPILOGUE_STORE || call->epilogue == EXL_EPILOGUE_ADD;
    const bool fits = call->parts == (is_gated ? 2 : 1) && is_first == (weights == nullptr) &&
                      (is_first || is_last) && call->n >= 1 && call->num_loads >= 1 &&
                      call->load_bytes >= 16 && call->pairs_per_row >= 1 &&
                      call->x_stride % 8 == 0 && call->k >= 32 && call->k % 32 == 0 && top_k >= 1 &&
                      top_k <= EXL_CUDA_MAX_ROW_EXPERTS && call->pairs == nullptr &&
                      (call->x_dtype == kF16 || (is_first && call->x_dtype == kF32));
    if (!fits) return cudaErrorInvalidValue;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    ExpertArgs args = {};
    args.call = *call;
    args.unit_bits = unit_bits_for(*call);
    if (is_first) {
        const int rest = kWarps * static_cast<int>(sizeof(WarpBarriers)) + 4 * call->k;
        const int most = std::min(kMaxSharedBytes, info.shared_per_block);
        if (!size_rings(args, kWarps, rest, most)) return cudaErrorInvalidValue;
        const dim3 grid(
            static_cast<unsigned>(ceil_div(ceil_div(call->n, 32), 1 << args.part_bits())),
            static_cast<unsigned>(top_k)
        );
        const auto kernel = call->x_dtype == kF32 ? gate_up_kernel_for<float>(call->source)
                                                  : gate_up_kernel_for<__half>(call->source);
        const size_t bytes = args.ring_bytes + rest;
        return launch(kernel, grid, dim3(kThreads), bytes, stream, args, ids);
    }
    const int units = top_k * (kWarps >> args.unit_bits), warps = std::min(units, kDownWarps);
    const int rest =
        static_cast<int>((units + top_k) * sizeof(UnitSums) + kDownWarps * sizeof(WarpBarriers));
    if (!size_rings(args, warps, rest, info.shared_per_block)) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>(ceil_div(call->n, 32)));
    const size_t bytes = args.ring_bytes + rest;
    return launch(
        down_kernel_for(call->source), grid, dim3(warps * kWarp), bytes, stream, args, ids, weights,
        top_k
    );
}

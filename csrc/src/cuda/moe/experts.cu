// Products of rows with the matrices of their experts: y[pair] = x[pair] @ w[expert] (+ bias).
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_linear).
// Used for   Any number of rows. Experts with more than 32 rows have several items.
// Mapping    A thread block multiplies the rows of one item with a tile of column panels. The warps
//            of a panel divide its loads (split-K). Every warp copies its loads through a ring of
//            stages in shared memory, unpacks codes to A fragments in registers and multiplies them
//            with 8, 16 or 32 rows, as the decode kernel of linears does (linear/quant_k_tile.cuh).
//            Rows are gathered by address: a lane reads the inputs of its rows from global memory.
// Accuracy   float32 sums in a fixed order: the rows of a k-tile before its scale is applied, the
//            k-tiles of a slice, the slices. The partition depends on the matrices alone, so that
//            no bit of a row depends on the other rows.
// Floor      The bytes of the experts in use, at memory bandwidth. An expert whose rows need
//            several items is read from the L2 cache again.
#include "cuda/moe/experts.cuh"

namespace exl::cuda {

namespace {

constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxTileRows = 32;

// ---- the kernel --------------------------------------------------------------------------------

// Called before `wait_for_inputs` if the call is early.
template <class Shape>
__device__ __forceinline__ void multiply_item(
    const ExpertArgs& args, const ExlExpertItem& item, uint8_t* shared, WarpBarriers* barriers
) {
    const ExlExpertLinear& call = args.call;
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const WarpWork work = WarpWork::of(args, blockIdx.x, warp);
    const ExlExpertMatrix w = matrix_of<Shape>(call, item.expert, work.part);
    const int first = work.first(w), last = work.panel * 32 < call.n ? work.last(w) : first;
    Ring ring(
        shared + warp * args.num_stages * args.stage_bytes, barriers + warp, args.num_stages,
        args.stage_bytes, lane
    );
    const uint8_t* const bytes = w.tiles + work.panel * w.panel_bytes;
    if constexpr (!Shape::kIsDense) fill_ring<Shape>(args, w, ring, bytes, first, last);
    const LaneRows<Shape> rows(call, item, call.x[work.part], lane);
    if (call.is_early) wait_for_inputs();
    PanelSums<Shape> total = {};
    const auto prepare = [] {};
    if constexpr (Shape::kIsDense) {
        sum_dense<Shape>(total, args, w, work.panel, first, last, rows, lane, prepare);
    } else {
        sum_loads<Shape>(total, args, w, ring, bytes, first, last, last, rows, lane, prepare);
    }
    __syncthreads();  // the sums overwrite the stages
    auto* const sums = reinterpret_cast<float*>(shared);
    constexpr int kWarpFloats = Shape::kRows * kPitch;
    store_sums<Shape>(total, sums + warp * kWarpFloats, item.count, lane);
    __syncthreads();
    store_tile(args, item, TileOutputs(args, item), blockIdx.x, sums, kWarpFloats);
}

// kTileRows: most rows of an item, 8 or 32.
template <int kTileRows, int source>
__global__ void __launch_bounds__(kThreads, 2) experts_kernel(
    const __grid_constant__ ExpertArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    auto* const barriers = reinterpret_cast<WarpBarriers*>(shared + args.ring_bytes);
    // The next kernel may be an early call: then it begins after all kernels before this one have
    // ended.
    if (!args.call.is_early) wait_for_inputs();
    let_next_begin();
    if (static_cast<int>(blockIdx.y) >= __ldcg(args.call.num_items)) {
        if (args.call.is_early) wait_for_inputs();
        return;
    }
    const int4 words = __ldcg(reinterpret_cast<const int4*>(args.call.items + blockIdx.y));
    const ExlExpertItem item = {
        static_cast<int32_t>(uniform(words.x)), static_cast<int32_t>(uniform(words.y)),
        static_cast<int32_t>(uniform(words.z)), 0
    };
    if (kTileRows == 8 || item.count <= 8) {
        multiply_item<ExpertShape<1, false, source>>(args, item, shared, barriers);
    } else if constexpr (source != EXL_EXPERTS_SMALL_GROUPS) {
        if (item.count <= 16) {
            multiply_item<ExpertShape<2, false, source>>(args, item, shared, barriers);
        } else {
            multiply_item<ExpertShape<4, false, source>>(args, item, shared, barriers);
        }
    }
}

auto kernel_for(int tile_rows, int source) {
    switch (source) {
        case EXL_EXPERTS_DENSE:
            return tile_rows == 8 ? experts_kernel<8, EXL_EXPERTS_DENSE>
                                  : experts_kernel<kMaxTileRows, EXL_EXPERTS_DENSE>;
        case EXL_EXPERTS_SMALL_GROUPS: return experts_kernel<8, EXL_EXPERTS_SMALL_GROUPS>;
        default:
            return tile_rows == 8 ? experts_kernel<8, EXL_EXPERTS_CODES>
                                  : experts_kernel<kMaxTileRows, EXL_EXPERTS_CODES>;
    }
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_linear(const ExlExpertLinear* call, void* stream) {
    using namespace exl::cuda;
    const bool is_gated = call->epilogue == EXL_EPILOGUE_GATED;
    const bool is_small = call->source == EXL_EXPERTS_SMALL_GROUPS;
    const bool fits = (call->tile_rows == 8 || (call->tile_rows == kMaxTileRows && !is_small)) &&
                      call->parts == (is_gated ? 2 : 1) &&
                      (is_gated || call->epilogue == EXL_EPILOGUE_STORE ||
                       call->epilogue == EXL_EPILOGUE_ACTIVATED) &&
                      call->n >= 1 && call->num_loads >= 1 && call->load_bytes >= 16 &&
                      call->pairs_per_row >= 1 && call->x_stride % 8 == 0 && call->max_items >= 0;
    if (!fits || call->max_items > 65535) return cudaErrorInvalidValue;
    if (call->max_items == 0) return cudaSuccess;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    ExpertArgs args = {};
    args.call = *call;
    args.unit_bits = unit_bits_for(*call);
    args.stage_bytes = static_cast<int>(ceil_div(call->load_bytes, 128) * 128);
    const int sums_bytes = kWarps * call->tile_rows * kPitch * static_cast<int>(sizeof(float));
    const int barrier_bytes = kWarps * static_cast<int>(sizeof(WarpBarriers));
    const int most = std::min(kMaxSharedBytes, info.shared_per_block) - barrier_bytes;
    const int warp_loads = static_cast<int>(ceil_div(call->num_loads, kWarps >> args.unit_bits));
    args.num_stages =
        std::min({kMaxRingStages, most / (kWarps * args.stage_bytes), std::max(warp_loads, 1)});
    if (args.num_stages < 1 || sums_bytes > most) return cudaErrorInvalidValue;
    args.ring_bytes = std::max(kWarps * args.num_stages * args.stage_bytes, sums_bytes);
    const int64_t panels = ceil_div(call->n, 32);
    const dim3 grid(
        static_cast<unsigned>(ceil_div(panels, 1 << args.part_bits())),
        static_cast<unsigned>(call->max_items)
    );
    return launch(
        kernel_for(call->tile_rows, call->source), grid, dim3(kThreads),
        static_cast<size_t>(args.ring_bytes + barrier_bytes), stream, args
    );
}

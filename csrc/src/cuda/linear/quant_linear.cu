// y[m, n] = x[m, k] @ w (+ bias) for quantized w: the decode kernel, and dispatch to the
// small-batch kernel.
//
// Contract   exl/cuda/linear.h.
// Used for   m <= 8, and any m on devices other than compute capability 9.0. There, 9 to 64 rows
//            have a kernel of their own (quant_small_batch.cu). A launch has at most 32 rows and
//            reads the weights once. The batch-invariant mode has one kernel and one partition for
//            every m: on 9.0 the small-batch kernel, and for many rows one with the same partial
//            sums (quant_many_rows.cu); elsewhere this one with 8 rows per launch.
// Floor      panels * panel_bytes bytes divided by the memory bandwidth.
// Mapping    The grid has up to two thread blocks per multiprocessor. They loop over output tiles
//            (quant_work.cuh). Every warp streams k-tiles through a pipeline of its own
//            (quant_stream.cuh), unpacks codes to A fragments in registers (quant_decode.cuh) and
//            multiplies them with 1, 8, 16 or 32 rows of prepared inputs (quant_k_tile.cuh). The
//            warps that work on different panels of an output tile read the same inputs at about
//            the same time, and so share them through the L1 cache.
// Accuracy   float32 sums, in a fixed order: the rows of a k-tile before its scale is applied, the
//            k-tiles of a warp's k-slice, the warps, the thread blocks of the cluster
//            (quant_tile.cuh). Zeros and minimums add one product per column and k-tile: the offset
//            times the sum of the k-tile's inputs, which an MMA with ones computes.
// Overlap    Weights fill the pipeline stages before the previous kernel has ended, because their
//            addresses depend on kernel parameters only. Two thread blocks fit on a multiprocessor
//            of 9.0: two of a large launch, or one of a small launch and one of the next launch.
#include <algorithm>
#include <iterator>
#include <limits>

#include "cuda/linear/prepared.cuh"
#include "cuda/linear/quant_tile.cuh"
#include "cuda/linear/quant_small_batch.cuh"

namespace exl::cuda {

namespace {

constexpr int kMaxRows = 32;              // rows of a launch
constexpr int kBlocksAtOnce = 2;          // thread blocks on a multiprocessor
constexpr int kMaxPipelineBytes = 10752;  // shared memory for the stages of one warp
// Shared memory of a thread block. Two blocks fit on a multiprocessor of 9.0, which has 228 KiB and
// reserves 1 KiB per block.
constexpr int kMaxSharedBytes = 113 << 10;

// Number of buffers for warp sums. With two, an output tile's sums can be written while those of
// the previous tile are still read. With 32 rows there is shared memory for one only.
template <class Shape>
constexpr int kBuffers = Shape::kRowTiles == 4 ? 1 : 2;

// ---- the kernel --------------------------------------------------------------------------------

template <class Shape>
__global__ void __launch_bounds__(kThreads, 2) quant_linear_kernel(
    const __grid_constant__ QuantLinearArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    auto* sums =
        reinterpret_cast<WarpSums<Shape>*>(shared + kWarps * args.num_stages * args.stage_bytes);
    auto* states = reinterpret_cast<PipelineState*>(sums + kBuffers<Shape>);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;

    let_next_begin_if(args.copies.count == 0);
    WeightPipeline pipeline(
        args, states + warp, shared + warp * args.num_stages * args.stage_bytes, warp, lane
    );
    uint32_t tile = blockIdx.x >> args.split_bits;
    const int element = (blockIdx.x & (args.splits() - 1)) * kThreads + threadIdx.x;
    OutputElement<Shape> output(args, tile, element);
    wait_for_inputs();
    // The reader of sums does not wait for this kernel (exl_cuda_prepare_sums). All kernels before
    // this one have ended here.
    let_next_begin_if(args.copies.count > 0);

    const InputReader inputs(args, lane);
    LoadRun run = pipeline.front();
    LoadInputs<Shape> rows;
    if constexpr (Shape::kPrefetchesInputs) load_inputs<Shape>(rows, run, inputs);
    int buffer = 0;
    for (;;) {
        output.load_addend(args);
        PanelSums<Shape> total = {};
        while (!add_load_run<Shape>(total, rows, run, pipeline, inputs, lane)) {
        }
        sums[buffer].store(total, warp, lane, args.m);
        sync_cluster(args);
        output.store(args, sums[buffer]);
        const int stride = args.splits() * kThreads;
        for (int i = element + stride; i < 32 * args.m << args.part_panel_bits(); i += stride) {
            OutputElement<Shape> other(args, tile, i);
            other.load_addend(args);
            other.store(args, sums[buffer]);
        }
        tile += gridDim.x >> args.split_bits;
        if (tile >= args.num_tiles) break;
        output = OutputElement<Shape>(args, tile, element);
        // With two buffers the next output tile uses the other one. This one is not written again
        // before that tile's barrier.
        if (kBuffers<Shape> == 1) sync_cluster(args);
        buffer = (buffer + 1) % kBuffers<Shape>;
    }
    // Other thread blocks of the cluster may still be reading the sums in this one's shared memory.
    if (args.split_bits > 0) sync_cluster(args);
}

// ---- host --------------------------------------------------------------------------------------

QuantPart make_part(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    QuantPart part = {};
    part.packed = w.tiles;
    part.runs = w.device_runs;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.panel_bytes = static_cast<uint32_t>(w.panel_bytes);
    part.num_panels = static_cast<int>(ceil_div(w.n, 32));
    part.num_k_tiles = static_cast<uint32_t>(w.num_k_tiles);
    part.num_runs = w.num_runs;
    part.n = w.n;
    part.first_column = first_column;
    part.scale_dtype = w.scale_dtype;
    part.offset_kind = w.offset_kind;
    part.values = w.values;
    const int scale_bytes = static_cast<int>(scale_bytes_of(w.scale_dtype));
    part.header_bytes = KTileHeader{scale_bytes, w.offset_kind}.size_bytes();
    if (w.num_runs <= kInlineRuns) std::copy_n(w.runs, w.num_runs, part.inline_runs);
    return part;
}

// Size of the largest load of a matrix.
int max_load_bytes(const ExlQuantMatrix& w, int header_bytes) {
    int largest = 0;
    for (int i = 0; i < w.num_runs; ++i) {
        const ExlQuantRun& run = w.runs[i];
        const int blocks = run.group_k_tiles > 1 ? kStageBlocks : run.last_blocks;
        const int k_tiles = kStageBlocks / blocks;
        largest = std::max(largest, k_tiles * (header_bytes + 128 * run.bits * blocks));
    }
    return largest;
}

// Shared memory of a thread block other than its stages.
template <class Shape>
constexpr int bytes_beside_stages() {
    return kBuffers<Shape> * static_cast<int>(sizeof(WarpSums<Shape>)) +
           kWarps * static_cast<int>(sizeof(PipelineState));
}

// Number of pipeline stages per warp: as many as fit, at most kMaxStages. 0 if none fits.
int stages_for(int stage_bytes, int beside, const DeviceInfo& info) {
    const int shared = std::min(kMaxSharedBytes, info.shared_per_block);
    const int warp_bytes = std::min(kMaxPipelineBytes, (shared - beside) / kWarps);
    return std::min(kMaxStages, warp_bytes / stage_bytes);
}

template <class Shape>
cudaError_t launch_shape(QuantLinearArgs& args, const DeviceInfo& info, void* stream) {
    constexpr int kBeside = bytes_beside_stages<Shape>();
    args.num_stages = stages_for(args.stage_bytes, kBeside, info);
    const int max_clusters = std::max(1, kBlocksAtOnce * info.multiprocessors >> args.split_bits);
    const int64_t clusters = std::min<int64_t>(args.num_tiles, max_clusters);
    return launch_clusters(
        quant_linear_kernel<Shape>, dim3(static_cast<unsigned>(clusters << args.split_bits)),
        dim3(kThreads), args.splits(), kWarps * args.num_stages * args.stage_bytes + kBeside,
        stream, args
    );
}

// Sets the panels of an output tile. Returns the number of tiles.
int divide_tiles(QuantLinearArgs& args, int panel_bits) {
    args.panel_bits = panel_bits;
    args.num_tiles = 0;
    for (int i = 0; i < args.num_groups; ++i) {
        const int64_t tiles = ceil_div(args.parts[i].num_panels, 1 << args.part_panel_bits());
        args.num_tiles += args.group_tiles[i] = static_cast<uint32_t>(tiles);
    }
    return static_cast<int>(args.num_tiles);
}

// Time of the slowest thread block in k-tiles of a warp. The epilogue costs as much as one k-tile,
// the reduction across two blocks as much as three more.
double cost_of(const QuantLinearArgs& args, const DeviceInfo& info) {
    const double k_tiles = static_cast<double>(args.parts[0].num_k_tiles) * args.panels() / kWarps;
    const int clusters = std::max(1, kBlocksAtOnce * info.multiprocessors >> args.split_bits);
    const auto rounds = static_cast<double>(ceil_div(args.num_tiles, clusters));
    return rounds * (k_tiles / args.splits() + 1 + 3 * args.split_bits);
}

// Chooses the panels of an output tile, and whether two thread blocks split it along k.
void choose_partition(QuantLinearArgs& args, bool is_one_row, const DeviceInfo& info) {
    int fewest = args.is_gated() ? 1 : 0;
    int most = args.is_gated() && !is_one_row ? fewest : fewest + 1;
    if (args.m > 8) {
        // The panels of a tile share inputs: as many as leave no multiprocessor without a tile.
        for (most = 2; most > fewest && divide_tiles(args, most) < info.multiprocessors;) --most;
        fewest = most;
    }
    double least = std::numeric_limits<double>::infinity();
    int panel_bits = fewest, split_bits = 0;
    for (int panels = fewest; panels <= most; ++panels) {
        for (int splits = 0; splits <= (info.capability >= 90 ? 1 : 0); ++splits) {
            divide_tiles(args, panels), args.split_bits = splits;
            const double cost = cost_of(args, info);
            if (cost < least) least = cost, panel_bits = panels, split_bits = splits;
        }
    }
    divide_tiles(args, panel_bits), args.split_bits = split_bits;
}

// Launches the kernel for args.m rows.
cudaError_t launch_rows(
    QuantLinearArgs& args, int row_tiles, const DeviceInfo& info, void* stream
) {
    const bool is_one_row = args.m == 1 && args.block_halves == 32;
    choose_partition(args, is_one_row, info);
    const auto is_small = [&](const QuantPart& part) { return has_small_groups(part.offset_kind); };
    const bool has_small = std::any_of(std::begin(args.parts), std::end(args.parts), is_small);
    if (is_one_row && has_small) return launch_shape<RowShape<1, true, true>>(args, info, stream);
    if (has_small) return launch_shape<RowShape<1, false, true>>(args, info, stream);
    if (is_one_row) return launch_shape<RowShape<1, true>>(args, info, stream);
    if (row_tiles == 1) return launch_shape<RowShape<1, false>>(args, info, stream);
    if (row_tiles == 2) return launch_shape<RowShape<2, false>>(args, info, stream);
    return launch_shape<RowShape<4, false>>(args, info, stream);
}

// Largest number of row tiles, at most `tiles`, whose sums and at least one stage per warp fit into
// the shared memory of a thread block.
int row_tiles_that_fit(int tiles, int stage_bytes, const DeviceInfo& info) {
    const auto fits = [&](int beside) { return stages_for(stage_bytes, beside, info) > 0; };
    if (tiles == 4 && !fits(bytes_beside_stages<RowShape<4, false>>())) tiles = 2;
    if (tiles == 2 && !fits(bytes_beside_stages<RowShape<2, false>>())) tiles = 1;
    return tiles;
}

}  // namespace

// exl_cuda_quant_linear, with copies of y.
static cudaError_t quant_linear(
    const ExlQuantLinear* call, const ExlPartialCopies& copies, void* stream
) {
    const bool is_gated = call->epilogue == EXL_EPILOGUE_GATED;
    const bool is_activated = call->epilogue == EXL_EPILOGUE_ACTIVATED;
    const bool is_invariant = call->is_invariant != 0;
    if (call->count < 1 || call->count > 3 || call->m < 1 || (call->m > 128 && !is_invariant) ||
        (is_gated && call->count != 2) || (is_gated && call->parts[0]->n != call->parts[1]->n) ||
        (is_activated && call->count != 1) ||
        (call->inverse_permutation != nullptr &&
         ((!is_gated && !is_activated) || call->y_dtype != kF16)) ||
        (call->y_dtype != kF32 && (call->y_dtype != kF16 || call->epilogue == EXL_EPILOGUE_ADD)) ||
        call->workspace_bytes < small_batch_workspace()) {
        return cudaErrorInvalidValue;
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const bool can_be_by_rows = call->count == 1 && call->m <= max_prepared_rows(info);
    if ((call->inverse_permutation != nullptr && call->m > max_prepared_rows(info)) ||
        (call->is_by_rows && !(can_be_by_rows && is_small_batch(info, call->m)))) {
        return cudaErrorInvalidValue;
    }
    bool has_integers = true, has_small = false;
    QuantLinearArgs args = {};
    int columns = 0;
    for (int i = 0; i < call->count; ++i) {
        has_integers &= call->parts[i]->values == EXL_VALUES_INTEGERS;
        has_small |= has_small_groups(call->parts[i]->offset_kind);
        if (!has_integers && call->m > EXL_CUDA_TILE_ROWS) return cudaErrorInvalidValue;
        args.parts[i] = make_part(*call->parts[i], call->inputs[i], is_gated ? 0 : columns);
        columns += call->parts[i]->n;
        const int load_bytes = max_load_bytes(*call->parts[i], args.parts[i].header_bytes);
        const int stage_bytes = static_cast<int>(ceil_div(load_bytes, 128) * 128);
        args.stage_bytes = std::max(args.stage_bytes, stage_bytes);
    }
    args.y_stride = call->y_stride;
    args.inverse_permutation = call->inverse_permutation;
    args.num_groups = is_gated ? 1 : call->count;
    args.y_dtype = call->y_dtype;
    args.epilogue = call->epilogue;
    args.gate = call->gate;
    constexpr int kChunkRows = EXL_CUDA_CHUNK_ROWS;
    const int least_rows = is_invariant ? least_invariant_rows(info, has_integers) : 1;
    for (int first = 0; first < call->m; first += kChunkRows) {
        int rows = std::min(call->m - first, kChunkRows);
        if (is_small_batch(info, std::max(rows, least_rows))) {
            if (is_invariant && rows == kChunkRows) rows = (call->m - first) / rows * rows;
            const cudaError_t error = quant_small_batch(*call, copies, first, rows, info, stream);
            if (error != cudaSuccess) return error;
            first += rows - std::min(rows, kChunkRows);
            continue;
        }
        if (copies.is_divided) return cudaErrorInvalidValue;
        const int chunk_tiles = exl_cuda_row_tiles(rows);
        args.block_halves = std::max(rows, least_rows) == 1 ? 32 : chunk_tiles * 8 * 32;
        // A launch has 32 rows at most, and fewer on devices with little shared memory.
        // Small groups are multiplied with 8 rows at a time.
        const int max_tiles = is_invariant || has_small ? 1 : std::min(chunk_tiles, kMaxRows / 8);
        const int tiles = row_tiles_that_fit(max_tiles, args.stage_bytes, info);
        for (int tile = 0; 8 * tile < rows; tile += tiles) {
            for (int i = 0; i < call->count; ++i) {
                const int64_t chunk = exl_cuda_chunk_halves(kChunkRows, call->parts[i]->num_blocks);
                args.parts[i].inputs = static_cast<const __half*>(call->inputs[i]) +
                                       first / kChunkRows * chunk + tile * 8 * 32;
            }
            args.m = std::min(rows - 8 * tile, 8 * tiles);
            args.y = static_cast<uint8_t*>(call->y) +
                     (first + 8 * tile) * call->y_stride * (call->y_dtype == kF16 ? 2 : 4);
            args.copies = copies;
            for (int i = 0; i < args.copies.count; ++i) {
                args.copies.to[i] += (first + 8 * tile) * call->y_stride;
            }
            const cudaError_t error = launch_rows(args, tiles, info, stream);
            if (error != cudaSuccess) return error;
        }
    }
    return cudaSuccess;
}

}  // namespace exl::cuda

extern "C" {

int64_t exl_cuda_quant_linear_workspace(int32_t, int32_t) {
    return exl::cuda::small_batch_workspace();
}

int exl_cuda_quant_linear(const ExlQuantLinear* call, void* stream) {
    return exl::cuda::quant_linear(call, {}, stream);
}

int exl_cuda_quant_linear_sent(
    const ExlQuantLinear* call, const ExlPartialCopies* copies, void* stream
) {
    const bool fits = copies->count >= 0 && copies->count <= EXL_CUDA_MAX_PEERS &&
                      call->epilogue == EXL_EPILOGUE_STORE && call->y_dtype == exl::cuda::kF32 &&
                      call->m <= EXL_CUDA_CHUNK_ROWS && call->is_invariant == 0;
    return fits ? exl::cuda::quant_linear(call, *copies, stream) : cudaErrorInvalidValue;
}

int exl_cuda_least_rows(int32_t has_integers, int* rows) {
    using namespace exl::cuda;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    *rows = least_invariant_rows(info, has_integers != 0);
    return cudaSuccess;
}

int exl_cuda_max_prepared_rows(int* rows) {
    using namespace exl::cuda;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    *rows = max_prepared_rows(info);
    return cudaSuccess;
}

}  // extern "C"

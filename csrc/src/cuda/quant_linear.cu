// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for few rows: weights are read once for
// every 32 rows of the batch. More than 8 rows on 9.0 have a kernel of their own (quant_wide.cu).
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors once and shares out the bytes (quant_work.cuh).
//            Every warp streams units through a ring of its own (quant_stream.cuh), turns codes
//            into A fragments in registers (quant_decode.cuh) and multiplies them with 8, 16 or 32
//            rows of prepared inputs (quant_unit.cuh). Warps beside each other in a tile of several
//            strips read the same inputs at about the same time, through the first-level cache.
// Sums       float32. A unit is summed up before its scale is applied, units along a warp's share,
//            then warps, then blocks, always in this order (quant_tile.cuh). Zeros and minimums
//            become one more number a column, times the sum of a unit's inputs, which a product
//            with ones yields.
// Overlap    Weights fill the rings before the kernel ahead has ended. Two blocks fit on a
//            multiprocessor of 9.0: both of a large launch, or one of a small one and the next's.
#include <algorithm>

#include "quant_tile.cuh"
#include "quant_wide.cuh"

namespace exl::cuda {

namespace {

constexpr int kMostRows = 32;  // of a launch
constexpr int kCounters = 1024;  // of the workspace, and the most blocks of a grid
constexpr int kMostWide = 4;

// Sums of a tile and of the next: with 32 rows there is no room for two.
__host__ __device__ constexpr int sums_buffers(int row_tiles) { return row_tiles == 4 ? 1 : 2; }
constexpr int sums_bytes(int row_tiles) {
    const int rows = sums_buffers(row_tiles) * kWarps * 8 * row_tiles;
    return rows * kPitch * static_cast<int>(sizeof(float));
}
// Of each warp: what leaves room for two blocks on a multiprocessor of 9.0, where that is allowed.
int ring_bytes(int row_tiles, const DeviceInfo& info) {
    const int best = row_tiles == 1 ? 9728 : row_tiles == 2 ? 8832 : 8960;
    const int most = (info.shared_per_block - 64 - sums_bytes(row_tiles)) / kWarps -
                     static_cast<int>(sizeof(RingState));
    return std::min(best, most / 128 * 128);
}

// ---- the kernel --------------------------------------------------------------------------------

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2) quant_linear_kernel(
    const __grid_constant__ QuantLinearArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ bool is_last_to_come;
    const int ring_bytes = args.ring_bytes;
    uint8_t* rings = shared;
    constexpr int kBuffers = sums_buffers(kTiles);
    auto* warps = reinterpret_cast<WarpSums<kTiles>*>(rings + kWarps * ring_bytes);
    auto* states = reinterpret_cast<RingState*>(warps + kBuffers);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    let_next_begin();
    TileWalk walk(args, blockIdx.x);
    UnitStream<kWarps> stream(
        args, walk, states + warp, rings + warp * ring_bytes, warp, lane
    );
    stream.fill();
    wait_for_inputs();

    // One row of inputs has no tile: all columns of B are that row, and column 0 is kept.
    const int block_halves = args.block_halves;
    const int lane_halves = 8 * (lane % 4) + (block_halves == 32 ? 0 : 32 * (lane / 4));
    int buffer = 0;
    for (; walk.left > 0; walk.advance(args)) {
        const StripPlace place(args, walk.group, walk.tile, warp % args.wide);
        const QuantPart& part = args.parts[place.part];
        const __half* x = part.inputs + lane_halves;
        Sums<kTiles> total = {};
        RingEntry entry;
        do {
            entry = stream.front();
            if (entry.unit != 0) {
                add_unit<kTiles>(total, part, stream, entry, x, block_halves, lane);
            }
            stream.pop(entry);
        } while (!entry.is_last);
        warps[buffer].put(total, warp, lane, args.m);
        __syncthreads();
        finish_tile(args, walk, warps[buffer], &is_last_to_come);
        // Of two buffers the next tile takes the other; this one is written again only behind
        // that tile's barrier.
        if (kBuffers == 1) __syncthreads();
        buffer = (buffer + 1) % kBuffers;
    }
}

// ---- host --------------------------------------------------------------------------------------

QuantPart part_of(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    QuantPart part = {};
    part.tiles = w.tiles;
    part.units = w.units;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.strip_bytes = static_cast<int>(w.strip_bytes);
    part.strips = static_cast<int>(ceil_div(w.n, 32));
    part.num_units = w.num_units;
    part.n = w.n;
    part.first_column = first_column;
    part.scale_bytes = w.scale_dtype == kF16 ? 2 : 4;
    part.offset_kind = w.offset_kind;
    const int offset_bytes = w.offset_kind == EXL_OFFSET_MIDDLE  ? 0
                             : w.offset_kind == EXL_OFFSET_ZEROS ? 1
                                                                 : part.scale_bytes;
    part.header_bytes = 32 * (part.scale_bytes + offset_bytes);
    return part;
}

// The most blocks of a grid: as many as run at once.
int64_t most_blocks(int64_t multiprocessors) {
    return std::min<int64_t>(2 * multiprocessors, kCounters);
}

// Shares the tiles out to as many blocks as run at once: fewer where that saves the sharing of
// tiles or where a warp would have less than 1 KiB. The number of blocks.
int share_out(QuantLinearArgs& args, int row_tiles, int64_t multiprocessors) {
    const int64_t least = 1024 * kWarps / args.wide;
    // Little work is done sooner by half as many blocks, beside which the next kernel begins.
    const int64_t bytes = args.length * int64_t{args.wide};
    const bool is_small = row_tiles == 1 && bytes < (80 << 10) * multiprocessors;
    int64_t blocks = most_blocks(multiprocessors) / (is_small ? 2 : 1);
    blocks = std::max<int64_t>(1, std::min(blocks, args.length / least));
    const int64_t tiles = args.groups[0].tiles;
    if (args.num_groups == 1 && tiles <= blocks) {
        const int64_t even = tiles * (blocks / tiles);
        if (10 * even >= 9 * blocks) blocks = even;
    }
    args.run = static_cast<uint32_t>(ceil_div(args.length, blocks));
    return static_cast<int>(ceil_div(args.length, args.run));
}

// One launch, of args.m rows.
cudaError_t launch_rows(
    QuantLinearArgs& args, int row_tiles, const DeviceInfo& info, void* stream
) {
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    args.wide = args.m > 8 ? 4 : args.m > 1 || is_gated ? 2 : 1;
    args.ring_bytes = ring_bytes(row_tiles, info);
    int64_t length = 0;
    for (uint32_t i = 0; i < args.num_groups; ++i) {
        TileGroup& group = args.groups[i];
        group.length = args.parts[i].strip_bytes;
        group.tiles = static_cast<uint32_t>(
            ceil_div(args.parts[i].strips, is_gated ? args.wide / 2 : args.wide)
        );
        length += static_cast<int64_t>(group.tiles) * group.length;
    }
    if (length > UINT32_MAX) return cudaErrorInvalidValue;
    args.length = static_cast<uint32_t>(length);
    const int blocks = share_out(args, row_tiles, info.multiprocessors);
    auto* kernel = row_tiles == 1   ? quant_linear_kernel<1>
                   : row_tiles == 2 ? quant_linear_kernel<2>
                                    : quant_linear_kernel<4>;
    const int shared = kWarps * (args.ring_bytes + static_cast<int>(sizeof(RingState))) +
                       sums_bytes(row_tiles);
    return launch(kernel, dim3(blocks), dim3(kThreads), shared, stream, args);
}

}  // namespace

}  // namespace exl::cuda

extern "C" {

int64_t exl_cuda_quant_linear_workspace(int32_t, int32_t max_m) {
    using namespace exl::cuda;
    DeviceInfo info;
    if (device_info(&info) != cudaSuccess) return 0;
    const int64_t rows = max_m < kMostRows ? max_m : kMostRows;
    const int64_t partials = most_blocks(info.multiprocessors) * 2 * kMostWide * 32 * rows;
    const int64_t bytes = partials * sizeof(float);
    const int64_t wide = is_wide(info, max_m) ? quant_wide_workspace(info, max_m) : 0;
    return kCounters * sizeof(uint32_t) + std::max(bytes, wide);
}

int exl_cuda_quant_linear(const ExlQuantLinear* of, void* stream) {
    using namespace exl::cuda;
    const bool is_gated = of->epilogue == EXL_EPILOGUE_GATED;
    if (of->count < 1 || of->count > 3 || of->m < 1 || of->m > 128 ||
        (is_gated && of->count != 2) ||
        (is_gated && of->parts[0]->n != of->parts[1]->n) ||
        (of->places != nullptr &&
         (!is_gated || of->y_dtype != kF16 || of->m > EXL_MOST_PLACED_ROWS)) ||
        (of->y_dtype != kF32 && (of->y_dtype != kF16 || of->epilogue == EXL_EPILOGUE_ADD)) ||
        of->workspace_bytes < exl_cuda_quant_linear_workspace(0, of->m)) {
        return cudaErrorInvalidValue;
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    QuantLinearArgs args = {};
    int columns = 0;
    for (int i = 0; i < of->count; ++i) {
        args.parts[i] = part_of(*of->parts[i], of->inputs[i], is_gated ? 0 : columns);
        columns += of->parts[i]->n;
    }
    args.y_stride = of->y_stride;
    args.places = of->places;
    args.counters = static_cast<uint32_t*>(of->workspace);
    args.partials = reinterpret_cast<float*>(args.counters + kCounters);
    args.num_groups = is_gated ? 1 : of->count;
    args.y_dtype = of->y_dtype;
    args.epilogue = of->epilogue;
    args.gate = of->gate;
    constexpr int kChunkRows = EXL_CUDA_CHUNK_ROWS;
    for (int first = 0; first < of->m; first += kChunkRows) {
        const int rows = std::min(of->m - first, kChunkRows);
        if (is_wide(info, rows)) {
            const cudaError_t error =
                quant_wide(*of, first, rows, args.counters, args.partials, info, stream);
            if (error != cudaSuccess) return error;
            continue;
        }
        const int chunk_tiles = exl_cuda_row_tiles(rows);
        args.block_halves = rows == 1 ? 32 : chunk_tiles * 8 * 32;
        // A launch takes 32 rows at most, and a block of a small device fewer.
        int tiles = std::min(chunk_tiles, kMostRows / 8);
        while (tiles > 1 && ring_bytes(tiles, info) < kMostUnitBytes) tiles /= 2;
        for (int tile = 0; 8 * tile < rows; tile += tiles) {
            for (int i = 0; i < of->count; ++i) {
                const int64_t chunk = exl_cuda_chunk_halves(kChunkRows, of->parts[i]->num_blocks);
                args.parts[i].inputs = static_cast<const __half*>(of->inputs[i]) +
                                       first / kChunkRows * chunk + tile * 8 * 32;
            }
            args.m = std::min(rows - 8 * tile, 8 * tiles);
            args.y = static_cast<uint8_t*>(of->y) +
                     (first + 8 * tile) * of->y_stride * (of->y_dtype == kF16 ? 2 : 4);
            const cudaError_t error = launch_rows(args, tiles, info, stream);
            if (error != cudaSuccess) return error;
        }
    }
    return cudaSuccess;
}

}  // extern "C"

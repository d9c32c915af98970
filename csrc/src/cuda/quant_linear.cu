// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for few rows: weights are read once for
// every 32 rows of the batch. More than 8 rows on 9.0 have a kernel of their own (quant_wide.cu).
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors twice and takes column tiles (quant_work.cuh).
//            Every warp streams units through a ring of its own (quant_stream.cuh), turns codes
//            into A fragments in registers (quant_decode.cuh) and multiplies them with 1, 8, 16 or
//            32 rows of prepared inputs (quant_unit.cuh). Warps beside each other in a tile of
//            several strips read the same inputs at about the same time, through the first-level
//            cache.
// Sums       float32. A unit is summed up before its scale is applied, units along a warp's share,
//            then warps, then thread blocks of a cluster, always in this order (quant_tile.cuh).
//            Zeros and minimums become one more number a column, times the sum of a unit's inputs,
//            which a product with ones yields.
// Overlap    Weights fill the rings before the kernel ahead has ended, since addresses of all of
//            them come with the launch. Two thread blocks fit on a multiprocessor of 9.0: both of a
//            large launch, or one of a small one and the next's.
#include <algorithm>

#include "quant_tile.cuh"
#include "quant_wide.cuh"

namespace exl::cuda {

namespace {

constexpr int kMostRows = 32;       // of a launch
constexpr int kRingBytes = 10752;  // of a warp, where there is room
// Of a thread block, so that two fit on a multiprocessor of 9.0 (228 KiB, 1 of each block's unseen).
constexpr int kHalfOfShared = 113 << 10;

// Sums of a tile and of the next: with 32 rows there is no room for two.
template <class Shape>
constexpr int kBuffers = Shape::kTiles == 4 ? 1 : 2;

// ---- the kernel --------------------------------------------------------------------------------

template <class Shape>
__global__ void __launch_bounds__(kThreads, 2) quant_linear_kernel(
    const __grid_constant__ QuantLinearArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    auto* sums = reinterpret_cast<WarpSums<Shape>*>(shared + kWarps * args.slots * args.slot_bytes);
    auto* states = reinterpret_cast<RingState*>(sums + kBuffers<Shape>);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;

    let_next_begin();
    ChunkStream stream(
        args, states + warp, shared + warp * args.slots * args.slot_bytes, warp, lane
    );
    uint32_t tile = blockIdx.x >> args.split_bits;
    const int own = (blockIdx.x & (args.splits() - 1)) * kThreads + threadIdx.x;
    TileNumber<Shape> number(args, tile, own);
    wait_for_inputs();

    const InputReader inputs(args, lane);
    Chunks chunks = stream.front();
    ChunkRows<Shape> rows;
    if constexpr (Shape::kIsAhead) load_rows<Shape>(rows, chunks, inputs);
    int buffer = 0;
    for (;;) {
        number.read(args);
        Sums<Shape> total = {};
        while (!add_chunks<Shape>(total, rows, chunks, stream, inputs, lane)) {}
        sums[buffer].put(total, warp, lane, args.m);
        wait_for_cluster(args);
        number.write(args, sums[buffer]);
        const int stride = args.splits() * kThreads;
        for (int i = own + stride; i < 32 * args.m << args.part_bits(); i += stride) {
            TileNumber<Shape> other(args, tile, i);
            other.read(args);
            other.write(args, sums[buffer]);
        }
        tile += gridDim.x >> args.split_bits;
        if (tile >= args.tiles) break;
        number = TileNumber<Shape>(args, tile, own);
        // Of two buffers the next tile takes the other; this one is written again only behind
        // that tile's barrier.
        if (kBuffers<Shape> == 1) wait_for_cluster(args);
        buffer = (buffer + 1) % kBuffers<Shape>;
    }
    // Another thread block may still be reading this one's sums.
    if (args.split_bits > 0) wait_for_cluster(args);
}

// ---- host --------------------------------------------------------------------------------------

QuantPart part_of(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    QuantPart part = {};
    part.tiles = w.tiles;
    part.runs = w.device_runs;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.strip_bytes = static_cast<uint32_t>(w.strip_bytes);
    part.strips = static_cast<int>(ceil_div(w.n, 32));
    part.num_units = static_cast<uint32_t>(w.num_units);
    part.num_runs = w.num_runs;
    part.n = w.n;
    part.first_column = first_column;
    part.scale_dtype = w.scale_dtype;
    part.offset_kind = w.offset_kind;
    const int scale_bytes = static_cast<int>(scale_bytes_of(w.scale_dtype));
    part.header_bytes = UnitHead{scale_bytes, w.offset_kind}.blocks();
    if (w.num_runs <= kFewRuns) std::copy_n(w.runs, w.num_runs, part.few_runs);
    return part;
}

// Of the largest chunk of a matrix.
int chunk_bytes(const ExlQuantMatrix& w, int header_bytes) {
    int most = 0;
    for (int i = 0; i < w.num_runs; ++i) {
        const ExlQuantRun& run = w.runs[i];
        const int blocks = run.group_units > 1 ? kChunkBlocks : run.last_blocks;
        const int units = kChunkBlocks / blocks;
        most = std::max(most, units * (header_bytes + 128 * run.bits * blocks));
    }
    return most;
}

template <class Shape>
constexpr int shared_beside_rings() {
    return kBuffers<Shape> * static_cast<int>(sizeof(WarpSums<Shape>)) +
           kWarps * static_cast<int>(sizeof(RingState));
}

// Slots of a ring, of which the launch takes as many as fit and no more than are of use.
int slots_for(int slot_bytes, int beside, const DeviceInfo& info) {
    const int shared = std::min(kHalfOfShared, info.shared_per_block);
    const int room = std::min(kRingBytes, (shared - beside) / kWarps);
    return std::min(kMostSlots, room / slot_bytes);
}

// Whether two thread blocks share a tile, as what makes the slowest of them done soonest, in units
// of a warp: the end of a tile takes as long as one of them, and sharing it as long as three more.
int split_bits_for(const QuantLinearArgs& args, int slots, const DeviceInfo& info) {
    const double units = static_cast<double>(args.parts[0].num_units) * args.wide() / kWarps;
    const auto cost = [&](int bits) {
        const auto rounds = static_cast<double>(ceil_div(args.tiles, std::max(1, slots >> bits)));
        return rounds * (units / (1 << bits) + 1 + 3 * bits);
    };
    return info.capability >= 90 && cost(1) < cost(0);
}

template <class Shape>
cudaError_t launch_shape(QuantLinearArgs& args, const DeviceInfo& info, void* stream) {
    constexpr int kBeside = shared_beside_rings<Shape>();
    args.slots = slots_for(args.slot_bytes, kBeside, info);
    const int slots = 2 * info.multiprocessors;
    args.split_bits = split_bits_for(args, slots, info);
    const int64_t clusters = std::min<int64_t>(args.tiles, std::max(1, slots >> args.split_bits));
    return launch_clusters(
        quant_linear_kernel<Shape>, dim3(static_cast<unsigned>(clusters << args.split_bits)),
        dim3(kThreads), args.splits(), kWarps * args.slots * args.slot_bytes + kBeside, stream, args
    );
}

// One launch, of args.m rows.
cudaError_t launch_rows(
    QuantLinearArgs& args, int row_tiles, const DeviceInfo& info, void* stream
) {
    // Strips beside each other share inputs: more of them for more rows, unless that leaves
    // multiprocessors without a tile.
    args.wide_bits = args.m > 8 ? 2 : args.m > 1 || args.is_gated() ? 1 : 0;
    const auto cut = [&] {
        args.tiles = 0;
        for (int i = 0; i < args.num_groups; ++i) {
            const int64_t tiles = ceil_div(args.parts[i].strips, 1 << args.part_bits());
            args.tiles += args.group_tiles[i] = static_cast<uint32_t>(tiles);
        }
        return static_cast<int>(args.tiles);
    };
    while (cut() < info.multiprocessors && args.part_bits() > 0) --args.wide_bits;
    if (args.m == 1 && args.block_halves == 32) {
        return launch_shape<RowShape<1, true>>(args, info, stream);
    }
    if (row_tiles == 1) return launch_shape<RowShape<1, false>>(args, info, stream);
    if (row_tiles == 2) return launch_shape<RowShape<2, false>>(args, info, stream);
    return launch_shape<RowShape<4, false>>(args, info, stream);
}

// The most tiles of 8 rows that a thread block of a device has room for, of `tiles`.
int tiles_that_fit(int tiles, int slot_bytes, const DeviceInfo& info) {
    const auto fits = [&](int beside) { return slots_for(slot_bytes, beside, info) > 0; };
    if (tiles == 4 && !fits(shared_beside_rings<RowShape<4, false>>())) tiles = 2;
    if (tiles == 2 && !fits(shared_beside_rings<RowShape<2, false>>())) tiles = 1;
    return tiles;
}

}  // namespace

}  // namespace exl::cuda

extern "C" {

int64_t exl_cuda_quant_linear_workspace(int32_t, int32_t) {
    return exl::cuda::quant_wide_workspace();
}

int exl_cuda_quant_linear(const ExlQuantLinear* of, void* stream) {
    using namespace exl::cuda;
    const bool is_gated = of->epilogue == EXL_EPILOGUE_GATED;
    if (of->count < 1 || of->count > 3 || of->m < 1 || of->m > 128 ||
        (is_gated && of->count != 2) ||
        (is_gated && of->parts[0]->n != of->parts[1]->n) ||
        (of->places != nullptr && (!is_gated || of->y_dtype != kF16)) ||
        (of->y_dtype != kF32 && (of->y_dtype != kF16 || of->epilogue == EXL_EPILOGUE_ADD)) ||
        of->workspace_bytes < exl_cuda_quant_linear_workspace(0, of->m)) {
        return cudaErrorInvalidValue;
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const bool can_be_by_rows = of->count == 1 && of->m <= most_placed_rows(info);
    if ((of->places != nullptr && of->m > most_placed_rows(info)) ||
        (of->is_by_rows && !(can_be_by_rows && is_wide(info, of->m)))) {
        return cudaErrorInvalidValue;
    }
    QuantLinearArgs args = {};
    int columns = 0;
    for (int i = 0; i < of->count; ++i) {
        args.parts[i] = part_of(*of->parts[i], of->inputs[i], is_gated ? 0 : columns);
        columns += of->parts[i]->n;
        const int most = chunk_bytes(*of->parts[i], args.parts[i].header_bytes);
        args.slot_bytes = std::max(args.slot_bytes, static_cast<int>(ceil_div(most, 128) * 128));
    }
    args.y_stride = of->y_stride;
    args.places = of->places;
    args.num_groups = is_gated ? 1 : of->count;
    args.y_dtype = of->y_dtype;
    args.epilogue = of->epilogue;
    args.gate = of->gate;
    constexpr int kChunkRows = EXL_CUDA_CHUNK_ROWS;
    for (int first = 0; first < of->m; first += kChunkRows) {
        const int rows = std::min(of->m - first, kChunkRows);
        if (is_wide(info, rows)) {
            const cudaError_t error = quant_wide(*of, first, rows, info, stream);
            if (error != cudaSuccess) return error;
            continue;
        }
        const int chunk_tiles = exl_cuda_row_tiles(rows);
        args.block_halves = rows == 1 ? 32 : chunk_tiles * 8 * 32;
        // A launch takes 32 rows at most, and a block of a small device fewer.
        const int most_tiles = std::min(chunk_tiles, kMostRows / 8);
        const int tiles = tiles_that_fit(most_tiles, args.slot_bytes, info);
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

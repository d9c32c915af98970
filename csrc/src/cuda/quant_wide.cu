// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for 9 to 64 rows on compute capability 9.0:
// weights are read once.
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors once and shares out the blocks of rows
//            (quant_wide_work.cuh). One warp copies units of eight strips and their inputs ahead
//            (quant_wide_ring.cuh), eight multiply, four of them at a time, reading the inputs from
//            shared memory (quant_wide_unit.cuh).
// Sums       float32. A unit is summed up before its scale is applied, then units along a block's
//            share, then blocks, always in this order (quant_wide_tile.cuh).
// Overlap    Weights fill the ring before the kernel ahead has ended; with up to 32 rows two blocks
//            fit on a multiprocessor, one of this launch and one of the next.
#include <algorithm>
#include <cstdlib>

#include "quant_wide.cuh"
#include "quant_wide_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int kWideThreads = (kConsumers + 1) * kWarp;
constexpr int kTileColumns = 32 * kTileStrips;
constexpr int kMostBlocks = 1024;  // of a grid: as many counters as the workspace has

constexpr int blocks_per_multiprocessor(int rows) { return rows <= 32 ? 2 : 1; }

template <int kRows>
__global__ void __launch_bounds__(kWideThreads, blocks_per_multiprocessor(kRows))
    quant_wide_kernel(const __grid_constant__ WideArgs args) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& ring = *reinterpret_cast<WideRing<kRows>*>(shared + args.ring_bytes);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;

    let_next_begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRingUnits; ++i) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], kConsumers);
            barrier_init(&ring.summed[i], 1);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (warp == kConsumers) {
        WideProducer<kRows>(args, ring, shared, lane).run();
        return;
    }
    wait_for_inputs();
    WideSums<kRows> total;
    uint32_t taken = 0;
    for (WideWalk walk(args, blockIdx.x); walk.left > 0; walk.advance(args)) {
        const bool is_shared = walk.begin > 0 || walk.end(args) < args.tile_length(walk.group);
        for (int half = 0; half < (args.is_gated() ? 2 : 1); ++half) {
            const WideShare share = walk.share(args, half);
            if (share.begin == share.end) continue;
            const WidePart& part = args.parts[share.part];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < kRows / 2; ++n) total[i][n] = 0.0f;
            }
            WideEntry entry;
            do {
                const uint32_t slot = taken % kRingUnits, parity = taken / kRingUnits & 1;
                barrier_wait(&ring.full[slot], parity);
                entry = ring.entries[slot];
                if (entry.blocks() > 0) {
                    add_wide_unit<kRows>(
                        total, part, entry, shared, ring, slot, parity, warp, lane
                    );
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&ring.empty[slot]);
                ++taken;
            } while (!entry.is_last());
            if (is_shared || args.is_gated()) {
                const bool is_first = walk.begin == 0;
                leave<kRows>(total, partial_of<kRows>(args, blockIdx.x, is_first, half));
            }
        }
        finish_wide_tile<kRows>(args, walk, total, ring.is_last_to_come, warp, lane);
    }
#endif
}

// ---- host --------------------------------------------------------------------------------------

WidePart wide_part(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    WidePart part = {};
    part.tiles = w.tiles;
    part.units = w.units;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.strip_bytes = w.strip_bytes;
    part.strips = static_cast<int>(ceil_div(w.n, 32));
    part.num_units = w.num_units;
    part.num_blocks = w.num_blocks;
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

int tuned(const char* name, int otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atoi(value) : otherwise;
}

// Shares the tiles out, in whole units of 4 blocks where there are enough. The number of blocks.
int share_out(WideArgs& args, int64_t blocks) {
    int64_t run = std::max<int64_t>(ceil_div(args.length, blocks), 8);
    run = ceil_div(run, 4) * 4;
    args.run = static_cast<uint32_t>(run);
    return static_cast<int>(ceil_div(args.length, run));
}

template <int kRows>
cudaError_t launch_wide(WideArgs& args, const DeviceInfo& info, void* stream) {
    const int resident = blocks_per_multiprocessor(kRows);
    const int share = 228 * 1024 / resident - 1024;
    const int state = static_cast<int>(sizeof(WideRing<kRows>));
    args.ring_bytes = (std::min(share, info.shared_per_block) - state) / 1024 * 1024;
    if (int kib = tuned("EXL_WIDE_RING", 0)) args.ring_bytes = std::min(args.ring_bytes, kib * 1024);
    const int64_t per = std::min(resident, tuned("EXL_WIDE_BLOCKS", 1));
    const int blocks = share_out(args, std::min<int64_t>(per * info.multiprocessors, kMostBlocks));
    return launch(
        quant_wide_kernel<kRows>, dim3(blocks), dim3(kWideThreads), args.ring_bytes + state, stream, args
    );
}

}  // namespace

int64_t quant_wide_workspace(const DeviceInfo& info, int rows) {
    const int64_t padded = rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
    const int64_t blocks = 2 * info.multiprocessors;
    return std::min<int64_t>(blocks, kMostBlocks) * 4 * kTileColumns * padded *
           static_cast<int64_t>(sizeof(float));
}

cudaError_t quant_wide(
    const ExlQuantLinear& of, int first, int rows, uint32_t* counters, float* partials,
    const DeviceInfo& info, void* stream
) {
    WideArgs args = {};
    const bool is_gated = of.epilogue == EXL_EPILOGUE_GATED;
    int columns = 0;
    args.epilogue = of.epilogue;
    args.groups = is_gated ? 1 : of.count;
    for (int i = 0; i < of.count; ++i) {
        const ExlQuantMatrix& w = *of.parts[i];
        const auto* inputs = static_cast<const __half*>(of.inputs[i]) +
                             first / EXL_CUDA_CHUNK_ROWS *
                                 exl_cuda_chunk_halves(EXL_CUDA_CHUNK_ROWS, w.num_blocks);
        args.parts[i] = wide_part(w, inputs, is_gated ? 0 : columns);
        columns += w.n;
        args.tiles[i] = static_cast<uint32_t>(ceil_div(args.parts[i].strips, kTileStrips));
    }
    int64_t length = 0;
    for (int i = 0; i < args.groups; ++i) length += int64_t{args.tiles[i]} * args.tile_length(i);
    if (length > INT32_MAX) return cudaErrorInvalidValue;
    args.length = static_cast<uint32_t>(length);
    args.y = static_cast<uint8_t*>(of.y) + first * of.y_stride * (of.y_dtype == kF16 ? 2 : 4);
    args.y_stride = of.y_stride;
    args.y_dtype = of.y_dtype;
    args.gate = of.gate;
    args.m = rows;
    args.counters = counters;
    args.partials = partials;
    args.block_halves = 8 * exl_cuda_row_tiles(rows) * 32;
    if (rows <= 16) return launch_wide<16>(args, info, stream);
    if (rows <= 32) return launch_wide<32>(args, info, stream);
    return launch_wide<64>(args, info, stream);
}

}  // namespace exl::cuda

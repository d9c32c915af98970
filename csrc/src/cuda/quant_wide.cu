// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for 9 to 64 rows on compute capability
// 9.0: weights are read once.
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors once, or twice where there is much to do, and
//            shares out the blocks of rows (quant_wide_work.cuh). One warp copies units of eight
//            strips and their inputs ahead, one sums up the inputs (quant_wide_ring.cuh); eight
//            multiply, four of them as one, which read the inputs from shared memory
//            (quant_wide_unit.cuh).
// Sums       float32. A unit is summed up before its scale is applied, then units along a block's
//            share, then blocks, always in this order (quant_wide_tile.cuh).
// Overlap    Weights fill the ring before the kernel ahead has ended; with up to 32 rows two blocks
//            fit on a multiprocessor, of one launch or of this one and the next.
#include <algorithm>

#include "quant_wide.cuh"
#include "quant_wide_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int kTileColumns = 32 * kTileStrips;

constexpr int blocks_per_multiprocessor(int rows) { return rows <= 32 ? 2 : 1; }

template <int kRows>
__global__ void __launch_bounds__(kWideThreads, blocks_per_multiprocessor(kRows))
    quant_wide_kernel(const __grid_constant__ WideArgs args) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& state = *reinterpret_cast<WideState<kRows>*>(shared + args.ring_bytes);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;

    let_next_begin();
    state.begin();
    __syncthreads();
    if (warp == kMultipliers) {
        WideCopies<kRows>(args, state, shared, lane).run();
        return;
    }
    if (warp > kMultipliers) {
        sum_all_inputs<kRows>(args, state, shared, lane);
        return;
    }
    wait_for_inputs();
    uint32_t taken = 0;
    for (WideWalk walk(args, blockIdx.x); walk.left > 0; walk.advance(args)) {
        WideSums<kRows> total;
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
                barrier_wait(&state.full[slot], parity);
                entry = state.entries[slot];
                // The same for all lanes, and known to be.
                entry.unit = __shfl_sync(0xffffffffu, entry.unit, 0);
                entry.inputs = __shfl_sync(0xffffffffu, entry.inputs, 0);
                if (entry.blocks() > 0) {
                    add_wide_unit<kRows>(
                        total, part, entry, shared, state, slot, parity, warp, lane
                    );
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&state.empty[slot]);
                ++taken;
            } while (!entry.is_last());
            const bool is_shared = walk.begin > 0 || walk.end(args) < args.tile_length(walk.group);
            if (is_shared || args.is_gated()) {
                leave<kRows>(total, partial_of<kRows>(args, blockIdx.x, walk.begin == 0, half));
            }
        }
        finish_wide_tile<kRows>(args, walk, total, state.is_last_to_come, warp, lane);
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

// Shares the tiles out, in whole units of 4 blocks, to the multiprocessors, or to as many blocks as
// run at once where each of these has 5 units. The number of blocks.
int share_out(WideArgs& args, int resident, int multiprocessors) {
    constexpr int kUnit = 4, kFewest = 2 * kUnit;
    const int64_t most = resident * multiprocessors;
    const int64_t blocks = args.length >= 5 * kUnit * most ? most : multiprocessors;
    const int64_t run = std::max<int64_t>(ceil_div(args.length, blocks), kFewest);
    args.run = static_cast<uint32_t>(ceil_div(run, kUnit) * kUnit);
    return static_cast<int>(ceil_div(args.length, args.run));
}

template <int kRows>
cudaError_t launch_wide(WideArgs& args, const DeviceInfo& info, void* stream) {
    const int resident = blocks_per_multiprocessor(kRows);
    const int share = std::min(228 * 1024 / resident - 1024, info.shared_per_block);
    const int state = static_cast<int>(sizeof(WideState<kRows>));
    args.ring_bytes = (share - state) / 128 * 128;
    const int blocks = share_out(args, resident, info.multiprocessors);
    return launch(
        quant_wide_kernel<kRows>, dim3(blocks), dim3(kWideThreads), args.ring_bytes + state, stream,
        args
    );
}

}  // namespace

int64_t quant_wide_workspace(const DeviceInfo& info, int rows) {
    const int padded = rows <= 16 ? 16 : 32;  // with 64 there are half as many blocks
    const int64_t blocks = blocks_per_multiprocessor(padded) * info.multiprocessors;
    return blocks * 4 * kTileColumns * padded * static_cast<int64_t>(sizeof(float));
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
    if (rows <= 16) return launch_wide<16>(args, info, stream);
    if (rows <= 32) return launch_wide<32>(args, info, stream);
    return launch_wide<64>(args, info, stream);
}

}  // namespace exl::cuda

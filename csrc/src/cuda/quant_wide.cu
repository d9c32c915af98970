// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for 9 to 64 rows on compute capability
// 9.0: weights are read once.
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors once or twice; a tile of columns is the work of a
//            cluster of up to eight thread blocks (quant_wide_work.cuh). One warp of each copies
//            units of neighbouring strips and their inputs ahead (quant_wide_ring.cuh); eight
//            multiply, four of them as one, which read the inputs from shared memory
//            (quant_wide_unit.cuh).
// Sums       float32, of weights that are rounded to float16: units along a team's share, then teams
//            and blocks, always in this order (quant_wide_tile.cuh).
// Overlap    The first weights come before the kernel ahead has ended, and so does the code of the
//            end of a tile; with up to 32 rows two blocks fit on a multiprocessor, of one launch or
//            of this one and the next.
#include <algorithm>

#include "quant_wide.cuh"
#include "quant_wide_tile.cuh"

namespace exl::cuda {

namespace {

constexpr int blocks_per_multiprocessor(int rows) { return rows <= 32 ? 2 : 1; }

#if EXL_IS_HOPPER

__device__ __forceinline__ float4* sums_of(const WideArgs& args, uint8_t* ring) {
    return reinterpret_cast<float4*>(ring + args.sums_at);
}
__device__ __forceinline__ float4* gates_of(const WideArgs& args, uint8_t* ring) {
    return reinterpret_cast<float4*>(ring + args.gates_at);
}

// Of the strip of a tile, of its only part or of both of a pair; early, as they come from memory.
__device__ __forceinline__ void load_units(
    const WideArgs& args, const WideWalk& walk, int strip, float (&units)[2]
) {
    if (walk.is_over(args)) return;
    const int of_part = args.tile_strips() * static_cast<int>(walk.tile) + strip;
    units[0] = weight_unit(args.parts[walk.group], of_part);
    if (args.is_gated()) units[1] = weight_unit(args.parts[1], of_part);
}

// What the multiplying warps do: all tiles of the block. Another warp goes through the end of a tile
// while inputs are not there yet, to no effect, so that its code is: it takes longer to come than to
// run.
template <int kRows, bool is_by_rows>
__device__ __forceinline__ void multiply_all(
    const WideArgs& args, WideState& state, uint8_t* ring, int warp, int lane
) {
    const int strip = warp & (args.tile_strips() - 1);
    const int team = warp * args.teams() / kTileStrips;
    const bool is_real = warp < kMultipliers;
    WideWalk walk(args);
    float units[2];
    load_units(args, walk, strip, units);
    if (is_real) wait_for_inputs();
    uint32_t taken = 0;
    while (!walk.is_over(args)) {
        WideSums<kRows> total;
        for (int half = 0; is_real && half < (args.is_gated() ? 2 : 1); ++half) {
            const WideShare share = walk.share(args, half);
            const WidePart& part = args.parts[share.part];
            if (half == 1 && args.is_shared()) {
                cluster_wait();  // all blocks have begun
                send_pieces<kRows>(args, total, gates_of(args, ring), &state.sums);
            } else if (half == 1) {
                leave<kRows>(total, gates_of(args, ring));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < kRows / 2; ++n) total[i][n] = 0.0f;
            }
            const float weight = half == 0 ? units[0] : units[1];
            const uint32_t count = share.end - share.begin;
            for (uint32_t unit = team; unit < count; unit += args.teams()) {
                const uint32_t slot = (taken + unit) % kRingUnits;
                barrier_wait(&state.full[slot], (taken + unit) / kRingUnits & 1);
                WideEntry entry = state.entries[slot];
                entry.unit = uniform(entry.unit);
                entry.at = uniform(entry.at);
                entry.inputs = uniform(entry.inputs);
                add_wide_unit<kRows, is_by_rows>(
                    total, part, entry, ring, strip, weight, lane
                );
                __syncwarp();
                if (lane == 0) barrier_arrive(&state.empty[slot]);
            }
            taken += count;
        }
        if (!is_real) {
            // Nothing to add up.
        } else if (args.is_shared()) {
            if (!args.is_gated()) cluster_wait();  // all blocks have begun
            if (args.sums_at == 0) {
                cluster_arrive();
                cluster_wait();  // all blocks are done with their rings
            }
            send_pieces<kRows>(args, total, sums_of(args, ring), &state.sums);
        } else {
            if (args.sums_at == 0) named_barrier<1, kMultiplierThreads>();  // done with the ring
            leave<kRows>(total, sums_of(args, ring));
        }
        WideWalk next = walk;
        next.advance(args);
        load_units(args, next, strip, units);
        write_wide_tile<kRows>(
            args, walk, sums_of(args, ring), gates_of(args, ring), state, is_real
        );
        if (!is_real) break;
        walk = next;
    }
}

#endif

template <int kRows, bool is_by_rows>
__global__ void __launch_bounds__(kWideThreads, blocks_per_multiprocessor(kRows))
    quant_wide_kernel(const __grid_constant__ WideArgs args) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& state = *reinterpret_cast<WideState*>(shared + args.ring_bytes);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;

    let_next_begin();
    state.begin(args.teams(), args.sums_bytes<kRows>());
    __syncthreads();
    if (args.is_shared()) cluster_arrive();
    if (warp == kMultipliers) {
        WideCopies<kRows>(args, state, shared, lane).run();
    } else {
        multiply_all<kRows, is_by_rows>(args, state, shared, warp, lane);
    }
    if (warp >= kMultipliers && args.is_shared()) {
        __syncwarp();
        cluster_wait();
        if (args.sums_at == 0) {
            cluster_arrive();  // done with the ring
            cluster_wait();
        }
    }
    // What a block sends may not come once it has ended; all have got theirs here.
    if (args.is_shared()) {
        cluster_arrive();
        cluster_wait();
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
    part.num_units = static_cast<uint32_t>(w.num_units);
    part.n = w.n;
    part.first_column = first_column;
    part.scale_bytes = static_cast<int>(scale_bytes_of(w.scale_dtype));
    part.offset_kind = w.offset_kind;
    part.header_bytes = UnitHead{part.scale_bytes, w.offset_kind}.blocks();
    return part;
}

// Unit `index` of a matrix, as its table has it.
WidePart::First unit_at(const ExlQuantMatrix& w, uint32_t index, uint32_t header_bytes) {
    const ExlQuantRun* run = w.runs;
    while (run + 1 < w.runs + w.num_runs && index >= run[1].first_unit) ++run;
    const uint32_t of_run = index - run->first_unit, units = run->group_units;
    const uint32_t group = of_run / units, of_group = of_run % units;
    const uint32_t group_blocks = 4 * (units - 1) + run->last_blocks;
    const uint32_t first_block = run->first_block + group * group_blocks + 4 * of_group;
    const uint32_t blocks = of_group + 1 < units ? 4 : run->last_blocks;
    const uint32_t block_bytes = 128 * run->bits;
    return {
        run->offset + of_run * header_bytes + (group * group_blocks + 4 * of_group) * block_bytes,
        first_block | static_cast<uint32_t>(run->bits) << 16 | blocks << 24
    };
}

// Tiles of the launch, for 2^team_bits teams.
int cut_tiles(WideArgs& args, int team_bits) {
    args.team_bits = team_bits;
    args.tiles = 0;
    for (int i = 0; i < args.groups; ++i) {
        args.group_tiles[i] =
            static_cast<uint32_t>(ceil_div(args.parts[i].strips, args.tile_strips()));
        args.tiles += args.group_tiles[i];
    }
    return static_cast<int>(args.tiles);
}

// How many clusters of 1, 2, 4 or 8 blocks run at once; asked once for each device.
struct ClusterRoom {
    int device = -1;
    int at_once[kMostSplits + 1];
};
template <int kRows, bool is_by_rows>
cudaError_t cluster_room(ClusterRoom* room, const DeviceInfo& info, int shared_bytes) {
    thread_local ClusterRoom known;
    if (known.device != info.device) {
        cudaError_t error = cudaFuncSetAttribute(
            quant_wide_kernel<kRows, is_by_rows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
            shared_bytes
        );
        for (int splits = 1; splits <= kMostSplits && error == cudaSuccess; splits *= 2) {
            cudaLaunchAttribute cluster = {};
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3(static_cast<unsigned>(splits));
            config.blockDim = dim3(kWideThreads);
            config.dynamicSmemBytes = shared_bytes;
            config.attrs = &cluster;
            config.numAttrs = 1;
            error = cudaOccupancyMaxActiveClusters(
                &known.at_once[splits], quant_wide_kernel<kRows, is_by_rows>, &config
            );
        }
        if (error != cudaSuccess) {
            cudaGetLastError();  // it is reported, and not to be seen again
            return error;
        }
        known.device = info.device;
    }
    *room = known;
    return cudaSuccess;
}

constexpr int kMeetingBits = 2;  // four clusters of two blocks share a tile where they meet

// Teams and blocks of a cluster, as what makes the slowest block done soonest, in units of a team
// alone on its multiprocessor: two blocks on one slow each other down by a third, two teams that
// read inputs of their own by a tenth, and sums of several take as long as a unit. Of 32 clusters of
// 7 blocks, which fit at once by the driver's count, one has been seen to begin when others had
// ended; hence powers of two.
void share_out(WideArgs& args, const ClusterRoom& room, int multiprocessors, bool can_meet) {
    int64_t units = 0;
    for (int i = 0; i < args.groups; ++i) units = std::max<int64_t>(units, args.parts[i].num_units);
    if (args.is_gated()) units += args.parts[1].num_units;
    double least = 0;
    int best = -1;
    for (int bits = 0; bits <= (args.is_gated() ? 0 : 1); ++bits) {
        const int tiles = cut_tiles(args, bits), teams = args.teams();
        for (int splits = 1; splits <= kMostSplits; splits *= 2) {
            const bool is_shared = teams * splits > 1;
            const int at_once = std::max(1, room.at_once[splits]);
            if (is_shared && tiles > at_once) continue;
            const int64_t own = ceil_div(units, teams * splits) * ceil_div(tiles, at_once);
            const double slower = (tiles * splits <= multiprocessors ? 1.0 : 1.33) *
                                  (teams == 2 ? 1.1 : 1.0);
            const double cost = static_cast<double>(own) * slower + is_shared;
            if (best < 0 || cost < least) {
                least = cost, best = bits, args.splits = splits;
            }
        }
    }
    args.meeting_bits = 0;
    // Blocks that fill the device meet in memory, for which a tile's end takes some units longer.
    const int tiles = cut_tiles(args, 1), clusters = tiles << kMeetingBits;
    const auto own = static_cast<double>(ceil_div(units, 2 * kMostSplits));
    if (can_meet && !args.is_gated() && clusters * 2 <= kMostMeeting &&
        clusters <= room.at_once[2] && own * 1.33 * 1.1 + 4 < least) {
        args.splits = 2;
        args.meeting_bits = kMeetingBits;
        return;
    }
    cut_tiles(args, best);
}

template <int kRows, bool is_by_rows>
cudaError_t launch_wide(
    WideArgs& args, const ExlQuantLinear& of, const DeviceInfo& info, void* stream
) {
    const int resident = blocks_per_multiprocessor(kRows);
    const int share = std::min(228 * 1024 / resident - 1024, info.shared_per_block);
    const int state = static_cast<int>(sizeof(WideState));
    ClusterRoom room;
    const cudaError_t error = cluster_room<kRows, is_by_rows>(&room, info, share);
    if (error != cudaSuccess) return error;
    share_out(args, room, info.multiprocessors, kRows <= 32);
    args.meeting = static_cast<uint8_t*>(of.workspace);
    const auto at_once = static_cast<uint32_t>(std::max(1, room.at_once[args.splits]));
    const uint32_t clusters = args.tiles << args.meeting_bits;
    const bool has_one = clusters <= at_once;
    args.piece = static_cast<int>(ceil_div(kRows / 4 * args.tile_strips(), args.splits));
    args.per_piece = static_cast<uint32_t>(ceil_div(1 << 16, args.piece));
    const int all_sums = args.sources() * args.piece * kWarp * static_cast<int>(sizeof(float4));
    const int gates = args.is_gated() ? all_sums : 0;
    // Sums have a place of their own where the ring can spare it: then nobody waits with sending
    // until all are done with their rings.
    const bool in_ring = has_one && (args.is_gated() || !args.is_shared());
    const int sums = in_ring ? 0 : all_sums;
    args.ring_bytes = (share - state - gates - sums) / 128 * 128;
    args.gates_at = args.ring_bytes + state;
    args.sums_at = in_ring ? 0 : args.gates_at + gates;
    args.clusters = std::min(clusters, at_once);
    for (int i = 0; i < of.count; ++i) {
        WidePart& part = args.parts[i];
        const int sharers = args.splits << args.meeting_bits;
        part.share_units = static_cast<uint32_t>(ceil_div(part.num_units, sharers));
        for (uint32_t rank = 0; rank * part.share_units < part.num_units; ++rank) {
            part.first[rank] = unit_at(*of.parts[i], rank * part.share_units, part.header_bytes);
        }
    }
    return launch_clusters(
        quant_wide_kernel<kRows, is_by_rows>, dim3(args.clusters * args.splits),
        dim3(kWideThreads), args.splits, args.ring_bytes + state + gates + sums, stream, args
    );
}

template <bool is_by_rows>
cudaError_t launch_rows(
    WideArgs& args, const ExlQuantLinear& of, const DeviceInfo& info, void* stream
) {
    if (args.m <= 16) return launch_wide<16, is_by_rows>(args, of, info, stream);
    if (args.m <= 32) return launch_wide<32, is_by_rows>(args, of, info, stream);
    return launch_wide<64, is_by_rows>(args, of, info, stream);
}

}  // namespace

int64_t quant_wide_workspace() { return kMeetingHead + kMostMeeting * kMeetingBytes; }

cudaError_t quant_wide(
    const ExlQuantLinear& of, int first, int rows, const DeviceInfo& info, void* stream
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
    }
    args.y = static_cast<uint8_t*>(of.y) + first * of.y_stride * (of.y_dtype == kF16 ? 2 : 4);
    args.y_stride = of.y_stride;
    args.places = of.places;
    args.y_dtype = of.y_dtype;
    args.gate = of.gate;
    args.m = rows;
    return of.is_by_rows ? launch_rows<true>(args, of, info, stream)
                         : launch_rows<false>(args, of, info, stream);
}

}  // namespace exl::cuda

// Products of many rows with the matrices of their experts, for prompts on compute capability 9.0.
//
// Contract   exl/cuda/moe.h (exl_cuda_expert_many_rows).
// Floor      2 * pairs * n * k operations divided by the throughput of the tensor cores.
// Mapping    The grid has one thread block per multiprocessor. A block loops over tiles of one item,
//            128 rows of an expert, and 4 column panels, and computes all of k for each. A
//            producer warp copies k-tiles and their inputs into a ring of stages. Two warpgroups of
//            consumers have 16 columns of each panel and multiply with wgmma
//            (linear/quant_many_rows_k_tile.cuh). Tiles at the same time are those of few items, so
//            that they share inputs and weights in the L2 cache.
// Accuracy   float32 sums over all of k in order. Rows past the last one of an item are computed
//            from whatever memory holds, and dropped: no product mixes rows.
#include <algorithm>

#include "cuda/linear/quant_many_rows_k_tile.cuh"
#include "cuda/moe/experts.cuh"

namespace exl::cuda {

namespace {

constexpr int kRows = EXL_CUDA_CHUNK_ROWS;
constexpr int kItemChunks = 2;
static_assert(kItemChunks * kRows == EXL_CUDA_EXPERT_ITEM_ROWS);
constexpr int kTilePanels = 4;  // of a thread block
constexpr int kThreads = kConsumerThreads + 4 * kWarp;
constexpr int kStageInputBytes = kItemChunks * 4 * 64 * kRows;
constexpr int kGateSumsBytes = kItemChunks * kRows / 2 * kConsumerThreads * 4;

struct ItemArgs {
    ExlExpertLinear call;
    const ExlQuantKTile* k_tiles;
    int32_t num_k_tiles;
    int32_t num_panels;
    int32_t num_tiles;  // of an item
    int32_t num_stages;
    int32_t stage_bytes;
    // Offsets in shared memory, after the stages.
    int32_t gate_sums_offset;
    int32_t state_offset;
};

struct ItemState {
    alignas(128) StageEntry entries[kSmallBatchStages];
    uint64_t full[kSmallBatchStages];
    uint64_t empty[kSmallBatchStages];
};

#if EXL_IS_HOPPER

static_assert(kItemChunks == kTileChunks);
// Registers of a thread. A multiprocessor has 64 Ki: 384 threads of 168 before they are divided.
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

// Loop of a thread block over its tiles.
struct ItemTiles {
    int index, end, number, first_panel;
    ExlExpertItem item;

    __device__ __forceinline__ explicit ItemTiles(const ItemArgs& args)
        : index(blockIdx.x), end(__ldcg(args.call.num_items) * args.num_tiles) {
        locate(args);
    }
    __device__ __forceinline__ bool is_done() const { return index >= end; }
    __device__ __forceinline__ void advance(const ItemArgs& args) {
        index += gridDim.x;
        locate(args);
    }

  private:
    __device__ __forceinline__ void locate(const ItemArgs& args) {
        if (is_done()) return;
        number = static_cast<int>(uniform(index / args.num_tiles));
        first_panel = kTilePanels * static_cast<int>(uniform(index % args.num_tiles));
        const int4 words = __ldcg(reinterpret_cast<const int4*>(args.call.items + number));
        item = {
            static_cast<int32_t>(uniform(words.x)), static_cast<int32_t>(uniform(words.y)),
            static_cast<int32_t>(uniform(words.z)), 0
        };
    }
};

// Description of a matrix for the inner loop.
__device__ __forceinline__ SmallBatchPart part_of(const ItemArgs& args, int expert, int index) {
    const ExlExpertMatrix* w =
        args.call.matrices + static_cast<int64_t>(expert) * args.call.parts + index;
    SmallBatchPart part;
    const uint32_t kind = uniform(w->kind);
    part.packed = w->tiles;
    part.bias = w->bias;
    part.panel_bytes = w->panel_bytes;
    part.num_panels = args.num_panels;
    part.n = args.call.n;
    part.header_bytes = static_cast<int>(uniform(w->header_bytes));
    part.scale_bytes = kind >> 19 & 1 ? 4 : 2;
    part.offset_kind = static_cast<int>(kind >> 16 & 7);
    return part;
}

// Copies of the producer warp. A stage holds the inputs of a k-tile for both chunks of an item,
// followed by the k-tile in every panel.
__device__ __forceinline__ void produce(
    const ItemArgs& args, ItemState& state, uint8_t* buffer, int lane
) {
    const int64_t chunk_bytes = 2 * static_cast<int64_t>(kRows) * args.call.x_stride;
    StageCounter next;
    for (ItemTiles tiles(args); !tiles.is_done(); tiles.advance(args)) {
        const int num_chunks = tiles.item.count > kRows ? 2 : 1;
        const int num_panels = min(kTilePanels, args.num_panels - tiles.first_panel);
        for (int index = 0; index < args.call.parts; ++index) {
            const SmallBatchPart part = part_of(args, tiles.item.expert, index);
            const uint8_t* const weights = part.packed + tiles.first_panel * part.panel_bytes;
            const uint8_t* const inputs = static_cast<const uint8_t*>(args.call.x[index]) +
                                          kItemChunks * tiles.number * chunk_bytes;
            for (int k_tile = 0; k_tile < args.num_k_tiles; ++k_tile) {
                const ExlQuantKTile* const entry = args.k_tiles + k_tile;
                const uint32_t offset = uniform(__ldg(&entry->offset));
                const uint32_t descriptor =
                    uniform(__ldg(reinterpret_cast<const uint32_t*>(entry) + 1));
                const int blocks = descriptor >> 24, bits = descriptor >> 16 & 0xff;
                const int size = part.header_bytes + 128 * bits * blocks;
                const int input_bytes = kBlockInputBytes * blocks;
                uint64_t* const barrier = &state.full[next.stage];
                barrier_wait(&state.empty[next.stage], next.phase ^ 1);
                const int at = static_cast<int>(next.stage) * args.stage_bytes;
                if (lane == 0) {
                    state.entries[next.stage] = {descriptor, at + kStageInputBytes, at, 0};
                    barrier_arrive_expecting(barrier, num_panels * size + num_chunks * input_bytes);
                }
                __syncwarp();
                const uint8_t* from = weights + offset;
                uint8_t* to = buffer + at + kStageInputBytes;
#pragma unroll 1
                for (int i = 0; i < num_panels; ++i, from += part.panel_bytes, to += size) {
                    if (is_elected()) copy_bulk(to, from, size, barrier);
                }
                from = inputs + static_cast<int64_t>(descriptor & 0xffff) * kBlockInputBytes;
                to = buffer + at;
#pragma unroll 1
                for (int i = 0; i < num_chunks; ++i, from += chunk_bytes, to += kChunkInputBytes) {
                    if (is_elected()) copy_bulk(to, from, input_bytes, barrier);
                }
                next.advance(args.num_stages);
            }
        }
    }
}

// Computes this warp's sums of one part of a tile.
template <int kColumns>
__device__ __forceinline__ void sum_item(
    ManyRowsSums& sums, const ItemArgs& args, const SmallBatchPart& part, ItemState& state,
    const uint8_t* buffer, StageCounter& next, int panel, float panel_scale, int lane
) {
#pragma unroll
    for (int i = 0; i < kItemChunks; ++i) {
#pragma unroll
        for (int n = 0; n < kRows / 2; ++n) sums[i][n] = 0.0f;
    }
    int in_use = -1;  // stage whose products may still be running
    const auto release = [&] {
        __syncwarp();
        if (in_use >= 0 && lane == 0) barrier_arrive(&state.empty[in_use]);
    };
#pragma unroll 1
    for (int k_tile = 0; k_tile < args.num_k_tiles; ++k_tile) {
        barrier_wait(&state.full[next.stage], next.phase);
        StageEntry entry = state.entries[next.stage];
        entry.descriptor = uniform(entry.descriptor);
        entry.weights = uniform(entry.weights);
        entry.inputs = uniform(entry.inputs);
        add_columns<kColumns>(sums, part, entry, buffer, panel, panel_scale, lane, release);
        in_use = static_cast<int>(next.stage);
        next.advance(args.num_stages);
    }
    group_wait<0>();
    release();
#pragma unroll
    for (int i = 0; i < kItemChunks; ++i) group_results(sums[i]);
}

// Where a lane's sums go: its two columns, and what is added to them.
struct LaneColumns {
    int first;
    float factor, bias[2];

    __device__ __forceinline__ LaneColumns(const SmallBatchPart& part, int panel, int column)
        : first(column), factor(1.0f / load_panel_scale(part, panel)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool has_bias = part.bias != nullptr && column + 8 * half < part.n;
            bias[half] = has_bias ? part.bias[column + 8 * half] : 0.0f;
        }
    }
    __device__ __forceinline__ float finish(float sum, int half) const {
        return fmaf(sum, factor, bias[half]);
    }
};

// Stores the products of an item: y [pairs, n].
__device__ __forceinline__ void store_products(
    const ItemArgs& args, const ItemTiles& tiles, const ManyRowsSums& sums,
    const LaneColumns& columns, int lane
) {
#pragma unroll
    for (int i = 0; i < kItemChunks; ++i) {
#pragma unroll
        for (int q = 0; q < kRows / 8; ++q) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = kRows * i + 8 * q + 2 * (lane % 4) + c;
                if (row >= tiles.item.count) continue;
                const int pair = args.call.pairs[tiles.item.first + row];
                float* const y = static_cast<float*>(args.call.y) +
                                 static_cast<int64_t>(pair) * args.call.y_stride + columns.first;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (columns.first + 8 * half < args.call.n) {
                        y[8 * half] = columns.finish(sums[i][4 * q + 2 * half + c], half);
                    }
                }
            }
        }
    }
}

// Stores activations as the inputs of the next product, in chunks. A lane has one column of two
// rows. It gives its neighbor's row to the lane of the adjacent column, and stores two columns of
// the other row. Element 4 q + c of sums is that of the inner loop.
__device__ __forceinline__ void store_inputs(
    const ItemArgs& args, const ItemTiles& tiles, const ManyRowsSums& last, const float4* gate_sums,
    const LaneColumns& gates, const LaneColumns& ups, int lane
) {
    const bool is_odd = lane / 4 % 2 != 0;
    const int even_column = gates.first - is_odd;
    auto* const y = static_cast<__half*>(args.call.y);
#pragma unroll
    for (int i = 0; i < kItemChunks; ++i) {
        if (kRows * i >= tiles.item.count) break;
        __half* const chunk =
            y + (static_cast<int64_t>(kItemChunks) * tiles.number + i) * kRows * args.call.y_stride;
#pragma unroll 2
        for (int q = 0; q < kRows / 8; ++q) {
            float sums[4];
#pragma unroll
            for (int other = 0; other < kRows / 8; ++other) {
                if (q != other) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[c] = last[i][4 * other + c];
            }
            float values[4];
            if (args.call.epilogue == EXL_EPILOGUE_GATED) {
                const float4 four = gate_sums[(i * (kRows / 8) + q) * kConsumerThreads];
                const float firsts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float up = ups.finish(sums[c], c / 2);
                    values[c] = gated(args.call.gate, gates.finish(firsts[c], c / 2), up);
                }
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    values[c] = gated(args.call.gate, gates.finish(sums[c], c / 2), 1.0f);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float even = values[2 * half], odd = values[2 * half + 1];
                const float kept = is_odd ? odd : even;
                const float got = __shfl_xor_sync(0xffffffffu, is_odd ? even : odd, 4);
                const int column = even_column + 8 * half;
                const int row = 8 * q + 2 * (lane % 4) + is_odd;
                if (kRows * i + row >= tiles.item.count || column >= args.call.n) continue;
                __half* const to = chunk + column / 32 * (32 * kRows) +
                                   column / 2 % 4 * (8 * kRows) + row * 8 + column / 8 % 4 * 2;
                *reinterpret_cast<__half2*>(to) = __halves2half2(
                    from_float<__half>(is_odd ? got : kept), from_float<__half>(is_odd ? kept : got)
                );
            }
        }
    }
}

template <int kColumns>
__device__ __forceinline__ void consume(
    const ItemArgs& args, ItemState& state, uint8_t* buffer, int warp, int lane
) {
    auto* const gate_sums = reinterpret_cast<float4*>(buffer + args.gate_sums_offset) + threadIdx.x;
    const int panel_in_tile = warp % kTilePanels;
    StageCounter next;
#pragma unroll 1
    for (ItemTiles tiles(args); !tiles.is_done(); tiles.advance(args)) {
        const int panel = tiles.first_panel + panel_in_tile;
        ManyRowsSums sums;
#pragma unroll 1
        for (int index = 0; index < args.call.parts; ++index) {
            const SmallBatchPart part = part_of(args, tiles.item.expert, index);
            if (index == 1) {
#pragma unroll
                for (int n = 0; n < kItemChunks * kRows / 8; ++n) {
                    const float* four = &sums[n / (kRows / 8)][4 * (n % (kRows / 8))];
                    gate_sums[n * kConsumerThreads] =
                        make_float4(four[0], four[1], four[2], four[3]);
                }
            }
            sum_item<kColumns>(
                sums, args, part, state, buffer, next, panel_in_tile, load_panel_scale(part, panel),
                lane
            );
        }
        if (panel >= args.num_panels) continue;
        const int column = 32 * panel + 16 * kColumns + lane / 4;
        const LaneColumns first(part_of(args, tiles.item.expert, 0), panel, column);
        if (args.call.epilogue == EXL_EPILOGUE_STORE) {
            store_products(args, tiles, sums, first, lane);
            continue;
        }
        const int last_part = args.call.parts - 1;
        const LaneColumns last(part_of(args, tiles.item.expert, last_part), panel, column);
        store_inputs(args, tiles, sums, gate_sums, first, last, lane);
    }
}

#endif

__global__ void __launch_bounds__(kThreads, 1) items_kernel(const __grid_constant__ ItemArgs args) {
#if EXL_IS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& state = *reinterpret_cast<ItemState*>(shared + args.state_offset);
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    if (warp == 0 && is_elected()) {
#pragma unroll
        for (int i = 0; i < kSmallBatchStages; ++i) {
            barrier_init(&state.full[i], 1);
            barrier_init(&state.empty[i], kConsumerWarps);
        }
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_inputs();
    let_next_begin();
    if (warp >= kConsumerWarps) {
        give_registers<kProducerRegisters>();
        if (warp == kConsumerWarps) produce(args, state, shared, lane);
    } else {
        take_registers<kConsumerRegisters>();
        if (warp < kTilePanels) {
            consume<0>(args, state, shared, warp, lane);
        } else {
            consume<1>(args, state, shared, warp, lane);
        }
    }
#endif
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_expert_many_rows(
    const ExlExpertLinear* call, const ExlQuantKTile* k_tiles, int32_t num_k_tiles, void* stream
) {
    using namespace exl::cuda;
    const bool is_gated = call->epilogue == EXL_EPILOGUE_GATED;
    const bool fits = call->source == EXL_EXPERTS_CODES && call->parts == (is_gated ? 2 : 1) &&
                      (is_gated || call->epilogue == EXL_EPILOGUE_STORE ||
                       call->epilogue == EXL_EPILOGUE_ACTIVATED) &&
                      call->n >= 1 && call->n % 2 == 0 && num_k_tiles >= 1 &&
                      call->tile_rows == EXL_CUDA_EXPERT_ITEM_ROWS && call->x_stride % 32 == 0 &&
                      call->max_items >= 0 && call->next == nullptr && call->load_bytes >= 16;
    if (!fits) return cudaErrorInvalidValue;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (call->max_items == 0) return cudaSuccess;
    ItemArgs args = {};
    args.call = *call;
    args.k_tiles = k_tiles;
    args.num_k_tiles = num_k_tiles;
    args.num_panels = static_cast<int>(ceil_div(call->n, 32));
    args.num_tiles = static_cast<int>(ceil_div(args.num_panels, kTilePanels));
    // A load has one k-tile or several.
    args.stage_bytes =
        static_cast<int>(ceil_div(kTilePanels * call->load_bytes + kStageInputBytes, 128) * 128);
    const int state = static_cast<int>(sizeof(ItemState));
    const int beside = state + (is_gated ? kGateSumsBytes : 0);
    args.num_stages =
        std::min(kSmallBatchStages, (info.shared_per_block - beside) / args.stage_bytes);
    if (args.num_stages < 2) return cudaErrorInvalidConfiguration;
    args.gate_sums_offset = args.num_stages * args.stage_bytes;
    args.state_offset = args.gate_sums_offset + beside - state;
    const int64_t tiles = call->max_items * args.num_tiles;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, info.multiprocessors));
    return launch(
        items_kernel, dim3(blocks), dim3(kThreads), static_cast<size_t>(args.state_offset + state),
        stream, args
    );
}

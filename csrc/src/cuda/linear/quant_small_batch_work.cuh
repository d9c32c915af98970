// Work partition of a small-batch launch: output tiles, and the division of k (split-K).
//
// The columns of each part are divided into output tiles of 8 or 4 column panels. The tiles of all
// parts are numbered consecutively. A tile of a gated pair covers the same panels of both parts,
// gate first. The k-tiles of an output tile are divided at up to three levels:
//
//   slices          tiles of 4 panels only: the two warpgroups of a block take alternate k-tiles
//   splits          the thread blocks of a cluster, reduced through distributed shared memory
//   global splits   several clusters per tile, reduced through global memory: each cluster stores
//                   its sums in the workspace, and the last one to arrive adds them up
//
// All thread blocks of a tile get consecutive k-tiles that take about the same time. A tile that is
// not divided is computed by one thread block, and such a block c of C loops over the tiles c,
// c + C, c + 2 C and so on. If tiles are divided, every thread block works on one tile only.
//
// In the batch-invariant mode a launch has several chunks of 64 rows. It has every tile once per
// chunk, and the chunks of a tile follow one another, so that they share weights in the L2 cache.
#pragma once

#include "cuda/common/hopper.cuh"
#include "exl/cuda/exchange.h"

namespace exl::cuda {

constexpr int kMaxTilePanels = 8;
constexpr int kMaxSplits = 8;  // thread blocks that divide an output tile, in all its clusters
// Workspace of the reduction through global memory. It has room for the sums of kMaxGlobalBlocks
// thread blocks of a launch. The arrival counters, one per portion of a tile, precede the sums.
constexpr int kMaxGlobalBlocks = 288;
constexpr int kGlobalSumBytes = 8192;  // of one thread block
constexpr int kCounterBytes = 4 * kMaxGlobalBlocks;

struct SmallBatchPart {
    // First k-tile of each thread block of a tile: its number, its offset in the panel, and the
    // second word of ExlQuantKTile. As kernel parameters they need no memory access. The entry
    // behind that of the last block has only a number, that of all k-tiles.
    struct FirstKTile {
        uint32_t k_tile, offset, descriptor;
    } first[kMaxSplits + 1];
    const uint8_t* packed;
    const ExlQuantKTile* k_tiles;  // [num_k_tiles]
    const float* bias;
    const __half* inputs;  // prepared for this part
    int64_t panel_bytes;
    int32_t num_panels;
    uint32_t num_k_tiles;
    int64_t chunk_halves;  // float16 numbers of the inputs of a chunk
    int32_t n;
    int32_t first_column;  // column of y
    int32_t header_bytes;  // of a k-tile: its scales and offsets
    int32_t scale_bytes;   // of one scale: 2 or 4
    int32_t offset_kind;
};

struct SmallBatchArgs {
    SmallBatchPart parts[3];
    uint32_t group_tiles[3];    // output tiles of each group: of a part, or of a gated pair
    uint32_t num_tiles;         // of all groups
    int32_t slice_bits;         // log2 of the slices: 1 for tiles of 4 panels, 0 for tiles of 8
    int32_t splits;             // thread blocks of a cluster
    int32_t global_split_bits;  // log2 of the clusters of a tile
    uint32_t num_clusters;
    uint8_t* workspace;  // counters, zero between launches, and sums
    // In the reduction each thread block of a cluster adds up one portion of the tile. Unit:
    // vectors of four sums per lane of a warp.
    int32_t portion;
    uint32_t portion_reciprocal;  // 2^16 / portion, rounded up
    void* y;
    const int32_t* inverse_permutation;  // not null: y is prepared inputs of a linear
    int64_t y_stride;
    ExlPartialCopies copies;  // of y, which is float32 then
    int32_t row_shift;        // of the copies, if they are divided by rows; otherwise -1
    int32_t num_groups;
    int32_t m;  // rows of a chunk
    uint32_t num_chunks;
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t pipeline_bytes;
    // Offsets in shared memory of the partial sums, and of those of a gated pair's gate.
    // sums_offset 0: the sums overwrite the pipeline stages, once all blocks of the cluster have
    // consumed theirs.
    int32_t sums_offset;
    int32_t gate_sums_offset;

    __host__ __device__ bool is_gated() const { return epilogue == EXL_EPILOGUE_GATED; }
    __host__ __device__ bool has_activation() const { return epilogue >= EXL_EPILOGUE_GATED; }
    __host__ __device__ int slices() const { return 1 << slice_bits; }
    __host__ __device__ int tile_panels() const { return kMaxTilePanels >> slice_bits; }
    // Thread blocks that divide a tile.
    __host__ __device__ int blocks() const { return splits << global_split_bits; }
    // Number of partial sums per output in a cluster.
    __host__ __device__ int num_partials() const { return splits << slice_bits; }
    // Whether a tile is divided within its cluster. Then a thread block has one tile only.
    __host__ __device__ bool is_split() const { return num_partials() > 1; }
    __host__ __device__ bool has_global_split() const { return global_split_bits > 0; }
#if EXL_IS_HOPPER
    // Bytes of partial sums that this block receives: its portion, from all splits and slices.
    template <int kRows>
    __device__ __forceinline__ uint32_t received_bytes() const {
        const int all = kRows / 4 * tile_panels();
        const int own = min(portion, max(0, all - portion * static_cast<int>(cluster_rank())));
        return own * kWarp * sizeof(float4) * num_partials() * (is_gated() ? 2 : 1);
    }
#endif
};

#if EXL_IS_HOPPER

// K-tiles begin .. end - 1 of one part.
struct KRange {
    int part;
    uint32_t begin, end;
};

// Rank of this cluster among the clusters of its output tile.
__device__ __forceinline__ uint32_t cluster_in_tile(const SmallBatchArgs& args) {
    return cluster_index() & ((1u << args.global_split_bits) - 1);
}

// Output tile of this thread block, and the loop over its tiles.
struct TileScheduler {
    uint32_t index;  // among all tiles of all chunks
    int group;
    uint32_t tile;  // in the group
    uint32_t chunk;

    __device__ __forceinline__ explicit TileScheduler(const SmallBatchArgs& args)
        : index(cluster_index() >> args.global_split_bits) {
        locate(args);
    }
    __device__ __forceinline__ bool is_done(const SmallBatchArgs& args) const {
        return index >= args.num_tiles * args.num_chunks;
    }
    __device__ __forceinline__ void advance(const SmallBatchArgs& args) {
        index += args.num_clusters;
        locate(args);
    }
    // K-tiles of the current tile for this block: of the tile's only part, or of part `pair_index`
    // of a gated pair.
    __device__ __forceinline__ KRange k_range(const SmallBatchArgs& args, int pair_index) const {
        const int part = args.is_gated() ? pair_index : group;
        const SmallBatchPart::FirstKTile* first = args.parts[part].first + split_rank(args);
        return {part, first[0].k_tile, first[1].k_tile};
    }
    // Rank of this block among all thread blocks of its tile.
    __device__ __forceinline__ static uint32_t split_rank(const SmallBatchArgs& args) {
        return cluster_in_tile(args) * args.splits + cluster_rank();
    }

  private:
    __device__ __forceinline__ void locate(const SmallBatchArgs& args) {
        group = 0, tile = index, chunk = 0;
        if (args.num_chunks > 1) tile = index / args.num_chunks, chunk = index % args.num_chunks;
        while (group + 1 < args.num_groups && tile >= args.group_tiles[group]) {
            tile -= args.group_tiles[group++];
        }
    }
};

#endif  // EXL_IS_HOPPER

}  // namespace exl::cuda

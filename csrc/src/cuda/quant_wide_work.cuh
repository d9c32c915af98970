// How a launch of the wide kernel divides its matrices: column tiles, shares of their units.
//
// The columns of each part are cut into tiles of 8 strips or 4, laid end to end; of a gated pair a tile
// has the same strips of both, gate first. A tile is the work of one cluster of thread blocks, which
// takes every so many of them; its units are shared out to the blocks in equal numbers, and in tiles
// of 4 strips to the block's two teams of four warps in turns. Only a block alone, of one team, has
// more tiles than one. A tile can have several clusters, which meet in memory: each leaves its sums
// there, and the last one to come adds them up.
#pragma once

#include "hopper.cuh"

namespace exl::cuda {

constexpr int kTileStrips = 8;  // at most
constexpr int kMostSplits = 8;  // blocks that share a tile
// Blocks of one launch that meet in memory at most, each with so many bytes of sums there. Before
// those come counters, one for each place where some of them meet.
constexpr int kMostMeeting = 288;
constexpr int kMeetingBytes = 8192;
constexpr int kMeetingHead = 4 * kMostMeeting;

struct WidePart {
    // What the table of units says of the first one of each block's share, which needs not be read
    // then: its place in a strip, and the word behind that.
    struct First {
        uint32_t offset, unit;
    } first[kMostSplits];
    const uint8_t* tiles;
    const ExlQuantUnit* units;
    const float* bias;
    const __half* inputs;
    int64_t strip_bytes;
    int32_t strips;
    uint32_t num_units;
    uint32_t share_units;  // of a block; the last ones may have fewer
    int32_t n;
    int32_t first_column;  // of y
    int32_t header_bytes;  // of a unit, ahead of its blocks
    int32_t scale_bytes;   // of one scale: 2 or 4
    int32_t offset_kind;
};

struct WideArgs {
    WidePart parts[3];
    uint32_t group_tiles[3];  // of each part, or of a gated pair both
    uint32_t tiles;           // of all
    int32_t team_bits;  // 1 with tiles of 4 strips and two teams, else 0
    int32_t splits;     // thread blocks of a cluster, 1 to kMostSplits
    int32_t meeting_bits;  // 2^meeting_bits clusters to a tile
    uint32_t clusters;
    uint8_t* meeting;  // counters, zero between launches, and sums
    int32_t piece;  // of a tile that a block writes: so many times four numbers of a warp's threads
    uint32_t per_piece;  // 2^16 / piece, rounded up
    void* y;
    const int32_t* places;  // null, or y is prepared inputs
    int64_t y_stride;
    int32_t groups;      // parts, or 1 of a gated pair
    int32_t m;           // rows of this launch
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t ring_bytes;
    int32_t sums_at;   // in shared memory; 0: in the ring, once the cluster is done with its rings
    int32_t gates_at;  // those of a pair's first part

    __host__ __device__ bool is_gated() const { return epilogue == EXL_EPILOGUE_GATED; }
    __host__ __device__ int teams() const { return 1 << team_bits; }
    __host__ __device__ int tile_strips() const { return kTileStrips >> team_bits; }
    // Of sums of a tile.
    __host__ __device__ int sources() const { return splits << team_bits; }
    // Whether several blocks or teams share a tile; then a block has only the one.
    __host__ __device__ bool is_shared() const { return sources() > 1; }
    __host__ __device__ bool meets() const { return meeting_bits > 0; }
#if EXL_IS_HOPPER
    // What this block gets of all sums of a tile.
    template <int kRows>
    __device__ __forceinline__ uint32_t sums_bytes() const {
        const int all = kRows / 4 * tile_strips();
        const int own = min(piece, max(0, all - piece * static_cast<int>(cluster_rank())));
        return own * kWarp * sizeof(float4) * sources() * (is_gated() ? 2 : 1);
    }
#endif
};

#if EXL_IS_HOPPER

// Units of one part in a tile: begin .. end - 1.
struct WideShare {
    int part;
    uint32_t begin, end;
};

// Which of a tile's clusters this is.
__device__ __forceinline__ uint32_t wide_cluster(const WideArgs& args) {
    return cluster_index() & ((1u << args.meeting_bits) - 1);
}

// The tile that a block is at.
struct WideWalk {
    uint32_t of_all;
    int group;
    uint32_t tile;

    __device__ __forceinline__ explicit WideWalk(const WideArgs& args)
        : of_all(cluster_index() >> args.meeting_bits) {
        find(args);
    }
    __device__ __forceinline__ bool is_over(const WideArgs& args) const {
        return of_all >= args.tiles;
    }
    __device__ __forceinline__ void advance(const WideArgs& args) {
        of_all += args.clusters;
        find(args);
    }
    // Of the tile's only part, or of the first or second of a pair.
    __device__ __forceinline__ WideShare share(const WideArgs& args, int half) const {
        const int part = args.is_gated() ? half : group;
        const uint32_t units = args.parts[part].num_units, each = args.parts[part].share_units;
        const uint32_t begin = min(units, rank(args) * each);
        return {part, begin, min(units, begin + each)};
    }
    // Of this block among all that share the tile.
    __device__ __forceinline__ static uint32_t rank(const WideArgs& args) {
        return wide_cluster(args) * args.splits + cluster_rank();
    }

private:
    __device__ __forceinline__ void find(const WideArgs& args) {
        group = 0, tile = of_all;
        while (group + 1 < args.groups && tile >= args.group_tiles[group]) {
            tile -= args.group_tiles[group++];
        }
    }
};

#endif  // EXL_IS_HOPPER

}  // namespace exl::cuda

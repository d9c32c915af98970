// How a launch of the wide kernel divides its matrices: column tiles, ranges of blocks of rows.
//
// The columns of each part are cut into tiles of 8 strips, laid end to end; each tile counts the
// blocks of 32 rows of its part. Of a gated pair a tile has the same strips of both, gate first.
// Every block of the grid gets an equal run of that length, which may begin and end within a tile.
// A unit belongs to the run in which it begins.
#pragma once

#include "common.cuh"

namespace exl::cuda {

constexpr int kTileStrips = 8;

struct WidePart {
    const uint8_t* tiles;
    const ExlQuantUnit* units;
    const float* bias;
    const __half* inputs;
    int64_t strip_bytes;
    int32_t strips;
    int32_t num_units;
    uint32_t num_blocks;
    int32_t n;
    int32_t first_column;  // of y
    int32_t header_bytes;  // of a unit, ahead of its blocks
    int32_t scale_bytes;   // of one scale: 2 or 4
    int32_t offset_kind;
};

struct WideArgs {
    WidePart parts[3];
    uint32_t tiles[3];  // of each part; of a gated pair the first number counts
    void* y;
    int64_t y_stride;
    uint32_t* counters;  // [grid] blocks that have added to the tile that this block begins
    float* partials;     // [grid][2][2] shares of a tile, see partial_of
    uint32_t length;     // of all tiles
    uint32_t run;        // of a block; the last one's may be shorter
    int32_t groups;      // parts, or 1 of a gated pair
    int32_t m;           // rows of this launch
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t ring_bytes;

    __host__ __device__ bool is_gated() const { return epilogue == EXL_EPILOGUE_GATED; }
    __host__ __device__ uint32_t tile_length(int group) const {
        return parts[group].num_blocks + (is_gated() ? parts[1].num_blocks : 0);
    }
};

#ifdef __CUDACC__

// Rows of one part in a tile: blocks begin .. end - 1.
struct WideShare {
    int part;
    uint32_t begin, end;
};

// A block's share of the tile that it is at, and what is left of its run.
struct WideWalk {
    int group = 0;
    uint32_t tile = 0;
    uint32_t start = 0;  // of the tile, in the length of all
    uint32_t begin;      // of the share, in the tile
    uint32_t left;       // of the run, this tile's share included

    __device__ __forceinline__ WideWalk(const WideArgs& args, uint32_t block) {
        const uint32_t place = block * args.run;
        left = min(args.run, args.length - place);
        while (group + 1 < args.groups) {
            const uint32_t length = args.tiles[group] * args.tile_length(group);
            if (place - start < length) break;
            start += length;
            ++group;
        }
        const uint32_t length = args.tile_length(group);
        tile = (place - start) / length;
        start += tile * length;
        begin = place - start;
    }
    __device__ __forceinline__ uint32_t end(const WideArgs& args) const {
        return min(args.tile_length(group), begin + left);
    }
    __device__ __forceinline__ void advance(const WideArgs& args) {
        left -= end(args) - begin;
        start += args.tile_length(group);
        begin = 0;
        if (++tile == args.tiles[group] && group + 1 < args.groups) ++group, tile = 0;
    }
    // Of the first or second part of the tile; empty where the block has nothing of it.
    __device__ __forceinline__ WideShare share(const WideArgs& args, int half) const {
        const int part = args.is_gated() ? half : group;
        const uint32_t first = half == 0 ? 0 : args.parts[0].num_blocks;
        const uint32_t last = first + args.parts[part].num_blocks;
        const uint32_t from = max(begin, first), to = min(end(args), last);
        return from < to ? WideShare{part, from - first, to - first} : WideShare{part, 0, 0};
    }
};

// The first unit that begins at that block of rows or later. All lanes of a warp ask together.
__device__ __forceinline__ int first_unit_from(const WidePart& part, uint32_t block, int lane) {
    if (block == 0) return 0;
    if (block >= part.num_blocks) return part.num_units;
    int low = 0, high = part.num_units;  // the answer is in low .. high
    while (low < high) {
        const int step = (high - low + kWarp - 1) / kWarp;
        const int probe = low + lane * step;
        const bool is_before = probe < high && __ldg(&part.units[probe].first_block) < block;
        const int before = __popc(__ballot_sync(0xffffffffu, is_before));
        if (before == 0) return low;
        high = min(high, low + before * step);
        low += (before - 1) * step + 1;
    }
    return low;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

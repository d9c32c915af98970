// How a launch of quant_linear divides its matrices: parts, column tiles, ranges of blocks.
//
// The columns of all parts are cut into tiles of `wide` strips, laid end to end; each tile counts
// the bytes of one of its strips. Every block of the grid gets an equal run of that length, which
// may begin and end within a tile, and splits each tile's share over its warps along k. A unit
// belongs to the run in which it begins.
#pragma once

#include "common.cuh"

namespace exl::cuda {

struct QuantPart {
    const uint8_t* tiles;
    const ExlQuantUnit* units;
    const float* bias;
    const __half* inputs;
    uint32_t strip_bytes;
    int32_t strips;
    int32_t num_units;
    int32_t n;
    int32_t first_column;  // of y
    int32_t header_bytes;  // of a unit, ahead of its blocks
    int32_t scale_bytes;   // of one scale: 2 or 4
    int32_t offset_kind;
};

// Tiles of one layout: a part, or of a gated pair both (gate strips first, then up strips).
struct TileGroup {
    uint32_t tiles;
    uint32_t length;  // of one tile
};

struct QuantLinearArgs {
    QuantPart parts[3];
    TileGroup groups[3];
    void* y;
    const int32_t* places;  // null, or y is prepared inputs
    int64_t y_stride;
    uint32_t* counters;  // [grid] blocks that have added to the tile that this block begins
    float* partials;     // [grid][2][wide * 32 * m]
    uint32_t length;  // of all tiles
    uint32_t run;     // of a block; the last one's may be shorter
    uint32_t num_groups;
    int32_t wide;  // strips of a tile: 1, 2 or 4
    int32_t m;     // rows of this launch, at most 32
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t ring_bytes;    // of each warp
    int32_t block_halves;  // of the prepared inputs
};

#ifdef __CUDACC__

// A block's share of the tile that it is at, and what is left of its run.
struct TileWalk {
    uint32_t group;
    uint32_t tile;
    uint32_t begin;  // of the share, in the tile
    uint32_t left;   // of the run, this tile's share included

    __device__ __forceinline__ TileWalk(const QuantLinearArgs& args, uint32_t block) {
        uint32_t place = block * args.run;
        left = min(args.run, args.length - place);
        for (group = 0; group + 1 < args.num_groups; ++group) {
            const uint32_t length = args.groups[group].tiles * args.groups[group].length;
            if (place < length) break;
            place -= length;
        }
        tile = place / args.groups[group].length;
        begin = place % args.groups[group].length;
    }
    __device__ __forceinline__ uint32_t end(const QuantLinearArgs& args) const {
        return min(args.groups[group].length, begin + left);
    }
    __device__ __forceinline__ void advance(const QuantLinearArgs& args) {
        left -= end(args) - begin;
        begin = 0;
        if (++tile == args.groups[group].tiles && group + 1 < args.num_groups) ++group, tile = 0;
    }
};

// Part and strip of a tile's column `of_tile`; a strip past the part's last one is nobody's.
struct StripPlace {
    int part;
    int strip;

    __device__ __forceinline__ StripPlace(
        const QuantLinearArgs& args, int group, int tile, int of_tile
    ) {
        const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
        const int of_part = is_gated ? args.wide / 2 : args.wide;
        const bool is_up = of_tile >= of_part;
        part = is_gated ? is_up : group;
        strip = tile * of_part + of_tile - (is_up ? of_part : 0);
    }
};

// The first unit that begins at that byte of a strip or later. All lanes of a warp ask together.
__device__ __forceinline__ int first_unit_at(const QuantPart& part, uint32_t byte, int lane) {
    int low = 0, high = part.num_units;  // the answer is in low .. high
    while (low < high) {
        const int step = (high - low + kWarp - 1) / kWarp;
        const int probe = low + lane * step;
        const bool is_before = probe < high && __ldg(&part.units[probe].offset) < byte;
        const int before = __popc(__ballot_sync(0xffffffffu, is_before));
        if (before == 0) return low;
        high = min(high, low + before * step);
        low += (before - 1) * step + 1;
    }
    return low;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

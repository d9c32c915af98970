// How a launch of quant_linear divides its matrices: parts, column tiles, slices of rows.
//
// The columns of all parts are cut into tiles of a few strips, laid end to end. A tile is the work
// of one cluster of thread blocks, which takes every so many of them; its rows are shared
// out in equal numbers of units to the warps that have the same strip. Runs of units come with the
// launch, so that every address is arithmetic.
#pragma once

#include "common.cuh"

namespace exl::cuda {

constexpr int kFewRuns = 12;  // that come with the launch; more are read from memory

struct QuantPart {
    const uint8_t* tiles;
    const ExlQuantRun* runs;  // in device memory
    const float* bias;
    const __half* inputs;
    uint32_t strip_bytes;
    int32_t strips;
    uint32_t num_units;
    int32_t num_runs;
    int32_t n;
    int32_t first_column;  // of y
    int32_t header_bytes;  // of a unit, ahead of its blocks
    int32_t scale_dtype;
    int32_t offset_kind;
    ExlQuantRun few_runs[kFewRuns];
};

struct QuantLinearArgs {
    QuantPart parts[3];
    uint32_t group_tiles[3];  // of each part, or of a gated pair both: gate strips, then up strips
    uint32_t tiles;           // of all
    void* y;
    const int32_t* places;  // null, or y is prepared inputs
    int64_t y_stride;
    int32_t num_groups;
    int32_t wide_bits;   // 2^wide_bits strips of a tile: 1, 2 or 4
    int32_t split_bits;  // 2^split_bits thread blocks of a cluster
    int32_t m;       // rows of this launch, at most 32
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t slots;         // of each warp's ring
    int32_t slot_bytes;
    int32_t block_halves;  // of the prepared inputs

    __host__ __device__ int wide() const { return 1 << wide_bits; }
    __host__ __device__ int splits() const { return 1 << split_bits; }
    __host__ __device__ bool is_gated() const { return epilogue == EXL_EPILOGUE_GATED; }
    // Strips of a tile that a part of it has.
    __host__ __device__ int part_bits() const { return wide_bits - is_gated(); }
};

#ifdef __CUDACC__

// Where a tile lies: its group, and which of that group's tiles it is.
struct TilePlace {
    int group = 0;
    uint32_t tile;

    __device__ __forceinline__ TilePlace(const QuantLinearArgs& args, uint32_t of_all)
        : tile(of_all) {
        while (group + 1 < args.num_groups && tile >= args.group_tiles[group]) {
            tile -= args.group_tiles[group++];
        }
    }
};

// Part and strip of a tile's column `of_tile`; a strip past the part's last one is nobody's.
struct StripPlace {
    int part;
    int strip;

    __device__ __forceinline__ StripPlace(
        const QuantLinearArgs& args, const TilePlace& place, int of_tile
    ) {
        const int of_part = 1 << args.part_bits();
        part = args.is_gated() ? of_tile >= of_part : place.group;
        strip = (place.tile << args.part_bits()) + (of_tile & (of_part - 1));
    }
};

__device__ __forceinline__ ExlQuantRun run_at(const QuantPart& part, int index) {
    return part.num_runs <= kFewRuns ? part.few_runs[index] : part.runs[index];
}

// The run of a unit.
__device__ __forceinline__ int run_of(const QuantPart& part, uint32_t unit) {
    int low = 0, high = part.num_runs - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (run_at(part, middle).first_unit <= unit) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

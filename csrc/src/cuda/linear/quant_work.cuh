// Work partition of a quant_linear launch: parts, output tiles, k-slices.
//
// A launch multiplies its inputs with one to three matrices, the parts. A group is one part, or
// both parts of a gated pair. The columns of each group are divided into output tiles of 1, 2 or 4
// column panels. The tiles of all groups are numbered consecutively. One cluster of thread blocks
// computes a tile; cluster c of C computes the tiles c, c + C, c + 2 C and so on. Within a cluster,
// all warps that work on the same panel divide k among them (split-K): each one sums a k-slice, and
// the slices differ by at most one k-tile. The table of runs is a kernel parameter, so that the
// addresses of all weights can be computed without reading memory.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/exchange.h"

namespace exl::cuda {

// Number of runs of a part that fit into the kernel parameters. A longer table is read from memory.
constexpr int kInlineRuns = 12;

struct QuantPart {
    const uint8_t* packed;
    const ExlQuantRun* runs;  // [num_runs], in device memory
    const float* bias;
    const __half* inputs;  // prepared for this part
    uint32_t panel_bytes;
    int32_t num_panels;
    uint32_t num_k_tiles;
    int32_t num_runs;
    int32_t n;
    int32_t first_column;  // column of y
    int32_t header_bytes;  // of a k-tile: its scales and offsets
    int32_t scale_dtype;
    int32_t offset_kind;
    int32_t values;
    ExlQuantRun inline_runs[kInlineRuns];  // the same runs, if they fit
};

struct QuantLinearArgs {
    QuantPart parts[3];
    // Number of output tiles of each group. A tile of a gated pair has gate panels, then up panels.
    uint32_t group_tiles[3];
    uint32_t num_tiles;  // of all groups
    void* y;
    const int32_t* inverse_permutation;  // not null: y is prepared inputs of a linear
    int64_t y_stride;
    ExlPartialCopies copies;  // of y, which is float32 then
    int32_t num_groups;
    int32_t panel_bits;  // log2 of the column panels of an output tile: 1, 2 or 4
    int32_t split_bits;  // log2 of the thread blocks of a cluster
    int32_t m;           // rows of this launch, at most 32
    int32_t y_dtype;
    int32_t epilogue;
    int32_t gate;
    int32_t num_stages;  // pipeline stages of each warp
    int32_t stage_bytes;
    int32_t block_halves;  // float16 numbers of the prepared inputs per block of 32 rows of k
    bool warms_up;         // there is a warm-up pass (kWarmUpRows in common.cuh)

    __host__ __device__ int panels() const { return 1 << panel_bits; }
    __host__ __device__ int splits() const { return 1 << split_bits; }
    __host__ __device__ bool is_gated() const { return epilogue == EXL_EPILOGUE_GATED; }
    __host__ __device__ bool has_activation() const { return epilogue >= EXL_EPILOGUE_GATED; }
    // log2 of the panels of an output tile that belong to one part.
    __host__ __device__ int part_panel_bits() const { return panel_bits - is_gated(); }
};

#ifdef __CUDACC__

// Group of an output tile, and the tile's number in that group.
struct TileLocation {
    int group = 0;
    uint32_t tile;

    __device__ __forceinline__ TileLocation(const QuantLinearArgs& args, uint32_t index)
        : tile(index) {
        while (group + 1 < args.num_groups && tile >= args.group_tiles[group]) {
            tile -= args.group_tiles[group++];
        }
    }
};

// Part and column panel of one of an output tile's panels. The last tile of a group may extend past
// its last panel; then `panel` is not less than the part's num_panels, and the warp has no work.
struct PanelLocation {
    int part;
    int panel;

    __device__ __forceinline__ PanelLocation(
        const QuantLinearArgs& args, const TileLocation& at, int panel_of_tile
    ) {
        const int part_panels = 1 << args.part_panel_bits();
        part = args.is_gated() ? panel_of_tile >= part_panels : at.group;
        panel = (at.tile << args.part_panel_bits()) + (panel_of_tile & (part_panels - 1));
    }
};

__device__ __forceinline__ ExlQuantRun run_at(const QuantPart& part, int index) {
    return part.num_runs <= kInlineRuns ? part.inline_runs[index] : part.runs[index];
}

// Returns the index of the run that contains a k-tile (binary search).
__device__ __forceinline__ int find_run(const QuantPart& part, uint32_t k_tile) {
    int low = 0, high = part.num_runs - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (run_at(part, middle).first_k_tile <= k_tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// Division of a product with trellis codes among thread blocks, and the sums that they leave.
//
// An item is some rows of some columns: half a unit (64 rows, 64 columns) for the decode kernel, 128
// rows of 256 columns for the small-batch kernel. Items are numbered along k first. Every block
// takes an equal share of successive items, which may begin and end within a column group. It
// writes its sums of each group that it touches to a slot of its own, so that no block waits for
// another one. The finish kernel adds the slots of a group in the order of the blocks. The division
// depends on neither the batch nor timing.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/trellis.h"

namespace exl::cuda::trellis {

// Division by a number that the host knows, for dividends below 2^31. A kernel's own division takes
// some twenty instructions, which are fetched for one use.
struct Divisor {
    uint32_t factor, shift;

    Divisor() = default;
    __host__ explicit Divisor(uint32_t divisor) : factor(0), shift(31) {
        while (1ull << (shift - 31) < divisor) ++shift;
        factor = static_cast<uint32_t>(((1ull << shift) + divisor - 1) / divisor);
    }
    __host__ __device__ __forceinline__ uint32_t divide(uint32_t x) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(x) * factor >> shift);
    }
};

// An item, its column group, and the group's first item.
struct Place {
    uint32_t item, group, start;

    __device__ __forceinline__ void advance(uint32_t count, uint32_t group_items) {
        item += count;
        while (item - start >= group_items) start += group_items, ++group;
    }
};

// Items [first_item(b), first_item(b + 1)) belong to block b: the first `larger` blocks have
// share + 1 items, the others `share`.
struct Division {
    uint32_t items, blocks;
    uint32_t group_items;  // of a column group
    uint32_t share, larger;
    Divisor by_share, by_larger_share, by_group_items;

    Division() = default;
    __host__ Division(uint32_t all_items, uint32_t count, uint32_t of_group)
        : items(all_items),
          blocks(count),
          group_items(of_group),
          share(all_items / count),
          larger(all_items % count),
          by_share(share),
          by_larger_share(share + 1),
          by_group_items(of_group) {}

    __device__ __forceinline__ uint32_t first_item(uint32_t block) const {
        return block * share + min(block, larger);
    }
    __device__ __forceinline__ uint32_t block_of(uint32_t item) const {
        const uint32_t of_larger = larger * (share + 1);
        return item < of_larger ? by_larger_share.divide(item)
                                : larger + by_share.divide(item - of_larger);
    }
    // The first item of a block.
    __device__ __forceinline__ Place first_place(uint32_t block) const {
        const uint32_t item = first_item(block), group = by_group_items.divide(item);
        return {item, group, group * group_items};
    }
    // Slot of a block's sums of a column group. With every step from one pair to the next, either
    // the block or the group grows by one.
    __device__ __forceinline__ uint32_t slot(uint32_t group, uint32_t block) const {
        return group + block;
    }
};

// A matrix of a launch: its codes and inputs, and the column groups after it.
struct WorkPart {
    const uint8_t* words;
    const uint8_t* inputs;
    const float2* scales;  // of integers
    uint32_t n_units;      // columns / 64
    uint32_t first_group, last_group;
};

struct WorkArgs {
    WorkPart parts[EXL_TRELLIS_MAX_PARTS];
    Division division;
    float* sums;  // [slots][rows][columns of a group]
    int m;        // rows of the batch

    // The part of a column group.
    __device__ __forceinline__ const WorkPart& part_of(uint32_t group) const {
        return parts[group < parts[0].last_group ? 0 : group < parts[1].last_group ? 1 : 2];
    }
};

// Rows of a slot.
constexpr int kDecodeRows = 8, kBatchRows = 32;
constexpr int kBatchColumns = 256;

// Thread blocks per multiprocessor of the decode kernel.
constexpr int kDecodeBlocks = 2;

// Launches for a codebook, which has a source file of its own (trellis_decode.cuh,
// trellis_batch.cuh). `has_integers`: form of the inputs.
template <int kCodebook>
cudaError_t launch_decode(int tile_words, bool has_integers, const WorkArgs& args, void* stream);
template <int kCodebook>
cudaError_t launch_batch(int tile_words, const WorkArgs& args, void* stream);

}  // namespace exl::cuda::trellis

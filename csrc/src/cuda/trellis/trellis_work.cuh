// Division of a product with trellis codes among thread blocks, and the sums that they leave.
//
// An item is a unit's rows (128) of some columns: 64 for the decode kernel, 256 for the small-batch
// kernel. Items are numbered along k first. Every block takes an equal share of successive items,
// which may begin and end within a column group. It writes its sums of each group that it touches
// to a slot of its own, so that no block waits for another one. The finish kernel adds the slots of
// a group in the order of the blocks. The division depends on neither the batch nor timing.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/trellis.h"

namespace exl::cuda::trellis {

// Items [first_item(b), first_item(b + 1)) belong to block b. Products fit in 32 bits.
struct Division {
    uint32_t items, blocks;
    uint32_t k_units;  // items of a column group

    __host__ __device__ __forceinline__ uint32_t first_item(uint32_t block) const {
        return block * items / blocks;
    }
    __host__ __device__ __forceinline__ uint32_t block_of(uint32_t item) const {
        return ((item + 1) * blocks - 1) / items;
    }
    // Slot of a block's sums of a column group. With every step from one pair to the next, either
    // the block or the group grows by one.
    __host__ __device__ __forceinline__ uint32_t slot(uint32_t group, uint32_t block) const {
        return group + block;
    }
    __host__ uint32_t slots() const { return items / k_units + blocks; }
};

// A matrix of a launch: its codes and inputs, and the first column group after it.
struct WorkPart {
    const uint8_t* words;
    const uint8_t* inputs;
    const float2* scales;  // of integers
    uint32_t n_units;      // columns / 64
    uint32_t last_group;
};

struct WorkArgs {
    WorkPart parts[EXL_TRELLIS_MAX_PARTS];
    Division division;
    float* sums;    // [slots][rows][columns of a group]
    int m;          // rows of the batch
    int set_items;  // of integers: k / 128, else 0
};

// Rows of a slot.
constexpr int kDecodeRows = 8, kBatchRows = 32;
constexpr int kBatchColumns = 256;

// Launches for a codebook, which has a source file of its own (trellis_decode.cuh,
// trellis_batch.cuh), and thread blocks per multiprocessor of the decode kernel.
template <int kCodebook>
int decode_blocks(int tile_words, int rows);
template <int kCodebook>
cudaError_t launch_decode(int tile_words, const WorkArgs& args, void* stream);
template <int kCodebook>
cudaError_t launch_batch(int tile_words, const WorkArgs& args, void* stream);

}  // namespace exl::cuda::trellis

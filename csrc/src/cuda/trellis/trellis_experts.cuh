// Products of rows with the trellis codes of their experts: division among thread blocks.
//
// An item has some rows of one expert, a product is an item with one part of its expert (gate, up),
// and a unit has 128 rows and some columns of a matrix. The units of a product, numbered along k
// first, are divided into shares of equal sizes. A share may begin and end within a column group.
// Its sums of each group go to a slot of their own; the finish kernels add the slots of a group.
// Shares depend on the matrices and the device alone, so that no bit of a row depends on the others.
#pragma once

#include "cuda/common/common.cuh"
#include "cuda/trellis/trellis_values.cuh"
#include "exl/cuda/trellis_experts.h"

namespace exl::cuda::trellis {

constexpr int kBatchTile = 32, kPromptTile = 64;  // most rows of an item
constexpr int kBatchGroupColumns = 256;           // columns of a group of these kernels

// Shares of one product. Products of units and shares fit in 32 bits.
struct Shares {
    uint32_t units, count;
    uint32_t k_units;  // units of a column group
    bool is_aligned;   // no share has units of two groups

    __host__ __device__ __forceinline__ uint32_t first_unit(uint32_t share) const {
        return share * units / count;
    }
    __host__ __device__ __forceinline__ uint32_t share_of(uint32_t unit) const {
        return ((unit + 1) * count - 1) / units;
    }
    // Slot of a share's sums of a group. With every step from one pair of them to the next, either
    // the share or the group grows by one.
    __host__ __device__ __forceinline__ uint32_t slot(uint32_t group, uint32_t share) const {
        return is_aligned ? share : group + share;
    }
    __host__ __device__ __forceinline__ uint32_t slots() const {
        return is_aligned ? count : count + units / k_units;
    }
};

// Items of a call. One row has an item for each of its experts.
struct ExpertItems {
    const int32_t* num_items;
    const ExlExpertItem* items;  // null: item i is pair i with the expert ids[i]
    const int32_t* pairs;
    const int32_t* ids;  // [pairs]
    int32_t max_items;
    int32_t tile_rows;

    __device__ __forceinline__ int count() const {
        return items == nullptr ? max_items : __ldcg(num_items);
    }
    __device__ __forceinline__ ExlExpertItem at(int i) const {
        if (items == nullptr) return {__ldcg(ids + i), i, 1, 0};
        const int4 words = __ldcg(reinterpret_cast<const int4*>(items + i));
        return {words.x, words.y, words.z, 0};
    }
    __device__ __forceinline__ int pair(const ExlExpertItem& item, int row) const {
        return items == nullptr ? item.first : __ldcg(pairs + item.first + row);
    }
};

// A launch: the products of all items with the matrices of one rate.
struct ExpertWork {
    ExpertItems items;
    const ExlTrellisMatrix* matrices;  // [experts, parts]
    Shares shares;
    uint32_t parts;
    const uint8_t* inputs[2];  // prepared inputs of each part, one row per pair
    const float2* scales[2];   // of integers
    float* sums;               // [items][parts][slots][tile rows][columns of a group]
    // Whether an earlier kernel than the previous one wrote the items, so that the first codes are
    // copied before the previous kernel has ended.
    bool is_early;
};

// A share in shared memory.
template <int kTileRows>
struct ShareEntry {
    const uint8_t* words;  // of the matrix
    uint32_t first, last;  // units; none if the matrix has another rate
    uint32_t share, product;
    int32_t count, part;
    int32_t pairs[kTileRows];  // rows past the last one are the first one
};

#ifdef __CUDACC__

// Describes shares number, number + gridDim.x, ... of all products, with all threads of the block.
template <int kTileRows>
__device__ __forceinline__ void fill_table(
    const ExpertWork& work, int tile_words, uint32_t number, int count, ShareEntry<kTileRows>* table
) {
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
        const uint32_t own = number + t * gridDim.x;
        ShareEntry<kTileRows>& to = table[t];
        to.product = own / work.shares.count;
        to.share = own % work.shares.count;
        to.part = to.product % work.parts;
        const ExlExpertItem item = work.items.at(to.product / work.parts);
        const ExlTrellisMatrix* w =
            work.matrices + static_cast<int64_t>(item.expert) * work.parts + to.part;
        to.words = reinterpret_cast<const uint8_t*>(w->words);
        to.count = item.count;
        to.first = work.shares.first_unit(to.share);
        to.last = w->tile_words == tile_words ? work.shares.first_unit(to.share + 1) : to.first;
#pragma unroll 4
        for (int row = 0; row < kTileRows; ++row) {
            to.pairs[row] = work.items.pair(item, row < item.count ? row : 0);
        }
    }
}

#endif  // __CUDACC__

// Launches for a codebook, which has source files of its own (trellis_experts_decode.cuh,
// trellis_experts_batch.cuh, trellis_experts_prompt.cuh), and thread blocks per multiprocessor of the decode kernel.
template <int kCodebook>
int expert_decode_blocks(int tile_words);
template <int kCodebook>
cudaError_t launch_expert_decode(int tile_words, const ExpertWork& work, void* stream);
// `n_units`: columns of a matrix / 64.
template <int kCodebook>
cudaError_t launch_expert_batch(int tile_words, const ExpertWork& work, int n_units, void* stream);

template <int kCodebook>
cudaError_t launch_expert_prompt(int tile_words, const ExpertWork& work, int n_units, void* stream);

// Rows of an item of the decode kernel.
inline int decode_tile(int codebook) { return codebook == EXL_CODEBOOK_MUL1 ? 4 : 8; }

}  // namespace exl::cuda::trellis

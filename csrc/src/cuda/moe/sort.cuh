// Sort of the pairs of a row and an expert by expert, with one thread block: a counting sort, for
// which each warp counts the experts of a range of pairs.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

constexpr int kSortWarps = 8, kSortThreads = kSortWarps * kWarp;

// Pairs to sort, and where the result goes (exl_cuda_expert_inputs).
struct PairSort {
    const int32_t* ids;  // [m, top_k]
    int m, top_k, experts;
    int tile_rows;  // most rows of an item
    int32_t* num_items;
    ExlExpertItem* items;
    int32_t* pairs;
    // Row of each pair if every item has space for tile_rows rows: tile_rows * item + row of the
    // item. Or null.
    int32_t* places;
};

// Shared memory of `sort_pairs`.
inline size_t sort_bytes(int experts) { return sizeof(int) * (kSortWarps + 3) * experts; }

#ifdef __CUDACC__

// Shared memory of the sort. counts[w][e] becomes the position of the next pair of expert e that
// warp w finds, relative to the expert's first one.
struct SortState {
    int* counts;       // [kSortWarps][experts]
    int* starts;       // [experts] position of the expert's first pair
    int* item_starts;  // [experts] number of its first item
    int* totals;       // [experts] its pairs
};

// Calls use(pair, expert, mask) for all pairs of this warp's range, 32 at a time. `mask` has the
// lanes whose pairs have the same expert. Lanes without a pair get expert -1.
template <class Use>
__device__ __forceinline__ void for_own_pairs(
    const PairSort& args, int warp, int lane, const Use& use
) {
    const int pairs = args.m * args.top_k;
    const int each = (pairs + kSortWarps * kWarp - 1) / (kSortWarps * kWarp) * kWarp;
    const int end = min(pairs, (warp + 1) * each);
    for (int first = warp * each; first < end; first += kWarp) {
        const int pair = first + lane;
        const int expert = pair < end ? args.ids[pair] : -1;
        use(pair, expert, __match_any_sync(0xffffffffu, expert));
    }
}

// Replaces counts by prefix sums over the warps, and numbers pairs and items over the experts.
__device__ __forceinline__ void number_pairs(const PairSort& args, const SortState& state) {
    for (int e = threadIdx.x; e < args.experts; e += kSortThreads) {
        int total = 0;
#pragma unroll
        for (int w = 0; w < kSortWarps; ++w) {
            int& count = state.counts[w * args.experts + e];
            const int own = count;
            count = total;
            total += own;
        }
        state.totals[e] = total;
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    int pairs = 0, items = 0;
    for (int first = 0; first < args.experts; first += kWarp) {
        const int e = first + static_cast<int>(threadIdx.x);
        const int total = e < args.experts ? state.totals[e] : 0;
        const int own_items = (total + args.tile_rows - 1) / args.tile_rows;
        int pair_sum = total, item_sum = own_items;
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const int more_pairs = __shfl_up_sync(0xffffffffu, pair_sum, step);
            const int more_items = __shfl_up_sync(0xffffffffu, item_sum, step);
            if (static_cast<int>(threadIdx.x) >= step) {
                pair_sum += more_pairs;
                item_sum += more_items;
            }
        }
        if (e < args.experts) {
            state.starts[e] = pairs + pair_sum - total;
            state.item_starts[e] = items + item_sum - own_items;
        }
        pairs += __shfl_sync(0xffffffffu, pair_sum, kWarp - 1);
        items += __shfl_sync(0xffffffffu, item_sum, kWarp - 1);
    }
    if (threadIdx.x == 0) *args.num_items = items;
}

// Sorts pairs with all threads of a block of kSortThreads. `shared`: sort_bytes.
__device__ __forceinline__ void sort_pairs(const PairSort& args, int* shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const SortState state = {
        shared, shared + kSortWarps * args.experts, shared + (kSortWarps + 1) * args.experts,
        shared + (kSortWarps + 2) * args.experts
    };
    for (int i = threadIdx.x; i < kSortWarps * args.experts; i += kSortThreads) state.counts[i] = 0;
    __syncthreads();
    int* const own = state.counts + warp * args.experts;
    for_own_pairs(args, warp, lane, [&](int, int expert, uint32_t mask) {
        if (expert >= 0 && lane == __ffs(mask) - 1) own[expert] += __popc(mask);
        __syncwarp();
    });
    __syncthreads();
    number_pairs(args, state);
    __syncthreads();
    for_own_pairs(args, warp, lane, [&](int pair, int expert, uint32_t mask) {
        const int position = expert < 0 ? 0 : state.starts[expert] + own[expert];
        __syncwarp();
        if (expert >= 0) {
            const int place = position + __popc(mask & ((1u << lane) - 1));
            args.pairs[place] = pair;
            if (args.places != nullptr) {
                args.places[pair] =
                    state.item_starts[expert] * args.tile_rows + place - state.starts[expert];
            }
            if (lane == __ffs(mask) - 1) own[expert] += __popc(mask);
        }
        __syncwarp();
    });
    for (int e = threadIdx.x; e < args.experts; e += kSortThreads) {
        const int total = state.totals[e];
        ExlExpertItem* to = args.items + state.item_starts[e];
        for (int done = 0; done < total; done += args.tile_rows, ++to) {
            *to = {e, state.starts[e] + done, min(args.tile_rows, total - done), 0};
        }
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// Choice of the experts of one row from the logits of all experts, by kChoiceThreads threads.
//
// Used by the router (route.cu), and by the products of one row (one_row.cu): each of their thread
// blocks chooses for itself, so that nothing waits for one block that chooses for all.
// Mapping    Every thread counts the experts that rank before its own, so that the choice needs no
//            rounds. Of more experts than threads, only those count that rank at least as high as
//            the top_k-th of the threads' best ones.
// Accuracy   float32 sums, in an order that depends on the number of experts alone. Scores by expf.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

constexpr int kChoiceWarps = 4;  // the first ones of a thread block
constexpr int kChoiceThreads = kChoiceWarps * kWarp;

// Asks for the largest shared memory of a multiprocessor, whatever a kernel needs. A
// multiprocessor changes its division into L1 cache and shared memory only while it is idle, so
// that kernels of equal divisions can overlap.
template <class... Params>
cudaError_t prefer_shared_memory(void (*kernel)(Params...)) {
    return cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
        cudaSharedmemCarveoutMaxShared
    );
}

#ifdef __CUDACC__

// Synchronizes the threads that choose.
__device__ __forceinline__ void sync_choice() {
    asm volatile("bar.sync 1, %0;" ::"n"(kChoiceThreads) : "memory");
}

struct Ranked {
    float value;
    int index;
};

// Whether a ranks before b: a higher value, or the lower index of equal values.
__device__ __forceinline__ bool is_better(const Ranked& a, const Ranked& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}
// Ranks after every candidate.
__device__ __forceinline__ Ranked no_candidate() { return {-INFINITY, INT32_MAX}; }

// Score of a group: the sum of its best scores, best first.
__device__ __forceinline__ float group_score(const float* scores, int size, int count) {
    float sum = 0.0f;
    Ranked last = {INFINITY, -1};  // ranks before every candidate
    for (int n = 0; n < min(count, size); ++n) {
        Ranked best = no_candidate();
        for (int i = 0; i < size; ++i) {
            const Ranked one = {scores[i], i};
            if (is_better(last, one) && is_better(one, best)) best = one;
        }
        last = best;
        sum += last.value;
    }
    return sum;
}

// Shared memory of a choice. Sizes in brackets; `padded` is the number of experts, rounded up to
// four.
struct Scratch {
    float* scores;  // [padded]
    float* ranked;  // [padded] the scores that choose; minus infinity after the last expert
    float* values;  // [padded] candidates, or the scores of the groups
    int* indices;   // [padded]
    float* chosen;  // [padded] scores of the chosen experts, best first

    __host__ __device__ static int padded(int experts) { return (experts + 3) / 4 * 4; }
    __host__ __device__ static size_t bytes(int experts) {
        return 5 * sizeof(float) * padded(experts);
    }
    __device__ __forceinline__ Scratch(float* memory, int experts)
        : scores(memory),
          ranked(scores + padded(experts)),
          values(ranked + padded(experts)),
          indices(reinterpret_cast<int*>(values + padded(experts))),
          chosen(values + 2 * padded(experts)) {}
};

// Largest x, or sum of x, of the threads that choose; returned to each of them. `partial` is
// [kChoiceWarps] in shared memory. Contains a barrier.
__device__ __forceinline__ float choice_max(float x, float* partial) {
    const float largest = warp_max(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = largest;
    sync_choice();
    const int lane = threadIdx.x % kWarp;
    return warp_max(lane < kChoiceWarps ? partial[lane] : -INFINITY);
}
__device__ __forceinline__ float choice_sum(float x, float* partial) {
    const float sum = warp_sum(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    sync_choice();
    const int lane = threadIdx.x % kWarp;
    return warp_sum(lane < kChoiceWarps ? partial[lane] : 0.0f);
}

// Reads the logits of a row. Writes its scores, and the scores that choose.
__device__ __forceinline__ void score(const ExlRoute& args, const float* logits, Scratch scratch) {
    __shared__ float partial[2][kChoiceWarps];
    const int experts = args.experts;
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < experts; i += kChoiceThreads) {
        const float logit = __ldcg(logits + i);
        scratch.scores[i] = logit;
        largest = fmaxf(largest, logit);
    }
    float divisor = 1.0f;
    if (args.scores == EXL_SCORES_SOFTMAX) {
        largest = choice_max(largest, partial[0]);
        float sum = 0.0f;
        for (int i = threadIdx.x; i < experts; i += kChoiceThreads) {
            scratch.scores[i] = expf(scratch.scores[i] - largest);
            sum += scratch.scores[i];
        }
        divisor = choice_sum(sum, partial[1]);
    }
    for (int i = threadIdx.x; i < Scratch::padded(experts); i += kChoiceThreads) {
        float rank = -INFINITY;
        if (i < experts) {
            const float one = scratch.scores[i];
            const bool is_softmax = args.scores == EXL_SCORES_SOFTMAX;
            const float own = is_softmax ? one / divisor : 1.0f / (1.0f + expf(-one));
            const float with_bias = own + (args.bias == nullptr ? 0.0f : args.bias[i]);
            scratch.scores[i] = own;
            if (with_bias == with_bias) rank = with_bias;
        }
        scratch.ranked[i] = rank;
    }
    sync_choice();
}

// Sets the scores outside of the best groups to minus infinity.
__device__ __forceinline__ void keep_best_groups(const ExlRoute& args, Scratch scratch) {
    const int size = args.experts / args.groups;
    for (int group = threadIdx.x; group < args.groups; group += kChoiceThreads) {
        scratch.values[group] = group_score(scratch.ranked + group * size, size, args.group_scores);
    }
    sync_choice();
    for (int group = threadIdx.x; group < args.groups; group += kChoiceThreads) {
        const Ranked own = {scratch.values[group], group};
        int before = 0;
        for (int i = 0; i < args.groups; ++i) before += is_better({scratch.values[i], i}, own);
        if (before < args.kept_groups) continue;
        for (int i = 0; i < size; ++i) scratch.ranked[group * size + i] = -INFINITY;
    }
    sync_choice();
}

// Number of experts that rank before `own`, all of which are in `values`, padded to four.
__device__ __forceinline__ int rank_of(const Ranked& own, const float* values, int count) {
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < count; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(values + i);
        before += is_better({four.x, i}, own) + is_better({four.y, i + 1}, own) +
                  is_better({four.z, i + 2}, own) + is_better({four.w, i + 3}, own);
    }
    return before;
}

// Collects the experts that can be among the top_k: those that do not rank after the top_k-th of
// the threads' best ones. Returns their number.
__device__ __forceinline__ int collect(const ExlRoute& args, Scratch scratch) {
    __shared__ Ranked bound;
    __shared__ int count;
    Ranked own = no_candidate();
    for (int i = threadIdx.x; i < args.experts; i += kChoiceThreads) {
        const Ranked one = {scratch.ranked[i], i};
        if (is_better(one, own)) own = one;
    }
    scratch.values[threadIdx.x] = own.value;
    scratch.indices[threadIdx.x] = own.index;
    if (threadIdx.x == 0) bound = no_candidate(), count = 0;
    sync_choice();
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < kChoiceThreads; ++i) {
        before += is_better({scratch.values[i], scratch.indices[i]}, own);
    }
    if (before == args.top_k - 1) bound = own;
    sync_choice();
    for (int i = threadIdx.x; i < args.experts; i += kChoiceThreads) {
        const Ranked one = {scratch.ranked[i], i};
        if (is_better(bound, one)) continue;
        const int at = atomicAdd(&count, 1);
        scratch.values[at] = one.value;
        scratch.indices[at] = i;
    }
    sync_choice();
    return count;
}

// Writes the top_k experts and their scores, best first.
__device__ __forceinline__ void choose_best(const ExlRoute& args, int32_t* ids, Scratch scratch) {
    const auto choose = [&](int rank, int expert) {
        if (rank >= args.top_k) return;
        ids[rank] = expert;
        scratch.chosen[rank] = scratch.scores[expert];
    };
    if (args.experts <= kChoiceThreads) {
        const int expert = threadIdx.x;
        if (expert < args.experts) {
            const Ranked own = {scratch.ranked[expert], expert};
            choose(rank_of(own, scratch.ranked, Scratch::padded(args.experts)), expert);
        }
    } else {
        const int count = collect(args, scratch);
        for (int n = threadIdx.x; n < count; n += kChoiceThreads) {
            const Ranked own = {scratch.values[n], scratch.indices[n]};
            int before = 0;
            for (int i = 0; i < count; ++i) {
                before += is_better({scratch.values[i], scratch.indices[i]}, own);
            }
            choose(before, own.index);
        }
    }
    sync_choice();
}

// Writes the experts [top_k] of one row, whose logits are in global memory.
__device__ __forceinline__ void choose_ids(
    const ExlRoute& args, const float* logits, int32_t* ids, Scratch scratch
) {
    score(args, logits, scratch);
    if (args.kept_groups < args.groups) keep_best_groups(args, scratch);
    choose_best(args, ids, scratch);
}

// Writes the weights [top_k] of the experts that `choose_ids` has chosen.
__device__ __forceinline__ void weigh(const ExlRoute& args, float* weights, Scratch scratch) {
    float sum = 0.0f;
    for (int slot = 0; slot < args.top_k; ++slot) sum += scratch.chosen[slot];
    const float divisor = sum + args.eps;
    for (int slot = threadIdx.x; slot < args.top_k; slot += kChoiceThreads) {
        float weight = scratch.chosen[slot];
        if (args.normalizes) weight /= divisor;
        weights[slot] = weight * args.factor;
    }
    sync_choice();
}

#endif  // __CUDACC__

}  // namespace exl::cuda

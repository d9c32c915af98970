// Choice of the experts of one row from the logits of all experts, by one warp.
//
// Used by the router (route.cu), and by the products of one row (one_row.cu): each of their thread
// blocks for gate and up chooses for itself, so that it does not wait for another one.
// Mapping    A lane has four adjacent experts of every 128, and keeps the best two that are left. Each
//            round takes the best one of all lanes.
// Accuracy   float32 sums, in an order that depends on the number of experts alone. Scores by expf.
// Floor      Latency. A launch executes this once, and finds none of the code in the instruction
//            cache: fetching takes longer than executing. Loops are not unrolled where that saves
//            instructions.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

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

// Experts of a row, those that it chooses and those that all rows share.
__host__ __device__ inline int slots_of(const ExlRoute& route) {
    return route.top_k + route.shared;
}
__host__ __device__ inline int logits_of(const ExlRoute& route) {
    return route.experts + (route.shared_weight != nullptr);
}
__host__ __device__ inline float* logits_at(const ExlRoute& route, int64_t row) {
    const int stride = route.logits_stride == 0 ? logits_of(route) : route.logits_stride;
    return route.logits + row * stride;
}

#ifdef __CUDACC__

// Largest or smallest x of the warp, returned to every lane.
__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int step = kWarp / 2; step > 0; step /= 2) {
        x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
#endif
}
__device__ __forceinline__ uint32_t warp_min(uint32_t x) { return ~warp_max(~x); }

// Shared memory of a choice. Sizes in brackets; `padded` is the number of experts, rounded up to
// those that a warp reads at once.
struct Scratch {
    static constexpr int kStep = 4 * kWarp;

    float* scores;   // [padded]
    uint32_t* keys;  // [padded] in the order of the scores that choose; 0: not to be chosen
    float* groups;   // [padded] scores of the groups

    __host__ __device__ static int padded(int experts) {
        return (experts + kStep - 1) / kStep * kStep;
    }
    __host__ __device__ static size_t bytes(int experts) {
        return 3 * sizeof(float) * padded(experts);
    }
    __device__ __forceinline__ Scratch(void* memory, int experts)
        : scores(static_cast<float*>(memory)),
          keys(reinterpret_cast<uint32_t*>(scores + padded(experts))),
          groups(scores + 2 * padded(experts)) {}
};

// Number whose order is that of the scores, and greater than 0. NaN is as minus infinity.
__device__ __forceinline__ uint32_t key_of(float score) {
    const uint32_t bits = __float_as_uint(score == score ? score : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Calls `work` with the number of the first one of four experts of the lane, and their scores, which
// it may change.
template <class Work>
__device__ __forceinline__ void for_each_four(
    int experts, const Scratch& scratch, int lane, const Work& work
) {
#pragma unroll 1
    for (int i = 4 * lane; i < experts; i += Scratch::kStep) {
        auto& stored = *reinterpret_cast<float4*>(scratch.scores + i);
        float four[4] = {stored.x, stored.y, stored.z, stored.w};
        work(i, four);
        stored = make_float4(four[0], four[1], four[2], four[3]);
    }
}

// Reads the logits of a row. Writes its scores, and the keys of the scores that choose.
__device__ __forceinline__ void score(
    const ExlRoute& args, const float* logits, const Scratch& scratch, int lane
) {
    const int experts = args.experts;
    float largest = -INFINITY, factor = 1.0f;
    for_each_four(experts, scratch, lane, [&](int first, float (&four)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            four[i] = first + i < experts ? __ldcg(logits + first + i) : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, four[i]);
    });
    if (args.scores == EXL_SCORES_SOFTMAX) {
        largest = score_of(warp_max(key_of(largest)));  // one instruction instead of ten
        float sum = 0.0f;
        for_each_four(experts, scratch, lane, [&](int, float (&four)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += four[i] = expf(four[i] - largest);
        });
        factor = 1.0f / warp_sum(sum);
    } else {
        for (int i = 4 * lane; i < experts; i += Scratch::kStep) {
#pragma unroll 1
            for (int j = i; j < min(i + 4, experts); ++j) {
                scratch.scores[j] = 1.0f / (1.0f + expf(-scratch.scores[j]));
            }
        }
    }
    for_each_four(experts, scratch, lane, [&](int first, float (&four)[4]) {
        uint32_t keys[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            four[i] *= factor;
            const bool exists = first + i < experts;
            const float bias = args.bias != nullptr && exists ? args.bias[first + i] : 0.0f;
            keys[i] = exists ? key_of(four[i] + bias) : 0;
        }
        *reinterpret_cast<uint4*>(scratch.keys + first) =
            make_uint4(keys[0], keys[1], keys[2], keys[3]);
    });
    __syncwarp();
}

// The largest key so far, and the first place that has it.
struct Best {
    uint32_t key = 0, place = 0xffffffffu;

    __device__ __forceinline__ void take(uint32_t other, uint32_t at) {
        if (other > key) key = other, place = at;
    }
};

// Score of a group: the sum of its best scores, best first.
__device__ __forceinline__ float group_score(const uint32_t* keys, int size, int count) {
    float sum = 0.0f;
    Best last = {0xffffffffu, 0};
#pragma unroll 1
    for (int n = 0; n < min(count, size); ++n) {
        Best best;
#pragma unroll 1
        for (uint32_t i = 0; i < static_cast<uint32_t>(size); ++i) {
            const bool is_after = keys[i] < last.key || (keys[i] == last.key && i > last.place);
            if (is_after) best.take(keys[i], i);
        }
        last = best;
        sum += score_of(last.key);
    }
    return sum;
}

// Sets the scores outside of the best groups to minus infinity.
__device__ __forceinline__ void keep_best_groups(
    const ExlRoute& args, const Scratch& scratch, int lane
) {
    const int size = args.experts / args.groups;
#pragma unroll 1
    for (int group = lane; group < args.groups; group += kWarp) {
        scratch.groups[group] = group_score(scratch.keys + group * size, size, args.group_scores);
    }
    __syncwarp();
#pragma unroll 1
    for (int group = lane; group < args.groups; group += kWarp) {
        const float own = scratch.groups[group];
        int before = 0;
#pragma unroll 1
        for (int i = 0; i < args.groups; ++i) {
            before += scratch.groups[i] > own || (scratch.groups[i] == own && i < group);
        }
        if (before < args.kept_groups) continue;
#pragma unroll 1
        for (int i = 0; i < size; ++i) scratch.keys[group * size + i] = key_of(-INFINITY);
    }
    __syncwarp();
}

// Chooses the best `count` experts of one row, best first. Writes their ids and, unless it is null,
// their weights, which are complete if `count` is top_k. For one warp.
__device__ __forceinline__ void choose_experts(
    const ExlRoute& args, const float* logits, int count, int32_t* ids, float* weights,
    const Scratch& scratch, int lane
) {
    score(args, logits, scratch, lane);
    if (args.kept_groups < args.groups) keep_best_groups(args, scratch, lane);
    Best own, second;
    const auto take = [&](uint32_t key, uint32_t at) {
        const bool is_best = key > own.key;
        const Best worse = is_best ? own : Best{key, at};
        second = is_best || key > second.key ? worse : second;
        own = is_best ? Best{key, at} : own;
    };
    const auto find = [&] {
        own = second = {};
#pragma unroll 1
        for (int i = 4 * lane; i < args.experts; i += Scratch::kStep) {
            const uint4 four = *reinterpret_cast<const uint4*>(scratch.keys + i);
            take(four.x, i), take(four.y, i + 1), take(four.z, i + 2), take(four.w, i + 3);
        }
    };
    find();
    float sum = 0.0f;
#pragma unroll 1
    for (int slot = 0; slot < count; ++slot) {
        const uint32_t key = warp_max(own.key);
        const uint32_t expert = warp_min(own.key == key ? own.place : 0xffffffffu);
        if (weights != nullptr) sum += scratch.scores[expert];
        if (lane == 0) ids[slot] = static_cast<int32_t>(expert);
        if (own.place == expert) {
            scratch.keys[expert] = 0;
            own = second;
            second = {};
            if (own.key == 0) find();
        }
    }
    __syncwarp();
    if (weights == nullptr) return;
    const float divisor = args.normalizes ? sum + args.eps : 1.0f;
#pragma unroll 1
    for (int slot = lane; slot < count; slot += kWarp) {
        weights[slot] = scratch.scores[ids[slot]] / divisor * args.factor;
    }
    __syncwarp();
}

// Writes the ids and weights of the shared experts of a row, its last slots. For one warp.
__device__ __forceinline__ void add_shared_experts(
    const ExlRoute& args, const float* logits, int32_t* ids, float* weights, int lane
) {
    if (lane >= args.shared) return;
    float weight = 1.0f;
    if (args.shared_weight != nullptr) {
        weight = 1.0f / (1.0f + expf(-__ldcg(logits + args.experts)));
    }
    ids[args.top_k + lane] = args.experts + lane;
    weights[args.top_k + lane] = weight;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

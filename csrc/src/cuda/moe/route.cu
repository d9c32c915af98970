// Router of a mixture of experts: logits of all experts, and the choice of experts for each row.
//
// Contract   exl/cuda/moe.h (exl_cuda_route).
// Mapping    One launch. A warp computes the logits of one expert for a chunk of up to 8 rows. The
//            thread block that finishes a chunk last chooses its experts, one warp per row: scores
//            are in shared memory, and every choice is a maximum over the warp.
// Accuracy   float32 sums, in an order that depends on d alone. Scores by expf.
// Overlap    The first weights are loaded before the wait for the previous kernel.
// Floor      The router's weights, 2 * experts * d bytes, and a launch.
#include <float.h>

#include "cuda/common/rows.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = EXL_CUDA_ROUTER_ROWS;
constexpr int kInFlight = 8;  // vectors of weights that a lane loads before the wait

// ---- choice ------------------------------------------------------------------------------------

struct Ranked {
    float value;
    int index;
};

// Whether a ranks before b: a higher value, or the lower index of equal values.
__device__ __forceinline__ bool is_better(const Ranked& a, const Ranked& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}
__device__ __forceinline__ Ranked warp_best(Ranked best) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        const Ranked other = {
            __shfl_xor_sync(0xffffffffu, best.value, step),
            __shfl_xor_sync(0xffffffffu, best.index, step)
        };
        if (is_better(other, best)) best = other;
    }
    return best;
}
// Ranks after every candidate.
__device__ __forceinline__ Ranked no_candidate() { return {-INFINITY, INT32_MAX}; }

// Best of `count` values that ranks after `last`.
__device__ __forceinline__ Ranked best_after(
    const float* values, int first, int step, int count, const Ranked& last
) {
    Ranked best = no_candidate();
    for (int i = first; i < count; i += step) {
        const Ranked one = {values[i], i};
        if (is_better(last, one) && is_better(one, best)) best = one;
    }
    return best;
}
// Ranks before every candidate.
__device__ __forceinline__ Ranked before_all() { return {INFINITY, -1}; }

// Score of a group: the sum of its best scores, best first.
__device__ __forceinline__ float group_score(const float* scores, int size, int count) {
    float sum = 0.0f;
    Ranked last = before_all();
    for (int i = 0; i < min(count, size); ++i) {
        last = best_after(scores, 0, 1, size, last);
        sum += last.value;
    }
    return sum;
}

// Sets the scores outside of the best groups to minus infinity. `groups` is scratch.
__device__ __forceinline__ void keep_best_groups(
    const ExlRoute& args, float* ranked, float* groups, int lane
) {
    const int size = args.experts / args.groups;
    for (int group = lane; group < args.groups; group += kWarp) {
        groups[group] = group_score(ranked + group * size, size, args.group_scores);
    }
    __syncwarp();
    // The last group that is kept, by rank.
    Ranked last = before_all();
    for (int i = 0; i < args.kept_groups; ++i) {
        last = warp_best(best_after(groups, lane, kWarp, args.groups, last));
    }
    for (int i = lane; i < args.experts; i += kWarp) {
        const int group = i / size;
        if (is_better(last, {groups[group], group})) ranked[i] = -INFINITY;
    }
    __syncwarp();
}

// Chooses the experts of one row. The warp's scratch: scores, ranked and groups, `experts` each.
__device__ __forceinline__ void choose(const ExlRoute& args, int row, float* scratch, int lane) {
    const int experts = args.experts;
    float* const scores = scratch;
    float* const ranked = scores + experts;
    float* const groups = ranked + experts;
    const float* logits = args.logits + static_cast<int64_t>(row) * experts;
    float largest = -INFINITY;
    for (int i = lane; i < experts; i += kWarp) {
        const float logit = __ldcg(logits + i);
        scores[i] = logit;
        largest = fmaxf(largest, logit);
    }
    if (args.scores == EXL_SCORES_SOFTMAX) {
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int i = lane; i < experts; i += kWarp) {
            scores[i] = expf(scores[i] - largest);
            sum += scores[i];
        }
        sum = warp_sum(sum);
        for (int i = lane; i < experts; i += kWarp) scores[i] /= sum;
    } else {
        for (int i = lane; i < experts; i += kWarp) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    }
    for (int i = lane; i < experts; i += kWarp) {
        const float rank = scores[i] + (args.bias == nullptr ? 0.0f : args.bias[i]);
        ranked[i] = rank == rank ? rank : -INFINITY;
    }
    __syncwarp();
    if (args.kept_groups < args.groups) keep_best_groups(args, ranked, groups, lane);

    const int64_t first = static_cast<int64_t>(row) * args.top_k;
    Ranked last = before_all();
    float sum = 0.0f;
    for (int slot = 0; slot < args.top_k; ++slot) {
        last = warp_best(best_after(ranked, lane, kWarp, experts, last));
        const float score = scores[last.index];
        sum += score;
        if (lane == 0) args.ids[first + slot] = last.index;
        if (lane == slot % kWarp) args.weights[first + slot] = score;
    }
    const float divisor = sum + args.eps;
    for (int slot = lane; slot < args.top_k; slot += kWarp) {
        float weight = args.weights[first + slot];  // this lane has written it
        if (args.normalizes) weight /= divisor;
        args.weights[first + slot] = weight * args.factor;
    }
    __syncwarp();
}

// ---- kernels -----------------------------------------------------------------------------------

extern __shared__ float scratch[];  // 3 * experts for each warp

__global__ void __launch_bounds__(kThreads) choose_kernel(const ExlRoute args) {
    let_next_begin();
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, row = blockIdx.x * kWarps + warp;
    if (row >= args.m) return;
    choose(args, row, scratch + warp * 3 * args.experts, threadIdx.x % kWarp);
}

template <class X>
__global__ void __launch_bounds__(kThreads) router_kernel(
    const ExlRoute args, const bool is_aligned
) {
    __shared__ bool is_last;
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int expert = blockIdx.x * kWarps + warp;
    const int first_row = blockIdx.y * kRows, rows = min(kRows, args.m - first_row);
    const bool has_expert = expert < args.experts;
    constexpr int kStep = kWarp * kVector;
    const int d = has_expert ? args.d : 0, own = kVector * lane;
    const __half* weight = static_cast<const __half*>(args.weight);
    if (has_expert) weight += static_cast<int64_t>(expert) * args.d;
    Vector<__half> ahead[kInFlight];
    const auto load_weights = [&](int start) {
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStep;
            if (i < d) ahead[n] = load_vector(weight + i, d - i, is_aligned);
        }
    };
    load_weights(own);
    const float logit_bias =
        has_expert && args.logit_bias != nullptr ? args.logit_bias[expert] : 0.0f;
    wait_for_inputs();
    const X* const x = static_cast<const X*>(args.x) + first_row * args.x_stride;
    float sums[kRows] = {};
    for (int start = own; start < d; start += kInFlight * kStep) {
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStep;
            if (i >= d) break;
            float weights[kVector];
            ahead[n].to_floats(weights);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (r >= rows) break;
                float values[kVector];
                load_floats(x + r * args.x_stride + i, d - i, is_aligned, values);
#pragma unroll
                for (int j = 0; j < kVector; ++j) sums[r] = fmaf(values[j], weights[j], sums[r]);
            }
        }
        load_weights(start + kInFlight * kStep);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        const float logit = warp_sum(sums[r]) + logit_bias;
        const int64_t at = static_cast<int64_t>(first_row + r) * args.experts + expert;
        if (lane == 0 && has_expert) args.logits[at] = logit;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        // Wraps around to zero for the next launch.
        is_last = atomicInc(args.counters + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    for (int r = warp; r < rows; r += kWarps) {
        choose(args, first_row + r, scratch + warp * 3 * args.experts, lane);
    }
}

}  // namespace

}  // namespace exl::cuda

extern "C" int exl_cuda_route(const ExlRoute* args, void* stream) {
    using namespace exl::cuda;
    const ExlRoute& a = *args;
    const bool fits = a.m >= 0 && a.experts >= 1 && a.experts <= EXL_CUDA_MAX_EXPERTS &&
                      a.top_k >= 1 && a.top_k <= a.experts && a.groups >= 1 &&
                      a.experts % a.groups == 0 && a.kept_groups >= 1 &&
                      a.kept_groups <= a.groups && a.group_scores >= 1 &&
                      (a.x == nullptr || (a.d >= 1 && (a.x_dtype == kF32 || a.x_dtype == kF16))) &&
                      a.m <= 65535 * kRows;
    if (!fits) return cudaErrorInvalidValue;
    if (a.m == 0) return cudaSuccess;
    const size_t scratch_bytes = sizeof(float) * kWarps * 3 * a.experts;
    if (a.x == nullptr) {
        const dim3 grid(static_cast<unsigned>(ceil_div(a.m, kWarps)));
        return launch(choose_kernel, grid, dim3(kThreads), scratch_bytes, stream, a);
    }
    const int64_t x_bytes = a.x_dtype == kF32 ? 4 : 2;
    const bool is_aligned =
        rows_are_aligned(a.x, a.d, a.x_stride, x_bytes) && rows_are_aligned(a.weight, a.d, a.d, 2);
    const dim3 grid(
        static_cast<unsigned>(ceil_div(a.experts, kWarps)),
        static_cast<unsigned>(ceil_div(a.m, kRows))
    );
    return launch(
        a.x_dtype == kF32 ? router_kernel<float> : router_kernel<__half>, grid, dim3(kThreads),
        scratch_bytes, stream, a, is_aligned
    );
}

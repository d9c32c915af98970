// Router of a mixture of experts: logits of all experts, and the choice of experts for each row.
//
// Contract   exl/cuda/moe.h (exl_cuda_route).
// Mapping    One launch, with the norm of the rows before it if there is one: the norm's factor of a
//            row multiplies its logits, and every warp sums the squares beside its products. A warp
//            computes the logits of one expert for a chunk of 1 to 8 rows. The thread block that
//            finishes a chunk last chooses the experts of its rows, one row after another: every
//            thread counts the experts that rank before its own, so that the choice needs no
//            rounds. Of more experts than threads, only those count that rank at least as high as
//            the top_k-th of the threads' best ones.
// Accuracy   float32 sums, in an order that depends on d and the number of experts alone. Scores by
//            expf.
// Overlap    The first weights are loaded before the wait for the previous kernel.
// Floor      The router's weights, 2 * experts * d bytes, and a launch. Latency dominates: one read
//            of all inputs, one atomic, and about ten barriers per row of a chunk.
#include <float.h>

#include "cuda/common/rows.cuh"
#include "exl/cuda/moe.h"

namespace exl::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxRows = 8;   // of a chunk
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

// Largest x of the block, returned to every thread. Contains a barrier, as `block_sum`.
__device__ __forceinline__ float block_max(float x, float* partial) {
    const float largest = warp_max(x);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = largest;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    return warp_max(lane < kWarps ? partial[lane] : -INFINITY);
}

// Reads the logits of a row. Writes its scores, and the scores that choose.
__device__ __forceinline__ void score(const ExlRoute& args, const float* logits, Scratch scratch) {
    __shared__ float partial[2][kWarps];
    const int experts = args.experts;
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < experts; i += kThreads) {
        const float logit = __ldcg(logits + i);
        scratch.scores[i] = logit;
        largest = fmaxf(largest, logit);
    }
    float divisor = 1.0f;
    if (args.scores == EXL_SCORES_SOFTMAX) {
        largest = block_max(largest, partial[0]);
        float sum = 0.0f;
        for (int i = threadIdx.x; i < experts; i += kThreads) {
            scratch.scores[i] = expf(scratch.scores[i] - largest);
            sum += scratch.scores[i];
        }
        divisor = block_sum<kWarps>(sum, partial[1]);
    }
    for (int i = threadIdx.x; i < Scratch::padded(experts); i += kThreads) {
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
    __syncthreads();
}

// Sets the scores outside of the best groups to minus infinity.
__device__ __forceinline__ void keep_best_groups(const ExlRoute& args, Scratch scratch) {
    const int size = args.experts / args.groups;
    for (int group = threadIdx.x; group < args.groups; group += kThreads) {
        scratch.values[group] = group_score(scratch.ranked + group * size, size, args.group_scores);
    }
    __syncthreads();
    for (int group = threadIdx.x; group < args.groups; group += kThreads) {
        const Ranked own = {scratch.values[group], group};
        int before = 0;
        for (int i = 0; i < args.groups; ++i) before += is_better({scratch.values[i], i}, own);
        if (before < args.kept_groups) continue;
        for (int i = 0; i < size; ++i) scratch.ranked[group * size + i] = -INFINITY;
    }
    __syncthreads();
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
    for (int i = threadIdx.x; i < args.experts; i += kThreads) {
        const Ranked one = {scratch.ranked[i], i};
        if (is_better(one, own)) own = one;
    }
    scratch.values[threadIdx.x] = own.value;
    scratch.indices[threadIdx.x] = own.index;
    if (threadIdx.x == 0) bound = no_candidate(), count = 0;
    __syncthreads();
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < kThreads; ++i) {
        before += is_better({scratch.values[i], scratch.indices[i]}, own);
    }
    if (before == args.top_k - 1) bound = own;
    __syncthreads();
    for (int i = threadIdx.x; i < args.experts; i += kThreads) {
        const Ranked one = {scratch.ranked[i], i};
        if (is_better(bound, one)) continue;
        const int at = atomicAdd(&count, 1);
        scratch.values[at] = one.value;
        scratch.indices[at] = i;
    }
    __syncthreads();
    return count;
}

// Writes the top_k experts and their scores, best first.
__device__ __forceinline__ void choose_best(const ExlRoute& args, int32_t* ids, Scratch scratch) {
    const auto choose = [&](int rank, int expert) {
        if (rank >= args.top_k) return;
        ids[rank] = expert;
        scratch.chosen[rank] = scratch.scores[expert];
    };
    if (args.experts <= kThreads) {
        const int expert = threadIdx.x;
        if (expert < args.experts) {
            const Ranked own = {scratch.ranked[expert], expert};
            choose(rank_of(own, scratch.ranked, Scratch::padded(args.experts)), expert);
        }
    } else {
        const int count = collect(args, scratch);
        for (int n = threadIdx.x; n < count; n += kThreads) {
            const Ranked own = {scratch.values[n], scratch.indices[n]};
            int before = 0;
            for (int i = 0; i < count; ++i) {
                before += is_better({scratch.values[i], scratch.indices[i]}, own);
            }
            choose(before, own.index);
        }
    }
    __syncthreads();
}

// Chooses the experts of one row, with all threads of the block.
__device__ __forceinline__ void choose(const ExlRoute& args, int row, Scratch scratch) {
    score(args, args.logits + static_cast<int64_t>(row) * args.experts, scratch);
    if (args.kept_groups < args.groups) keep_best_groups(args, scratch);
    const int64_t first = static_cast<int64_t>(row) * args.top_k;
    choose_best(args, args.ids + first, scratch);
    float sum = 0.0f;
    for (int slot = 0; slot < args.top_k; ++slot) sum += scratch.chosen[slot];
    const float divisor = sum + args.eps;
    for (int slot = threadIdx.x; slot < args.top_k; slot += kThreads) {
        float weight = scratch.chosen[slot];
        if (args.normalizes) weight /= divisor;
        args.weights[first + slot] = weight * args.factor;
    }
    __syncthreads();
}

// ---- kernels -----------------------------------------------------------------------------------

extern __shared__ __align__(16) float shared[];

__global__ void __launch_bounds__(kThreads) choose_kernel(const ExlRoute args) {
    let_next_begin();
    wait_for_inputs();
    choose(args, blockIdx.x, Scratch(shared, args.experts));
}

// Weights of one expert: vectors of a lane, `kStep` numbers apart.
constexpr int kStep = kWarp * kVector;

// Sums of a chunk of rows for one expert, over the vectors of one lane: products with the weights
// (and with the norm's), and squares.
template <class X, int kRows, bool kIsAligned>
struct LogitSums {
    // Vectors of inputs that are in flight at a time: 64 registers of float32.
    static constexpr int kVectors = 8 / kRows;
    float sums[kRows] = {};
    float squares[kRows] = {};

    // Adds kInFlight vectors from feature `start` on. Past the last feature, inputs are zero.
    __device__ __forceinline__ void add(
        const X* const (&rows)[kRows], const Vector<__half> (&weights)[kInFlight],
        const float* norm, int start, int d
    ) {
#pragma unroll
        for (int first = 0; first < kInFlight; first += kVectors) {
            Vector<X> x[kVectors][kRows] = {};
            Vector<float> gains[kVectors] = {};
#pragma unroll
            for (int n = 0; n < kVectors; ++n) {
                const int i = start + (first + n) * kStep;
                if (norm != nullptr && i < d) gains[n] = load_vector(norm + i, d - i, kIsAligned);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (i < d) x[n][r] = load_vector(rows[r] + i, d - i, kIsAligned);
                }
            }
#pragma unroll
            for (int n = 0; n < kVectors; ++n) {
                float factors[kVector], values[kVector];
                weights[first + n].to_floats(factors);
                if (norm != nullptr) {
                    gains[n].to_floats(values);
#pragma unroll
                    for (int j = 0; j < kVector; ++j) factors[j] *= values[j];
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    x[n][r].to_floats(values);
#pragma unroll
                    for (int j = 0; j < kVector; ++j) {
                        sums[r] = fmaf(values[j], factors[j], sums[r]);
                        if (norm != nullptr) squares[r] = fmaf(values[j], values[j], squares[r]);
                    }
                }
            }
        }
    }
};

// Writes the thread block's share of the normed rows of its chunk, with one warp.
template <class X, int kRows>
__device__ __forceinline__ void write_normed(
    const ExlRoute& args, const X* const (&rows)[kRows], const float (&factors)[kRows],
    int first_row, int count, int lane
) {
    const int share = (args.d + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
    const int end = min(args.d, first + share);
    for (int i = first + lane; i < end; i += kWarp) {
        const float gain = args.norm[i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (r >= count) continue;
            args.normed[static_cast<int64_t>(first_row + r) * args.d + i] =
                to_float(rows[r][i]) * (factors[r] * gain);
        }
    }
}

template <class X, int kRows, bool kIsAligned>
__global__ void __launch_bounds__(kThreads, 2) router_kernel(const ExlRoute args) {
    __shared__ bool is_last;
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int expert = blockIdx.x * kWarps + warp;
    const int first_row = blockIdx.y * kRows, count = min(kRows, args.m - first_row);
    const bool has_expert = expert < args.experts;
    const int d = has_expert ? args.d : 0, own = kVector * lane;
    const __half* weight = static_cast<const __half*>(args.weight);
    if (has_expert) weight += static_cast<int64_t>(expert) * args.d;
    Vector<__half> ahead[kInFlight];
    const auto load_weights = [&](int start) {
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStep;
            ahead[n] = {};
            if (i < d) ahead[n] = load_vector(weight + i, d - i, kIsAligned);
        }
    };
    load_weights(own);
    const float logit_bias =
        has_expert && args.logit_bias != nullptr ? args.logit_bias[expert] : 0.0f;
    wait_for_inputs();
    // Rows past the last one read the last one; their sums are dropped.
    const X* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = first_row + min(r, count - 1);
        rows[r] = static_cast<const X*>(args.x) + row * args.x_stride;
    }
    LogitSums<X, kRows, kIsAligned> logits;
    for (int start = own; start < d; start += kInFlight * kStep) {
        logits.add(rows, ahead, args.norm, start, d);
        load_weights(start + kInFlight * kStep);
    }
    float factors[kRows];  // of the norm
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        factors[r] = 1.0f;
        if (args.norm == nullptr) continue;
        factors[r] = rsqrtf(warp_sum(logits.squares[r]) / args.d + args.norm_eps);
    }
    if (args.norm != nullptr && warp == 0) {  // this warp has an expert
        write_normed<X, kRows>(args, rows, factors, first_row, count, lane);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float logit = warp_sum(logits.sums[r]) * factors[r] + logit_bias;
        if (lane != 0 || !has_expert || r >= count) continue;
        args.logits[static_cast<int64_t>(first_row + r) * args.experts + expert] = logit;
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
    for (int r = 0; r < count; ++r) choose(args, first_row + r, Scratch(shared, args.experts));
}

// ---- host --------------------------------------------------------------------------------------

// Rows of a chunk. Few rows are divided among many thread blocks; with more rows, the weights are
// read less often. No result depends on it.
int chunk_rows(int m, bool is_aligned) {
    if (m == 1 || !is_aligned) return 1;
    return m <= 8 ? 2 : m <= 64 ? 4 : kMaxRows;
}

template <class X>
auto kernel_for(int rows, bool is_aligned) {
    if (!is_aligned) return router_kernel<X, 1, false>;
    switch (rows) {
        case 1: return router_kernel<X, 1, true>;
        case 2: return router_kernel<X, 2, true>;
        case 4: return router_kernel<X, 4, true>;
        default: return router_kernel<X, kMaxRows, true>;
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
                      (a.norm == nullptr || (a.x != nullptr && a.normed != nullptr));
    if (!fits) return cudaErrorInvalidValue;
    if (a.m == 0) return cudaSuccess;
    const size_t scratch_bytes = Scratch::bytes(a.experts);
    if (a.x == nullptr) {
        const dim3 grid(static_cast<unsigned>(a.m));
        return launch(choose_kernel, grid, dim3(kThreads), scratch_bytes, stream, a);
    }
    const int64_t x_bytes = a.x_dtype == kF32 ? 4 : 2;
    const bool is_aligned = rows_are_aligned(a.x, a.d, a.x_stride, x_bytes) &&
                            rows_are_aligned(a.weight, a.d, a.d, 2) &&
                            rows_are_aligned(a.norm, a.d, 0, 4);
    const int rows = chunk_rows(a.m, is_aligned);
    const int64_t chunks = ceil_div(a.m, rows);
    if (chunks > 65535) return cudaErrorInvalidValue;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(a.experts, kWarps)), static_cast<unsigned>(chunks)
    );
    const auto kernel = a.x_dtype == kF32 ? kernel_for<float>(rows, is_aligned)
                                          : kernel_for<__half>(rows, is_aligned);
    return launch(kernel, grid, dim3(kThreads), scratch_bytes, stream, a);
}

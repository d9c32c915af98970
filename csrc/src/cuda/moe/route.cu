// Router of a mixture of experts: logits of all experts, and the choice of experts for each row.
//
// Contract   exl/cuda/moe.h (exl_cuda_route).
// Mapping    One launch, with the norm of the rows before it if there is one: the norm's factor of a
//            row multiplies its logits, and every warp sums the squares beside its products. A warp
//            computes the logits of one expert for a chunk of 1 to 8 rows. The thread block that
//            finishes a chunk last chooses the experts of its rows, with a warp per row
//            (choice.cuh). Without ids there is no choice: the next kernel makes it.
// Accuracy   float32 sums, in an order that depends on d and the number of experts alone.
// Overlap    The first weights, and with one row those of the norm, are loaded before the wait for
//            the previous kernel. The remaining ones are prefetched into the L2 cache.
// Floor      The router's weights, 2 * experts * d bytes, and a launch. Latency dominates: one read
//            of all inputs, and with a choice one atomic and the choice.
#include "cuda/common/rows.cuh"
#include "cuda/moe/choice.cuh"

namespace exl::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxRows = 8;   // of a chunk
constexpr int kInFlight = 8;  // vectors of weights that a lane loads before the wait

// ---- kernels -----------------------------------------------------------------------------------

extern __shared__ __align__(16) uint8_t shared[];

// Chooses the experts of one row, with one warp.
__device__ __forceinline__ void choose(const ExlRoute& args, int64_t row) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const Scratch scratch(shared + warp * Scratch::bytes(args.experts), args.experts);
    const int64_t first = row * slots_of(args);
    const float* const logits = logits_at(args, row);
    int32_t* const ids = args.ids + first;
    float* const weights = args.weights + first;
    choose_experts(args, logits, args.top_k, ids, weights, scratch, lane);
    add_shared_experts(args, logits, ids, weights, lane);
}

__global__ void __launch_bounds__(kThreads) choose_kernel(const ExlRoute args) {
    let_next_begin();
    wait_for_inputs();
    const int row = blockIdx.x * kWarps + threadIdx.x / kWarp;
    if (row < args.m) choose(args, row);
}

// Weights of one expert: vectors of a lane, `kStep` numbers apart.
constexpr int kStep = kWarp * kVector;

// Sums of a chunk of rows for one expert, over the vectors of one lane: products with the weights
// (and with the norm's), and squares.
template <class X, int kRows, bool kIsAligned>
struct LogitSums {
    // Vectors of inputs that are in flight at a time: 64 registers of float32.
    static constexpr int kVectors = kInFlight / kRows;
    static constexpr bool kLoadsGainsAhead = kRows == 1;
    float sums[kRows] = {};
    float squares[kRows] = {};

    // Adds kInFlight vectors from feature `start` on. Past the last feature, inputs are zero.
    // `gains` are the norm's weights where they are loaded ahead.
    __device__ __forceinline__ void add(
        const X* const (&rows)[kRows], const Vector<__half> (&weights)[kInFlight],
        Vector<float> (&gains)[kVectors], const float* norm, int start, int d
    ) {
#pragma unroll
        for (int first = 0; first < kInFlight; first += kVectors) {
            Vector<X> x[kVectors][kRows] = {};
#pragma unroll
            for (int n = 0; n < kVectors; ++n) {
                const int i = start + (first + n) * kStep;
                if (!kLoadsGainsAhead && norm != nullptr) {
                    gains[n] = {};
                    if (i < d) gains[n] = load_vector(norm + i, d - i, kIsAligned);
                }
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

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

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
    const bool is_scored = expert < args.experts;  // otherwise the score of the shared experts
    const bool has_expert = expert < logits_of(args);
    const int d = has_expert ? args.d : 0, own = kVector * lane;
    const __half* weight = static_cast<const __half*>(args.weight);
    if (is_scored) {
        weight += static_cast<int64_t>(expert) * args.d;
    } else {
        weight = static_cast<const __half*>(args.shared_weight);
    }
    using Logits = LogitSums<X, kRows, kIsAligned>;
    Vector<__half> ahead[kInFlight];
    Vector<float> gains[Logits::kVectors];
    const auto load_weights = [&](int start) {
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int i = start + n * kStep;
            ahead[n] = {};
            if (i < d) ahead[n] = load_vector(weight + i, d - i, kIsAligned);
            if constexpr (Logits::kLoadsGainsAhead) {
                gains[n] = {};
                if (args.norm != nullptr && i < d) {
                    gains[n] = load_vector(args.norm + i, d - i, kIsAligned);
                }
            }
        }
    };
    load_weights(own);
    for (int i = own + kInFlight * kStep; i < d; i += kStep) prefetch_to_l2(weight + i);
    const float logit_bias =
        is_scored && args.logit_bias != nullptr ? args.logit_bias[expert] : 0.0f;
    wait_for_inputs();
    // Rows past the last one read the last one; their sums are dropped.
    const X* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = first_row + min(r, count - 1);
        rows[r] = static_cast<const X*>(args.x) + row * args.x_stride;
    }
    Logits logits;
    for (int start = own; start < d; start += kInFlight * kStep) {
        logits.add(rows, ahead, gains, args.norm, start, d);
        load_weights(start + kInFlight * kStep);
    }
    float factors[kRows];  // of the norm
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        factors[r] = 1.0f;
        if (args.norm == nullptr) continue;
        factors[r] = rsqrtf(warp_sum(logits.squares[r]) / args.d + args.norm_eps);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float logit = warp_sum(logits.sums[r]) * factors[r] + logit_bias;
        if (lane != 0 || !has_expert || r >= count) continue;
        logits_at(args, first_row + r)[expert] = logit;
    }
    if (args.normed != nullptr && warp == 0) {  // this warp has an expert
        write_normed<X, kRows>(args, rows, factors, first_row, count, lane);
    }
    if (args.ids == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        // Wraps around to zero for the next launch.
        is_last = atomicInc(args.counters + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
#pragma unroll 1
    for (int r = warp; r < count; r += kWarps) choose(args, first_row + r);
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
    const bool fits =
        a.m >= 0 && a.experts >= 1 && a.experts <= EXL_CUDA_MAX_EXPERTS && a.top_k >= 1 &&
        a.top_k <= a.experts && a.groups >= 1 && a.experts % a.groups == 0 && a.kept_groups >= 1 &&
        a.kept_groups <= a.groups && a.group_scores >= 1 &&
        (a.x == nullptr || (a.d >= 1 && (a.x_dtype == kF32 || a.x_dtype == kF16))) &&
        (a.norm == nullptr || a.x != nullptr) && (a.normed == nullptr || a.norm != nullptr) &&
        (a.logits_stride == 0 || a.logits_stride >= logits_of(a)) &&
        (a.ids != nullptr ? a.weights != nullptr : a.x != nullptr) && a.shared >= 0 &&
        a.shared <= kWarp && (a.shared_weight == nullptr || a.shared > 0);
    if (!fits) return cudaErrorInvalidValue;
    if (a.m == 0) return cudaSuccess;
    const size_t scratch_bytes = a.ids == nullptr ? 0 : kWarps * Scratch::bytes(a.experts);
    if (a.x == nullptr) {
        const dim3 grid(static_cast<unsigned>(ceil_div(a.m, kWarps)));
        return launch(choose_kernel, grid, dim3(kThreads), scratch_bytes, stream, a);
    }
    const int64_t x_bytes = a.x_dtype == kF32 ? 4 : 2;
    const bool is_aligned = rows_are_aligned(a.x, a.d, a.x_stride, x_bytes) &&
                            rows_are_aligned(a.weight, a.d, a.d, 2) &&
                            rows_are_aligned(a.shared_weight, a.d, 0, 2) &&
                            rows_are_aligned(a.norm, a.d, 0, 4);
    const int rows = chunk_rows(a.m, is_aligned);
    const int64_t chunks = ceil_div(a.m, rows);
    if (chunks > 65535) return cudaErrorInvalidValue;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(logits_of(a), kWarps)), static_cast<unsigned>(chunks)
    );
    const auto kernel = a.x_dtype == kF32 ? kernel_for<float>(rows, is_aligned)
                                          : kernel_for<__half>(rows, is_aligned);
    if (cudaError_t error = prefer_shared_memory(kernel); error != cudaSuccess) return error;
    return launch(kernel, grid, dim3(kThreads), scratch_bytes, stream, a);
}

// states [n, 256] = the rings nearest to targets [n, 256], by the Viterbi algorithm.
//
// Contract   exl/cuda/rings.h.
// Work       2 * reach + 256 positions of 65536 branches: a conversion, a difference, a square added
//            to the cost of the node before, a minimum.
// Mapping    A thread block searches one ring at a time. Costs of the nodes before a position are in
//            shared memory, and those after it replace them. A thread has 64 branches of a position,
//            which lead to up to 32 nodes. For rates above 4, successive lanes share the branches of
//            their nodes. Nodes with the same bits but for the `in` lowest come from the same 2^out
//            nodes before them, so that a cost that was read serves for several branches.
// Values     Float16, in the order in which threads read them: 128 KiB. They stay in the L1 cache
//            where shared memory leaves enough of it, which is from rate 2 on.
// Choices    Costs of the nodes before each position are kept in device memory, choices are not. A
//            warp goes back along the path and searches the best state of one node at a time.
// Accuracy   float32, squares are added with one rounding.
// Floor      Instructions: 4 per branch. One ring takes 134 million of them.
#include <algorithm>

#include "cuda/common/common.cuh"
#include "exl/cuda/rings.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kRing = 256, kStateBits = 16, kStates = 1 << kStateBits;
constexpr int kThreads = 1024;
constexpr int kBranches = kStates / kThreads;  // of a thread and position
constexpr int kLoad = 8;                       // values per load
constexpr int kTableHalves = kStates;
constexpr int64_t kMostKept = 9ll << 28;  // bytes: as many as 128 rings at rate 2 need
constexpr int kMaxShared = 228 << 10;     // of a multiprocessor
constexpr float kInfinity = __builtin_huge_valf();

// Division of the branches of a position with `in` new bits, before one with `out` new bits. Node n
// after it comes from the states c << (16 - out) | n, for 2^out choices c.
template <int kIn, int kOut>
struct Branches {
    static constexpr int kInputs = kOut <= 4 ? 1 << kOut : 16;  // choices per thread and node
    static constexpr int kParts = (1 << kOut) / kInputs;        // lanes that share their nodes
    static constexpr int kNodes = kBranches / kInputs;          // per thread
    // Successive nodes that come from the same ones.
    static constexpr int kRun = kNodes < 1 << kIn ? kNodes : 1 << kIn;
    static constexpr int kRuns = kNodes / kRun;
    static constexpr int kRunsOfGroup = (1 << kIn) / kRun;
    static constexpr int kGroups = kStates >> (kIn + kOut);
    // Groups between two runs of a thread.
    static constexpr int kStep = kThreads / kParts / kRunsOfGroup;
    static_assert(kStep * kRuns == kGroups && kRun <= kLoad && kRun >= 2 && kParts <= kWarp);

    int part, group, first;  // first: of the nodes of the group

    __device__ __forceinline__ explicit Branches(int thread)
        : part(thread % kParts),
          group(thread / kParts / kRunsOfGroup),
          first(thread / kParts % kRunsOfGroup * kRun) {}
    __device__ __forceinline__ int node(int run) const {
        return ((group + run * kStep) << kIn) + first;
    }
    __device__ __forceinline__ int choice(int input) const { return input * kParts + part; }
    // Place of the cost before the branches of an input.
    __device__ __forceinline__ int before(int run, int input) const {
        return choice(input) * kGroups + group + run * kStep;
    }
    // State of branch `i` of the thread.
    __device__ __forceinline__ int state(int i) const {
        const int run = i / (kInputs * kRun), input = i / kRun % kInputs;
        return choice(input) << (kStateBits - kOut) | (node(run) + i % kRun);
    }
};

// table: [kBranches / kLoad][kThreads][kLoad], values of the branches of every thread.
template <int kIn, int kOut>
__global__ void __launch_bounds__(kThreads) table_kernel(const float* values, __half* table) {
    let_next_begin();
    wait_for_inputs();
    const Branches<kIn, kOut> branches(threadIdx.x);
    const int first = blockIdx.x * kLoad;
    __half* to = table + (blockIdx.x * kThreads + threadIdx.x) * kLoad;
#pragma unroll
    for (int i = 0; i < kLoad; ++i) to[i] = __float2half_rn(values[branches.state(first + i)]);
}

// Costs of the nodes after a position replace those before it. They are kept as well, unless `kept`
// is null.
template <int kIn, int kOut>
__device__ __forceinline__ void step(const uint4* table, float target, float* costs, float* kept) {
    using B = Branches<kIn, kOut>;
    const B branches(threadIdx.x);
    float best[B::kNodes];
#pragma unroll
    for (float& one : best) one = kInfinity;
    float cost = 0.0f;
#pragma unroll
    for (int load = 0; load < kBranches / kLoad; ++load) {
        const uint4 raw = __ldg(table + load * kThreads + threadIdx.x);
        const __half* values = reinterpret_cast<const __half*>(&raw);
#pragma unroll
        for (int j = 0; j < kLoad; ++j) {
            const int i = load * kLoad + j, run = i / (B::kInputs * B::kRun);
            if (i % B::kRun == 0) cost = costs[branches.before(run, i / B::kRun % B::kInputs)];
            const float error = __half2float(values[j]) - target;
            float& of_node = best[run * B::kRun + i % B::kRun];
            of_node = fminf(fmaf(error, error, cost), of_node);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < B::kParts; lanes *= 2) {
#pragma unroll
        for (float& one : best) one = fminf(one, __shfl_xor_sync(0xffffffffu, one, lanes));
    }
    __syncthreads();
    if (branches.part == 0) {
        constexpr int kStore = B::kRun < 4 ? B::kRun : 4;
#pragma unroll
        for (int i = 0; i < B::kNodes; i += kStore) {
            const int node = branches.node(i / B::kRun) + i % B::kRun;
            if constexpr (kStore == 2) {
                const float2 two = make_float2(best[i], best[i + 1]);
                *reinterpret_cast<float2*>(costs + node) = two;
                if (kept != nullptr) __stcg(reinterpret_cast<float2*>(kept + node), two);
            } else {
                const float4 four = make_float4(best[i], best[i + 1], best[i + 2], best[i + 3]);
                *reinterpret_cast<float4*>(costs + node) = four;
                if (kept != nullptr) __stcg(reinterpret_cast<float4*>(kept + node), four);
            }
        }
    }
    __syncthreads();
}

struct SearchArgs {
    const float* targets;
    int64_t target_stride;
    const float* values;
    const uint4* even_table;  // of branches of even positions
    const uint4* odd_table;
    float* kept;  // [blocks][256][kStates >> even_bits]
    int32_t* states;
    int count, reach;
};

// Lowest number of all lanes.
__device__ __forceinline__ uint32_t lowest_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(0xffffffffu, x);
#else
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        x = min(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    }
    return x;
#endif
}

// Search of one ring by a thread block.
template <int kEven, int kOdd>
struct Search {
    static constexpr int kMostNodes = kStates >> kEven;

    const SearchArgs& args;
    float* costs;         // shared, [kMostNodes]
    const float* target;  // shared, [kRing]
    float* kept;          // [kRing][kMostNodes]

    __device__ __forceinline__ static int bits(int position) {
        return position % 2 == 0 ? kEven : kOdd;
    }

    // Costs before the first position: 0 for the node `start`, or for all nodes if it is negative.
    __device__ __forceinline__ void begin(int start, bool is_kept) const {
        for (int node = threadIdx.x; node < kMostNodes; node += kThreads) {
            const float cost = start < 0 || node == start ? 0.0f : kInfinity;
            costs[node] = cost;
            if (is_kept) __stcg(kept + node, cost);
        }
        __syncthreads();
    }

    // Walks `steps` positions from `first` on. Costs before the steps from kept_from on are kept.
    __device__ __forceinline__ void walk(int first, int steps, int kept_from) const {
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            const int position = (first + i) % kRing, after = i + 1 - kept_from;
            float* to = after >= 0 && i + 1 < steps ? kept + after * kMostNodes : nullptr;
            if (kEven == kOdd || position % 2 == 0) {
                step<kEven, kOdd>(args.even_table, target[position], costs, to);
            } else {
                step<kOdd, kEven>(args.odd_table, target[position], costs, to);
            }
        }
    }

    // The node with the least cost before `position`. `lowest`: shared, all ones.
    __device__ __forceinline__ int cheapest(int position, unsigned long long* lowest) const {
        unsigned long long key = ~0ull;
        for (int node = threadIdx.x; node < kStates >> bits(position); node += kThreads) {
            // Costs are not negative: their bits are in their order.
            const unsigned long long cost = __float_as_uint(costs[node]);
            key = min(key, cost << 32 | static_cast<unsigned>(node));
        }
#pragma unroll
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
            key = min(key, __shfl_xor_sync(0xffffffffu, key, lanes));
        }
        if (threadIdx.x % kWarp == 0) atomicMin(lowest, key);
        __syncthreads();
        return static_cast<int>(static_cast<uint32_t>(*lowest));
    }

    // Goes back `steps` positions from `last` on along the path that ends at `node`, in one warp.
    // Writes their states unless `states` is null, and returns the node before them.
    __device__ __forceinline__ int trace_back(
        int last, int steps, int node, int32_t* states
    ) const {
        const int lane = threadIdx.x % kWarp;
#pragma unroll 1
        for (int i = steps - 1; i >= 0; --i, --last) {
            const int in = bits(last), out = bits(last + 1);
            const float* before = kept + i * kMostNodes;
            uint32_t least = ~0u, state = ~0u;
            for (int choice = lane; choice < 1 << out; choice += kWarp) {
                const int tried = choice << (kStateBits - out) | node;
                const float error = args.values[tried] - target[last % kRing];
                const float cost = fmaf(error, error, __ldcg(before + (tried >> in)));
                if (__float_as_uint(cost) < least) {
                    least = __float_as_uint(cost);
                    state = tried;
                }
            }
            if (least != lowest_of_warp(least)) state = ~0u;
            state = lowest_of_warp(state);
            if (states != nullptr && lane == 0) states[last % kRing] = state;
            node = static_cast<int>(state >> in);
        }
        return node;
    }
};

template <int kEven, int kOdd>
__global__ void __launch_bounds__(kThreads, 1) search_kernel(
    const __grid_constant__ SearchArgs args
) {
    using Ring = Search<kEven, kOdd>;
    extern __shared__ __align__(128) float costs[];
    __shared__ float target[kRing];
    __shared__ unsigned long long lowest;
    __shared__ int start;
    let_next_begin();
    wait_for_inputs();
    float* kept = args.kept + static_cast<int64_t>(blockIdx.x) * kRing * Ring::kMostNodes;
    const Ring ring{args, costs, target, kept};
    for (int number = blockIdx.x; number < args.count; number += gridDim.x) {
        if (threadIdx.x < kRing) {
            target[threadIdx.x] = args.targets[number * args.target_stride + threadIdx.x];
        }
        if (threadIdx.x == 0) lowest = ~0ull;
        // The first pass finds the node before position 0, the second one the ring through it.
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            const int kept_from = pass == 0 ? args.reach : 0;
            const int first = pass == 0 ? kRing - args.reach : 0;
            const int steps = pass == 0 ? 2 * args.reach : kRing;
            ring.begin(pass == 0 ? -1 : start, pass != 0);
            ring.walk(first, steps, kept_from);
            const int node = pass == 0 ? ring.cheapest(first + steps, &lowest) : start;
            if (threadIdx.x < kWarp) {
                int32_t* states = args.states + static_cast<int64_t>(number) * kRing;
                const int before = ring.trace_back(
                    first + steps - 1, steps - kept_from, node, pass == 0 ? nullptr : states
                );
                if (pass == 0 && threadIdx.x == 0) start = before;
            }
            __syncthreads();
        }
    }
}

int shared_bytes(int even_bits) { return 4 * (kStates >> even_bits); }
constexpr int kStaticShared = 2 << 10;  // bytes that a block has besides, at most

int64_t kept_bytes(int even_bits) { return int64_t{4} * kRing * (kStates >> even_bits); }

// Rings that are searched at a time.
int blocks_of(int count, int even_bits, const DeviceInfo& info) {
    const int64_t fitting = kMostKept / kept_bytes(even_bits);
    return static_cast<int>(std::min<int64_t>({count, fitting, info.multiprocessors}));
}

template <int kEven, int kOdd>
cudaError_t search(const ExlNearestRings& args, const DeviceInfo& info, void* stream) {
    auto* tables = static_cast<__half*>(args.workspace);
    __half* odd_table = kEven == kOdd ? tables : tables + kTableHalves;
    const dim3 grid(kBranches / kLoad), block(kThreads);
    cudaError_t error =
        launch(table_kernel<kEven, kOdd>, grid, block, 0, stream, args.values, tables);
    if (error == cudaSuccess && kEven != kOdd) {
        error = launch(table_kernel<kOdd, kEven>, grid, block, 0, stream, args.values, odd_table);
    }
    if (error != cudaSuccess) return error;
    SearchArgs operands = {};
    operands.targets = args.targets, operands.target_stride = args.target_stride;
    operands.values = args.values;
    operands.even_table = reinterpret_cast<const uint4*>(tables);
    operands.odd_table = reinterpret_cast<const uint4*>(odd_table);
    operands.kept = reinterpret_cast<float*>(tables + 2 * kTableHalves);
    operands.states = args.states, operands.count = args.count, operands.reach = args.reach;
    const auto kernel = search_kernel<kEven, kOdd>;
    const int shared = shared_bytes(kEven);
    // The least shared memory that fits, so that the L1 cache has the rest.
    error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
        static_cast<int>(ceil_div(100 * (shared + 2 * kStaticShared), kMaxShared))
    );
    if (error != cudaSuccess) return error;
    return launch(
        kernel, dim3(blocks_of(args.count, kEven, info)), block, shared, stream, operands
    );
}

}  // namespace

}  // namespace exl::cuda::trellis

extern "C" int64_t exl_cuda_nearest_rings_workspace(int32_t count, int32_t even_bits) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (even_bits < 1 || even_bits > 8 || device_info(&info) != cudaSuccess) return 0;
    if (shared_bytes(even_bits) + kStaticShared > info.shared_per_block) return 0;
    return 4 * kTableHalves + blocks_of(count, even_bits, info) * kept_bytes(even_bits);
}

extern "C" int exl_cuda_nearest_rings(const ExlNearestRings* args, void* stream) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const int even = args->even_bits, odd = args->odd_bits;
    if (args->count < 0 || args->reach < 1 || args->reach > kRing / 2) return cudaErrorInvalidValue;
    const int64_t needed = exl_cuda_nearest_rings_workspace(args->count, even);
    if (needed == 0 || args->workspace_bytes < needed) return cudaErrorInvalidValue;
    if (args->count == 0) return cudaSuccess;
    switch (10 * even + odd) {
        case 11: return search<1, 1>(*args, info, stream);
        case 12: return search<1, 2>(*args, info, stream);
        case 22: return search<2, 2>(*args, info, stream);
        case 23: return search<2, 3>(*args, info, stream);
        case 33: return search<3, 3>(*args, info, stream);
        case 34: return search<3, 4>(*args, info, stream);
        case 44: return search<4, 4>(*args, info, stream);
        case 55: return search<5, 5>(*args, info, stream);
        case 66: return search<6, 6>(*args, info, stream);
        case 77: return search<7, 7>(*args, info, stream);
        case 88: return search<8, 8>(*args, info, stream);
        default: return cudaErrorInvalidValue;
    }
}

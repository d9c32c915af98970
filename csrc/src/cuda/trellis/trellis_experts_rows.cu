// Rows around products with experts of trellis codes: prepared inputs, activations, weighted sums.
//
// Contract   exl/cuda/trellis_experts.h.
// Mapping    A warp has a block of 128 values of one row. Prepare: of a pair and a part, while
//            thread block 0 sorts the pairs. Inner: of a row of an item, with both parts. Outer: a
//            thread block has a block of columns of a row, and a warp every 8th of its experts.
// Accuracy   float32. Slots are added in the order of the shares, experts in an order that depends
//            on their number alone.
// Floor      A launch, some reads from the L2 cache, five shuffles in turn. With many rows: the
//            bytes of inputs and slots at memory bandwidth.
#include <algorithm>

#include "cuda/elementwise/gate.cuh"
#include "cuda/trellis/trellis_experts_rows.cuh"

namespace exl::cuda::trellis {

namespace {

constexpr int kPrepareWarps = kSortWarps, kInnerWarps = 4, kOuterWarps = 8;

// `prepare_block` with every form.
__device__ __forceinline__ void prepare_row_block(
    const Target& to, int row, int block, float (&v)[kValues], const Halves& suh, int lane
) {
    if (to.form != kNaturalForm) {
        prepare_block(to, row, block, v, suh, 1.0f, lane);
        return;
    }
    float factors[kValues];
    suh.to_floats(factors);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] *= factors[i] * kNormalize;
    transform(v, lane);
    const int64_t at =
        static_cast<int64_t>(row) * to.k + EXL_TRELLIS_BLOCK * block + kValues * lane;
    *reinterpret_cast<uint2*>(to.out + 2 * at) =
        make_uint2(half_pair(v[0], v[1]), half_pair(v[2], v[3]));
}

// The next kernel may read ids, items and codes early: it begins after all kernels before this one.
template <class X>
__global__ void __launch_bounds__(kPrepareWarps* kWarp) expert_prepare_kernel(
    const __grid_constant__ ExpertPrepareArgs args
) {
    extern __shared__ int shared[];
    wait_for_inputs();
    let_next_begin();
    if (args.sorts && blockIdx.x == 0) {
        sort_pairs(args.sort, shared);
        return;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t task = static_cast<int64_t>(blockIdx.x - args.sorts) * kPrepareWarps + warp;
    const int blocks = args.to[0].blocks;
    const int block = static_cast<int>(task % blocks);
    const int part = static_cast<int>(task / blocks) % args.parts;
    const int pair = static_cast<int>(task / blocks) / args.parts;
    if (pair >= args.pairs) return;
    const Target& to = args.to[part];
    const int64_t expert = args.ids[pair];
    const auto* scales = static_cast<const __half*>(args.matrices[expert * args.parts + part].suh);
    const int value = EXL_TRELLIS_BLOCK * block + kValues * lane;
    const Halves suh(scales + value);
    float v[kValues];
    const X* x = static_cast<const X*>(args.x) + pair / args.pairs_per_row * args.x_stride;
    load_values(x, value - to.first_in, to.in_features, args.is_aligned, v);
    prepare_row_block(to, pair, block, v, suh, lane);
}

// Sums of columns first .. first + 3 of a row of a product.
__device__ __forceinline__ void load_slots(
    const ExpertSlots& slots, uint32_t product, int row, int first, float (&v)[kValues]
) {
    const Shares& shares = slots.shares;
    const uint32_t group = first / slots.columns;
    const uint32_t last = shares.share_of((group + 1) * shares.k_units - 1);
    uint32_t share = shares.share_of(group * shares.k_units);
    const int64_t size = static_cast<int64_t>(slots.rows) * slots.columns;
    const int64_t slot = static_cast<int64_t>(product) * shares.slots() + shares.slot(group, share);
    const float* from = slots.from + slot * size + row * slots.columns + first % slots.columns;
#pragma unroll
    for (float& one : v) one = 0.0f;
    constexpr int kTogether = 4;  // loads in flight: the last slot again in place of missing ones
#pragma unroll 1
    for (; share <= last; share += kTogether) {
        float4 some[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            some[i] = *reinterpret_cast<const float4*>(from);
            if (i + 1 == kTogether || share + i + 1 <= last) from += size;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (share + i > last) continue;
            v[0] += some[i].x, v[1] += some[i].y, v[2] += some[i].z, v[3] += some[i].w;
        }
    }
}

// Outputs first .. first + 3 of a matrix, from their sums.
struct OutputFactors {
    Halves svh;
    float bias[kValues];

    __device__ __forceinline__ void load(
        const ExlTrellisMatrix& w, int first, int first_out, int out_features
    ) {
        svh = Halves(static_cast<const __half*>(w.svh) + first);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int column = first - first_out + i;
            const bool exists = w.bias != nullptr && column >= 0 && column < out_features;
            bias[i] = exists ? w.bias[column] : 0.0f;
        }
    }
    __device__ __forceinline__ void apply(float (&v)[kValues], int lane) const {
        float scales[kValues];
        svh.to_floats(scales);
        transform(v, lane);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = fmaf(v[i] * kNormalize, scales[i], bias[i]);
    }
};

__global__ void __launch_bounds__(kInnerWarps* kWarp) expert_inner_kernel(
    const __grid_constant__ ExpertInnerArgs args
) {
    let_next_begin();
    const int lane = threadIdx.x % kWarp, number = blockIdx.x;
    const int task = blockIdx.y * kInnerWarps + threadIdx.x / kWarp;
    const int row = task / args.blocks, block = task % args.blocks;
    const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
    ExlExpertItem item = {};
    if (number < args.items.count()) item = args.items.at(number);
    const bool exists = row < item.count;
    OutputFactors factors, of_up;
    Halves suh;
    int pair = 0;
    if (exists) {
        const ExlTrellisMatrix* w = args.matrices + static_cast<int64_t>(item.expert) * args.parts;
        factors.load(w[0], first, args.first_out, args.out_features);
        if (args.parts == 2) of_up.load(w[1], first, args.first_out, args.out_features);
        if (args.next != nullptr) {
            suh = Halves(static_cast<const __half*>(args.next[item.expert].suh) + first);
        }
        pair = args.items.pair(item, row);
    }
    wait_for_inputs();
    if (!exists) return;
    float v[kValues], up[kValues] = {1.0f, 1.0f, 1.0f, 1.0f};
    load_slots(args.slots, number * args.parts, row, first, v);
    if (args.parts == 2) {
        load_slots(args.slots, number * args.parts + 1, row, first, up);
        of_up.apply(up, lane);
    }
    factors.apply(v, lane);
    const int output = first - args.first_out;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const bool is_output = output + i >= 0 && output + i < args.out_features;
        v[i] = is_output ? gated(args.gate, v[i], up[i]) : 0.0f;
        if (is_output && args.next == nullptr) {
            args.plain[static_cast<int64_t>(pair) * args.out_features + output + i] =
                from_float<__half>(v[i]);
        }
    }
    if (args.next != nullptr) prepare_row_block(args.to, pair, block, v, suh, lane);
}

__global__ void __launch_bounds__(kOuterWarps* kWarp) expert_outer_kernel(
    const __grid_constant__ ExpertOuterArgs args
) {
    __shared__ float4 partial[kOuterWarps][kWarp];
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t row = blockIdx.x;
    const int first = EXL_TRELLIS_BLOCK * blockIdx.y + kValues * lane;
    OutputFactors factors = {};
    float weight = 0.0f;
    int place = 0;
    const auto load = [&](int j) {
        const int64_t pair = row * args.top_k + j;
        const ExlTrellisMatrix& w = args.matrices[__ldcg(args.ids + pair)];
        factors.load(w, first, args.first_out, args.out_features);
        weight = __ldcg(args.weights + pair);
        place = args.places != nullptr ? __ldcg(args.places + pair)
                                       : static_cast<int>(pair) * args.slots.rows;
    };
    if (warp < args.top_k) load(warp);
    const int own = threadIdx.x;  // a column of the block
    const int column = EXL_TRELLIS_BLOCK * blockIdx.y + own - args.first_out;
    const bool exists = own < EXL_TRELLIS_BLOCK && column >= 0 && column < args.out_features;
    float* const to = args.y + row * args.y_stride + column;
    wait_for_inputs();
    const float old = exists && args.is_added ? *to : 0.0f;
    float4 sum = {};
    for (int j = warp; j < args.top_k; j += kOuterWarps) {
        if (j != warp) load(j);
        float v[kValues];
        const int item = place / args.slots.rows;
        load_slots(args.slots, item, place - item * args.slots.rows, first, v);
        factors.apply(v, lane);
        sum.x = fmaf(weight, v[0], sum.x), sum.y = fmaf(weight, v[1], sum.y);
        sum.z = fmaf(weight, v[2], sum.z), sum.w = fmaf(weight, v[3], sum.w);
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (!exists) return;
    float y = 0.0f;
    for (int w = 0; w < min(kOuterWarps, args.top_k); ++w) {
        y += reinterpret_cast<const float*>(partial[w])[own];
    }
    *to = old + y;
}

}  // namespace

cudaError_t launch_expert_prepare(const ExpertPrepareArgs& args, void* stream) {
    const int64_t tasks = static_cast<int64_t>(args.pairs) * args.parts * args.to[0].blocks;
    const int64_t blocks = ceil_div(tasks, kPrepareWarps) + args.sorts;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    const auto kernel =
        args.x_dtype == kF32 ? expert_prepare_kernel<float> : expert_prepare_kernel<__half>;
    const size_t bytes = args.sorts ? sort_bytes(args.sort.experts) : 0;
    const dim3 grid(static_cast<unsigned>(blocks));
    return launch(kernel, grid, dim3(kPrepareWarps * kWarp), bytes, stream, args);
}

cudaError_t launch_expert_inner(const ExpertInnerArgs& args, void* stream) {
    const int rows = args.items.items == nullptr ? 1 : args.items.tile_rows;
    const int64_t blocks = ceil_div(static_cast<int64_t>(rows) * args.blocks, kInnerWarps);
    if (blocks > 65535) return cudaErrorInvalidValue;
    const dim3 grid(args.items.max_items, static_cast<unsigned>(blocks));
    return launch(expert_inner_kernel, grid, dim3(kInnerWarps * kWarp), 0, stream, args);
}

cudaError_t launch_expert_outer(const ExpertOuterArgs& args, void* stream) {
    const dim3 grid(args.m, args.blocks);
    return launch(expert_outer_kernel, grid, dim3(kOuterWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

// Rows around products with experts of trellis codes: prepared inputs, activations, weighted sums.
//
// Contract   exl/cuda/trellis_experts.h.
// Mapping    A warp has a block of 128 values of one row at a time. Prepare: of a pair, for both
//            parts, while thread block 0 sorts the pairs. Inner: of a row of an item, with both
//            parts. Outer: a thread block has a block of columns of a row, and a warp every 8th of
//            its experts.
// Accuracy   float32. Slots are added in the order of the shares, experts in an order that depends
//            on their number alone.
// Floor      A launch, some reads from the L2 cache, five shuffles in turn. With many rows: the
//            bytes of inputs and slots at memory bandwidth.
#include <algorithm>

#include "cuda/elementwise/gate.cuh"
#include "cuda/trellis/trellis_experts_rows.cuh"

namespace exl::cuda::trellis {

namespace {

// Rows from which a warp of Prepare and Outer has several blocks of its row, whose addresses it
// computes once.
constexpr int kManyRows = 2048;
constexpr int kPrepareWarps = kSortWarps, kInnerWarps = 4, kOuterWarps = 8;

// `prepare_block` with every form.
__device__ __forceinline__ void prepare_row_block(
    const Target& to, int row, int block, float (&v)[kValues], const float (&suh)[kValues], int lane
) {
    if (to.form != kNaturalForm) {
        prepare_block(to, row, block, v, suh, 1.0f, lane);
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] *= suh[i] * kNormalize;
    transform(v, lane);
    const int64_t at =
        static_cast<int64_t>(row) * to.k + EXL_TRELLIS_BLOCK * block + kValues * lane;
    *reinterpret_cast<uint2*>(to.out + 2 * at) =
        make_uint2(half_pair(v[0], v[1]), half_pair(v[2], v[3]));
}

// The next kernel may read ids, items and codes early: it begins after all kernels before this one.
template <class X, int kParts>
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
    const uint32_t task = (blockIdx.x - args.sorts) * kPrepareWarps + warp;
    const Target& to = args.to[0];
    const uint32_t slices = (to.blocks + args.blocks_each - 1) / args.blocks_each;
    const int pair = static_cast<int>(task / slices);
    if (pair >= args.pairs) return;
    const ExlTrellisMatrix* w = args.matrices + static_cast<int64_t>(args.ids[pair]) * kParts;
    const __half* scales[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) scales[i] = static_cast<const __half*>(w[i].suh);
    const X* x = static_cast<const X*>(args.x) + pair / args.pairs_per_row * args.x_stride;
    const int first = static_cast<int>(task % slices) * args.blocks_each;
    const int last = min(first + args.blocks_each, to.blocks);
#pragma unroll 2
    for (int block = first; block < last; ++block) {
        const int value = EXL_TRELLIS_BLOCK * block + kValues * lane;
        float v[kValues], suh[kParts][kValues];
        load_values(x, value - to.first_in, to.in_features, args.is_aligned, v);
#pragma unroll
        for (int i = 0; i < kParts; ++i) load_halves(scales[i] + value, suh[i]);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            float own[kValues] = {v[0], v[1], v[2], v[3]};
            prepare_row_block(args.to[i], pair, block, own, suh[i], lane);
        }
    }
}

// Slots of the products of a launch, with the division of all products if shares are joint.
struct SlotReader {
    const ExpertSlots& slots;
    Shares shares;

    __device__ __forceinline__ SlotReader(const ExpertSlots& of, uint32_t products)
        : slots(of), shares(of.shares.is_joint ? of.shares.over(products) : of.shares) {}

    // Sums of columns first .. first + 3 of a row of a product.
    __device__ __forceinline__ void load(
        uint32_t product, int row, int first, float (&v)[kValues]
    ) const {
        uint32_t group = first / slots.columns;
        int64_t slot = 0;
        if (shares.is_joint) {
            group += product * slots.shares.groups();
        } else {
            slot = shares.first_slot(product);
        }
        const uint32_t last = shares.share_of((group + 1) * shares.k_units - 1);
        uint32_t share = shares.share_of(group * shares.k_units);
        const int64_t size = static_cast<int64_t>(slots.rows) * slots.columns;
        slot += shares.slot(group, share);
        const float* from = slots.from + slot * size + row * slots.columns + first % slots.columns;
#pragma unroll
        for (float& one : v) one = 0.0f;
#pragma unroll 4
        for (; share <= last; ++share, from += size) {
            const float4 own = *reinterpret_cast<const float4*>(from);
            v[0] += own.x, v[1] += own.y, v[2] += own.z, v[3] += own.w;
        }
    }
};

// Outputs first .. first + 3 of a matrix, from their sums.
struct OutputFactors {
    float svh[kValues], bias[kValues];

    __device__ __forceinline__ void load(
        const ExlTrellisMatrix& w, int first, int first_out, int out_features
    ) {
        load_halves(static_cast<const __half*>(w.svh) + first, svh);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int column = first - first_out + i;
            const bool exists = w.bias != nullptr && column >= 0 && column < out_features;
            bias[i] = exists ? w.bias[column] : 0.0f;
        }
    }
    __device__ __forceinline__ void apply(float (&v)[kValues], int lane) const {
        transform(v, lane);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = fmaf(v[i] * kNormalize, svh[i], bias[i]);
    }
};

// Activation of a block of a row of an item.
struct InnerBlock {
    const ExpertInnerArgs& args;
    const SlotReader& slots;
    OutputFactors factors, of_up;
    float suh[kValues];
    int product, block, lane;

    __device__ __forceinline__ void load_factors(int expert) {
        const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
        const ExlTrellisMatrix* w = args.matrices + static_cast<int64_t>(expert) * args.parts;
        factors.load(w[0], first, args.first_out, args.out_features);
        if (args.parts == 2) of_up.load(w[1], first, args.first_out, args.out_features);
        if (args.next != nullptr) {
            load_halves(static_cast<const __half*>(args.next[expert].suh) + first, suh);
        }
    }
    __device__ __forceinline__ void compute(int row, int pair) const {
        const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
        float v[kValues], up[kValues] = {1.0f, 1.0f, 1.0f, 1.0f};
        slots.load(product, row, first, v);
        if (args.parts == 2) {
            slots.load(product + 1, row, first, up);
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
};

__global__ void __launch_bounds__(kInnerWarps* kWarp) expert_inner_kernel(
    const __grid_constant__ ExpertInnerArgs args
) {
    let_next_begin();
    const int lane = threadIdx.x % kWarp, number = blockIdx.x;
    const int task = blockIdx.y * kInnerWarps + threadIdx.x / kWarp;
    const int first_row = task / args.blocks * args.rows_each, block = task % args.blocks;
    ExlExpertItem item = {};
    const int count = args.items.count();
    if (number < count) item = args.items.at(number);
    const SlotReader slots(args.slots, count * args.parts);
    InnerBlock own = {args, slots, {}, {}, {}, number * args.parts, block, lane};
    const int last_row = min(first_row + args.rows_each, item.count);
    int pair = 0;
    if (first_row < last_row) {
        own.load_factors(item.expert);
        pair = args.items.pair(item, first_row);
    }
    wait_for_inputs();
    for (int row = first_row; row < last_row; ++row) {
        own.compute(row, pair);
        if (row + 1 < last_row) pair = args.items.pair(item, row + 1);
    }
}

// Output factors of a pair and block, and where its sums are.
struct OuterPair {
    OutputFactors factors;
    float weight = 0.0f;
    int place = 0;

    __device__ __forceinline__ void load(const ExpertOuterArgs& args, int64_t pair, int first) {
        const ExlTrellisMatrix& w = args.matrices[__ldcg(args.ids + pair)];
        factors.load(w, first, args.first_out, args.out_features);
        weight = __ldcg(args.weights + pair);
        place = args.places != nullptr ? __ldcg(args.places + pair)
                                       : static_cast<int>(pair) * args.slots.rows;
    }
};

__global__ void __launch_bounds__(kOuterWarps* kWarp) expert_outer_kernel(
    const __grid_constant__ ExpertOuterArgs args
) {
    __shared__ float4 partial[2][kOuterWarps][kWarp];
    let_next_begin();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t row = blockIdx.x;
    const int first_block = blockIdx.y * args.blocks_each;
    const int last_block = min(first_block + args.blocks_each, args.blocks);
    const int64_t first_pair = row * args.top_k;
    OuterPair own = {};
    if (warp < args.top_k) {
        own.load(args, first_pair + warp, EXL_TRELLIS_BLOCK * first_block + kValues * lane);
    }
    const SlotReader slots(args.slots, args.items.count());
    wait_for_inputs();
    for (int block = first_block; block < last_block; ++block) {
        const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
        float4 sum = {};
        for (int j = warp; j < args.top_k; j += kOuterWarps) {
            if (j != warp || block != first_block) own.load(args, first_pair + j, first);
            float v[kValues];
            const int item = own.place / args.slots.rows;
            slots.load(item, own.place - item * args.slots.rows, first, v);
            own.factors.apply(v, lane);
            sum.x = fmaf(own.weight, v[0], sum.x), sum.y = fmaf(own.weight, v[1], sum.y);
            sum.z = fmaf(own.weight, v[2], sum.z), sum.w = fmaf(own.weight, v[3], sum.w);
        }
        const auto& of_block = partial[block % 2];
        partial[block % 2][warp][lane] = sum;
        __syncthreads();
        const int i = threadIdx.x;  // a column of the block
        const int column = EXL_TRELLIS_BLOCK * block + i - args.first_out;
        if (i >= EXL_TRELLIS_BLOCK || column < 0 || column >= args.out_features) continue;
        float y = 0.0f;
        for (int w = 0; w < min(kOuterWarps, args.top_k); ++w) {
            y += reinterpret_cast<const float*>(of_block[w])[i];
        }
        float* to = args.y + row * args.y_stride + column;
        *to = args.is_added ? *to + y : y;
    }
}

}  // namespace

cudaError_t launch_expert_prepare(ExpertPrepareArgs args, void* stream) {
    args.blocks_each = args.pairs >= kManyRows ? 4 : 1;
    const int64_t slices = ceil_div(args.to[0].blocks, args.blocks_each);
    const int64_t blocks = ceil_div(args.pairs * slices, kPrepareWarps) + args.sorts;
    if (args.pairs * slices > INT32_MAX) return cudaErrorInvalidValue;
    auto kernel =
        args.parts == 2 ? expert_prepare_kernel<float, 2> : expert_prepare_kernel<float, 1>;
    if (args.x_dtype == kF16) {
        kernel =
            args.parts == 2 ? expert_prepare_kernel<__half, 2> : expert_prepare_kernel<__half, 1>;
    }
    const size_t bytes = args.sorts ? sort_bytes(args.sort.experts) : 0;
    const dim3 grid(static_cast<unsigned>(blocks));
    return launch(kernel, grid, dim3(kPrepareWarps * kWarp), bytes, stream, args);
}

cudaError_t launch_expert_inner(ExpertInnerArgs args, void* stream) {
    const int rows = args.items.items == nullptr ? 1 : args.items.tile_rows;
    args.rows_each = rows > 8 ? 8 : 1;
    const int64_t tasks = ceil_div(rows, args.rows_each) * args.blocks;
    const int64_t blocks = ceil_div(tasks, kInnerWarps);
    if (blocks > 65535) return cudaErrorInvalidValue;
    const dim3 grid(args.items.max_items, static_cast<unsigned>(blocks));
    return launch(expert_inner_kernel, grid, dim3(kInnerWarps * kWarp), 0, stream, args);
}

cudaError_t launch_expert_outer(ExpertOuterArgs args, void* stream) {
    args.blocks_each = args.m >= kManyRows / 8 ? 4 : 1;
    const dim3 grid(args.m, static_cast<unsigned>(ceil_div(args.blocks, args.blocks_each)));
    return launch(expert_outer_kernel, grid, dim3(kOuterWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

// Finishes products with trellis codes: adds the slots of sums, transforms, scales, and stores.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_linear).
// Mapping    A warp has a block of 128 columns of one row. With a gate it has those of both parts,
//            and may prepare the result for the next matrix. Or it sends partial sums to other GPUs.
// Accuracy   float32, slots in the order of the thread blocks that wrote them.
// Overlap    Factors are loaded before the wait for the previous kernel. Slots, the inputs' sums and
//            the results to add to are loaded together.
// Floor      With few rows: a launch, a read from the L2 cache, five shuffles in turn.
#include "cuda/elementwise/gate.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/trellis/trellis_finish.cuh"
#include "cuda/trellis/trellis_prompt.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 4;

// Slots with the sums of columns first .. first + 3 of a row, and the inputs' sums of the row.
struct Slots {
    const float* from;       // of the first slot
    const float* of_inputs;  // [count of blocks], or null
    int64_t size;            // floats of a slot
    uint32_t count;

    __device__ __forceinline__ Slots(const FinishPart& part, int row, int first_row, int first)
        : from(nullptr), of_inputs(nullptr), size(0), count(0) {
        const Sums& sums = part.sums;
        if (sums.columns == 0) return;
        const Division& division = sums.division;
        const uint32_t group = sums.first_group + first / sums.columns;
        const uint32_t block = division.block_of(group * division.group_items);
        count = division.block_of((group + 1) * division.group_items - 1) - block + 1;
        size = static_cast<int64_t>(sums.rows) * sums.columns;
        from = static_cast<const float*>(sums.from) + division.slot(group, block) * size +
               row * sums.columns + first % sums.columns;
        if (part.input_sums != nullptr) {
            of_inputs = part.input_sums + static_cast<int64_t>(first_row + row) * part.k_blocks;
        }
    }
};

// Adds slots in the order of their blocks. Loads some together, so that their latencies overlap.
__device__ __forceinline__ void add_slots(const Slots& slots, float (&v)[kValues]) {
    constexpr int kTogether = 8;
#pragma unroll
    for (float& one : v) one = 0.0f;
    for (uint32_t first = 0; first < slots.count; first += kTogether) {
        float4 some[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            some[i] = {};
            if (first + i < slots.count) {
                some[i] = *reinterpret_cast<const float4*>(slots.from + (first + i) * slots.size);
            }
        }
#pragma unroll
        for (const float4& one : some) v[0] += one.x, v[1] += one.y, v[2] += one.z, v[3] += one.w;
    }
}

// Sums of columns first .. first + 3 of a row.
__device__ __forceinline__ void load_sums(
    const FinishPart& part, const Slots& slots, int row, int first, int lane, float (&v)[kValues]
) {
    if (part.sums.columns == 0) {
        const auto* sums = static_cast<const __half*>(part.sums.from);
        load_halves(sums + static_cast<int64_t>(row) * part.n + first, v);
        return;
    }
    float inputs = 0.0f;
    if (slots.of_inputs != nullptr) {
#pragma unroll 4
        for (int i = lane; i < part.k_blocks; i += kWarp) inputs += slots.of_inputs[i];
    }
    add_slots(slots, v);
    if (slots.of_inputs == nullptr) return;
    inputs = warp_sum(inputs);
#pragma unroll
    for (float& one : v) one = kAlpha * fmaf(-kRawZero, inputs, one);
}

struct Factors {
    float svh[kValues], bias[kValues];

    __device__ __forceinline__ void load(const FinishPart& part, int first) {
        load_halves(part.svh + first, svh);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int column = first - part.first_out + i;
            const bool exists = part.bias != nullptr && column >= 0 && column < part.out_features;
            bias[i] = exists ? part.bias[column] : 0.0f;
        }
    }
};

// Results of a block, from its sums.
__device__ __forceinline__ void finish_block(
    const Factors& factors, int lane, float (&v)[kValues]
) {
    transform(v, lane);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        v[i] = fmaf(v[i] * kNormalize, factors.svh[i], factors.bias[i]);
    }
}

template <class Y>
__device__ __forceinline__ void store_values(
    Y* row, int first, int count, bool is_aligned, const float (&v)[kValues]
) {
    if (is_aligned && first >= 0 && first + kValues <= count) {
        if constexpr (sizeof(Y) == 2) {
            *reinterpret_cast<uint2*>(row + first) =
                make_uint2(half_pair(v[0], v[1]), half_pair(v[2], v[3]));
        } else {
            *reinterpret_cast<float4*>(row + first) = make_float4(v[0], v[1], v[2], v[3]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        if (first + i >= 0 && first + i < count) row[first + i] = from_float<Y>(v[i]);
    }
}

// Stores results of a block to y and all copies, in which they begin `offset` elements after the start.
__device__ __forceinline__ void send_values(
    const FinishArgs& args, int64_t offset, int first, int count, bool is_aligned,
    const float (&v)[kValues]
) {
    auto* const y = static_cast<float*>(args.y) + offset;
    const uint4 quad =
        make_uint4(sent_bits(v[0]), sent_bits(v[1]), sent_bits(v[2]), sent_bits(v[3]));
    if (is_aligned && first >= 0 && first + kValues <= count) {
#pragma unroll 1
        for (int i = 0; i < args.copies.count; ++i) {
            store_parts(args.copies.to[i] + offset, quad);
        }
        store_parts(y, quad);
        return;
    }
    const uint32_t bits[kValues] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        if (first + i < 0 || first + i >= count) continue;
        send_part(args.copies, offset + i, bits[i]);
        store_part(y + i, bits[i]);
    }
}

template <int epilogue, class Y, bool sends>
__global__ void __launch_bounds__(kWarps* kWarp) finish_kernel(
    const __grid_constant__ FinishArgs args
) {
    if constexpr (!sends) let_next_begin();
    const int lane = threadIdx.x % kWarp, row = blockIdx.x;
    const int task = blockIdx.y * kWarps + threadIdx.x / kWarp;
    const bool exists = task < args.blocks;
    constexpr bool is_gated = epilogue == EXL_EPILOGUE_GATED;
    int i = 0;
    if (!is_gated) {
        i = args.count > 2 && task >= args.parts[2].first_block   ? 2
            : args.count > 1 && task >= args.parts[1].first_block ? 1
                                                                  : 0;
    }
    const FinishPart& part = args.parts[i];
    const int block = task - part.first_block;
    const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
    const int output = first - part.first_out;
    Factors factors, of_up;
    float suh[kValues] = {};
    if (exists) {
        factors.load(part, first);
        if (is_gated) of_up.load(args.parts[1], first);
        if (is_gated && args.has_next) load_halves(args.next.suh + first, suh);
    }
    const Slots slots(part, row, args.first_row, first);
    const Slots slots_of_up(args.parts[is_gated ? 1 : i], row, args.first_row, first);
    Y* y = static_cast<Y*>(args.y) + row * args.y_stride + part.y_column;
    const bool is_aligned = reinterpret_cast<uintptr_t>(y + output) % (kValues * sizeof(Y)) == 0;
    wait_for_inputs();
    // The reader of sums does not wait for this kernel (exl_cuda_trellis_prepare_sums). All kernels
    // before this one have ended here.
    if constexpr (sends) let_next_begin();
    if (!exists) return;
    float v[kValues], up[kValues], old[kValues] = {};
    load_sums(part, slots, row, first, lane, v);
    if constexpr (is_gated) load_sums(args.parts[1], slots_of_up, row, first, lane, up);
    if constexpr (epilogue == EXL_EPILOGUE_ADD) {
        load_values(y, output, part.out_features, is_aligned, old);
    }
    finish_block(factors, lane, v);
    if constexpr (is_gated) {
        finish_block(of_up, lane, up);
#pragma unroll
        for (int j = 0; j < kValues; ++j) v[j] = gated(args.gate, v[j], up[j]);
        if (args.has_next) {
#pragma unroll
            for (int j = 0; j < kValues; ++j) {
                if (output + j < 0 || output + j >= part.out_features) v[j] = 0.0f;
            }
            prepare_block(args.next, args.first_row + row, block, v, suh, 1.0f, lane);
            return;
        }
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) v[j] += old[j];
    if constexpr (sends) {
        const int64_t offset = row * args.y_stride + part.y_column + output;
        send_values(args, offset, output, part.out_features, is_aligned, v);
    } else {
        store_values(y, output, part.out_features, is_aligned, v);
    }
}

}  // namespace

cudaError_t launch_finish(const FinishArgs& args, void* stream) {
    if (takes_prompt(args)) return launch_prompt_finish(args, stream);
    const bool is_float = args.y_dtype == kF32;
    auto kernel = finish_kernel<EXL_EPILOGUE_ADD, float, false>;
    if (args.sends) {
        kernel = finish_kernel<EXL_EPILOGUE_STORE, float, true>;
    } else if (args.epilogue == EXL_EPILOGUE_STORE) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_STORE, float, false>
                          : finish_kernel<EXL_EPILOGUE_STORE, __half, false>;
    } else if (args.epilogue == EXL_EPILOGUE_GATED) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_GATED, float, false>
                          : finish_kernel<EXL_EPILOGUE_GATED, __half, false>;
    }
    const dim3 grid(args.m, static_cast<unsigned>(ceil_div(args.blocks, kWarps)));
    return launch(kernel, grid, dim3(kWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

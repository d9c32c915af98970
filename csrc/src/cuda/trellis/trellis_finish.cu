// Finishes products with trellis codes: adds the slots of sums, transforms, scales, and stores.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_linear).
// Mapping    A warp has a block of 128 columns of one row. With a gate it has those of both parts,
//            and may prepare the result for the next matrix.
// Accuracy   float32, slots in the order of the thread blocks that wrote them.
// Floor      With few rows: a launch, a read of some slots from the L2 cache, five shuffles in turn.
#include "cuda/elementwise/gate.cuh"
#include "cuda/trellis/trellis_finish.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 4;

// Sums of columns first .. first + 3 of a row.
__device__ __forceinline__ void load_sums(
    const Sums& sums, int row, int first, int n, float (&v)[kValues]
) {
    if (sums.columns == 0) {
        load_halves(
            static_cast<const __half*>(sums.from) + static_cast<int64_t>(row) * n + first, v
        );
        return;
    }
    const Division& division = sums.division;
    const uint32_t group = sums.first_group + first / sums.columns;
    const uint32_t last = division.block_of((group + 1) * division.group_items - 1);
    uint32_t block = division.block_of(group * division.group_items);
    const int64_t size = static_cast<int64_t>(sums.rows) * sums.columns;
    const float* from = static_cast<const float*>(sums.from) + division.slot(group, block) * size +
                        row * sums.columns + first % sums.columns;
#pragma unroll
    for (float& one : v) one = 0.0f;
#pragma unroll 4
    for (; block <= last; ++block, from += size) {
        const float4 slot = *reinterpret_cast<const float4*>(from);
        v[0] += slot.x, v[1] += slot.y, v[2] += slot.z, v[3] += slot.w;
    }
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

// Results of a block: outputs first .. first + 3 of a part. `row`: of the chunk.
__device__ __forceinline__ void finish_block(
    const FinishArgs& args, const FinishPart& part, const Factors& factors, int row, int first,
    int lane, float (&v)[kValues]
) {
    float inputs = 0.0f;
    if (part.input_sums != nullptr) {
        const float* of_row = part.input_sums + (args.first_row + row) * part.k_blocks;
        for (int i = lane; i < part.k_blocks; i += kWarp) inputs += of_row[i];
    }
    load_sums(part.sums, row, first, part.n, v);
    if (part.input_sums != nullptr) {
        inputs = warp_sum(inputs);
#pragma unroll
        for (float& one : v) one = kAlpha * fmaf(-kRawZero, inputs, one);
    }
    transform(v, lane);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        v[i] = fmaf(v[i] * kNormalize, factors.svh[i], factors.bias[i]);
    }
}

template <class Y, bool is_added>
__device__ __forceinline__ void store_values(
    Y* row, int first, int count, bool is_aligned, const float (&v)[kValues]
) {
    if (is_aligned && first >= 0 && first + kValues <= count) {
        if constexpr (sizeof(Y) == 2) {
            *reinterpret_cast<uint2*>(row + first) =
                make_uint2(half_pair(v[0], v[1]), half_pair(v[2], v[3]));
        } else {
            auto* to = reinterpret_cast<float4*>(row + first);
            float4 old = is_added ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            *to = make_float4(old.x + v[0], old.y + v[1], old.z + v[2], old.w + v[3]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        if (first + i < 0 || first + i >= count) continue;
        if constexpr (is_added) {
            row[first + i] += v[i];
        } else {
            row[first + i] = from_float<Y>(v[i]);
        }
    }
}

template <int epilogue, class Y>
__global__ void __launch_bounds__(kWarps* kWarp) finish_kernel(
    const __grid_constant__ FinishArgs args
) {
    let_next_begin();
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
    Factors factors, of_up;
    float suh[kValues] = {};
    if (exists) {
        factors.load(part, first);
        if (is_gated) of_up.load(args.parts[1], first);
        if (is_gated && args.has_next) load_halves(args.next.suh + first, suh);
    }
    wait_for_inputs();
    if (!exists) return;
    float v[kValues];
    finish_block(args, part, factors, row, first, lane, v);
    const int output = first - part.first_out;
    if constexpr (is_gated) {
        float up[kValues];
        finish_block(args, args.parts[1], of_up, row, first, lane, up);
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
    Y* y = static_cast<Y*>(args.y) + row * args.y_stride + part.y_column;
    const bool is_aligned = reinterpret_cast<uintptr_t>(y + output) % (kValues * sizeof(Y)) == 0;
    store_values<Y, epilogue == EXL_EPILOGUE_ADD>(y, output, part.out_features, is_aligned, v);
}

}  // namespace

cudaError_t launch_finish(const FinishArgs& args, void* stream) {
    const bool is_float = args.y_dtype == kF32;
    auto kernel = finish_kernel<EXL_EPILOGUE_ADD, float>;
    if (args.epilogue == EXL_EPILOGUE_STORE) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_STORE, float>
                          : finish_kernel<EXL_EPILOGUE_STORE, __half>;
    } else if (args.epilogue == EXL_EPILOGUE_GATED) {
        kernel = is_float ? finish_kernel<EXL_EPILOGUE_GATED, float>
                          : finish_kernel<EXL_EPILOGUE_GATED, __half>;
    }
    const dim3 grid(args.m, static_cast<unsigned>(ceil_div(args.blocks, kWarps)));
    return launch(kernel, grid, dim3(kWarps * kWarp), 0, stream, args);
}

}  // namespace exl::cuda::trellis

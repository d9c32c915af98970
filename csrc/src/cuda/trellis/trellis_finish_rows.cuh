// Results of products with trellis codes from slots of sums: for the finish kernel, and for the end of
// the decode kernel.
#pragma once

#include "cuda/elementwise/gate.cuh"
#include "cuda/trellis/trellis_finish.cuh"
#include "exl/cuda/linear.h"

#ifdef __CUDACC__

namespace exl::cuda::trellis {

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
                // Not from the L1 cache: thread blocks of the same kernel may have written it.
                const float* from = slots.from + (first + i) * slots.size;
                some[i] = __ldcg(reinterpret_cast<const float4*>(from));
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

// Counts a slot of sums of the column group `group` of a launch. In the warp that stores the last
// slot of a block of 128 columns, makes the block's results. `is_real`: false for a warm-up, which
// counts and stores nothing.
__device__ __forceinline__ void finish_group(
    const WorkArgs& work, const FinishArgs& args, uint32_t group, int lane, bool is_real
) {
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    const int i = static_cast<int>(&work.part_of(group) - work.parts);
    const int block = (group - work.parts[i].first_group) / 2;
    const FinishPart &part = args.parts[is_gated ? 0 : i], &second = args.parts[is_gated ? 1 : i];
    const int first = EXL_TRELLIS_BLOCK * block + kValues * lane;
    Slots slots(part, 0, args.first_row, first), slots_of_up(second, 0, args.first_row, first);
    if (is_real) {
        uint32_t count = slots.count + (is_gated ? slots_of_up.count : 0);
        count = uniform(count) + __shfl_sync(0xffffffffu, count, kWarp / 2);
        uint32_t* counter = args.counters + part.first_block + block;
        __threadfence();
        __syncwarp();
        uint32_t arrived = 0;
        if (lane == 0) {
            arrived = atomicAdd(counter, 1) + 1;
            if (arrived == count) *counter = 0;
        }
        if (uniform(arrived) != count) return;
        __threadfence();
    }
    const int output = first - part.first_out;
    Factors factors, of_up;
    factors.load(part, first);
    if (is_gated) of_up.load(second, first);
    float suh[kValues] = {};
    if (args.has_next) load_halves(args.next.suh + first, suh);
    const bool is_float = args.y_dtype == kF32;
#pragma unroll 1
    for (int row = 0; row < work.m; ++row) {
        float v[kValues], up[kValues], old[kValues] = {};
        const int64_t at = row * args.y_stride + part.y_column;
        auto* y = static_cast<float*>(args.y) + at;
        auto* half_y = static_cast<__half*>(args.y) + at;
        const bool is_aligned = reinterpret_cast<uintptr_t>(y + output) % 16 == 0;
        const bool half_is_aligned = reinterpret_cast<uintptr_t>(half_y + output) % 8 == 0;
        if (args.epilogue == EXL_EPILOGUE_ADD) {
            load_values(y, output, part.out_features, is_aligned, old);
        }
        add_slots(slots, v);
        if (is_gated) add_slots(slots_of_up, up);
        slots.from += part.sums.columns, slots_of_up.from += part.sums.columns;
        finish_block(factors, lane, v);
        if (is_gated) {
            finish_block(of_up, lane, up);
#pragma unroll
            for (int j = 0; j < kValues; ++j) v[j] = gated(args.gate, v[j], up[j]);
        }
        if (!is_real) continue;
        if (args.has_next) {
#pragma unroll
            for (int j = 0; j < kValues; ++j) {
                if (output + j < 0 || output + j >= part.out_features) v[j] = 0.0f;
            }
            prepare_block(args.next, args.first_row + row, block, v, suh, 1.0f, lane);
            continue;
        }
#pragma unroll
        for (int j = 0; j < kValues; ++j) v[j] += old[j];
        if (is_float) {
            store_values(y, output, part.out_features, is_aligned, v);
        } else {
            store_values(half_y, output, part.out_features, half_is_aligned, v);
        }
    }
}

}  // namespace exl::cuda::trellis

#endif  // __CUDACC__

// Results of a product with trellis codes, from the slots of sums that its launch left: for the
// kernels that finish products.
#pragma once

#include "cuda/trellis/trellis_finish.cuh"

namespace exl::cuda::trellis {

#ifdef __CUDACC__

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

// Sums of columns first .. first + 3 of a row. All loads are issued before the first value is used:
// none has a condition, because the compiler would wait for one load before it issues the next.
class RowSums {
  public:
    __device__ __forceinline__ void load(
        const FinishPart& part, const Slots& slots, int row, int first, int lane
    ) {
        if (part.sums.columns == 0) {
            const auto* sums = static_cast<const __half*>(part.sums.from);
            halves_ = Halves(sums + static_cast<int64_t>(row) * part.n + first);
            return;
        }
        if (slots.of_inputs != nullptr) {
#pragma unroll
            for (int i = 0; i < kInputs; ++i) {
                inputs_[i] = slots.of_inputs[min(lane + i * kWarp, part.k_blocks - 1)];
            }
        }
        load_slots(slots, 0);
    }

    __device__ __forceinline__ void add(
        const FinishPart& part, const Slots& slots, int lane, float (&v)[kValues]
    ) {
        if (part.sums.columns == 0) {
            halves_.to_floats(v);
            return;
        }
#pragma unroll
        for (float& one : v) one = 0.0f;
        add_slots(slots, 0, v);
#pragma unroll 1
        for (uint32_t first = kSlots; first < slots.count; first += kSlots) {
            load_slots(slots, first);
            add_slots(slots, first, v);
        }
        if (slots.of_inputs == nullptr) return;
        float inputs = 0.0f;
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
            if (lane + i * kWarp < part.k_blocks) inputs += inputs_[i];
        }
#pragma unroll 1
        for (int i = lane + kInputs * kWarp; i < part.k_blocks; i += kWarp) {
            inputs += slots.of_inputs[i];
        }
        inputs = warp_sum(inputs);
#pragma unroll
        for (float& one : v) one = kAlpha * fmaf(-kRawZero, inputs, one);
    }

  private:
    static constexpr int kSlots = 8, kInputs = 4;

    // Loads the last slot again in place of those that do not exist.
    __device__ __forceinline__ void load_slots(const Slots& slots, uint32_t first) {
        const float* from = slots.from + first * slots.size;
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            slots_[i] = *reinterpret_cast<const float4*>(from);
            if (first + i + 1 < slots.count) from += slots.size;
        }
    }
    // Adds them in the order of their blocks.
    __device__ __forceinline__ void add_slots(
        const Slots& slots, uint32_t first, float (&v)[kValues]
    ) const {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            if (first + i >= slots.count) continue;
            const float4& one = slots_[i];
            v[0] += one.x, v[1] += one.y, v[2] += one.z, v[3] += one.w;
        }
    }

    float4 slots_[kSlots];
    float inputs_[kInputs];
    Halves halves_;
};

struct Factors {
    Halves svh;
    float bias[kValues];

    __device__ __forceinline__ void load(const FinishPart& part, int first) {
        svh = Halves(part.svh + first);
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
    float svh[kValues];
    factors.svh.to_floats(svh);
    transform(v, lane);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        v[i] = fmaf(v[i] * kNormalize, svh[i], factors.bias[i]);
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

#endif  // __CUDACC__

}  // namespace exl::cuda::trellis

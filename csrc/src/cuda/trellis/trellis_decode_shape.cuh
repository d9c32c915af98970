// Sizes of an instance of the decode kernel (trellis_decode.cuh).
#pragma once

#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_work.cuh"

namespace exl::cuda::trellis {

constexpr int kDecodeWarps = 8;  // of a block; fewer where it has less shared memory
constexpr int kItemSteps = 2;    // of an item, half a unit
constexpr int kSumBuffers = 2;   // of column groups whose sums are not all there yet
constexpr int kEarlyStages = 2;  // filled with codes before the previous kernel has ended

// Shared memory of a thread block: two blocks fit in the 228 KiB of a multiprocessor, with 1 KiB
// reserved and less than 1 KiB of static memory for each. Smaller blocks ask for more than a third:
// three on one multiprocessor would leave another one with one.
constexpr int kDecodeBytes = (228 << 10) / kDecodeBlocks - 2048;
constexpr int kLeastDecodeBytes = (228 << 10) / (kDecodeBlocks + 1);

// Shape of one instance: up to 4 rows of integers (MUL1), or up to 8 of float16 numbers. `is_own`: it
// prepares its inputs (trellis_own_inputs.cuh), which are integers.
template <int kWordsOfTile, int kBook, bool has_integers, bool is_own = false>
struct DecodeShape {
    static constexpr int kTileWords = kWordsOfTile, kCodebook = kBook;
    static constexpr bool kHasIntegers = has_integers, kIsOwn = is_own;
    static constexpr int kCodeBytes = kItemSteps * step_bytes(kTileWords);  // of an item
    static constexpr int kInputBytes = kItemSteps * (kHasIntegers ? 256 : 512);
    static constexpr int kStageBytes = kCodeBytes + (kIsOwn ? 0 : kInputBytes);
    static constexpr int kRows = kHasIntegers ? 4 : 8;
    static constexpr int kSums = kRows * kUnitColumns;
    static constexpr int kSumBytes = kSumBuffers * kSums * 4;
    // As many stages as fit in the shared memory of a block, but no more than hide the latency.
    static constexpr int kFitting =
        (kDecodeBytes / kDecodeWarps - kSumBytes) / (kCodeBytes + kInputBytes);
    static constexpr int kStages = kFitting < 4 ? kFitting : 4;
    static constexpr int kWarpBytes = kStages * kStageBytes + kSumBytes;
    static_assert(kStages >= kEarlyStages);
};

// Shared memory of a block that prepares its own inputs (trellis_own_inputs.cuh).
template <class Shape>
constexpr int64_t own_bytes(int parts, int k_units, int m) {
    const int64_t of_units = static_cast<int64_t>(parts) * k_units * m * (256 + 8);
    const int64_t of_warps = Shape::kWarpBytes + 4 * m;
    return kDecodeWarps * of_warps + of_units;
}

}  // namespace exl::cuda::trellis

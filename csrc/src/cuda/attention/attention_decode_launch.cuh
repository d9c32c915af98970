// Launch of attention_decode_kernel.cuh: size of shared memory, warps per block, and number of
// blocks that split the keys of a sequence.
#pragma once

#include <algorithm>

#include "cuda/attention/attention_decode_kernel.cuh"

namespace exl::cuda {

// Pipeline stages of a warp, for a number of work items (attention.cu).
int decode_stages(int64_t items, const DeviceInfo& info);

// Shared memory of a thread block.
template <class Shape, int width>
int decode_bytes(int warps, int stages) {
    const int staged = warps * stages * Shape::kStepBytes;
    const int result = warps * Shape::kQueries * (width + 4) * 4;
    return Shape::kStaged + (staged > result ? staged : result);
}

// Reduces stages, then warps, until a thread block fits.
template <class Shape, int width>
void fit_decode(int& warps, int& stages, const DeviceInfo& info) {
    const auto is_large = [&] {
        return decode_bytes<Shape, width>(warps, stages) > info.shared_per_block;
    };
    while (stages > 1 && is_large()) --stages;
    while (warps > 1 && is_large()) warps /= 2;
}

template <int key_type, int value_type, int width, int tiles, bool is_invariant>
cudaError_t launch_decode_kernel(
    const AttentionParams& params, const DeviceInfo& info, int warps, int items, void* stream
) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    const int bytes = decode_bytes<Shape, width>(warps, params.stages);
    const dim3 grid(
        static_cast<unsigned>(params.splits), static_cast<unsigned>(params.kv_heads),
        static_cast<unsigned>(items)
    );
    // Add a producer warp if there are enough registers for it.
    if constexpr (is_codes(key_type) && width * tiles <= 256) {
        const bool has_producer =
            info.capability == 90 && params.d == width && 1 << params.page_bits >= Shape::kKeys;
        if (has_producer) {
            return launch(
                decode_kernel<key_type, value_type, width, tiles, true, is_invariant>, grid,
                dim3((warps + 1) * kWarp), bytes, stream, params
            );
        }
    }
    return launch(
        decode_kernel<key_type, value_type, width, tiles, false, is_invariant>, grid,
        dim3(warps * kWarp), bytes, stream, params
    );
}

inline void set_workspace(AttentionParams& params, const AttentionSize& size) {
    params.counters = static_cast<unsigned*>(size.workspace);
    params.partials = reinterpret_cast<float*>(params.counters + kCounters);
}

// Whether blocks run the code for new rows once before the wait (kWarmUpRows in common.cuh).
inline bool warms_up(const AttentionParams& params, const DeviceInfo& info) {
    return params.new_rows.slots != nullptr && params.rows <= kWarmUpRows && info.capability >= 90;
}

// Warps of a block in the batch-invariant mode, which are the chains of a partition: types and device
// decide alone. Also sets the number of stages.
template <int key_type, int value_type, int width>
int invariant_warps(int& stages, const DeviceInfo& info) {
    int warps = kDecodeWarps;
    stages = kMaxStages;
    fit_decode<DecodeShape<key_type, value_type, width, 2>, width>(warps, stages, info);
    return warps;
}

// Batch-invariant mode: splits are partitions. A launch has as many tiles of rows as the workspace can hold partial results of.
template <int key_type, int value_type, int width, int tiles>
cudaError_t launch_partitions(AttentionParams params, const AttentionSize& size, void* stream) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    set_workspace(params, size);
    const int warps = invariant_warps<key_type, value_type, width>(params.stages, info);
    params.warms_up = warms_up(params, info);
    const int tile_rows = Shape::kQueries / params.group;
    const int most_rows = std::min(size.max_rows, kDecodeRows);
    params.row_tiles = static_cast<int>(ceil_div(most_rows, tile_rows));
    const int64_t items = static_cast<int64_t>(size.seqs) * params.row_tiles;
    params.splits = partition_of(size.max_keys > 0 ? size.max_keys - 1 : 0) + 1;
    const int64_t item_floats =
        static_cast<int64_t>(params.splits) * params.kv_heads * Shape::kQueries * (width + 2);
    const int64_t capacity = (size.workspace_bytes - kCounters * 4) / 4;
    constexpr int64_t kMaxGrid = 65535;
    const int64_t most = std::min({capacity / item_floats, kCounters / params.kv_heads, kMaxGrid});
    if (most < 1) return cudaErrorInvalidValue;
    for (int64_t first = 0; first < items; first += most) {
        params.first_item = static_cast<int>(first);
        const cudaError_t error = launch_decode_kernel<key_type, value_type, width, tiles, true>(
            params, info, warps, static_cast<int>(std::min<int64_t>(most, items - first)), stream
        );
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

template <int key_type, int value_type, int width, int tiles>
cudaError_t launch_decode(AttentionParams params, const AttentionSize& size, void* stream) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    set_workspace(params, size);
    const int tile_rows = Shape::kQueries / params.group;
    const int most_rows = size.max_rows < kDecodeRows ? size.max_rows : kDecodeRows;
    params.row_tiles = static_cast<int>(ceil_div(most_rows, tile_rows));
    const int64_t items = static_cast<int64_t>(size.seqs) * params.row_tiles * params.kv_heads;
    // Blocks with many warps leave few partial results to add. If only one such block fits on a
    // multiprocessor and there are more work items than multiprocessors, blocks are half as large:
    // the end of one then overlaps with the start of another.
    int warps = kDecodeWarps;
    params.stages = decode_stages(items, info);
    const bool fits_twice =
        2 * decode_bytes<Shape, width>(warps, kMaxStages) <= info.shared_per_block;
    if (items > info.multiprocessors && !fits_twice) warps /= 2;
    fit_decode<Shape, width>(warps, params.stages, info);
    const int bytes = decode_bytes<Shape, width>(warps, params.stages);
    const int by_registers = (width * tiles <= 128 ? 16 : 8) / warps;
    const int by_shared = (info.shared_per_block + 1024) / (bytes + 1024);
    const int resident = by_shared < by_registers ? by_shared : by_registers;

    // Split into as many blocks as can be resident on the device. If that leaves more than a fifth
    // of their slots empty, launch twice as many blocks.
    const int64_t resident_blocks = static_cast<int64_t>(info.multiprocessors) * resident;
    int64_t splits = resident_blocks / items;
    if (splits * items * 5 < resident_blocks * 4) splits = ceil_div(2 * resident_blocks, items);
    const int64_t most_steps = ceil_div(size.max_keys, Shape::kKeys) + 1;
    const int64_t useful = ceil_div(most_steps, warps < kMinSteps ? warps : kMinSteps);
    if (splits > useful) splits = useful;
    if (splits > kMaxSplits) splits = kMaxSplits;
    const int64_t capacity = (size.workspace_bytes - kCounters * 4) / 4;
    const int64_t floats_per_split = items * Shape::kQueries * (width + 2);
    if (splits * floats_per_split > capacity) splits = capacity / floats_per_split;
    if (items > kCounters || splits < 1) splits = 1;
    params.splits = static_cast<int>(splits);
    params.warms_up = warms_up(params, info);
    return launch_decode_kernel<key_type, value_type, width, tiles, false>(
        params, info, warps, size.seqs * params.row_tiles, stream
    );
}

template <int key_type, int value_type, int width, int tiles, bool is_invariant>
cudaError_t decode_in_mode(const AttentionParams& params, const AttentionSize& size, void* stream) {
    if constexpr (is_invariant) {
        return launch_partitions<key_type, value_type, width, tiles>(params, size, stream);
    } else {
        return launch_decode<key_type, value_type, width, tiles>(params, size, stream);
    }
}

// Uses one query tile if it holds all vectors, or if two would not fit in the registers.
template <int key_type, int value_type, bool is_invariant = false>
cudaError_t decode_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    constexpr bool kMode = is_invariant;
    const bool two = params.group > 8 || (params.group * size.max_rows > 8 && params.d <= 128);
    if (params.d <= 64) {
        return two ? decode_in_mode<key_type, value_type, 64, 2, kMode>(params, size, stream)
                   : decode_in_mode<key_type, value_type, 64, 1, kMode>(params, size, stream);
    }
    if (params.d <= 128) {
        return two ? decode_in_mode<key_type, value_type, 128, 2, kMode>(params, size, stream)
                   : decode_in_mode<key_type, value_type, 128, 1, kMode>(params, size, stream);
    }
    return two ? decode_in_mode<key_type, value_type, 256, 2, kMode>(params, size, stream)
               : decode_in_mode<key_type, value_type, 256, 1, kMode>(params, size, stream);
}

}  // namespace exl::cuda

// Batch-invariant mode: attention of many query rows of a sequence, with the bits of the decode
// kernel.
//
// Used for   Sequences of more than kDecodeRows rows, heads of up to 256 elements.
// Floor      4 d operations for each pair of a query and a key that it sees, at the rate of
//            mma.sync. Fragments of keys and values come from shared memory, and each serves two
//            products (heads of 128): at the full rate of mma.sync they take all its bandwidth.
// Mapping    A block handles up to 64 to 256 query vectors (rows times query heads of the group) of
//            one kv head, 8 to 32 for each of its warps. It walks the keys that they see in tiles
//            that all warps share. A warp runs the steps of the decode kernel (attend_steps).
// Order      The decode kernel's: a running softmax over the steps of a chain, chains merged into
//            partitions, partitions into the row's result (attention_decode.cuh). The results of
//            the chain and the partition are in registers, the row's in shared memory.
#pragma once

#include "cuda/attention/attention_decode_launch.cuh"

namespace exl::cuda {

template <int key_type, int value_type, int width>
struct PromptShape {
    using Decode = DecodeShape<key_type, value_type, width, 1>;
    // Most warps of a block. With 16 for heads of 128, each with half as many queries, fragments are
    // loaded twice as often, which was not faster.
    static constexpr int kWarps = width > 64 ? 8 : 16;
    static constexpr int kTiles = width > 128 ? 1 : 2;
    static constexpr int kQueries = 8 * kTiles;          // per warp
    static constexpr int kKeys = width > 128 ? 32 : 64;  // per tile
    static constexpr int kTogether = 32;                 // keys whose steps are interleaved
    static constexpr int kSteps = kTogether / Decode::kKeys;
    static constexpr int kKeyBytes = kKeys * staged_bytes(key_type, width);
    static constexpr int kStageBytes = kKeyBytes + kKeys * staged_bytes(value_type, width);
    // Queries, then the rows' results, of one warp.
    static constexpr int kRowBytes = kQueries * (width + 4) * 4;
    static constexpr int bytes(int warps, int stages) {
        return warps * kRowBytes + stages * kStageBytes;
    }
};

// Rows and keys of one block.
struct PromptWork {
    int first_row;  // in the pass
    int rows;
    int vectors;  // rows times query heads of the group
    int first_position;
    int begin_key, end_key;  // keys that any row sees
};

__device__ __forceinline__ PromptWork prompt_work(const AttentionParams& params, int queries) {
    PromptWork work = {};
    const int seq = blockIdx.z, tile_rows = queries / params.group;
    const int seq_begin = uniform(params.row_starts[seq]);
    const int seq_rows = uniform(params.row_starts[seq + 1]) - seq_begin;
    // Blocks with the last rows start first: these rows see the most keys.
    const int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * tile_rows;
    if (seq_rows <= kDecodeRows || first >= seq_rows) return work;
    work.first_row = seq_begin + first;
    work.rows = min(tile_rows, seq_rows - first);
    work.vectors = work.rows * params.group;
    work.first_position = uniform(params.past_lens[seq]) + first;
    work.end_key = work.first_position + work.rows;
    work.begin_key = params.window > 0 ? max(0, work.first_position - params.window + 1) : 0;
    return work;
}

// True if a chain of a partition ends before `key`, one of its keys. Lengths are powers of two.
__device__ __forceinline__ bool ends_chain(int key, int partition, int chains) {
    const int length = chain_keys(partition, chains), offset = key - partition_begin(partition);
    const bool has_end = partition < kMaxSplits - 1 || offset <= length * (chains - 1);
    return has_end && (offset & (length - 1)) == 0;
}

// Copies of tiles of keys and values to shared memory, by all warps of the block.
template <int key_type, int value_type, int width>
struct TileCopies {
    using Shape = PromptShape<key_type, value_type, width>;
    const AttentionParams& params;
    const PromptWork& work;
    uint8_t* staged;
    int kv_head, warp, warps, lane;

    // The warps take turns at chunks of 16 keys and of 16 values.
    __device__ __forceinline__ void start(int tile, int stage) const {
        const int32_t* pages =
            params.page_table + static_cast<int64_t>(blockIdx.z) * params.table_stride;
        uint8_t* to = staged + stage * Shape::kStageBytes;
        for (int i = warp; i < 2 * Shape::kKeys / kChunk; i += warps) {
            const int c = i / 2, position = tile * Shape::kKeys + c * kChunk;
            if (position >= work.end_key || position + kChunk <= work.begin_key) continue;
            const int64_t row = cache_row(params, pages, kv_head, position);
            if (i % 2 == 0) {
                copy_rows<key_type, width>(
                    to + c * kChunk * staged_bytes(key_type, width), params.key_cache, row,
                    params.d, lane
                );
            } else {
                copy_rows<value_type, width>(
                    to + Shape::kKeyBytes + c * kChunk * staged_bytes(value_type, width),
                    params.value_cache, row, params.d, lane
                );
            }
        }
    }

    // Zeroes the values of a tile that no row sees. The caller synchronizes.
    __device__ __forceinline__ bool clear_values(uint8_t* values, int first_key) const {
        if (first_key >= work.begin_key && first_key + Shape::kKeys <= work.end_key) return false;
        clear_hidden(
            values, staged_bytes(value_type, width), Shape::kKeys, work.begin_key - first_key,
            work.end_key - first_key, threadIdx.x, blockDim.x
        );
        return true;
    }
};

// Results of a warp's queries over whole chains. A lane holds queries 2 t and 2 t + 1 of each tile,
// as in SoftmaxState, with the weights of all lanes.
template <int tiles>
struct MergedStats {
    float peak[tiles][2];
    float weight[tiles][2];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
            peak[n][0] = peak[n][1] = -INFINITY;
            weight[n][0] = weight[n][1] = 0.0f;
        }
    }
};

// Merges the chain that ends here into the result of its partition, and starts a new one.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void end_chain(
    SoftmaxState<width, tiles>& chain, MergedStats<tiles>& stats,
    float (&sums)[width / 16][tiles][4]
) {
    using Values = ValueFragments<value_type, width>;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        MergeFactors by[2], by_units[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float weight = chain.weight[n][j];
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2) {
                weight += __shfl_xor_sync(0xffffffffu, weight, step);
            }
            by[j] = merge_factors(stats.peak[n][j], chain.peak[n][j] - weight_lift(value_type));
            stats.weight[n][j] = merged(stats.weight[n][j], weight, by[j]);
            // The units of sums are powers of two, so that these products are exact.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                by_units[j][h] = {by[j].before, by[j].next * Values::factor(h)};
            }
        }
#pragma unroll
        for (int tile = 0; tile < width / 16; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = sums[tile][n][i];
                sum = merged(sum, chain.sums[tile][n][i], by_units[i % 2][i / 2]);
            }
        }
    }
    chain.start();
}

// Merges the partition that ends here into the rows' results, whose sums are in `rows` with those
// of a lane in every 32nd float4, and starts a new one.
template <int width, int tiles>
__device__ __forceinline__ void end_partition(
    MergedStats<tiles>& total, float4* rows, MergedStats<tiles>& stats,
    float (&sums)[width / 16][tiles][4], int lane
) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        MergeFactors by[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            by[j] = merge_factors(total.peak[n][j], stats.peak[n][j]);
            total.weight[n][j] = merged(total.weight[n][j], stats.weight[n][j], by[j]);
        }
#pragma unroll
        for (int tile = 0; tile < width / 16; ++tile) {
            float4& sum = rows[(tile * tiles + n) * kWarp + lane];
            float (&next)[4] = sums[tile][n];
            const float4 before = sum;
            sum = make_float4(
                merged(before.x, next[0], by[0]), merged(before.y, next[1], by[1]),
                merged(before.z, next[2], by[0]), merged(before.w, next[3], by[1])
            );
#pragma unroll
            for (int i = 0; i < 4; ++i) next[i] = 0.0f;
        }
    }
    stats.start();
}

// Divides the rows' results by their weights and stores them as rows of width + 4 elements, in the
// memory that they are in.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void finish_rows(
    const AttentionParams& params, const MergedStats<tiles>& total, float4* rows, int kv_head,
    int first_vector, int lane
) {
    using Values = ValueFragments<value_type, width>;
    float4 sums[width / 16][tiles];
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int v = first_vector + 8 * n + lane % 4 * 2 + j;
            const int head = kv_head * params.group + v % params.group;
            factor[j] = final_factor(params, head, total.peak[n][j], total.weight[n][j]);
        }
#pragma unroll
        for (int tile = 0; tile < width / 16; ++tile) {
            const float4 x = rows[(tile * tiles + n) * kWarp + lane];
            sums[tile][n] = make_float4(
                finished(x.x, factor[0]), finished(x.y, factor[1]), finished(x.z, factor[0]),
                finished(x.w, factor[1])
            );
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        auto* to = reinterpret_cast<float*>(rows) + (8 * n + lane % 4 * 2) * (width + 4);
#pragma unroll
        for (int tile = 0; tile < width / 16; ++tile) {
            const int low = Values::element(tile, lane / 4, 0);
            const int high = Values::element(tile, lane / 4, 1);
            to[low] = sums[tile][n].x, to[width + 4 + low] = sums[tile][n].y;
            to[high] = sums[tile][n].z, to[width + 4 + high] = sums[tile][n].w;
        }
    }
    __syncwarp();
}

// Walks the tiles of keys, with the results of this warp's queries in `rows` and `total`.
template <int key_type, int value_type, int width>
struct PromptWarp {
    using Shape = PromptShape<key_type, value_type, width>;
    static constexpr int kTiles = Shape::kTiles;
    uint32_t q[kTiles][width / 16][2];
    Means<kTiles> means = {};
    uint32_t minus_middle[4] = {};
    int positions[kTiles][2];
    int first_position, last_position;  // of this warp's rows; last is -1 if it has none

    // `rows` is this warp's part of shared memory.
    __device__ __forceinline__ void start(
        const AttentionParams& params, const PromptWork& work, uint8_t* rows, int kv_head,
        int first_vector, int lane
    ) {
        for (int i = 0; i < Shape::kQueries; ++i) {
            const int v = first_vector + i;
            HeadRow<width> x = {};
            if (v < work.vectors) {
                const int64_t row = work.first_row + v / params.group;
                const int head = kv_head * params.group + v % params.group;
                const int64_t at = row * params.q_stride + static_cast<int64_t>(head) * params.d;
                const int bytes = params.dtype == kF16 ? 2 : 4;
                const auto* from = static_cast<const uint8_t*>(params.q) + at * bytes;
                load_row(x, from, params.dtype, params.d, lane);
                if (is_codes(key_type)) hadamard_row(x, params.d, lane);
            }
            store_row(rows + i * (width + 8) * 2, x, kF16, width, lane);
        }
        __syncwarp();
        load_queries<key_type, width, kTiles>(q, rows, lane);
        if constexpr (is_codes(key_type)) compute_means<key_type, width, kTiles>(means, q, lane);
        __syncwarp();
        if constexpr (is_codes(value_type)) {
            ValueFragments<value_type, width>::minus_middle(minus_middle, rows, lane);
        }
        const auto position_of = [&](int v) {
            return work.first_position + min(v / params.group, work.rows - 1);
        };
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                positions[n][j] = position_of(first_vector + 8 * n + lane % 4 * 2 + j);
            }
        }
        first_position = position_of(first_vector);
        last_position =
            first_vector < work.vectors ? position_of(first_vector + Shape::kQueries - 1) : -1;
        __syncwarp();
    }

    __device__ __forceinline__ void attend(
        const AttentionParams& params, const uint8_t* keys, const uint8_t* values, int tile_key,
        SoftmaxState<width, kTiles>& chain, int lane
    ) const {
        constexpr int kTogether = Shape::kTogether;
#pragma unroll 1
        for (int i = 0; i < Shape::kKeys; i += kTogether) {
            const int first_key = tile_key + i;
            if (first_key > last_position) return;
            const bool is_hidden =
                params.window > 0 && first_key + kTogether <= first_position - params.window + 1;
            if (is_hidden) continue;
            const bool masked = first_key + kTogether - 1 > first_position ||
                                (params.window > 0 && first_key <= last_position - params.window);
            attend_steps<key_type, value_type, width, kTiles, Shape::kSteps>(
                params, keys + i * staged_bytes(key_type, width),
                values + i * staged_bytes(value_type, width), first_key, masked, positions, q,
                means, minus_middle, chain, lane
            );
        }
    }
};

template <int key_type, int value_type, int width>
__global__ void __launch_bounds__(
    PromptShape<key_type, value_type, width>::kWarps* kWarp, 1
) prompt_kernel(const AttentionParams params) {
    using Shape = PromptShape<key_type, value_type, width>;
    constexpr int kTiles = Shape::kTiles, kKeys = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    wait_for_inputs();
    const int warps = blockDim.x / kWarp;
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const int kv_head = blockIdx.x;
    const PromptWork work = prompt_work(params, warps * Shape::kQueries);
    if (work.rows == 0) return;
    const int first_vector = warp * Shape::kQueries;
    uint8_t* rows = shared + warp * Shape::kRowBytes;
    auto* row_sums = reinterpret_cast<float4*>(rows);
    uint8_t* staged = shared + warps * Shape::kRowBytes;
    const int stages = params.stages, begin = work.begin_key / kKeys;
    const int end = (work.end_key + kKeys - 1) / kKeys;
    if (params.d != width) {
        clear(staged, stages * Shape::kStageBytes, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const TileCopies<key_type, value_type, width> copies = {params, work,  staged, kv_head,
                                                            warp,   warps, lane};
    for (int stage = 0; stage < stages - 1; ++stage) {
        if (begin + stage < end) copies.start(begin + stage, stage);
        commit_copies();
    }
    PromptWarp<key_type, value_type, width> own;
    own.start(params, work, rows, kv_head, first_vector, lane);

    SoftmaxState<width, kTiles> chain;
    chain.start();
    MergedStats<kTiles> part, total;
    part.start();
    total.start();
    float part_sums[width / 16][kTiles][4] = {};
    for (int i = lane; i < width / 16 * kTiles * kWarp; i += kWarp) {
        row_sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __syncwarp();
    int partition = partition_of(begin * kKeys);
    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
        if (stages > 2) {
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();  // also: all warps have finished the tile before
        const int ahead = tile + max(stages, 2) - 1 - (stages == 1);
        if (ahead < end) copies.start(ahead, stage == 0 ? stages - 1 : stage - 1);
        commit_copies();
        if (stages == 1) {
            wait_copies<0>();
            __syncthreads();
        }
        const int first_key = tile * kKeys, next_key = first_key + kKeys;
        uint8_t* keys = staged + stage * Shape::kStageBytes;
        uint8_t* values = keys + Shape::kKeyBytes;
        if (copies.clear_values(values, first_key)) __syncthreads();
        own.attend(params, keys, values, first_key, chain, lane);
        const bool is_last = tile + 1 == end;
        const bool ends_partition = is_last || next_key == partition_begin(partition + 1);
        if (ends_partition || ends_chain(next_key, partition, params.chains)) {
            end_chain<value_type, width, kTiles>(chain, part, part_sums);
        }
        if (ends_partition) {
            end_partition<width, kTiles>(total, row_sums, part, part_sums, lane);
            ++partition;
        }
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    wait_copies<0>();
    finish_rows<value_type, width, kTiles>(params, total, row_sums, kv_head, first_vector, lane);
    for (int i = 0; i < Shape::kQueries && first_vector + i < work.vectors; ++i) {
        HeadRow<width> x;
        load_row(x, rows + i * (width + 4) * 4, kF32, width, lane);
        if (is_codes(value_type)) hadamard_row(x, params.d, lane);
        const int v = first_vector + i;
        const int64_t row = work.first_row + v / params.group;
        const int head = kv_head * params.group + v % params.group;
        const int64_t at = row * params.out_stride + static_cast<int64_t>(head) * params.d;
        const int bytes = params.dtype == kF16 ? 2 : 4;
        store_row(static_cast<uint8_t*>(params.out) + at * bytes, x, params.dtype, params.d, lane);
    }
}

template <int key_type, int value_type, int width>
cudaError_t launch_prompt(AttentionParams params, const AttentionSize& size, void* stream) {
    using Shape = PromptShape<key_type, value_type, width>;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    int unused;
    params.chains = invariant_warps<key_type, value_type, width>(unused, info);
    int warps = Shape::kWarps;
    while (warps > 1 && Shape::bytes(warps, 1) > info.shared_per_block) warps /= 2;
    params.stages = kMaxStages;
    while (Shape::bytes(warps, params.stages) > info.shared_per_block) {
        if (--params.stages == 0) return cudaErrorInvalidValue;
    }
    const int tile_rows = warps * Shape::kQueries / params.group;
    const dim3 grid(
        static_cast<unsigned>(params.kv_heads),
        static_cast<unsigned>(ceil_div(size.max_rows, tile_rows)), static_cast<unsigned>(size.seqs)
    );
    return launch(
        prompt_kernel<key_type, value_type, width>, grid, dim3(warps * kWarp),
        Shape::bytes(warps, params.stages), stream, params
    );
}

template <int key_type, int value_type>
cudaError_t prompt_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    if (params.d <= 64) return launch_prompt<key_type, value_type, 64>(params, size, stream);
    if (params.d <= 128) return launch_prompt<key_type, value_type, 128>(params, size, stream);
    return launch_prompt<key_type, value_type, 256>(params, size, stream);
}

// Long sequences in the prompt kernel, the others in the decode kernel.
template <int key_type, int value_type>
cudaError_t invariant_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    if (size.max_rows > kDecodeRows) {
        const cudaError_t error = prompt_with<key_type, value_type>(params, size, stream);
        const bool is_only_long = size.seqs == 1 && params.rows > kDecodeRows;
        if (error != cudaSuccess || is_only_long) return error;
    }
    return decode_with<key_type, value_type, true>(params, size, stream);
}

}  // namespace exl::cuda

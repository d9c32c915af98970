// The kernel of attention_decode.cuh's plan, and its launch.
#pragma once

#include "attention_decode.cuh"

namespace exl::cuda {

constexpr int kDecodeWarps = 4;

// Steps of 32 keys where a row of codes is short, so that the bookkeeping of a step is paid for.
template <int key_type, int value_type>
constexpr int kStepChunks = key_type == kU8 && value_type == kU8 ? 2 : 1;

template <int key_type, int value_type, int width, int tiles>
struct DecodeShape {
    static constexpr int kQueries = 8 * tiles;
    static constexpr int kChunks = kStepChunks<key_type, value_type>;
    static constexpr int kKeys = kChunks * kChunk;  // of a step
    static constexpr int kKeyBytes = kKeys * staged_bytes(key_type, width);
    static constexpr int kStepBytes = kKeyBytes + kKeys * staged_bytes(value_type, width);
    static constexpr int kQueryStride = width + 8;  // float16
    static constexpr int kQueryBytes = kQueries * kQueryStride * 2;
    static constexpr int kResultStride = width + 4;  // float32
    // Peaks and weights of queries, of each warp or of each split.
    static constexpr int kStatBytes = kMaxSplits * kQueries * 4;
    static constexpr int result_bytes(int warps) { return warps * kQueries * kResultStride * 4; }
};

// A warp's running result: peak and weight of the queries 2 t, 2 t + 1 of each tile (the weight of
// this lane's keys only), and sums of values.
template <int width, int tiles>
struct Running {
    float peak[tiles][2];
    float weight[tiles][2];
    float sums[width / 16][tiles][4];
};

// One step of keys, staged at `rows`; positions of the queries decide what they see, where `masked`.
template <int key_type, int value_type, int width, int tiles>
__device__ __forceinline__ void attend_step(
    const AttentionParams& params, const uint8_t* rows, int first_key, bool masked,
    const int (&positions)[tiles][2], const uint32_t (&q)[tiles][width / 16][2],
    Running<width, tiles>& run, int lane
) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kChunks = Shape::kChunks;
    float s[kChunks][tiles][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        Keys::for_each(rows + c * kChunk * Keys::kStride, lane, [&](int k, const uint32_t (&a)[4]) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) mma_16816(s[c][n], a, q[n][k][0], q[n][k][1]);
        });
    }
    float peak[tiles][2];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            peak[n][j] = run.peak[n][j];
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& x = s[c][n][2 * h + j];
                    x = score_of(x, params.scale, params.softcap);
                    if (masked) {
                        const int age = positions[n][j] - (first_key + c * kChunk + lane / 4 + 8 * h);
                        if (age < 0 || (params.window > 0 && age >= params.window)) x = -INFINITY;
                    }
                    peak[n][j] = fmaxf(peak[n][j], x);
                }
            }
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2) {
                peak[n][j] = fmaxf(peak[n][j], __shfl_xor_sync(0xffffffffu, peak[n][j], step));
            }
            moved |= peak[n][j] != run.peak[n][j];
        }
    }
    if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // A peak of -infinity has no sums yet; subtracting it from itself would invent NaN.
                const float factor =
                    peak[n][j] == -INFINITY ? 1.0f : exp2_of(run.peak[n][j] - peak[n][j]);
                run.peak[n][j] = peak[n][j];
                run.weight[n][j] *= factor;
#pragma unroll
                for (int tile = 0; tile < width / 16; ++tile) {
                    run.sums[tile][n][j] *= factor;
                    run.sums[tile][n][2 + j] *= factor;
                }
            }
        }
    }
    uint32_t p[kChunks][tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float base[2] = {peak[n][0] == -INFINITY ? 0.0f : peak[n][0],
                               peak[n][1] == -INFINITY ? 0.0f : peak[n][1]};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x = exp2_of(s[c][n][2 * h] - base[0]);
                const float y = exp2_of(s[c][n][2 * h + 1] - base[1]);
                run.weight[n][0] += x;
                run.weight[n][1] += y;
                const uint32_t two = bits_of(__floats2half2_rn(x, y));
                asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                             : "=r"(p[c][n][h]) : "r"(two));
            }
        }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const uint8_t* values = rows + Shape::kKeyBytes + c * kChunk * Values::kStride;
        Values::for_each(values, lane, [&](int tile, const uint32_t (&a)[4]) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) mma_16816(run.sums[tile][n], a, p[c][n][0], p[c][n][1]);
        });
    }
}

__device__ __forceinline__ void wait_for_stage(int stages) {
    if (stages >= 3) {
        wait_copies<2>();
    } else if (stages == 2) {
        wait_copies<1>();
    } else {
        wait_copies<0>();
    }
    __syncwarp();
}

template <int key_type, int value_type, int width, int tiles>
__global__ void __launch_bounds__(kDecodeWarps * kWarp) decode_kernel(const AttentionParams params) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kQueries = Shape::kQueries;
    constexpr int kStep = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ bool is_last;
    let_next_begin();
    wait_for_inputs();
    const int warps = blockDim.x / kWarp;
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int seq = blockIdx.z / params.row_tiles;
    const int kv_head = blockIdx.y;
    const int d = params.d;

    // Which rows, and which keys they see.
    const int tile_rows = kQueries / params.group;
    const int seq_begin = params.row_starts[seq];
    const int seq_rows = params.row_starts[seq + 1] - seq_begin;
    const int first_row = static_cast<int>(blockIdx.z) % params.row_tiles * tile_rows;
    if (seq_rows > kFewRows || first_row >= seq_rows) return;
    const int rows = min(tile_rows, seq_rows - first_row);
    const int first_position = params.past_lens[seq] + first_row;
    const int end_key = first_position + rows;
    const int begin_key = params.window > 0 ? max(0, first_position - params.window + 1) : 0;

    // This block's share of the steps.
    const int steps_begin = begin_key / kStep;
    const int steps = (end_key + kStep - 1) / kStep - steps_begin;
    const int splits = min(params.splits, (steps + warps - 1) / warps);
    const int split = blockIdx.x;
    if (split >= splits) return;
    const int begin = steps_begin + static_cast<int>(static_cast<int64_t>(steps) * split / splits);
    const int end = steps_begin + static_cast<int>(static_cast<int64_t>(steps) * (split + 1) / splits);

    uint8_t* queries = shared;
    float* stats = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
    uint8_t* staged_all = shared + Shape::kQueryBytes + Shape::kStatBytes;
    uint8_t* staged = staged_all + warp * params.stages * Shape::kStepBytes;
    if (d != width) {
        clear(staged, params.stages * Shape::kStepBytes, lane, kWarp);
        __syncwarp();
    }
    const int32_t* pages = params.page_table + static_cast<int64_t>(seq) * params.table_stride;
    const auto copy_step = [&](int step, int stage) {
        if (step < end) {
            uint8_t* to = staged + stage * Shape::kStepBytes;
#pragma unroll
            for (int c = 0; c < Shape::kChunks; ++c) {
                const int position = step * kStep + c * kChunk;
                if (position >= end_key || position + kChunk <= begin_key) continue;
                copy_chunk<key_type, width>(
                    to + c * kChunk * Keys::kStride,
                    chunk_rows<key_type>(params, params.key_cache, pages, kv_head, position), d, lane
                );
                copy_chunk<value_type, width>(
                    to + Shape::kKeyBytes + c * kChunk * Values::kStride,
                    chunk_rows<value_type>(params, params.value_cache, pages, kv_head, position), d,
                    lane
                );
            }
        }
        commit_copies();
    };
    int next = begin + warp;
    for (int stage = 0; stage + 1 < params.stages; ++stage, next += warps) copy_step(next, stage);

    // Queries as float16 to shared memory, from there as fragments to registers.
    const int vectors = rows * params.group;
    for (int v = warp; v < kQueries; v += warps) {
        Row x = {};
        if (v < vectors) {
            const int64_t row = seq_begin + first_row + v / params.group;
            const int head = kv_head * params.group + v % params.group;
            const int64_t at = row * params.q_stride + static_cast<int64_t>(head) * d;
            const int bytes = params.dtype == kF16 ? 2 : 4;
            load_row(x, static_cast<const uint8_t*>(params.q) + at * bytes, params.dtype, d, lane);
            if (is_codes(key_type)) rotate_row(x, d, lane);
        }
        store_row(queries + v * Shape::kQueryStride * 2, x, kF16, width, lane);
    }
    __syncthreads();
    uint32_t q[tiles][width / 16][2];
    int positions[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const auto* row = reinterpret_cast<const __half*>(queries) +
                          (8 * n + lane / 4) * Shape::kQueryStride;
#pragma unroll
        for (int k = 0; k < width / 16; ++k) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                q[n][k][r] =
                    bits_of(__halves2half2(row[Keys::query_element(k, lane % 4, r, 0)],
                                           row[Keys::query_element(k, lane % 4, r, 1)]));
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int v = 8 * n + lane % 4 * 2 + j;
            positions[n][j] = first_position + min(v / params.group, rows - 1);
        }
    }

    Running<width, tiles> run;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            run.peak[n][j] = -INFINITY;
            run.weight[n][j] = 0.0f;
        }
#pragma unroll
        for (int tile = 0; tile < width / 16; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) run.sums[tile][n][i] = 0.0f;
        }
    }
    // Keys that all rows see need no masks.
    const int all_begin =
        params.window > 0 ? max(0, first_position + rows - params.window) : 0;
    int stage = 0;
    int free_stage = params.stages - 1;
    for (int step = begin + warp; step < end; step += warps, next += warps) {
        copy_step(next, free_stage);
        wait_for_stage(params.stages);
        uint8_t* rows_at = staged + stage * Shape::kStepBytes;
        const int first_key = step * kStep;
        if (first_key < begin_key || first_key + kStep > end_key) {
            clear_hidden(rows_at + Shape::kKeyBytes, Values::kStride, kStep, begin_key - first_key,
                         end_key - first_key, lane, kWarp);
            __syncwarp();
        }
        const bool masked = first_key < all_begin || first_key + kStep > first_position + 1;
        attend_step<key_type, value_type, width, tiles>(
            params, rows_at, first_key, masked, positions, q, run, lane
        );
        __syncwarp();
        stage = stage + 1 == params.stages ? 0 : stage + 1;
        free_stage = free_stage + 1 == params.stages ? 0 : free_stage + 1;
    }
    wait_copies<0>();
    __syncthreads();

    // The warps' results, side by side.
    float* results = reinterpret_cast<float*>(staged_all);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float weight = run.weight[n][j];
#pragma unroll
            for (int step = 4; step < kWarp; step *= 2) {
                weight += __shfl_xor_sync(0xffffffffu, weight, step);
            }
            const int v = 8 * n + lane % 4 * 2 + j;
            if (lane < 4) {
                stats[(2 * warp) * kQueries + v] = run.peak[n][j];
                stats[(2 * warp + 1) * kQueries + v] = weight;
            }
            float* to = results + (warp * kQueries + v) * Shape::kResultStride;
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
                to[Values::element(tile, lane / 4, 0)] = run.sums[tile][n][j];
                to[Values::element(tile, lane / 4, 1)] = run.sums[tile][n][2 + j];
            }
        }
    }
    __syncthreads();
    const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + kv_head;
    float* partials = params.partials + item * params.splits * kQueries * (width + 2);
    float* partial_stats = partials + static_cast<int64_t>(params.splits) * kQueries * width;
    for (int v = warp; v < vectors; v += warps) {
        float peak = -INFINITY;
        for (int w = 0; w < warps; ++w) peak = fmaxf(peak, stats[2 * w * kQueries + v]);
        const float base = peak == -INFINITY ? 0.0f : peak;
        float factors[kDecodeWarps];
        float weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) {
            factors[w] = 0.0f;
            if (w >= warps) continue;
            factors[w] = exp2_of(stats[2 * w * kQueries + v] - base);
            weight += factors[w] * stats[(2 * w + 1) * kQueries + v];
        }
        const float by = splits == 1 ? 1.0f / weight : 1.0f;
        for (int i = 4 * lane; i < width; i += 4 * kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                if (w >= warps) continue;
                const float4 x = *reinterpret_cast<const float4*>(
                    results + (w * kQueries + v) * Shape::kResultStride + i
                );
                sum.x += factors[w] * x.x;
                sum.y += factors[w] * x.y;
                sum.z += factors[w] * x.z;
                sum.w += factors[w] * x.w;
            }
            sum = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
            // Nobody else reads this query's results, and this lane has read what it overwrites.
            float* to = splits == 1 ? results + v * Shape::kResultStride
                                    : partials + (split * kQueries + v) * width;
            *reinterpret_cast<float4*>(to + i) = sum;
        }
        if (splits > 1 && lane == 0) {
            *reinterpret_cast<float2*>(partial_stats + (split * kQueries + v) * 2) =
                make_float2(peak, weight);
        }
    }
    if (splits > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(params.counters + item, 1u) == static_cast<unsigned>(splits) - 1;
            if (is_last) params.counters[item] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        // Shares of the splits, then their sum.
        for (int v = warp; v < vectors; v += warps) {
            float2 mine[kMaxSplits / kWarp];
            float peak = -INFINITY;
#pragma unroll
            for (int i = 0; i < kMaxSplits / kWarp; ++i) {
                const int from = i * kWarp + lane;
                mine[i] = make_float2(-INFINITY, 0.0f);
                if (from < splits) {
                    mine[i] = __ldcg(reinterpret_cast<const float2*>(partial_stats) +
                                     from * kQueries + v);
                }
                peak = fmaxf(peak, mine[i].x);
            }
            peak = warp_max(peak);
            const float base = peak == -INFINITY ? 0.0f : peak;
            float weight = 0.0f;
#pragma unroll
            for (int i = 0; i < kMaxSplits / kWarp; ++i) {
                mine[i].x = exp2_of(mine[i].x - base);
                weight += mine[i].x * mine[i].y;
            }
            weight = warp_sum(weight);
#pragma unroll
            for (int i = 0; i < kMaxSplits / kWarp; ++i) {
                const int from = i * kWarp + lane;
                if (from < splits) stats[from * kQueries + v] = mine[i].x / weight;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < vectors * (width / 4); i += blockDim.x) {
            const int v = i / (width / 4);
            const auto* from = reinterpret_cast<const float4*>(partials) + i;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int s = 0; s < splits; ++s) {
                const float4 x = __ldcg(from + s * (kQueries * width / 4));
                const float share = stats[s * kQueries + v];
                sum.x += share * x.x;
                sum.y += share * x.y;
                sum.z += share * x.z;
                sum.w += share * x.w;
            }
            *reinterpret_cast<float4*>(
                results + v * Shape::kResultStride + i % (width / 4) * 4
            ) = sum;
        }
    }
    __syncthreads();
    for (int v = warp; v < vectors; v += warps) {
        Row x;
        load_row(x, results + v * Shape::kResultStride, kF32, d, lane);
        if (is_codes(value_type)) rotate_row(x, d, lane);
        const int64_t row = seq_begin + first_row + v / params.group;
        const int head = kv_head * params.group + v % params.group;
        const int64_t at = row * params.out_stride + static_cast<int64_t>(head) * d;
        const int bytes = params.dtype == kF16 ? 2 : 4;
        store_row(static_cast<uint8_t*>(params.out) + at * bytes, x, params.dtype, d, lane);
    }
}

template <int key_type, int value_type, int width, int tiles>
cudaError_t launch_decode(AttentionParams params, const AttentionSize& size, void* stream) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    // Two steps ahead for each warp, two blocks or more on a multiprocessor; less where less fits.
    constexpr int kFixed = Shape::kQueryBytes + Shape::kStatBytes;
    const auto bytes_of = [&](int warps, int stages) {
        const int staged = warps * stages * Shape::kStepBytes;
        const int result = Shape::result_bytes(warps);
        return kFixed + (staged > result ? staged : result);
    };
    int warps = kDecodeWarps;
    params.stages = 3;
    while (params.stages > 2 && 2 * bytes_of(warps, params.stages) > info.shared_per_block) {
        --params.stages;
    }
    while (params.stages > 1 && bytes_of(warps, params.stages) > info.shared_per_block) {
        --params.stages;
    }
    while (warps > 1 && bytes_of(warps, params.stages) > info.shared_per_block) warps /= 2;
    const int bytes = bytes_of(warps, params.stages);
    const int resident = bytes > 0 && info.shared_per_block / bytes >= 4 ? 4
                         : info.shared_per_block / bytes >= 1 ? info.shared_per_block / bytes : 1;

    const int tile_rows = Shape::kQueries / params.group;
    const int most_rows = size.max_rows < kFewRows ? size.max_rows : kFewRows;
    params.row_tiles = static_cast<int>(ceil_div(most_rows, tile_rows));
    const int64_t items = static_cast<int64_t>(size.seqs) * params.row_tiles * params.kv_heads;
    // Enough blocks for every place on the device; where those do not come out even, twice as many.
    const int64_t places = static_cast<int64_t>(info.multiprocessors) * resident;
    int64_t splits = places / items;
    if (splits * items * 5 < places * 4) splits = ceil_div(2 * places, items);
    const int64_t most_steps = ceil_div(size.max_keys, Shape::kKeys) + 1;
    const int64_t useful = ceil_div(most_steps, warps);
    if (splits > useful) splits = useful;
    if (splits > kMaxSplits) splits = kMaxSplits;
    const int64_t room = (size.workspace_bytes - kCounters * 4) / 4;
    const int64_t each = items * Shape::kQueries * (width + 2);
    if (splits * each > room) splits = room / each;
    if (items > kCounters || splits < 1) splits = 1;
    params.splits = static_cast<int>(splits);
    params.counters = static_cast<unsigned*>(size.workspace);
    params.partials = reinterpret_cast<float*>(params.counters + kCounters);
    const dim3 grid(
        static_cast<unsigned>(splits), static_cast<unsigned>(params.kv_heads),
        static_cast<unsigned>(size.seqs * params.row_tiles)
    );
    return launch(
        decode_kernel<key_type, value_type, width, tiles>, grid, dim3(warps * kWarp), bytes, stream,
        params
    );
}

// One query tile where all vectors fit, or where two would not fit the registers.
template <int key_type, int value_type>
cudaError_t decode_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    const bool two = params.group > 8 || (params.group * size.max_rows > 8 && params.d <= 128);
    if (params.d <= 64) {
        return two ? launch_decode<key_type, value_type, 64, 2>(params, size, stream)
                   : launch_decode<key_type, value_type, 64, 1>(params, size, stream);
    }
    if (params.d <= 128) {
        return two ? launch_decode<key_type, value_type, 128, 2>(params, size, stream)
                   : launch_decode<key_type, value_type, 128, 1>(params, size, stream);
    }
    return two ? launch_decode<key_type, value_type, 256, 2>(params, size, stream)
               : launch_decode<key_type, value_type, 256, 1>(params, size, stream);
}

}  // namespace exl::cuda

// The kernel of attention_decode.cuh's plan.
#pragma once

#include "attention_decode_step.cuh"

namespace exl::cuda {

// A block's rows and keys. Nothing to do where `splits` is 0.
struct Piece {
    int first_row;  // of the pass
    int vectors;    // rows times the group's heads
    int first_position;
    int rows;
    int begin_key;  // what any of the rows sees
    int end_key;
    int known;   // keys before this one are of earlier passes
    int splits;  // that share these keys
    int begin;   // steps of this one
    int end;
};

__device__ __forceinline__ Piece piece_of(
    const AttentionParams& params, int queries, int step_keys, int warps
) {
    Piece piece = {};
    const int seq = static_cast<int>(blockIdx.z) / params.row_tiles;
    const int tile_rows = queries / params.group;
    const int seq_begin = uniform(params.row_starts[seq]);
    const int seq_rows = uniform(params.row_starts[seq + 1]) - seq_begin;
    const int first = static_cast<int>(blockIdx.z) % params.row_tiles * tile_rows;
    if (seq_rows > kFewRows || first >= seq_rows) return piece;
    piece.first_row = seq_begin + first;
    piece.rows = min(tile_rows, seq_rows - first);
    piece.vectors = piece.rows * params.group;
    piece.known = uniform(params.past_lens[seq]);
    piece.first_position = piece.known + first;
    piece.end_key = piece.first_position + piece.rows;
    piece.begin_key = params.window > 0 ? max(0, piece.first_position - params.window + 1) : 0;
    const int first_step = piece.begin_key / step_keys;
    const int64_t steps = (piece.end_key + step_keys - 1) / step_keys - first_step;
    const int least = min(kLeastSteps, warps);
    const bool is_alone = piece.end_key - piece.begin_key <= kAloneKeys;
    const int splits =
        is_alone ? 1 : min(params.splits, (static_cast<int>(steps) + least - 1) / least);
    const int split = blockIdx.x;
    if (split >= splits) return piece;
    piece.splits = splits;
    piece.begin = first_step + static_cast<int>(steps * split / splits);
    piece.end = first_step + static_cast<int>(steps * (split + 1) / splits);
    return piece;
}

// Address of query vector v in rows of `stride`.
__device__ __forceinline__ uint8_t* vector_at(
    const AttentionParams& params, const Piece& piece, const void* base, int64_t stride, int v
) {
    const int64_t row = piece.first_row + v / params.group;
    const int head = static_cast<int>(blockIdx.y) * params.group + v % params.group;
    const int64_t at = row * stride + static_cast<int64_t>(head) * params.d;
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(base)) +
           at * (params.dtype == kF16 ? 2 : 4);
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

// The warps' results to shared memory, side by side.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void store_results(
    const Running<width, tiles>& run, float* results, float* stats, int warp, int lane
) {
    constexpr int kQueries = 8 * tiles;
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
                stats[2 * warp * kQueries + v] = run.peak[n][j];
                stats[(2 * warp + 1) * kQueries + v] = weight;
            }
            float* to = results + (warp * kQueries + v) * (width + 4);
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
                using Values = ValueFragments<value_type, width>;
                to[Values::element(tile, lane / 4, 0)] = run.sums[tile][n][j];
                to[Values::element(tile, lane / 4, 1)] = run.sums[tile][n][2 + j];
            }
        }
    }
}

// Adds the warps' results: to the first one's place, divided by their weight, or, where `partials`
// is not null, there, with peak and weight.
template <int width, int queries>
__device__ __forceinline__ void merge_warps(
    float* results, const float* stats, int vectors, float* partials, float2* partial_stats,
    int warp, int warps, int lane
) {
    for (int v = warp; v < vectors; v += warps) {
        float peak = -INFINITY;
        for (int w = 0; w < warps; ++w) peak = fmaxf(peak, stats[2 * w * queries + v]);
        const float base = peak == -INFINITY ? 0.0f : peak;
        float factors[kDecodeWarps];
        float weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) {
            factors[w] = 0.0f;
            if (w >= warps) continue;
            factors[w] = exp2_of(stats[2 * w * queries + v] - base);
            weight += factors[w] * stats[(2 * w + 1) * queries + v];
        }
        const float by = partials == nullptr ? 1.0f / weight : 1.0f;
        for (int i = 4 * lane; i < width; i += 4 * kWarp) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                if (w >= warps) continue;
                const float4 x = *reinterpret_cast<const float4*>(
                    results + (w * queries + v) * (width + 4) + i
                );
                sum.x += factors[w] * x.x;
                sum.y += factors[w] * x.y;
                sum.z += factors[w] * x.z;
                sum.w += factors[w] * x.w;
            }
            sum = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
            // Nobody else reads this query's results, and this lane has read what it overwrites.
            float* to = partials == nullptr ? results + v * (width + 4) : partials + v * width;
            *reinterpret_cast<float4*>(to + i) = sum;
        }
        if (partials != nullptr && lane == 0) partial_stats[v] = make_float2(peak, weight);
    }
}

// Whether this block is the last of those that share `counter`; their partial results can be read.
__device__ __forceinline__ bool arrives_last(unsigned* counter, int splits) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before) : "l"(counter) : "memory");
        is_last = before == static_cast<unsigned>(splits) - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    return is_last;
}

// Adds the splits' partial results, in their order, to `results`.
template <int width, int queries>
__device__ __forceinline__ void add_splits(
    float* results, float* shares, int vectors, const float* partials, const float2* partial_stats,
    int splits, int warp, int warps, int lane
) {
    constexpr int kAhead = 16;  // loads on their way at once
    const int quads = vectors * (width / 4);
    const auto load = [&](float4 (&to)[kAhead], int quad, int first) {
        const auto* from = reinterpret_cast<const float4*>(partials) + quad;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i < splits) to[i] = __ldcg(from + (first + i) * (queries * width / 4));
        }
    };
    float4 x[kAhead];
    int quad = threadIdx.x;
    if (quad < quads) load(x, quad, 0);  // while shares are worked out
    for (int v = warp; v < vectors; v += warps) {
        float2 mine[kMaxSplits / kWarp];
        float peak = -INFINITY;
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = i * kWarp + lane;
            mine[i] = make_float2(-INFINITY, 0.0f);
            if (split < splits) mine[i] = __ldcg(partial_stats + split * queries + v);
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
            const int split = i * kWarp + lane;
            if (split < splits) shares[split * queries + v] = mine[i].x / weight;
        }
    }
    __syncthreads();
    for (; quad < quads; quad += blockDim.x) {
        const int v = quad / (width / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int first = 0; first < splits; first += kAhead) {
            if (first > 0 || quad >= static_cast<int>(blockDim.x)) load(x, quad, first);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i >= splits) continue;
                const float share = shares[(first + i) * queries + v];
                sum.x += share * x[i].x;
                sum.y += share * x[i].y;
                sum.z += share * x[i].z;
                sum.w += share * x[i].w;
            }
        }
        *reinterpret_cast<float4*>(results + v * (width + 4) + quad % (width / 4) * 4) = sum;
    }
}

template <int key_type, int value_type, int width, int tiles>
__global__ void __launch_bounds__(kDecodeWarps * kWarp, width * tiles <= 128 ? 2 : 1)
decode_kernel(const AttentionParams params) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kQueries = Shape::kQueries;
    constexpr int kStep = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    const int warps = blockDim.x / kWarp;
    const int warp = uniform(threadIdx.x / kWarp);
    const int lane = threadIdx.x % kWarp;
    const Piece piece = piece_of(params, kQueries, kStep, warps);
    if (piece.splits == 0) {
        wait_for_inputs();
        return;
    }
    const int kv_head = blockIdx.y;
    const int d = params.d;

    uint8_t* queries = shared;
    float* stats = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
    uint8_t* staged_all = shared + Shape::kQueryBytes + Shape::kStatBytes;
    uint8_t* staged = staged_all + warp * params.stages * Shape::kStepBytes;
    if (d != width) {
        clear(staged, params.stages * Shape::kStepBytes, lane, kWarp);
        __syncwarp();
    }
    const int seq = static_cast<int>(blockIdx.z) / params.row_tiles;
    const int32_t* pages = params.page_table + static_cast<int64_t>(seq) * params.table_stride;
    const auto copy_rows = [&](uint8_t* to, int64_t row, int c) {
        copy_chunk<key_type, width>(
            to + c * kChunk * Keys::kStride, params.key_cache, row, d, lane
        );
        copy_chunk<value_type, width>(
            to + Shape::kKeyBytes + c * kChunk * Values::kStride, params.value_cache, row, d, lane
        );
    };
    const auto copy_step = [&](int step, int stage) {
        if (step >= piece.end) return;
        uint8_t* to = staged + stage * Shape::kStepBytes;
        if (1 << params.page_bits >= kStep) {  // all of it in one page
            const int64_t row = cache_row(params, pages, kv_head, step * kStep);
#pragma unroll
            for (int c = 0; c < Shape::kChunks; ++c) copy_rows(to, row + c * kChunk, c);
            return;
        }
        for (int c = 0; c < Shape::kChunks; ++c) {
            const int position = step * kStep + c * kChunk;
            if (position >= piece.end_key || position + kChunk <= piece.begin_key) continue;
            copy_rows(to, cache_row(params, pages, kv_head, position), c);
        }
    };
    // What earlier passes wrote is on its way before this pass's rows are there.
    const int ahead = params.stages - 1;
    int next = piece.begin + warp;
    for (int stage = 0; stage < ahead; ++stage) {
        const int step = next + stage * warps;
        if ((step + 1) * kStep <= piece.known) copy_step(step, stage);
    }
    wait_for_inputs();
    for (int stage = 0; stage < ahead; ++stage, next += warps) {
        if ((next + 1) * kStep > piece.known) copy_step(next, stage);
        commit_copies();
    }

    // Queries as float16 to shared memory, from there as fragments to registers.
    for (int v = warp; v < kQueries; v += warps) {
        Row x = {};
        if (v < piece.vectors) {
            const auto* from = vector_at(params, piece, params.q, params.q_stride, v);
            load_row(x, from, params.dtype, d, lane);
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
            positions[n][j] = piece.first_position + min(v / params.group, piece.rows - 1);
        }
    }

    Running<width, tiles> run;
    run.start();
    // From this key on every row's window has begun.
    const int all_begin =
        params.window > 0 ? max(0, piece.first_position + piece.rows - params.window) : 0;
    int stage = 0;
    int free_stage = params.stages - 1;
    for (int step = piece.begin + warp; step < piece.end; step += warps, next += warps) {
        copy_step(next, free_stage);
        commit_copies();
        wait_for_stage(params.stages);
        uint8_t* rows = staged + stage * Shape::kStepBytes;
        const int first_key = step * kStep;
        if (first_key < piece.begin_key || first_key + kStep > piece.end_key) {
            clear_hidden(rows + Shape::kKeyBytes, Values::kStride, kStep,
                         piece.begin_key - first_key, piece.end_key - first_key, lane, kWarp);
            __syncwarp();
        }
        const bool masked =
            first_key < all_begin || first_key + kStep > piece.first_position + 1;
        attend_step<key_type, value_type, width, tiles>(
            params, rows, first_key, masked, positions, q, run, lane
        );
        __syncwarp();
        stage = stage + 1 == params.stages ? 0 : stage + 1;
        free_stage = free_stage + 1 == params.stages ? 0 : free_stage + 1;
    }
    wait_copies<0>();
    __syncthreads();  // the warps' results take the place of what was staged

    float* results = reinterpret_cast<float*>(staged_all);
    store_results<value_type, width, tiles>(run, results, stats, warp, lane);
    __syncthreads();
    if (piece.splits == 1) {
        merge_warps<width, kQueries>(
            results, stats, piece.vectors, nullptr, nullptr, warp, warps, lane
        );
    } else {
        const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + kv_head;
        const int64_t split = blockIdx.x;
        float* partials = params.partials + item * params.splits * kQueries * (width + 2);
        auto* partial_stats = reinterpret_cast<float2*>(
            partials + static_cast<int64_t>(params.splits) * kQueries * width
        );
        merge_warps<width, kQueries>(
            results, stats, piece.vectors, partials + split * kQueries * width,
            partial_stats + split * kQueries, warp, warps, lane
        );
        if (!arrives_last(params.counters + item, piece.splits)) return;
        add_splits<width, kQueries>(
            results, stats, piece.vectors, partials, partial_stats, piece.splits, warp, warps, lane
        );
    }
    __syncthreads();
    for (int v = warp; v < piece.vectors; v += warps) {
        Row x;
        load_row(x, results + v * (width + 4), kF32, d, lane);
        if (is_codes(value_type)) rotate_row(x, d, lane);
        if (params.places == nullptr) {
            store_row(
                vector_at(params, piece, params.out, params.out_stride, v), x, params.dtype, d, lane
            );
        } else {
            const int head = kv_head * params.group + v % params.group;
            place_row(params, piece.first_row + v / params.group, head, x, lane);
        }
    }
}

}  // namespace exl::cuda

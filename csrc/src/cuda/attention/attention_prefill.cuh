// Attention of many query rows of a sequence.
//
// Floor      4 d operations for each pair of a query and a key that it sees, at the rate of
//            mma.sync.
// Mapping    A block handles 128 rows of one query head, 16 for each of its 8 warps. It walks the
//            keys that they see in tiles that all warps share. Two pipeline stages: one tile is
//            copied while the other is in use.
// MMA        S = Q K^T, O = P V with queries as the 16 rows of an MMA. P goes from accumulators to
//            operands within its lane.
// Codes      Codes are converted to float16 once per tile and stay in the space of the Hadamard
//            transform: queries are transformed when they are loaded, results when they are stored.
#pragma once

#include "cuda/attention/attention.cuh"

namespace exl::cuda {

constexpr int kPrefillWarps = 8;  // fewer if their queries do not fit in shared memory

template <int key_type, int value_type, int width>
struct PrefillShape {
    static constexpr int kKeys = width > 128 ? 32 : 64;  // per tile
    static constexpr bool kConverts = !is_plain(key_type);
    static constexpr int kStride = 2 * width + 16;  // bytes between float16 rows
    static constexpr int kTileBytes = kKeys * kStride;
    static constexpr int kKeyBytes = kKeys * staged_bytes(key_type, width);
    static constexpr int kStageBytes = kKeyBytes + kKeys * staged_bytes(value_type, width);
    static constexpr int kConvertedBytes = kConverts ? 2 * kTileBytes : 0;
    static constexpr int bytes(int warps, int stages) {
        return 16 * warps * kStride + kConvertedBytes + stages * kStageBytes;
    }
};

// Hadamard transform H x / n of result rows in the layout of accumulators: tile n of a unit holds
// its elements 8 n + 2 t + e (t = lane % 4, e = 0, 1).
template <int width>
__device__ __forceinline__ void hadamard_sums(float (&sums)[width / 8][4], int d, int lane) {
#pragma unroll
    for (int u = 0; u < width / kUnit; ++u) {
        if (u * kUnit >= d) break;
        const bool whole = d - u * kUnit >= kUnit;
#pragma unroll
        for (int n = 8 * u; n < 8 * u + 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int step = 1; step < 4; step *= 2) {
                    const float other = __shfl_xor_sync(0xffffffffu, sums[n][i], step);
                    sums[n][i] = (lane & step) != 0 ? other - sums[n][i] : sums[n][i] + other;
                }
                sums[n][i] *= whole ? 1.0f / 32 : 1.0f / 16;
            }
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
            if (step == 4 && !whole) break;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if ((n & step) != 0) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float low = sums[8 * u + n][i];
                    const float high = sums[8 * u + n + step][i];
                    sums[8 * u + n][i] = low + high;
                    sums[8 * u + n + step][i] = low - high;
                }
            }
        }
    }
}

// Running softmax of one warp's 16 rows, and its update by a tile of float16 keys and values.
template <int width, int keys>
struct WarpRows {
    float sums[width / 8][4];
    float peak[2];    // maximum score of rows lane / 4 and lane / 4 + 8
    float weight[2];  // sum of exponentials over this lane's columns only
    // Query fragments stay in registers if there are enough.
    static constexpr bool kHolds = width <= 128;
    uint32_t held[kHolds ? width / 16 : 1][4];

    // `queries` points to this warp's rows in shared memory.
    __device__ __forceinline__ void start(const uint8_t* queries, int lane) {
        if constexpr (kHolds) {
#pragma unroll
            for (int k = 0; k < width / 16; ++k) load_query(held[k], queries, k, lane);
        }
#pragma unroll
        for (int n = 0; n < width / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            peak[h] = -INFINITY;
            weight[h] = 0.0f;
        }
    }

    static __device__ __forceinline__ void load_query(
        uint32_t (&to)[4], const uint8_t* queries, int k, int lane
    ) {
        load_matrices(to, queries + lane % 16 * (2 * width + 16) + lane / 16 * 16 + 32 * k);
    }

    // `position` is the position of row lane / 4, `first_key` that of the tile's first key.
    __device__ __forceinline__ void attend(
        const AttentionParams& params, const uint8_t* queries, const uint8_t* key_rows,
        const uint8_t* value_rows, int first_key, bool masked, int position, int lane
    ) {
        constexpr int kStride = 2 * width + 16;
        float s[keys / 8][4] = {};
        const uint8_t* k_at = key_rows + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < width / 16; ++k) {
            uint32_t loaded[4];
            if constexpr (!kHolds) load_query(loaded, queries, k, lane);
            const uint32_t (&a)[4] = kHolds ? held[kHolds ? k : 0] : loaded;
#pragma unroll
            for (int n = 0; n < keys / 16; ++n) {
                // Keys 0 to 7, then keys 8 to 15 of the 16; of each the low and high half of k.
                uint32_t b[4];
                load_matrices(b, k_at + n * 16 * kStride + 32 * k);
                multiply(s[2 * n], a, b[0], b[1]);
                multiply(s[2 * n + 1], a, b[2], b[3]);
            }
        }
        softmax(params, s, first_key, masked, position, lane);
        const uint8_t* v_at = value_rows + lane % 16 * kStride + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < keys / 16; ++k) {
            const uint32_t a[4] = {
                bits_of(__floats2half2_rn(s[2 * k][0], s[2 * k][1])),
                bits_of(__floats2half2_rn(s[2 * k][2], s[2 * k][3])),
                bits_of(__floats2half2_rn(s[2 * k + 1][0], s[2 * k + 1][1])),
                bits_of(__floats2half2_rn(s[2 * k + 1][2], s[2 * k + 1][3]))
            };
#pragma unroll
            for (int n = 0; n < width / 16; ++n) {
                // Elements 0 to 7, then 8 to 15 of the 16; of each the low and high keys of k.
                uint32_t b[4];
                load_transposed(b, v_at + k * 16 * kStride + 32 * n);
                multiply(sums[2 * n], a, b[0], b[1]);
                multiply(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    // Turns scores s, exponents of 2, into weights 2^(s - peak).
    __device__ __forceinline__ void softmax(
        const AttentionParams& params, float (&s)[keys / 8][4], int first_key, bool masked,
        int position, int lane
    ) {
        scale_scores(s, params);
        if (masked) {
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = first_key + 8 * n + lane % 4 * 2 + i % 2;
                    const int age = position + i / 2 * 8 - key;
                    const bool seen = age >= 0 && (params.window <= 0 || age < params.window);
                    s[n][i] = seen ? s[n][i] : -INFINITY;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = peak[h];
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
                top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            // With a peak of -infinity there are no sums yet; -infinity minus itself is NaN.
            const float base = top == -INFINITY ? 0.0f : top;
            const float factor = exp2_of(peak[h] - base);
            peak[h] = top;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& x = s[n][2 * h + j];
                    x = exp2_of(x - base);
                    total += x;
                }
            }
            weight[h] = weight[h] * factor + total;
#pragma unroll
            for (int n = 0; n < width / 8; ++n) {
                sums[n][2 * h] *= factor;
                sums[n][2 * h + 1] *= factor;
            }
        }
    }
};

template <int key_type, int value_type, int width>
__global__ void __launch_bounds__(kPrefillWarps* kWarp, 1) prefill_kernel(
    const AttentionParams params
) {
    using Shape = PrefillShape<key_type, value_type, width>;
    constexpr int kKeys = Shape::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_begin();
    wait_for_inputs();
    const int warps = blockDim.x / kWarp;
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int head = blockIdx.x;
    const int kv_head = head / params.group;
    const int seq = blockIdx.z;
    const int d = params.d;
    const int seq_begin = params.row_starts[seq];
    const int seq_rows = params.row_starts[seq + 1] - seq_begin;
    // Blocks with the last rows start first: these rows see the most keys.
    const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * 16 * warps;
    if (seq_rows <= kDecodeRows || first_row >= seq_rows) return;
    const int rows = min(16 * warps, seq_rows - first_row);
    const int first_position = params.past_lens[seq] + first_row;
    const int end_key = first_position + rows;
    const int begin_key = params.window > 0 ? max(0, first_position - params.window + 1) : 0;
    const int begin = begin_key / kKeys;
    const int end = (end_key + kKeys - 1) / kKeys;

    uint8_t* queries = shared;
    uint8_t* converted = queries + 16 * warps * Shape::kStride;
    uint8_t* staged = converted + Shape::kConvertedBytes;
    if (d != width) {
        clear(staged, params.stages * Shape::kStageBytes, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const int32_t* pages = params.page_table + static_cast<int64_t>(seq) * params.table_stride;
    // The warps take turns at copying chunks of 16 keys and of 16 values.
    const auto copy_tile = [&](int tile, int stage) {
        if (tile < end) {
            uint8_t* to = staged + stage * Shape::kStageBytes;
            for (int i = warp; i < 2 * kKeys / kChunk; i += warps) {
                const int c = i / 2;
                const int position = tile * kKeys + c * kChunk;
                if (position >= end_key || position + kChunk <= begin_key) continue;
                const int64_t row = cache_row(params, pages, kv_head, position);
                if (i % 2 == 0) {
                    copy_rows<key_type, width>(
                        to + c * kChunk * staged_bytes(key_type, width), params.key_cache, row, d,
                        lane
                    );
                } else {
                    copy_rows<value_type, width>(
                        to + Shape::kKeyBytes + c * kChunk * staged_bytes(value_type, width),
                        params.value_cache, row, d, lane
                    );
                }
            }
        }
        commit_copies();
    };
    if (params.stages > 1) copy_tile(begin, 0);

    uint8_t* own_queries = queries + warp * 16 * Shape::kStride;
    for (int i = 0; i < 16; ++i) {
        const int row = warp * 16 + i;
        HeadRow<width> x = {};
        if (row < rows) {
            const int64_t at =
                (seq_begin + first_row + row) * params.q_stride + static_cast<int64_t>(head) * d;
            const int bytes = params.dtype == kF16 ? 2 : 4;
            load_row(x, static_cast<const uint8_t*>(params.q) + at * bytes, params.dtype, d, lane);
            if (is_codes(key_type)) hadamard_row(x, d, lane);
        }
        store_row(own_queries + i * Shape::kStride, x, kF16, width, lane);
    }
    __syncwarp();

    WarpRows<width, kKeys> state;
    state.start(own_queries, lane);
    const int warp_position = first_position + warp * 16;
    for (int tile = begin; tile < end; ++tile) {
        const int stage = params.stages > 1 ? (tile - begin) % 2 : 0;
        if (params.stages > 1) {
            copy_tile(tile + 1, stage ^ 1);
            wait_copies<1>();
        } else {
            copy_tile(tile, 0);
            wait_copies<0>();
        }
        __syncthreads();
        const int first_key = tile * kKeys;
        uint8_t* key_rows = staged + stage * Shape::kStageBytes;
        uint8_t* value_rows = key_rows + Shape::kKeyBytes;
        if constexpr (Shape::kConverts) {
            convert_tile<key_type, width, kKeys>(converted, key_rows, 0, kKeys);
            convert_tile<value_type, width, kKeys>(
                converted + Shape::kTileBytes, value_rows, begin_key - first_key,
                end_key - first_key
            );
            key_rows = converted;
            value_rows = converted + Shape::kTileBytes;
            __syncthreads();
        } else if (first_key < begin_key || first_key + kKeys > end_key) {
            clear_hidden(
                value_rows, Shape::kStride, kKeys, begin_key - first_key, end_key - first_key,
                threadIdx.x, blockDim.x
            );
            __syncthreads();
        }
        if (first_key <= warp_position + 15 && warp * 16 < rows) {
            const bool masked =
                first_key + kKeys - 1 > warp_position ||
                (params.window > 0 && first_key <= warp_position + 15 - params.window);
            state.attend(
                params, own_queries, key_rows, value_rows, first_key, masked,
                warp_position + lane / 4, lane
            );
        }
        __syncthreads();
    }
    wait_copies<0>();

    if (is_codes(value_type)) hadamard_sums<width>(state.sums, d, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float weight = state.weight[h];
        weight += __shfl_xor_sync(0xffffffffu, weight, 1);
        weight += __shfl_xor_sync(0xffffffffu, weight, 2);
        weight += sink_weight(params, head, state.peak[h]);
        const float by = 1.0f / weight;
        const int row = warp * 16 + lane / 4 + 8 * h;
        if (row >= rows) continue;
        const int64_t at =
            (seq_begin + first_row + row) * params.out_stride + static_cast<int64_t>(head) * d;
#pragma unroll
        for (int n = 0; n < width / 8; ++n) {
            const int i = 8 * n + lane % 4 * 2;
            if (i >= d) break;
            const float x = state.sums[n][2 * h] * by;
            const float y = state.sums[n][2 * h + 1] * by;
            if (params.dtype == kF16) {
                *reinterpret_cast<__half2*>(static_cast<__half*>(params.out) + at + i) =
                    __halves2half2(from_float<__half>(x), from_float<__half>(y));
            } else {
                *reinterpret_cast<float2*>(static_cast<float*>(params.out) + at + i) =
                    make_float2(x, y);
            }
        }
    }
}

template <int key_type, int value_type, int width>
cudaError_t launch_prefill(AttentionParams params, const AttentionSize& size, void* stream) {
    using Shape = PrefillShape<key_type, value_type, width>;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    int warps = kPrefillWarps;
    while (warps > 1 && Shape::bytes(warps, 1) > info.shared_per_block) warps /= 2;
    params.stages = Shape::bytes(warps, 2) <= info.shared_per_block ? 2 : 1;
    const dim3 grid(
        static_cast<unsigned>(params.q_heads),
        static_cast<unsigned>(ceil_div(size.max_rows, 16 * warps)), static_cast<unsigned>(size.seqs)
    );
    return launch(
        prefill_kernel<key_type, value_type, width>, grid, dim3(warps * kWarp),
        Shape::bytes(warps, params.stages), stream, params
    );
}

template <int key_type, int value_type>
cudaError_t prefill_with(const AttentionParams& params, const AttentionSize& size, void* stream) {
    if (params.d <= 64) return launch_prefill<key_type, value_type, 64>(params, size, stream);
    if (params.d <= 128) return launch_prefill<key_type, value_type, 128>(params, size, stream);
    return launch_prefill<key_type, value_type, 256>(params, size, stream);
}

}  // namespace exl::cuda

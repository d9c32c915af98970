// Steps of a warp in attention_decode_kernel.cuh and attention_prompt.cuh: attention of its queries to
// 16 or 32 keys per step.
#pragma once

#include "cuda/attention/attention_decode.cuh"
#include "cuda/linear/prepared.cuh"

namespace exl::cuda {

constexpr int kDecodeWarps = 8;
constexpr int kMaxStages = 3;  // pipeline stages of a warp: prefetched steps and the current one
constexpr int kMinSteps = 4;   // per block: with fewer, adding its partial result costs too much
// Sequences with more keys do not fit in the L2 cache over all layers: data that one decode step
// read is evicted before the next one reads it.
constexpr int kL2Keys = 1024;
// Sequences of at most this many keys are not split: one block computes them before several blocks
// would have added their partial results.
constexpr int kUnsplitKeys = 512;

// Chunks of 16 keys per step. Rows of 4-bit codes are short: two chunks amortize the overhead of a
// step.
template <int key_type, int value_type>
constexpr int kStepChunks = key_type == kU8 && value_type == kU8 ? 2 : 1;

// A warp's weights are 2^(score - peak + lift). Weights times scales of values must stay in the range
// of float16, as far as possible from both of its ends. Scales are at most 1/8 of its largest number,
// so 2^3 is a safe factor.
__host__ __device__ constexpr float weight_lift(int value_type) {
    return is_codes(value_type) ? 3.0f : 0.0f;
}

template <int key_type, int value_type, int width, int tiles>
struct DecodeShape {
    static constexpr int kQueries = 8 * tiles;
    static constexpr int kChunks = kStepChunks<key_type, value_type>;
    static constexpr int kKeys = kChunks * kChunk;  // per step
    static constexpr int kKeyBytes = kKeys * staged_bytes(key_type, width);
    static constexpr int kStepBytes = kKeyBytes + kKeys * staged_bytes(value_type, width);
    static constexpr int kQueryStride = width + 8;  // float16 elements
    static constexpr int kQueryBytes = kQueries * kQueryStride * 2;
    // Holds peak and weight of each query for each warp. Later it is reused for the splits' shares,
    // again for each warp.
    static constexpr int kStatBytes = kMaxSplits * kQueries * 4;
    static_assert(kQueries >= kDecodeWarps && kMaxSplits >= 2 * kDecodeWarps);
    static constexpr int kBarrierBytes = 2 * kDecodeWarps * kMaxStages * 8;
    // The new key and value of the sequence, as the cache stores them.
    static constexpr int kNewKeyBytes = (row_bytes(key_type, width) + 15) / 16 * 16;
    static constexpr int kNewBytes = kNewKeyBytes + (row_bytes(value_type, width) + 15) / 16 * 16;
    // Offset of the staged keys and values in shared memory. Queries, statistics, new rows and
    // barriers precede them.
    static constexpr int kStaged = kQueryBytes + kStatBytes + kNewBytes + kBarrierBytes;
};

// Running softmax of one warp. A lane holds the peak (maximum score) and the weight (sum of
// exponentials) of queries 2 t and 2 t + 1 of each tile, and weighted sums of values. The weight
// covers this lane's keys only.
template <int width, int tiles>
struct SoftmaxState {
    float peak[tiles][2];
    float weight[tiles][2];
    float sums[width / 16][tiles][4];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                peak[n][j] = -INFINITY;
                weight[n][j] = 0.0f;
            }
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][n][i] = 0.0f;
            }
        }
    }
};

// Means of each query over the groups of elements that share a scale, as fragments with k = 8 that
// are multiplied by the scales of keys (`load_scales`). Lanes t < width / 64 hold the float16 means
// of groups 2 t and 2 t + 1 for query g in register 0. The remainders of that rounding, also as
// float16, are added by the same product. They are in register 0 of lanes t + width / 64, whose
// scales are those of lane t again; with a width of 256, in register 1 of lane t. The rest is zero.
template <int tiles>
using Means = uint32_t[tiles][2];

template <int key_type, int width, int tiles>
__device__ __forceinline__ void compute_means(
    Means<tiles>& means, const uint32_t (&q)[tiles][width / 16][2], int lane
) {
    using Keys = KeyFragments<key_type, width>;
    constexpr int kWords = width / 64;
    const int t = lane % 4;
    uint32_t middle[4];
    Keys::middle(middle);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            float mean[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int k = 2 * (2 * word + h);
                float sum[4] = {};
                multiply(sum, middle, q[n][k][0], q[n][k][1]);
                multiply(sum, middle, q[n][k + 1][0], q[n][k + 1][1]);
                // All rows hold the same sums. This lane has columns 2 t and 2 t + 1 and needs
                // column g.
                const float even = __shfl_sync(0xffffffffu, sum[0], lane / 8);
                const float odd = __shfl_sync(0xffffffffu, sum[1], lane / 8);
                mean[h] = (lane / 4 % 2 == 0 ? even : odd) *
                          (kSubnormalFactor / Keys::kMiddle / kScaleGroup);
            }
            const __half2 high = __floats2half2_rn(mean[0], mean[1]);
            const float2 rounded = __half22float2(high);
            const __half2 low = __floats2half2_rn(mean[0] - rounded.x, mean[1] - rounded.y);
            if (t == word) means[n][0] = bits_of(high);
            if (kWords == 4 ? t == word : t == word + kWords) means[n][kWords / 4] = bits_of(low);
        }
    }
}

// Dot products of keys and queries, s [chunks][tiles], for `chunks` chunks of keys staged at `rows`.
// Each element is summed in an order that does not depend on `chunks` and `tiles`.
template <int key_type, int width, int tiles, int chunks>
__device__ __forceinline__ void multiply_keys(
    float (&s)[chunks][tiles][4], const uint8_t* rows, const uint32_t (&q)[tiles][width / 16][2],
    const Means<tiles>& means, int lane
) {
    using Keys = KeyFragments<key_type, width>;
    if constexpr (!is_codes(key_type)) {
#pragma unroll
        for (int k = 0; k < width / 16; ++k) {
#pragma unroll
            for (int c = 0; c < chunks; ++c) {
                uint32_t a[4];
                Keys::load(a, rows + c * kChunk * Keys::kStride, k, lane);
#pragma unroll
                for (int n = 0; n < tiles; ++n) multiply(s[c][n], a, q[n][k][0], q[n][k][1]);
            }
        }
    } else {
        // Start from minus the middle of the codes times the query means, weighted by the scales.
        // Then sum products with codes within each group and apply its scale to the sum: this takes
        // fewer products and keeps dependent chains of sums short.
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
            const uint8_t* keys = rows + c * kChunk * Keys::kStride;
            uint32_t scales[2];
            Keys::load_scales(scales, keys, lane);
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                multiply_8(s[c][n], scales, means[n][0]);
                if (width > 128) multiply_8(s[c][n], scales, means[n][1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[c][n][i] *= -Keys::kMiddle * kScaleGroup / kSubnormalFactor;
                }
            }
            Keys::for_each_group(
                keys, lane, [&](int k, const uint32_t (&a)[2][4], float low, float high) {
#pragma unroll
                    for (int n = 0; n < tiles; ++n) {
                        float sum[4] = {};
                        multiply(sum, a[0], q[n][k][0], q[n][k][1]);
                        multiply(sum, a[1], q[n][k + 1][0], q[n][k + 1][1]);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            s[c][n][i] = __fmaf_rn(sum[i], i < 2 ? low : high, s[c][n][i]);
                        }
                    }
                }
            );
        }
    }
}

// Turns scores of keys that a query does not see into -infinity.
template <int tiles, int chunks>
__device__ __forceinline__ void hide_keys(
    float (&s)[chunks][tiles][4], const AttentionParams& params, int first_key,
    const int (&positions)[tiles][2], int lane
) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = first_key + c * kChunk + lane / 4 + i / 2 * 8;
                const int age = positions[n][i % 2] - key;
                const bool seen = age >= 0 && (params.window <= 0 || age < params.window);
                s[c][n][i] = seen ? s[c][n][i] : -INFINITY;
            }
        }
    }
}

// Running maxima of each query's scores after each of `steps` steps, and whether a step changed one
// of the warp's, so that sums have to be rescaled.
template <int width, int tiles, int steps, int chunks>
__device__ __forceinline__ void find_peaks(
    float (&peak)[steps][tiles][2], bool (&moved)[steps], const float (&s)[chunks][tiles][4],
    const SoftmaxState<width, tiles>& state
) {
    constexpr int kChunks = chunks / steps;  // per step
#pragma unroll
    for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float top = i == 0 ? state.peak[n][j] : -INFINITY;
#pragma unroll
                for (int c = i * kChunks; c < (i + 1) * kChunks; ++c) {
                    top = fmaxf(top, fmaxf(s[c][n][j], s[c][n][2 + j]));
                }
#pragma unroll
                for (int step = 4; step < kWarp; step *= 2) {
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
                }
                peak[i][n][j] = top;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        bool is_new = false;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float before = i == 0 ? state.peak[n][j] : peak[i == 0 ? 0 : i - 1][n][j];
                if (i > 0) peak[i][n][j] = fmaxf(peak[i][n][j], before);
                // Several steps set their peaks in any case, and there are no sums before the first
                // peak.
                is_new |= peak[i][n][j] != before && (steps == 1 || before != -INFINITY);
            }
        }
        moved[i] = __any_sync(0xffffffffu, is_new);
    }
}

// Weighted sums of the values of one chunk: sums += V^T P^T.
template <int value_type, int width, int tiles>
__device__ __forceinline__ void add_values(
    SoftmaxState<width, tiles>& state, const uint8_t* values, const uint32_t (&p)[tiles][2],
    const uint32_t (&minus_middle)[4], int lane
) {
    using Values = ValueFragments<value_type, width>;
    if constexpr (is_codes(value_type)) {
        Values::for_each_group(
            values, lane, [&](int group, const uint32_t (&a)[2][4], __half2 low, __half2 high) {
#pragma unroll
                for (int n = 0; n < tiles; ++n) {
                    const uint32_t b0 = bits_of(__hmul2(halves(p[n][0]), low));
                    const uint32_t b1 = bits_of(__hmul2(halves(p[n][1]), high));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        multiply(state.sums[2 * group + i][n], a[i], b0, b1);
                        multiply(state.sums[2 * group + i][n], minus_middle, b0, b1);
                    }
                }
            }
        );
    } else {
        Values::for_each(values, lane, [&](int tile, const uint32_t (&a)[4]) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) multiply(state.sums[tile][n], a, p[n][0], p[n][1]);
        });
    }
}

// Weights of one step's keys in float16, as operands of `add_values`; adds them to state.weight.
template <int value_type, int width, int tiles, int chunks>
__device__ __forceinline__ void weigh_keys(
    uint32_t (*p)[tiles][2], SoftmaxState<width, tiles>& state, const float (*s)[tiles][4],
    const float (&peak)[tiles][2]
) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        constexpr float kLift = weight_lift(value_type);
        const float base[2] = {
            (peak[n][0] == -INFINITY ? 0.0f : peak[n][0]) - kLift,
            (peak[n][1] == -INFINITY ? 0.0f : peak[n][1]) - kLift
        };
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x = exp2_of(s[c][n][2 * h] - base[0]);
                const float y = exp2_of(s[c][n][2 * h + 1] - base[1]);
                state.weight[n][0] += x;
                state.weight[n][1] += y;
                const uint32_t two = bits_of(__floats2half2_rn(x, y));
                asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(p[c][n][h]) : "r"(two));
            }
        }
    }
}

// Processes `steps` steps of keys, staged at `keys`, and their values. If `masked`, each query sees
// only the keys that its position and the window allow; otherwise all queries see all keys. The
// results have the same bits as those of one step after the other.
template <int key_type, int value_type, int width, int tiles, int steps = 1>
__device__ __forceinline__ void attend_steps(
    const AttentionParams& params, const uint8_t* keys, const uint8_t* values, int first_key,
    bool masked, const int (&positions)[tiles][2], const uint32_t (&q)[tiles][width / 16][2],
    const Means<tiles>& means, const uint32_t (&minus_middle)[4], SoftmaxState<width, tiles>& state,
    int lane
) {
    constexpr int kChunks = kStepChunks<key_type, value_type>, kAll = steps * kChunks;
    float s[kAll][tiles][4] = {};
    multiply_keys<key_type, width, tiles, kAll>(s, keys, q, means, lane);
    scale_scores(s, params, is_codes(key_type) ? kSubnormalFactor : 1.0f);
    if (masked) hide_keys(s, params, first_key, positions, lane);
    float peak[steps][tiles][2];
    bool moved[steps];
    find_peaks<width, tiles, steps, kAll>(peak, moved, s, state);
    float factor[steps][tiles][2];
    const auto rescale = [&](int i) {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int tile = 0; tile < width / 16; ++tile) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    state.sums[tile][n][j] = __fmul_rn(state.sums[tile][n][j], factor[i][n][j % 2]);
                }
            }
        }
    };
    uint32_t p[kAll][tiles][2];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        // With several steps, all weights are computed first, without branches between them.
        if (steps > 1 || moved[i]) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    // With a peak of -infinity there are no sums yet; -infinity minus itself is NaN.
                    const float top = peak[i][n][j];
                    factor[i][n][j] = top == -INFINITY ? 1.0f : exp2_of(state.peak[n][j] - top);
                    state.peak[n][j] = top;
                    state.weight[n][j] = __fmul_rn(state.weight[n][j], factor[i][n][j]);
                }
            }
            if (steps == 1) rescale(i);
        }
        weigh_keys<value_type, width, tiles, kChunks>(
            p + i * kChunks, state, s + i * kChunks, peak[i]
        );
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        if (steps > 1 && moved[i]) rescale(i);
#pragma unroll
        for (int c = i * kChunks; c < (i + 1) * kChunks; ++c) {
            add_values<value_type, width, tiles>(
                state, values + c * kChunk * ValueFragments<value_type, width>::kStride, p[c],
                minus_middle, lane
            );
        }
    }
}

// Fragments of the queries in shared memory, float16 rows of width + 8 elements.
template <int key_type, int width, int tiles>
__device__ __forceinline__ void load_queries(
    uint32_t (&q)[tiles][width / 16][2], const uint8_t* queries, int lane
) {
    using Keys = KeyFragments<key_type, width>;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const auto* row =
            reinterpret_cast<const __half*>(queries) + (8 * n + lane / 4) * (width + 8);
#pragma unroll
        for (int k = 0; k < width / 16; ++k) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const __half2 two = __halves2half2(
                    row[Keys::query_element(k, lane % 4, r, 0)],
                    row[Keys::query_element(k, lane % 4, r, 1)]
                );
                q[n][k][r] = bits_of(__hmul2(two, Keys::query_factor(r)));
            }
        }
    }
}

// Permutation of one head's results: their positions among the inputs of the next linear, which
// stores its rows in an order of its own.
template <int width>
using Permutation = int2[width / kUnit];

template <int width>
__device__ __forceinline__ void load_permutation(
    Permutation<width>& permutation, const AttentionParams& params, int head, int lane
) {
#pragma unroll
    for (int u = 0; u < width / kUnit; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i < params.d) {
            const int32_t* from = params.permutation + head * params.d + i;
            permutation[u] = *reinterpret_cast<const int2*>(from);
        }
    }
}

// Stores a head's result as prepared inputs of the next linear.
template <int width>
__device__ __forceinline__ void store_permuted(
    const AttentionParams& params, int row, const HeadRow<width>& x,
    const Permutation<width>& permutation, int lane
) {
    auto* to = static_cast<__half*>(params.out);
#pragma unroll
    for (int u = 0; u < width / kUnit; ++u) {
        if (u * kUnit + 2 * lane >= params.d) continue;
        to[prepared_at(params.rows, row, permutation[u].x)] = from_float<__half>(x[u].x);
        to[prepared_at(params.rows, row, permutation[u].y)] = from_float<__half>(x[u].y);
    }
}

}  // namespace exl::cuda

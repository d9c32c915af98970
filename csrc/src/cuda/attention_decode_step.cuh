// One step of a warp in attention_decode_kernel.cuh: 16 or 32 keys against its queries.
#pragma once

#include "attention_decode.cuh"

namespace exl::cuda {

constexpr int kDecodeWarps = 8;
constexpr int kMostStages = 3;  // of a warp: steps that it copies ahead, and the one at hand
constexpr int kLeastSteps = 4;  // of a block: fewer do not pay for adding up its part
// More keys of a sequence than these the second-level cache has no room for in all layers: what one
// step read is gone in the next.
constexpr int kRereadKeys = 1024;
constexpr int kAloneKeys = 512;  // of a block: so many it has done before others add up their parts

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
    // Peaks and weights of queries for each warp, then, for each warp again, the splits' shares.
    static constexpr int kStatBytes = kMaxSplits * kQueries * 4;
    static_assert(kQueries >= kDecodeWarps && kMaxSplits >= 2 * kDecodeWarps);
    static constexpr int kBarrierBytes = 2 * kDecodeWarps * kMostStages * 8;
};

// A warp's running result: peak and weight of the queries 2 t, 2 t + 1 of each tile (the weight of
// this lane's keys only), and sums of values.
template <int width, int tiles>
struct Running {
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

// Means of the queries' groups of elements, as fragments of k = 8 to be multiplied with keys' scales:
// those of the groups 2 t, 2 t + 1 for query g, and what rounding them to float16 left. A lane whose
// groups are past the width has what is left of those that `t % (width / 64)` names, or zeros.
template <int tiles>
using Means = uint32_t[tiles][2];

template <int key_type, int width, int tiles>
__device__ __forceinline__ void find_means(
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
                // Every row has the sums; columns 2 t, 2 t + 1 are here, column g is asked for.
                const float even = __shfl_sync(0xffffffffu, sum[0], lane / 8);
                const float odd = __shfl_sync(0xffffffffu, sum[1], lane / 8);
                mean[h] = (lane / 4 % 2 == 0 ? even : odd) * (kCodeUnit / Keys::kMiddle / kScaleGroup);
            }
            const __half2 high = __floats2half2_rn(mean[0], mean[1]);
            const float2 rounded = __half22float2(high);
            const __half2 low = __floats2half2_rn(mean[0] - rounded.x, mean[1] - rounded.y);
            if (t == word) means[n][0] = bits_of(high);
            if (kWords == 4 ? t == word : t == word + kWords) means[n][kWords / 4] = bits_of(low);
        }
    }
}

// One step of keys, staged at `rows`; where `masked`, queries see what their positions let them.
template <int key_type, int value_type, int width, int tiles>
__device__ __forceinline__ void attend_step(
    const AttentionParams& params, const uint8_t* rows, int first_key, bool masked,
    const int (&positions)[tiles][2], const uint32_t (&q)[tiles][width / 16][2],
    const Means<tiles>& means, const uint32_t (&less)[4], Running<width, tiles>& run, int lane
) {
    using Shape = DecodeShape<key_type, value_type, width, tiles>;
    using Keys = KeyFragments<key_type, width>;
    using Values = ValueFragments<value_type, width>;
    constexpr int kChunks = Shape::kChunks;
    float s[kChunks][tiles][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const uint8_t* keys = rows + c * kChunk * Keys::kStride;
        if constexpr (is_codes(key_type)) {
            // Less the middle of the codes times the queries' means, which scales alone weigh. Then
            // sums of codes first, scales after: fewer products, and short chains of sums.
            uint32_t scales[2];
            Keys::load_scales(scales, keys, lane);
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                multiply_8(s[c][n], scales, means[n][0]);
                if (width > 128) multiply_8(s[c][n], scales, means[n][1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[c][n][i] *= -Keys::kMiddle * kScaleGroup / kCodeUnit;
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
                        for (int i = 0; i < 4; ++i) s[c][n][i] += sum[i] * (i < 2 ? low : high);
                    }
                }
            );
        } else {
            Keys::for_each(keys, lane, [&](int k, const uint32_t (&a)[4]) {
#pragma unroll
                for (int n = 0; n < tiles; ++n) multiply(s[c][n], a, q[n][k][0], q[n][k][1]);
            });
        }
    }
    scale_scores(s, params, is_codes(key_type) ? kCodeUnit : 1.0f);
    if (masked) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
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
    float peak[tiles][2];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            peak[n][j] = run.peak[n][j];
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                peak[n][j] = fmaxf(peak[n][j], fmaxf(s[c][n][j], s[c][n][2 + j]));
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
        // Times scales of values they have to stay in float16's range, as far from its ends as can be:
        // scales are at most an eighth of its largest number.
        constexpr float kLift = is_codes(value_type) ? 3.0f : 0.0f;
        const float base[2] = {(peak[n][0] == -INFINITY ? 0.0f : peak[n][0]) - kLift,
                               (peak[n][1] == -INFINITY ? 0.0f : peak[n][1]) - kLift};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x = exp2_of(s[c][n][2 * h] - base[0]);
                const float y = exp2_of(s[c][n][2 * h + 1] - base[1]);
                run.weight[n][0] += x;
                run.weight[n][1] += y;
                const uint32_t two = bits_of(__floats2half2_rn(x, y));
                asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                             : "=r"(p[c][n][h]) : "r"(two));
            }
        }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const uint8_t* values = rows + Shape::kKeyBytes + c * kChunk * Values::kStride;
        if constexpr (is_codes(value_type)) {
            Values::for_each_group(
                values, lane, [&](int group, const uint32_t (&a)[2][4], __half2 low, __half2 high) {
#pragma unroll
                    for (int n = 0; n < tiles; ++n) {
                        const uint32_t b0 = bits_of(__hmul2(halves(p[c][n][0]), low));
                        const uint32_t b1 = bits_of(__hmul2(halves(p[c][n][1]), high));
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            multiply(run.sums[2 * group + i][n], a[i], b0, b1);
                            multiply(run.sums[2 * group + i][n], less, b0, b1);
                        }
                    }
                }
            );
        } else {
            Values::for_each(values, lane, [&](int tile, const uint32_t (&a)[4]) {
#pragma unroll
                for (int n = 0; n < tiles; ++n) {
                    multiply(run.sums[tile][n], a, p[c][n][0], p[c][n][1]);
                }
            });
        }
    }
}

// Where the linear behind attention looks for a head's results as its inputs.
template <int width>
using Places = int2[width / kUnit];

template <int width>
__device__ __forceinline__ void load_places(
    Places<width>& places, const AttentionParams& params, int head, int lane
) {
#pragma unroll
    for (int u = 0; u < width / kUnit; ++u) {
        const int i = u * kUnit + 2 * lane;
        if (i < params.d) {
            places[u] = *reinterpret_cast<const int2*>(params.places + head * params.d + i);
        }
    }
}

template <int width>
__device__ __forceinline__ void place_row(
    const AttentionParams& params, int row, const HeadRow<width>& x, const Places<width>& places,
    int lane
) {
    auto* to = static_cast<__half*>(params.out);
#pragma unroll
    for (int u = 0; u < width / kUnit; ++u) {
        if (u * kUnit + 2 * lane >= params.d) continue;
        to[prepared_at(params.rows, row, places[u].x)] = from_float<__half>(x[u].x);
        to[prepared_at(params.rows, row, places[u].y)] = from_float<__half>(x[u].y);
    }
}

}  // namespace exl::cuda

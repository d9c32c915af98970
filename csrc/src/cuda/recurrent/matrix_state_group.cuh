// Groups of tokens of the delta rule and the state scan: their operands, from global to shared memory.
//
// matrix_state.cuh has the formulas. A warp prepares a group: it normalizes keys and queries, and
// computes their products and decays.
#pragma once

#include <type_traits>

#include "cuda/common/common.cuh"
#include "exl/cuda/recurrent.h"

namespace exl::cuda {

constexpr int kStateWarps = 4;
constexpr int kStateThreads = kStateWarps * kWarp;
constexpr int kColumnLanes = 4;                  // lanes along the columns, two columns each
constexpr int kRowLanes = kWarp / kColumnLanes;  // lanes along the rows
constexpr int kWarpColumns = 2 * kColumnLanes;
constexpr int kBlockColumns = kStateWarps * kWarpColumns;
constexpr int kRowBlock = 4 * kRowLanes;  // rows of a warp per float4 of a lane
constexpr float kL2Eps = 1e-6f;           // exl_core/ops/recurrent.py

static_assert(kBlockColumns == kWarp, "a lane loads the value of one column of the block");

enum class Rule { kScan, kDelta, kDeltaByRow };

struct MatrixState {
    ExlStateRows rows;
    const float* x;  // rows of queries, keys and values
    int64_t x_stride;
    int64_t query_first, key_first, value_first;  // offsets in a row of x
    const float*
        step;  // a of the delta rule, dt of the scan: [rows, heads], or [rows, heads depth]
    const float* beta;  // b of the delta rule
    int64_t step_stride;
    const float* decay;
    const float* dt_bias;
    const float* skip;
    float* states;
    float* y;
    int heads, key_heads, depth, width;
    int longest;  // sequences with more rows are skipped: they have chunks
    bool is_tiled;
    bool is_invariant;  // one token per group, whatever the number of rows
    float least_step, largest_step;
};

#ifdef __CUDACC__

// Numbers of a group of tokens. Decays: `grown` from before the group to token i, `left` from token
// i to the end of the group. inner[i][j] and outer[i][j] are the decay from token j to token i times
// k_j k_i, and times k_j q_i; j follows i nowhere.
template <int count>
struct alignas(16) Group {
    float grown[count], left[count], beta[count], pad[count];
    float inner[count][count], outer[count][count];
};

template <int blocks, int count>
struct Tile {
    static constexpr int kTokens = kStateWarps * count;
    float keys[kTokens][kRowBlock * blocks];
    float queries[kTokens][kRowBlock * blocks];
    float values[kTokens][kBlockColumns];
    Group<count> groups[kStateWarps];
};

// A tile for decays per row. `keys` and `queries` contain the decays from before the group to their
// token, `left_keys` those from there to the end of the group, `decays` those of the whole group.
template <int blocks, int count>
struct TileByRow : Tile<blocks, count> {
    float left_keys[kStateWarps * count][kRowBlock * blocks];
    float decays[kStateWarps][kRowBlock * blocks];
};

template <Rule rule, int blocks, int count>
using TileOf =
    std::conditional_t<rule == Rule::kDeltaByRow, TileByRow<blocks, count>, Tile<blocks, count>>;

// Sums over the lanes whose numbers differ in bits below `lanes`. Lane l gets the sum of
// values[l % size], where size is a power of two of at most `lanes`. Recursive, so that all indices
// are constants: `n` values are left.
template <int lanes, int size, int n = size>
__device__ __forceinline__ float scatter_sums(float (&values)[size], int lane) {
    static_assert(size <= lanes && (size & (size - 1)) == 0);
    if constexpr (n > 1) {
        constexpr int half = n / 2;
        const bool is_upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float other = is_upper ? values[i] : values[i + half];
            const float own = is_upper ? values[i + half] : values[i];
            values[i] = own + __shfl_xor_sync(0xffffffffu, other, half);
        }
        return scatter_sums<lanes, size, half>(values, lane);
    } else {
        float sum = values[0];
#pragma unroll
        for (int step = size; step < lanes; step *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        return sum;
    }
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Numbers of a head that all its tokens share.
template <Rule rule, int blocks>
struct HeadNumbers {
    static constexpr int kBiases = rule == Rule::kDeltaByRow ? blocks : 1;
    float decay, biases[kBiases];

    __device__ __forceinline__ void load(const MatrixState& args, int head, int lane) {
        decay = args.decay[head];
#pragma unroll
        for (int i = 0; i < kBiases; ++i) {
            const int at = lane + kWarp * i;
            if constexpr (rule == Rule::kDeltaByRow) {
                biases[i] = at < args.depth ? args.dt_bias[head * args.depth + at] : 0.0f;
            } else {
                biases[i] = args.dt_bias[head];
            }
        }
    }
};

// Operands of one group of tokens between their loads and `prepare`: those of a lane.
template <Rule rule, int blocks, int count>
struct RawGroup {
    float keys[count][blocks], queries[count][blocks];       // elements lane + 32 i
    float steps[count][HeadNumbers<rule, blocks>::kBiases];  // the same, with a decay per row
    float values[count];                                     // of the block's column `lane`
    float step, beta;                                        // of token `lane`
};

template <Rule rule, int blocks, int count>
__device__ __forceinline__ void load_group(
    RawGroup<rule, blocks, count>& raw, const MatrixState& args, int head, int key_head, int first,
    int last, int lane
) {
    const int column = blockIdx.x * kBlockColumns + lane;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const bool is_token = first + i < last;
        const float* row = args.x + (is_token ? first + i : first) * args.x_stride;
        const float* key = row + args.key_first + key_head * args.depth;
        const float* query = row + args.query_first + key_head * args.depth;
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int at = lane + kWarp * j;
            const bool is_inside = is_token && at < args.depth;
            raw.keys[i][j] = is_inside ? key[at] : 0.0f;
            raw.queries[i][j] = is_inside ? query[at] : 0.0f;
            if constexpr (rule == Rule::kDeltaByRow) {
                const int64_t step = (is_token ? first + i : first) * args.step_stride;
                raw.steps[i][j] = is_inside ? args.step[step + head * args.depth + at] : 0.0f;
            }
        }
        const bool is_value = is_token && column < args.width;
        raw.values[i] = is_value ? row[args.value_first + head * args.width + column] : 0.0f;
    }
    const bool is_token = lane < count && first + lane < last;
    const int64_t at = (is_token ? first + lane : first) * args.step_stride + head;
    raw.step = is_token && rule != Rule::kDeltaByRow ? args.step[at] : 0.0f;
    raw.beta = is_token && args.beta != nullptr ? args.beta[at] : 0.0f;
}

// Products of a group's keys with its keys and queries, k_j k_i and k_j q_i for j <= i, which are
// triangles, and q_i q_i. `decays` are multiplied in, of the tokens after j up to i.
template <Rule rule, int blocks, int count, int sums>
__device__ __forceinline__ void multiply_group(
    float (&dots)[sums], const RawGroup<rule, blocks, count>& raw,
    const float (&decays)[count][HeadNumbers<rule, blocks>::kBiases]
) {
    constexpr int kTriangle = count * (count + 1) / 2;
    static_assert(2 * kTriangle + count <= sums);
#pragma unroll
    for (int e = 0; e < blocks; ++e) {
#pragma unroll
        for (int j = 0; j < count; ++j) {
            dots[2 * kTriangle + j] += raw.queries[j][e] * raw.queries[j][e];
            float carried = raw.keys[j][e];
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (i < j) continue;
                if constexpr (rule == Rule::kDeltaByRow) {
                    if (i > j) carried *= decays[i][e];
                }
                dots[i * (i + 1) / 2 + j] += carried * raw.keys[i][e];
                dots[kTriangle + i * (i + 1) / 2 + j] += carried * raw.queries[i][e];
            }
        }
    }
}

// Writes keys, queries and values of a group to its part of a tile.
template <Rule rule, int blocks, int count>
__device__ __forceinline__ void store_group(
    const RawGroup<rule, blocks, count>& raw, TileOf<rule, blocks, count>& tile,
    const float (&factor_k)[count], const float (&factor_q)[count],
    const float (&decays)[count][HeadNumbers<rule, blocks>::kBiases], int warp, int lane
) {
    const int first_token = warp * count;
#pragma unroll
    for (int e = 0; e < blocks; ++e) {
        const int at = lane + kWarp * e;
        float grown = 1.0f;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if constexpr (rule == Rule::kDeltaByRow) grown *= decays[i][e];
            tile.keys[first_token + i][at] = raw.keys[i][e] * (factor_k[i] * grown);
            tile.queries[first_token + i][at] = raw.queries[i][e] * (factor_q[i] * grown);
        }
        if constexpr (rule == Rule::kDeltaByRow) {
            tile.decays[warp][at] = grown;
            float left = 1.0f;
#pragma unroll
            for (int i = count - 1; i >= 0; --i) {
                tile.left_keys[first_token + i][at] = raw.keys[i][e] * (factor_k[i] * left);
                left *= decays[i][e];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) tile.values[first_token + i][lane] = raw.values[i];
}

// Writes the group's part of a tile. `sums` is the warp's scratch of 32 floats.
template <Rule rule, int blocks, int count>
__device__ __forceinline__ void prepare(
    const RawGroup<rule, blocks, count>& raw, TileOf<rule, blocks, count>& tile, float* sums,
    const HeadNumbers<rule, blocks>& numbers, const MatrixState& args, int num_tokens, int warp,
    int lane
) {
    constexpr bool is_delta = rule != Rule::kScan, is_by_row = rule == Rule::kDeltaByRow;
    constexpr int kTriangle = count * (count + 1) / 2;
    constexpr int kSums = count == 4 ? 32 : count == 2 ? 8 : 4;
    float decays[count][HeadNumbers<rule, blocks>::kBiases];
#pragma unroll
    for (int i = 0; is_by_row && i < count; ++i) {
#pragma unroll
        for (int e = 0; e < blocks; ++e) {
            const int bias = e < HeadNumbers<rule, blocks>::kBiases ? e : 0;
            const float step = softplus(raw.steps[i][bias] + numbers.biases[bias]);
            decays[i][bias] = i < num_tokens ? expf(-numbers.decay * step) : 1.0f;
        }
    }
    float dots[kSums] = {};
    multiply_group(dots, raw, decays);
    const float sum = scatter_sums<kWarp>(dots, lane);
    if (lane < kSums) sums[lane] = sum;
    __syncwarp();

    float factor_k[count], factor_q[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        factor_k[i] = factor_q[i] = 1.0f;
        if constexpr (is_delta) {
            factor_k[i] = rsqrtf(sums[i * (i + 1) / 2 + i] + kL2Eps);
            factor_q[i] =
                rsqrtf(sums[2 * kTriangle + i] + kL2Eps) * rsqrtf(static_cast<float>(args.depth));
        }
    }
    store_group(raw, tile, factor_k, factor_q, decays, warp, lane);

    float steps = softplus(raw.step + numbers.biases[0]);
    float beta = steps;
    if constexpr (is_delta) {
        beta = 1.0f / (1.0f + expf(-raw.beta));
    } else {
        beta = steps = fminf(fmaxf(steps, args.least_step), args.largest_step);
    }
    const bool is_token = lane < num_tokens;
    const float own = is_token && !is_by_row ? -numbers.decay * steps : 0.0f;
    float totals[count];  // logarithms of the decays from before the group
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        total += __shfl_sync(0xffffffffu, own, i);
        totals[i] = total;
    }
    Group<count>& group = tile.groups[warp];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (lane == i) {
            group.grown[i] = expf(totals[i]);
            group.left[i] = expf(total - totals[i]);
            group.beta[i] = is_token ? beta : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const int at = i * (i + 1) / 2 + j;
            if (j > i || lane != at) continue;
            const float between = expf(totals[i] - totals[j]) * factor_k[j];
            group.inner[i][j] = between * factor_k[i] * sums[at];
            group.outer[i][j] = between * factor_q[i] * sums[kTriangle + at];
        }
    }
    __syncwarp();  // before the next group's sums
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// One kernel for the gated delta rule, with a decay per head or per row of the state, and the state
// scan of Mamba-2, token by token.
//
// Contract   exl/cuda/recurrent.h.
// State      A head has a matrix S of `depth` rows and `width` columns: [key_dim, value_dim] of the
//            delta rule, and the transpose of [head_dim, state_size] of the scan. Columns are
//            independent. With a key k, a query q and a decay exp(g) for each token:
//              delta rule   d = beta (v - exp(g) S^T k)      scan   d = step * x
//              S = exp(g) S + k d^T;  y = S^T q (+ skip * x)
//            With a decay per row, exp(g) is a diagonal matrix.
// Mapping    A warp has 8 columns, a thread 2 of them and an eighth of their rows, in registers from
//            the first token to the last. A block has 32 columns of one head of one sequence.
// Tokens     are computed in groups of `count`: with S before the group and the products k_j k_i and
//            k_j q_i, the d of a group are a triangular system. S is read once and written once per
//            group: (3 + 1 / count) operations per element and token instead of 4, and one sum over
//            lanes per group. Each warp prepares one group of a tile while the tile before is
//            computed: it normalizes keys and queries, and computes their products and decays.
//            Decays per row are multiplied into the tile's keys and queries.
// Accuracy   fp32. Decays within a group are exponentials of sums of g, at most 1.
// Floor      Decode: the states twice at memory bandwidth. Prompts: 3.25 operations per element and
//            token on the fp32 units, 0.13 ms for 2048 tokens of 32 heads of 128 x 128 on an H100.
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

// The block's part of the state in the registers of a thread.
template <bool is_delta, int blocks>
struct HeldState {
    float s[blocks][4][2];

    // Rows 32 j + 4 row_lane + i, columns `column` and `column` + 1.
    template <bool is_store>
    __device__ __forceinline__ void move(
        float* head, const MatrixState& args, int row_lane, int column
    ) {
        const int depth = args.depth, width = args.width;
        const bool is_pair = is_delta ? width % 2 == 0 : depth % 4 == 0;
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int row = kRowBlock * j + 4 * row_lane;
            if constexpr (is_delta) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (row + i >= depth || column >= width) continue;
                    float* at = head + (row + i) * width + column;
                    if (is_pair) {
                        float2& two = *reinterpret_cast<float2*>(at);
                        if constexpr (is_store) {
                            two = make_float2(s[j][i][0], s[j][i][1]);
                        } else {
                            const float2 found = two;
                            s[j][i][0] = found.x, s[j][i][1] = found.y;
                        }
                        continue;
                    }
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        if (column + c < width) move_one<is_store>(at[c], s[j][i][c]);
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (column + c >= width || row >= depth) continue;
                    float* at = head + (column + c) * depth + row;
                    if (is_pair) {
                        float4& four = *reinterpret_cast<float4*>(at);
                        if constexpr (is_store) {
                            four = make_float4(s[j][0][c], s[j][1][c], s[j][2][c], s[j][3][c]);
                        } else {
                            const float4 found = four;
                            s[j][0][c] = found.x, s[j][1][c] = found.y;
                            s[j][2][c] = found.z, s[j][3][c] = found.w;
                        }
                        continue;
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (row + i < depth) move_one<is_store>(at[i], s[j][i][c]);
                    }
                }
            }
        }
    }
    template <bool is_store>
    static __device__ __forceinline__ void move_one(float& there, float& here) {
        if constexpr (is_store) {
            there = here;
        } else {
            here = there;
        }
    }
};

// Computes one group of tokens, the first of which is row `first`; y begins at the thread's head.
template <Rule rule, int blocks, int count>
__device__ __forceinline__ void compute_group(
    HeldState<rule != Rule::kScan, blocks>& state, const TileOf<rule, blocks, count>& tile,
    int index, float skip, float* y, int64_t y_stride, int num_tokens, int column, int width,
    int lane
) {
    constexpr bool is_delta = rule != Rule::kScan;
    constexpr int n = 2 * count;  // values of a thread's columns
    const int row_lane = lane % kRowLanes, first_token = index * count;
    float4 keys[count][blocks];
    float with_keys[n] = {}, with_queries[n] = {};
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int at = kRowBlock * j + 4 * row_lane;
            const float4 k = *reinterpret_cast<const float4*>(&tile.keys[first_token + i][at]);
            const float4 q = *reinterpret_cast<const float4*>(&tile.queries[first_token + i][at]);
            keys[i][j] = k;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float s0 = state.s[j][0][c], s1 = state.s[j][1][c];
                const float s2 = state.s[j][2][c], s3 = state.s[j][3][c];
                float& b = with_queries[2 * i + c];
                b += s0 * q.x, b += s1 * q.y, b += s2 * q.z, b += s3 * q.w;
                if constexpr (is_delta) {
                    float& a = with_keys[2 * i + c];
                    a += s0 * k.x, a += s1 * k.y, a += s2 * k.z, a += s3 * k.w;
                }
            }
        }
    }
    const Group<count>& group = tile.groups[index];
    float d[count][2];
    float from_state[n];
    if constexpr (is_delta) {
        const float own = scatter_sums<kRowLanes>(with_keys, lane);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            from_state[i] = __shfl_sync(0xffffffffu, own, (lane & ~(kRowLanes - 1)) | i);
        }
    }
    const float result = scatter_sums<kRowLanes>(with_queries, lane);
    const int place = column % kBlockColumns;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const float2 v = *reinterpret_cast<const float2*>(&tile.values[first_token + i][place]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float wanted = c == 0 ? v.x : v.y;
            if constexpr (is_delta) {
                wanted -= group.grown[i] * from_state[2 * i + c];
#pragma unroll
                for (int j = 0; j < count; ++j) {
                    if (j < i) wanted -= group.inner[i][j] * d[j][c];
                }
            }
            d[i][c] = group.beta[i] * wanted;
        }
    }
    // Lane r has the result of token r / 2 and column r % 2.
    const int token = row_lane / 2, odd = row_lane % 2;
    if (row_lane < n && token < num_tokens && column + odd < width) {
        float sum = group.grown[token] * result;
#pragma unroll
        for (int j = 0; j < count; ++j) {
            if (j <= token) sum += group.outer[token][j] * (odd ? d[j][1] : d[j][0]);
        }
        if constexpr (!is_delta) sum += skip * tile.values[first_token + token][place + odd];
        y[token * y_stride + column + odd] = sum;
    }
#pragma unroll
    for (int j = 0; j < blocks; ++j) {
        float4 grown;
        if constexpr (rule == Rule::kDeltaByRow) {
            const int at = kRowBlock * j + 4 * row_lane;
            grown = *reinterpret_cast<const float4*>(&tile.decays[index][at]);
        } else {
            const float all = group.grown[count - 1];
            grown = make_float4(all, all, all, all);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            state.s[j][0][c] *= grown.x, state.s[j][1][c] *= grown.y;
            state.s[j][2][c] *= grown.z, state.s[j][3][c] *= grown.w;
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const float left = group.left[i];
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            float4 k = keys[i][j];
            if constexpr (rule == Rule::kDeltaByRow) {
                const int at = kRowBlock * j + 4 * row_lane;
                k = *reinterpret_cast<const float4*>(&tile.left_keys[first_token + i][at]);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float added = left * d[i][c];
                state.s[j][0][c] += k.x * added, state.s[j][1][c] += k.y * added;
                state.s[j][2][c] += k.z * added, state.s[j][3][c] += k.w * added;
            }
        }
    }
}

// Grid: parts of 32 columns, heads, sequences and, where there may be padding, one block more.
template <Rule rule, int blocks, int count>
__global__ void __launch_bounds__(kStateThreads) matrix_state_kernel(MatrixState args) {
    constexpr bool is_delta = rule != Rule::kScan;
    __shared__ alignas(16) TileOf<rule, blocks, count> tiles[2];
    __shared__ float sums[kStateWarps][kWarp];
    let_next_begin();
    const int warp = static_cast<int>(uniform(threadIdx.x / kWarp)), lane = threadIdx.x % kWarp;
    const int head = blockIdx.y, seq = blockIdx.z, row_lane = lane % kRowLanes;
    const int column = blockIdx.x * kBlockColumns + warp * kWarpColumns + lane / kRowLanes * 2;
    const int64_t y_stride = static_cast<int64_t>(args.heads) * args.width;
    float* y = args.y + static_cast<int64_t>(head) * args.width;
    if (seq == args.rows.seqs) {
        wait_for_inputs();
        const int padding = blockIdx.x * kBlockColumns + lane;
        for (int row = args.rows.row_starts[seq] + warp; row < args.rows.rows; row += kStateWarps) {
            if (padding < args.width) y[row * y_stride + padding] = 0.0f;
        }
        return;
    }
    const int first = args.rows.row_starts[seq], last = args.rows.row_starts[seq + 1];
    if (first == last || last - first > args.longest) {
        wait_for_inputs();
        return;
    }
    // The state is read before the wait: no kernel of this pass has written it.
    const int64_t held = args.rows.slots[seq] * args.heads + head;
    float* head_state = args.states + held * args.depth * args.width;
    HeldState<is_delta, blocks> state = {};
    if (args.rows.past_lens[seq] > 0) {
        state.template move<false>(head_state, args, row_lane, column);
    }
    HeadNumbers<rule, blocks> numbers;
    numbers.load(args, head, lane);
    const float skip = is_delta ? 0.0f : args.skip[head];
    const int key_head =
        args.is_tiled ? head % args.key_heads : head / (args.heads / args.key_heads);
    wait_for_inputs();

    constexpr int kTokens = Tile<blocks, count>::kTokens;
    RawGroup<rule, blocks, count> raw;
    int own = first + warp * count;  // first row of the group that this warp prepares
    if (own < last) {
        load_group(raw, args, head, key_head, own, last, lane);
        prepare(raw, tiles[0], sums[warp], numbers, args, min(count, last - own), warp, lane);
    }
    int current = 0;
    for (int row = first; row < last; row += kTokens) {
        __syncthreads();  // the tile is complete, and the other one is no longer read
        own += kTokens;
        if (own < last) load_group(raw, args, head, key_head, own, last, lane);
#pragma unroll 1
        for (int i = 0; i < kStateWarps && row + i * count < last; ++i) {
            const int from = row + i * count;
            compute_group<rule, blocks, count>(
                state, tiles[current], i, skip, y + from * y_stride, y_stride,
                min(count, last - from), column, args.width, lane
            );
        }
        current ^= 1;
        if (own < last) {
            prepare(
                raw, tiles[current], sums[warp], numbers, args, min(count, last - own), warp, lane
            );
        }
    }
    state.template move<true>(head_state, args, row_lane, column);
}

template <Rule rule, int blocks, int count>
cudaError_t launch_matrix_state(const MatrixState& args, void* stream) {
    const bool has_padding = args.rows.rows != args.rows.seqs;
    const dim3 grid(
        static_cast<unsigned>(ceil_div(args.width, kBlockColumns)), args.heads,
        args.rows.seqs + has_padding
    );
    return launch(
        matrix_state_kernel<rule, blocks, count>, grid, dim3(kStateThreads), 0, stream, args
    );
}

// One token per group in decode. Otherwise four, or two where two tiles of four would not fit 48 KiB.
template <Rule rule, int blocks>
cudaError_t launch_matrix_state(const MatrixState& args, void* stream) {
    constexpr int kGroup = rule == Rule::kDeltaByRow ? (blocks > 4 ? 1 : 2) : blocks > 4 ? 2 : 4;
    return args.rows.rows <= args.rows.seqs
               ? launch_matrix_state<rule, blocks, 1>(args, stream)
               : launch_matrix_state<rule, blocks, kGroup>(args, stream);
}

template <Rule rule>
cudaError_t run_matrix_state(const MatrixState& args, void* stream) {
    const bool fits = args.rows.rows >= 0 && args.rows.seqs >= 0 && args.rows.seqs < 65535 &&
                      args.heads >= 1 && args.heads < 65536 && args.key_heads >= 1 &&
                      args.heads % args.key_heads == 0 && args.width >= 1 && args.depth >= 1 &&
                      args.depth <= EXL_CUDA_MAX_STATE_DEPTH;
    if (!fits) return cudaErrorInvalidValue;
    if (args.rows.rows == 0) return cudaSuccess;
    if (args.depth <= kRowBlock) return launch_matrix_state<rule, 1>(args, stream);
    if (args.depth <= 2 * kRowBlock) return launch_matrix_state<rule, 2>(args, stream);
    if (args.depth <= 4 * kRowBlock) return launch_matrix_state<rule, 4>(args, stream);
    return launch_matrix_state<rule, 8>(args, stream);
}

#endif  // __CUDACC__

}  // namespace exl::cuda

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

#include "cuda/recurrent/matrix_state_group.cuh"

namespace exl::cuda {

#ifdef __CUDACC__

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

// One token per group in decode, and in the batch-invariant mode, in which no group may depend on
// where a pass begins. Otherwise four, or two where two tiles of four would not fit 48 KiB.
template <Rule rule, int blocks>
cudaError_t launch_matrix_state(const MatrixState& args, void* stream) {
    constexpr int kGroup = rule == Rule::kDeltaByRow ? (blocks > 4 ? 1 : 2) : blocks > 4 ? 2 : 4;
    return args.rows.rows <= args.rows.seqs || args.is_invariant
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

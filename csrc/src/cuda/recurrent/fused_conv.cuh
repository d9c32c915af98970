// Convolution of the inputs of the delta rule and the state scan, inside their kernel.
//
// Contract   exl/cuda/recurrent.h (ExlFusedConv).
// Mapping    A thread block convolves the key and query of its key head, and its 32 values, when a
//            warp loads a token. A lane has the same channels as in `load_group`. What the first token
//            needs from the state is summed up before the wait for the previous kernel.
// State      Values: a block has its channels for itself. Keys and queries: all blocks of a key head
//            read their state, and the one that counts last writes it, after all of them have read.
// Accuracy   The sums of causal_conv.cu, in the same order.
#pragma once

#include "cuda/recurrent/matrix_state_group.cuh"

namespace exl::cuda {

#ifdef __CUDACC__

// Channels of a lane: elements of the key, of the query, and one value.
template <int blocks>
struct FusedConv {
    static constexpr int kTaps = EXL_CUDA_FUSED_TAPS, kOwn = 2 * blocks + 1;

    int channels[kOwn];  // -1: the lane has none
    float before[kOwn];  // sums for the first token, without its own input
    float newest[kOwn];  // factors of a token's own input
    float* state;
    int first;  // row of the first token
    bool has_past, is_last;

    __device__ __forceinline__ void start(
        const MatrixState& args, int seq, int head, int key_head, bool is_first_warp, int lane
    ) {
        const int64_t size = static_cast<int64_t>(kTaps - 1) * args.channels();
        state = args.conv.states + args.rows.slots[seq] * size;
        first = args.rows.row_starts[seq];
        has_past = args.rows.past_lens[seq] > 0;
        is_last = false;
        const int key = static_cast<int>(args.key_first) + key_head * args.depth;
        const int query = static_cast<int>(args.query_first) + key_head * args.depth;
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int at = lane + kWarp * j;
            channels[j] = at < args.depth ? key + at : -1;
            channels[blocks + j] = at < args.depth ? query + at : -1;
        }
        const int column = blockIdx.x * kBlockColumns + lane;
        const int value = static_cast<int>(args.value_first) + head * args.width + column;
        channels[kOwn - 1] = column < args.width ? value : -1;
        if (!is_first_warp) return;  // it prepares the first token
        // No load depends on a branch of its own, so that all are in flight together.
        float weights[kTaps][kOwn], held[kTaps - 1][kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int channel = max(channels[i], 0);
#pragma unroll
            for (int t = 0; t < kTaps; ++t) {
                weights[t][i] = args.conv.weight[t * args.channels() + channel];
            }
#pragma unroll
            for (int t = 0; t < kTaps - 1; ++t) held[t][i] = state[t * args.channels() + channel];
            before[i] = args.conv.bias == nullptr ? 0.0f : args.conv.bias[channel];
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
            for (int t = 0; t < kTaps - 1; ++t) {
                before[i] += weights[t][i] * (has_past ? held[t][i] : 0.0f);
            }
            newest[i] = weights[kTaps - 1][i];
        }
    }

    // Input `steps` tokens before `row`, at least one, from x or from the state.
    __device__ __forceinline__ float input(
        const MatrixState& args, int row, int steps, int channel
    ) const {
        const int at = row - steps;
        if (at >= first) return args.x[at * args.x_stride + channel];
        return has_past ? state[(at - first + kTaps - 1) * args.channels() + channel] : 0.0f;
    }

    __device__ __forceinline__ float sum_before(
        const MatrixState& args, int row, int channel
    ) const {
        float sum = args.conv.bias == nullptr ? 0.0f : args.conv.bias[channel];
#pragma unroll
        for (int t = 0; t < kTaps - 1; ++t) {
            const float weight = args.conv.weight[t * args.channels() + channel];
            sum += weight * input(args, row, kTaps - 1 - t, channel);
        }
        return sum;
    }

    // Convolves the inputs of the token of `row`.
    template <Rule rule>
    __device__ __forceinline__ void apply(
        RawGroup<rule, blocks, 1>& raw, const MatrixState& args, int row, int lane
    ) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            float& x = i < blocks     ? raw.keys[0][i % blocks]
                       : i < kOwn - 1 ? raw.queries[0][i % blocks]
                                      : raw.values[0];
            const int channel = channels[i];
            if (channel < 0) continue;
            float sum = before[i], factor = newest[i];
            if (row != first) {
                sum = sum_before(args, row, channel);
                factor = args.conv.weight[(kTaps - 1) * args.channels() + channel];
            }
            sum += factor * x;
            x = args.conv.has_silu ? sum / (1.0f + expf(-sum)) : sum;
        }
    }

    // Counts this block, when it has read all that it needs of the states.
    __device__ __forceinline__ void count(
        const MatrixState& args, int seq, int key_head, int lane
    ) {
        if (lane != 0) return;
        const uint32_t blocks_of_key = gridDim.x * (args.heads / args.key_heads);
        __threadfence();
        uint32_t* const counter = args.conv.counters + seq * args.key_heads + key_head;
        is_last = atomicInc(counter, blocks_of_key - 1) == blocks_of_key - 1;
    }

    // Writes the state after the rows before `end`: the last inputs, the newest last. By the warp
    // that counted.
    __device__ __forceinline__ void store(const MatrixState& args, int end, int lane) const {
        const bool has_keys = __shfl_sync(0xffffffffu, is_last, 0);
        if (has_keys) {
            store_some<0, kOwn>(args, end);
        } else {
            store_some<kOwn - 1, kOwn>(args, end);
        }
    }

  private:
    // The same for some channels. All inputs are loaded before one is stored.
    template <int from, int to>
    __device__ __forceinline__ void store_some(const MatrixState& args, int end) const {
        float inputs[kTaps - 1][to - from];
#pragma unroll
        for (int i = from; i < to; ++i) {
            const int channel = max(channels[i], 0);
#pragma unroll
            for (int t = 0; t < kTaps - 1; ++t) {
                const int at = end - (kTaps - 1) + t;  // row of the input, or before the first one
                const float* const held = state + (at - first + kTaps - 1) * args.channels();
                const float* const row = args.x + at * args.x_stride;
                const bool is_row = at >= first;
                const float found = (is_row ? row : held)[channel];
                inputs[t][i - from] = is_row || has_past ? found : 0.0f;
            }
        }
#pragma unroll
        for (int i = from; i < to; ++i) {
            if (channels[i] < 0) continue;
#pragma unroll
            for (int t = 0; t < kTaps - 1; ++t) {
                state[t * args.channels() + channels[i]] = inputs[t][i - from];
            }
        }
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

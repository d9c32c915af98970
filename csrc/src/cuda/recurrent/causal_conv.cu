// Causal convolution of each channel by itself, over the rows of each sequence.
//
// Contract   exl/cuda/recurrent.h.
// Mapping    One channel per thread, kTileRows rows per block, or one row in decode. The block that
//            has a sequence's first row also updates its state: it reads the old one, and takes the
//            new one from the last rows of the sequence in x. No other block touches the slot. That
//            block therefore computes all rows that need the old state, the first taps - 1, even
//            where they reach into the next tile.
// Overlap    Weights and the numbers of the batch, which come from the host, are loaded before the wait
//            for the previous kernel.
// Floor      x and y once, the states of sequences twice, at memory bandwidth. With few rows,
//            launch latency.
#include "cuda/common/common.cuh"
#include "exl/cuda/recurrent.h"

namespace exl::cuda {

constexpr int kConvThreads = 128;
constexpr int kTileRows = 16;  // per tile, taps - 1 rows are read a second time

// Sequence of a row: the last one that starts at or before it; `seqs` for padding.
__device__ __forceinline__ int sequence_of(const ExlStateRows& rows, int row) {
    int low = 0, high = rows.seqs + 1;  // the first sequence that starts after `row` is in between
    while (low < high) {
        const int middle = (low + high) / 2;
        if (rows.row_starts[middle] <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - 1;
}

// The last `taps` - 1 inputs before a row, the newest last.
template <class In, int taps>
struct ConvWindow {
    float held[taps - 1];

    __device__ __forceinline__ void load(
        const In* x, int64_t x_stride, const float* state, int64_t channels, int row, int start
    ) {
#pragma unroll
        for (int i = 0; i < taps - 1; ++i) {
            const int at = row - (taps - 1) + i, before = start - at;
            float value = 0.0f;
            if (before <= 0) {
                value = to_float(x[at * x_stride]);
            } else if (state != nullptr) {
                value = state[(taps - 1 - before) * channels];
            }
            held[i] = value;
        }
    }
    __device__ __forceinline__ void append(float value) {
#pragma unroll
        for (int i = 0; i < taps - 2; ++i) held[i] = held[i + 1];
        held[taps - 2] = value;
    }
};

template <class In, int taps>
__global__ void __launch_bounds__(kConvThreads) causal_conv_kernel(ExlCausalConv args, int tile) {
    let_next_begin();
    const int64_t channels = args.channels;
    const int channel = blockIdx.x * kConvThreads + threadIdx.x;
    const int first = blockIdx.y * tile, end = min(first + tile, args.rows.rows);
    if (channel >= channels) {
        wait_for_inputs();
        return;
    }
    float weight[taps];
#pragma unroll
    for (int i = 0; i < taps; ++i) weight[i] = args.weight[i * channels + channel];
    const float bias = args.bias == nullptr ? 0.0f : args.bias[channel];
    const In* x = static_cast<const In*>(args.x) + channel;
    float* y = args.y + channel;
    const auto output_of = [&](const ConvWindow<In, taps>& window, float value) {
        float sum = bias;
#pragma unroll
        for (int i = 0; i < taps - 1; ++i) sum += weight[i] * window.held[i];
        sum += weight[taps - 1] * value;
        return args.has_silu ? sum / (1.0f + expf(-sum)) : sum;
    };
    if (first + 1 == end && first < args.rows.seqs) {
        // Decode: row i is the only one of sequence i. No load depends on another one.
        const int start = args.rows.row_starts[first], stop = args.rows.row_starts[first + 1];
        const bool has_past = args.rows.past_lens[first] > 0;
        float* state = args.states + args.rows.slots[first] * (taps - 1) * channels + channel;
        if (start == first && stop == end) {
            wait_for_inputs();
            const float value = to_float(x[first * args.x_stride]);
            ConvWindow<In, taps> window;
#pragma unroll
            for (int i = 0; i < taps - 1; ++i) window.held[i] = state[i * channels];
#pragma unroll
            for (int i = 0; i < taps - 1; ++i) window.held[i] = has_past ? window.held[i] : 0.0f;
            y[first * channels] = output_of(window, value);
            window.append(value);
#pragma unroll
            for (int i = 0; i < taps - 1; ++i) state[i * channels] = window.held[i];
            return;
        }
    }
    int seq = sequence_of(args.rows, first);
    wait_for_inputs();
    int row = first;
    while (row < end && seq < args.rows.seqs) {
        const int start = args.rows.row_starts[seq], stop = args.rows.row_starts[seq + 1];
        if (row >= stop) {  // a sequence without rows
            ++seq;
            continue;
        }
        const int early_end = min(stop, start + taps - 1);  // end of the rows that need the state
        if (row > start && row < early_end) {
            row = early_end;  // computed by the block of the first row
            continue;
        }
        float* state = args.states + args.rows.slots[seq] * (taps - 1) * channels + channel;
        ConvWindow<In, taps> window;
        window.load(
            x, args.x_stride, args.rows.past_lens[seq] > 0 ? state : nullptr, channels, row, start
        );
        if (row == start) {
            ConvWindow<In, taps> last = window;
            for (int at = max(start, stop - (taps - 1)); at < stop; ++at) {
                last.append(to_float(x[at * args.x_stride]));
            }
#pragma unroll
            for (int i = 0; i < taps - 1; ++i) state[i * channels] = last.held[i];
        }
        const int until = row == start ? max(early_end, min(stop, end)) : min(stop, end);
        for (; row < until; ++row) {
            const float value = to_float(x[row * args.x_stride]);
            y[row * channels] = output_of(window, value);
            window.append(value);
        }
        ++seq;
    }
    for (; row < end; ++row) y[row * channels] = 0.0f;
}

template <class In, int taps = 2>
static cudaError_t launch_conv(const ExlCausalConv& args, void* stream) {
    if constexpr (taps > EXL_CUDA_MAX_TAPS) {
        return cudaErrorInvalidValue;
    } else {
        if (args.taps != taps) return launch_conv<In, taps + 1>(args, stream);
        // As many sequences as rows, or a few rows: one row per block.
        const int tile = args.rows.rows <= args.rows.seqs ? 1 : kTileRows;
        const int64_t tiles = ceil_div(args.rows.rows, tile);
        if (tiles > 65535) return cudaErrorInvalidValue;
        const dim3 grid(
            static_cast<unsigned>(ceil_div(args.channels, kConvThreads)),
            static_cast<unsigned>(tiles)
        );
        return launch(
            causal_conv_kernel<In, taps>, grid, dim3(kConvThreads), 0, stream, args, tile
        );
    }
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_causal_conv(const ExlCausalConv* args, void* stream) {
    const bool fits = args->rows.rows >= 0 && args->rows.seqs >= 0 && args->channels >= 1 &&
                      (args->x_dtype == kF32 || args->x_dtype == kF16);
    if (!fits) return cudaErrorInvalidValue;
    if (args->rows.rows == 0) return cudaSuccess;
    return args->x_dtype == kF32 ? launch_conv<float>(*args, stream)
                                 : launch_conv<__half>(*args, stream);
}

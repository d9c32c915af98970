// Causal convolution of each channel by itself, over the rows of each sequence.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    A work item is one sequence and a block of channels. Its rows are computed in order.
// Accuracy   fp32; the bias first, then the taps from the oldest input to the newest.
#include "cpu/elementwise/activation.h"
#include "cpu/recurrent/recurrent_common.h"

namespace exl::EXL_ISA {

constexpr int64_t kChannels = 64;  // of one work item: 2048 channels make 32 items

// Input of channel c at `row`, which may lie before the first row of this call.
static inline const float* input_at(
    const CausalConvArgs& args, const float* state, int64_t first, int64_t row, int64_t c
) {
    if (row >= first) return args.x + row * args.x_stride + c;
    const int64_t held = args.taps - 1 + row - first;
    return state == nullptr ? nullptr : state + held * args.channels + c;
}

static inline void convolve(
    const CausalConvArgs& args, const float* state, int64_t first, int64_t last, int64_t c,
    int count
) {
    const Vec start = args.bias == nullptr ? set1(0.0f) : load_some(args.bias + c, count);
    for (int64_t row = first; row < last; ++row) {
        Vec y = start;
        for (int64_t tap = 0; tap < args.taps; ++tap) {
            const float* x = input_at(args, state, first, row - args.taps + 1 + tap, c);
            const Vec weight = load_some(args.weight + tap * args.channels + c, count);
            const Vec input = x == nullptr ? set1(0.0f) : load_some(x, count);
            y = fma(weight, input, y);
        }
        store_some(args.y + row * args.channels + c, args.has_silu ? silu(y) : y, count);
    }
}

void causal_conv(ThreadPool& pool, const CausalConvArgs& args) {
    const int64_t blocks = ceil_div(args.channels, kChannels);
    for_sequences(pool, args.rows, blocks, [&](int64_t seq, int64_t block) {
        const int64_t first = args.rows.row_starts[seq];
        const int64_t last = args.rows.row_starts[seq + 1];
        const int64_t held = args.taps - 1;
        float* slot = args.states + args.rows.slots[seq] * held * args.channels;
        const float* state = args.rows.past_lens[seq] == 0 ? nullptr : slot;
        const int64_t begin = block * kChannels;
        for_lanes(smaller(kChannels, args.channels - begin), [&](int64_t i, int count) {
            const int64_t c = begin + i;
            convolve(args, state, first, last, c, count);
            // Oldest first: an input that comes from the state moves towards its beginning.
            for (int64_t n = 0; n < held; ++n) {
                const float* x = input_at(args, state, first, last - held + n, c);
                const Vec input = x == nullptr ? set1(0.0f) : load_some(x, count);
                store_some(slot + n * args.channels + c, input, count);
            }
        });
    });
}

}  // namespace exl::EXL_ISA

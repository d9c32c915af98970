// State scan of Mamba-2, token by token.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    A work item is one sequence, one head and kRows rows of its state, which are
//            independent of each other and stay in the L1 cache over all tokens.
// Accuracy   fp32; a product with C is summed in kLanes separate sums.
#include "cpu/recurrent/recurrent_common.h"

namespace exl::EXL_ISA {

constexpr int64_t kRows = 16;  // of 128 floats: 8 KiB

// A row of scratch: decay of the state, then the step, of each head.
static inline void prepare_row(const StateScanArgs& args, int64_t row, float* scratch) {
    for (int64_t head = 0; head < args.heads; ++head) {
        const float wanted = softplus(args.dt[row * args.dt_stride + head] + args.dt_bias[head]);
        const float least = wanted < args.least_step ? args.least_step : wanted;
        const float step = least > args.largest_step ? args.largest_step : least;
        scratch[head] = ::expf(-args.decay[head] * step);
        scratch[args.heads + head] = step;
    }
}

// Updates one row of a state with step * x * B and returns its product with C.
static inline float scan_row(
    float* h, const float* b, const float* c, int64_t n, float decay, float input, bool is_new
) {
    const Vec factor = set1(decay), added = set1(input);
    Vec total = set1(0.0f);
    for_lanes(n, [&](int64_t i, int count) {
        const Vec held = is_new ? set1(0.0f) : load_some(h + i, count);
        const Vec s = fma(added, load_some(b + i, count), mul(factor, held));
        store_some(h + i, s, count);
        total = fma(s, load_some(c + i, count), total);
    });
    return sum(total);
}

void state_scan(ThreadPool& pool, const StateScanArgs& args) {
    pool.parallel_for(args.num_rows, [&](int64_t row) {
        prepare_row(args, row, args.scratch + row * 2 * args.heads);
    });
    const int64_t blocks = ceil_div(args.head_dim, kRows);
    const int64_t inner = args.heads * args.head_dim;
    for_sequences(pool, args.rows, args.heads * blocks, [&](int64_t seq, int64_t part) {
        const int64_t head = part / blocks;
        const int64_t begin = part % blocks * kRows;
        const int64_t end = smaller(args.head_dim, begin + kRows);
        const int64_t group = head / (args.heads / args.groups);
        const int64_t matrix = args.rows.slots[seq] * args.heads + head;
        float* state = args.states + matrix * args.head_dim * args.state_size;
        bool is_new = args.rows.past_lens[seq] == 0;
        for (int64_t row = args.rows.row_starts[seq]; row < args.rows.row_starts[seq + 1]; ++row) {
            const float* x = args.xbc + row * args.xbc_stride;
            const float* b = x + inner + group * args.state_size;
            const float* c = b + args.groups * args.state_size;
            const float* gates = args.scratch + row * 2 * args.heads;
            for (int64_t p = begin; p < end; ++p) {
                const float value = x[head * args.head_dim + p];
                const float input = gates[args.heads + head] * value;
                const float y = scan_row(
                    state + p * args.state_size, b, c, args.state_size, gates[head], input, is_new
                );
                args.y[row * inner + head * args.head_dim + p] = y + args.skip[head] * value;
            }
            is_new = false;
        }
    });
}

}  // namespace exl::EXL_ISA

// y = act(gate) * up, and y = act(x).
//
// Contract   include/exl/ops/elementwise.h.
#include "cpu/elementwise/activation.h"
#include "cpu/common/ops.h"

namespace exl::EXL_ISA {

// Calls fn(row, columns) for every row and parts of its d columns, on the threads of the pool.
template <class Fn>
static void for_parts_of_rows(ThreadPool& pool, int64_t m, int64_t d, Fn&& fn) {
    const int64_t blocks_per_row = ceil_div(d, kValuesPerChunk / 4);
    const int64_t items = m * blocks_per_row;
    const int64_t per_item = larger(1, kValuesPerChunk / 4 / larger(1, d));
    pool.parallel_for(ceil_div(items, per_item), [&](int64_t item) {
        const int64_t last = smaller(items, (item + 1) * per_item);
        for (int64_t i = item * per_item; i < last; ++i) {
            fn(i / blocks_per_row, share(d, i % blocks_per_row, blocks_per_row));
        }
    });
}

template <class Act>
static void gated(ThreadPool& pool, const GatedActivationArgs& args, Act act) {
    for_parts_of_rows(pool, args.m, args.d, [&](int64_t row, Range columns) {
        const float* gate = args.x + row * args.x_stride + columns.first;
        const float* up = gate + args.d;
        float* y = args.y + row * args.d + columns.first;
        for_lanes(columns.count(), [&](int64_t j, int count) {
            store_some(y + j, act(load_some(gate + j, count), load_some(up + j, count)), count);
        });
    });
}

template <class Act>
static void plain(ThreadPool& pool, const ActivationArgs& args, Act act) {
    for_parts_of_rows(pool, args.m, args.d, [&](int64_t row, Range columns) {
        const float* x = args.x + row * args.x_stride + columns.first;
        float* y = args.y + row * args.d + columns.first;
        for_lanes(columns.count(), [&](int64_t j, int count) {
            store_some(y + j, act(load_some(x + j, count)), count);
        });
    });
}

void gated_activation(ThreadPool& pool, const GatedActivationArgs& args) {
    with_gate(args.gate, [&](auto act) { gated(pool, args, act); });
}

void activation(ThreadPool& pool, const ActivationArgs& args) {
    switch (args.kind) {
        case Activation::silu: return plain(pool, args, [](Vec x) { return silu(x); });
        case Activation::gelu_tanh: return plain(pool, args, [](Vec x) { return gelu_tanh(x); });
        case Activation::relu2:
            return plain(pool, args, [](Vec x) {
                // The comparison is false for NaN, which then stays visible.
                const Vec above = select(less(x, set1(0.0f)), set1(0.0f), x);
                return mul(above, above);
            });
    }
}

}  // namespace exl::EXL_ISA

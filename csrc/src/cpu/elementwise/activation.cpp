// y = act(gate) * up.
//
// Contract   include/exl/ops/elementwise.h.
#include "cpu/elementwise/activation.h"
#include "cpu/common/ops.h"

namespace exl::EXL_ISA {

template <class Act>
static void gated(ThreadPool& pool, const GatedActivationArgs& args, Act act) {
    const int64_t blocks_per_row = ceil_div(args.d, kValuesPerChunk / 4);
    const int64_t items = args.m * blocks_per_row;
    const int64_t per_item = larger(1, kValuesPerChunk / 4 / larger(1, args.d));
    pool.parallel_for(ceil_div(items, per_item), [&](int64_t item) {
        const int64_t last = smaller(items, (item + 1) * per_item);
        for (int64_t i = item * per_item; i < last; ++i) {
            const int64_t row = i / blocks_per_row;
            const int64_t block = i % blocks_per_row;
            const Range columns = share(args.d, block, blocks_per_row);
            const float* gate = args.x + row * args.x_stride + columns.first;
            const float* up = gate + args.d;
            float* y = args.y + row * args.d + columns.first;
            for_lanes(columns.count(), [&](int64_t j, int count) {
                const Vec value = act(load_some(gate + j, count));
                store_some(y + j, mul(value, load_some(up + j, count)), count);
            });
        }
    });
}

void gated_activation(ThreadPool& pool, const GatedActivationArgs& args) {
    with_activation(args.gate, [&](auto act) { gated(pool, args, act); });
}

}  // namespace exl::EXL_ISA

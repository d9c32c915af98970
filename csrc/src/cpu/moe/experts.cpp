// The experts of each row: y = sum of weight * down(act(gate(x)) * up(x)), for quantized experts.
//
// Contract   include/exl/ops/moe.h.
// Integers   As in quant_linear.cpp, always with 16-bit activations. No bit of a row's result
//            depends on the other rows.
// Groups     The (row, slot) pairs are sorted by expert; the pairs of an expert are a group. Groups
//            are in the order of the experts, pairs of a group in that of the rows. The place of a
//            pair is its index in this order:
//
//              ids        row 0: 5 2    row 1: 2 7    row 2: 5 0
//              groups     expert 0   2       5       7
//              pairs      (2,1)  (0,1) (1,0)  (0,0) (2,0)  (1,1)
//              place      0      1     2      3     4      5
//
//            Inputs, inner activations and outputs of the experts are stored by place, so that the
//            rows of a group are consecutive. Each used expert is read once per call.
// Mapping    A work item of a product is a range of panels of one group. All groups are in one
//            parallel region.
// Order      The outputs of a row's experts are added in the order of its slots.
#include "exl/ops/moe.h"

#include "cpu/linear/quant_panels.h"

namespace exl::EXL_ISA {

// Scratch slots of the calling thread.
constexpr int kPairSlot = 10;
constexpr int kInputSlot = 11;
constexpr int kInnerSlot = 12;
constexpr int kOutputSlot = 13;
// Work items per thread. More balance the load better, fewer read longer streams.
constexpr int64_t kItemsPerThread = 8;

struct Group {
    int32_t expert;
    int32_t first;  // place
    int32_t rows;
};

struct Sorted {
    Group* groups;
    int64_t count;
    int32_t* pairs;   // [m * top_k] row * top_k + slot of each place
    int32_t* places;  // [m * top_k] place of each pair
};

static Sorted sort_pairs(const ExpertMlpArgs& args) {
    const int64_t total = args.m * args.top_k;
    const int64_t bytes =
        (2 * total + args.experts) * 4 + args.experts * static_cast<int64_t>(sizeof(Group));
    auto* pairs = static_cast<int32_t*>(thread_scratch(kPairSlot, bytes));
    int32_t* places = pairs + total;
    int32_t* next = places + total;  // next free place of each expert
    auto* groups = reinterpret_cast<Group*>(next + args.experts);
    for (int64_t e = 0; e < args.experts; ++e) next[e] = 0;
    for (int64_t i = 0; i < total; ++i) ++next[args.ids[i]];
    int64_t count = 0;
    int32_t first = 0;
    for (int64_t e = 0; e < args.experts; ++e) {
        const int32_t rows = next[e];
        next[e] = first;
        if (rows == 0) continue;
        groups[count++] = {static_cast<int32_t>(e), first, rows};
        first += rows;
    }
    for (int64_t i = 0; i < total; ++i) {
        places[i] = next[args.ids[i]]++;
        pairs[places[i]] = static_cast<int32_t>(i);
    }
    return {groups, count, pairs, places};
}

// Quantized rows, a fixed number of bytes and of spans apart.
struct ActRows {
    uint8_t* data;
    float* scales;
    int32_t* sums;
    int64_t row_bytes;
    int64_t spans;

    static int64_t bytes(const ExpertMatrices& w, int64_t rows) {
        return padded(rows) * (w.blocks * kActBlock + w.spans * 8);
    }
    static ActRows at(void* memory, const ExpertMatrices& w, int64_t rows) {
        const int64_t row_bytes = w.blocks * kActBlock;
        auto* data = static_cast<uint8_t*>(memory);
        auto* scales = reinterpret_cast<float*>(data + padded(rows) * row_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + padded(rows) * w.spans);
        return {data, scales, sums, row_bytes, w.spans};
    }
    // Tile loads read past the last row of a group.
    static int64_t padded(int64_t rows) { return rows + kActRowStep; }

    Acts from(int64_t row) const {
        return {data + row * row_bytes, row_bytes, scales + row * spans,
                sums + row * spans,     spans,     kLowBits};
    }
    void quantize(const QuantMatrix& w, const float* x, int64_t row) const {
        const Acts to = from(row);
        quantize_row(w, x, kLowBits, to.data, to.scales, to.sums);
    }
    void copy(const ActRows& other, int64_t row, int64_t to_row) const {
        const Acts to = from(to_row);
        const Acts source = other.from(row);
        __builtin_memcpy(to.data, source.data, static_cast<size_t>(row_bytes));
        __builtin_memcpy(to.scales, source.scales, static_cast<size_t>(spans * 4));
        __builtin_memcpy(to.sums, source.sums, static_cast<size_t>(spans * 4));
    }
};

// Quantized inputs of the gate and up matrices.
struct Inputs {
    ActRows rows;  // one copy for all experts, by row; used if has_one_input
    ActRows gate;  // by place
    ActRows up;    // by place; the same as `gate` if has_one_input

    // A group of one row reads the copy by row, which then need not be copied to its place.
    Acts of(const ExpertMlpArgs& args, const Sorted& sorted, const Group& group, bool is_up) const {
        if (args.has_one_input && group.rows == 1) {
            return rows.from(sorted.pairs[group.first] / args.top_k);
        }
        return (is_up ? up : gate).from(group.first);
    }
};

static Inputs quantize_inputs(ThreadPool& pool, const ExpertMlpArgs& args, const Sorted& sorted) {
    const int64_t total = args.m * args.top_k;
    const auto input = [&](int64_t pair) { return args.x + pair / args.top_k * args.x_stride; };
    if (args.has_one_input) {
        const int64_t by_row = ActRows::bytes(args.gate, args.m);
        auto* memory = static_cast<uint8_t*>(
            thread_scratch(kInputSlot, by_row + ActRows::bytes(args.gate, total))
        );
        Inputs inputs{};
        inputs.rows = ActRows::at(memory, args.gate, args.m);
        inputs.gate = inputs.up = ActRows::at(memory + by_row, args.gate, total);
        const QuantMatrix& w = *args.gate.experts[0];
        pool.parallel_for(args.m, [&](int64_t row) {
            inputs.rows.quantize(w, args.x + row * args.x_stride, row);
        });
        if (args.m == 1) return inputs;
        pool.parallel_for(sorted.count, [&](int64_t item) {
            const Group& group = sorted.groups[item];
            if (group.rows == 1) return;
            for (int64_t place = group.first; place < group.first + group.rows; ++place) {
                inputs.gate.copy(inputs.rows, sorted.pairs[place] / args.top_k, place);
            }
        });
        return inputs;
    }
    const int64_t gate_bytes = ActRows::bytes(args.gate, total);
    auto* memory = static_cast<uint8_t*>(
        thread_scratch(kInputSlot, gate_bytes + ActRows::bytes(args.up, total))
    );
    Inputs inputs{};
    inputs.gate = ActRows::at(memory, args.gate, total);
    inputs.up = ActRows::at(memory + gate_bytes, args.up, total);
    pool.parallel_for(total, [&](int64_t place) {
        const int64_t pair = sorted.pairs[place];
        const int32_t expert = args.ids[pair];
        inputs.gate.quantize(*args.gate.experts[expert], input(pair), place);
        inputs.up.quantize(*args.up.experts[expert], input(pair), place);
    });
    return inputs;
}

// Calls item(group, panels) for ranges of panels that cover the `panels` panels of every group.
template <class Item>
static void for_panels(ThreadPool& pool, const Sorted& sorted, int64_t panels, Item&& item) {
    const int64_t wanted = ceil_div(kItemsPerThread * pool.threads(), sorted.count);
    const int64_t splits = smaller(ceil_div(panels, 2), wanted);
    pool.parallel_for(sorted.count * splits, [&](int64_t i) {
        item(sorted.groups[i / splits], share(panels, i % splits, splits));
    });
}

// Calls part(rows) for ranges of a group's rows whose activations stay in L2.
template <class Part>
static void for_rows(const Group& group, Part&& part) {
    for (int64_t row = 0; row < group.rows; row += kActRows) {
        part(Range{row, smaller(group.rows, row + kActRows)});
    }
}

static void gated_products(
    ThreadPool& pool, const ExpertMlpArgs& args, const Sorted& sorted, const Inputs& inputs,
    float* inner
) {
    const int64_t width = args.gate.experts[0]->n;
    for_panels(
        pool, sorted, args.gate.experts[0]->panels(), [&](const Group& group, const Range& panels) {
            QuantLinearArgs call{};
            call.parts[0] = args.gate.experts[group.expert];
            call.parts[1] = args.up.experts[group.expert];
            call.count = 2;
            call.epilogue = Epilogue::gated;
            call.gate = args.kind;
            call.y = inner + group.first * width;
            call.y_stride = width;
            const Acts acts[2] = {
                inputs.of(args, sorted, group, false), inputs.of(args, sorted, group, true)
            };
            for_rows(group, [&](const Range& rows) { gated_panels(call, acts, rows, panels); });
        }
    );
}

static void down_products(
    ThreadPool& pool, const ExpertMlpArgs& args, const Sorted& sorted, const float* inner,
    float* outputs
) {
    const int64_t width = args.gate.experts[0]->n;
    const int64_t total = args.m * args.top_k;
    const int64_t n = args.down.experts[0]->n;
    const ActRows rows_of =
        ActRows::at(thread_scratch(kInputSlot, ActRows::bytes(args.down, total)), args.down, total);
    pool.parallel_for(total, [&](int64_t place) {
        const int32_t expert = args.ids[sorted.pairs[place]];
        rows_of.quantize(*args.down.experts[expert], inner + place * width, place);
    });
    for_panels(
        pool, sorted, args.down.experts[0]->panels(), [&](const Group& group, const Range& panels) {
            QuantLinearArgs call{};
            call.parts[0] = args.down.experts[group.expert];
            call.count = 1;
            call.y = outputs + group.first * n;
            call.y_stride = n;
            const Acts acts = rows_of.from(group.first);
            for_rows(group, [&](const Range& rows) {
                part_panels(call, &acts, 0, rows, panels, 0);
            });
        }
    );
}

// y[row] = sum of the weighted outputs of the row's experts.
static void add_outputs(
    ThreadPool& pool, const ExpertMlpArgs& args, const Sorted& sorted, const float* outputs
) {
    const int64_t n = args.down.experts[0]->n;
    pool.parallel_for(args.m, [&](int64_t row) {
        const int32_t* places = sorted.places + row * args.top_k;
        const float* weights = args.weights + row * args.top_k;
        for_lanes(n, [&](int64_t c, int count) {
            Vec sum = set1(0.0f);
            for (int64_t j = 0; j < args.top_k; ++j) {
                sum = fma(set1(weights[j]), load_some(outputs + places[j] * n + c, count), sum);
            }
            store_some(args.y + row * n + c, sum, count);
        });
    });
}

void expert_mlp(ThreadPool& pool, const ExpertMlpArgs& args) {
    if (args.m == 0) return;
    const Sorted sorted = sort_pairs(args);
    const Inputs inputs = quantize_inputs(pool, args, sorted);
    const int64_t total = args.m * args.top_k;
    const int64_t width = args.gate.experts[0]->n;
    auto* inner = static_cast<float*>(thread_scratch(kInnerSlot, total * width * 4));
    gated_products(pool, args, sorted, inputs, inner);
    const int64_t output_bytes = total * args.down.experts[0]->n * 4;
    auto* outputs = static_cast<float*>(thread_scratch(kOutputSlot, output_bytes));
    down_products(pool, args, sorted, inner, outputs);
    add_outputs(pool, args, sorted, outputs);
}

}  // namespace exl::EXL_ISA

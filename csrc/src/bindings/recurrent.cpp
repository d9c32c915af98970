// Bindings of the recurrent ops. Checks every value that the kernels use as an index: rows of each
// sequence and slots.
#include "exl/ops/recurrent.h"

#include <memory>
#include <string>
#include <unordered_set>

#include "bindings/convert.h"

namespace exl {

static StateRows view_rows(
    const char* op, py::handle row_starts, py::handle past_lens, py::handle slots, int64_t rows,
    int64_t slot_count
) {
    const Operand starts_operand{op, "row_starts"}, slots_operand{op, "slots"};
    const TensorView held = view_of(slots_operand, slots, {DType::i64}, {kAnySize}, 0);
    const int64_t seqs = held.shape[0];
    const TensorView starts = view_of(starts_operand, row_starts, {DType::i32}, {seqs + 1}, 0);
    const TensorView past = view_of({op, "past_lens"}, past_lens, {DType::i32}, {seqs}, 0);
    const StateRows found{starts.as<int32_t>(), past.as<int32_t>(), held.as<int64_t>(), seqs};
    if (found.row_starts[0] != 0 || found.row_starts[seqs] != rows) {
        fail(
            starts_operand, "0 first and " + std::to_string(rows) + " last",
            std::to_string(found.row_starts[0]) + " and " + std::to_string(found.row_starts[seqs])
        );
    }
    std::unordered_set<int64_t> used;
    for (int64_t seq = 0; seq < seqs; ++seq) {
        const int64_t slot = found.slots[seq];
        if (found.row_starts[seq + 1] < found.row_starts[seq]) {
            fail(starts_operand, "ascending values", "less at index " + std::to_string(seq + 1));
        }
        if (slot < 0 || slot >= slot_count) {
            fail(
                slots_operand, "slots within [0, " + std::to_string(slot_count) + ")",
                std::to_string(slot)
            );
        }
        const bool has_rows = found.row_starts[seq + 1] > found.row_starts[seq];
        if (has_rows && !used.insert(slot).second) {
            fail(slots_operand, "a slot of its own for each sequence", std::to_string(slot));
        }
    }
    return found;
}

// States [slots, heads, rows, columns], whose heads share the operand `shared` in equal groups.
static TensorView view_states(
    const char* op, py::handle states, const char* shared, int64_t count
) {
    const TensorView held =
        view_of({op, "states"}, states, {DType::f32}, {kAnySize, kAnySize, kAnySize, kAnySize}, 0);
    if (count < 1 || held.shape[1] % count != 0) {
        fail({op, shared}, "a divisor of the heads", std::to_string(count));
    }
    return held;
}

static std::unique_ptr<float[]> new_scratch(int64_t rows, int64_t each) {
    return std::unique_ptr<float[]>(new float[static_cast<size_t>(rows * each)]);
}

static const float* vector_of(const char* op, const char* name, py::handle x, int64_t size) {
    return view_of({op, name}, x, {DType::f32}, {size}, 0).as<float>();
}

static void causal_conv(
    Table& table, py::handle x, py::handle weight, py::handle bias, bool has_silu,
    py::handle states, py::handle row_starts, py::handle past_lens, py::handle slots, py::handle y
) {
    const char* op = "causal_conv";
    const TensorView w = view_of({op, "weight"}, weight, {DType::f32}, {kAnySize, kAnySize}, 0);
    const int64_t taps = w.shape[0], channels = w.shape[1];
    if (taps < 1) fail({op, "weight"}, "at least one tap", "none");
    const TensorView from = view_of({op, "x"}, x, {DType::f32}, {kAnySize, channels}, 1);
    const TensorView held =
        view_of({op, "states"}, states, {DType::f32}, {kAnySize, taps - 1, channels}, 0);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {from.shape[0], channels}, 0);
    const CausalConvArgs args{
        from.as<float>(),
        from.stride[0],
        channels,
        taps,
        w.as<float>(),
        bias.is_none() ? nullptr : vector_of(op, "bias", bias, channels),
        has_silu,
        held.as<float>(),
        view_rows(op, row_starts, past_lens, slots, from.shape[0], held.shape[0]),
        to.as<float>()
    };
    py::gil_scoped_release release;
    table.ops->causal_conv(table.pool, args);
}

static void delta_rule(
    Table& table, py::handle qkv, py::handle b, py::handle a, int64_t key_heads, bool is_tiled,
    bool is_by_row, py::handle decay, py::handle dt_bias, py::handle states, py::handle row_starts,
    py::handle past_lens, py::handle slots, py::handle y
) {
    const char* op = "delta_rule";
    const TensorView held = view_states(op, states, "key_heads", key_heads);
    const int64_t heads = held.shape[1], key_dim = held.shape[2], value_dim = held.shape[3];
    const int64_t width = 2 * key_heads * key_dim + heads * value_dim;
    const TensorView from = view_of({op, "qkv"}, qkv, {DType::f32}, {kAnySize, width}, 1);
    const int64_t rows = from.shape[0];
    const int64_t decays = is_by_row ? key_dim : 1;
    const TensorView from_a = view_of({op, "a"}, a, {DType::f32}, {rows, heads * decays}, 1);
    const TensorView from_b = view_of({op, "b"}, b, {DType::f32}, {rows, heads}, 1);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {rows, heads * value_dim}, 0);
    const int64_t scratch_width = delta_scratch_width(key_heads, heads, key_dim, decays);
    const auto scratch = new_scratch(rows, scratch_width);
    const DeltaRuleArgs args{
        from.as<float>(),
        from.stride[0],
        from_a.as<float>(),
        from_a.stride[0],
        from_b.as<float>(),
        from_b.stride[0],
        rows,
        key_heads,
        heads,
        key_dim,
        value_dim,
        decays,
        vector_of(op, "decay", decay, heads),
        vector_of(op, "dt_bias", dt_bias, heads * decays),
        is_tiled,
        held.as<float>(),
        view_rows(op, row_starts, past_lens, slots, rows, held.shape[0]),
        table.is_batch_invariant,
        scratch.get(),
        to.as<float>()
    };
    py::gil_scoped_release release;
    table.ops->delta_rule(table.pool, args);
}

static void state_scan(
    Table& table, py::handle xbc, py::handle dt, int64_t groups, py::handle decay,
    py::handle dt_bias, py::handle skip, float least_step, float largest_step, py::handle states,
    py::handle row_starts, py::handle past_lens, py::handle slots, py::handle y
) {
    const char* op = "state_scan";
    const TensorView held = view_states(op, states, "groups", groups);
    const int64_t heads = held.shape[1], head_dim = held.shape[2], size = held.shape[3];
    const int64_t width = heads * head_dim + 2 * groups * size;
    const TensorView from = view_of({op, "xbc"}, xbc, {DType::f32}, {kAnySize, width}, 1);
    const int64_t rows = from.shape[0];
    const TensorView from_dt = view_of({op, "dt"}, dt, {DType::f32}, {rows, heads}, 1);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {rows, heads * head_dim}, 0);
    const auto scratch = new_scratch(rows, scan_scratch_width(heads, groups, size));
    const StateScanArgs args{
        from.as<float>(),
        from.stride[0],
        from_dt.as<float>(),
        from_dt.stride[0],
        rows,
        heads,
        head_dim,
        size,
        groups,
        vector_of(op, "decay", decay, heads),
        vector_of(op, "dt_bias", dt_bias, heads),
        vector_of(op, "skip", skip, heads),
        least_step,
        largest_step,
        held.as<float>(),
        view_rows(op, row_starts, past_lens, slots, rows, held.shape[0]),
        table.is_batch_invariant,
        scratch.get(),
        to.as<float>()
    };
    py::gil_scoped_release release;
    table.ops->state_scan(table.pool, args);
}

void bind_recurrent(py::class_<Table>& table) {
    table
        .def(
            "causal_conv", &causal_conv, py::arg("x"), py::arg("weight"), py::arg("bias"),
            py::arg("has_silu"), py::arg("states"), py::arg("row_starts"), py::arg("past_lens"),
            py::arg("slots"), py::arg("out")
        )
        .def(
            "delta_rule", &delta_rule, py::arg("qkv"), py::arg("b"), py::arg("a"),
            py::arg("key_heads"), py::arg("is_tiled"), py::arg("is_by_row"), py::arg("decay"),
            py::arg("dt_bias"), py::arg("states"), py::arg("row_starts"), py::arg("past_lens"),
            py::arg("slots"), py::arg("out")
        )
        .def(
            "state_scan", &state_scan, py::arg("xbc"), py::arg("dt"), py::arg("groups"),
            py::arg("decay"), py::arg("dt_bias"), py::arg("skip"), py::arg("least_step"),
            py::arg("largest_step"), py::arg("states"), py::arg("row_starts"), py::arg("past_lens"),
            py::arg("slots"), py::arg("out")
        );
}

}  // namespace exl

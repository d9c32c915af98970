// Bindings of linear and embedding over any kind of weights, and of the ops fused to a linear: a
// norm before it, an addition or a gated activation after it.
#include <pybind11/stl.h>

#include "bindings/convert.h"

namespace exl {

// Scratch slots of the calling thread; the kernels use slots 0 to 7.
constexpr int kNormedSlot = 8;
constexpr int kGateUpSlot = 9;

struct Call {
    const Linear& w;
    const float* x;
    int64_t m;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
};

static Call call_of(
    const char* op, py::handle x, const Linear& w, py::handle y, const char* y_name, int64_t columns
) {
    const TensorView from = view_of({op, "x"}, x, {DType::f32}, {kAnySize, w.k}, 1);
    const TensorView to = view_of({op, y_name}, y, {DType::f32}, {from.shape[0], columns}, 0);
    return {w, from.as<float>(), from.shape[0], from.stride[0], to.as<float>(), columns};
}

static const float* norm_of(const char* op, py::handle norm, int64_t k) {
    return view_of({op, "norm"}, norm, {DType::f32}, {k}, 0).as<float>();
}

// Writes rms_norm(x) to scratch and makes it the input of the call.
static void apply_norm(Table& table, const float* norm, float eps, Call& call) {
    const int64_t k = call.w.k;
    auto* normed = static_cast<float*>(thread_scratch(kNormedSlot, call.m * k * 4));
    table.ops->rms_norm(table.pool, {call.x, call.m, call.x_stride, 1, k, norm, eps, normed, k});
    call.x = normed;
    call.x_stride = k;
}

static void run(Table& table, const Call& call, Epilogue epilogue) {
    const std::vector<Part>& parts = call.w.parts;
    float* y = call.y;
    for (size_t i = 0; i < parts.size();) {
        if (parts[i].dense != nullptr) {
            table.ops->linear(
                table.pool, {parts[i].dense, call.x, call.m, call.x_stride, y, call.y_stride,
                             epilogue == Epilogue::add}
            );
            y += parts[i].n;
            ++i;
            continue;
        }
        if (parts[i].trellis != nullptr) {
            TrellisLinearArgs args{};
            int64_t columns = 0;
            while (i < parts.size() && parts[i].trellis != nullptr && args.count < kMaxParts) {
                args.parts[args.count++] = parts[i].trellis;
                columns += parts[i++].n;
            }
            args.x = call.x;
            args.m = call.m;
            args.x_stride = call.x_stride;
            args.y = y;
            args.y_stride = call.y_stride;
            args.accumulate = epilogue == Epilogue::add;
            table.ops->trellis_linear(table.pool, args);
            y += columns;
            continue;
        }
        QuantLinearArgs args{};
        int64_t columns = 0;
        while (i < parts.size() && parts[i].quant != nullptr && args.count < kMaxParts) {
            args.parts[args.count++] = parts[i].quant;
            columns += parts[i++].n;
        }
        args.x = call.x;
        args.m = call.m;
        args.x_stride = call.x_stride;
        args.epilogue = epilogue;
        args.y = y;
        args.y_stride = call.y_stride;
        args.is_batch_invariant = table.is_batch_invariant;
        table.ops->quant_linear(table.pool, args);
        y += columns;
    }
}

void product(
    Table& table, const Linear& w, const float* x, int64_t m, int64_t x_stride, float* y,
    int64_t y_stride
) {
    run(table, {w, x, m, x_stride, y, y_stride}, Epilogue::store);
}

static void linear(Table& table, py::handle x, const Linear& w, py::handle y) {
    const Call call = call_of("linear", x, w, y, "out", w.n);
    py::gil_scoped_release release;
    run(table, call, Epilogue::store);
}

static void linear_add(Table& table, py::handle x, const Linear& w, py::handle residual) {
    const Call call = call_of("linear_add_", x, w, residual, "residual", w.n);
    py::gil_scoped_release release;
    run(table, call, Epilogue::add);
}

static void norm_linear(
    Table& table, py::handle x, py::handle norm, float eps, const Linear& w, py::handle y
) {
    Call call = call_of("norm_linear", x, w, y, "out", w.n);
    const float* factors = norm_of("norm_linear", norm, w.k);
    py::gil_scoped_release release;
    apply_norm(table, factors, eps, call);
    run(table, call, Epilogue::store);
}

static void norm_gated_linear(
    Table& table, py::handle x, py::handle norm, float eps, const Linear& w,
    const std::string& kind, py::handle y
) {
    const char* op = "norm_gated_linear";
    const Gate gate = gate_of({op, "kind"}, kind);
    if (w.n % 2 != 0) fail({op, "w"}, "an even number of out_features", std::to_string(w.n));
    Call call = call_of(op, x, w, y, "out", w.n / 2);
    const float* factors = norm_of(op, norm, w.k);
    py::gil_scoped_release release;
    apply_norm(table, factors, eps, call);
    const std::vector<Part>& parts = w.parts;
    if (parts.size() == 2 && parts[0].quant != nullptr && parts[1].quant != nullptr &&
        parts[0].n == parts[1].n) {
        const QuantLinearArgs args{
            {parts[0].quant, parts[1].quant},
            2,
            call.x,
            call.m,
            call.x_stride,
            Epilogue::gated,
            gate,
            call.y,
            call.y_stride,
            table.is_batch_invariant
        };
        table.ops->quant_linear(table.pool, args);
        return;
    }
    auto* gate_up = static_cast<float*>(thread_scratch(kGateUpSlot, call.m * w.n * 4));
    run(table, {w, call.x, call.m, call.x_stride, gate_up, w.n}, Epilogue::store);
    table.ops->gated_activation(table.pool, {gate_up, call.m, w.n, w.n / 2, gate, call.y});
}

// A dense matrix per head; rows and heads of x and y may be farther apart than their length. All
// heads may have the same x.
static void head_linear(
    Table& table, py::handle x, const std::vector<std::shared_ptr<Linear>>& heads, py::handle y
) {
    const char* op = "head_linear";
    const auto count = static_cast<int64_t>(heads.size());
    if (count == 0) fail({op, "w"}, "at least one head", "none");
    const int64_t n = heads[0]->n, k = heads[0]->k;
    for (const auto& w : heads) {
        const bool is_dense = w->parts.size() == 1 && w->parts[0].dense != nullptr;
        if (!is_dense || w->n != n || w->k != k) {
            fail({op, "w"}, "dense matrices of one size", "another kind or size");
        }
    }
    const TensorView from = view_of({op, "x"}, x, {DType::f32}, {kAnySize, count, k}, 2);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {from.shape[0], count, n}, 2);
    for (const auto* view : {&from, &to}) {
        const bool is_common = view == &from && view->stride[1] == 0;
        const bool apart = view->stride[1] >= view->shape[2] || count == 1 || is_common;
        const bool rows_apart = view->stride[0] >= view->shape[2] || view->shape[0] <= 1;
        if (!apart || !rows_apart) {
            fail({op, view == &from ? "x" : "out"}, "heads that do not overlap", describe(*view));
        }
    }
    py::gil_scoped_release release;
    for (int64_t head = 0; head < count; ++head) {
        table.ops->linear(
            table.pool,
            {heads[head]->parts[0].dense, from.as<float>() + head * from.stride[1], from.shape[0],
             from.stride[0], to.as<float>() + head * to.stride[1], to.stride[0], false}
        );
    }
}

static void embedding(Table& table, py::handle token_ids, const Linear& w, py::handle y) {
    const Operand ids_operand{"embedding", "token_ids"};
    if (w.parts.size() != 1) fail({"embedding", "w"}, "one matrix", "several joined ones");
    const TensorView ids = view_of(ids_operand, token_ids, {DType::i64}, {kAnySize}, 0);
    const TensorView to = view_of({"embedding", "out"}, y, {DType::f32}, {ids.shape[0], w.k}, 0);
    const int64_t m = ids.shape[0];
    const auto* id_values = ids.as<int64_t>();
    for (int64_t i = 0; i < m; ++i) {
        if (id_values[i] < 0 || id_values[i] >= w.n) {
            fail(
                ids_operand, "ids within [0, " + std::to_string(w.n) + ")",
                std::to_string(id_values[i]) + " in row " + std::to_string(i)
            );
        }
    }
    const Part& part = w.parts[0];
    if (part.trellis != nullptr) fail({"embedding", "w"}, "dense weights or groups", "a trellis");
    py::gil_scoped_release release;
    if (part.dense != nullptr) {
        table.ops->embedding(table.pool, {part.dense, id_values, m, to.as<float>()});
    } else {
        quant_embedding(table.pool, {part.quant, id_values, m, to.as<float>()});
    }
}

void bind_linear(py::class_<Table>& table) {
    table.def("linear", &linear, py::arg("x"), py::arg("w"), py::arg("out"));
    table.def("linear_add_", &linear_add, py::arg("x"), py::arg("w"), py::arg("residual"));
    table.def(
        "norm_linear", &norm_linear, py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("w"),
        py::arg("out")
    );
    table.def(
        "norm_gated_linear", &norm_gated_linear, py::arg("x"), py::arg("norm"), py::arg("eps"),
        py::arg("w"), py::arg("kind"), py::arg("out")
    );
    table.def("head_linear", &head_linear, py::arg("x"), py::arg("w"), py::arg("out"));
    table.def("embedding", &embedding, py::arg("token_ids"), py::arg("w"), py::arg("out"));
}

}  // namespace exl

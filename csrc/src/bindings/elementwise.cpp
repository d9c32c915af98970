// Bindings of norms, RoPE, activations and log-sum-exp.
#include "bindings/convert.h"

namespace exl {

static void rms_norm(Table& table, py::handle x, py::handle weight, float eps, py::handle y) {
    const TensorView from = view_of({"rms_norm", "x"}, x, {DType::f32}, {kAnySize, kAnySize}, 1);
    const TensorView w = view_of({"rms_norm", "weight"}, weight, {DType::f32}, {from.shape[1]}, 0);
    const TensorView to =
        view_of({"rms_norm", "out"}, y, {DType::f32}, {from.shape[0], from.shape[1]}, 0);
    const RmsNormArgs args{
        from.as<float>(), from.shape[0], from.stride[0], 1, from.shape[1], w.as<float>(), eps,
        to.as<float>(),   from.shape[1]
    };
    py::gil_scoped_release release;
    table.ops->rms_norm(table.pool, args);
}

static void rms_norm_heads(Table& table, py::handle x, py::handle weight, float eps) {
    const TensorView view =
        view_of({"rms_norm_heads_", "x"}, x, {DType::f32}, {kAnySize, kAnySize, kAnySize}, 1);
    const TensorView w =
        view_of({"rms_norm_heads_", "weight"}, weight, {DType::f32}, {view.shape[2]}, 0);
    float* data = view.as<float>();
    const RmsNormArgs args{data,          view.shape[0], view.stride[0],
                           view.shape[1], view.shape[2], w.as<float>(),
                           eps,           data,          view.stride[0]};
    py::gil_scoped_release release;
    table.ops->rms_norm(table.pool, args);
}

static void layer_norm(
    Table& table, py::handle x, py::handle weight, py::handle bias, float eps, py::handle y
) {
    const TensorView from = view_of({"layer_norm", "x"}, x, {DType::f32}, {kAnySize, kAnySize}, 1);
    const int64_t rows = from.shape[0];
    const int64_t d = from.shape[1];
    const TensorView w = view_of({"layer_norm", "weight"}, weight, {DType::f32}, {d}, 0);
    const TensorView to = view_of({"layer_norm", "out"}, y, {DType::f32}, {rows, d}, 0);
    const float* added = nullptr;
    if (!bias.is_none()) {
        added = view_of({"layer_norm", "bias"}, bias, {DType::f32}, {d}, 0).as<float>();
    }
    const LayerNormArgs args{from.as<float>(), rows, from.stride[0], d, w.as<float>(), added, eps,
                             to.as<float>()};
    py::gil_scoped_release release;
    table.ops->layer_norm(table.pool, args);
}

static void rope(Table& table, py::handle x, py::handle cos, py::handle sin) {
    const Operand cos_operand{"rope_", "cos"};
    const TensorView view =
        view_of({"rope_", "x"}, x, {DType::f32}, {kAnySize, kAnySize, kAnySize}, 1);
    const TensorView c = view_of(cos_operand, cos, {DType::f32}, {view.shape[0], kAnySize}, 0);
    if (2 * c.shape[1] > view.shape[2]) {
        fail(
            cos_operand, "at most " + std::to_string(view.shape[2] / 2) + " pairs",
            std::to_string(c.shape[1])
        );
    }
    const TensorView s = view_of({"rope_", "sin"}, sin, {DType::f32}, {c.shape[0], c.shape[1]}, 0);
    const RopeArgs args{view.as<float>(), view.shape[0],  view.stride[0], view.shape[1],
                        view.shape[2],    2 * c.shape[1], c.as<float>(),  s.as<float>()};
    py::gil_scoped_release release;
    table.ops->rope(table.pool, args);
}

Gate gate_of(Operand operand, const std::string& kind) {
    if (kind == "silu") return Gate::silu;
    if (kind == "gelu_tanh") return Gate::gelu_tanh;
    if (kind == "clamped_swiglu") return Gate::clamped_swiglu;
    fail(operand, "silu, gelu_tanh or clamped_swiglu", kind);
}

static void gated_activation(Table& table, py::handle x, const std::string& kind, py::handle y) {
    const Operand x_operand{"gated_activation", "gate_up"};
    const Gate gate = gate_of({"gated_activation", "kind"}, kind);
    const TensorView from = view_of(x_operand, x, {DType::f32}, {kAnySize, kAnySize}, 1);
    if (from.shape[1] % 2 != 0) {
        fail(x_operand, "an even row length", std::to_string(from.shape[1]));
    }
    const TensorView to = view_of(
        {"gated_activation", "out"}, y, {DType::f32}, {from.shape[0], from.shape[1] / 2}, 0
    );
    const GatedActivationArgs args{from.as<float>(),  from.shape[0], from.stride[0],
                                   from.shape[1] / 2, gate,          to.as<float>()};
    py::gil_scoped_release release;
    table.ops->gated_activation(table.pool, args);
}

Activation activation_of(Operand operand, const std::string& kind) {
    if (kind == "silu") return Activation::silu;
    if (kind == "gelu_tanh") return Activation::gelu_tanh;
    if (kind == "relu2") return Activation::relu2;
    fail(operand, "silu, gelu_tanh or relu2", kind);
}

static void activation(Table& table, py::handle x, const std::string& kind, py::handle y) {
    const Activation act = activation_of({"activation", "kind"}, kind);
    const TensorView from = view_of({"activation", "x"}, x, {DType::f32}, {kAnySize, kAnySize}, 1);
    const TensorView to =
        view_of({"activation", "out"}, y, {DType::f32}, {from.shape[0], from.shape[1]}, 0);
    const ActivationArgs args{from.as<float>(), from.shape[0], from.stride[0],
                              from.shape[1],    act,           to.as<float>()};
    py::gil_scoped_release release;
    table.ops->activation(table.pool, args);
}

static void log_sum_exp(Table& table, py::handle x, py::handle y) {
    const Operand x_operand{"log_sum_exp", "x"};
    const TensorView from = view_of(x_operand, x, {DType::f32}, {kAnySize, kAnySize}, 1);
    if (from.shape[1] == 0) fail(x_operand, "rows of at least one value", "0");
    const TensorView to = view_of({"log_sum_exp", "out"}, y, {DType::f32}, {from.shape[0]}, 0);
    const LogSumExpArgs args{
        from.as<float>(), from.shape[0], from.stride[0], from.shape[1], to.as<float>()
    };
    py::gil_scoped_release release;
    table.ops->log_sum_exp(table.pool, args);
}

void bind_elementwise(py::class_<Table>& table) {
    table.def(
        "rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out")
    );
    table.def("rms_norm_heads_", &rms_norm_heads, py::arg("x"), py::arg("weight"), py::arg("eps"));
    table.def(
        "layer_norm", &layer_norm, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
        py::arg("out")
    );
    table.def("rope_", &rope, py::arg("x"), py::arg("cos"), py::arg("sin"));
    table.def(
        "gated_activation", &gated_activation, py::arg("gate_up"), py::arg("kind"), py::arg("out")
    );
    table.def("activation", &activation, py::arg("x"), py::arg("kind"), py::arg("out"));
    table.def("log_sum_exp", &log_sum_exp, py::arg("x"), py::arg("out"));
}

}  // namespace exl

// Norms, RoPE, gated activations, cache writes.
#include "bindings/convert.h"

namespace exl {

static void rms_norm(Table& table, py::handle x, py::handle weight, float eps, py::handle y) {
    const Operand x_operand{"rms_norm", "x"};
    const Operand w_operand{"rms_norm", "weight"};
    const Operand y_operand{"rms_norm", "out"};
    const TensorView from = view_of(x_operand, x);
    check(x_operand, from, {DType::f32}, {kAnySize, kAnySize});
    check_contiguous(x_operand, from, 1);
    const TensorView w = view_of(w_operand, weight);
    check(w_operand, w, {DType::f32}, {from.shape[1]});
    check_contiguous(w_operand, w, 0);
    const TensorView to = view_of(y_operand, y);
    check(y_operand, to, {DType::f32}, {from.shape[0], from.shape[1]});
    check_contiguous(y_operand, to, 0);
    const RmsNormArgs args{from.as<float>(), from.shape[0], from.stride[0], 1, from.shape[1],
                           w.as<float>(),    eps,           to.as<float>(), from.shape[1]};
    py::gil_scoped_release release;
    table.ops->rms_norm(table.pool, args);
}

static void rms_norm_heads(Table& table, py::handle x, py::handle weight, float eps) {
    const Operand x_operand{"rms_norm_heads_", "x"};
    const Operand w_operand{"rms_norm_heads_", "weight"};
    const TensorView view = view_of(x_operand, x);
    check(x_operand, view, {DType::f32}, {kAnySize, kAnySize, kAnySize});
    check_contiguous(x_operand, view, 1);
    const TensorView w = view_of(w_operand, weight);
    check(w_operand, w, {DType::f32}, {view.shape[2]});
    check_contiguous(w_operand, w, 0);
    float* data = view.as<float>();
    const RmsNormArgs args{data,          view.shape[0], view.stride[0], view.shape[1],
                           view.shape[2], w.as<float>(), eps,            data,
                           view.stride[0]};
    py::gil_scoped_release release;
    table.ops->rms_norm(table.pool, args);
}

static void rope(Table& table, py::handle x, py::handle cos, py::handle sin) {
    const Operand x_operand{"rope_", "x"};
    const Operand cos_operand{"rope_", "cos"};
    const Operand sin_operand{"rope_", "sin"};
    const TensorView view = view_of(x_operand, x);
    check(x_operand, view, {DType::f32}, {kAnySize, kAnySize, kAnySize});
    check_contiguous(x_operand, view, 1);
    const TensorView c = view_of(cos_operand, cos);
    check(cos_operand, c, {DType::f32}, {view.shape[0], kAnySize});
    check_contiguous(cos_operand, c, 0);
    if (2 * c.shape[1] > view.shape[2]) {
        fail(cos_operand, "at most " + std::to_string(view.shape[2] / 2) + " pairs",
             std::to_string(c.shape[1]));
    }
    const TensorView s = view_of(sin_operand, sin);
    check(sin_operand, s, {DType::f32}, {c.shape[0], c.shape[1]});
    check_contiguous(sin_operand, s, 0);
    const RopeArgs args{view.as<float>(), view.shape[0],  view.stride[0], view.shape[1],
                        view.shape[2],    2 * c.shape[1], c.as<float>(),  s.as<float>()};
    py::gil_scoped_release release;
    table.ops->rope(table.pool, args);
}

Gate gate_of(Operand operand, const std::string& kind) {
    if (kind == "silu") return Gate::silu;
    if (kind == "gelu_tanh") return Gate::gelu_tanh;
    fail(operand, "silu or gelu_tanh", kind);
}

static void gated_activation(Table& table, py::handle x, const std::string& kind, py::handle y) {
    const Operand x_operand{"gated_activation", "gate_up"};
    const Operand y_operand{"gated_activation", "out"};
    const Gate gate = gate_of({"gated_activation", "kind"}, kind);
    const TensorView from = view_of(x_operand, x);
    check(x_operand, from, {DType::f32}, {kAnySize, kAnySize});
    check_contiguous(x_operand, from, 1);
    if (from.shape[1] % 2 != 0) {
        fail(x_operand, "an even row length", std::to_string(from.shape[1]));
    }
    const TensorView to = view_of(y_operand, y);
    check(y_operand, to, {DType::f32}, {from.shape[0], from.shape[1] / 2});
    check_contiguous(y_operand, to, 0);
    const GatedActivationArgs args{from.as<float>(),
                                   from.shape[0],
                                   from.stride[0],
                                   from.shape[1] / 2,
                                   gate,
                                   to.as<float>()};
    py::gil_scoped_release release;
    table.ops->gated_activation(table.pool, args);
}

static void write_kv(Table& table, py::handle key, py::handle value, py::handle key_cache,
                     py::handle value_cache, py::handle slots) {
    const Operand k_operand{"write_kv", "key"};
    const Operand v_operand{"write_kv", "value"};
    const Operand kc_operand{"write_kv", "key_cache"};
    const Operand vc_operand{"write_kv", "value_cache"};
    const Operand s_operand{"write_kv", "slots"};
    const TensorView k = view_of(k_operand, key);
    check(k_operand, k, {DType::f32}, {kAnySize, kAnySize, kAnySize});
    check_contiguous(k_operand, k, 1);
    const TensorView v = view_of(v_operand, value);
    check(v_operand, v, {DType::f32}, {k.shape[0], k.shape[1], k.shape[2]});
    check_contiguous(v_operand, v, 1);
    const TensorView kc = view_of(kc_operand, key_cache);
    check(kc_operand, kc, {DType::f16, DType::f32}, {kAnySize, k.shape[1], kAnySize, k.shape[2]});
    check_contiguous(kc_operand, kc, 0);
    const TensorView vc = view_of(vc_operand, value_cache);
    check(vc_operand, vc, {kc.dtype}, {kc.shape[0], kc.shape[1], kc.shape[2], kc.shape[3]});
    check_contiguous(vc_operand, vc, 0);
    const TensorView s = view_of(s_operand, slots);
    check(s_operand, s, {DType::i64}, {k.shape[0]});
    check_contiguous(s_operand, s, 0);
    const int64_t slot_count = kc.shape[0] * kc.shape[2];
    for (int64_t i = 0; i < s.shape[0]; ++i) {
        const int64_t slot = s.as<int64_t>()[i];
        if (slot < 0 || slot >= slot_count) {
            fail(s_operand, "slots within [0, " + std::to_string(slot_count) + ")",
                 std::to_string(slot) + " in row " + std::to_string(i));
        }
    }
    const WriteKvArgs args{k.as<float>(), v.as<float>(), k.shape[0], k.stride[0],
                           v.stride[0],   k.shape[1],    k.shape[2], kc.data,
                           vc.data,       kc.dtype,      kc.shape[2], s.as<int64_t>()};
    py::gil_scoped_release release;
    table.ops->write_kv(table.pool, args);
}

void bind_elementwise(py::class_<Table>& table) {
    table.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"),
              py::arg("out"));
    table.def("rms_norm_heads_", &rms_norm_heads, py::arg("x"), py::arg("weight"), py::arg("eps"));
    table.def("rope_", &rope, py::arg("x"), py::arg("cos"), py::arg("sin"));
    table.def("gated_activation", &gated_activation, py::arg("gate_up"), py::arg("kind"),
              py::arg("out"));
    table.def("write_kv", &write_kv, py::arg("key"), py::arg("value"), py::arg("key_cache"),
              py::arg("value_cache"), py::arg("slots"));
}

}  // namespace exl

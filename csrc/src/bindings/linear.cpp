// Packed weights, the linear and the embedding.
#include "bindings/convert.h"

namespace exl {

PackedLinear::PackedLinear(int64_t out_features, int64_t in_features, py::object dtype_object,
                           bool has_bias)
    : dtype(std::move(dtype_object)) {
    const Operand operand{"PackedLinear", "size"};
    // Keeps n * k * 4 far from overflow; a matrix of 2^40 values would be 2 TB.
    constexpr int64_t kMost = int64_t{1} << 40;
    const auto got = std::to_string(out_features) + " x " + std::to_string(in_features);
    if (out_features < 1 || in_features < 1 || out_features > kMost / in_features) {
        fail(operand, "out_features and in_features of at least 1 and at most 2^40 values", got);
    }
    const DType type = dtype_of({"PackedLinear", "dtype"}, dtype);
    if (type == DType::i32 || type == DType::i64) {
        fail({"PackedLinear", "dtype"}, "float32, float16 or bfloat16", dtype_name(type));
    }
    matrix = std::make_unique<PackedMatrix>(out_features, in_features, type, has_bias);
}

static void fill(PackedLinear& self, int64_t row_offset, py::handle weight, py::handle bias) {
    PackedMatrix& matrix = *self.matrix;
    const Operand operand{"fill_linear", "weight"};
    const TensorView view = view_of(operand, weight);
    check(operand, view, {matrix.dtype}, {kAnySize, matrix.k});
    check_contiguous(operand, view, 0);
    const int64_t rows = view.shape[0];
    if (row_offset < 0 || row_offset > matrix.n - rows) {
        fail({"fill_linear", "row_offset"},
             "rows within [0, " + std::to_string(matrix.n) + ")",
             std::to_string(rows) + " rows at " + std::to_string(row_offset));
    }
    const Operand bias_operand{"fill_linear", "bias"};
    const float* bias_data = nullptr;
    if (matrix.bias != nullptr) {
        if (bias.is_none()) fail(bias_operand, "a bias, as the linear has one", "None");
        const TensorView bias_view = view_of(bias_operand, bias);
        check(bias_operand, bias_view, {DType::f32}, {rows});
        check_contiguous(bias_operand, bias_view, 0);
        bias_data = bias_view.as<float>();
    } else if (!bias.is_none()) {
        fail(bias_operand, "None, as the linear was made without a bias", "a bias");
    }
    py::gil_scoped_release release;
    matrix.fill(row_offset, rows, view.data, bias_data);
}

static void linear(Table& table, py::handle x, const PackedLinear& w, py::handle y) {
    const Operand x_operand{"linear", "x"};
    const Operand y_operand{"linear", "out"};
    const TensorView from = view_of(x_operand, x);
    check(x_operand, from, {DType::f32}, {kAnySize, w.matrix->k});
    check_contiguous(x_operand, from, 1);
    const TensorView to = view_of(y_operand, y);
    check(y_operand, to, {DType::f32}, {from.shape[0], w.matrix->n});
    check_contiguous(y_operand, to, 0);
    const LinearArgs args{w.matrix.get(), from.as<float>(), from.shape[0], from.stride[0],
                          to.as<float>()};
    py::gil_scoped_release release;
    table.ops->linear(table.pool, args);
}

static void embedding(Table& table, py::handle token_ids, const PackedLinear& w, py::handle y) {
    const Operand ids_operand{"embedding", "token_ids"};
    const Operand y_operand{"embedding", "out"};
    const TensorView ids = view_of(ids_operand, token_ids);
    check(ids_operand, ids, {DType::i64}, {kAnySize});
    check_contiguous(ids_operand, ids, 0);
    const TensorView to = view_of(y_operand, y);
    check(y_operand, to, {DType::f32}, {ids.shape[0], w.matrix->k});
    check_contiguous(y_operand, to, 0);
    const EmbeddingArgs args{w.matrix.get(), ids.as<int64_t>(), ids.shape[0], to.as<float>()};
    for (int64_t i = 0; i < args.m; ++i) {
        const int64_t id = args.token_ids[i];
        if (id < 0 || id >= w.matrix->n) {
            fail(ids_operand, "ids within [0, " + std::to_string(w.matrix->n) + ")",
                 std::to_string(id) + " in row " + std::to_string(i));
        }
    }
    py::gil_scoped_release release;
    table.ops->embedding(table.pool, args);
}

void bind_linear(py::module_& module, py::class_<Table>& table) {
    py::class_<PackedLinear>(module, "PackedLinear")
        .def(py::init<int64_t, int64_t, py::object, bool>(), py::arg("out_features"),
             py::arg("in_features"), py::arg("dtype"), py::arg("has_bias") = false)
        .def_property_readonly("out_features", [](const PackedLinear& w) { return w.matrix->n; })
        .def_property_readonly("in_features", [](const PackedLinear& w) { return w.matrix->k; })
        .def_readonly("dtype", &PackedLinear::dtype)
        .def_property_readonly("has_bias",
                               [](const PackedLinear& w) { return w.matrix->bias != nullptr; })
        .def_property_readonly("size_bytes",
                               [](const PackedLinear& w) { return w.matrix->size_bytes; })
        .def("fill", &fill, py::arg("row_offset"), py::arg("weight"), py::arg("bias"));
    table.def("linear", &linear, py::arg("x"), py::arg("w"), py::arg("out"));
    table.def("embedding", &embedding, py::arg("token_ids"), py::arg("w"), py::arg("out"));
}

}  // namespace exl

// Bindings of packed weights: dense, quantized and joined. Checks every value that filling uses as
// an index.
#include <pybind11/stl.h>

#include "bindings/convert.h"

namespace exl {

// Limit that keeps n * k * 4 far from overflow. A matrix of 2^40 values would take 2 TB in fp16.
constexpr int64_t kMostValues = int64_t{1} << 40;

static void check_size(const char* op, int64_t out_features, int64_t in_features) {
    if (out_features >= 1 && in_features >= 1 && out_features <= kMostValues / in_features) return;
    fail(
        {op, "size"}, "out_features and in_features of at least 1 and at most 2^40 values",
        std::to_string(out_features) + " x " + std::to_string(in_features)
    );
}

PackedLinear::PackedLinear(
    int64_t out_features, int64_t in_features, py::object dtype_object, bool has_bias
)
    : dtype(std::move(dtype_object)) {
    check_size("PackedLinear", out_features, in_features);
    const DType type = dtype_of({"PackedLinear", "dtype"}, dtype);
    if (type != DType::f32 && type != DType::f16 && type != DType::bf16) {
        fail({"PackedLinear", "dtype"}, "float32, float16 or bfloat16", dtype_name(type));
    }
    matrix = std::make_unique<PackedMatrix>(out_features, in_features, type, has_bias);
    n = out_features;
    k = in_features;
    size_bytes = matrix->size_bytes;
    parts.push_back({matrix.get(), nullptr, nullptr, n});
}

QuantLinear::QuantLinear(const QuantLayout& layout)
    : matrix(std::make_unique<QuantMatrix>(layout)) {
    n = layout.n;
    k = layout.k;
    size_bytes = matrix->size_bytes;
    parts.push_back({nullptr, matrix.get(), nullptr, n});
}

JoinedLinear::JoinedLinear(std::vector<std::shared_ptr<Linear>> joined)
    : members(std::move(joined)) {
    const Operand operand{"join", "parts"};
    if (members.empty()) fail(operand, "at least one linear", "none");
    for (const auto& member : members) {
        if (member == nullptr) fail(operand, "linears", "None");
    }
    k = members[0]->k;
    for (const auto& member : members) {
        if (member->k != k) {
            fail(
                operand, "equal in_features",
                std::to_string(k) + " and " + std::to_string(member->k)
            );
        }
        parts.insert(parts.end(), member->parts.begin(), member->parts.end());
        n += member->n;
        size_bytes += member->size_bytes;
    }
}

static const float* bias_of(const char* op, py::handle bias, bool is_wanted, int64_t count) {
    if (bias.is_none() == is_wanted) {
        fail({op, "bias"}, "one exactly if the linear has one", bias.is_none() ? "None" : "a bias");
    }
    if (!is_wanted) return nullptr;
    return view_of({op, "bias"}, bias, {DType::f32}, {count}, 0).as<float>();
}

static void fill(PackedLinear& self, int64_t row_offset, py::handle weight, py::handle bias) {
    PackedMatrix& matrix = *self.matrix;
    const TensorView view =
        view_of({"fill_linear", "weight"}, weight, {matrix.dtype}, {kAnySize, matrix.k}, 0);
    const int64_t rows = view.shape[0];
    if (row_offset < 0 || row_offset > matrix.n - rows) {
        fail(
            {"fill_linear", "row_offset"}, "rows within [0, " + std::to_string(matrix.n) + ")",
            std::to_string(rows) + " rows at " + std::to_string(row_offset)
        );
    }
    const float* bias_data = bias_of("fill_linear", bias, matrix.bias != nullptr, rows);
    py::gil_scoped_release release;
    matrix.fill(row_offset, rows, view.data, bias_data);
}

static Offset offset_of(const std::string& name) {
    if (name == "middle") return Offset::middle;
    if (name == "zeros") return Offset::zeros;
    if (name == "minimums") return Offset::minimums;
    fail({"QuantLinear", "offset"}, "middle, zeros or minimums", name);
}

static Values values_of(const std::string& name, const QuantLayout& layout) {
    const Operand operand{"QuantLinear", "values"};
    if (name == "integers") return Values::integers;
    const bool is_e4m3 = name == "e4m3";
    const bool is_iq4 = name == "iq4_nl";
    if (!is_e4m3 && !is_iq4 && name != "mxfp4") {
        fail(operand, "integers, e4m3, iq4_nl or mxfp4", name);
    }
    for (const GroupRun& run : layout.runs) {
        if (run.bits != (is_e4m3 ? 8 : 4) || layout.offset != Offset::middle) {
            fail(operand, "codes of 8 bits (e4m3) or 4 bits (the others), offset middle", name);
        }
    }
    return is_e4m3 ? Values::e4m3 : is_iq4 ? Values::iq4_nl : Values::mxfp4;
}

static std::vector<GroupRun> runs_of(const py::iterable& runs, int64_t in_features) {
    const Operand operand{"QuantLinear", "runs"};
    std::vector<GroupRun> found;
    int64_t left = in_features;
    for (const py::handle item : runs) {
        std::tuple<int, int64_t, int64_t> run_item;
        try {
            run_item = item.cast<std::tuple<int, int64_t, int64_t>>();
        } catch (const py::cast_error&) {
            fail(operand, "triples of whole numbers: bits, groups, rows", py::repr(item));
        }
        const auto [bits, groups, rows] = run_item;
        const std::string got = std::to_string(bits) + " bits, " + std::to_string(groups) +
                                " groups of " + std::to_string(rows) + " rows";
        if (bits < 2 || bits > 8 || bits == 7) fail(operand, "2, 3, 4, 5, 6 or 8 bits", got);
        if (groups < 1 || rows < 1 || groups > left / rows) {
            fail(operand, std::to_string(in_features) + " rows in all", got);
        }
        left -= groups * rows;
        GroupRun run{};
        run.bits = bits;
        run.groups = groups;
        run.rows = rows;
        found.push_back(run);
    }
    if (left != 0) {
        fail(
            operand, std::to_string(in_features) + " rows in all",
            std::to_string(in_features - left)
        );
    }
    return found;
}

// Reads a permutation of [0, count), int32; null for None.
static const int32_t* rows_of(Operand operand, py::handle tensor, int64_t count) {
    if (tensor.is_none()) return nullptr;
    const TensorView view = view_of(operand, tensor, {DType::i32}, {count}, 0);
    const auto* rows = view.as<int32_t>();
    std::vector<bool> seen(static_cast<size_t>(count), false);
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0 || rows[i] >= count || seen[static_cast<size_t>(rows[i])]) {
            fail(
                operand, "each row within [0, " + std::to_string(count) + ") at most once",
                std::to_string(rows[i]) + " at " + std::to_string(i)
            );
        }
        seen[static_cast<size_t>(rows[i])] = true;
    }
    return rows;
}

static std::shared_ptr<QuantLinear> new_quantized(
    int64_t out_features, int64_t in_features, const py::iterable& runs, py::handle features,
    py::handle scale_dtype, const std::string& offset, bool has_bias, const std::string& values
) {
    check_size("QuantLinear", out_features, in_features);
    QuantLayout layout{};
    layout.n = out_features;
    layout.k = in_features;
    layout.runs = runs_of(runs, in_features);
    layout.features = rows_of({"QuantLinear", "features"}, features, in_features);
    const Operand dtype_operand{"QuantLinear", "scale_dtype"};
    layout.scale_dtype = dtype_of(dtype_operand, scale_dtype);
    layout.offset = offset_of(offset);
    layout.has_bias = has_bias;
    layout.values = values_of(values, layout);
    const bool is_float = layout.scale_dtype == DType::f16 || layout.scale_dtype == DType::f32;
    if (layout.values == Values::mxfp4 ? layout.scale_dtype != DType::u8 : !is_float) {
        fail(
            dtype_operand, "float16 or float32, and uint8 for mxfp4", dtype_name(layout.scale_dtype)
        );
    }
    return std::make_shared<QuantLinear>(layout);
}

// Reads scales or offsets [groups, columns]; None and null if the layout has none.
static const void* grid_of(
    Operand operand, py::handle tensor, bool is_wanted, DType dtype, int64_t groups, int64_t columns
) {
    if (!is_wanted) {
        if (!tensor.is_none()) fail(operand, "None, as the layout says", "a tensor");
        return nullptr;
    }
    const TensorView view = view_of(operand, tensor, {dtype}, {groups, columns}, 0);
    return view.data;
}

static const void* ggml_codes(
    const QuantMatrix& w, const GgmlBlock& kind, py::handle codes, QuantColumns& columns
) {
    const bool has_layout = w.runs.size() == 1 && w.runs[0].bits == kind.bits &&
                            w.runs[0].rows == kBlockRows && w.order.empty() &&
                            w.scale_dtype == DType::f16 && w.offset == kind.offset &&
                            w.values == Values::integers;
    if (!has_layout) {
        fail({"fill_quantized", "packing"}, "a packing that fits the matrix's layout", kind.name);
    }
    const TensorView view = view_of(
        {"fill_quantized", "codes"}, codes, {DType::u8}, {kAnySize, w.blocks * kind.bytes}, 1
    );
    columns.columns = view.shape[0];
    columns.row_stride = view.shape[0] > 1 ? view.stride[0] : 0;
    columns.packing = kind.packing;
    return view.data;
}

static const void* row_codes(
    const QuantMatrix& w, const std::string& packing, py::handle codes, py::handle source_rows,
    QuantColumns& columns
) {
    if (packing != "words" && packing != "bytes") {
        fail({"fill_quantized", "packing"}, "words, bytes or one of GGML's", packing);
    }
    const bool is_words = packing == "words";
    columns.packing = is_words ? Packing::words : Packing::bytes;
    columns.source_rows = rows_of({"fill_quantized", "source_rows"}, source_rows, w.k);
    int64_t bits = 0;
    for (const GroupRun& run : w.runs) {
        bits += run.groups * run.rows * run.bits;
        if (is_words && columns.source_rows != nullptr && run.bits != w.runs[0].bits) {
            fail({"fill_quantized", "source_rows"}, "one width for all rows", "several");
        }
    }
    const TensorView view = view_of(
        {"fill_quantized", "codes"}, codes, {is_words ? DType::i32 : DType::u8},
        {is_words ? (bits + 31) / 32 : w.k, kAnySize}, 1
    );
    columns.columns = view.shape[1];
    columns.row_stride = view.shape[0] > 1 ? view.stride[0] : 0;
    return view.data;
}

static void fill_quantized(
    QuantLinear& self, int64_t first_column, const std::string& packing, py::handle codes,
    py::handle source_rows, py::handle scales, py::handle offsets, py::handle bias
) {
    QuantMatrix& w = *self.matrix;
    QuantColumns from{};
    const GgmlBlock* ggml = nullptr;
    for (const GgmlBlock& kind : kGgmlBlocks) {
        if (packing == kind.name) ggml = &kind;
    }
    if (ggml != nullptr) {
        from.codes = ggml_codes(w, *ggml, codes, from);
        if (!source_rows.is_none()) fail({"fill_quantized", "source_rows"}, "None", "a tensor");
    } else {
        from.codes = row_codes(w, packing, codes, source_rows, from);
    }
    if (first_column < 0 || first_column % kPanel != 0 || from.columns > w.n ||
        first_column > w.n - from.columns ||
        (from.columns % kPanel != 0 && first_column + from.columns != w.n)) {
        fail(
            {"fill_quantized", "first_column"},
            "whole panels of 16 columns within [0, " + std::to_string(w.n) + ")",
            std::to_string(from.columns) + " columns at " + std::to_string(first_column)
        );
    }
    const bool is_separate = ggml == nullptr;  // GGML blocks contain their scales and offsets
    from.scales = grid_of(
        {"fill_quantized", "scales"}, scales, is_separate, w.scale_dtype, w.groups, from.columns
    );
    from.offsets = grid_of(
        {"fill_quantized", "offsets"}, offsets, is_separate && w.offset != Offset::middle,
        w.offset == Offset::zeros ? DType::u8 : w.scale_dtype, w.groups, from.columns
    );
    from.bias = bias_of("fill_quantized", bias, w.bias != nullptr, from.columns);
    py::gil_scoped_release release;
    w.fill(first_column, from);
}

void bind_weights(py::module_& module) {
    py::class_<Linear, std::shared_ptr<Linear>>(module, "Linear")
        .def_readonly("out_features", &Linear::n)
        .def_readonly("in_features", &Linear::k)
        .def_readonly("size_bytes", &Linear::size_bytes);
    py::class_<PackedLinear, Linear, std::shared_ptr<PackedLinear>>(module, "PackedLinear")
        .def(
            py::init<int64_t, int64_t, py::object, bool>(), py::arg("out_features"),
            py::arg("in_features"), py::arg("dtype"), py::arg("has_bias") = false
        )
        .def_readonly("dtype", &PackedLinear::dtype)
        .def_property_readonly(
            "has_bias", [](const PackedLinear& w) { return w.matrix->bias != nullptr; }
        )
        .def("fill", &fill, py::arg("row_offset"), py::arg("weight"), py::arg("bias"));
    py::class_<QuantLinear, Linear, std::shared_ptr<QuantLinear>>(module, "QuantLinear")
        .def(
            py::init(&new_quantized), py::arg("out_features"), py::arg("in_features"),
            py::arg("runs"), py::arg("features"), py::arg("scale_dtype"), py::arg("offset"),
            py::arg("has_bias") = false, py::arg("values") = "integers"
        )
        .def(
            "fill", &fill_quantized, py::arg("first_column"), py::arg("packing"), py::arg("codes"),
            py::arg("source_rows"), py::arg("scales"), py::arg("offsets"), py::arg("bias")
        );
    bind_trellis(module);
    py::class_<JoinedLinear, Linear, std::shared_ptr<JoinedLinear>>(module, "JoinedLinear")
        .def(py::init<std::vector<std::shared_ptr<Linear>>>(), py::arg("parts"));
}

}  // namespace exl

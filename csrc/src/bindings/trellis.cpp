// Bindings of matrices of trellis codes, and of the search for codes.
#include "bindings/convert.h"

namespace exl {

TrellisLinear::TrellisLinear(const TrellisLayout& layout)
    : matrix(std::make_unique<TrellisMatrix>(layout)) {
    n = layout.n;
    k = layout.k;
    size_bytes = matrix->size_bytes;
    parts.push_back({nullptr, nullptr, matrix.get(), n});
}

static Codebook codebook_of(const std::string& name) {
    if (name == "3inst") return Codebook::three_inst;
    if (name == "mcg") return Codebook::mcg;
    if (name == "mul1") return Codebook::mul1;
    fail({"TrellisLinear", "codebook"}, "3inst, mcg or mul1", name);
}

static std::shared_ptr<TrellisLinear> new_trellis(
    int64_t out_features, int64_t in_features, int64_t tile_words, const std::string& codebook,
    int64_t first_out, int64_t first_in, bool has_bias
) {
    constexpr int64_t kMostValues = int64_t{1} << 40;
    if (out_features < 1 || in_features < 1 || out_features > kMostValues / in_features) {
        fail(
            {"TrellisLinear", "size"},
            "out_features and in_features of at least 1 and at most 2^40 values",
            std::to_string(out_features) + " x " + std::to_string(in_features)
        );
    }
    if (first_out < 0 || first_out >= kRotation || first_in < 0 || first_in >= kRotation) {
        fail(
            {"TrellisLinear", "first_out, first_in"}, "0 to 127",
            std::to_string(first_out) + ", " + std::to_string(first_in)
        );
    }
    const Codebook book = codebook_of(codebook);
    const bool is_whole = tile_words % 16 == 0 && tile_words >= 16 && tile_words <= 128;
    const bool is_half = tile_words == 24 || tile_words == 40 || tile_words == 56;
    if (!is_whole && !(is_half && book == Codebook::mul1)) {
        fail(
            {"TrellisLinear", "tile_words"}, "16 times 1 to 8, or 1.5, 2.5 or 3.5 with mul1",
            std::to_string(tile_words)
        );
    }
    return std::make_shared<TrellisLinear>(
        TrellisLayout{out_features, in_features, first_out, first_in, tile_words, book, has_bias}
    );
}

static void fill_trellis(
    TrellisLinear& self, py::handle words, py::handle in_scales, py::handle out_scales,
    py::handle bias
) {
    TrellisMatrix& w = *self.matrix;
    const int64_t rows = w.spans() * kRotation;
    const int64_t columns = w.blocks() * kRotation;
    const char* op = "fill_linear";
    const TensorView codes = view_of(
        {op, "words"}, words, {DType::u8},
        {rows / kTileSize, columns / kTileSize, 2 * w.layout.tile_words}, 1
    );
    const TensorView in = view_of({op, "in_scales"}, in_scales, {DType::f16}, {rows}, 0);
    const TensorView out = view_of({op, "out_scales"}, out_scales, {DType::f16}, {columns}, 0);
    if (bias.is_none() == w.layout.has_bias) {
        fail({op, "bias"}, "one exactly if the matrix has one", bias.is_none() ? "None" : "a bias");
    }
    const float* added = nullptr;
    if (w.layout.has_bias) {
        added = view_of({op, "bias"}, bias, {DType::f32}, {w.layout.n}, 0).as<float>();
    }
    const TrellisColumns from{
        codes.as<uint16_t>(), codes.stride[0] / 2, in.as<uint16_t>(), out.as<uint16_t>(), added
    };
    py::gil_scoped_release release;
    w.fill(from);
}

static void nearest_rings(
    Table& table, py::handle targets, py::handle values, int even_bits, int odd_bits, int64_t reach,
    py::handle states
) {
    const char* op = "nearest_rings";
    const TensorView wanted =
        view_of({op, "targets"}, targets, {DType::f32}, {kAnySize, kRingPositions}, 1);
    const TensorView known = view_of({op, "values"}, values, {DType::f32}, {kStates}, 0);
    const TensorView found =
        view_of({op, "states"}, states, {DType::i32}, {wanted.shape[0], kRingPositions}, 0);
    const bool is_whole = even_bits >= 1 && even_bits <= 8 && odd_bits == even_bits;
    const bool is_half = even_bits >= 1 && even_bits <= 3 && odd_bits == even_bits + 1;
    if (!is_whole && !is_half) {
        fail(
            {op, "rate"}, "1 to 8, or 1.5, 2.5 or 3.5 bits",
            std::to_string(even_bits) + " and " + std::to_string(odd_bits)
        );
    }
    if (reach < 1 || reach > kRingPositions / 2) {
        fail({op, "reach"}, "1 to 128", std::to_string(reach));
    }
    const RingArgs args{
        wanted.as<float>(), wanted.shape[0], wanted.stride[0],   known.as<float>(), even_bits,
        odd_bits,           reach,           found.as<int32_t>()
    };
    py::gil_scoped_release release;
    if (args.count > 0) table.ops->nearest_rings(table.pool, args);
}

void bind_rings(py::class_<Table>& table) {
    table.def(
        "nearest_rings", &nearest_rings, py::arg("targets"), py::arg("values"),
        py::arg("even_bits"), py::arg("odd_bits"), py::arg("reach"), py::arg("states")
    );
}

void bind_trellis(py::module_& module) {
    py::class_<TrellisLinear, Linear, std::shared_ptr<TrellisLinear>>(module, "TrellisLinear")
        .def(
            py::init(&new_trellis), py::arg("out_features"), py::arg("in_features"),
            py::arg("tile_words"), py::arg("codebook"), py::arg("first_out") = 0,
            py::arg("first_in") = 0, py::arg("has_bias") = false
        )
        .def(
            "fill", &fill_trellis, py::arg("words"), py::arg("in_scales"), py::arg("out_scales"),
            py::arg("bias")
        );
}

}  // namespace exl

// Binding of `sample`. Each thread keeps scratch memory, sized for the largest vocabulary it has
// seen.
#include <cmath>
#include <vector>

#include "bindings/convert.h"

namespace exl {

namespace {

struct Scratch {
    std::vector<float> floats;
    std::vector<double> sums;
    std::vector<uint64_t> keys;
    std::vector<int64_t> top_ids;
    std::vector<double> top_probabilities;
};

void check_settings(
    double temperature, int64_t top_k, double top_p, double min_p, double uniform, int64_t num_top
) {
    const auto number = [](double value) { return std::to_string(value); };
    if (!(temperature > 0.0 && std::isfinite(temperature))) {
        fail({"sample", "temperature"}, "above 0", number(temperature));
    }
    if (top_k < 0) fail({"sample", "top_k"}, "0 (all) or more", std::to_string(top_k));
    if (!(top_p > 0.0 && top_p <= 1.0)) {
        fail({"sample", "top_p"}, "above 0, at most 1", number(top_p));
    }
    if (!(min_p >= 0.0 && min_p <= 1.0)) fail({"sample", "min_p"}, "0 to 1", number(min_p));
    if (!(uniform >= 0.0 && uniform < 1.0)) {
        fail({"sample", "uniform"}, "at least 0, below 1", number(uniform));
    }
    if (num_top < 0) fail({"sample", "num_top"}, "0 or more", std::to_string(num_top));
}

// Edits of single logits: three arrays of equal size, or none.
void view_edits(SampleArgs& args, py::handle ids, py::handle factors, py::handle offsets) {
    if (ids.is_none()) {
        if (factors.is_none() && offsets.is_none()) return;
        fail({"sample", "ids"}, "as many as factors and offsets", "none");
    }
    const TensorView at = view_of({"sample", "ids"}, ids, {DType::i64}, {kAnySize}, 0);
    args.ids = at.as<int64_t>();
    args.num_edits = at.shape[0];
    const auto values = [&](const char* name, py::handle array) {
        return view_of({"sample", name}, array, {DType::f32}, {args.num_edits}, 0).as<float>();
    };
    args.factors = values("factors", factors);
    args.offsets = values("offsets", offsets);
    for (int64_t i = 0; i < args.num_edits; ++i) {
        if (args.ids[i] < 0 || args.ids[i] >= args.vocab) {
            fail(
                {"sample", "ids"}, "ids within [0, " + std::to_string(args.vocab) + ")",
                std::to_string(args.ids[i])
            );
        }
        if (!(args.factors[i] > 0.0f)) {
            fail({"sample", "factors"}, "above 0", std::to_string(args.factors[i]));
        }
    }
}

// Reads logits and mask; the other arguments stay 0.
SampleArgs view_operands(py::handle logits, py::handle mask) {
    SampleArgs args{};
    const TensorView row = view_of({"sample", "logits"}, logits, {DType::f32}, {kAnySize}, 0);
    args.logits = row.as<float>();
    args.vocab = row.shape[0];
    if (args.vocab < 1 || args.vocab >= int64_t{1} << 31) {
        fail({"sample", "logits"}, "1 to 2^31 - 1 values", std::to_string(args.vocab));
    }
    if (!mask.is_none()) {
        const TensorView words = view_of({"sample", "mask"}, mask, {DType::i32}, {kAnySize}, 0);
        if (words.shape[0] * 32 < args.vocab) {
            fail(
                {"sample", "mask"}, "a bit for each of " + std::to_string(args.vocab) + " tokens",
                std::to_string(words.shape[0]) + " words"
            );
        }
        args.mask = words.as<int32_t>();
    }
    return args;
}

// Points the scratch arguments into the thread's scratch memory and grows it if needed.
void assign_scratch(Scratch& scratch, SampleArgs& args) {
    const auto grow = [](auto& memory, int64_t size) {
        if (memory.size() < static_cast<size_t>(size)) memory.resize(static_cast<size_t>(size));
        return memory.data();
    };
    const int64_t blocks = (args.vocab + kSampleBlock - 1) / kSampleBlock;
    const int64_t padded = blocks * kSampleBlock;
    args.edited = grow(scratch.floats, 3 * padded + 2 * blocks);
    args.scaled = args.edited + padded;
    args.weights = args.scaled + padded;
    args.maxima = args.weights + padded;
    args.sums = grow(scratch.sums, padded + blocks);
    args.keys = grow(scratch.keys, 2 * padded);
    const int64_t top_count = args.num_top < args.vocab ? args.num_top : args.vocab;
    args.top_ids = grow(scratch.top_ids, top_count);
    args.top_probabilities = grow(scratch.top_probabilities, top_count);
}

}  // namespace

static py::tuple sample(
    Table& table, py::handle logits, py::handle mask, py::handle ids, py::handle factors,
    py::handle offsets, double temperature, int64_t top_k, double top_p, double min_p,
    double uniform, int64_t num_top
) {
    thread_local Scratch scratch;
    check_settings(temperature, top_k, top_p, min_p, uniform, num_top);
    SampleArgs args = view_operands(logits, mask);
    view_edits(args, ids, factors, offsets);
    args.temperature = static_cast<float>(temperature);
    args.top_k = top_k;
    args.top_p = top_p;
    args.min_p = min_p;
    args.uniform = uniform;
    args.num_top = num_top;
    assign_scratch(scratch, args);
    SampleResult sampled;
    {
        py::gil_scoped_release release;
        sampled = table.ops->sample(args);
    }
    py::list top(static_cast<size_t>(sampled.num_top));
    for (int64_t i = 0; i < sampled.num_top; ++i) {
        top[static_cast<size_t>(i)] = py::make_tuple(args.top_ids[i], args.top_probabilities[i]);
    }
    return py::make_tuple(sampled.token_id, sampled.probability, top);
}

void bind_sampling(py::class_<Table>& table) {
    table.def(
        "sample", &sample, py::arg("logits"), py::arg("mask"), py::arg("ids"), py::arg("factors"),
        py::arg("offsets"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
        py::arg("min_p"), py::arg("uniform"), py::arg("num_top")
    );
}

}  // namespace exl

// Bindings of the router and of the experts' MLPs.
#include "exl/ops/moe.h"

#include <pybind11/stl.h>

#include "bindings/convert.h"

namespace exl {

// The matrices of all experts. `parts[p]` are those of part p (gate, up) if each expert consists of
// the same number of quantized parts of equal sizes with integer codes; otherwise it is empty.
struct Experts {
    explicit Experts(std::vector<std::shared_ptr<Linear>> linears);

    std::vector<std::shared_ptr<Linear>> members;
    int64_t n;
    int64_t k;
    int64_t size_bytes = 0;
    std::vector<std::vector<const QuantMatrix*>> parts;
    bool has_one_input = false;  // all matrices can share one quantized copy of their inputs
};

Experts::Experts(std::vector<std::shared_ptr<Linear>> linears) : members(std::move(linears)) {
    const Operand operand{"stack", "experts"};
    if (members.empty()) fail(operand, "at least one linear", "none");
    bool is_integer = true;
    for (const auto& member : members) {
        if (member == nullptr) fail(operand, "linears", "None");
        if (member->n != members[0]->n || member->k != members[0]->k) {
            fail(operand, "linears of equal sizes", "several sizes");
        }
        size_bytes += member->size_bytes;
        is_integer = is_integer && member->parts.size() == members[0]->parts.size();
        for (const Part& part : member->parts) {
            is_integer = is_integer && part.quant != nullptr &&
                         part.quant->values != Values::e4m3 && part.n == members[0]->parts[0].n;
        }
    }
    n = members[0]->n;
    k = members[0]->k;
    if (!is_integer) return;
    parts.resize(members[0]->parts.size());
    has_one_input = true;
    for (const auto& member : members) {
        for (size_t p = 0; p < parts.size(); ++p) {
            parts[p].push_back(member->parts[p].quant);
            has_one_input = has_one_input && parts[p].back()->has_input_of(*parts[0][0]);
        }
    }
}

static ExpertMatrices matrices_of(const std::vector<const QuantMatrix*>& experts) {
    ExpertMatrices found{experts.data(), 0, 0};
    for (const QuantMatrix* w : experts) {
        found.blocks = w->blocks > found.blocks ? w->blocks : found.blocks;
        found.spans = w->spans > found.spans ? w->spans : found.spans;
    }
    return found;
}

// Whether `expert_mlp` of the table computes these experts.
static bool has_kernel(const Experts& gate_up, const Experts& down) {
    return gate_up.parts.size() == 2 && down.parts.size() == 1;
}

static void check_ids(const TensorView& ids, int64_t experts) {
    const auto* values = ids.as<int32_t>();
    for (int64_t i = 0; i < ids.shape[0] * ids.shape[1]; ++i) {
        if (values[i] < 0 || values[i] >= experts) {
            fail(
                {"expert_mlp", "ids"}, "ids within [0, " + std::to_string(experts) + ")",
                std::to_string(values[i])
            );
        }
    }
}

static void expert_mlp(
    Table& table, py::handle x, py::handle ids, py::handle weights, const Experts& gate_up,
    const Experts& down, const std::string& kind, py::handle y
) {
    const char* op = "expert_mlp";
    const auto count = static_cast<int64_t>(gate_up.members.size());
    if (!has_kernel(gate_up, down)) {
        fail({op, "experts"}, "quantized gate, up and down matrices", "others");
    }
    if (down.members.size() != gate_up.members.size() || gate_up.n != 2 * down.k) {
        fail({op, "down"}, "a matrix for each gate_up of half its out_features", "others");
    }
    const TensorView from = view_of({op, "x"}, x, {DType::f32}, {kAnySize, gate_up.k}, 1);
    const int64_t m = from.shape[0];
    const TensorView id = view_of({op, "ids"}, ids, {DType::i32}, {m, kAnySize}, 0);
    const int64_t top_k = id.shape[1];
    const TensorView weight = view_of({op, "weights"}, weights, {DType::f32}, {m, top_k}, 0);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {m, down.n}, 0);
    check_ids(id, count);
    const ExpertMlpArgs args{
        matrices_of(gate_up.parts[0]),
        matrices_of(gate_up.parts[1]),
        matrices_of(down.parts[0]),
        count,
        gate_up.has_one_input,
        from.as<float>(),
        m,
        from.stride[0],
        id.as<int32_t>(),
        weight.as<float>(),
        top_k,
        gate_of({op, "kind"}, kind),
        to.as<float>()
    };
    py::gil_scoped_release release;
    table.ops->expert_mlp(table.pool, args);
}

static Scores scores_of(const std::string& name) {
    if (name == "softmax") return Scores::softmax;
    if (name == "sigmoid") return Scores::sigmoid;
    fail({"route", "scores"}, "softmax or sigmoid", name);
}

static void route_logits(
    Table& table, py::handle logits, py::handle bias, const std::string& scores, int64_t groups,
    int64_t kept_groups, int64_t group_scores, bool normalizes, float eps, float factor,
    py::handle ids, py::handle weights
) {
    const char* op = "route";
    const TensorView from = view_of({op, "logits"}, logits, {DType::f32}, {kAnySize, kAnySize}, 0);
    const int64_t m = from.shape[0];
    const int64_t experts = from.shape[1];
    const TensorView id = view_of({op, "ids"}, ids, {DType::i32}, {m, kAnySize}, 0);
    const int64_t top_k = id.shape[1];
    const TensorView to = view_of({op, "weights"}, weights, {DType::f32}, {m, top_k}, 0);
    const float* added = nullptr;
    if (!bias.is_none())
        added = view_of({op, "bias"}, bias, {DType::f32}, {experts}, 0).as<float>();
    const bool has_groups = groups >= 1 && groups <= experts && experts % groups == 0;
    if (!has_groups || kept_groups < 1 || kept_groups > groups || group_scores < 1 || top_k < 1 ||
        top_k > kept_groups * (experts / groups)) {
        fail(
            {op, "routing"}, "groups of equal size that have top_k experts",
            std::to_string(top_k) + " of " + std::to_string(experts) + " experts, " +
                std::to_string(kept_groups) + " of " + std::to_string(groups) + " groups"
        );
    }
    const RouteArgs args{
        from.as<float>(),
        m,
        experts,
        added,
        top_k,
        scores_of(scores),
        groups,
        kept_groups,
        group_scores,
        normalizes,
        eps,
        factor,
        id.as<int32_t>(),
        to.as<float>()
    };
    py::gil_scoped_release release;
    route(table.pool, args);
}

void bind_moe(py::module_& module, py::class_<Table>& table) {
    py::class_<Experts>(module, "Experts")
        .def(py::init<std::vector<std::shared_ptr<Linear>>>(), py::arg("experts"))
        .def_property_readonly(
            "num_experts", [](const Experts& experts) { return experts.members.size(); }
        )
        .def_readonly("experts", &Experts::members)
        .def_readonly("out_features", &Experts::n)
        .def_readonly("in_features", &Experts::k)
        .def_readonly("size_bytes", &Experts::size_bytes);
    module.def("has_expert_kernel", &has_kernel, py::arg("gate_up"), py::arg("down"));
    table.def(
        "route", &route_logits, py::arg("logits"), py::arg("bias"), py::arg("scores"),
        py::arg("groups"), py::arg("kept_groups"), py::arg("group_scores"), py::arg("normalizes"),
        py::arg("eps"), py::arg("factor"), py::arg("ids"), py::arg("weights")
    );
    table.def(
        "expert_mlp", &expert_mlp, py::arg("x"), py::arg("ids"), py::arg("weights"),
        py::arg("gate_up"), py::arg("down"), py::arg("kind"), py::arg("out")
    );
}

}  // namespace exl

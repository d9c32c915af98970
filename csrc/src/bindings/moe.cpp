// Bindings of the router and of the experts' MLPs.
#include "exl/ops/moe.h"

#include <pybind11/stl.h>

#include "bindings/experts.h"

namespace exl {

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

static void check_ids(const TensorView& ids, int64_t experts) {
    const auto* values = ids.as<int32_t>();
    const int64_t bad = first_bad_id(values, ids.shape[0] * ids.shape[1], experts);
    if (bad < 0) return;
    fail(
        {"expert_mlp", "ids"}, "ids within [0, " + std::to_string(experts) + ")",
        std::to_string(values[bad])
    );
}

static void expert_mlp(
    Table& table, py::handle x, py::handle ids, py::handle weights, const Experts& gate_up,
    const Experts& down, const std::string& kind, bool is_gated, py::handle y
) {
    const ExpertMlp call = view_experts(x, ids, weights, gate_up, down, kind, is_gated, y);
    check_ids(
        view_of({"expert_mlp", "ids"}, ids, {DType::i32}, {call.m, call.top_k}, 0), call.count
    );
    py::gil_scoped_release release;
    compute_experts(table, call);
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
    py::class_<Experts, std::shared_ptr<Experts>>(module, "Experts")
        .def(py::init<std::vector<std::shared_ptr<Linear>>>(), py::arg("experts"))
        .def_property_readonly(
            "num_experts", [](const Experts& experts) { return experts.members.size(); }
        )
        .def_readonly("experts", &Experts::members)
        .def_readonly("out_features", &Experts::n)
        .def_readonly("in_features", &Experts::k)
        .def_readonly("size_bytes", &Experts::size_bytes);
    bind_expert_call(module);
    table.def(
        "route", &route_logits, py::arg("logits"), py::arg("bias"), py::arg("scores"),
        py::arg("groups"), py::arg("kept_groups"), py::arg("group_scores"), py::arg("normalizes"),
        py::arg("eps"), py::arg("factor"), py::arg("ids"), py::arg("weights")
    );
    table.def(
        "expert_mlp", &expert_mlp, py::arg("x"), py::arg("ids"), py::arg("weights"),
        py::arg("gate_up"), py::arg("down"), py::arg("kind"), py::arg("is_gated"), py::arg("out")
    );
}

}  // namespace exl

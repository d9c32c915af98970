// Experts of the bindings: their matrices, and their MLPs for rows in memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

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

// Operands of `expert_mlp`.
struct ExpertMlp {
    const Experts* gate_up;
    const Experts* down;
    bool is_gated;
    Gate gate;              // if is_gated
    Activation activation;  // otherwise
    int64_t count;          // experts
    const float* x;
    int64_t m;
    int64_t x_stride;
    const int32_t* ids;
    const float* weights;
    int64_t top_k;
    float* y;
};

// Reads and checks the operands of `expert_mlp`, except the values of the ids. `kind` names a gate's
// activation if the experts are gated, otherwise the activation of `gate_up`'s outputs.
ExpertMlp view_experts(
    py::handle x, py::handle ids, py::handle weights, const Experts& gate_up, const Experts& down,
    const std::string& kind, bool is_gated, py::handle y
);

// Index of the first id that is not an expert's, or -1.
int64_t first_bad_id(const int32_t* ids, int64_t count, int64_t experts);

// y = sum of the weighted outputs of each row's experts. Does not need the GIL. All ids are
// experts' ids.
void compute_experts(Table& table, const ExpertMlp& call);

void bind_expert_call(py::module_& module);

}  // namespace exl

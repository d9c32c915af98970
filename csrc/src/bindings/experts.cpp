// MLPs of experts for rows in memory, and ExpertCall: such a computation as a C function, which a
// GPU's stream calls between two copies.
//
// Experts whose matrices are quantized to integers are computed by one kernel (cpu/moe/experts.cpp).
// Others are computed one after the other with the kernels of a linear.
#include "bindings/experts.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

namespace exl {

// Scratch slots of the calling thread, which the kernel of quantized experts uses otherwise.
constexpr int kOrderSlot = 10;
constexpr int kRowsSlot = 11;
constexpr int kInnerSlot = 12;
constexpr int kPartsSlot = 13;

static ExpertMatrices matrices_of(const std::vector<const QuantMatrix*>& experts) {
    ExpertMatrices found{experts.data(), 0, 0};
    for (const QuantMatrix* w : experts) {
        found.blocks = w->blocks > found.blocks ? w->blocks : found.blocks;
        found.spans = w->spans > found.spans ? w->spans : found.spans;
    }
    return found;
}

int64_t first_bad_id(const int32_t* ids, int64_t count, int64_t experts) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= experts) return i;
    }
    return -1;
}

ExpertMlp view_experts(
    py::handle x, py::handle ids, py::handle weights, const Experts& gate_up, const Experts& down,
    const std::string& kind, bool is_gated, py::handle y
) {
    const char* op = "expert_mlp";
    const auto count = static_cast<int64_t>(gate_up.members.size());
    const int64_t wide = is_gated ? 2 * down.k : down.k;
    if (down.members.size() != gate_up.members.size() || gate_up.n != wide) {
        const char* wanted = is_gated ? "half its out_features" : "its out_features";
        fail({op, "down"}, std::string("a matrix for each gate_up of ") + wanted, "others");
    }
    const TensorView from = view_of({op, "x"}, x, {DType::f32}, {kAnySize, gate_up.k}, 1);
    const int64_t m = from.shape[0];
    const TensorView id = view_of({op, "ids"}, ids, {DType::i32}, {m, kAnySize}, 0);
    const int64_t top_k = id.shape[1];
    const TensorView weight = view_of({op, "weights"}, weights, {DType::f32}, {m, top_k}, 0);
    const TensorView to = view_of({op, "out"}, y, {DType::f32}, {m, down.n}, 0);
    return {
        &gate_up,
        &down,
        is_gated,
        is_gated ? gate_of({op, "kind"}, kind) : Gate{},
        is_gated ? Activation{} : activation_of({op, "kind"}, kind),
        count,
        from.as<float>(),
        m,
        from.stride[0],
        id.as<int32_t>(),
        weight.as<float>(),
        top_k,
        to.as<float>()
    };
}

// Indices of the (row, slot) pairs, sorted by expert, and the end of each expert's pairs.
struct Order {
    const int32_t* pairs;  // row * top_k + slot
    const int32_t* ends;   // [count]
};

static Order sort_pairs(const ExpertMlp& call) {
    const int64_t total = call.m * call.top_k;
    auto* pairs = static_cast<int32_t*>(thread_scratch(kOrderSlot, (total + call.count + 1) * 4));
    int32_t* ends = pairs + total;  // of the expert before, until its pairs are placed
    std::memset(ends, 0, static_cast<size_t>(call.count + 1) * 4);
    for (int64_t i = 0; i < total; ++i) ++ends[call.ids[i] + 1];
    for (int64_t e = 0; e < call.count; ++e) ends[e + 1] += ends[e];
    for (int64_t i = 0; i < total; ++i) pairs[ends[call.ids[i]]++] = static_cast<int32_t>(i);
    return {pairs, ends};
}

// Each expert with the kernels of a linear, for the rows that chose it.
static void compute_one_by_one(Table& table, const ExpertMlp& call) {
    const int64_t k = call.gate_up->k, wide = call.gate_up->n, inner = call.down->k;
    const int64_t n = call.down->n, total = call.m * call.top_k;
    const Order order = sort_pairs(call);
    auto* rows = static_cast<float*>(thread_scratch(kRowsSlot, call.m * (k + wide) * 4));
    float* gate_up = rows + call.m * k;
    auto* gated = static_cast<float*>(thread_scratch(kInnerSlot, call.m * (inner + n) * 4));
    float* outputs = gated + call.m * inner;
    auto* parts = static_cast<float*>(thread_scratch(kPartsSlot, total * n * 4));
    const auto row_bytes = [](int64_t values) { return static_cast<size_t>(values) * 4; };
    for (int64_t e = 0, first = 0; e < call.count; first = order.ends[e++]) {
        const int64_t count = order.ends[e] - first;
        if (count == 0) continue;
        const int32_t* pairs = order.pairs + first;
        for (int64_t i = 0; i < count; ++i) {
            const float* x = call.x + pairs[i] / call.top_k * call.x_stride;
            std::memcpy(rows + i * k, x, row_bytes(k));
        }
        product(table, *call.gate_up->members[e], rows, count, k, gate_up, wide);
        if (call.is_gated) {
            table.ops->gated_activation(
                table.pool, {gate_up, count, wide, inner, call.gate, gated}
            );
        } else {
            table.ops->activation(table.pool, {gate_up, count, wide, wide, call.activation, gated});
        }
        product(table, *call.down->members[e], gated, count, inner, outputs, n);
        for (int64_t i = 0; i < count; ++i) {
            std::memcpy(parts + pairs[i] * n, outputs + i * n, row_bytes(n));
        }
    }
    table.pool.parallel_for(call.m, [&](int64_t row) {
        float* y = call.y + row * n;
        std::memset(y, 0, row_bytes(n));
        for (int64_t pair = row * call.top_k; pair < (row + 1) * call.top_k; ++pair) {
            for (int64_t c = 0; c < n; ++c) y[c] += call.weights[pair] * parts[pair * n + c];
        }
    });
}

void compute_experts(Table& table, const ExpertMlp& call) {
    if (call.m == 0) return;
    const Experts& gate_up = *call.gate_up;
    if (!call.is_gated || gate_up.parts.size() != 2 || call.down->parts.size() != 1) {
        return compute_one_by_one(table, call);
    }
    const ExpertMlpArgs args{
        matrices_of(gate_up.parts[0]),
        matrices_of(gate_up.parts[1]),
        matrices_of(call.down->parts[0]),
        call.count,
        gate_up.has_one_input,
        call.x,
        call.m,
        call.x_stride,
        call.ids,
        call.weights,
        call.top_k,
        call.gate,
        call.y
    };
    table.ops->expert_mlp(table.pool, args);
}

// One computation with fixed operands, for as many calls as the owner likes.
//
// A stream calls `run(this)` on a thread of the driver, without the GIL and after the copies that
// fill x, ids and weights. The Python object keeps table and experts alive. The caller keeps the
// memory of the tensors.
struct ExpertCall {
    Table& table;
    std::shared_ptr<Experts> gate_up;
    std::shared_ptr<Experts> down;
    ExpertMlp call;

    // Fills y with NaN if the computation fails, because no exception may reach the driver.
    static void run(void* data) noexcept {
        const auto& self = *static_cast<const ExpertCall*>(data);
        const ExpertMlp& call = self.call;
        try {
            const int64_t bad = first_bad_id(call.ids, call.m * call.top_k, call.count);
            if (bad < 0) return compute_experts(self.table, call);
            std::fprintf(stderr, "exl: a row chose expert %d of %ld\n", call.ids[bad], call.count);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "exl: experts failed on the CPU: %s\n", error.what());
        }
        for (int64_t i = 0; i < call.m * call.down->n; ++i) call.y[i] = std::nanf("");
    }
};

static std::unique_ptr<ExpertCall> new_call(
    Table& table, py::handle x, py::handle ids, py::handle weights,
    std::shared_ptr<Experts> gate_up, std::shared_ptr<Experts> down, const std::string& kind,
    bool is_gated, py::handle y
) {
    const ExpertMlp call = view_experts(x, ids, weights, *gate_up, *down, kind, is_gated, y);
    return std::unique_ptr<ExpertCall>(
        new ExpertCall{table, std::move(gate_up), std::move(down), call}
    );
}

void bind_expert_call(py::module_& module) {
    py::class_<ExpertCall>(module, "ExpertCall")
        .def(
            py::init(&new_call), py::arg("table"), py::arg("x"), py::arg("ids"), py::arg("weights"),
            py::arg("gate_up"), py::arg("down"), py::arg("kind"), py::arg("is_gated"),
            py::arg("out"), py::keep_alive<1, 2>()
        )
        .def_property_readonly_static(
            "function",
            [](const py::object&) { return reinterpret_cast<uintptr_t>(&ExpertCall::run); }
        )
        .def_property_readonly(
            "data", [](const ExpertCall& call) { return reinterpret_cast<uintptr_t>(&call); }
        )
        .def("run", [](ExpertCall& call) {
            py::gil_scoped_release release;
            ExpertCall::run(&call);
        });
}

}  // namespace exl

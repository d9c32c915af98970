// The Python module: available instruction sets, and Table, the ops of one of them.
#include <string>
#include <vector>

#include "bindings/convert.h"

namespace exl {

static const OpTable* find_table(const std::string& isa) {
    const OpTables& found = available_tables();
    std::string names;
    for (int i = 0; i < found.count; ++i) {
        if (isa == found.tables[i]->isa) return found.tables[i];
        if (i > 0) names += " or ";
        names += found.tables[i]->isa;
    }
    fail({"Table", "isa"}, names + " on this machine", isa);
}

Table::Table(const std::string& isa, int threads)
    : ops(find_table(isa)), pool(threads < 1 ? 1 : threads) {
    if (threads < 1 || threads > 1024) {
        fail({"Table", "threads"}, "1 to 1024", std::to_string(threads));
    }
}

}  // namespace exl

PYBIND11_MODULE(_C, module) {
    using namespace exl;
    module.attr("__version__") = EXL_VERSION;
    py::register_exception<InputError>(module, "InputError", PyExc_ValueError);
    module.def("available_isas", [] {
        const OpTables& found = available_tables();
        py::tuple names(static_cast<size_t>(found.count));
        for (int i = 0; i < found.count; ++i) {
            names[static_cast<size_t>(i)] = py::str(found.tables[i]->isa);
        }
        return names;
    });
    py::class_<Table> table(module, "Table");
    table.def(py::init<const std::string&, int>(), py::arg("isa"), py::arg("threads"))
        .def_property_readonly("isa", [](const Table& t) { return t.ops->isa; })
        .def_property_readonly("threads", [](const Table& t) { return t.pool.threads(); })
        .def_readwrite("is_batch_invariant", &Table::is_batch_invariant);
    bind_weights(module);
    bind_linear(table);
    bind_elementwise(table);
    bind_attention(table);
    bind_cache(table);
    bind_moe(module, table);
    bind_recurrent(table);
    bind_rings(table);
    bind_sampling(table);
}

// From Python objects to TensorViews, with the checks that kernels rely on.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "exl/check.h"
#include "exl/op_table.h"
#include "exl/tensor_view.h"

namespace exl {

namespace py = pybind11;

// Reads data_ptr(), shape, stride(), dtype and is_cpu of a torch tensor (or of anything that has
// them). Throws InputError if the tensor is not on the CPU or has a type that no op takes.
TensorView view_of(Operand operand, py::handle tensor);

// The torch dtype object itself, for example torch.float16.
DType dtype_of(Operand operand, py::handle dtype);

// A PackedMatrix and the dtype object it was made with.
struct PackedLinear {
    PackedLinear(int64_t out_features, int64_t in_features, py::object dtype, bool has_bias);

    py::object dtype;
    std::unique_ptr<PackedMatrix> matrix;
};

// The ops of one instruction set with the threads they run on.
struct Table {
    Table(const std::string& isa, int threads);

    const OpTable* ops;
    ThreadPool pool;
};

void bind_linear(py::module_& module, py::class_<Table>& table);
void bind_elementwise(py::class_<Table>& table);
void bind_attention(py::class_<Table>& table);

}  // namespace exl

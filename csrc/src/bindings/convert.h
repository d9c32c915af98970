// Conversion of Python objects to TensorViews, with the checks that kernels rely on, and the
// classes that the bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <memory>
#include <vector>

#include "exl/check.h"
#include "exl/op_table.h"
#include "exl/tensor_view.h"

namespace exl {

namespace py = pybind11;

// Reads data_ptr(), shape, stride(), dtype and is_cpu of a torch tensor (or of any object that has
// them). Throws InputError unless the tensor is on the CPU, has one of the given types and the
// given shape, and is contiguous from dimension `first_dense` on (see check_contiguous).
TensorView view_of(
    Operand operand, py::handle tensor, std::initializer_list<DType> dtypes,
    std::initializer_list<int64_t> shape, int first_dense
);

struct Caches {
    TensorView keys;
    TensorView values;
    int64_t d;  // head size; rows of codes have another length
};

// Reads key_cache and value_cache of an op, [pages, heads, page_size, row] each. Both have the same
// type, or keys have 8-bit and values 4-bit codes. With kAnySize for d, the head size follows from
// the length of the key rows.
Caches view_caches(
    const char* op, py::handle keys, py::handle values, int64_t pages, int64_t heads,
    int64_t page_size, int64_t d
);

// Throws InputError unless every slot is within [0, slot_count).
void check_slots(const char* op, const int64_t* slots, int64_t count, int64_t slot_count);

// Converts a torch dtype object, for example torch.float16.
DType dtype_of(Operand operand, py::handle dtype);

// Columns of a linear that are stored in one matrix; exactly one of the pointers is set.
struct Part {
    const PackedMatrix* dense;
    const QuantMatrix* quant;
    const TrellisMatrix* trellis;
    int64_t n;
};

// Weight operand of the ops: one or more matrices whose outputs are concatenated.
struct Linear {
    virtual ~Linear() = default;

    std::vector<Part> parts;
    int64_t n = 0;
    int64_t k = 0;
    int64_t size_bytes = 0;
};

// A PackedMatrix and the dtype object it was made with.
struct PackedLinear : Linear {
    PackedLinear(int64_t out_features, int64_t in_features, py::object dtype, bool has_bias);

    py::object dtype;
    std::unique_ptr<PackedMatrix> matrix;
};

struct QuantLinear : Linear {
    explicit QuantLinear(const QuantLayout& layout);

    std::unique_ptr<QuantMatrix> matrix;
};

struct TrellisLinear : Linear {
    explicit TrellisLinear(const TrellisLayout& layout);

    std::unique_ptr<TrellisMatrix> matrix;
};

// Several linears as one. Shares ownership of its members.
struct JoinedLinear : Linear {
    explicit JoinedLinear(std::vector<std::shared_ptr<Linear>> joined);

    std::vector<std::shared_ptr<Linear>> members;
};

// Ops of one instruction set with the threads that they run on.
struct Table {
    Table(const std::string& isa, int threads);

    const OpTable* ops;
    ThreadPool pool;
    bool is_batch_invariant = false;  // see QuantLinearArgs
};

Gate gate_of(Operand operand, const std::string& kind);
Activation activation_of(Operand operand, const std::string& kind);

// y = x @ w for m rows, x_stride and y_stride apart. Does not need the GIL.
void product(
    Table& table, const Linear& w, const float* x, int64_t m, int64_t x_stride, float* y,
    int64_t y_stride
);

void bind_weights(py::module_& module);
void bind_trellis(py::module_& module);
void bind_rings(py::class_<Table>& table);
void bind_linear(py::class_<Table>& table);
void bind_elementwise(py::class_<Table>& table);
void bind_attention(py::class_<Table>& table);
void bind_cache(py::class_<Table>& table);
void bind_moe(py::module_& module, py::class_<Table>& table);
void bind_recurrent(py::class_<Table>& table);
void bind_sampling(py::class_<Table>& table);

}  // namespace exl

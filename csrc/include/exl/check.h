// Input checks of the bindings. Kernels check nothing; the bindings check every operand first.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "exl/tensor_view.h"

namespace exl {

// Reports an operand that the op's contract does not allow. Becomes exl_kernels.InputError in
// Python.
struct InputError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr int64_t kAnySize = -1;

// Names an operand in messages: "linear: x".
struct Operand {
    const char* op;
    const char* name;
};

[[noreturn]] void fail(Operand operand, const std::string& expected, const std::string& got);

std::string describe(const TensorView& view);
std::string describe_wanted(
    std::initializer_list<DType> dtypes, std::initializer_list<int64_t> shape
);

// Checks type, rank and shape; kAnySize matches every size.
void check(
    Operand operand, const TensorView& view, std::initializer_list<DType> dtypes,
    std::initializer_list<int64_t> shape
);

// Checks that the tensor is C-contiguous from dimension `first_dim` on. With first_dim = 1, rows
// may be farther apart than their length but must not overlap.
void check_contiguous(Operand operand, const TensorView& view, int first_dim);

}  // namespace exl

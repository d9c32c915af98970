// Input checks and error messages of include/exl/check.h.
#include "exl/check.h"

namespace exl {

void fail(Operand operand, const std::string& expected, const std::string& got) {
    throw InputError(
        std::string(operand.op) + ": " + operand.name + " (expected " + expected + ", got " + got +
        ")"
    );
}

static std::string list(const int64_t* sizes, int rank) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) {
        if (i > 0) text += ", ";
        text += sizes[i] == kAnySize ? "any" : std::to_string(sizes[i]);
    }
    return text + "]";
}

std::string describe(const TensorView& view) {
    return std::string(dtype_name(view.dtype)) + " " + list(view.shape, view.rank);
}

std::string describe_wanted(
    std::initializer_list<DType> dtypes, std::initializer_list<int64_t> shape
) {
    std::string text;
    for (const DType dtype : dtypes) {
        if (!text.empty()) text += " or ";
        text += dtype_name(dtype);
    }
    return text + " " + list(shape.begin(), static_cast<int>(shape.size()));
}

void check(
    Operand operand, const TensorView& view, std::initializer_list<DType> dtypes,
    std::initializer_list<int64_t> shape
) {
    bool fits = view.rank == static_cast<int>(shape.size());
    bool has_dtype = false;
    for (const DType dtype : dtypes) has_dtype |= view.dtype == dtype;
    fits &= has_dtype;
    for (int i = 0; fits && i < view.rank; ++i) {
        const int64_t wanted = shape.begin()[i];
        fits = wanted == kAnySize || view.shape[i] == wanted;
    }
    if (!fits) fail(operand, describe_wanted(dtypes, shape), describe(view));
}

void check_contiguous(Operand operand, const TensorView& view, int first_dim) {
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return;  // empty: no element is accessed, so any strides do
    }
    int64_t wanted = 1;
    for (int i = view.rank - 1; i >= first_dim; --i) {
        // The stride of a dimension of size 1 is never used.
        if (view.shape[i] > 1 && view.stride[i] != wanted) {
            fail(
                operand,
                first_dim == 0 ? "a contiguous tensor"
                               : "contiguous dimensions from " + std::to_string(first_dim) + " on",
                "shape " + list(view.shape, view.rank) + " with strides " +
                    list(view.stride, view.rank)
            );
        }
        wanted *= view.shape[i];
    }
    // Overlapping rows and negative strides are mistakes of the caller, and unsafe to write to.
    if (first_dim == 1 && view.shape[0] > 1 && view.stride[0] < wanted) {
        fail(
            operand, "rows that do not overlap (stride at least " + std::to_string(wanted) + ")",
            "stride " + std::to_string(view.stride[0])
        );
    }
}

}  // namespace exl

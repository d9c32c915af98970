// Conversion of torch tensors to TensorViews.
//
// Attribute names are interned and dtype objects cached. A decode step makes about 155 calls with
// two to six tensors each, so reading a tensor has to take well below a microsecond.
#include "bindings/convert.h"

#include <array>
#include <string>

namespace exl {

namespace {

struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* stride = PyUnicode_InternFromString("stride");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
};

const Names& names() {
    static const Names* interned = new Names;  // lives as long as the interpreter
    return *interned;
}

struct KnownDType {
    PyObject* object;
    DType dtype;
};

// Cache of dtype objects, which are singletons: each is identified by its name once and by its
// address afterwards. Guarded by the GIL.
std::array<KnownDType, 16> known_dtypes;
size_t known_dtype_count = 0;

DType learn_dtype(Operand operand, py::handle object) {
    const std::string text = py::str(object);
    const std::string name = text.substr(text.find_last_of('.') + 1);
    for (const DType dtype :
         {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8, DType::i8,
          DType::f8e4m3}) {
        if (name != dtype_name(dtype)) continue;
        if (known_dtype_count < known_dtypes.size()) {
            known_dtypes[known_dtype_count++] = {object.inc_ref().ptr(), dtype};
        }
        return dtype;
    }
    fail(operand, "float32, float16, bfloat16, int32, int64, uint8, int8 or float8_e4m3fn", name);
}

py::object attribute(Operand operand, py::handle tensor, PyObject* name) {
    PyObject* value = PyObject_GetAttr(tensor.ptr(), name);
    if (value == nullptr) {
        PyErr_Clear();
        fail(operand, "a tensor", Py_TYPE(tensor.ptr())->tp_name);
    }
    return py::reinterpret_steal<py::object>(value);
}

py::object call(Operand operand, py::handle tensor, PyObject* name) {
    PyObject* value = PyObject_CallMethodNoArgs(tensor.ptr(), name);
    if (value == nullptr) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
        PyErr_Clear();
        fail(operand, "a tensor", Py_TYPE(tensor.ptr())->tp_name);
    }
    return py::reinterpret_steal<py::object>(value);
}

void read_sizes(Operand operand, const py::object& sizes, int rank, int64_t* to) {
    if (!PyTuple_Check(sizes.ptr()) || PyTuple_GET_SIZE(sizes.ptr()) != rank) {
        fail(operand, "a tensor", "an object whose shape and strides are not tuples of one length");
    }
    for (int i = 0; i < rank; ++i) {
        to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
        if (to[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
}

}  // namespace

DType dtype_of(Operand operand, py::handle object) {
    for (size_t i = 0; i < known_dtype_count; ++i) {
        if (known_dtypes[i].object == object.ptr()) return known_dtypes[i].dtype;
    }
    return learn_dtype(operand, object);
}

static TensorView read_view(Operand operand, py::handle tensor) {
    TensorView view;
    const py::object is_cpu = attribute(operand, tensor, names().is_cpu);
    if (is_cpu.ptr() != Py_True) {
        fail(
            operand, "a tensor on the CPU", "device " + std::string(py::str(tensor.attr("device")))
        );
    }
    view.dtype = dtype_of(operand, attribute(operand, tensor, names().dtype));
    const py::object shape = attribute(operand, tensor, names().shape);
    if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) > kMaxRank) {
        fail(operand, "at most " + std::to_string(kMaxRank) + " dimensions", py::str(shape));
    }
    view.rank = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
    read_sizes(operand, shape, view.rank, view.shape);
    read_sizes(operand, call(operand, tensor, names().stride), view.rank, view.stride);
    view.data = PyLong_AsVoidPtr(call(operand, tensor, names().data_ptr).ptr());
    if (view.data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return view;
}

TensorView view_of(
    Operand operand, py::handle tensor, std::initializer_list<DType> dtypes,
    std::initializer_list<int64_t> shape, int first_dense
) {
    const TensorView view = read_view(operand, tensor);
    check(operand, view, dtypes, shape);
    check_contiguous(operand, view, first_dense);
    return view;
}

// Row length that a cache of this type and head size must have.
static int64_t wanted_row(Operand operand, DType dtype, int64_t d) {
    if (is_packed_kv(dtype) && d % kKvGroup != 0) {
        fail(
            operand, "plain rows, or heads of a multiple of " + std::to_string(kKvGroup),
            std::string(dtype_name(dtype)) + " rows of heads of " + std::to_string(d)
        );
    }
    return kv_row_size(dtype, d);
}

Caches view_caches(
    const char* op, py::handle keys, py::handle values, int64_t pages, int64_t heads,
    int64_t page_size, int64_t d
) {
    const Operand key_operand{op, "key_cache"};
    const Operand value_operand{op, "value_cache"};
    const TensorView k = view_of(
        key_operand, keys, {DType::f32, DType::f16, DType::f8e4m3, DType::i8, DType::u8},
        {pages, heads, page_size, kAnySize}, 0
    );
    if (d == kAnySize) {
        d = kv_head_dim(k.dtype, k.shape[3]);
        if (d < 1) fail(key_operand, "rows of a head's values", describe(k));
    }
    check(
        key_operand, k, {k.dtype},
        {k.shape[0], k.shape[1], k.shape[2], wanted_row(key_operand, k.dtype, d)}
    );
    const TensorView v = read_view(value_operand, values);
    const bool is_mixed = k.dtype == DType::i8 && v.dtype == DType::u8;
    check(
        value_operand, v, {is_mixed ? v.dtype : k.dtype},
        {k.shape[0], k.shape[1], k.shape[2],
         wanted_row(value_operand, is_mixed ? v.dtype : k.dtype, d)}
    );
    check_contiguous(value_operand, v, 0);
    return {k, v, d};
}

void check_slots(const char* op, const int64_t* slots, int64_t count, int64_t slot_count) {
    for (int64_t i = 0; i < count; ++i) {
        if (slots[i] >= 0 && slots[i] < slot_count) continue;
        fail(
            {op, "slots"}, "slots within [0, " + std::to_string(slot_count) + ")",
            std::to_string(slots[i]) + " in row " + std::to_string(i)
        );
    }
}

}  // namespace exl

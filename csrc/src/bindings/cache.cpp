// Binding of cache writes.
#include "bindings/convert.h"

namespace exl {

static void write_kv(
    Table& table, py::handle key, py::handle value, py::handle key_cache, py::handle value_cache,
    py::handle slots
) {
    const TensorView k =
        view_of({"write_kv", "key"}, key, {DType::f32}, {kAnySize, kAnySize, kAnySize}, 1);
    const TensorView v = view_of(
        {"write_kv", "value"}, value, {DType::f32}, {k.shape[0], k.shape[1], k.shape[2]}, 1
    );
    const Caches caches =
        view_caches("write_kv", key_cache, value_cache, kAnySize, k.shape[1], kAnySize, k.shape[2]);
    const TensorView& kc = caches.keys;
    const TensorView s = view_of({"write_kv", "slots"}, slots, {DType::i64}, {k.shape[0]}, 0);
    check_slots("write_kv", s.as<int64_t>(), s.shape[0], kc.shape[0] * kc.shape[2]);
    const WriteKvArgs args{k.as<float>(),      v.as<float>(), k.shape[0],          k.stride[0],
                           v.stride[0],        k.shape[1],    k.shape[2],          kc.data,
                           caches.values.data, kc.dtype,      caches.values.dtype, kc.shape[2],
                           s.as<int64_t>()};
    py::gil_scoped_release release;
    table.ops->write_kv(table.pool, args);
}

void bind_cache(py::class_<Table>& table) {
    table.def(
        "write_kv", &write_kv, py::arg("key"), py::arg("value"), py::arg("key_cache"),
        py::arg("value_cache"), py::arg("slots")
    );
}

}  // namespace exl

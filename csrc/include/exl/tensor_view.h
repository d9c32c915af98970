// Tensor descriptor of the bindings: pointer, type, shape, strides. A binding fills it from the
// attributes of a torch tensor, checks it, and passes plain pointers and sizes to the kernel.
#pragma once

#include <cstdint>

namespace exl {

enum class DType : int { f32 = 0, f16, bf16, i32, i64, u8, i8, f8e4m3 };

inline const char* dtype_name(DType dtype) {
    constexpr const char* names[] = {"float32", "float16", "bfloat16", "int32",
                                     "int64",   "uint8",   "int8",     "float8_e4m3fn"};
    return names[static_cast<int>(dtype)];
}

inline int64_t dtype_bytes(DType dtype) {
    constexpr int64_t sizes[] = {4, 2, 2, 4, 8, 1, 1, 1};
    return sizes[static_cast<int>(dtype)];
}

constexpr int kMaxRank = 4;

struct TensorView {
    void* data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    int64_t shape[kMaxRank] = {};
    int64_t stride[kMaxRank] = {};  // in elements

    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

}  // namespace exl

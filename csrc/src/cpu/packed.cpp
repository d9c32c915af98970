// Memory and filling of packed weights. Layout: include/exl/ops/linear.h.
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "exl/ops/linear.h"

namespace exl {

static int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

PackedMatrix::PackedMatrix(int64_t out_features, int64_t in_features, DType type, bool has_bias)
    : n(out_features), k(in_features), dtype(type) {
    const int64_t weight_bytes = round_up(panels() * kPanel * k * dtype_bytes(dtype), 64);
    const int64_t bias_bytes = has_bias ? panels() * kPanel * 4 : 0;
    size_bytes = weight_bytes + bias_bytes;
    // Fresh pages from the system: zero, and resident only once filled. Large ones are aligned to
    // huge pages, which decode needs because it reads every weight once per token.
    constexpr int64_t kHuge = int64_t{2} << 20;
    const int64_t align = size_bytes >= kHuge ? kHuge : 4096;
    mapped_bytes_ = round_up(size_bytes, 4096) + align;
    void* mapped = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const auto base = reinterpret_cast<uintptr_t>(mapped);
    const auto aligned = (base + static_cast<uintptr_t>(align) - 1) & ~(uintptr_t(align) - 1);
    const int64_t before = static_cast<int64_t>(aligned - base);
    if (before > 0) munmap(mapped, static_cast<size_t>(before));
    mapped_bytes_ -= before;
    data = reinterpret_cast<void*>(aligned);
#ifdef MADV_HUGEPAGE
    if (size_bytes >= kHuge) madvise(data, static_cast<size_t>(mapped_bytes_), MADV_HUGEPAGE);
#endif
    if (has_bias) bias = reinterpret_cast<float*>(static_cast<char*>(data) + weight_bytes);
}

PackedMatrix::~PackedMatrix() { munmap(data, static_cast<size_t>(mapped_bytes_)); }

template <class T>
static void fill_rows(T* packed, int64_t k, int64_t row_offset, int64_t rows, const T* weight) {
    int64_t row = 0;
    while (row < rows) {
        const int64_t column = (row_offset + row) % kPanel;
        const int64_t count = rows - row < kPanel - column ? rows - row : kPanel - column;
        T* panel = packed + (row_offset + row) / kPanel * kPanel * k + column;
        const T* source = weight + row * k;
        if (count == kPanel) {
            for (int64_t i = 0; i < k; ++i)
                for (int64_t j = 0; j < kPanel; ++j) panel[i * kPanel + j] = source[j * k + i];
        } else {
            for (int64_t i = 0; i < k; ++i)
                for (int64_t j = 0; j < count; ++j) panel[i * kPanel + j] = source[j * k + i];
        }
        row += count;
    }
}

void PackedMatrix::fill(int64_t row_offset, int64_t rows, const void* weight,
                        const float* bias_part) {
    if (dtype == DType::f32) {
        fill_rows(static_cast<uint32_t*>(data), k, row_offset, rows,
                  static_cast<const uint32_t*>(weight));
    } else {
        fill_rows(static_cast<uint16_t*>(data), k, row_offset, rows,
                  static_cast<const uint16_t*>(weight));
    }
    if (bias != nullptr) {
        std::memcpy(bias + row_offset, bias_part, static_cast<size_t>(rows) * sizeof(float));
    }
}

}  // namespace exl

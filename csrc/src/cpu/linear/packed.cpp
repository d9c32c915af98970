// Allocation and filling of packed weights. Layout: include/exl/ops/linear.h.
#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>

#include "exl/ops/linear.h"
#include "exl/weight_memory.h"

namespace exl {

static int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

constexpr int64_t kHugePage = int64_t{2} << 20;
// Matrices below this size share mappings of kBlockBytes. The linears of a small model are about
// 1 MB each, and decode reads them faster from huge pages (16 instead of 13 GB/s).
constexpr int64_t kSharedBelow = int64_t{8} << 20;
constexpr int64_t kBlockBytes = int64_t{32} << 20;

// A mapping that holds one or several matrices. It is zero-filled and resident only where it was
// written. Memory within a mapping is never reused, so that new matrices are zero. When the last
// owner releases it, the mapping is unmapped.
struct MemoryBlock {
    char* data = nullptr;
    int64_t size = 0;
    int64_t used = 0;
    int64_t owners = 0;
};

static std::mutex blocks_mutex;
// Mapping that takes the next small matrix; guarded by blocks_mutex.
static MemoryBlock* open_block = nullptr;

static MemoryBlock* map_block(int64_t bytes) {
    const int64_t size = round_up(bytes, 4096);
    void* mapped = mmap(
        nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    );
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    // Keeps the part that starts on a huge page and unmaps the rest before and after it.
    char* base = static_cast<char*>(mapped);
    const auto address = reinterpret_cast<uintptr_t>(mapped);
    const auto before = static_cast<int64_t>(-address % static_cast<uintptr_t>(kHugePage));
    if (before > 0) munmap(base, static_cast<size_t>(before));
    munmap(base + before + size, static_cast<size_t>(kHugePage - before));
#ifdef MADV_HUGEPAGE
    // This is advice only: without huge pages reads are slower (13 instead of 16 GB/s).
    if (size >= kHugePage) madvise(base + before, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
    return new MemoryBlock{base + before, size, 0, 0};
}

static void drop(MemoryBlock* block) {
    if (open_block == block) open_block = nullptr;
    munmap(block->data, static_cast<size_t>(block->size));
    delete block;
}

MemoryBlock* claim_memory(int64_t wanted, void** data) {
    const int64_t bytes = round_up(wanted, 64);
    std::lock_guard<std::mutex> lock(blocks_mutex);
    const bool is_shared = bytes < kSharedBelow;
    MemoryBlock* block = is_shared ? open_block : nullptr;
    if (block == nullptr || block->size - block->used < bytes) {
        block = map_block(is_shared ? kBlockBytes : bytes);
        if (is_shared) open_block = block;
    }
    *data = block->data + block->used;
    block->used += bytes;
    ++block->owners;
    return block;
}

void release_memory(MemoryBlock* block) {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    if (--block->owners == 0) drop(block);
}

PackedMatrix::PackedMatrix(int64_t out_features, int64_t in_features, DType type, bool has_bias)
    : n(out_features), k(in_features), dtype(type) {
    const int64_t weight_bytes = round_up(panels() * kPanel * k * dtype_bytes(dtype), 64);
    const int64_t bias_bytes = has_bias ? panels() * kPanel * 4 : 0;
    size_bytes = weight_bytes + bias_bytes;
    block_ = claim_memory(size_bytes, &data);
    if (has_bias) bias = reinterpret_cast<float*>(static_cast<char*>(data) + weight_bytes);
}

PackedMatrix::~PackedMatrix() { release_memory(block_); }

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

void PackedMatrix::fill(
    int64_t row_offset, int64_t rows, const void* weight, const float* bias_part
) {
    if (dtype == DType::f32) {
        fill_rows(
            static_cast<uint32_t*>(data), k, row_offset, rows, static_cast<const uint32_t*>(weight)
        );
    } else {
        fill_rows(
            static_cast<uint16_t*>(data), k, row_offset, rows, static_cast<const uint16_t*>(weight)
        );
    }
    if (bias != nullptr) {
        std::memcpy(bias + row_offset, bias_part, static_cast<size_t>(rows) * sizeof(float));
    }
}

}  // namespace exl

// Key and value rows into their cache slots, rounded once to the cache's type.
//
// Contract   include/exl/ops/elementwise.h.
#include "cpu/ops.h"
#include "cpu/vec.h"

namespace exl::EXL_ISA {

template <class T>
static inline void copy_row(const float* from, int64_t d, T* to) {
    for_lanes(d, [&](int64_t i, int count) { store_some(to + i, load_some(from + i, count), count); });
}

template <class T>
static void write_rows(ThreadPool& pool, const WriteKvArgs& args) {
    T* keys = static_cast<T*>(args.key_cache);
    T* values = static_cast<T*>(args.value_cache);
    // Every row goes to pages that nothing has touched since the last step: more time a value.
    const int64_t per_item = larger(1, kValuesPerChunk / 4 / larger(1, args.heads * args.d));
    pool.parallel_for(ceil_div(args.rows, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.rows, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const int64_t page = args.slots[row] / args.page_size;
            const int64_t offset = args.slots[row] % args.page_size;
            for (int64_t head = 0; head < args.heads; ++head) {
                const int64_t to = ((page * args.heads + head) * args.page_size + offset) * args.d;
                copy_row(args.key + row * args.key_stride + head * args.d, args.d, keys + to);
                copy_row(args.value + row * args.value_stride + head * args.d, args.d, values + to);
            }
        }
    });
}

void write_kv(ThreadPool& pool, const WriteKvArgs& args) {
    if (args.cache_dtype == DType::f16) {
        write_rows<Half>(pool, args);
    } else {
        write_rows<float>(pool, args);
    }
}

}  // namespace exl::EXL_ISA

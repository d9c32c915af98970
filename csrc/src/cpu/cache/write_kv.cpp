// Writes key and value rows to their cache slots, rounded once to the cache's precision.
//
// Contract   include/exl/ops/cache.h; rows include/exl/formats/kv.h.
#include "cpu/cache/kv_rows.h"
#include "cpu/common/ops.h"

namespace exl::EXL_ISA {

// Writers of one row: plain values or codes. `row_size` is in elements of the cache.
template <class T>
struct PlainWriter {
    T* cache;
    int64_t row_size;

    void put(const float* from, int64_t d, int64_t row) const {
        T* to = cache + row * row_size;
        for_lanes(d, [&](int64_t i, int count) {
            store_some(to + i, load_some(from + i, count), count);
        });
    }
};

struct PackedWriter {
    uint8_t* cache;
    int64_t row_size;
    bool is_wide;

    void put(const float* from, int64_t d, int64_t row) const {
        if (is_wide) {
            pack_row<8>(from, d, cache + row * row_size);
        } else {
            pack_row<4>(from, d, cache + row * row_size);
        }
    }
};

template <class Writer>
static void write_rows(
    ThreadPool& pool, const WriteKvArgs& args, const Writer& keys, const Writer& values
) {
    // Cache pages have not been touched since the previous forward pass, so a value takes longer to
    // write than in other elementwise ops and chunks are smaller.
    const int64_t per_item = larger(1, kValuesPerChunk / 4 / larger(1, args.heads * args.d));
    const bool has_values = args.value_cache != args.key_cache;
    pool.parallel_for(ceil_div(args.rows, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.rows, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const int64_t page = args.slots[row] / args.page_size;
            const int64_t offset = args.slots[row] % args.page_size;
            for (int64_t head = 0; head < args.heads; ++head) {
                const int64_t to = (page * args.heads + head) * args.page_size + offset;
                keys.put(args.key + row * args.key_stride + head * args.d, args.d, to);
                if (!has_values) continue;
                values.put(args.value + row * args.value_stride + head * args.d, args.d, to);
            }
        }
    });
}

template <class T>
static void write_plain(ThreadPool& pool, const WriteKvArgs& args) {
    write_rows(
        pool, args, PlainWriter<T>{static_cast<T*>(args.key_cache), args.d},
        PlainWriter<T>{static_cast<T*>(args.value_cache), args.d}
    );
}

static PackedWriter packed_writer(void* cache, DType dtype, int64_t d) {
    return {static_cast<uint8_t*>(cache), kv_row_size(dtype, d), dtype == DType::i8};
}

void write_kv(ThreadPool& pool, const WriteKvArgs& args) {
    if (is_packed_kv(args.key_dtype)) {
        write_rows(
            pool, args, packed_writer(args.key_cache, args.key_dtype, args.d),
            packed_writer(args.value_cache, args.value_dtype, args.d)
        );
    } else if (args.key_dtype == DType::f16) {
        write_plain<Half>(pool, args);
    } else if (args.key_dtype == DType::f8e4m3) {
        write_plain<Fp8>(pool, args);
    } else {
        write_plain<float>(pool, args);
    }
}

}  // namespace exl::EXL_ISA

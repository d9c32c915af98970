// Shared parts of decode and prefill attention: page walking, one softmax step, running results.
#pragma once

#include "cpu/cache/kv_rows.h"
#include "cpu/common/ops.h"
#include "cpu/common/vec.h"

namespace exl::EXL_ISA {

// Keys per step of the online softmax; a multiple of the panel width. Blocks begin at multiples of
// it (attention.cpp, Order).
constexpr int64_t kKeyBlock = 64;

static inline int64_t padded(int64_t d) { return ceil_div(d, kPanel) * kPanel; }

// One work item, for every kv head: a block of query rows of one sequence and a range of its keys.
struct Work {
    int64_t first_row;  // in q
    int64_t rows;
    int64_t position;   // of the first row, in its sequence
    int64_t key_begin;  // range of keys of this item
    int64_t key_end;
    int64_t splits;        // key ranges of these rows; with 1 the item writes the output itself
    int64_t split;         // index of this item's range among them
    int64_t partial;       // offset of the partial results of these rows, in floats (per kv head)
    const int32_t* pages;  // page table of the sequence
    bool is_decode;        // dot products (attention_decode.h); else tiles (attention_prefill.h)
};

// Tag of cache rows that hold codes. Whether they are 8-bit or 4-bit codes is known only at run
// time, for keys and values separately.
struct Packed {};

// Element types of a cache: `Cell` as stored, `Value` as the attention loops read it.
template <class T>
struct Stored {
    using Cell = T;
    using Value = T;
    static constexpr bool kIsPacked = false;
};
template <>
struct Stored<Packed> {
    using Cell = uint8_t;
    using Value = float;  // unpacked, a block of rows at a time
    static constexpr bool kIsPacked = true;
};

// Cache rows of one kv head, addressed by position in the sequence.
template <class T>
struct PagedRows {
    using Cell = typename Stored<T>::Cell;
    using Value = typename Stored<T>::Value;

    const Cell* head;  // first row of the head in page 0
    const int32_t* pages;
    int64_t page_size;
    int64_t page_stride;
    int64_t row_size;
    int64_t d;
    DType dtype;

    const Cell* at(int64_t position) const {
        return head + pages[position / page_size] * page_stride + position % page_size * row_size;
    }
    // Returns contiguous rows as [count][d]: the rows themselves, or codes unpacked into `buffer`.
    const Value* read(const Cell* rows, int64_t count, float* buffer) const {
        if constexpr (Stored<T>::kIsPacked) {
            if (dtype == DType::i8) {
                unpack_rows<Scaled8>(rows, count, row_size, d, buffer);
            } else {
                unpack_rows<Scaled4>(rows, count, row_size, d, buffer);
            }
            return buffer;
        } else {
            return rows;
        }
    }
    // Number of contiguous rows from position `begin` on, up to `end`.
    int64_t run_length(int64_t begin, int64_t end) const {
        return smaller(page_size - begin % page_size, end - begin);
    }

    // Calls body(row, position, count) for each run of contiguous rows.
    template <class Body>
    void for_runs(int64_t begin, int64_t end, Body&& body) const {
        while (begin < end) {
            const int64_t count = run_length(begin, end);
            body(at(begin), begin, count);
            begin += count;
        }
    }
};

template <class T>
static inline PagedRows<T> paged_rows(
    const AttentionArgs& args, const void* cache, DType dtype, const Work& work, int64_t kv_head
) {
    const int64_t row_size = Stored<T>::kIsPacked ? kv_row_size(dtype, args.d) : args.d;
    const int64_t head_stride = args.page_size * row_size;
    const auto* first = static_cast<const typename Stored<T>::Cell*>(cache);
    return {
        first + kv_head * head_stride,
        work.pages,
        args.page_size,
        args.kv_heads * head_stride,
        row_size,
        args.d,
        dtype
    };
}

template <class T>
static inline PagedRows<T> paged_keys(
    const AttentionArgs& args, const Work& work, int64_t kv_head
) {
    return paged_rows<T>(args, args.key_cache, args.key_dtype, work, kv_head);
}

template <class T>
static inline PagedRows<T> paged_values(
    const AttentionArgs& args, const Work& work, int64_t kv_head
) {
    return paged_rows<T>(args, args.value_cache, args.value_dtype, work, kv_head);
}

// Range of keys within [begin, begin + count) that a query at `position` attends to, relative to
// begin.
struct Visible {
    int64_t first;
    int64_t last;
};

static inline Visible visible(int64_t position, int64_t window, int64_t begin, int64_t count) {
    const int64_t oldest = window > 0 ? larger(0, position - window + 1) : 0;
    return {larger(0, oldest - begin), smaller(count, position + 1 - begin)};
}

// Running results of the online softmax. Query vector i of a block is head i % group of row
// i / group. `values` holds sum_j e^(s_j - peak) v_j, `weight` the same sum without v_j.
struct Running {
    float* peak;    // [vectors]
    float* weight;  // [vectors]
    float* values;  // [vectors, padded(d)]
};

// Floats of a Running, in whole cache lines.
static inline int64_t running_floats(int64_t vectors, int64_t width) {
    return ceil_div(vectors * (width + 2), 16) * 16;
}

static inline Running running_at(float* at, int64_t vectors, int64_t width) {
    float* peak = at + vectors * width;
    return {peak, peak + vectors, at};
}

static inline void start(const Running& run, int64_t vectors, int64_t width) {
    for (int64_t i = 0; i < vectors; ++i) {
        run.peak[i] = -__builtin_inff();
        run.weight[i] = 0.0f;
    }
    for (int64_t i = 0; i < vectors * width; i += kLanes) store(run.values + i, set1(0.0f));
}

// Merges the results of later keys into those of earlier keys.
static inline void merge(
    const Running& into, const Running& later, int64_t vectors, int64_t width
) {
    for (int64_t i = 0; i < vectors; ++i) {
        const float peak = later.peak[i] > into.peak[i] ? later.peak[i] : into.peak[i];
        // Both may be -infinity. Subtracting -infinity from itself would yield NaN.
        const Vec base = set1(peak == -__builtin_inff() ? 0.0f : peak);
        const Vec old = exp(sub(set1(into.peak[i]), base));
        const Vec fresh = exp(sub(set1(later.peak[i]), base));
        const auto sum = [&](Vec a, Vec b) { return fma(b, fresh, mul(a, old)); };
        float weight[kLanes];
        store(weight, sum(set1(into.weight[i]), set1(later.weight[i])));
        into.weight[i] = weight[0];
        into.peak[i] = peak;
        float* to = into.values + i * width;
        const float* from = later.values + i * width;
        for (int64_t c = 0; c < width; c += kLanes)
            store(to + c, sum(load(to + c), load(from + c)));
    }
}

// One step of the online softmax: replaces a row of scores by weights e^(s - peak), with 0 for
// masked keys, and updates `peak` and `weight`. Returns the factor by which the caller rescales the
// values accumulated so far. `columns` is a multiple of the panel width. A NaN score makes its
// weight NaN, and with it the result, for any peak.
static inline float softmax_step(
    float* scores, int64_t columns, Visible seen, float softcap, float& peak, float& weight
) {
    if (seen.first >= seen.last) {
        for (int64_t j = 0; j < columns; j += kLanes) store(scores + j, set1(0.0f));
        return 1.0f;
    }
    if (softcap > 0.0f) {
        const Vec cap = set1(softcap);
        for (int64_t j = 0; j < columns; j += kLanes) {
            store(scores + j, mul(cap, tanh(div(load(scores + j), cap))));
        }
    }
    const float hidden = -__builtin_inff();
    for (int64_t j = 0; j < seen.first; ++j) scores[j] = hidden;
    for (int64_t j = seen.last; j < columns; ++j) scores[j] = hidden;
    Vec top = set1(peak);
    for (int64_t j = 0; j < columns; j += kLanes) top = max(load(scores + j), top);
    const float new_peak = largest(top);
    // All scores may be -infinity. Subtracting -infinity from itself would yield NaN.
    const Vec base = set1(new_peak == hidden ? 0.0f : new_peak);
    Vec total = set1(0.0f);
    for (int64_t j = 0; j < columns; j += kLanes) {
        const Vec w = exp(sub(load(scores + j), base));
        total = add(total, w);
        store(scores + j, w);
    }
    Vec old[1] = {exp(sub(set1(peak), base))};
    float factor[kLanes];
    store(factor, old[0]);
    weight = weight * factor[0] + sum(total);
    peak = new_peak;
    return factor[0];
}

// Writes q * scale of every query vector of the block to `queries` [vectors, d]. Rotates the
// vectors if the cached keys are rotated.
static inline void load_queries(
    const AttentionArgs& args, const Work& work, int64_t kv_head, float* queries
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const Vec scale = set1(args.scale);
    for (int64_t row = 0; row < work.rows; ++row) {
        const float* from =
            args.q + (work.first_row + row) * args.q_stride + kv_head * group * args.d;
        float* to = queries + row * group * args.d;
        for_lanes(group * args.d, [&](int64_t i, int count) {
            store_some(to + i, mul(load_some(from + i, count), scale), count);
        });
        if (!is_packed_kv(args.key_dtype)) continue;
        for (int64_t head = 0; head < group; ++head) rotate_row(to + head * args.d, args.d);
    }
}

// Writes values / weight to y[row, head], with the head's sink in the weight. Rotates `values` in
// place if the cached values are rotated.
static inline void write_result(
    const AttentionArgs& args, const Work& work, int64_t kv_head, const Running& run
) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t width = padded(args.d);
    for (int64_t i = 0; i < work.rows * group; ++i) {
        const int64_t head = kv_head * group + i % group;
        Vec weight = set1(run.weight[i]);
        if (args.sinks != nullptr) {
            // If the sink is far above the peak, the weight is infinite and the result 0.
            weight = add(weight, exp(set1(args.sinks[head] - run.peak[i])));
        }
        float* from = run.values + i * width;
        if (is_packed_kv(args.value_dtype)) rotate_row(from, args.d);
        float* to = args.y + (work.first_row + i / group) * args.y_stride + head * args.d;
        for_lanes(args.d, [&](int64_t j, int count) {
            store_some(to + j, div(load(from + j), weight), count);
        });
    }
}

}  // namespace exl::EXL_ISA

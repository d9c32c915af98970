// Paged causal attention: divides the batch into work items, runs them, reduces split key ranges.
//
// Contract   include/exl/ops/attention.h.
// Mapping    A work item is a block of query rows of one sequence, one kv head and a range of keys.
//            The keys and values of an item are read once for all query heads of that kv head.
//            A long context is divided into several ranges (splits), if there are few rows. Each
//            split writes a partial result, and a second pass reduces them.
// Order      The sums of a query run in one order, which depends on positions alone:
//
//              block     64 keys      one step of the online softmax; values are added key by key
//              partition   256 keys     its blocks, from the first to the last
//              section   1024 keys    its partitions, merged from the first to the last
//              result                 its sections, likewise
//
//            All of them begin at multiples of their size. Blocks of rows, splits, threads and the
//            two kernels (dot products, tiles) divide work along these borders only. Therefore no
//            bit of a result depends on them, or on the other rows of the batch.
// Accuracy   fp32 with online softmax; weights below e^-87 of the peak count as 0.
#include "cpu/attention/attention_decode.h"
#include "cpu/attention/attention_prefill.h"

namespace exl::EXL_ISA {

// Largest number of query vectors per kv head for which dot products (attention_decode.h) are
// faster than making panels of the keys (attention_prefill.h).
constexpr int64_t kDecodeVectors = 16;
// Keys of one item in decode: 256 keys and values of 64 fp16 elements each are 64 KiB.
constexpr int64_t kPartitionKeys = 256;
// Keys of one item for a prefill chunk of up to kSplitRows rows. A longer chunk yields enough items
// without splitting its keys.
constexpr int64_t kSectionKeys = 1024;
constexpr int64_t kSplitRows = 64;

// Work (score products) below which one thread is faster: waking a second one takes about 3 us.
constexpr int64_t kAloneProducts = 4096 * kLanes;

struct Plan {
    int64_t works = 0;
    int64_t products = 0;        // multiplications of queries with keys, all heads
    int64_t partial_floats = 0;  // partial results of one kv head
    int64_t scratch_floats = 0;  // largest scratch size of one item
};

// Calls emit(index, work) for every work item of the batch, newest rows first within a sequence.
template <class Emit>
static Plan make_plan(const AttentionArgs& args, Emit&& emit) {
    const int64_t group = args.q_heads / args.kv_heads;
    const int64_t width = padded(args.d);
    Plan plan;
    for (int64_t seq = 0; seq < args.seqs; ++seq) {
        const int64_t first = args.row_starts[seq];
        const int64_t rows = args.row_starts[seq + 1] - first;
        if (rows == 0) continue;
        const bool is_decode = rows * group <= kDecodeVectors;
        const int64_t block_rows = is_decode ? rows : larger(1, kTileVectors / group);
        const int64_t blocks = ceil_div(rows, block_rows);
        for (int64_t block = blocks - 1; block >= 0; --block) {
            Work work{};
            const Range mine = share(rows, block, blocks);
            work.first_row = first + mine.first;
            work.rows = mine.count();
            work.position = args.past_lens[seq] + mine.first;
            work.pages = args.page_table + seq * args.table_width;
            work.is_decode = is_decode;
            const int64_t oldest = args.window > 0 ? larger(0, work.position - args.window + 1) : 0;
            const int64_t end = work.position + work.rows;
            const int64_t split_keys = is_decode            ? kPartitionKeys
                                       : rows <= kSplitRows ? kSectionKeys
                                                            : end;
            const int64_t first_split = oldest / split_keys;
            work.splits = ceil_div(end, split_keys) - first_split;
            work.partial = plan.partial_floats;
            const int64_t vectors = work.rows * group;
            const bool is_packed = is_packed_kv(args.key_dtype);
            if (work.splits > 1)
                plan.partial_floats += work.splits * running_floats(vectors, width);
            plan.scratch_floats = larger(
                plan.scratch_floats,
                3 * running_floats(vectors, width) +
                    (is_decode ? decode_scratch_floats(vectors, args.d, is_packed)
                               : prefill_scratch_floats(vectors, args.d, is_packed))
            );
            for (work.split = 0; work.split < work.splits; ++work.split) {
                const int64_t border = (first_split + work.split) * split_keys;
                work.key_begin = larger(oldest, border);
                work.key_end = smaller(end, border + split_keys);
                plan.products +=
                    (work.key_end - work.key_begin) * work.rows * args.q_heads * args.d;
                emit(plan.works++, work);
            }
        }
    }
    return plan;
}

// First contiguous cache rows of a work item.
template <class T>
static inline NextRows<T> first_rows(const AttentionArgs& args, const Work& work, int64_t kv_head) {
    const PagedRows<T> keys = paged_keys<T>(args, work, kv_head);
    const PagedRows<T> values = paged_values<T>(args, work, kv_head);
    return {
        {keys.at(work.key_begin), keys.row_size},
        {values.at(work.key_begin), values.row_size},
        keys.run_length(work.key_begin, work.key_end)
    };
}

// Results of the partitions so far, in the order that the head of this file describes.
struct Results {
    Running section;
    Running total;
    int64_t vectors;
    int64_t width;

    Results(float* buffer, int64_t vectors_, int64_t width_)
        : section(running_at(buffer, vectors_, width_)),
          total(running_at(buffer + running_floats(vectors_, width_), vectors_, width_)),
          vectors(vectors_),
          width(width_) {
        start(section, vectors, width);
        start(total, vectors, width);
    }

    // Adds a partition that ends at position `end`. `is_last`: no partition follows.
    void add_partition(const Running& partition, int64_t end, bool is_last) {
        merge(section, partition, vectors, width);
        if (!is_last && end % kSectionKeys != 0) return;
        merge(total, section, vectors, width);
        start(section, vectors, width);
    }
};

template <class T>
static void run_item(
    const AttentionArgs& args, const Work& work, int64_t kv_head, const NextRows<T>& next,
    int64_t scratch_floats, float* partial_base
) {
    const int64_t vectors = work.rows * (args.q_heads / args.kv_heads);
    const int64_t width = padded(args.d);
    const int64_t running = running_floats(vectors, width);
    float* scratch = static_cast<float*>(thread_scratch(1, scratch_floats * 4));
    const bool is_split = work.splits > 1;
    float* partial = partial_base + work.split * running;
    // The result of a split item is its only partition or its only section.
    const Running partition =
        running_at(is_split && work.is_decode ? partial : scratch, vectors, width);
    float* rest = scratch + 3 * running;
    if (work.is_decode) {
        start(partition, vectors, width);
        attend_decode<T>(args, work, kv_head, rest, partition, next);
        if (is_split) return;
    }
    Results results(scratch + running, vectors, width);
    if (is_split) results.total = running_at(partial, vectors, width);
    if (is_split) start(results.total, vectors, width);
    if (work.is_decode) {
        results.add_partition(partition, work.key_end, true);
    } else {
        const PrefillItem<T> item(args, work, kv_head, rest);
        for (int64_t begin = work.key_begin; begin < work.key_end;) {
            const int64_t end =
                smaller(work.key_end, (begin / kPartitionKeys + 1) * kPartitionKeys);
            start(partition, vectors, width);
            item.attend(begin, end, partition);
            results.add_partition(partition, end, end == work.key_end);
            begin = end;
        }
    }
    if (!is_split) write_result(args, work, kv_head, results.total);
}

// Reduces the splits of one block of rows and one kv head, and writes the output.
static void reduce_splits(
    const AttentionArgs& args, const Work& work, int64_t kv_head, float* partial_base
) {
    const int64_t vectors = work.rows * (args.q_heads / args.kv_heads);
    const int64_t width = padded(args.d);
    const int64_t running = running_floats(vectors, width);
    float* scratch = static_cast<float*>(thread_scratch(1, 2 * running * 4));
    Results results(scratch, vectors, width);
    // `work` is the first split, so that the others begin at multiples of the split's size.
    const int64_t split_keys = work.is_decode ? kPartitionKeys : kSectionKeys;
    int64_t end = (work.key_begin / split_keys + 1) * split_keys;
    for (int64_t s = 0; s < work.splits; ++s, end += split_keys) {
        const Running partial = running_at(partial_base + s * running, vectors, width);
        if (work.is_decode) {
            results.add_partition(partial, end, s + 1 == work.splits);
        } else {
            merge(results.total, partial, vectors, width);
        }
    }
    write_result(args, work, kv_head, results.total);
}

template <class T>
static void attend(ThreadPool& pool, const AttentionArgs& args) {
    const Plan plan = make_plan(args, [](int64_t, const Work&) {});
    const int64_t heads = args.kv_heads;
    const int64_t work_bytes = ceil_div(plan.works * static_cast<int64_t>(sizeof(Work)), 64) * 64;
    char* shared =
        static_cast<char*>(thread_scratch(0, work_bytes + heads * plan.partial_floats * 4));
    Work* works = reinterpret_cast<Work*>(shared);
    float* partials = reinterpret_cast<float*>(shared + work_bytes);
    make_plan(args, [&](int64_t i, const Work& work) { works[i] = work; });
    const auto partial_of = [&](const Work& work, int64_t kv_head) {
        return partials + kv_head * plan.partial_floats + work.partial;
    };
    const int64_t items = plan.works * heads;
    // A batch with too little work to wake a thread is a single chunk, which the caller runs.
    const bool is_shared = plan.products > kAloneProducts;
    const int64_t per_chunk = is_shared ? 1 : larger(1, items);
    const auto for_items = [&](auto&& body) {
        pool.parallel_for(ceil_div(items, per_chunk), [&](int64_t chunk) {
            const int64_t last = smaller(items, (chunk + 1) * per_chunk);
            for (int64_t item = chunk * per_chunk; item < last; ++item) body(item);
        });
    };
    for_items([&](int64_t item) {
        const Work& work = works[item / heads];
        // The item that this thread is likely to run next.
        const int64_t next = item + (is_shared ? pool.threads() : 1);
        const NextRows<T> rows =
            next < items ? first_rows<T>(args, works[next / heads], next % heads) : NextRows<T>{};
        run_item<T>(
            args, work, item % heads, rows, plan.scratch_floats, partial_of(work, item % heads)
        );
    });
    if (plan.partial_floats == 0) return;
    for_items([&](int64_t item) {
        const Work& work = works[item / heads];
        if (work.splits == 1 || work.split != 0) return;
        reduce_splits(args, work, item % heads, partial_of(work, item % heads));
    });
}

void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
    if (is_packed_kv(args.key_dtype)) {
        attend<Packed>(pool, args);
    } else if (args.key_dtype == DType::f16) {
        attend<Half>(pool, args);
    } else if (args.key_dtype == DType::f8e4m3) {
        attend<Fp8>(pool, args);
    } else {
        attend<float>(pool, args);
    }
}

}  // namespace exl::EXL_ISA

// Bindings of paged attention. Checks every value that the kernel uses as an index: rows, lengths
// and page ids.
#include <memory>
#include <utility>
#include <vector>

#include "bindings/convert.h"

namespace exl {

// Rows of each sequence and the pages of its keys.
struct Sequences {
    const int32_t* page_table;  // [seqs, table_width]
    int64_t table_width;
    int64_t seqs;
    const int32_t* row_starts;  // [seqs + 1]
    const int32_t* past_lens;   // [seqs]
};

static Sequences view_sequences(
    const char* op, py::handle page_table, py::handle row_starts, py::handle past_lens
) {
    const TensorView pages =
        view_of({op, "page_table"}, page_table, {DType::i32}, {kAnySize, kAnySize}, 0);
    const TensorView starts =
        view_of({op, "row_starts"}, row_starts, {DType::i32}, {pages.shape[0] + 1}, 0);
    const TensorView lens =
        view_of({op, "past_lens"}, past_lens, {DType::i32}, {pages.shape[0]}, 0);
    return {
        pages.as<int32_t>(), pages.shape[1], pages.shape[0], starts.as<int32_t>(),
        lens.as<int32_t>()
    };
}

static void check_sequences(
    const char* op, const Sequences& of, int64_t rows, int64_t page_size, int64_t num_pages
) {
    const Operand starts{op, "row_starts"};
    const Operand table{op, "page_table"};
    if (of.row_starts[0] != 0 || of.row_starts[of.seqs] != rows) {
        fail(
            starts, "0 first and " + std::to_string(rows) + " last",
            std::to_string(of.row_starts[0]) + " and " + std::to_string(of.row_starts[of.seqs])
        );
    }
    for (int64_t seq = 0; seq < of.seqs; ++seq) {
        const int64_t count = int64_t{of.row_starts[seq + 1]} - of.row_starts[seq];
        if (count < 0) {
            fail(starts, "ascending values", "less at index " + std::to_string(seq + 1));
        }
        if (count == 0) continue;
        const int64_t past = of.past_lens[seq];
        if (past < 0) fail({op, "past_lens"}, "lengths of at least 0", std::to_string(past));
        const int64_t pages = (past + count + page_size - 1) / page_size;
        if (pages > of.table_width) {
            fail(
                table,
                std::to_string(pages) + " pages for the " + std::to_string(past + count) +
                    " positions of sequence " + std::to_string(seq),
                std::to_string(of.table_width)
            );
        }
        for (int64_t i = 0; i < pages; ++i) {
            const int64_t page = of.page_table[seq * of.table_width + i];
            if (page < 0 || page >= num_pages) {
                fail(
                    table, "page ids within [0, " + std::to_string(num_pages) + ")",
                    std::to_string(page) + " in sequence " + std::to_string(seq)
                );
            }
        }
    }
}

static void check_limits(const char* op, int64_t window, float softcap) {
    if (window < 0) fail({op, "window"}, "0 (none) or more", std::to_string(window));
    if (!(softcap >= 0.0f)) fail({op, "softcap"}, "0 (none) or more", std::to_string(softcap));
}

// Sinks of the query heads; null for None.
static const float* view_sinks(const char* op, py::handle sinks, int64_t q_heads) {
    if (sinks.is_none()) return nullptr;
    return view_of({op, "sinks"}, sinks, {DType::f32}, {q_heads}, 0).as<float>();
}

static void paged_attention(
    Table& table, py::handle q, py::handle key_cache, py::handle value_cache, py::handle page_table,
    py::handle row_starts, py::handle past_lens, float scale, int64_t window, float softcap,
    py::handle out, py::handle sinks
) {
    const TensorView x =
        view_of({"paged_attention", "q"}, q, {DType::f32}, {kAnySize, kAnySize, kAnySize}, 1);
    const auto [kc, vc, d] = view_caches(
        "paged_attention", key_cache, value_cache, kAnySize, kAnySize, kAnySize, x.shape[2]
    );
    const int64_t kv_heads = kc.shape[1];
    if (kv_heads < 1 || kc.shape[2] < 1 || x.shape[1] % kv_heads != 0) {
        fail(
            {"paged_attention", "key_cache"},
            "kv heads that divide the " + std::to_string(x.shape[1]) + " query heads", describe(kc)
        );
    }
    const Sequences of = view_sequences("paged_attention", page_table, row_starts, past_lens);
    const TensorView y = view_of(
        {"paged_attention", "out"}, out, {DType::f32}, {x.shape[0], x.shape[1] * x.shape[2]}, 0
    );
    check_limits("paged_attention", window, softcap);
    check_sequences("paged_attention", of, x.shape[0], kc.shape[2], kc.shape[0]);
    const float* sink_data = view_sinks("paged_attention", sinks, x.shape[1]);
    const AttentionArgs args{x.as<float>(),  x.shape[0], x.stride[0],   x.shape[1],
                             kv_heads,       d,          kc.data,       vc.data,
                             kc.dtype,       vc.dtype,   kc.shape[2],   of.page_table,
                             of.table_width, of.seqs,    of.row_starts, of.past_lens,
                             scale,          window,     softcap,       sink_data,
                             y.as<float>(),  y.stride[0]};
    py::gil_scoped_release release;
    table.ops->paged_attention(table.pool, args);
}

// Operands that all layers of one forward pass share, read and checked once. Owns copies, because
// Python may free or resize the tensors while this object is alive.
struct AttentionBatch {
    int64_t num_pages;
    int64_t page_size;
    int64_t rows;
    int64_t seqs;
    int64_t table_width;
    std::vector<int32_t> page_table;
    std::vector<int32_t> row_starts;
    std::vector<int32_t> past_lens;
    std::vector<int64_t> slots;
    int64_t pairs;  // pairs of values that RoPE rotates in each head
    std::vector<float> cos;
    std::vector<float> sin;
};

static std::unique_ptr<AttentionBatch> attention_batch(
    py::handle page_table, py::handle row_starts, py::handle past_lens, py::handle slots,
    py::handle cos, py::handle sin, int64_t num_pages, int64_t page_size
) {
    const char* op = "attention_batch";
    constexpr int64_t kMost = int64_t{1} << 31;  // the product of the two cannot overflow int64
    if (num_pages < 1 || page_size < 1 || num_pages > kMost || page_size > kMost) {
        fail(
            {op, "page_size"}, "at least one page of one slot",
            std::to_string(num_pages) + " of " + std::to_string(page_size)
        );
    }
    const TensorView slot_view = view_of({op, "slots"}, slots, {DType::i64}, {kAnySize}, 0);
    const int64_t rows = slot_view.shape[0];
    std::vector<int64_t> slot_ids(slot_view.as<int64_t>(), slot_view.as<int64_t>() + rows);
    check_slots(op, slot_ids.data(), rows, num_pages * page_size);
    const Sequences of = view_sequences(op, page_table, row_starts, past_lens);
    check_sequences(op, of, rows, page_size, num_pages);
    const TensorView c = view_of({op, "cos"}, cos, {DType::f32}, {rows, kAnySize}, 0);
    const TensorView s = view_of({op, "sin"}, sin, {DType::f32}, {rows, c.shape[1]}, 0);
    return std::make_unique<AttentionBatch>(AttentionBatch{
        num_pages,
        page_size,
        rows,
        of.seqs,
        of.table_width,
        {of.page_table, of.page_table + of.seqs * of.table_width},
        {of.row_starts, of.row_starts + of.seqs + 1},
        {of.past_lens, of.past_lens + of.seqs},
        std::move(slot_ids),
        c.shape[1],
        {c.as<float>(), c.as<float>() + rows * c.shape[1]},
        {s.as<float>(), s.as<float>() + rows * c.shape[1]}
    });
}

// The operands of one attend_ call, checked against its batch.
struct AttendViews {
    TensorView qkv;
    TensorView keys;
    TensorView values;
    int64_t q_heads;
    int64_t kv_heads;
    int64_t d;
};

static AttendViews view_attend(
    const AttentionBatch& batch, py::handle qkv, py::handle key_cache, py::handle value_cache
) {
    const Operand qkv_operand{"attend_", "qkv"};
    const TensorView x = view_of(qkv_operand, qkv, {DType::f32}, {batch.rows, kAnySize}, 1);
    const auto [kc, vc, d] = view_caches(
        "attend_", key_cache, value_cache, batch.num_pages, kAnySize, batch.page_size, kAnySize
    );
    const int64_t kv_heads = kc.shape[1];
    if (kv_heads < 1 || d < 1 || d < 2 * batch.pairs) {
        fail(
            {"attend_", "key_cache"},
            "heads of at least " + std::to_string(2 * batch.pairs) + " values", describe(kc)
        );
    }
    // Rows of a shared cache are keys and values at once, and qkv has no values.
    const bool is_shared = kc.data == vc.data;
    const int64_t q_heads = x.shape[1] / d - (is_shared ? 1 : 2) * kv_heads;
    if (x.shape[1] % d != 0 || q_heads < 1 || q_heads % kv_heads != 0) {
        fail(
            qkv_operand,
            "rows of query, " + std::to_string(kv_heads) + " key and " +
                (is_shared ? "no" : "as many") + " value heads of " + std::to_string(d),
            describe(x)
        );
    }
    return {x, kc, vc, q_heads, kv_heads, d};
}

// Weights of a head norm; null for None.
static const float* view_norm(const char* name, py::handle norm, int64_t d) {
    if (norm.is_none()) return nullptr;
    return view_of({"attend_", name}, norm, {DType::f32}, {d}, 0).as<float>();
}

// Scale or shift of the query and key heads; null for None.
static const float* view_head_factors(
    const char* name, py::handle given, const AttendViews& views
) {
    if (given.is_none()) return nullptr;
    const int64_t size = (views.q_heads + views.kv_heads) * views.d;
    return view_of({"attend_", name}, given, {DType::f32}, {size}, 0).as<float>();
}

// The steps before attention itself: applies head norms and RoPE, then writes the new keys and
// values to the caches.
static void prepare_attention(
    Table& table, const AttendViews& views, const AttentionBatch& batch, const float* q_weight,
    const float* k_weight, float eps, const float* scale, const float* shift
) {
    const auto& [x, kc, vc, q_heads, kv_heads, d] = views;
    const OpTable& ops = *table.ops;
    const int64_t rows = batch.rows;
    const int64_t stride = x.stride[0];
    float* q = x.as<float>();
    float* k = q + q_heads * d;
    float* v = k + kv_heads * d;
    if (q_weight != nullptr) {
        ops.rms_norm(table.pool, {q, rows, stride, q_heads, d, q_weight, eps, q, stride});
    }
    if (k_weight != nullptr) {
        ops.rms_norm(table.pool, {k, rows, stride, kv_heads, d, k_weight, eps, k, stride});
    }
    // Query and key heads are adjacent in a row, so one call rotates both.
    ops.rope(
        table.pool, {q, rows, stride, q_heads + kv_heads, d, 2 * batch.pairs, batch.cos.data(),
                     batch.sin.data(), scale, shift}
    );
    ops.write_kv(
        table.pool, {k, v, rows, stride, stride, kv_heads, d, kc.data, vc.data, kc.dtype, vc.dtype,
                     batch.page_size, batch.slots.data()}
    );
}

static void attend(
    Table& table, py::handle qkv, const AttentionBatch& batch, py::handle key_cache,
    py::handle value_cache, py::handle q_norm, py::handle k_norm, float eps, float scale,
    int64_t window, float softcap, py::handle head_scale, py::handle head_shift, py::handle sinks
) {
    const AttendViews views = view_attend(batch, qkv, key_cache, value_cache);
    const auto& [x, kc, vc, q_heads, kv_heads, d] = views;
    const float* q_weight = view_norm("q_norm", q_norm, d);
    const float* k_weight = view_norm("k_norm", k_norm, d);
    const float* factors = view_head_factors("head_scale", head_scale, views);
    const float* terms = view_head_factors("head_shift", head_shift, views);
    if ((factors == nullptr) != (terms == nullptr)) {
        fail({"attend_", "head_shift"}, "given where head_scale is, and only there", "one of two");
    }
    check_limits("attend_", window, softcap);

    const AttentionArgs mix{
        x.as<float>(),
        batch.rows,
        x.stride[0],
        q_heads,
        kv_heads,
        d,
        kc.data,
        vc.data,
        kc.dtype,
        vc.dtype,
        batch.page_size,
        batch.page_table.data(),
        batch.table_width,
        batch.seqs,
        batch.row_starts.data(),
        batch.past_lens.data(),
        scale,
        window,
        softcap,
        view_sinks("attend_", sinks, q_heads),
        x.as<float>(),
        x.stride[0]
    };
    py::gil_scoped_release release;
    prepare_attention(table, views, batch, q_weight, k_weight, eps, factors, terms);
    table.ops->paged_attention(table.pool, mix);
}

void bind_attention(py::class_<Table>& table) {
    py::class_<AttentionBatch>(table, "AttentionBatch")
        .def(
            py::init(&attention_batch), py::arg("page_table"), py::arg("row_starts"),
            py::arg("past_lens"), py::arg("slots"), py::arg("cos"), py::arg("sin"),
            py::arg("num_pages"), py::arg("page_size")
        );
    table.def(
        "attend_", &attend, py::arg("qkv"), py::arg("batch"), py::arg("key_cache"),
        py::arg("value_cache"), py::arg("q_norm"), py::arg("k_norm"), py::arg("eps"),
        py::arg("scale"), py::arg("window"), py::arg("softcap"), py::arg("head_scale"),
        py::arg("head_shift"), py::arg("sinks") = py::none()
    );
    table.def(
        "paged_attention", &paged_attention, py::arg("q"), py::arg("key_cache"),
        py::arg("value_cache"), py::arg("page_table"), py::arg("row_starts"), py::arg("past_lens"),
        py::arg("scale"), py::arg("window"), py::arg("softcap"), py::arg("out"),
        py::arg("sinks") = py::none()
    );
}

}  // namespace exl

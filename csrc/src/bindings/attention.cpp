// Paged attention. Everything the kernel indexes with is checked here: rows, lengths, page ids.
#include "bindings/convert.h"

namespace exl {

static void check_sequences(const AttentionArgs& args, int64_t num_pages) {
    const Operand starts{"paged_attention", "row_starts"};
    const Operand lens{"paged_attention", "past_lens"};
    const Operand table{"paged_attention", "page_table"};
    if (args.row_starts[0] != 0 || args.row_starts[args.seqs] != args.rows) {
        fail(starts, "0 first and " + std::to_string(args.rows) + " last",
             std::to_string(args.row_starts[0]) + " and " +
                 std::to_string(args.row_starts[args.seqs]));
    }
    for (int64_t seq = 0; seq < args.seqs; ++seq) {
        const int64_t rows = int64_t{args.row_starts[seq + 1]} - args.row_starts[seq];
        if (rows < 0) {
            fail(starts, "ascending values", "less at index " + std::to_string(seq + 1));
        }
        if (rows == 0) continue;
        const int64_t past = args.past_lens[seq];
        if (past < 0) fail(lens, "lengths of at least 0", std::to_string(past));
        const int64_t pages = (past + rows + args.page_size - 1) / args.page_size;
        if (pages > args.table_width) {
            fail(table,
                 std::to_string(pages) + " pages for the " + std::to_string(past + rows) +
                     " positions of sequence " + std::to_string(seq),
                 std::to_string(args.table_width));
        }
        for (int64_t i = 0; i < pages; ++i) {
            const int64_t page = args.page_table[seq * args.table_width + i];
            if (page < 0 || page >= num_pages) {
                fail(table, "page ids within [0, " + std::to_string(num_pages) + ")",
                     std::to_string(page) + " in sequence " + std::to_string(seq));
            }
        }
    }
}

struct Caches {
    TensorView keys;
    TensorView values;
};

static Caches view_caches(const TensorView& x, py::handle key_cache, py::handle value_cache) {
    const Operand kc_operand{"paged_attention", "key_cache"};
    const Operand vc_operand{"paged_attention", "value_cache"};
    const TensorView kc = view_of(kc_operand, key_cache);
    check(kc_operand, kc, {DType::f16, DType::f32}, {kAnySize, kAnySize, kAnySize, x.shape[2]});
    check_contiguous(kc_operand, kc, 0);
    const int64_t kv_heads = kc.shape[1];
    if (kv_heads < 1 || kc.shape[2] < 1 || x.shape[1] % kv_heads != 0) {
        fail(kc_operand, "kv heads that divide the " + std::to_string(x.shape[1]) + " query heads",
             describe(kc));
    }
    const TensorView vc = view_of(vc_operand, value_cache);
    check(vc_operand, vc, {kc.dtype}, {kc.shape[0], kc.shape[1], kc.shape[2], kc.shape[3]});
    check_contiguous(vc_operand, vc, 0);
    return {kc, vc};
}

static void paged_attention(Table& table, py::handle q, py::handle key_cache,
                            py::handle value_cache, py::handle page_table, py::handle row_starts,
                            py::handle past_lens, float scale, int64_t window, float softcap,
                            py::handle out) {
    const Operand q_operand{"paged_attention", "q"};
    const Operand table_operand{"paged_attention", "page_table"};
    const Operand starts_operand{"paged_attention", "row_starts"};
    const Operand lens_operand{"paged_attention", "past_lens"};
    const Operand y_operand{"paged_attention", "out"};
    const TensorView x = view_of(q_operand, q);
    check(q_operand, x, {DType::f32}, {kAnySize, kAnySize, kAnySize});
    check_contiguous(q_operand, x, 1);
    const auto [kc, vc] = view_caches(x, key_cache, value_cache);
    const int64_t kv_heads = kc.shape[1];
    const TensorView pages = view_of(table_operand, page_table);
    check(table_operand, pages, {DType::i32}, {kAnySize, kAnySize});
    check_contiguous(table_operand, pages, 0);
    const TensorView starts = view_of(starts_operand, row_starts);
    check(starts_operand, starts, {DType::i32}, {pages.shape[0] + 1});
    check_contiguous(starts_operand, starts, 0);
    const TensorView lens = view_of(lens_operand, past_lens);
    check(lens_operand, lens, {DType::i32}, {pages.shape[0]});
    check_contiguous(lens_operand, lens, 0);
    const TensorView y = view_of(y_operand, out);
    check(y_operand, y, {DType::f32}, {x.shape[0], x.shape[1] * x.shape[2]});
    check_contiguous(y_operand, y, 0);
    if (window < 0) {
        fail({"paged_attention", "window"}, "0 (none) or more", std::to_string(window));
    }
    if (!(softcap >= 0.0f)) {
        fail({"paged_attention", "softcap"}, "0 (none) or more", std::to_string(softcap));
    }
    const AttentionArgs args{x.as<float>(),
                             x.shape[0],
                             x.stride[0],
                             x.shape[1],
                             kv_heads,
                             x.shape[2],
                             kc.data,
                             vc.data,
                             kc.dtype,
                             kc.shape[2],
                             pages.as<int32_t>(),
                             pages.shape[1],
                             pages.shape[0],
                             starts.as<int32_t>(),
                             lens.as<int32_t>(),
                             scale,
                             window,
                             softcap,
                             y.as<float>()};
    check_sequences(args, kc.shape[0]);
    py::gil_scoped_release release;
    table.ops->paged_attention(table.pool, args);
}

void bind_attention(py::class_<Table>& table) {
    table.def("paged_attention", &paged_attention, py::arg("q"), py::arg("key_cache"),
              py::arg("value_cache"), py::arg("page_table"), py::arg("row_starts"),
              py::arg("past_lens"), py::arg("scale"), py::arg("window"), py::arg("softcap"),
              py::arg("out"));
}

}  // namespace exl

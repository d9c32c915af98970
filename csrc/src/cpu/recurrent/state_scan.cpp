// State scan of Mamba-2: a call's whole chunks of tokens at once, other rows token by token.
//
// Contract   include/exl/ops/recurrent.h.
// Mapping    In slices of the rows: first the gates, and B and C of whole chunks, a work item per
//            chunk. Then a work item is one sequence, one head and kRows rows of its state, or
//            kStrip rows if a sequence has a whole chunk. They are independent of each other and
//            stay in the L1 cache over all tokens.
// Chunks     chunks.h, on the transposed state [state_size, head_dim]: keys are B, queries C, and
//            delta[j] = d[j] x[j] ("Transformers are SSMs", Dao and Gu, 2024). In the
//            batch-invariant mode there are none.
// Accuracy   fp32. Token by token, a product with C is summed in kLanes separate sums.
#include "cpu/recurrent/chunks.h"
#include "cpu/recurrent/recurrent_common.h"

namespace exl::EXL_ISA {

constexpr int64_t kRows = 16;  // of 128 floats: 8 KiB
constexpr int kStripSlot = 0;  // thread_scratch

// Decay of the state and step of one head.
struct ScanGate {
    float decay;
    float step;
};

static inline ScanGate gate_of(const StateScanArgs& args, int64_t row, int64_t head) {
    const float wanted = softplus(args.dt[row * args.dt_stride + head] + args.dt_bias[head]);
    const float least = wanted < args.least_step ? args.least_step : wanted;
    const float step = least > args.largest_step ? args.largest_step : least;
    return {::expf(-args.decay[head] * step), step};
}

static inline int64_t scratch_width(const StateScanArgs& args) {
    return scan_scratch_width(args.heads, args.groups, args.state_size);
}

static inline float* scratch_of(const StateScanArgs& args, Slice slice, int64_t row) {
    return args.scratch + slice.scratch_row(row) * scratch_width(args);
}

// A row of scratch: decay of the state, then the step, of each head.
static inline void prepare_row(const StateScanArgs& args, int64_t row, float* scratch) {
    for (int64_t head = 0; head < args.heads; ++head) {
        const ScanGate gate = gate_of(args, row, head);
        scratch[head] = gate.decay;
        scratch[args.heads + head] = gate.step;
    }
}

// Packed numbers of a chunk in scratch: of each group B, C and their products, then of each head
// the decays of the tokens and their steps.
struct ScanPack {
    ScanPack(const StateScanArgs& args, float* chunk)
        : groups(chunk),
          group_floats(2 * args.state_size * kChunk + kChunk * kChunk),
          depth(args.state_size),
          gates(chunk + args.groups * group_floats),
          heads(args.heads) {}

    float* group(int64_t index) const { return groups + index * group_floats; }
    float* queries(int64_t index) const { return group(index) + depth * kChunk; }
    float* products(int64_t index) const { return group(index) + 2 * depth * kChunk; }
    float* decays(int64_t head) const { return gates + head * kChunk; }
    float* steps(int64_t head) const { return gates + (heads + head) * kChunk; }

    float* groups;
    int64_t group_floats;
    int64_t depth;
    float* gates;
    int64_t heads;
};

static inline void prepare_chunk(const StateScanArgs& args, int64_t first, float* chunk) {
    const ScanPack pack(args, chunk);
    const float* b = args.xbc + first * args.xbc_stride + args.heads * args.head_dim;
    const float* c = b + args.groups * args.state_size;
    for (int64_t group = 0; group < args.groups; ++group) {
        const int64_t at = group * args.state_size;
        float* to = pack.group(group);
        transpose_chunk(b + at, args.xbc_stride, args.state_size, to);
        transpose_chunk(c + at, args.xbc_stride, args.state_size, pack.queries(group));
        multiply_keys(pack.queries(group), to, args.state_size, pack.products(group));
    }
    for (int64_t head = 0; head < args.heads; ++head) {
        for (int t = 0; t < kChunk; ++t) {
            const ScanGate gate = gate_of(args, first + t, head);
            pack.decays(head)[t] = gate.decay;
            pack.steps(head)[t] = gate.step;
        }
    }
}

// Copies rows of a state [rows][depth] to a strip, transposed, or zeros if it is new.
static inline void load_transposed(const Strip& to, const float* state, bool is_new) {
    for (int64_t n = 0; n < to.depth; n += kLanes) {
        const int count = static_cast<int>(smaller(kLanes, to.depth - n));
        for (int u = 0; u < kVecs; ++u) {
            Vec rows[kLanes];
            for (int r = 0; r < kLanes; ++r) {
                const bool is_held = !is_new && r < to.lanes(u);
                const float* row = state + (u * kLanes + r) * to.depth + n;
                rows[r] = is_held ? load_some(row, count) : set1(0.0f);
            }
            transpose_block(rows, to.state + n * kStrip + u * kLanes, kStrip);
        }
    }
}

static inline void store_transposed(const Strip& strip, float* state) {
    for (int64_t n = 0; n < strip.depth; n += kLanes) {
        const int count = static_cast<int>(smaller(kLanes, strip.depth - n));
        for (int u = 0; u < kVecs; ++u) {
            Vec rows[kLanes];
            alignas(64) float block[kLanes * kLanes];
            for (int r = 0; r < kLanes; ++r) {
                rows[r] = load(strip.state + (n + r) * kStrip + u * kLanes);
            }
            transpose_block(rows, block, kLanes);
            for (int r = 0; r < strip.lanes(u) && r < kLanes; ++r) {
                float* row = state + (u * kLanes + r) * strip.depth + n;
                store_some(row, load(block + r * kLanes), count);
            }
        }
    }
}

// Updates one row of a state with step * x * B and returns its product with C.
static inline float scan_row(
    float* h, const float* b, const float* c, int64_t n, float decay, float input, bool is_new
) {
    const Vec factor = set1(decay), added = set1(input);
    Vec total = set1(0.0f);
    for_lanes(n, [&](int64_t i, int count) {
        const Vec held = is_new ? set1(0.0f) : load_some(h + i, count);
        const Vec s = fma(added, load_some(b + i, count), mul(factor, held));
        store_some(h + i, s, count);
        total = fma(s, load_some(c + i, count), total);
    });
    return sum(total);
}

// Tokens of a sequence for rows `part` of one head's state.
struct ScanItem {
    Slice slice;
    int64_t head;
    int64_t group;
    float* state;  // of the head
    Range part;
    int64_t first;  // row
    int64_t last;
    bool is_new;
};

static inline void scan_rows(const StateScanArgs& args, ScanItem item) {
    const int64_t inner = args.heads * args.head_dim, n = args.state_size;
    for (int64_t row = item.first; row < item.last; ++row) {
        const float* x = args.xbc + row * args.xbc_stride;
        const float* b = x + inner + item.group * n;
        const float* c = b + args.groups * n;
        const float* gates = scratch_of(args, item.slice, row);
        for (int64_t p = item.part.first; p < item.part.last; ++p) {
            const float value = x[item.head * args.head_dim + p];
            const float added = gates[args.heads + item.head] * value;
            const float y =
                scan_row(item.state + p * n, b, c, n, gates[item.head], added, item.is_new);
            args.y[row * inner + item.head * args.head_dim + p] = y + args.skip[item.head] * value;
        }
        item.is_new = false;
    }
}

// Adds the chunk from `row` on to a strip of the state, whose first column has the input `x` and the
// output `y`.
static inline void scan_chunk(
    const StateScanArgs& args, const ScanItem& item, const Strip& strip, int64_t row
) {
    const ScanPack pack(args, scratch_of(args, item.slice, row));
    const int64_t inner = args.heads * args.head_dim;
    const int64_t column = item.head * args.head_dim + item.part.first;
    const float* steps = pack.steps(item.head);
    const float* x = args.xbc + row * args.xbc_stride + column;
    for (int j = 0; j < kChunk; ++j) {
        for (int u = 0; u < kVecs; ++u) {
            const Vec value = strip.load_columns(x + j * args.xbc_stride, u);
            store(strip.delta + j * kStrip + u * kLanes, mul(set1(steps[j]), value));
        }
    }
    const bool has_next = row + 2 * kChunk <= item.last;
    const int64_t next = has_next ? row + kChunk : row;
    const ScanPack ahead(args, scratch_of(args, item.slice, next));
    if (has_next) {
        prefetch_rows(x + kChunk * args.xbc_stride, args.xbc_stride);
        prefetch_rows(args.y + (row + kChunk) * inner + column, inner);
    }
    ChunkDecays decays;
    set_decays(nullptr, pack.products(item.group), pack.decays(item.head), nullptr, decays);
    query_strip(strip, pack.queries(item.group), decays.grown, ahead.queries(item.group));
    add_own_tokens(strip, decays.outer);
    const Vec skip = set1(args.skip[item.head]);
    for (int i = 0; i < kChunk; ++i) {
        float* y = args.y + (row + i) * inner + column;
        for (int u = 0; u < kVecs; ++u) {
            const Vec value = strip.load_columns(x + i * args.xbc_stride, u);
            const Vec out = load(strip.out + i * kStrip + u * kLanes);
            strip.store_columns(y, u, fma(skip, value, out));
        }
    }
    decay_deltas(strip, decays.left);
    update_strip<false>(strip, pack.group(item.group), &decays.grown[kChunk - 1]);
}

static inline void scan_chunks(const StateScanArgs& args, ScanItem item) {
    if (item.last - item.first >= kChunk) {
        const int64_t bytes = Strip::floats(args.state_size) * 4;
        auto* memory = static_cast<float*>(thread_scratch(kStripSlot, bytes));
        const Strip strip(memory, args.state_size, item.part.count());
        float* rows = item.state + item.part.first * args.state_size;
        load_transposed(strip, rows, item.is_new);
        for (; item.first + kChunk <= item.last; item.first += kChunk) {
            scan_chunk(args, item, strip, item.first);
        }
        store_transposed(strip, rows);
        item.is_new = false;
    }
    scan_rows(args, item);
}

// Gates of a slice. The rows of a chunk are packed, others stand by themselves.
static void prepare(ThreadPool& pool, const StateScanArgs& args, Slice slice, int64_t most_rows) {
    const int64_t blocks = ceil_div(smaller(most_rows, slice.count), kChunk);
    for_parts(pool, args.rows, slice, blocks, [&](int64_t, int64_t block, Range rows) {
        const int64_t first = rows.first + block * kChunk;
        const int64_t last = smaller(rows.last, first + kChunk);
        if (!args.is_batch_invariant && last - first == kChunk) {
            return prepare_chunk(args, first, scratch_of(args, slice, first));
        }
        for (int64_t row = first; row < last; ++row) {
            prepare_row(args, row, scratch_of(args, slice, row));
        }
    });
}

void state_scan(ThreadPool& pool, const StateScanArgs& args) {
    const int64_t most_rows = most_rows_of(args.rows);
    const bool has_chunks = !args.is_batch_invariant && most_rows >= kChunk;
    const int64_t block_rows = has_chunks ? kStrip : kRows;
    const int64_t blocks = ceil_div(args.head_dim, block_rows), parts = args.heads * blocks;
    for_slices(pool, most_rows, kChunk, [&](Slice slice) {
        prepare(pool, args, slice, most_rows);
        for_parts(pool, args.rows, slice, parts, [&](int64_t seq, int64_t part, Range rows) {
            const int64_t head = part / blocks, begin = part % blocks * block_rows;
            const int64_t matrix = args.rows.slots[seq] * args.heads + head;
            const ScanItem item{
                slice,
                head,
                head / (args.heads / args.groups),
                args.states + matrix * args.head_dim * args.state_size,
                {begin, smaller(args.head_dim, begin + block_rows)},
                rows.first,
                rows.last,
                slice.from == 0 && args.rows.past_lens[seq] == 0
            };
            has_chunks ? scan_chunks(args, item) : scan_rows(args, item);
        });
    });
}

}  // namespace exl::EXL_ISA

// Allocation and filling of quantized matrices, and embedding lookup in them.
//
// Layout and planes: include/exl/ops/quant_linear.h. Filling reorders codes and copies scales
// unchanged.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "exl/half.h"
#include "exl/ops/quant_linear.h"
#include "exl/weight_memory.h"

namespace exl {

constexpr int64_t kSteps = kBlockRows / 4;
constexpr int64_t kPlaneRow = 4 * kPanel;  // bytes: 4 rows of 16 columns

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bit widths of a block's planes, low bits first; `high` is 0 if there is only one plane.
struct Planes {
    int low, high;
};
static Planes planes_of(int bits) {
    switch (bits) {
        case 3: return {2, 1};
        case 5: return {4, 1};
        case 6: return {4, 2};
        default: return {bits, 0};
    }
}

// Returns the runs of a layout, with groups that can share blocks in runs of their own: all groups
// of a run of kHalfRows rows, except for the last of an odd number.
static std::vector<GroupRun> with_pairs(const QuantLayout& layout) {
    std::vector<GroupRun> found;
    for (GroupRun run : layout.runs) {
        const bool can_pair = run.rows == kHalfRows && layout.values == Values::integers;
        const int64_t paired = can_pair ? run.groups / 2 * 2 : 0;
        const int64_t single = run.groups - paired;
        run.is_paired = paired > 0;
        run.groups = paired;
        if (paired > 0) found.push_back(run);
        run.is_paired = false;
        run.groups = single;
        if (single > 0) found.push_back(run);
    }
    return found;
}

QuantMatrix::QuantMatrix(const QuantLayout& layout)
    : n(layout.n),
      k(layout.k),
      scale_dtype(layout.scale_dtype),
      offset(layout.offset),
      values(layout.values),
      runs(with_pairs(layout)) {
    int64_t rows = 0;
    bool has_padding = false;
    for (GroupRun& run : runs) {
        run.units = run.is_paired ? run.groups / 2 : run.groups;
        run.unit_rows = run.is_paired ? kBlockRows : run.rows;
        run.blocks = ceil_div(run.unit_rows, kBlockRows);
        run.spans = run.is_paired ? 2 : ceil_div(run.blocks, kSpanBlocks);
        run.first_group = groups;
        run.first_block = blocks;
        run.first_span = spans;
        run.first_row = rows;
        run.code_offset = panel_bytes;
        has_padding |= run.unit_rows % kBlockRows != 0;
        groups += run.groups;
        blocks += run.units * run.blocks;
        spans += run.units * run.spans;
        rows += run.groups * run.rows;
        panel_bytes += run.units * run.blocks * kPlaneRow * run.bits;
    }
    if (has_padding || layout.features != nullptr) {
        order.assign(static_cast<size_t>(blocks * kBlockRows), -1);
        for (const GroupRun& run : runs) {
            for (int64_t row = 0; row < run.groups * run.rows; ++row) {
                const int64_t stored = run.first_row + row;
                const int64_t unit = row / run.unit_rows;
                const int64_t padded =
                    (run.first_block + unit * run.blocks) * kBlockRows + row % run.unit_rows;
                order[static_cast<size_t>(padded)] = layout.features != nullptr
                                                         ? layout.features[stored]
                                                         : static_cast<int32_t>(stored);
            }
        }
    }
    const int64_t columns = panels() * kPanel;
    const int64_t code_bytes = panels() * panel_bytes;
    const int64_t scale_bytes = ceil_div(groups * columns * dtype_bytes(scale_dtype), 64) * 64;
    const int64_t offset_bytes = offset == Offset::middle  ? 0
                                 : offset == Offset::zeros ? ceil_div(groups * columns, 64) * 64
                                                           : scale_bytes;
    const int64_t bias_bytes = layout.has_bias ? columns * 4 : 0;
    size_bytes = code_bytes + scale_bytes + offset_bytes + bias_bytes;
    void* data = nullptr;
    block_ = claim_memory(size_bytes, &data);
    codes = static_cast<uint8_t*>(data);
    scales = codes + code_bytes;
    if (offset_bytes > 0) offsets = codes + code_bytes + scale_bytes;
    if (bias_bytes > 0) {
        bias = reinterpret_cast<float*>(codes + code_bytes + scale_bytes + offset_bytes);
    }
}

QuantMatrix::~QuantMatrix() { release_memory(block_); }

bool QuantMatrix::has_order_of(const QuantMatrix& other) const {
    return blocks == other.blocks && order == other.order;
}

bool QuantMatrix::has_pairs() const {
    return std::any_of(runs.begin(), runs.end(), [](const GroupRun& run) { return run.is_paired; });
}

bool QuantMatrix::has_input_of(const QuantMatrix& other) const {
    if (runs.size() != other.runs.size() || !has_order_of(other)) return false;
    for (size_t i = 0; i < runs.size(); ++i) {
        if (runs[i].rows != other.runs[i].rows || runs[i].groups != other.runs[i].groups) {
            return false;
        }
    }
    return true;
}

// Codes of one block as bytes, in the order of an 8-bit plane: step (4 rows), then column, then row
// within the step.
struct Block {
    uint8_t lanes[kSteps][kPlaneRow];

    uint8_t& at(int64_t row, int64_t column) { return lanes[row / 4][4 * column + row % 4]; }
};

// Packs `bits` bits of each code, from `low_bit` up, into one plane. Returns the end of the plane.
static uint8_t* pack_plane(const Block& block, int low_bit, int bits, uint8_t* to) {
    const int steps_per_row = 8 / bits;
    const int mask = (1 << bits) - 1;
    for (int64_t first = 0; first < kSteps; first += steps_per_row) {
        uint8_t row[kPlaneRow] = {};
        for (int s = 0; s < steps_per_row; ++s) {
            const uint8_t* lanes = block.lanes[first + s];
            for (int64_t i = 0; i < kPlaneRow; ++i) {
                row[i] = static_cast<uint8_t>(row[i] | ((lanes[i] >> low_bit & mask) << bits * s));
            }
        }
        std::memcpy(to, row, kPlaneRow);
        to += kPlaneRow;
    }
    return to;
}

static void pack_block(const Block& block, int bits, uint8_t* to) {
    const Planes planes = planes_of(bits);
    to = pack_plane(block, 0, planes.low, to);
    if (planes.high > 0) pack_plane(block, planes.low, planes.high, to);
}

// Reads one code of a packed block.
static int unpack_code(const uint8_t* block, int bits, int64_t row, int64_t column) {
    const int64_t step = row / 4;
    const int64_t lane = 4 * column + row % 4;
    const auto plane = [&](const uint8_t* from, int width) {
        const int64_t per_row = 8 / width;
        return from[kPlaneRow * (step / per_row) + lane] >> width * (step % per_row) &
               ((1 << width) - 1);
    };
    const Planes planes = planes_of(bits);
    const int low = plane(block, planes.low);
    if (planes.high == 0) return low;
    return low | plane(block + kPlaneRow * planes.low, planes.high) << planes.low;
}

// Reads the codes of one stored row, `count` columns from a packing of 32-bit words, into row `row`
// of the block. The code of each column starts at bit `bit` of the column's bit stream.
static void read_words(
    const QuantColumns& from, int64_t bit, int bits, int64_t column, int64_t count, int64_t row,
    Block& block
) {
    const auto* words = static_cast<const uint32_t*>(from.codes) + column;
    const uint32_t* here = words + bit / 32 * from.row_stride;
    const int shift = static_cast<int>(bit % 32);
    const uint32_t mask = (1u << bits) - 1;
    uint8_t* to = block.lanes[row / 4] + row % 4;
    if (shift + bits <= 32) {
        for (int64_t c = 0; c < count; ++c)
            to[4 * c] = static_cast<uint8_t>(here[c] >> shift & mask);
        return;
    }
    const uint32_t* next = here + from.row_stride;
    for (int64_t c = 0; c < count; ++c) {
        to[4 * c] = static_cast<uint8_t>((here[c] >> shift | next[c] << (32 - shift)) & mask);
    }
}

static const GgmlBlock& ggml_block(Packing packing) {
    for (const GgmlBlock& block : kGgmlBlocks) {
        if (block.packing == packing) return block;
    }
    std::abort();  // unreachable: callers pass GGML packings only (QuantMatrix::fill)
}

// Reads the codes of one GGML block of 32 values; signed 8-bit values become codes by adding 128.
static void read_ggml(const uint8_t* from, const GgmlBlock& at, uint8_t (&codes)[kBlockRows]) {
    if (at.bits == 8) {
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(from[at.codes + i] ^ 0x80);
        return;
    }
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[at.codes + i] & 15;
        codes[i + 16] = from[at.codes + i] >> 4;
    }
    if (at.high_bits < 0) return;
    uint32_t high = 0;
    std::memcpy(&high, from + at.high_bits, 4);
    for (int i = 0; i < 32; ++i) {
        codes[i] = static_cast<uint8_t>(codes[i] | (high >> i & 1) << 4);
    }
}

static void fill_ggml_panel(
    QuantMatrix& w, const QuantColumns& from, int64_t panel, int64_t column, int64_t count
) {
    const GgmlBlock& at = ggml_block(from.packing);
    auto* scales = static_cast<uint16_t*>(w.scales) + w.scale_index(panel);
    auto* minimums = static_cast<uint16_t*>(w.offsets) + w.scale_index(panel);
    uint8_t* to = w.codes + panel * w.panel_bytes;
    Block block = {};
    for (int64_t b = 0; b < w.blocks; ++b) {
        for (int64_t c = 0; c < count; ++c) {
            const uint8_t* source = static_cast<const uint8_t*>(from.codes) +
                                    (column + c) * from.row_stride + b * at.bytes;
            std::memcpy(scales + b * kPanel + c, source, 2);
            if (at.minimum >= 0) std::memcpy(minimums + b * kPanel + c, source + at.minimum, 2);
            uint8_t codes[kBlockRows];
            read_ggml(source, at, codes);
            for (int64_t i = 0; i < kSteps; ++i) {
                std::memcpy(block.lanes[i] + 4 * c, codes + 4 * i, 4);
            }
        }
        pack_block(block, at.bits, to + b * kPlaneRow * at.bits);
    }
}

static void fill_codes(
    QuantMatrix& w, const QuantColumns& from, int64_t panel, int64_t column, int64_t count
) {
    int64_t first_bit = 0;  // start of the run in each column's bit stream
    for (const GroupRun& run : w.runs) {
        uint8_t* to = w.codes + panel * w.panel_bytes + run.code_offset;
        for (int64_t unit = 0; unit < run.units; ++unit) {
            for (int64_t b = 0; b < run.blocks; ++b, to += kPlaneRow * run.bits) {
                Block block = {};
                const int64_t rows = std::min(kBlockRows, run.unit_rows - b * kBlockRows);
                for (int64_t r = 0; r < rows; ++r) {
                    const int64_t in_run = unit * run.unit_rows + b * kBlockRows + r;
                    int64_t source = run.first_row + in_run;
                    int64_t bit = first_bit + in_run * run.bits;
                    if (from.source_rows != nullptr) {
                        source = from.source_rows[source];
                        bit = source * run.bits;
                    }
                    if (from.packing == Packing::words) {
                        read_words(from, bit, run.bits, column, count, r, block);
                        continue;
                    }
                    const uint8_t* bytes =
                        static_cast<const uint8_t*>(from.codes) + source * from.row_stride + column;
                    for (int64_t c = 0; c < count; ++c) block.at(r, c) = bytes[c];
                }
                pack_block(block, run.bits, to);
            }
        }
        first_bit += run.groups * run.rows * run.bits;
    }
}

// Copies columns [column, column + count) of a grid [groups, columns] to [group][16] of one panel.
// An element has `bytes` bytes.
static void fill_grid(
    const void* from, int64_t columns, int64_t column, int64_t count, int64_t groups, int64_t bytes,
    uint8_t* to
) {
    for (int64_t group = 0; group < groups; ++group) {
        std::memcpy(
            to + group * kPanel * bytes,
            static_cast<const uint8_t*>(from) + (group * columns + column) * bytes,
            static_cast<size_t>(count * bytes)
        );
    }
}

void QuantMatrix::fill(int64_t first_column, const QuantColumns& from) {
    const int64_t scale_size = dtype_bytes(scale_dtype);
    const int64_t offset_size = offset == Offset::zeros ? 1 : scale_size;
    for (int64_t column = 0; column < from.columns; column += kPanel) {
        const int64_t panel = (first_column + column) / kPanel;
        const int64_t count = std::min(kPanel, from.columns - column);
        if (from.packing == Packing::words || from.packing == Packing::bytes) {
            fill_codes(*this, from, panel, column, count);
            fill_grid(
                from.scales, from.columns, column, count, groups, scale_size,
                static_cast<uint8_t*>(scales) + scale_index(panel) * scale_size
            );
            if (offset != Offset::middle) {
                fill_grid(
                    from.offsets, from.columns, column, count, groups, offset_size,
                    static_cast<uint8_t*>(offsets) + scale_index(panel) * offset_size
                );
            }
        } else {
            fill_ggml_panel(*this, from, panel, column, count);
        }
    }
    if (bias != nullptr) {
        std::memcpy(bias + first_column, from.bias, static_cast<size_t>(from.columns) * 4);
    }
}

static float grid_value(const void* grid, DType dtype, int64_t index) {
    if (dtype == DType::u8) {
        const uint32_t bits = half_scale_bits(static_cast<const uint8_t*>(grid)[index]);
        float scale = 0.0f;
        std::memcpy(&scale, &bits, 4);
        return scale;
    }
    return dtype == DType::f32 ? static_cast<const float*>(grid)[index]
                               : half_to_float(static_cast<const uint16_t*>(grid)[index]);
}

// The number that a code stands for, before the scale. `zero` applies to integers only.
static float value_of(Values values, int code, int zero) {
    switch (values) {
        case Values::e4m3:
            // The float16 number with these exponent and mantissa bits is 2^-8 times the value.
            return 256.0f *
                   half_to_float(static_cast<uint16_t>((code & 0x7f) << 7 | (code & 0x80) << 8));
        case Values::iq4_nl: return kIq4Values[code];
        case Values::mxfp4: return kMxfp4Values[code];
        default: return static_cast<float>(code - zero);
    }
}

// Dequantizes output column `id`, an embedding row, to y[k].
static void read_row(const QuantMatrix& w, int64_t id, float* y) {
    const int64_t panel = id / kPanel;
    const int64_t column = id % kPanel;
    for (const GroupRun& run : w.runs) {
        const uint8_t* codes = w.panel_codes(panel) + run.code_offset;
        const int64_t in_unit = run.groups / run.units;
        for (int64_t group = 0; group < run.groups; ++group) {
            const int64_t unit = group / in_unit;
            const int64_t start = group % in_unit * run.rows;  // row of the unit
            const uint8_t* blocks = codes + unit * run.blocks * kPlaneRow * run.bits;
            const int64_t at = w.scale_index(panel) + (run.first_group + group) * kPanel + column;
            const float scale = grid_value(w.scales, w.scale_dtype, at);
            int zero = w.offset == Offset::middle ? 1 << (run.bits - 1) : 0;
            if (w.offset == Offset::zeros) zero = static_cast<const uint8_t*>(w.offsets)[at];
            const float minimum =
                w.offset == Offset::minimums ? grid_value(w.offsets, w.scale_dtype, at) : 0.0f;
            const int64_t first = (run.first_block + unit * run.blocks) * kBlockRows;
            for (int64_t r = start; r < start + run.rows; ++r) {
                const int code = unpack_code(
                    blocks + r / kBlockRows * kPlaneRow * run.bits, run.bits, r % kBlockRows, column
                );
                const int64_t feature =
                    w.order.empty() ? first + r : w.order[static_cast<size_t>(first + r)];
                y[feature] = scale * value_of(w.values, code, zero) + minimum;
            }
        }
    }
}

void quant_embedding(ThreadPool& pool, const QuantEmbeddingArgs& args) {
    constexpr int64_t kRowsPerItem = 2;  // about 8 us
    pool.parallel_for(ceil_div(args.m, kRowsPerItem), [&](int64_t item) {
        const int64_t last = std::min(args.m, (item + 1) * kRowsPerItem);
        for (int64_t row = item * kRowsPerItem; row < last; ++row) {
            read_row(*args.w, args.token_ids[row], args.y + row * args.w->k);
        }
    });
}

}  // namespace exl

// y = x @ w for trellis codes.
//
// Contract   include/exl/ops/trellis.h, which draws the layout.
// Inputs     Each row of x is scaled and rotated once per part, before its products.
// mul1       A value is affine in the sum of four bytes. Rotated inputs are rounded to 16-bit
//            integers, each span of 128 relative to its largest value. The sums of a span are exact
//            integers: 510 * 32767 * 128 < 2^31. One row multiplies bytes as they are decoded. For
//            more rows, the byte sums of a span are stored as 16-bit words in the L1 cache.
// Others     Values are decoded to float32, exactly as the format rounds them, span by span.
// Outputs    The sums of a block of 128 columns are rotated and scaled, and its bias added.
// Accuracy   mul1 leaves out the rounding of its values to float16, 2.1e-4 of their RMS.
// Rows       A row has the same bits for any m: integers are exact, and floats are added in one
//            order.
// Mapping    Few rows: a work item is a unit of a block. The thread that finishes the last unit of
//            a block rotates it. Many rows: a block and a range of rows.
#include "cpu/common/tile.h"
#include "cpu/linear/trellis_decode.h"

namespace exl::EXL_ISA {

constexpr int64_t kFewRows = 8;
// Decoding costs about as much as multiplying 12 rows.
constexpr int64_t kMostItemRows = 256;
constexpr int64_t kLeastItemRows = 32;
// Scratch slots.
constexpr int kRotatedSlot = 2;
constexpr int kSumsSlot = 4;
constexpr int kDecodedSlot = 5;

// Rotated inputs of one part.
struct Rotated {
    int32_t* words;    // mul1: [m][k] integers in both halves (one row), or [m][k / 2] pairs
    float* floats;     // others: [m][k]
    float* scales;     // [m][spans]
    int32_t* starts;   // [m][spans] - kMiddle * sum of the integers
    float* constants;  // [m] added to all columns
    int64_t words_stride;
};

static int64_t padded_of(const TrellisMatrix& w) { return w.spans() * kRotation; }

static bool is_mul1(const TrellisMatrix& w) { return w.layout.codebook == Codebook::mul1; }

// Writes in_scales * x of one span, zero outside of the matrix, then rotates it.
static void rotate_span(const TrellisMatrix& w, const float* x, int64_t span, float* to) {
    const auto* scales = reinterpret_cast<const Half*>(w.in_scales) + span * kRotation;
    const int64_t first = span * kRotation - w.layout.first_in;  // feature of the first number
    const int64_t low = larger(0, -first);
    const int64_t high = smaller(kRotation, w.layout.k - first);
    if (low == 0 && high == kRotation) {
        for (int64_t i = 0; i < kRotation; i += kLanes) {
            store(to + i, mul(load(x + first + i), load(scales + i)));
        }
    } else {
        for (int64_t i = 0; i < kRotation; ++i) to[i] = 0.0f;
        for (int64_t i = low; i < high; ++i) to[i] = x[first + i] * half_to_float(scales[i].bits);
    }
    rotate(to);
}

// Rounds one rotated span to integers. `in_pairs`: two integers in a word, else one in both halves.
static void round_span(
    const float* from, bool in_pairs, int32_t* words, float* scale, int32_t* start, float* constant
) {
    uint32_t largest = 0;  // as bits without the sign; NaN and infinity are above all numbers
    for (int64_t i = 0; i < kRotation; ++i) {
        uint32_t bits = 0;
        __builtin_memcpy(&bits, from + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude = 0.0f;
    __builtin_memcpy(&magnitude, &largest, 4);
    const bool is_finite = largest < 0x7f800000u;
    if (magnitude < 1e-33f) magnitude = 1e-33f;  // the inverse of smaller ones would overflow
    const Vec inverse = set1(is_finite ? 32767.0f / magnitude : 0.0f);
    float rounded[kRotation];
    for (int64_t i = 0; i < kRotation; i += kLanes) {
        const Vec value = is_finite ? load(from + i) : set1(0.0f);
        store(rounded + i, round_even(mul(value, inverse)));
    }
    int32_t values[kRotation];
    int32_t sum = 0;
    for (int64_t i = 0; i < kRotation; ++i) {
        values[i] = static_cast<int32_t>(rounded[i]);
        sum += values[i];
    }
    const int64_t count = in_pairs ? kRotation / 2 : kRotation;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t low = in_pairs ? values[2 * i] : values[i];
        const int32_t high = in_pairs ? values[2 * i + 1] : values[i];
        words[i] = static_cast<int32_t>(
            (static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16
        );
    }
    // A NaN or an infinity makes the scale NaN, and so every output of the row.
    const float step = is_finite ? magnitude / 32767.0f : __builtin_nanf("");
    *scale = step * kStep;
    *start = -kMiddle * sum;
    *constant = step * (kBase + kMiddle * kStep) * static_cast<float>(sum);
}

static void prepare_row(
    const TrellisMatrix& w, const float* x, bool in_pairs, int64_t row, const Rotated& to
) {
    const int64_t spans = w.spans();
    if (!is_mul1(w)) {
        float* floats = to.floats + row * padded_of(w);
        for (int64_t s = 0; s < spans; ++s) rotate_span(w, x, s, floats + s * kRotation);
        to.constants[row] = 0.0f;
        return;
    }
    float total = 0.0f;
    for (int64_t s = 0; s < spans; ++s) {
        float rotated[kRotation];
        rotate_span(w, x, s, rotated);
        float constant = 0.0f;
        int32_t* words = to.words + row * to.words_stride + s * kRotation / (in_pairs ? 2 : 1);
        const int64_t at = row * spans + s;
        round_span(rotated, in_pairs, words, to.scales + at, to.starts + at, &constant);
        total += constant;
    }
    to.constants[row] = total;
}

static void prepare(ThreadPool& pool, const TrellisLinearArgs& args, Rotated* parts) {
    const bool in_pairs = args.m > 1;
    int64_t bytes[kMaxParts] = {};
    int64_t total = 0;
    for (int p = 0; p < args.count; ++p) {
        const TrellisMatrix& w = *args.parts[p];
        bytes[p] = ceil_div(args.m * (padded_of(w) + 2 * w.spans() + 1) * 4, 64) * 64;
        total += bytes[p];
    }
    auto* memory = static_cast<uint8_t*>(thread_scratch(kRotatedSlot, total));
    for (int p = 0; p < args.count; ++p) {
        const TrellisMatrix& w = *args.parts[p];
        Rotated& to = parts[p];
        to.words = reinterpret_cast<int32_t*>(memory);
        to.floats = reinterpret_cast<float*>(memory);
        to.words_stride = padded_of(w) / (in_pairs ? 2 : 1);
        to.scales = to.floats + args.m * padded_of(w);
        to.starts = reinterpret_cast<int32_t*>(to.scales + args.m * w.spans());
        to.constants = reinterpret_cast<float*>(to.starts + args.m * w.spans());
        memory += bytes[p];
    }
    pool.parallel_for(args.count * args.m, [&](int64_t item) {
        const int64_t part = item / args.m;
        const int64_t row = item % args.m;
        const float* x = args.x + row * args.x_stride;
        prepare_row(*args.parts[part], x, in_pairs, row, parts[part]);
    });
}

// sums[r][16 * panel ..] += scale * (words @ decoded) for R rows and two panels.
template <int R>
static void multiply_words(
    const int16_t* decoded, const int32_t* const* words, const float* scales, float* const* sums
) {
    Wide acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set_wide(0);
    for (int64_t pair = 0; pair < kRotation / 2; ++pair) {
        const Wide first = load_wide(decoded + pair * 2 * kPanel);
        const Wide second = load_wide(decoded + (kRotation + 2 * pair) * kPanel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Wide x = set_wide(words[r][pair]);
            acc[r][0] = add_products(acc[r][0], first, x);
            acc[r][1] = add_products(acc[r][1], second, x);
        }
    }
    for (int r = 0; r < R; ++r) {
        add_scaled(acc[r][0], scales[r], sums[r]);
        add_scaled(acc[r][1], scales[r], sums[r] + kPanel);
    }
}

// Row-major rows a fixed distance apart.
struct StridedRows {
    const float* a;
    int64_t stride;
    float at(int row, int64_t step) const { return a[row * stride + step]; }
};

// Adds the products of rows with one unit of a block to sums[row][128], in the order of the panels.
static void unit_product(
    const TrellisMatrix& w, const Rotated& x, int64_t m, int64_t block, int unit, const Range& rows,
    float* sums
) {
    const int64_t spans = w.spans();
    const auto panels = static_cast<int>(w.panels_of_unit());
    float* to = sums + unit * panels * kPanel;
    void* decoded =
        m == 1 && is_mul1(w) ? nullptr : thread_scratch(kDecodedSlot, 4 * kRotation * kPanel * 4);
    for (int64_t s = 0; s < spans; ++s) {
        const uint64_t* codes = w.span_codes(block, s);
        if (decoded == nullptr) {
            with_rate(w.layout.tile_words, [&]<int Twice>() {
                multiply_row<Twice>(
                    codes, unit, x.words + s * kRotation, x.starts[s], x.scales[s], to
                );
            });
            continue;
        }
        if (!is_mul1(w)) {
            auto* values = static_cast<float*>(decoded);
            with_rate(w.layout.tile_words, [&]<int Twice>() {
                decode_floats<Twice>(codes, unit, w.layout.codebook, values);
            });
            for (int64_t r = rows.first; r < rows.last; r += kTileRows) {
                const auto count = static_cast<int>(smaller(kTileRows, rows.last - r));
                const StridedRows from{
                    x.floats + r * spans * kRotation + s * kRotation, spans * kRotation
                };
                const TileOut out{to + (r - rows.first) * kRotation,
                                  kRotation,
                                  panels * kPanel,
                                  false,
                                  nullptr,
                                  true};
                with_rows<kTileRows>(count, [&]<int R>() {
                    tile_columns<R>(from, values, kRotation * kPanel, panels, kRotation, out);
                });
            }
            continue;
        }
        auto* values = static_cast<int16_t*>(decoded);
        with_rate(w.layout.tile_words, [&]<int Twice>() {
            decode_words<Twice>(codes, unit, values);
        });
        for (int64_t r = rows.first; r < rows.last; r += kTrellisRows) {
            const auto count = static_cast<int>(smaller(kTrellisRows, rows.last - r));
            const int32_t* words[kTrellisRows] = {};
            float scales[kTrellisRows] = {};
            float* at[kTrellisRows] = {};
            for (int i = 0; i < count; ++i) {
                words[i] = x.words + (r + i) * x.words_stride + s * kRotation / 2;
                scales[i] = x.scales[(r + i) * spans + s];
                at[i] = to + (r + i - rows.first) * kRotation;
            }
            for (int panel = 0; panel < panels; panel += 2) {
                const int16_t* from = values + panel * kRotation * kPanel;
                with_rows<kTrellisRows>(count, [&]<int R>() {
                    multiply_words<R>(from, words, scales, at);
                });
                for (int i = 0; i < count; ++i) at[i] += 2 * kPanel;
            }
        }
    }
}

// Rotates and scales the sums of one block, and writes its columns of y.
static void finish_block(
    const TrellisLinearArgs& args, const TrellisMatrix& w, const Rotated& x, int64_t block,
    const Range& rows, float* sums, float* y
) {
    const int64_t first = block * kRotation - w.layout.first_out;  // column of the first number
    const int64_t low = larger(0, -first);
    const int64_t high = smaller(kRotation, w.layout.n - first);
    const auto* scales = reinterpret_cast<const Half*>(w.out_scales) + block * kRotation;
    const float* bias = w.bias == nullptr ? nullptr : w.bias + block * kRotation;
    for (int64_t r = rows.first; r < rows.last; ++r) {
        float* from = sums + (r - rows.first) * kRotation;
        for (int64_t i = 0; i < kRotation; i += kLanes) {
            store(from + i, add(load(from + i), set1(x.constants[r])));
        }
        rotate(from);
        float ordered[kRotation];  // panel by lane -> column
        for (int64_t panel = 0; panel < kRotation / kPanel; ++panel) {
            for (int64_t lane = 0; lane < kPanel; ++lane) {
                ordered[lane * 8 + panel] = from[panel * kPanel + lane];
            }
        }
        for (int64_t i = 0; i < kRotation; i += kLanes) {
            Vec value = mul(load(ordered + i), load(scales + i));
            if (bias != nullptr) value = add(value, load(bias + i));
            store(ordered + i, value);
        }
        float* to = y + r * args.y_stride + first;
        for (int64_t i = low; i < high; ++i) {
            to[i] = args.accumulate ? to[i] + ordered[i] : ordered[i];
        }
    }
}

// A block of one of the parts.
struct Place {
    int part;
    int64_t block;
    int64_t column;  // of y where the part begins
};

static Place place_of(const TrellisLinearArgs& args, int64_t block) {
    Place at{0, block, 0};
    while (at.block >= args.parts[at.part]->blocks()) {
        at.block -= args.parts[at.part]->blocks();
        at.column += args.parts[at.part]->layout.n;
        ++at.part;
    }
    return at;
}

static void zero(float* sums, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) store(sums + i, set1(0.0f));
}

// A work item is a unit of a block, for all rows.
static void few_rows(
    ThreadPool& pool, const TrellisLinearArgs& args, const Rotated* x, int64_t blocks
) {
    const int64_t sums_bytes = blocks * args.m * kRotation * 4;
    auto* sums = static_cast<float*>(thread_scratch(kSumsSlot, sums_bytes + blocks * 4));
    auto* left = reinterpret_cast<int32_t*>(sums + blocks * args.m * kRotation);
    for (int64_t b = 0; b < blocks; ++b) {
        left[b] = static_cast<int32_t>(args.parts[place_of(args, b).part]->units());
    }
    const Range rows{0, args.m};
    constexpr int64_t kUnits = 4;  // the largest number of units
    pool.parallel_for(blocks * kUnits, [&](int64_t item) {
        const int64_t b = item / kUnits;
        const Place at = place_of(args, b);
        const TrellisMatrix& w = *args.parts[at.part];
        const auto unit = static_cast<int>(item % kUnits);
        if (unit >= w.units()) return;
        float* to = sums + b * args.m * kRotation;
        const int64_t columns = w.panels_of_unit() * kPanel;
        for (int64_t r = 0; r < args.m; ++r) zero(to + r * kRotation + unit * columns, columns);
        unit_product(w, x[at.part], args.m, at.block, unit, rows, to);
        if (__atomic_sub_fetch(left + b, 1, __ATOMIC_ACQ_REL) > 0) return;
        finish_block(args, w, x[at.part], at.block, rows, to, args.y + at.column);
    });
}

// A work item is a block, for a range of rows.
static void many_rows(
    ThreadPool& pool, const TrellisLinearArgs& args, const Rotated* x, int64_t blocks
) {
    const int64_t wanted = ceil_div(4 * pool.threads(), blocks);
    const int64_t most = larger(1, args.m / kLeastItemRows);
    const int64_t ranges = larger(smaller(wanted, most), ceil_div(args.m, kMostItemRows));
    pool.parallel_for(blocks * ranges, [&](int64_t item) {
        const Place at = place_of(args, item / ranges);
        const TrellisMatrix& w = *args.parts[at.part];
        const Range rows = share(args.m, item % ranges, ranges);
        const int64_t count = rows.count() * kRotation;
        auto* sums = static_cast<float*>(thread_scratch(kSumsSlot, count * 4));
        zero(sums, count);
        for (int unit = 0; unit < w.units(); ++unit) {
            unit_product(w, x[at.part], args.m, at.block, unit, rows, sums);
        }
        finish_block(args, w, x[at.part], at.block, rows, sums, args.y + at.column);
    });
}

void trellis_linear(ThreadPool& pool, const TrellisLinearArgs& args) {
    if (args.m == 0) return;
    Rotated x[kMaxParts];
    prepare(pool, args, x);
    int64_t blocks = 0;
    for (int p = 0; p < args.count; ++p) blocks += args.parts[p]->blocks();
    if (args.m <= kFewRows) return few_rows(pool, args, x, blocks);
    many_rows(pool, args, x, blocks);
}

}  // namespace exl::EXL_ISA

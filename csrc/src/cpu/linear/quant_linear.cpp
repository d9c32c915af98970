// y = x @ w for quantized w, with integer dot products. Calls with more rows than integers are good
// for, on instruction sets where floats are then faster, go to quant_prefill.cpp.
// Few rows of E4M3 numbers are multiplied as floats (quant_e4m3.h), more rows in quant_prefill.cpp.
//
// Contract   include/exl/ops/quant_linear.h, which draws the layout.
// Integers   x is quantized once to 16-bit integers, each span of up to 128 stored rows relative to
//            its largest value. Integer dot products of codes and activations are exact within a
//            span. Then the group's scale and offset and the span's own scale apply in fp32.
//            8-bit activations would be fast enough but too inaccurate: the output of SmolLM2
//            changes by 2.7e-3 (mean KL divergence) with 8-bit blocks of 32, by 5e-6 with 16 bits.
//            Codes of at most 4 bits in AMX tiles use 12-bit activations: 1e-4
//            (quant_tiles_int8.h).
// Rows       Every tile of every set gives the same integer sums, and scales apply in one order. A row
//            therefore has the same bits for any m whose activations have the same number of bits.
//            With is_batch_invariant these are 16 for every m, and quant_prefill.cpp is not used.
// Mapping    A work item is a range of panels, read as one stream of codes and one of scales. Every
//            column is summed by one thread in one order, for any number of threads.
#include "cpu/linear/quant_panels.h"
#include "cpu/linear/quant_prefill.h"

namespace exl::EXL_ISA {

// Smallest work item, in bytes of weights. Larger matrices have up to 8 items per thread.
constexpr int64_t kItemBytes = 256 << 10;
// kIntegerRows is the largest number of rows for which integer products are faster than
// dequantizing the codes. Measured at k = 576, n = 3072 on two cores, in GFLOP/s: byte dot products
// 420 at any number of rows; AMX 490 at 16 rows, 1150 at 64, 1370 at 512; without either, 16-bit
// words 220 and fp32 300.
#if EXL_HAS_INT_TILES
constexpr int64_t kIntegerRows = 32;
#elif !EXL_HAS_BYTE_DOT
constexpr int64_t kIntegerRows = 8;
#endif

// kFloatRows is the largest number of rows for which E4M3 weights are converted in registers: two
// passes over the weights. Measured at k = 4096, n = 14336 on one core: with AVX-512, 6 rows take 8 ms,
// 8 rows 19, and 9 rows dequantized to memory 30; with AVX2, 6 rows take 28 ms either way.
constexpr int64_t kFloatRows = EXL_HAS_INT_TILES ? 8 : kTileSums >= 12 ? 12 : 4;

// Quantizes x for every part. Parts with the same permutation and spans share one copy.
static void quantize(
    ThreadPool& pool, const QuantLinearArgs& args, const int* low_bits, Acts* acts
) {
    int64_t bytes[kMaxParts] = {};
    int64_t total = 0;
    const int64_t rows = ceil_div(args.m, kActRowStep) * kActRowStep;
    int source[kMaxParts];
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        source[p] = 0;
        while (source[p] < p &&
               (low_bits[p] != low_bits[source[p]] || !w.has_input_of(*args.parts[source[p]]))) {
            ++source[p];
        }
        const int64_t held_bytes = w.blocks * act_bytes(w) + ceil_div(w.spans, 16) * 16 * 8;
        if (source[p] == p) bytes[p] = rows * held_bytes;
        total += bytes[p];
    }
    auto* buffer = static_cast<uint8_t*>(thread_scratch(2, total));
    int owners[kMaxParts];
    int count = 0;
    for (int p = 0; p < args.count; ++p) {
        const QuantMatrix& w = *args.parts[p];
        if (source[p] != p) {
            acts[p] = acts[source[p]];
            continue;
        }
        const int64_t row_bytes = w.blocks * act_bytes(w);
        uint8_t* data = buffer;
        auto* scales = reinterpret_cast<float*>(buffer + rows * row_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + rows * ceil_div(w.spans, 16) * 16);
        buffer += bytes[p];
        acts[p] = {data, row_bytes, scales, sums, w.spans, low_bits[p]};
        owners[count++] = p;
    }
    // A work item is one row of one part, about 1 us.
    pool.parallel_for(count * args.m, [&](int64_t item) {
        const int part = owners[item / args.m];
        const int64_t row = item % args.m;
        const Acts& to = acts[part];
        quantize_row(
            *args.parts[part], args.x + row * args.x_stride, to.low_bits,
            to.data + row * to.row_bytes, to.scales + row * to.spans, to.sums + row * to.spans
        );
    });
}

// Chooses 12-bit activations for parts whose product runs in the AMX tiles for narrow codes; other
// parts keep 16 bits. The choice depends on the part alone, not on the parts it is joined with. The
// exception is a gate and its up projection, which share their tiles and therefore one width.
static void choose_low_bits(
    [[maybe_unused]] const QuantLinearArgs& args, [[maybe_unused]] int* low_bits
) {
#if EXL_HAS_INT_TILES
    if (args.m < kIntTileMinRows || args.is_batch_invariant) return;
    for (int p = 0; p < args.count; ++p) {
        if (has_narrow_codes(*args.parts[p])) low_bits[p] = kIntTileLowBits;
    }
    if (args.epilogue == Epilogue::gated && low_bits[0] != low_bits[1]) {
        low_bits[0] = low_bits[1] = kLowBits;
    }
#endif
}

static void panel_products(ThreadPool& pool, const QuantLinearArgs& args) {
    Acts acts[kMaxParts];
    int low_bits[kMaxParts] = {kLowBits, kLowBits, kLowBits};
    choose_low_bits(args, low_bits);
    quantize(pool, args, low_bits, acts);
    int64_t panels = 0;
    int64_t bytes = 0;
    for (int p = 0; p < args.count; ++p) {
        panels += args.parts[p]->panels();
        bytes += args.parts[p]->size_bytes;
    }
    const bool is_gated = args.epilogue == Epilogue::gated;
    if (is_gated) panels = args.parts[0]->panels();
    const int64_t threads = pool.threads();
    const int64_t rounds = smaller(8, larger(1, bytes / (threads * kItemBytes)));
    const int64_t splits = smaller(panels, threads * rounds);
    const int64_t row_blocks = ceil_div(args.m, kActRows);
    pool.parallel_for(splits * row_blocks, [&](int64_t item) {
        const Range rows{
            item % row_blocks * kActRows, smaller(args.m, (item % row_blocks + 1) * kActRows)
        };
        const int64_t split = item / row_blocks;
        const Range mine = share(panels, split, splits);
        if (is_gated) return gated_panels(args, acts, rows, mine);
        int64_t before = 0;
        int64_t column = 0;
        for (int p = 0; p < args.count; ++p) {
            const int64_t count = args.parts[p]->panels();
            const Range part{larger(mine.first - before, 0), smaller(mine.last - before, count)};
            if (part.first < part.last) part_panels(args, acts, p, rows, part, column);
            before += count;
            column += args.parts[p]->n;
        }
    });
}

void quant_linear(ThreadPool& pool, const QuantLinearArgs& args) {
    if (args.m == 0) return;
    int floats = 0;
    for (int p = 0; p < args.count; ++p) floats += args.parts[p]->values == Values::e4m3;
    if (floats > 0) {
        const bool is_few = floats == args.count && args.m <= kFloatRows;
        return is_few && !(EXL_HAS_INT_TILES && args.is_batch_invariant)
                   ? panel_products(pool, args)
                   : quant_prefill(pool, args);
    }
#if EXL_HAS_INT_TILES || !EXL_HAS_BYTE_DOT
    if (args.m > kIntegerRows && !args.is_batch_invariant) return quant_prefill(pool, args);
#endif
    panel_products(pool, args);
}

}  // namespace exl::EXL_ISA

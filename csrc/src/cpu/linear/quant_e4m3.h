// Products of panels of E4M3 numbers with rows of floats, for quant_linear.cpp: few rows, whose
// weights are converted in registers.
//
// Order      A chunk of up to kFloatBlocks blocks is summed from zero in one chain of multiply-adds,
//            then added to the chunks before it; the bias comes last. The fp32 path of
//            quant_prefill.cpp has the same order and rounds weights in the same way, so that a row
//            has the same bits for any number of rows.
#pragma once

#include "cpu/linear/quant_dequant.h"
#include "cpu/linear/quant_scales.h"

namespace exl::EXL_ISA {

// Adds blocks of one group to the sums of S streams of kLanes columns each, R rows. Stream s starts
// `starts[s]` bytes after `codes`.
template <int R, int S>
static inline __attribute__((always_inline)) void add_e4m3_blocks(
    const uint8_t* codes, const int64_t (&starts)[S], int64_t blocks, const float* x,
    int64_t x_stride, const Vec (&scale)[S], Vec (&sums)[S][R]
) {
    constexpr int64_t kBytes = kBlockRows * kPanel;
    for (const uint8_t* end = codes + blocks * kBytes; codes < end; codes += kBytes) {
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            for (int64_t line = 0; line < kBytes; line += 64) {
                prefetch(codes + starts[s] + kCodesAhead + line);
            }
        }
        unrolled<kSteps>([&]<int Step>() __attribute__((always_inline)) {
            Vec rows[S][4];
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) {
                e4m3_rows(load_codes(codes + starts[s] + Step * 4 * kPanel), rows[s]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s) rows[s][i] = mul(rows[s][i], scale[s]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Vec value = set1(x[r * x_stride + 4 * Step + i]);
#pragma GCC unroll 4
                    for (int s = 0; s < S; ++s) sums[s][r] = fma(value, rows[s][i], sums[s][r]);
                }
            }
        });
        x += kBlockRows;
    }
}

// Adds one chunk of blocks to the sums of V vectors of columns, from `column` on, of P panels.
template <int R, int P, int V>
static inline void sum_e4m3_chunk(
    const QuantMatrix& w, int64_t panel, int64_t column, Range chunk, const float* x,
    int64_t x_stride, Vec (&sums)[P * V][R]
) {
    int64_t starts[P * V];
    for (int s = 0; s < P * V; ++s) starts[s] = s / V * w.panel_bytes + s % V * kCodeBytes;
    for (const GroupRun& run : w.runs) {
        const uint8_t* codes = w.panel_codes(panel) + run.code_offset + 4 * column;
        int64_t block = larger(chunk.first, run.first_block);
        const int64_t last = smaller(chunk.last, run.first_block + run.groups * run.blocks);
        while (block < last) {
            const int64_t group = (block - run.first_block) / run.blocks;
            const int64_t end = smaller(last, run.first_block + (group + 1) * run.blocks);
            const int64_t at = w.scale_index(panel) + (run.first_group + group) * kPanel + column;
            Vec scale[P * V];
            for (int s = 0; s < P * V; ++s) {
                const int64_t index = at + s / V * w.groups * kPanel + s % V * kLanes;
                scale[s] = mul(load_grid(w.scales, w.scale_dtype, index), set1(kE4m3Factor));
            }
            add_e4m3_blocks<R, P * V>(
                codes + (block - run.first_block) * kBlockRows * kPanel, starts, end - block,
                x + block * kBlockRows, x_stride, scale, sums
            );
            block = end;
        }
    }
}

// Computes the columns of P panels for R rows of floats in stored order: y[P][R][16].
template <int R, int P>
static void e4m3_product(
    const QuantMatrix& w, int64_t panel, const Acts& acts, int64_t row, float (*y)[kPanel]
) {
    // Each sum is one chain of multiply-adds, so few rows take all vectors of a panel at a time.
    constexpr int V = R * P * kPanelVecs <= 6 ? kPanelVecs : 1;
    const auto* x = reinterpret_cast<const float*>(acts.data + row * acts.row_bytes);
    const int64_t chunks = ceil_div(w.blocks, kFloatBlocks);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t column = 0; column < kPanel; column += V * kLanes) {
            Vec sums[P * V][R];
#pragma GCC unroll 4
            for (int s = 0; s < P * V; ++s) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sums[s][r] = set1(0.0f);
            }
            sum_e4m3_chunk<R, P, V>(
                w, panel, column, share(w.blocks, chunk, chunks), x, acts.row_bytes / 4, sums
            );
#pragma GCC unroll 4
            for (int s = 0; s < P * V; ++s) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    float* to = y[s / V * R + r] + column + s % V * kLanes;
                    store(to, chunk == 0 ? sums[s][r] : add(sums[s][r], load(to)));
                }
            }
        }
    }
    if (w.bias == nullptr) return;
    for (int i = 0; i < P * R; ++i) {
        const float* bias = w.bias + (panel + i / R) * kPanel;
        for (int c = 0; c < kPanel; c += kLanes)
            store(y[i] + c, add(load(y[i] + c), load(bias + c)));
    }
}

}  // namespace exl::EXL_ISA

// Register-blocked inner product, shared by linear and attention.
//
//   C[R, 16 P] = A[R, k] @ B[k, 16 P]      B in P panels of [k][16]; sums stay in registers
//
// A step along k loads P * 16 weights once and broadcasts R values of A. A is read through a small
// view type, so that packed tiles and row-major rows each cost only their own index arithmetic.
#pragma once

#include "cpu/common/vec.h"
#include "exl/ops/linear.h"

namespace exl::EXL_ISA {

constexpr int kPanelVecs = static_cast<int>(kPanel) / kLanes;

// Prefetch distance of a stream of weights. Measured on one core with fp16, 2 KiB against no
// prefetch: 10 instead of 5.5 GB/s with 14 rows, 14 instead of 10 GB/s with 8 rows. 1 KiB and 4 KiB
// gain less.
constexpr int64_t kAheadBytes = 2048;

// Packed rows: the R values of one step are adjacent, a[step][R].
template <int R>
struct PackedRows {
    const float* a;
    float at(int row, int64_t step) const { return a[step * R + row]; }
};

// Row-major rows, `Stride` floats apart.
template <int Stride>
struct FixedRows {
    const float* a;
    float at(int row, int64_t step) const { return a[row * Stride + step]; }
};

struct TileOut {
    float* c;
    int64_t stride;
    int64_t columns;       // number of valid columns; may be less than 16 P in the last block
    bool accumulate;       // add to C instead of overwriting it
    const float* bias;     // added once; null for none
    bool resumes = false;  // the sums start from C, whose columns are all valid, instead of zero
};

template <int R, int P>
static inline void store_tile(const Vec (&sums)[R][P * kPanelVecs], const TileOut& out) {
#pragma GCC unroll 32
    for (int v = 0; v < P * kPanelVecs; ++v) {
        const int64_t left = out.columns - v * kLanes;
        if (left <= 0) return;
        const int count = left < kLanes ? static_cast<int>(left) : kLanes;
        const bool has_bias = out.bias != nullptr;
        const Vec bias = has_bias ? load(out.bias + v * kLanes) : set1(0.0f);  // padded to panels
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float* c = out.c + r * out.stride + v * kLanes;
            Vec value = sums[r][v];
            if (out.accumulate) value = add(value, load_some(c, count));
            if (has_bias) value = add(value, bias);
            store_some(c, value, count);
        }
    }
}

template <int R, int P, class Rows, class T>
static inline void tile_product(
    Rows a, const T* b, int64_t panel_stride, int64_t k, const TileOut& out
) {
    Vec sums[R][P * kPanelVecs];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
        for (int v = 0; v < P * kPanelVecs; ++v)
            sums[r][v] = out.resumes ? load(out.c + r * out.stride + v * kLanes) : set1(0.0f);
    }
    for (int64_t step = 0; step < k; ++step) {
        Vec weights[P * kPanelVecs];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            prefetch(
                reinterpret_cast<const char*>(b + p * panel_stride + step * kPanel) + kAheadBytes
            );
#pragma GCC unroll 16
            for (int v = 0; v < kPanelVecs; ++v) {
                weights[p * kPanelVecs + v] =
                    load(b + p * panel_stride + step * kPanel + v * kLanes);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec value = set1(a.at(r, step));
#pragma GCC unroll 32
            for (int v = 0; v < P * kPanelVecs; ++v)
                sums[r][v] = fma(value, weights[v], sums[r][v]);
        }
    }
    store_tile<R, P>(sums, out);
}

// tile_product over any number of panels, kTilePanels at a time; advances its copy of `out`.
template <int R, class Rows, class T>
static inline void tile_columns(
    Rows a, const T* b, int64_t panel_stride, int64_t panels, int64_t k, TileOut out
) {
    int64_t panel = 0;
    for (; panel + kTilePanels <= panels; panel += kTilePanels) {
        tile_product<R, kTilePanels>(a, b + panel * panel_stride, panel_stride, k, out);
        out.c += kTilePanels * kPanel;
        out.columns -= kTilePanels * kPanel;
        if (out.bias != nullptr) out.bias += kTilePanels * kPanel;
    }
    if constexpr (kTilePanels > 1) {
        if (panel < panels) tile_product<R, 1>(a, b + panel * panel_stride, panel_stride, k, out);
    }
}

// Calls fn<R>() with R = rows, a row count known only at run time: 1 <= rows <= kTileRows.
template <int R, class Fn>
static inline void with_rows(int rows, Fn&& fn) {
    if constexpr (R > 1) {
        if (rows < R) return with_rows<R - 1>(rows, fn);
    }
    fn.template operator()<R>();
}

// Even division of m rows into as few tiles as possible: 130 rows are 10 tiles of 13, not 9 of 14
// and one of 4. Tiles [0, thick) have `rows` rows, the others one less.
struct Tiling {
    explicit Tiling(int64_t m)
        : count(larger(1, ceil_div(m, kTileRows))),
          rows(ceil_div(m, count)),
          thick(m - count * (rows - 1)) {}
    int64_t first_row(int64_t tile) const {
        return tile * rows - (tile > thick ? tile - thick : 0);
    }
    int rows_of(int64_t tile) const { return static_cast<int>(tile < thick ? rows : rows - 1); }

    int64_t count;
    int64_t rows;
    int64_t thick;
};

// Transposes x[rows, k] into packed[k][rows].
static inline void pack_rows(const float* x, int64_t x_stride, int rows, int64_t k, float* packed) {
    int64_t step = 0;
    for (; step + 8 <= k; step += 8) {
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < 8; ++i) packed[(step + i) * rows + r] = x[r * x_stride + step + i];
        }
    }
    for (; step < k; ++step) {
        for (int r = 0; r < rows; ++r) packed[step * rows + r] = x[r * x_stride + step];
    }
}

}  // namespace exl::EXL_ISA

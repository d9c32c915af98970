// Choosing the likeliest tokens of a row without sorting it: blocks, keys that order tokens, and the
// few tokens above a bound.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/vec.h"
#include "exl/ops/sample.h"

namespace exl::EXL_ISA {

constexpr int64_t kBlock = kSampleBlock;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Values of a row; those after the end are minus infinity.
struct Row {
    const float* values;
    int64_t count;
    int64_t blocks;
    float tail[kBlock];

    Row(const float* from, int64_t n) : values(from), count(n), blocks(ceil_div(n, kBlock)) {
        for (int64_t i = 0; i < kBlock; ++i) tail[i] = -kInf;
        const int64_t whole = n / kBlock * kBlock;
        std::memcpy(tail, from + whole, sizeof(float) * static_cast<size_t>(n - whole));
    }
    const float* block(int64_t b) const {
        return (b + 1) * kBlock <= count ? values + b * kBlock : tail;
    }
};

// What orders and weighs tokens, from their logits.
struct Scale {
    float largest;
    float temperature;
    bool is_plain;

    float top() const { return is_plain ? largest : 0.0f; }
    float operator()(float value) const {
        return is_plain ? value : (value - largest) / temperature;
    }
    // 0 where the vectors' exp is.
    double weight(float y) const {
        const float x = y - top();
        return x < kWeightFloor ? 0.0 : ::exp(static_cast<double>(x));
    }
};

// Largest value of each block. False if a value is NaN or plus infinity.
static inline bool survey(const Row& row, float* maxima) {
    Vec bad = set1(0.0f);
    for (int64_t b = 0; b < row.blocks; ++b) {
        const float* from = row.block(b);
        Vec largest_here = set1(-kInf);
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Vec v = load(from + i);
            bad = select(less(v, set1(kInf)), bad, set1(1.0f));
            largest_here = max(largest_here, v);
        }
        maxima[b] = largest(largest_here);
    }
    return largest(bad) == 0.0f;
}

// The k-th largest of n, which are reordered.
static inline float nth_largest(float* values, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) ++i;
            while (values[j] < pivot) --j;
            if (i > j) break;
            const float swapped = values[i];
            values[i++] = values[j];
            values[j--] = swapped;
        }
        if (k - 1 <= j) {
            high = j;
        } else if (k - 1 >= i) {
            low = i;
        } else {
            break;
        }
    }
    return values[k - 1];
}

// Ascending keys are descending values, equal ones by id.
static inline uint64_t key_of(float y, int64_t id) {
    const float unsigned_zero = y + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &unsigned_zero, 4);
    const uint32_t descending = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
    return static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(id);
}
static inline int64_t id_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Sorts by the upper halves; equal ones keep their order. `spare` has room for n.
static inline void sort_keys(uint64_t* keys, uint64_t* spare, int64_t n) {
    if (n <= 64) {
        for (int64_t i = 1; i < n; ++i) {
            const uint64_t key = keys[i];
            int64_t j = i;
            for (; j > 0 && keys[j - 1] >> 32 > key >> 32; --j) keys[j] = keys[j - 1];
            keys[j] = key;
        }
        return;
    }
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t starts[257] = {};
        for (int64_t i = 0; i < n; ++i) ++starts[(keys[i] >> shift & 255) + 1];
        for (int i = 0; i < 256; ++i) starts[i + 1] += starts[i];
        for (int64_t i = 0; i < n; ++i) spare[starts[keys[i] >> shift & 255]++] = keys[i];
        uint64_t* sorted = spare;  // four passes: the last one ends in `keys`
        spare = keys;
        keys = sorted;
    }
}

// Keys of the tokens of at least y(bound), in the order of ids.
static inline int64_t collect(const Row& row, const float* maxima, const Scale& scale, float bound,
                uint64_t* keys) {
    const float least = scale(bound);
    // Values just below the bound may scale to the same y; two roundings are well within this.
    const float loose = bound - ((scale.largest - bound) * 1e-6f + 1e-30f);
    int64_t n = 0;
    for (int64_t b = 0; b < row.blocks; ++b) {
        if (maxima[b] < loose) continue;
        const float* from = row.block(b);
        for (int64_t i = 0; i < kBlock; ++i) {
            if (from[i] < loose || from[i] == -kInf) continue;
            const float y = scale(from[i]);
            if (y >= least) keys[n++] = key_of(y, b * kBlock + i);
        }
    }
    return n;
}

// A value that at least the k likeliest tokens reach, unless there are fewer blocks.
static inline float bound_of(const Row& row, const float* maxima, float* spare, int64_t k) {
    if (k > row.blocks) return -kInf;
    std::memcpy(spare, maxima, sizeof(float) * static_cast<size_t>(row.blocks));
    return nth_largest(spare, row.blocks, k);
}

}  // namespace exl::EXL_ISA

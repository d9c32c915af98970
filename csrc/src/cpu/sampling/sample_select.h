// Selection of the likeliest tokens of a row without sorting all of it: block maxima, sort keys,
// and collection of the tokens above a bound.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/common/vec.h"
#include "exl/ops/sampling.h"

namespace exl::EXL_ISA {

constexpr int64_t kBlock = kSampleBlock;
constexpr float kInf = std::numeric_limits<float>::infinity();

// A row of logits, padded to whole blocks with minus infinity.
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

// Maps a logit to the scaled value y that orders tokens, and y to a weight.
struct Scale {
    float largest;
    float temperature;
    bool is_plain;

    float top() const { return is_plain ? largest : 0.0f; }
    float operator()(float value) const {
        return is_plain ? value : (value - largest) / temperature;
    }
    // e^(y - top), 0 for the same arguments as the vectorized exp.
    double weight(float y) const {
        const float x = y - top();
        return x < kWeightFloor ? 0.0 : ::exp(static_cast<double>(x));
    }
};

// Finds the largest value of each block. Returns false if a value is NaN or plus infinity.
static inline bool find_maxima(const Row& row, float* maxima) {
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

// Returns the k-th largest of n values, which it reorders (quickselect).
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

// Sort key of a token. Ascending keys are descending values, equal values by ascending id.
static inline uint64_t key_of(float y, int64_t id) {
    const float unsigned_zero = y + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &unsigned_zero, 4);
    const uint32_t descending = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
    return static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(id);
}
static inline int64_t id_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Sorts by the upper halves of the keys; a stable sort. `spare` holds n keys.
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
        uint64_t* sorted = spare;  // after four passes the result is in the original `keys`
        spare = keys;
        keys = sorted;
    }
}

// Writes the keys of all tokens with y >= scale(bound), in the order of ids, and returns their
// number.
static inline int64_t collect(
    const Row& row, const float* maxima, const Scale& scale, float bound, uint64_t* keys
) {
    const float least = scale(bound);
    // Values just below the bound may scale to the same y. The margin exceeds the error of the two
    // roundings involved.
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

// Returns a value that at least the k likeliest tokens reach: the k-th largest block maximum, or
// minus infinity if there are fewer than k blocks.
static inline float bound_of(const Row& row, const float* maxima, float* spare, int64_t k) {
    if (k > row.blocks) return -kInf;
    std::memcpy(spare, maxima, sizeof(float) * static_cast<size_t>(row.blocks));
    return nth_largest(spare, row.blocks, k);
}

}  // namespace exl::EXL_ISA

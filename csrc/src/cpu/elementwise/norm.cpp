// RMSNorm of whole rows and of single heads; LayerNorm; RoPE.
//
// Contract   include/exl/ops/elementwise.h.
// Accuracy   fp32; the sum of squares is accumulated in kSums * kLanes separate sums.
#include <cmath>

#include "cpu/common/ops.h"
#include "cpu/common/vec.h"

namespace exl::EXL_ISA {

// Sum over a row, divided by d. `add_to(sum, v)` adds a function of the values v to a sum, and
// `tail(sum, rest, count)` that of the last `count` values, which are fewer than a vector.
template <class Add, class Tail>
static inline float mean_of(const float* x, int64_t d, Add add_to, Tail tail) {
    constexpr int kSums = 4;
    Vec sums[kSums];
    for (int u = 0; u < kSums; ++u) sums[u] = set1(0.0f);
    int64_t i = 0;
    for (; i + kSums * kLanes <= d; i += kSums * kLanes) {
        for (int u = 0; u < kSums; ++u) sums[u] = add_to(sums[u], load(x + i + u * kLanes));
    }
    for_lanes(d - i, [&](int64_t j, int count) { sums[0] = tail(sums[0], x + i + j, count); });
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(d);
}

static inline float mean_square(const float* x, int64_t d) {
    const auto add_square = [](Vec sum, Vec v) { return fma(v, v, sum); };
    return mean_of(x, d, add_square, [&](Vec sum, const float* rest, int count) {
        return add_square(sum, load_some(rest, count));
    });
}

static inline float mean(const float* x, int64_t d) {
    const auto add_value = [](Vec sum, Vec v) { return add(sum, v); };
    return mean_of(x, d, add_value, [&](Vec sum, const float* rest, int count) {
        return add_value(sum, load_some(rest, count));
    });
}

// Population variance around `center`. A second pass over the row is exact where the mean is large
// against the deviations; the mean of squares less the squared mean would cancel.
static inline float variance(const float* x, int64_t d, float center) {
    const Vec m = set1(center);
    const auto add_square = [&](Vec sum, Vec v) { return fma(sub(v, m), sub(v, m), sum); };
    return mean_of(x, d, add_square, [&](Vec sum, const float* rest, int count) {
        float deviations[kLanes] = {};
        for (int lane = 0; lane < count; ++lane) deviations[lane] = rest[lane] - center;
        const Vec v = load(deviations);
        return fma(v, v, sum);
    });
}

void rms_norm(ThreadPool& pool, const RmsNormArgs& args) {
    const int64_t per_item = larger(1, kValuesPerChunk / larger(1, args.heads * args.d));
    pool.parallel_for(ceil_div(args.rows, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.rows, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            for (int64_t head = 0; head < args.heads; ++head) {
                const float* x = args.x + row * args.x_stride + head * args.d;
                float* y = args.y + row * args.y_stride + head * args.d;
                const Vec factor = set1(1.0f / std::sqrt(mean_square(x, args.d) + args.eps));
                for_lanes(args.d, [&](int64_t i, int count) {
                    const Vec weight = load_some(args.weight + i, count);
                    store_some(y + i, mul(mul(load_some(x + i, count), factor), weight), count);
                });
            }
        }
    });
}

void layer_norm(ThreadPool& pool, const LayerNormArgs& args) {
    const int64_t per_item = larger(1, kValuesPerChunk / larger(1, args.d));
    pool.parallel_for(ceil_div(args.rows, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.rows, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const float* x = args.x + row * args.x_stride;
            float* y = args.y + row * args.d;
            const float center = mean(x, args.d);
            const float scale = 1.0f / std::sqrt(variance(x, args.d, center) + args.eps);
            const Vec m = set1(center);
            const Vec factor = set1(scale);
            for_lanes(args.d, [&](int64_t i, int count) {
                const Vec plain = mul(sub(load_some(x + i, count), m), factor);
                const Vec scaled = mul(plain, load_some(args.weight + i, count));
                const bool has_bias = args.bias != nullptr;
                const Vec v = has_bias ? add(scaled, load_some(args.bias + i, count)) : scaled;
                store_some(y + i, v, count);
            });
        }
    });
}

void rope(ThreadPool& pool, const RopeArgs& args) {
    const int64_t half = args.rotated / 2;
    const int64_t per_item = larger(1, kValuesPerChunk / larger(1, args.heads * args.rotated));
    pool.parallel_for(ceil_div(args.rows, per_item), [&](int64_t item) {
        const int64_t last = smaller(args.rows, (item + 1) * per_item);
        for (int64_t row = item * per_item; row < last; ++row) {
            const float* cos = args.cos + row * half;
            const float* sin = args.sin + row * half;
            for (int64_t head = 0; head < args.heads; ++head) {
                float* x = args.x + row * args.x_stride + head * args.d;
                for_lanes(half, [&](int64_t i, int count) {
                    const Vec a = load_some(x + i, count);
                    const Vec b = load_some(x + half + i, count);
                    const Vec c = load_some(cos + i, count);
                    const Vec s = load_some(sin + i, count);
                    store_some(x + i, fnma(b, s, mul(a, c)), count);
                    store_some(x + half + i, fma(a, s, mul(b, c)), count);
                });
                if (args.scale == nullptr) continue;
                const float* scale = args.scale + head * args.d;
                const float* shift = args.shift + head * args.d;
                for_lanes(args.d, [&](int64_t i, int count) {
                    const Vec factor = load_some(scale + i, count);
                    const Vec term = load_some(shift + i, count);
                    store_some(x + i, fma(load_some(x + i, count), factor, term), count);
                });
            }
        }
    });
}

}  // namespace exl::EXL_ISA

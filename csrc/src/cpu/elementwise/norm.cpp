// RMSNorm of whole rows and of single heads; RoPE.
//
// Contract   include/exl/ops/elementwise.h.
// Accuracy   fp32; the sum of squares is accumulated in kSums * kLanes separate sums.
#include <cmath>

#include "cpu/common/ops.h"
#include "cpu/common/vec.h"

namespace exl::EXL_ISA {

static inline float mean_square(const float* x, int64_t d) {
    constexpr int kSums = 4;
    Vec sums[kSums];
    for (int u = 0; u < kSums; ++u) sums[u] = set1(0.0f);
    int64_t i = 0;
    for (; i + kSums * kLanes <= d; i += kSums * kLanes) {
        for (int u = 0; u < kSums; ++u) {
            const Vec v = load(x + i + u * kLanes);
            sums[u] = fma(v, v, sums[u]);
        }
    }
    for_lanes(d - i, [&](int64_t j, int count) {
        const Vec v = load_some(x + i + j, count);
        sums[0] = fma(v, v, sums[0]);
    });
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(d);
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

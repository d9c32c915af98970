// Choice of experts from the router's logits, and their weights, for include/exl/ops/moe.h.
//
// Order      Every sum runs over the experts in their order. Of equal scores, the lower index wins.
// Accuracy   float32.
#include <cmath>

#include "exl/ops/moe.h"

namespace exl {

constexpr int kRouteSlot = 14;
// Rows of a work item; each takes about a microsecond.
constexpr int64_t kItemRows = 8;

static void softmax(const float* logits, int64_t count, float* scores) {
    float largest = logits[0];
    for (int64_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += scores[i] = std::exp(logits[i] - largest);
    for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

// Index of the largest value that is not taken, the first one of equal values; marks it as taken.
static int64_t take_largest(const float* values, int64_t count, bool* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    }
    taken[best] = true;
    return best;
}

// Sum of the `wanted` largest of `count` values. Overwrites taken[count].
static float sum_of_largest(const float* values, int64_t count, int64_t wanted, bool* taken) {
    for (int64_t i = 0; i < count; ++i) taken[i] = false;
    float sum = 0.0f;
    for (int64_t i = 0; i < wanted && i < count; ++i)
        sum += values[take_largest(values, count, taken)];
    return sum;
}

// Marks the experts outside of the best groups as taken. Overwrites totals[groups] and
// kept[groups].
static void drop_groups(
    const RouteArgs& args, const float* ranked, bool* taken, float* totals, bool* kept
) {
    const int64_t size = args.experts / args.groups;
    for (int64_t g = 0; g < args.groups; ++g) {
        totals[g] = sum_of_largest(ranked + g * size, size, args.group_scores, taken + g * size);
        kept[g] = false;
    }
    for (int64_t i = 0; i < args.kept_groups; ++i) take_largest(totals, args.groups, kept);
    for (int64_t e = 0; e < args.experts; ++e) taken[e] = !kept[e / size];
}

// Overwrites floats[3 * experts] and flags[2 * experts].
static void route_row(const RouteArgs& args, int64_t row, float* floats, bool* flags) {
    const float* logits = args.logits + row * args.experts;
    float* scores = floats;
    float* ranked = floats + args.experts;
    if (args.scores == Scores::softmax) {
        softmax(logits, args.experts, scores);
    } else {
        for (int64_t e = 0; e < args.experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    }
    for (int64_t e = 0; e < args.experts; ++e) {
        ranked[e] = args.bias == nullptr ? scores[e] : scores[e] + args.bias[e];
        flags[e] = false;
    }
    if (args.kept_groups < args.groups) {
        drop_groups(args, ranked, flags, floats + 2 * args.experts, flags + args.experts);
    }
    int32_t* ids = args.ids + row * args.top_k;
    float* weights = args.weights + row * args.top_k;
    float sum = 0.0f;
    for (int64_t j = 0; j < args.top_k; ++j) {
        ids[j] = static_cast<int32_t>(take_largest(ranked, args.experts, flags));
        weights[j] = scores[ids[j]];
        sum += weights[j];
    }
    for (int64_t j = 0; j < args.top_k; ++j) {
        if (args.normalizes) weights[j] /= sum + args.eps;
        weights[j] *= args.factor;
    }
}

void route(ThreadPool& pool, const RouteArgs& args) {
    pool.parallel_for((args.m + kItemRows - 1) / kItemRows, [&](int64_t item) {
        auto* floats = static_cast<float*>(thread_scratch(kRouteSlot, args.experts * (3 * 4 + 2)));
        auto* flags = reinterpret_cast<bool*>(floats + 3 * args.experts);
        const int64_t last = args.m < (item + 1) * kItemRows ? args.m : (item + 1) * kItemRows;
        for (int64_t row = item * kItemRows; row < last; ++row) route_row(args, row, floats, flags);
    });
}

}  // namespace exl

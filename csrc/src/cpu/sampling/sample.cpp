// Samples a token without sorting the vocabulary.
//
// Contract   include/exl/ops/sampling.h.
// Algorithm  First the largest value of each block of 64 tokens is found. The k-th largest of these
//            maxima is a lower bound of the k-th largest of all values. The k likeliest tokens are
//            therefore among the candidates at or above it, and only these are sorted. A top-p
//            nucleus is searched among the 32, then the 128 likeliest tokens in the same way. A
//            wider nucleus is found by bisection over its border: each step is a vectorized sum,
//            and only the tokens near the border are sorted.
// Accuracy   Weights of candidates are fp64. Weights of all tokens are fp32 (1 ulp), summed in fp64
//            by blocks.
#include "cpu/common/ops.h"
#include "cpu/sampling/sample_select.h"

namespace exl::EXL_ISA {

namespace {

constexpr double kNucleusFloor = 1e-6;

// Writes the logits with mask and edits applied to args.edited.
void write_edited(const SampleArgs& args) {
    float* to = args.edited;
    if (args.mask == nullptr) {
        std::memcpy(to, args.logits, sizeof(float) * static_cast<size_t>(args.vocab));
    } else {
        const int64_t whole = args.vocab / 32;
        for (int64_t word = 0; word < whole; ++word) {
            const uint32_t bits = static_cast<uint32_t>(args.mask[word]);
            for (uint32_t j = 0; j < 32; ++j) {
                const int64_t i = word * 32 + j;
                to[i] = (bits & (1u << j)) != 0 ? args.logits[i] : -kInf;
            }
        }
        for (int64_t i = whole * 32; i < args.vocab; ++i) {
            to[i] = (args.mask[whole] >> (i % 32) & 1) != 0 ? args.logits[i] : -kInf;
        }
    }
    for (int64_t i = 0; i < args.num_edits; ++i) {
        const int64_t id = args.ids[i];
        if (args.mask != nullptr && (args.mask[id / 32] >> (id % 32) & 1) == 0) continue;
        const float logit = args.logits[id];
        const float scaled = logit > 0.0f ? logit / args.factors[i] : logit * args.factors[i];
        to[id] = scaled + args.offsets[i];
    }
}

// Returns the likeliest token that the mask allows, -1 if all allowed logits are minus infinity. It
// scans only blocks whose largest value, allowed or not, exceeds the best value found so far.
int64_t best_allowed(const SampleArgs& args, int64_t blocks) {
    constexpr int64_t kWord = 32;
    float largest = -kInf;
    int64_t token = -1;
    for (int64_t b = 0; b < blocks; ++b) {
        if (args.maxima[b] <= largest) continue;
        const int64_t last = smaller((b + 1) * kBlock, args.vocab);
        for (int64_t first = b * kBlock; first < last; first += kWord) {
            uint32_t bits = static_cast<uint32_t>(args.mask[first / kWord]);
            for (; bits != 0; bits &= bits - 1) {
                const int64_t i = first + __builtin_ctz(bits);
                if (i >= args.vocab) break;
                if (args.logits[i] <= largest) continue;
                largest = args.logits[i];
                token = i;
            }
        }
    }
    return token;
}

// Result for a token with probability 1.
SampleResult certain(const SampleArgs& args, int64_t token) {
    if (args.num_top > 0) {
        args.top_ids[0] = token;
        args.top_probabilities[0] = 1.0;
    }
    return {token, 1.0, smaller(args.num_top, 1)};
}

// Sums the weights of a block in fp64, so that rare tokens are not lost beside a likely one.
double sum_block(const float* weights) {
    constexpr int kSums = 8;  // the number that the compiler keeps in vector registers
    double sums[kSums] = {};
    for (int64_t i = 0; i < kBlock; i += kSums) {
        for (int j = 0; j < kSums; ++j) sums[j] += static_cast<double>(weights[i + j]);
    }
    double total = 0.0;
    for (int j = 0; j < kSums; ++j) total += sums[j];
    return total;
}

// Computes y and weight of every token; sums[b] becomes the weight of block b. Returns the total.
double weigh(const Row& row, const Scale& scale, float floor, const SampleArgs& args) {
    const Vec shift = set1(scale.largest), divisor = set1(scale.temperature);
    const Vec top = set1(scale.top()), least = set1(floor), none = set1(0.0f);
    double total = 0.0;
    for (int64_t b = 0; b < row.blocks; ++b) {
        const float* from = row.block(b);
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            Vec y = load(from + i);
            if (!scale.is_plain) y = div(sub(y, shift), divisor);
            const Vec x = sub(y, top);
            const Vec weight = select(less(x, least), none, exp(x));
            store(args.scaled + b * kBlock + i, y);
            store(args.weights + b * kBlock + i, weight);
        }
        args.sums[b] = sum_block(args.weights + b * kBlock);
        total += args.sums[b];
    }
    return total;
}

// Total weight of the tokens with y >= least.
double weight_from(const SampleArgs& args, int64_t blocks, float least) {
    constexpr int64_t kGroup = 8 * kBlock;
    const Vec border = set1(least), none = set1(0.0f);
    double total = 0.0;
    for (int64_t first = 0; first < blocks * kBlock; first += kGroup) {
        const int64_t last = smaller(first + kGroup, blocks * kBlock);
        Vec even = none, odd = none;
        for (int64_t i = first; i < last; i += 2 * kLanes) {
            const Vec a = load(args.weights + i), b = load(args.weights + i + kLanes);
            even = add(even, select(less(load(args.scaled + i), border), none, a));
            odd = add(odd, select(less(load(args.scaled + i + kLanes), border), none, b));
        }
        total += static_cast<double>(sum(add(even, odd)));
    }
    return total;
}

// The last token that is kept, by its y and id. Tokens before it in descending order are kept too.
struct Border {
    float y;
    int64_t id;

    bool keeps(float other, int64_t other_id) const {
        return other > y || (other == y && other_id <= id);
    }
};

// Zeroes the weights of tokens beyond the border or with y - top < floor, and updates the sums.
// Returns the total.
double cut(const SampleArgs& args, int64_t blocks, Border border, float top, float floor) {
    const Vec edge = set1(border.y), shift = set1(top), least = set1(floor), none = set1(0.0f);
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
        const bool is_before = (b + 1) * kBlock <= border.id, is_after = b * kBlock > border.id;
        for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
            const Vec y = load(args.scaled + i);
            Vec weight = select(less(sub(y, shift), least), none, load(args.weights + i));
            if (is_before) weight = select(less(y, edge), none, weight);
            if (is_after) weight = select(less(edge, y), weight, none);
            store(args.weights + i, weight);
            if (!is_before && !is_after) {
                for (int64_t j = i; j < i + kLanes; ++j) {
                    if (!border.keeps(args.scaled[j], j)) args.weights[j] = 0.0f;
                }
            }
        }
        args.sums[b] = sum_block(args.weights + b * kBlock);
        total += args.sums[b];
    }
    return total;
}

// Collects the keys of the tokens with low <= y < high in the order of ids. Few blocks contain any.
int64_t collect_between(const SampleArgs& args, int64_t blocks, float low, float high) {
    const Vec from = set1(low), to = set1(high), none = set1(0.0f), one = set1(1.0f);
    int64_t n = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const float* y = args.scaled + b * kBlock;
        Vec inside = none;
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Vec here = load(y + i);
            inside = max(inside, select(less(here, from), none, select(less(here, to), one, none)));
        }
        if (largest(inside) == 0.0f) continue;
        for (int64_t i = 0; i < kBlock; ++i) {
            // Branch-free: the comparison of a single token is unpredictable.
            args.keys[n] = key_of(y[i], b * kBlock + i);
            n += static_cast<int64_t>(y[i] >= low) & static_cast<int64_t>(y[i] < high);
        }
    }
    return n;
}

// Finds the border of a nucleus that is wider than the candidates tried before. `wanted` is the
// weight of the nucleus, `least` the smallest weight of a token in it.
Border wide_border(
    const SampleArgs& args, const Row& row, const Scale& scale, double wanted, double least
) {
    // Invariant: every token above `high` is kept, and none below `low`.
    float low = scale.top() + static_cast<float>(::log(least)) - 1e-3f, high = scale.top();
    double above = 0.0;  // weight of the tokens with y >= high, once `is_open` is false
    bool is_open = true;
    for (int pass = 0; pass < 10; ++pass) {
        const float middle = low + (high - low) * 0.5f;
        if (!(middle > low && middle < high)) break;
        const double sum_here = weight_from(args, row.blocks, middle);
        if (sum_here <= wanted) {
            high = middle;
            above = sum_here;
            is_open = false;
        } else {
            low = middle;
        }
    }
    const int64_t n = collect_between(args, row.blocks, low, is_open ? kInf : high);
    sort_keys(args.keys, args.keys + row.blocks * kBlock, n);
    Border border{high, row.count};
    for (int64_t i = 0; i < n; ++i) {
        const int64_t id = id_of(args.keys[i]);
        const double weight = static_cast<double>(args.weights[id]);
        above += weight;
        const bool is_first = is_open && i == 0;
        if (!is_first && (above > wanted || weight < least)) break;
        border = {args.scaled[id], id};
    }
    return border;
}

// Returns how many of the n likeliest tokens, whose fp64 weights are given, are in the nucleus, or
// n if the nucleus does not end among them.
int64_t nucleus(const double* weights, int64_t n, double top_p, double total) {
    double running = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        running += weights[i];
        if (running > top_p * total || weights[i] < kNucleusFloor * total) return larger(i, 1);
    }
    return n;
}

// Samples among n candidates, given their sorted keys and their weights.
SampleResult draw_candidates(
    const SampleArgs& args, const Row& row, int64_t n, const double* weights
) {
    double total = 0.0;
    for (int64_t i = 0; i < n; ++i) total += weights[i];
    const int64_t num_top = smaller(args.num_top, n);
    for (int64_t i = 0; i < num_top; ++i) {
        args.top_ids[i] = id_of(args.keys[i]);
        args.top_probabilities[i] = weights[i] / total;
    }
    // Sorts by id; the lower half of a key becomes the token's rank among the likeliest.
    for (int64_t i = 0; i < n; ++i) {
        args.keys[i] = args.keys[i] << 32 | static_cast<uint64_t>(i);
    }
    sort_keys(args.keys, args.keys + row.blocks * kBlock, n);
    double running = 0.0;
    int64_t rank = 0;
    for (int64_t i = 0; i < n; ++i) {
        rank = i;
        running += weights[id_of(args.keys[i])];
        if (running > args.uniform * total) break;
    }
    const uint64_t chosen = args.keys[rank];
    return {static_cast<int64_t>(chosen >> 32), weights[id_of(chosen)] / total, num_top};
}

// Samples among all tokens by their fp32 weights.
SampleResult draw_all(const SampleArgs& args, int64_t blocks, double total) {
    const double target = args.uniform * total;
    double running = 0.0;
    int64_t b = 0;
    for (int64_t i = 0; i < blocks; ++i) {
        if (args.sums[i] == 0.0) continue;
        b = i;
        if (running + args.sums[i] > target) break;
        running += args.sums[i];
    }
    int64_t token = -1;
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
        if (args.weights[i] == 0.0f) continue;
        token = i;  // if rounding keeps the sum below the target: the last token of nonzero weight
        running += static_cast<double>(args.weights[i]);
        if (running > target) break;
    }
    return {token, static_cast<double>(args.weights[token]) / total, 0};
}

struct Candidates {
    int64_t count;
    bool is_all;  // every token of the row is a candidate
};

// Collects and sorts the keys of at least the k likeliest tokens.
Candidates likeliest(const SampleArgs& args, const Row& row, const Scale& scale, int64_t k) {
    const float bound = bound_of(row, args.maxima, args.maxima + row.blocks, k);
    const int64_t n = collect(row, args.maxima, scale, bound, args.keys);
    sort_keys(args.keys, args.keys + row.blocks * kBlock, n);
    return {n, bound == -kInf};
}

void weigh_candidates(
    const SampleArgs& args, const Row& row, const Scale& scale, int64_t n, double* weights
) {
    for (int64_t i = 0; i < n; ++i) {
        weights[i] = scale.weight(scale(row.values[id_of(args.keys[i])]));
    }
}

// Returns the smallest float y - largest y that min_p allows.
float floor_of(double min_p) {
    if (min_p <= 0.0) return -kInf;
    const double exact = ::log(min_p);
    const float rounded = static_cast<float>(exact);
    return static_cast<double>(rounded) < exact ? ::nextafterf(rounded, kInf) : rounded;
}

SampleResult finish_candidates(
    const SampleArgs& args, const Row& row, const Scale& scale, float floor, int64_t n,
    const double* weights
) {
    while (n > 1 && scale(row.values[id_of(args.keys[n - 1])]) - scale.top() < floor) --n;
    return draw_candidates(args, row, n, weights);
}

}  // namespace

SampleResult sample(const SampleArgs& args) {
    const Row given(args.logits, args.vocab);
    if (!find_maxima(given, args.maxima)) return {-1, 0.0, 0};
    if (args.top_k == 1 && args.mask != nullptr && args.num_edits == 0) {
        const int64_t token = best_allowed(args, given.blocks);
        return token < 0 ? SampleResult{-1, 0.0, 0} : certain(args, token);
    }
    const bool is_edited = args.mask != nullptr || args.num_edits > 0;
    if (is_edited) write_edited(args);
    const Row row(is_edited ? args.edited : args.logits, args.vocab);
    if (is_edited && !find_maxima(row, args.maxima)) return {-1, 0.0, 0};
    int64_t best = 0;
    for (int64_t b = 1; b < row.blocks; ++b) {
        if (args.maxima[b] > args.maxima[best]) best = b;
    }
    const float largest = args.maxima[best];
    if (largest == -kInf) return {-1, 0.0, 0};
    if (args.top_k == 1) {
        int64_t token = best * kBlock;
        while (row.values[token] != largest) ++token;
        return certain(args, token);
    }
    const Scale scale{largest, args.temperature, args.temperature == 1.0f};
    const float floor = floor_of(args.min_p);
    double* weights = args.sums + row.blocks;
    if (args.top_k > 0 && args.top_k < args.vocab) {
        int64_t n = smaller(likeliest(args, row, scale, args.top_k).count, args.top_k);
        weigh_candidates(args, row, scale, n, weights);
        if (args.top_p < 1.0) {
            double total = 0.0;
            for (int64_t i = 0; i < n; ++i) total += weights[i];
            n = nucleus(weights, n, args.top_p, total);
        }
        return finish_candidates(args, row, scale, floor, n, weights);
    }
    double total = weigh(row, scale, args.top_p < 1.0 ? -kInf : floor, args);
    Border border{-kInf, row.count};
    if (args.top_p < 1.0) {
        for (const int64_t k : {int64_t{32}, int64_t{128}}) {
            const Candidates candidates = likeliest(args, row, scale, k);
            weigh_candidates(args, row, scale, candidates.count, weights);
            const int64_t n = nucleus(weights, candidates.count, args.top_p, total);
            if (n == candidates.count && !candidates.is_all) continue;
            return finish_candidates(args, row, scale, floor, n, weights);
        }
        border = wide_border(args, row, scale, args.top_p * total, kNucleusFloor * total);
        total = cut(args, row.blocks, border, scale.top(), floor);
    }
    SampleResult result = draw_all(args, row.blocks, total);
    if (args.num_top > 0) {
        const int64_t n = likeliest(args, row, scale, smaller(args.num_top, args.vocab)).count;
        for (int64_t i = 0; i < smaller(n, args.num_top); ++i) {
            const int64_t id = id_of(args.keys[i]);
            const float y = scale(row.values[id]);
            if (!border.keeps(y, id) || y - scale.top() < floor) break;
            args.top_ids[i] = id;
            args.top_probabilities[i] = static_cast<double>(args.weights[id]) / total;
            result.num_top = i + 1;
        }
    }
    return result;
}

}  // namespace exl::EXL_ISA

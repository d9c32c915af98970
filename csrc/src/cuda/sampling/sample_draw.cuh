// Sampling from one row by one thread block: from up to kMaxSorted sorted tokens, or by the weights
// of groups if more tokens are left. Also the search for the end of a nucleus (top_p).
#pragma once

#include "cuda/sampling/sample_select.cuh"

namespace exl::cuda::sampling {

// Parts that an interval is split into per read of the row. More parts need more registers.
constexpr int kSplits = 4;
constexpr float kMaxGuessError = 0.05f;  // upper limit of s.guess_error
constexpr double kNucleusFloor = 1e-6;   // probability below which a nucleus keeps no token

struct Result {
    int32_t* token_id;
    int64_t* next_id;  // or NULL
    float* probability;
    int32_t* top_ids;
    float* top_probabilities;
    int max_top;

    __device__ void put(int id, double p) const {
        *token_id = id;
        if (next_id != nullptr) *next_id = id < 0 ? 0 : id;
        *probability = static_cast<float>(p);
    }
    // Fills the top entries after the first `count`, which are written separately.
    __device__ void put_top(int count) const {
        for (int i = count + static_cast<int>(threadIdx.x); i < max_top; i += kThreads) {
            top_ids[i] = -1;
            top_probabilities[i] = 0.0f;
        }
    }
    __device__ void put_top(int i, int id, double p) const {
        top_ids[i] = id;
        top_probabilities[i] = static_cast<float>(p);
    }
};

// Smallest float that is not below log(x).
__device__ inline float log_up(double x) {
    if (x <= 0.0) return -INFINITY;
    const double exact = log(x);
    const float rounded = static_cast<float>(exact);
    return static_cast<double>(rounded) < exact ? nextafterf(rounded, INFINITY) : rounded;
}

__device__ inline float y_of(uint64_t key) { return value_of(order_in(key)); }

// Computes weights and running weights of the n sorted tokens.
__device__ inline void weigh_sorted(const Scale& scale, Shared& s, int n) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
        s.weights[i] = scale.exact_weight(y_of(s.sorted[i]));
    }
    scan_weights(s, n);
}

// Number of the n sorted tokens that a nucleus of weight `wanted` keeps. `before` is the weight of
// more likely tokens that are not among them. Tokens of less than `min_weight` are not kept.
__device__ inline int count_kept(
    const Shared& s, int n, double before, double wanted, double min_weight
) {
    const int i = static_cast<int>(threadIdx.x);
    return __syncthreads_count(
        i < n && before + s.running[i] <= wanted && s.weights[i] >= min_weight
    );
}

// Samples from the n sorted tokens, whose weights are known. `floor` is the logarithm of min_p.
__device__ inline void sample_sorted(
    const ExlSampleRow& set, const Scale& scale, float floor, Shared& s, int n, const Result& result
) {
    const int thread = static_cast<int>(threadIdx.x);
    n = __syncthreads_count(thread < n && scale.below(y_of(s.sorted[thread])) >= floor);
    const double total = s.running[n - 1];
    const int num_top = set.num_top < n ? set.num_top : n;
    if (thread < num_top) {
        result.put_top(thread, id_in(s.sorted[thread]), s.weights[thread] / total);
    }
    result.put_top(num_top);
    if (thread < n) {  // sort by id, and carry each token's index in the order by likelihood
        s.keys[thread] =
            static_cast<uint64_t>(id_in(s.sorted[thread])) << 32 | static_cast<uint32_t>(thread);
    }
    __syncthreads();
    sort_keys(s, n);
    const double weight = thread < n ? s.weights[static_cast<uint32_t>(s.sorted[thread])] : 0.0;
    __syncthreads();
    if (thread < n) s.weights[thread] = weight;
    scan_weights(s, n);
    const double target = set.uniform * s.running[n - 1];
    const int passed = __syncthreads_count(thread < n && s.running[thread] <= target);
    const int place = passed < n ? passed : n - 1;
    if (thread == place) result.put(static_cast<int>(s.sorted[place] >> 32), weight / total);
}

// Last order whose weight, relative to the most likely token, is at least e^floor.
__device__ inline uint32_t last_within(const Scale& scale, float floor) {
    uint32_t low = order_of(scale.y(scale.largest)), high = kLastOrder;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2 + 1;
        if (scale.below(value_of(middle)) >= floor) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Sets s.guess to an estimate of how far below the most likely token a nucleus ends. It uses a
// histogram of weights with 256 bins. Bins are integers, so that the order of additions does not
// affect them.
__device__ inline void guess_nucleus(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, double wanted
) {
    constexpr float kPart = 8192.0f;  // most that a token adds to a bin: 2^31 with 2^18 tokens
    const float deepest = fminf(scale.below(value_of(order_in(last))), -1e-6f);
    const float steps = -256.0f / deepest;
    __syncthreads();
    if (threadIdx.x < 256) s.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.guess = deepest, s.guess_error = 0.0f;
    __syncthreads();
    for_tokens(row, scale, s, order_in(last), [&](uint32_t order, int) {
        const float place = -scale.below(value_of(order)) * steps;
        const int bin = place < 255.0f ? static_cast<int>(place) : 255;
        const float part = kPart * expf((static_cast<float>(bin) - place) / steps);
        atomicAdd(&s.bins[bin], static_cast<uint32_t>(part + 0.5f));
    });
    __syncthreads();
    if (warp_id() == 0) {
        double weights[8], here = 0.0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int bin = lane_id() * 8 + i;
            weights[i] = s.bins[bin] * static_cast<double>(expf(bin / -steps) / kPart);
            here += weights[i];
        }
        double before = warp_scan(here) - here;
        for (int i = 0; i < 8; ++i) {
            if (before <= wanted && wanted < before + weights[i]) {
                const float part = static_cast<float>((wanted - before) / weights[i]);
                s.guess = (lane_id() * 8 + i + part) / -steps;
                // About kMaxSorted / 2 tokens are within this error on both sides together.
                s.guess_error = fminf(
                    kMaxSorted / 4 * kPart / (s.bins[lane_id() * 8 + i] * steps), kMaxGuessError
                );
            }
            before += weights[i];
        }
    }
    __syncthreads();
}

// Last key of a nucleus (see `nucleus_end`) if it is close to the guess, otherwise 0.
__device__ inline uint64_t nucleus_end_near_guess(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, double wanted
) {
    const auto order_at = [&](float below) {
        return order_of(scale.is_plain ? scale.largest + below : below);
    };
    const float high = s.guess + s.guess_error, low = s.guess - s.guess_error;
    const uint64_t first = high < 0.0f ? last_key(order_at(high)) : 0;
    uint64_t end = last_key(order_at(low));
    end = end < last ? end : last;
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    double above = 0.0;
    for_tokens(row, scale, s, order_in(end), [&](uint32_t order, int id) {
        const uint64_t key = key_of(order, id);
        if (key <= first) {
            above += static_cast<double>(scale.weight(value_of(order)));
        } else if (key <= end) {
            push(s, key);
        }
    });
    above = block_sum(above, s);
    const int n = s.count;
    if (n == 0 || n > kMaxSorted || above > wanted) return 0;
    sort_keys(s, n);
    weigh_sorted(scale, s, n);
    const int kept = count_kept(s, n, above, wanted, 0.0);
    if (kept == n && end < last) return 0;
    return kept > 0 ? s.sorted[kept - 1] : above > 0.0 ? first : s.sorted[0];
}

// Last key of a nucleus: the longest run of tokens in descending order, from the most likely one up
// to at most `last`, with a total weight of at most `wanted`. The most likely token always stays.
//
// The end is first searched for near a guess. If that is far off, every read of the row splits the
// interval of orders that contains the end, until the interval holds few tokens or one value.
static __device__ __noinline__ uint64_t nucleus_end(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, double wanted
) {
    uint32_t low = order_of(scale.y(scale.largest)) - 1, high = order_in(last);
    double above = 0.0;  // weight of the orders up to `low`
    uint32_t count = 0;  // number of tokens with these orders
    guess_nucleus(row, scale, s, last, wanted);
    const uint64_t near = nucleus_end_near_guess(row, scale, s, last, wanted);
    if (near != 0) return near;
    for (bool is_first = true;; is_first = false) {
        double sums[kSplits] = {};
        uint32_t counts[kSplits] = {}, ends[kSplits];
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
            const uint64_t share = static_cast<uint64_t>(high - low) * (i + 1) / kSplits;
            ends[i] = low + static_cast<uint32_t>(share);
        }
        for_tokens(row, scale, s, high, [&](uint32_t order, int id) {
            if (order <= low || key_of(order, id) > last) return;
            const double weight = static_cast<double>(scale.weight(value_of(order)));
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                if (order > ends[i]) continue;
                sums[i] += weight;
                ++counts[i];
            }
        });
        uint32_t next_low = low, next_high = high, next_count = count, inside = 0;
        double next_above = above;
        bool is_found = false;
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
            const double sum = above + block_sum(sums[i], s);
            const uint32_t through =
                count + static_cast<uint32_t>(block_sum(static_cast<double>(counts[i]), s));
            if (is_found) continue;
            // The end is in the last part if it is in no other, unless the whole row may stay.
            if (sum > wanted || (i == kSplits - 1 && !is_first)) {
                is_found = true;
                next_high = ends[i];
                inside = through - next_count;
            } else {
                next_low = ends[i];
                next_above = sum;
                next_count = through;
            }
        }
        if (!is_found) return last;
        low = next_low, high = next_high, above = next_above, count = next_count;
        if (inside <= kMaxSorted) {
            const uint64_t end = last_key(high) < last ? last_key(high) : last;
            const int n = collect(row, scale, s, last_key(low), end);
            sort_keys(s, n);
            weigh_sorted(scale, s, n);
            const int kept = count_kept(s, n, above, wanted, 0.0);
            if (kept > 0) return s.sorted[kept - 1];
            if (count > 0) return last_key(low);
            return s.sorted[0];  // the most likely token stays
        }
        if (high == low + 1) {
            const double fitting = floor((wanted - above) / scale.exact_weight(value_of(high)));
            const uint32_t added = fitting < inside ? static_cast<uint32_t>(fitting) : inside;
            const uint32_t kept = count + added > 0 ? count + added : 1;
            return nth_token(row, scale, s, last, kept);
        }
    }
}

// Sets s.sums to the weight of each group's tokens up to `last`.
__device__ inline void sum_groups(const Row& row, const Scale& scale, Shared& s, uint64_t last) {
    __syncthreads();
    for (int group = warp_id(); group < row.groups; group += kWarps) {
        float sum = 0.0f;
        if (s.orders[group] <= order_in(last)) {
            const int first = group * kGroup;
            for (int id = first + lane_id(); id < first + kGroup; id += kWarp) {
                if (id >= row.vocab) continue;
                const uint32_t order = order_of(scale.y(row.logits[id]));
                if (key_of(order, id) <= last) sum += scale.weight(value_of(order));
            }
            sum = warp_sum(sum);
        }
        if (lane_id() == 0) s.sums[group] = sum;
    }
    __syncthreads();
}

// Samples a group by the groups' sums, then a token within it. Returns the total weight.
__device__ inline double sample_groups(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, double uniform,
    const Result& result
) {
    const int share = (row.groups + kThreads - 1) / kThreads;
    const int begin = static_cast<int>(threadIdx.x) * share;
    const int end = begin + share < row.groups ? begin + share : row.groups;
    double here = 0.0;
    for (int g = begin; g < end; ++g) here += static_cast<double>(s.sums[g]);
    const double through = warp_scan(here);
    __syncthreads();
    if (lane_id() == kWarp - 1) s.per_warp[warp_id()] = through;
    if (threadIdx.x == 0) s.first = kMaxGroups, s.last = 0;
    __syncthreads();
    double start = through - here, total = 0.0;
    const double of_warp = s.per_warp[lane_id()];
    const double through_warp = warp_scan(of_warp);
    start += __shfl_sync(kAll, through_warp - of_warp, warp_id());
    total = __shfl_sync(kAll, through_warp, kWarp - 1);
    const double target = uniform * total;
    double running = start;
    for (int g = begin; g < end; ++g) {
        if (s.sums[g] == 0.0f) continue;
        running += static_cast<double>(s.sums[g]);
        atomicMax(&s.last, g);
        if (running > target) atomicMin(&s.first, g);
    }
    __syncthreads();
    const int group = s.first < kMaxGroups ? s.first : s.last;
    if (begin <= group && group < end) {
        for (int g = begin; g < group; ++g) start += static_cast<double>(s.sums[g]);
        s.before = start;
    }
    __syncthreads();
    if (warp_id() == 0) {
        double weights[2];
        for (int i = 0; i < 2; ++i) {
            const int id = group * kGroup + 2 * lane_id() + i;
            const uint32_t order =
                id < row.vocab ? order_of(scale.y(row.logits[id])) : order_of(-INFINITY);
            weights[i] = key_of(order, id) <= last ? scale.exact_weight(value_of(order)) : 0.0;
        }
        double ahead = __shfl_up_sync(kAll, warp_scan(weights[0] + weights[1]), 1);
        ahead = s.before + (lane_id() == 0 ? 0.0 : ahead);
        const double middle = ahead + weights[0], past = middle + weights[1];
        const bool has = weights[0] > 0.0 || weights[1] > 0.0;
        const bool passes = has && ((weights[0] > 0.0 && middle > target) || past > target);
        const uint32_t passing = __ballot_sync(kAll, passes), having = __ballot_sync(kAll, has);
        // If rounding leaves no token above the target, take the last one of positive weight.
        const int lane = passing != 0 ? __ffs(static_cast<int>(passing)) - 1
                                      : kWarp - 1 - __clz(static_cast<int>(having));
        if (lane_id() == lane) {
            const bool is_first =
                weights[1] == 0.0 || (passing != 0 && weights[0] > 0.0 && middle > target);
            const int id = group * kGroup + 2 * lane + (is_first ? 0 : 1);
            result.put(id, weights[is_first ? 0 : 1] / total);
        }
    }
    return total;
}

// Stores the num_top most likely tokens up to `last` and their probabilities.
__device__ inline void put_top_tokens(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, int num_top, double total,
    const Result& result
) {
    if (num_top <= 0) return result.put_top(0);
    const int wanted = num_top < row.vocab ? num_top : row.vocab;
    const int thread = static_cast<int>(threadIdx.x);
    const int n = select_top(row, scale, s, wanted, last);
    const int count = n < wanted ? n : wanted;
    if (thread < count) {
        const uint64_t key = s.sorted[thread];
        result.put_top(thread, id_in(key), scale.exact_weight(y_of(key)) / total);
    }
    result.put_top(count);
}

}  // namespace exl::cuda::sampling

// Drawing from one row by one thread block: among a few sorted tokens, or by the weights of groups
// where many are left; and where a nucleus ends.
#pragma once

#include "sample_select.cuh"

namespace exl::cuda::sampling {

constexpr int kSplits = 4;  // of an interval, in one reading of the row: more need more registers
constexpr double kNucleusFloor = 1e-6;

struct Result {
    int32_t* token_id;
    float* probability;
    int32_t* top_ids;
    float* top_probabilities;
    int max_top;

    __device__ void put(int id, double p) const {
        *token_id = id;
        *probability = static_cast<float>(p);
    }
    __device__ void put_top(int count) const {  // past those that were written
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

// The least float that is at least log(x).
__device__ inline float log_up(double x) {
    if (x <= 0.0) return -INFINITY;
    const double exact = log(x);
    const float rounded = static_cast<float>(exact);
    return static_cast<double>(rounded) < exact ? nextafterf(rounded, INFINITY) : rounded;
}

__device__ inline float y_of(uint64_t key) { return value_of(order_in(key)); }

__device__ inline void weigh_few(const Scale& scale, Shared& s, int n) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
        s.weights[i] = scale.exact_weight(y_of(s.sorted[i]));
    }
    scan_few(s, n);
}

// How many of the n sorted tokens a nucleus keeps; `before` weighs what comes ahead of them.
__device__ inline int kept_few(const Shared& s, int n, double before, double wanted, double least) {
    const int i = static_cast<int>(threadIdx.x);
    return __syncthreads_count(
        i < n && before + s.running[i] <= wanted && s.weights[i] >= least
    );
}

// Draws among the n sorted and weighed tokens.
__device__ inline void draw_few(
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
    if (thread < n) {  // by id, and with it the place among the likeliest
        s.keys[thread] = static_cast<uint64_t>(id_in(s.sorted[thread])) << 32 |
                         static_cast<uint32_t>(thread);
    }
    __syncthreads();
    sort_few(s, n);
    const double weight = thread < n ? s.weights[static_cast<uint32_t>(s.sorted[thread])] : 0.0;
    __syncthreads();
    if (thread < n) s.weights[thread] = weight;
    scan_few(s, n);
    const double target = set.uniform * s.running[n - 1];
    const int passed = __syncthreads_count(thread < n && s.running[thread] <= target);
    const int place = passed < n ? passed : n - 1;
    if (thread == place) result.put(static_cast<int>(s.sorted[place] >> 32), weight / total);
}

// Tokens that are left of a row: keys up to `last`, and not too far below the likeliest.
struct Cut {
    uint64_t last;
    float floor;

    __device__ bool keeps(const Scale& scale, uint32_t order, int id) const {
        return key_of(order, id) <= last && scale.below(value_of(order)) >= floor;
    }
    __device__ bool keeps_some(const Scale& scale, uint32_t order) const {
        return order <= order_in(last) && scale.below(value_of(order)) >= floor;
    }
};

// Where the longest run of descending tokens within `cut` ends that weighs at most `wanted`.
//
// The interval of orders in which the border lies is split with each reading of the row, until few
// tokens are in it, or one value.
static __device__ __noinline__ uint64_t nucleus_border(
    const Row& row, const Scale& scale, const Cut& cut, Shared& s, uint32_t best, double wanted
) {
    uint32_t low = best - 1, high = order_in(cut.last);
    double above = 0.0;  // weight of the orders up to `low`
    uint32_t count = 0;  // and their number
    for (bool is_open = true;; is_open = false) {
        double sums[kSplits] = {};
        uint32_t counts[kSplits] = {}, ends[kSplits];
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
            const uint64_t share = static_cast<uint64_t>(high - low) * (i + 1) / kSplits;
            ends[i] = low + static_cast<uint32_t>(share);
        }
        for_tokens(row, scale, s, high, [&](uint32_t order, int id) {
            if (order <= low || !cut.keeps(scale, order, id)) return;
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
            // The last part has the border, unless the whole row may stay.
            if (sum > wanted || (i == kSplits - 1 && !is_open)) {
                is_found = true;
                next_high = ends[i];
                inside = through - next_count;
            } else {
                next_low = ends[i];
                next_above = sum;
                next_count = through;
            }
        }
        if (!is_found) return cut.last;
        low = next_low, high = next_high, above = next_above, count = next_count;
        if (inside <= kFew) {
            const uint64_t end = last_key(high) < cut.last ? last_key(high) : cut.last;
            const int n = collect(row, scale, s, last_key(low), end);
            sort_few(s, n);
            weigh_few(scale, s, n);
            const int kept = kept_few(s, n, above, wanted, 0.0);
            if (kept > 0) return s.sorted[kept - 1];
            if (count > 0) return last_key(low);
            return s.sorted[0];  // the likeliest stays
        }
        if (high == low + 1) {
            const double room = floor((wanted - above) / scale.exact_weight(value_of(high)));
            const uint32_t fitting = room < inside ? static_cast<uint32_t>(room) : inside;
            const uint32_t kept = count + fitting > 0 ? count + fitting : 1;
            return nth_token(row, scale, s, cut.last, kept);
        }
    }
}

// s.sums become the weights of what is left of each group.
__device__ inline void sum_groups(const Row& row, const Scale& scale, const Cut& cut, Shared& s) {
    __syncthreads();
    for (int group = warp_id(); group < row.groups; group += kWarps) {
        float sum = 0.0f;
        if (cut.keeps_some(scale, s.orders[group])) {
            const int first = group * kGroup;
            for (int id = first + lane_id(); id < first + kGroup; id += kWarp) {
                if (id >= row.vocab) continue;
                const uint32_t order = order_of(scale.y(row.logits[id]));
                if (cut.keeps(scale, order, id)) sum += scale.weight(value_of(order));
            }
            sum = warp_sum(sum);
        }
        if (lane_id() == 0) s.sums[group] = sum;
    }
    __syncthreads();
}

// Draws by the groups' sums, then within a group. Returns the total weight.
__device__ inline double draw_groups(
    const Row& row, const Scale& scale, const Cut& cut, double uniform, Shared& s,
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
            weights[i] = cut.keeps(scale, order, id) ? scale.exact_weight(value_of(order)) : 0.0;
        }
        double past = s.before + warp_scan(weights[0] + weights[1]);
        const double middle = past - weights[1];
        const bool has = weights[0] > 0.0 || weights[1] > 0.0;
        const bool passes = has && ((weights[0] > 0.0 && middle > target) || past > target);
        const uint32_t passing = __ballot_sync(kAll, passes), having = __ballot_sync(kAll, has);
        // Where rounding leaves none, the last that can come at all.
        const int lane = passing != 0 ? __ffs(static_cast<int>(passing)) - 1
                                      : kWarp - 1 - __clz(static_cast<int>(having));
        if (lane_id() == lane) {
            const bool is_first = weights[1] == 0.0 ||
                                  (passing != 0 && weights[0] > 0.0 && middle > target);
            const int id = group * kGroup + 2 * lane + (is_first ? 0 : 1);
            result.put(id, weights[is_first ? 0 : 1] / total);
        }
    }
    return total;
}

__device__ inline void put_top_of_all(
    const Row& row, const Scale& scale, const Cut& cut, int num_top, double total, Shared& s,
    const Result& result
) {
    if (num_top <= 0) return result.put_top(0);
    const int wanted = num_top < row.vocab ? num_top : row.vocab;
    const int thread = static_cast<int>(threadIdx.x);
    const int n = likeliest(row, scale, s, wanted, cut.last);
    const int count = __syncthreads_count(
        thread < n && thread < wanted && scale.below(y_of(s.sorted[thread])) >= cut.floor
    );
    if (thread < count) {
        const uint64_t key = s.sorted[thread];
        result.put_top(thread, id_in(key), scale.exact_weight(y_of(key)) / total);
    }
    result.put_top(count);
}

}  // namespace exl::cuda::sampling

// Selection of tokens in one row by one thread block: keys that order tokens, the top tokens, the
// n-th token, and running sums. At most kMaxSorted tokens are ever sorted.
//
// A row consists of groups of 64 tokens, and the most likely token of each group is known. Groups
// that cannot contain a wanted token are not read. Sums are computed in a fixed order, so that the
// same inputs give the same bits.
#pragma once

#include "cuda/common/common.cuh"
#include "exl/cuda/sampling.h"

namespace exl::cuda::sampling {

constexpr int kGroup = 64;
constexpr int kMaxVocab = 1 << 18;
constexpr int kMaxGroups = kMaxVocab / kGroup;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxSorted = 512;  // tokens that are sorted
constexpr uint32_t kAll = 0xffffffffu;

// Maps floats to integers in reverse order: a smaller order means a larger value. Equal values have
// the same order, including zeros of both signs.
constexpr uint32_t kLastOrder = 0xff7fffffu;  // order of the lowest finite value
__device__ __forceinline__ uint32_t order_of(float y) {
    const uint32_t bits = __float_as_uint(y + 0.0f);
    return (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float((order >> 31) != 0 ? order : ~order & 0x7fffffffu);
}

// Keys sort tokens by descending value, and by ascending id where values are equal.
constexpr int kIdBits = 24, kKeyBits = 32 + kIdBits;
__device__ __forceinline__ uint64_t key_of(uint32_t order, int id) {
    return static_cast<uint64_t>(order) << kIdBits | static_cast<uint32_t>(id);
}
__device__ __forceinline__ uint64_t last_key(uint32_t order) {
    return key_of(order, (1 << kIdBits) - 1);
}
__device__ __forceinline__ uint32_t order_in(uint64_t key) {
    return static_cast<uint32_t>(key >> kIdBits);
}
__device__ __forceinline__ int id_in(uint64_t key) {
    return static_cast<int>(key & ((1u << kIdBits) - 1));
}

// Computes weights of tokens. Tokens are ordered by y: the logit itself at temperature 1, otherwise
// its difference to the largest logit divided by the temperature.
struct Scale {
    float largest;
    float temperature;
    bool is_plain;

    // Smallest x whose e^x is a normal float32 number. Smaller weights count as 0.
    static constexpr float kWeightFloor = -87.33654f;

    __device__ float y(float logit) const {
        return is_plain ? logit : (logit - largest) / temperature;
    }
    // Difference of y to that of the most likely token, zero or negative.
    __device__ float below(float y) const { return is_plain ? y - largest : y; }
    __device__ float weight(float y) const {
        const float x = below(y);
        return x < kWeightFloor ? 0.0f : expf(x);
    }
    __device__ double exact_weight(float y) const {
        const float x = below(y);
        return x < kWeightFloor ? 0.0 : exp(static_cast<double>(x));
    }
};

struct Row {
    const float* logits;
    int vocab;
    int groups;
    bool is_aligned;  // to 16 bytes

    // Logits of four tokens from `id` on; minus infinity past the last token.
    __device__ float4 load(int id) const {
        if (is_aligned && id + 4 <= vocab) return *reinterpret_cast<const float4*>(logits + id);
        const float none = -INFINITY;
        return make_float4(
            id < vocab ? logits[id] : none, id + 1 < vocab ? logits[id + 1] : none,
            id + 2 < vocab ? logits[id + 2] : none, id + 3 < vocab ? logits[id + 3] : none
        );
    }
};

struct Shared {
    uint32_t orders[kMaxGroups];  // order of each group's most likely token
    float sums[kMaxGroups];       // weight of each group
    uint64_t keys[kMaxSorted];    // unsorted
    uint64_t sorted[kMaxSorted];
    double weights[kMaxSorted];
    double running[kMaxSorted];  // running sums of weights
    double per_warp[kWarps];
    uint64_t best[kWarps];
    uint32_t bins[256];
    uint32_t bin, before_bin, in_bin;
    int count;
    int first, last;
    double before;
    float floor, guess, guess_error;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// Reduces x over all threads and returns the result to all of them. `per_warp` may be reused after
// the next barrier.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T x, T* per_warp, Combine combine) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kAll, x, step));
    __syncthreads();
    if (lane_id() == 0) per_warp[warp_id()] = x;
    __syncthreads();
    x = per_warp[lane_id()];
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kAll, x, step));
    return x;
}
__device__ __forceinline__ double block_sum(double x, Shared& s) {
    return block_reduce(x, s.per_warp, [](double a, double b) { return a + b; });
}

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ double warp_scan(double x) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const double other = __shfl_up_sync(kAll, x, step);
        if (lane_id() >= step) x += other;
    }
    return x;
}

// Calls f(order, id) for the tokens whose order is at most `last`. A half-warp handles two groups
// at a time.
template <class F>
__device__ __forceinline__ void for_tokens(
    const Row& row, const Scale& scale, const Shared& s, uint32_t last, F f
) {
    const int half = lane_id() / 16, place = lane_id() % 16 * 4;
    const auto take = [&](float logit, int id) {
        const uint32_t order = order_of(scale.y(logit));
        if (order <= last) f(order, id);
    };
    const auto take_four = [&](const float4& logits, int id) {
        take(logits.x, id);
        take(logits.y, id + 1);
        take(logits.z, id + 2);
        take(logits.w, id + 3);
    };
    // Adjacent groups go to different warps, because likely tokens tend to be close together.
    for (int first = warp_id(); first < row.groups; first += kWarps * kWarp) {
        const int mine = first + kWarps * lane_id();
        uint32_t left = __ballot_sync(kAll, mine < row.groups && s.orders[mine] <= last);
        while (left != 0) {
            int ids[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int bit = __ffs(static_cast<int>(left)) - 1;
                const int id = bit < 0 ? -1 : (first + kWarps * bit) * kGroup + place;
                if (i % 2 == half) ids[i / 2] = id;
                left &= left - 1;  // clears the lowest bit; 0 stays 0
            }
            const float4 none = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
            const float4 a = ids[0] < 0 ? none : row.load(ids[0]);
            const float4 b = ids[1] < 0 ? none : row.load(ids[1]);
            take_four(a, ids[0]);
            take_four(b, ids[1]);
        }
    }
}

// Radix selection: the `wanted`-th smallest, counted from 1, of the keys of `bits` bits that
// `for_each` passes to its argument. There must be at least `wanted` keys. Without `is_exact` the
// result may also be a larger number that is smaller than the next key.
template <bool is_exact, class ForEach>
__device__ uint64_t nth_key(Shared& s, int bits, uint32_t wanted, ForEach for_each) {
    uint64_t prefix = 0;
    for (int shift = bits - 8; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) s.bins[threadIdx.x] = 0;
        __syncthreads();
        for_each([&](uint64_t key) {
            if (key >> (shift + 8) == prefix) atomicAdd(&s.bins[key >> shift & 255], 1u);
        });
        __syncthreads();
        if (warp_id() == 0) {
            uint32_t counts[8], here = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) here += counts[i] = s.bins[lane_id() * 8 + i];
            uint32_t through = here;
#pragma unroll
            for (int step = 1; step < kWarp; step *= 2) {
                const uint32_t other = __shfl_up_sync(kAll, through, step);
                if (lane_id() >= step) through += other;
            }
            uint32_t before = through - here;
            if (before < wanted && wanted <= through) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (before < wanted && wanted <= before + counts[i]) {
                        s.bin = static_cast<uint32_t>(lane_id() * 8 + i);
                        s.before_bin = before;
                        s.in_bin = counts[i];
                    }
                    before += counts[i];
                }
            }
        }
        __syncthreads();
        prefix = prefix << 8 | s.bin;
        wanted -= s.before_bin;
        if (!is_exact && wanted == s.in_bin) return ((prefix + 1) << shift) - 1;
    }
    return prefix;
}

// Bound on keys that exactly the `wanted` most likely tokens do not exceed. Tokens after `last` are
// ignored.
__device__ inline uint64_t nth_token(
    const Row& row, const Scale& scale, Shared& s, uint64_t last, uint32_t wanted
) {
    return nth_key<false>(s, kKeyBits, wanted, [&](auto add) {
        for_tokens(row, scale, s, order_in(last), [&](uint32_t order, int id) {
            if (key_of(order, id) <= last) add(key_of(order, id));
        });
    });
}

// Appends to s.keys and increments s.count. With more than kMaxSorted keys, s.count is above
// kMaxSorted and the rest is dropped.
__device__ inline void push(Shared& s, uint64_t key) {
    if (*static_cast<volatile int*>(&s.count) > kMaxSorted) return;
    const int place = atomicAdd(&s.count, 1);
    if (place < kMaxSorted) s.keys[place] = key;
}

// Sets s.keys to the keys after `first` up to `last`, unsorted. Returns their number, or a number
// above kMaxSorted if there are too many.
__device__ inline int collect(
    const Row& row, const Scale& scale, Shared& s, uint64_t first, uint64_t last
) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    for_tokens(row, scale, s, order_in(last), [&](uint32_t order, int id) {
        const uint64_t key = key_of(order, id);
        if (first < key && key <= last) push(s, key);
    });
    __syncthreads();
    return s.count;
}

// Sets s.sorted to the n keys of s.keys in ascending order. All keys are different.
__device__ inline void sort_keys(Shared& s, int n) {
    constexpr int kShare = 8;  // threads that rank one key
    const int part = static_cast<int>(threadIdx.x) % kShare;
    for (int first = 0; first < n; first += kThreads / kShare) {
        const int i = first + static_cast<int>(threadIdx.x) / kShare;
        const uint64_t key = i < n ? s.keys[i] : 0;
        int rank = 0;
        for (int j = part; j < n; j += kShare) rank += s.keys[j] < key ? 1 : 0;
#pragma unroll
        for (int step = 1; step < kShare; step *= 2) rank += __shfl_xor_sync(kAll, rank, step);
        if (part == 0 && i < n) s.sorted[rank] = key;
    }
    __syncthreads();
}

// Sets s.running to the running sums of s.weights.
__device__ inline void scan_weights(Shared& s, int n) {
    __syncthreads();
    if (warp_id() == 0) {
        const int share = (n + kWarp - 1) / kWarp, begin = lane_id() * share;
        const int end = begin + share < n ? begin + share : n;
        double here = 0.0;
        for (int i = begin; i < end; ++i) here += s.weights[i];
        double sum = warp_scan(here);
        sum = __shfl_up_sync(kAll, sum, 1);
        if (lane_id() == 0) sum = 0.0;
        for (int i = begin; i < end; ++i) s.running[i] = sum += s.weights[i];
    }
    __syncthreads();
}

// Sets s.sorted to the keys of the `wanted` (at most kMaxSorted) most likely tokens up to `last`,
// and possibly more; to all of them if there are fewer. Returns the number of keys.
__device__ inline int select_top(
    const Row& row, const Scale& scale, Shared& s, int wanted, uint64_t last
) {
    if (wanted <= row.groups) {
        // At least `wanted` groups have a token of this order or a more likely one.
        const uint64_t order = nth_key<true>(s, 32, static_cast<uint32_t>(wanted), [&](auto add) {
            for (int g = static_cast<int>(threadIdx.x); g < row.groups; g += kThreads) {
                add(s.orders[g]);
            }
        });
        const uint64_t bound = last_key(static_cast<uint32_t>(order));
        last = bound < last ? bound : last;
    }
    int n = collect(row, scale, s, 0, last);
    if (n > kMaxSorted) {
        last = nth_token(row, scale, s, last, static_cast<uint32_t>(wanted));
        n = collect(row, scale, s, 0, last);
    }
    sort_keys(s, n);
    return n;
}

}  // namespace exl::cuda::sampling

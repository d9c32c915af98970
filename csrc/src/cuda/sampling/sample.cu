// Samples one token for each row of logits.
//
// Contract   exl/cuda/sampling.h; `sample` of exl_core/ops/sampling.py.
// Mapping    Two kernels. `reduce_groups` reads every logit once, with blocks of 2048 tokens over
//            the whole device. It computes the largest logit of each group of 64 tokens and, if
//            needed, the group's weight. For a row with edits or a mask it also writes a copy of
//            the logits with both applied. `sample_row` has one block per row. It reads only the
//            groups whose largest logit can matter.
// Floor      The logits are read once: 0.5 MB for a vocabulary of 128256, 0.12 us at 4.2 TB/s, and
//            most often they are still in the L2 cache. Latency dominates: two launches, and about
//            ten dependent reads and thirty barriers in `sample_row`.
// Accuracy   Weights of up to 512 tokens are float64. Weights of more tokens are float32 and are
//            summed in float64.
#include "cuda/sampling/sample_draw.cuh"

namespace exl::cuda::sampling {
namespace {

constexpr int kReduceThreads = 256;
constexpr int kTile = 2048;
constexpr int kNucleusTokens = 128;  // a nucleus is first searched for among the top 128 tokens

struct Workspace {
    float* maxima;  // [rows, pitch] largest logit of each group; NaN if one is NaN or +infinity
    float* sums;    // [rows, pitch] weight of each group, relative to its most likely token
    float* edited;  // [rows, groups * 64] logits with edits and mask applied
    int groups;
    int pitch;
};

int64_t groups_of(int64_t vocab) { return ceil_div(vocab, kGroup); }
int64_t pitch_of(int64_t vocab) { return ceil_div(groups_of(vocab), 4) * 4; }

__device__ bool is_edited(const ExlSampleRow& set) {
    return set.mask >= 0 || set.last_edit > set.first_edit;
}
// True if the weights of all tokens are needed.
__device__ bool needs_all_weights(const ExlSampleRow& set, int vocab) {
    return set.top_k <= 0 || (set.top_k >= vocab && set.top_k != 1);
}

__device__ bool is_allowed(const ExlSample& args, const ExlSampleRow& set, int64_t id) {
    return set.mask < 0 || (args.masks[set.mask + id / 32] >> (id % 32) & 1) != 0;
}

// ---- reduce_groups -----------------------------------------------------------------------------

// Applies edits and mask to the block's tile of logits, in shared memory `values`. Thread t has the four tokens from 4 t on,
// and the four tokens kTile / 2 after them.
__device__ void edit_tile(
    const ExlSample& args, const ExlSampleRow& set, int64_t first, float4 (&mine)[2], float* values
) {
    const int thread = static_cast<int>(threadIdx.x);
    const int last = args.vocab - first < kTile ? static_cast<int>(args.vocab - first) : kTile;
    for (int part = 0; part < 2; ++part) {
        const int at = part * (kTile / 2) + 4 * thread;
        *reinterpret_cast<float4*>(values + at) = mine[part];
    }
    __syncthreads();
    for (int i = set.first_edit + thread; i < set.last_edit; i += kReduceThreads) {
        const int64_t at = args.edit_ids[i] - first;
        if (at < 0 || at >= last) continue;
        const float logit = values[at], factor = args.edit_factors[i];
        const float scaled = logit > 0.0f ? __fdiv_rn(logit, factor) : __fmul_rn(logit, factor);
        values[at] = __fadd_rn(scaled, args.edit_offsets[i]);
    }
    __syncthreads();
    for (int part = 0; part < 2; ++part) {
        const int at = part * (kTile / 2) + 4 * thread;
        for (int i = 0; i < 4; ++i) {
            if (at + i < last && !is_allowed(args, set, first + at + i)) {
                values[at + i] = -INFINITY;
            }
        }
        mine[part] = *reinterpret_cast<const float4*>(values + at);
    }
}

// True if one of the logits is NaN or +infinity.
__device__ bool is_invalid(const float4& v) {
    const auto below = [](float x) { return x < INFINITY; };  // false for NaN
    return !(below(v.x) && below(v.y) && below(v.z) && below(v.w));
}

__global__ void __launch_bounds__(kReduceThreads) reduce_groups(ExlSample args, Workspace work) {
    __shared__ __align__(16) float values[kTile];
    let_next_begin();
    wait_for_inputs();
    const int64_t row = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kTile;
    const ExlSampleRow set = args.settings[row];
    const float* logits = args.logits + set.row * args.logits_stride;
    const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const Row source{logits, args.vocab, work.groups, is_aligned};
    const int own = 4 * static_cast<int>(threadIdx.x);
    float4 mine[2];
    for (int part = 0; part < 2; ++part) {
        mine[part] = source.load(static_cast<int>(first) + part * (kTile / 2) + own);
    }
    bool invalid[2] = {is_invalid(mine[0]), is_invalid(mine[1])};
    if (is_edited(set)) {
        edit_tile(args, set, first, mine, values);
        float* to = work.edited + row * work.groups * kGroup;
        for (int part = 0; part < 2; ++part) {
            invalid[part] = invalid[part] || is_invalid(mine[part]);
            const int64_t id = first + part * (kTile / 2) + own;
            if (id < args.vocab) *reinterpret_cast<float4*>(to + id) = mine[part];
        }
    }
    // A group's logits are in 16 lanes.
    const uint32_t half = 0xffffu << (threadIdx.x % kWarp / 16 * 16);
    for (int part = 0; part < 2; ++part) {
        const float4 v = mine[part];
        float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
        for (int step = 8; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
        }
        const bool any_invalid = (__ballot_sync(kAll, invalid[part]) & half) != 0;
        const int64_t group = (first + part * (kTile / 2) + own) / kGroup;
        float sum = 0.0f;
        if (needs_all_weights(set, args.vocab)) {
            const Scale scale{largest, set.temperature, set.temperature == 1.0f};
            if (largest > -INFINITY && !any_invalid) {
                sum = (scale.weight(scale.y(v.x)) + scale.weight(scale.y(v.y))) +
                      (scale.weight(scale.y(v.z)) + scale.weight(scale.y(v.w)));
            }
            for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
        }
        if (threadIdx.x % 16 == 0 && group < work.groups) {
            work.maxima[row * work.pitch + group] = any_invalid ? NAN : largest;
            work.sums[row * work.pitch + group] = sum;
        }
    }
}

// ---- sample_row --------------------------------------------------------------------------------

__device__ uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

__global__ void __launch_bounds__(kThreads, 1) sample_row(ExlSample args, Workspace work) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    let_next_begin();
    wait_for_inputs();
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t index = blockIdx.x;
    const ExlSampleRow set = args.settings[index];
    const float* logits = is_edited(set) ? work.edited + index * work.groups * kGroup
                                         : args.logits + set.row * args.logits_stride;
    const Row row{logits, args.vocab, work.groups, reinterpret_cast<uintptr_t>(logits) % 16 == 0};
    const Result result{
        args.token_ids + index,
        args.next_ids == nullptr ? nullptr : args.next_ids + index,
        args.probabilities + index,
        args.top_ids + index * args.max_top,
        args.top_probabilities + index * args.max_top,
        args.max_top
    };
    const float* maxima = work.maxima + index * work.pitch;
    // The last warp computes this, while it would wait otherwise: a float64 logarithm is slow.
    if (thread == kThreads - 1) s.floor = log_up(set.min_p);
    uint64_t first = ~0ull;  // order and index of the first group that has the largest logit
    for (int g = thread; g < row.groups; g += kThreads) {
        const float largest = maxima[g];
        const uint32_t order = largest == largest ? order_of(largest) : 0;  // NaN sorts first
        const uint64_t mine = static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(g);
        first = least_of(mine, first);
        s.orders[g] = order;
    }
    first = block_reduce(first, s.best, least_of);
    const uint32_t largest_order = static_cast<uint32_t>(first >> 32);
    if (largest_order == 0 || largest_order > kLastOrder) {
        if (thread == 0) result.put(-1, 0.0);
        return result.put_top(0);
    }
    if (set.top_k == 1) {
        if (warp_id() == 0) {
            const int id = static_cast<int>(first & kAll) * kGroup + lane_id();
            const bool is_low = id < row.vocab && order_of(logits[id]) == largest_order;
            const bool is_high =
                id + kWarp < row.vocab && order_of(logits[id + kWarp]) == largest_order;
            const uint32_t low = __ballot_sync(kAll, is_low), high = __ballot_sync(kAll, is_high);
            const int place = low != 0 ? __ffs(static_cast<int>(low)) - 1
                                       : kWarp + __ffs(static_cast<int>(high)) - 1;
            if (lane_id() == 0) {
                const int token_id = static_cast<int>(first & kAll) * kGroup + place;
                result.put(token_id, 1.0);
                if (set.num_top > 0) result.put_top(0, token_id, 1.0);
            }
        }
        return result.put_top(set.num_top > 0 ? 1 : 0);
    }
    const Scale scale{value_of(largest_order), set.temperature, set.temperature == 1.0f};
    const bool has_sums = needs_all_weights(set, args.vocab);
    double total = 0.0;
    for (int g = thread; g < row.groups; g += kThreads) {
        const float y = scale.y(value_of(s.orders[g]));
        s.orders[g] = order_of(y);
        if (!has_sums) continue;
        s.sums[g] = work.sums[index * work.pitch + g] * scale.weight(y);
        total += static_cast<double>(s.sums[g]);
    }
    __syncthreads();
    if (has_sums) total = block_sum(total, s);
    const float floor = s.floor;
    const bool has_nucleus = set.top_p < 1.0;
    uint64_t last = last_key(kLastOrder);
    const int top_k = has_sums ? 0 : set.top_k;
    const int wanted = top_k > 0 ? top_k : has_nucleus ? kNucleusTokens : 0;
    if (0 < wanted && wanted <= kMaxSorted) {
        int n = select_top(row, scale, s, wanted, last);
        const bool is_all = top_k > 0 || n < wanted;
        if (top_k > 0 && top_k < n) n = top_k;
        weigh_sorted(scale, s, n);
        int kept = n;
        if (has_nucleus) {
            const double whole = top_k > 0 ? s.running[n - 1] : total;
            kept = count_kept(s, n, 0.0, set.top_p * whole, kNucleusFloor * whole);
            kept = kept > 1 ? kept : 1;
        }
        if (is_all || kept < n) return sample_sorted(set, scale, floor, s, kept, result);
    } else if (top_k > 0) {
        int finite = 0;
        for_tokens(row, scale, s, kLastOrder, [&](uint32_t, int) { ++finite; });
        if (block_sum(static_cast<double>(finite), s) > top_k) {
            last = nth_token(row, scale, s, last, static_cast<uint32_t>(top_k));
        }
        if (has_nucleus) {
            sum_groups(row, scale, s, last);
            double part = 0.0;
            for (int g = thread; g < row.groups; g += kThreads) {
                part += static_cast<double>(s.sums[g]);
            }
            total = block_sum(part, s);
        }
    }
    if (has_nucleus) {
        last = least_of(last, last_key(last_within(scale, log_up(kNucleusFloor * total))));
        last = nucleus_end(row, scale, s, last, set.top_p * total);
    }
    if (floor > -INFINITY) last = least_of(last, last_key(last_within(scale, floor)));
    if (!has_sums || last < last_key(kLastOrder)) sum_groups(row, scale, s, last);
    total = sample_groups(row, scale, s, last, set.uniform, result);
    put_top_tokens(row, scale, s, last, set.num_top, total, result);
}

}  // namespace
}  // namespace exl::cuda::sampling

using namespace exl::cuda;

extern "C" {

int64_t exl_cuda_sample_workspace(int32_t rows, int32_t vocab) {
    if (rows < 1 || vocab < 1) return 0;
    const int64_t edited = sampling::groups_of(vocab) * sampling::kGroup;
    return rows * (2 * sampling::pitch_of(vocab) + edited) * static_cast<int64_t>(sizeof(float));
}

int exl_cuda_sample(const ExlSample* args, void* stream) {
    if (args->rows == 0) return cudaSuccess;
    if (args->rows < 0 || args->rows > 65535 || args->vocab < 1 ||
        args->vocab > sampling::kMaxVocab || args->max_top < 0 ||
        args->max_top > sampling::kMaxSorted ||
        args->workspace_bytes < exl_cuda_sample_workspace(args->rows, args->vocab)) {
        return cudaErrorInvalidValue;
    }
    sampling::Workspace work{};
    work.groups = static_cast<int>(sampling::groups_of(args->vocab));
    work.pitch = static_cast<int>(sampling::pitch_of(args->vocab));
    work.maxima = static_cast<float*>(args->workspace);
    work.sums = work.maxima + static_cast<int64_t>(args->rows) * work.pitch;
    work.edited = work.sums + static_cast<int64_t>(args->rows) * work.pitch;
    const dim3 tiles(
        static_cast<unsigned>(ceil_div(args->vocab, sampling::kTile)),
        static_cast<unsigned>(args->rows)
    );
    cudaError_t error = launch(
        sampling::reduce_groups, tiles, dim3(sampling::kReduceThreads), 0, stream, *args, work
    );
    if (error != cudaSuccess) return error;
    return launch(
        sampling::sample_row, dim3(static_cast<unsigned>(args->rows)), dim3(sampling::kThreads),
        sizeof(sampling::Shared), stream, *args, work
    );
}

}  // extern "C"

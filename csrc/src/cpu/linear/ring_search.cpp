// states[n, 256] = the rings nearest to targets[n, 256], by the Viterbi algorithm.
//
// Contract   include/exl/ops/rings.h.
// Work       256 + 2 * reach positions of 65536 states: a difference, a square added to the cost of
//            the node before, a minimum. A third of it finds the node at which the ring is closed.
// Order      A vector holds consecutive nodes after a position. The values of all states that lead
//            to them are consecutive in a table made for the call. It is read once per position,
//            256 KiB from the L2 cache, for kTiles tiles at a time.
// Choices    Costs of nodes are kept, choices are not: going back, the best state of the one node on
//            the path is searched again. Costs are kept every 1, 2 or 4 positions, by the number of
//            nodes; the states of the positions between are searched together. The sums are the
//            same, because rounding a sum never changes the order of two terms.
// Places     The costs of the nodes that one vector reads are a power of two apart. From 4 KiB on
//            they would share a set of the L1 cache, so each run of nodes is followed by a gap.
// Accuracy   float32; squares are added with one rounding where the processor has fma.
#include <limits>

#include "cpu/common/ops.h"
#include "cpu/common/vec.h"
#include "exl/ops/rings.h"

namespace exl::EXL_ISA {

constexpr int kTiles = 2;
constexpr int kLaneBits = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 0;
constexpr int kTableSlot = 0;    // of the calling thread
constexpr int kHistorySlot = 1;  // of each thread
constexpr int kLongRun = 10;     // bits: runs of 4 KiB
constexpr int64_t kGap = kLanes > 8 ? kLanes : 8;
constexpr int64_t kMostGaps = 8 * kGap;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Costs of the nodes before the states of kLanes consecutive nodes after them: each 2^Bits
// consecutive lanes have the same one.
template <int Bits>
static inline __attribute__((always_inline)) Vec spread(const float* costs) {
    if constexpr (Bits >= kLaneBits) {
        return set1(*costs);
    } else {
#if defined(__AVX512F__)
        const __m512i lanes =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i from = _mm512_srli_epi32(lanes, Bits);
        return _mm512_permutexvar_ps(from, _mm512_castps256_ps512(_mm256_loadu_ps(costs)));
#elif defined(__AVX2__)
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i from = _mm256_srli_epi32(lanes, Bits);
        return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(costs)), from);
#endif
    }
}

// Place of the cost of a node whose leading bits, those that leave next, select one of the runs of
// 2^run_bits nodes.
static inline int64_t place_of(int64_t node, int run_bits) {
    return run_bits < kLongRun ? node : node + (node >> run_bits) * kGap;
}

// Costs of all nodes after a position. `table` has the values of the states that lead to a vector
// of nodes, one vector for each choice of the leading bits.
template <int In, int Out>
static void step(
    const float* table, const float* targets, const float* const before[kTiles],
    float* const after[kTiles]
) {
    constexpr int64_t kChoices = int64_t{1} << Out;
    constexpr int64_t kNodes = kStates >> Out;
    constexpr int kRunBits = kStateBits - In - Out;  // of the nodes before and of those after
    constexpr int64_t kStride = (int64_t{1} << kRunBits) + (kRunBits < kLongRun ? 0 : kGap);
    Vec target[kTiles];
    for (int t = 0; t < kTiles; ++t) target[t] = set1(targets[t]);
    for (int64_t node = 0; node < kNodes; node += kLanes) {
        Vec best[kTiles];
        for (int t = 0; t < kTiles; ++t) best[t] = set1(kInfinity);
        const int64_t from = node >> In;
        for (int64_t choice = 0; choice < kChoices; ++choice) {
            const Vec value = load(table);
            table += kLanes;
            for (int t = 0; t < kTiles; ++t) {
                const Vec error = sub(value, target[t]);
                const Vec cost = spread<In>(before[t] + choice * kStride + from);
                best[t] = min(fma(error, error, cost), best[t]);
            }
        }
        for (int t = 0; t < kTiles; ++t) store(after[t] + place_of(node, kRunBits), best[t]);
    }
}

using Step = void (*)(const float*, const float*, const float* const*, float* const*);

// Step function by the new bits of a position and of the next one.
static Step step_of(int in, int out) {
    constexpr Step kEqual[8] = {step<1, 1>, step<2, 2>, step<3, 3>, step<4, 4>,
                                step<5, 5>, step<6, 6>, step<7, 7>, step<8, 8>};
    constexpr Step kUp[3] = {step<1, 2>, step<2, 3>, step<3, 4>};
    constexpr Step kDown[3] = {step<2, 1>, step<3, 2>, step<4, 3>};
    return in == out ? kEqual[in - 1] : in < out ? kUp[in - 1] : kDown[out - 1];
}

static inline float added(float error, float cost) {
#if defined(__FMA__)
    return __builtin_fmaf(error, error, cost);
#else
    return error * error + cost;
#endif
}

// A walk over the positions first, first + 1, ..., and the costs that it keeps.
struct Walk {
    const RingArgs* args;
    int64_t first;
    int64_t steps;
    int64_t kept_from;  // costs are kept from this step on, every `stride` steps
    int64_t stride;
    float* kept;     // of one tile: [.., largest number of nodes]
    float* current;  // two more, for the other steps

    int bits(int64_t step) const {
        return (first + step) % 2 == 0 ? args->even_bits : args->odd_bits;
    }
    int64_t position(int64_t step) const { return (first + step) % kRingPositions; }
    int64_t most_nodes() const { return (kStates >> args->even_bits) + kMostGaps; }
    int64_t place(int64_t step, int64_t node) const {
        return place_of(node, kStateBits - bits(step) - bits(step + 1));
    }
    // Costs of the nodes before a step.
    float* costs(int64_t step) const {
        const int64_t after = step - kept_from;
        if (after < 0 || after % stride != 0) return current + step % 2 * most_nodes();
        return kept + after / stride * most_nodes();
    }
};

// Cost of a node before a step, and the `depth` states that lead to it from the kept costs `base`.
static float trace(
    const Walk& walk, const float* target, const float* base, int64_t step, int64_t node, int depth,
    int32_t* states
) {
    if (depth == 0) return base[walk.place(step, node)];
    const int in = walk.bits(step - 1);
    const int out = walk.bits(step);
    const float wanted = target[walk.position(step - 1)];
    int32_t trial[8];
    float best = kInfinity;
    for (int64_t choice = 0; choice < int64_t{1} << out; ++choice) {
        const int64_t state = choice << (kStateBits - out) | node;
        const float error = walk.args->values[state] - wanted;
        const float before = trace(walk, target, base, step - 1, state >> in, depth - 1, trial);
        const float cost = added(error, before);
        if (choice != 0 && !(cost < best)) continue;
        best = cost;
        for (int i = 0; i + 1 < depth; ++i) states[i] = trial[i];
        states[depth - 1] = static_cast<int32_t>(state);
    }
    return best;
}

// Writes the states of the steps from kept_from on; the path ends at `node`.
static void trace_back(const Walk& walk, const float* target, int64_t node, int32_t* states) {
    for (int64_t step = walk.steps; step > walk.kept_from;) {
        const int64_t base = (step - 1 - walk.kept_from) / walk.stride * walk.stride;
        int32_t* to = states + base;
        const int64_t depth = step - walk.kept_from - base;
        const float* costs = walk.costs(walk.kept_from + base);
        trace(walk, target, costs, step, node, static_cast<int>(depth), to);
        step -= depth;
        node = to[0] >> walk.bits(step);
    }
}

// Node with the least cost before a step.
static int64_t cheapest(const Walk& walk, int64_t step) {
    const float* costs = walk.costs(step);
    int64_t best = 0;
    for (int64_t node = 1; node < kStates >> walk.bits(step); ++node) {
        if (costs[walk.place(step, node)] < costs[walk.place(step, best)]) best = node;
    }
    return best;
}

// Search of kTiles rings.
struct Search {
    const RingArgs& args;
    const float* even_table;  // of states before an even position
    const float* odd_table;
    const float* targets[kTiles];
    Walk walks[kTiles];

    // Walks from the node `start` before the first position, or from any one if it is negative.
    void forward(const int64_t start[kTiles]) {
        const Walk& plan = walks[0];
        for (int t = 0; t < kTiles; ++t) {
            float* costs = walks[t].costs(0);
            const float other = start[t] < 0 ? 0.0f : kInfinity;
            for (int64_t i = 0; i < plan.most_nodes(); ++i) costs[i] = other;
            if (start[t] >= 0) costs[plan.place(0, start[t])] = 0.0f;
        }
        for (int64_t i = 0; i < plan.steps; ++i) {
            const float* before[kTiles];
            float* after[kTiles];
            float wanted[kTiles];
            for (int t = 0; t < kTiles; ++t) {
                before[t] = walks[t].costs(i);
                after[t] = walks[t].costs(i + 1);
                wanted[t] = targets[t][plan.position(i)];
            }
            const float* table = plan.position(i + 1) % 2 == 0 ? even_table : odd_table;
            step_of(plan.bits(i), plan.bits(i + 1))(table, wanted, before, after);
        }
    }

    void set(int64_t first, int64_t steps, int64_t kept_from) {
        for (Walk& walk : walks) {
            walk.first = first;
            walk.steps = steps;
            walk.kept_from = kept_from;
        }
    }

    void run(int32_t* const states[kTiles]) {
        int64_t node[kTiles];
        for (int t = 0; t < kTiles; ++t) node[t] = -1;
        set(kRingPositions - args.reach, 2 * args.reach, args.reach);
        forward(node);
        for (int t = 0; t < kTiles; ++t) {
            const Walk& walk = walks[t];
            const int64_t last = cheapest(walk, walk.steps);
            trace_back(walk, targets[t], last, states[t]);
            node[t] = states[t][0] >> args.even_bits;
        }
        set(0, kRingPositions, 0);
        forward(node);
        for (int t = 0; t < kTiles; ++t) trace_back(walks[t], targets[t], node[t], states[t]);
    }
};

// Values in the order of `step`, for a position before one with `out` new bits.
static void fill_table(const float* values, int out, float* table) {
    const int64_t nodes = kStates >> out;
    for (int64_t node = 0; node < nodes; node += kLanes) {
        for (int64_t choice = 0; choice < int64_t{1} << out; ++choice) {
            for (int lane = 0; lane < kLanes; ++lane) {
                *table++ = values[choice * nodes + node + lane];
            }
        }
    }
}

void nearest_rings(ThreadPool& pool, const RingArgs& args) {
    auto* tables = static_cast<float*>(thread_scratch(kTableSlot, 2 * kStates * 4));
    float* odd_table = args.odd_bits == args.even_bits ? tables : tables + kStates;
    fill_table(args.values, args.even_bits, tables);
    if (odd_table != tables) fill_table(args.values, args.odd_bits, odd_table);
    const int64_t most_nodes = (kStates >> args.even_bits) + kMostGaps;
    const int64_t stride = args.even_bits == 1 ? 4 : args.even_bits == 2 ? 2 : 1;
    const int64_t kept = (kRingPositions / stride + 1) * most_nodes;
    const int64_t floats = kept + 2 * most_nodes;
    pool.parallel_for(ceil_div(args.count, kTiles), [&](int64_t chunk) {
        auto* memory =
            static_cast<float*>(thread_scratch(kHistorySlot, (kTiles * floats + 16) * 4));
        Search search{args, tables, odd_table, {}, {}};
        int32_t* states[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            // The last chunk may search one tile twice.
            const int64_t tile = smaller(chunk * kTiles + t, args.count - 1);
            search.targets[t] = args.targets + tile * args.target_stride;
            float* own = memory + t * floats;
            search.walks[t] = {&args, 0, 0, 0, stride, own, own + kept};
            states[t] = args.states + tile * kRingPositions;
        }
        search.run(states);
    });
}

}  // namespace exl::EXL_ISA

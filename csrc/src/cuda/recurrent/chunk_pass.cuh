// The pass over the chunks of a sequence: the second kernel of the chunked form.
//
// Contract   chunks.cuh has the formulas and the layout of the workspace.
// Mapping    Two warps, a pair, have 16 columns of the state of one head, in registers from the first
//            chunk to the last. All their matrices are transposed: columns are rows of a product's
//            result, so that a result is the operand of the next product as it is. A warp has half
//            of the state's rows, and half of the tokens: tiles of 16 tokens 0 and 3, or 1 and 2,
//            because early tokens have few products within the chunk. The warps of a pair exchange
//            operands of products through shared memory. Two more warps copy the next chunk to shared
//            memory and the results from there.
// Scales     A column of the state and its values are multiplied by a power of two that is chosen
//            anew for each chunk, so that the largest of them is between 16 and 32: 2048 times as
//            much, and more, is in the range of float16, and so is a 2^-28th.
// Floor      A block reads 240 KiB of shared memory per chunk in products: 1.1 us at 128 bytes per
//            clock, 35 us for 2,048 tokens. Tensor cores: 1.3 us.
#pragma once

#include "cuda/recurrent/chunks.cuh"

namespace exl::cuda {

constexpr int kCopyWarps = 2;
constexpr int kCopyThreads = kCopyWarps * kWarp;
constexpr int kPairColumns = 16;
constexpr int kPairThreads = 2 * kWarp;
constexpr int kTokenTiles = kChunk / 16;
constexpr int kOwnTokens = kChunk / 16;            // tiles of 8 tokens of a warp
constexpr int kOwnRows = kChunkDepth / 16;         // tiles of 8 rows of a warp's part of the state
constexpr int kScaleExponent = 4;                  // of the largest number in a column
constexpr int kCopyBarrier = 1, kPairBarrier = 2;  // the first pair's; the second one has the next

// Operands of one chunk in shared memory. Results take the place of values. The pitch of values
// keeps the reads of a warp in different banks.
template <int pairs>
struct alignas(16) ChunkStage {
    ChunkVectors vectors;
    ChunkHead head;
    float values[kChunk][pairs * kPairColumns + 4];
};

// Operands that a pair exchanges: upper and lower halves of each lane.
struct alignas(16) PairExchange {
    union {
        uint4 state[kChunkDepth / 16][2][kWarp];
        uint4 results[2][kTokenTiles][2][kWarp];  // D, and D times the decays that are left
    };
    uint4 wanted[kTokenTiles][2][kWarp];
    float largest[2][kPairColumns];
};

template <int pairs>
struct alignas(16) PassSpace {
    ChunkStage<pairs> stages[2];
    PairExchange exchanges[pairs];
};

#ifdef __CUDACC__

__device__ __forceinline__ void named_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------

// Copies 4 bytes, or zeros.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global, bool is_there) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = is_there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
#endif
}

// Rows of one chunk, and the columns of a block.
struct PassRows {
    int64_t slot;
    int head, key_head, row, last, column;
};

template <bool is_delta, int pairs>
__device__ __forceinline__ void copy_products(
    ChunkStage<pairs>& to, const ChunkSpace& space, const MatrixState& args, const PassRows& rows,
    int thread
) {
    const auto copy = [thread](void* there, const void* from, int bytes) {
#pragma unroll 8
        for (int at = thread * 16; at < bytes; at += kCopyThreads * 16) {
            copy_async_16(
                static_cast<uint8_t*>(there) + at, static_cast<const uint8_t*>(from) + at
            );
        }
    };
    const ChunkHead& own = space.heads[rows.slot * args.heads + rows.head];
    copy(
        &to.vectors, &space.vectors[rows.slot * args.key_heads + rows.key_head],
        sizeof(ChunkVectors)
    );
    if constexpr (is_delta) {
        copy(&to.head, &own, sizeof(ChunkHead));
    } else {
        copy(to.head.outer, own.outer, sizeof(ChunkHead) - kTriangleBytes);
    }
}

template <int pairs>
__device__ __forceinline__ void copy_values(
    ChunkStage<pairs>& to, const MatrixState& args, const PassRows& rows, int thread
) {
    constexpr int kColumns = pairs * kPairColumns;
    const int place = thread % kColumns;
    const bool is_inside = rows.column + place < args.width;
    const float* values = args.x + args.value_first + static_cast<int64_t>(rows.head) * args.width +
                          (is_inside ? rows.column + place : 0);
#pragma unroll 8
    for (int token = thread / kColumns; token < kChunk; token += kCopyThreads / kColumns) {
        const bool is_there = is_inside && rows.row + token < rows.last;
        const int64_t from = is_there ? rows.row + token : rows.row;
        copy_async_4(&to.values[token][place], values + from * args.x_stride, is_there);
    }
}

template <int pairs>
__device__ __forceinline__ void store_results(
    const ChunkStage<pairs>& from, const MatrixState& args, const PassRows& rows, int thread
) {
    constexpr int kColumns = pairs * kPairColumns;
    const int place = thread % kColumns;
    const int64_t stride = static_cast<int64_t>(args.heads) * args.width;
    float* y = args.y + rows.row * stride + static_cast<int64_t>(rows.head) * args.width +
               rows.column + place;
    const int tokens = rows.column + place < args.width ? min(kChunk, rows.last - rows.row) : 0;
#pragma unroll 8
    for (int token = thread / kColumns; token < tokens; token += kCopyThreads / kColumns) {
        y[token * stride] = from.values[token][place];
    }
}

// The copy warps' part of the pass.
template <bool is_delta, int pairs>
__device__ __forceinline__ void copy_chunks(
    PassSpace<pairs>& memory, const ChunkSpace& space, const MatrixState& args, PassRows rows,
    int thread
) {
    PassRows before = rows;
    copy_products<is_delta>(memory.stages[0], space, args, rows, thread);
    copy_values(memory.stages[0], args, rows, thread);
    commit_copies();
    int current = 0;
    for (bool is_first = true; rows.row < rows.last; is_first = false) {
        wait_copies<0>();
        __syncthreads();  // this chunk is there, and the results of the one before it
        ChunkStage<pairs>& next = memory.stages[current ^ 1];
        PassRows after = rows;
        after.row += kChunk, ++after.slot;
        const bool has_next = after.row < rows.last;
        if (has_next) copy_products<is_delta>(next, space, args, after, thread);
        if (!is_first) store_results(next, args, before, thread);
        named_barrier(kCopyBarrier, kCopyThreads);
        if (has_next) copy_values(next, args, after, thread);
        commit_copies();
        before = rows, rows = after, current ^= 1;
    }
    __syncthreads();
    store_results(memory.stages[current ^ 1], args, before, thread);
}

// ---- products ----------------------------------------------------------------------------------

// Half of 16 columns of a state: s[n][e] has row first + 8 n + 2 (lane % 4) + e % 2 and column
// lane / 4 + 8 (e / 2), times the scale of the column.
template <bool is_delta>
struct PassState {
    float s[kOwnRows][4];
    float2 scales[2];  // of the two columns of a lane: factor, inverse

    template <bool is_store>
    __device__ __forceinline__ void move(
        float* head, const MatrixState& args, int first, int column, int lane
    ) {
#pragma unroll
        for (int n = 0; n < kOwnRows; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = first + 8 * n + lane % 4 * 2 + e % 2;
                const int own = column + lane / 4 + e / 2 * 8;
                if (row >= args.depth || own >= args.width) continue;
                float& there = head[is_delta ? row * args.width + own : own * args.depth + row];
                if constexpr (is_store) {
                    there = s[n][e] * scales[e / 2].y;
                } else {
                    s[n][e] = there;
                }
            }
        }
    }
};

// Addresses of a lane's rows of 16 bytes in shared memory.
struct PassPlaces {
    uint32_t vectors, transposed, triangle;
    uint32_t part;  // of `vectors`: the permutation of its 16-byte parts
    uint32_t row;   // of `transposed`: the same

    __device__ __forceinline__ explicit PassPlaces(int lane) {
        const uint32_t own = lane % 8, matrix = lane / 8;
        vectors = matrix / 2 * kPlaneBytes + own * (kChunkDepth * 2);
        part = ((matrix % 2) ^ own) * 16;
        transposed = matrix / 2 * kPlaneBytes + (matrix % 2 * 8 + own) * (kChunkDepth * 2);
        row = own * 16;
        triangle = own * 64 + (matrix ^ ((own >> 1) & 3)) * 16;
    }
};

// One of the two warps of a pair. Its tiles of 8 tokens are 2 tile(0), the next, 2 tile(1), the next.
struct PairWarp {
    int half, lane;
    PairExchange* exchange;
    int barrier;

    __device__ __forceinline__ int tile(int i) const { return i == 0 ? half : 3 - half; }
    __device__ __forceinline__ int tokens(int n) const { return 2 * tile(n / 2) + n % 2; }
    __device__ __forceinline__ void meet() const { named_barrier(barrier, kPairThreads); }
};

__device__ __forceinline__ void put(uint4 (&to)[2][kWarp], const SplitRows& rows, int lane) {
    to[0][lane] = make_uint4(rows.high[0], rows.high[1], rows.high[2], rows.high[3]);
    to[1][lane] = make_uint4(rows.low[0], rows.low[1], rows.low[2], rows.low[3]);
}
__device__ __forceinline__ SplitRows take(const uint4 (&from)[2][kWarp], int lane) {
    const uint4 high = from[0][lane], low = from[1][lane];
    return {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}};
}

using Results = float[kOwnTokens][4];  // of 16 columns and a warp's tokens, transposed

// Chooses the scales of the chunk and applies them to the state. `values` are the chunk's.
template <bool is_delta>
__device__ __forceinline__ void rescale(
    PassState<is_delta>& state, const Results& values, const PairWarp& warp
) {
    float largest[2] = {};
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], fabsf(state.s[n][e]));
    }
    largest[0] *= state.scales[0].y, largest[1] *= state.scales[1].y;
#pragma unroll
    for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], fabsf(values[n][e]));
    }
    const int column = warp.lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
        if (warp.lane % 4 == 0) warp.exchange->largest[warp.half][column + 8 * i] = largest[i];
    }
    warp.meet();
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float other = warp.exchange->largest[warp.half ^ 1][column + 8 * i];
        const float2 scale = scale_to(fmaxf(largest[i], other), kScaleExponent);
        factors[i] = scale.x * state.scales[i].y;
        state.scales[i] = scale;
    }
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.s[n][e] *= factors[e / 2];
    }
}

// by_keys, by_queries += the state times keys and queries.
template <bool is_delta>
__device__ __forceinline__ void read_state(
    Results& by_keys, Results& by_queries, const PassState<is_delta>& state, uint32_t vectors,
    const PassPlaces& places, const PairWarp& warp
) {
    constexpr int kTiles = kOwnRows / 2;
    SplitRows own[kTiles];
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
        own[k] = split_rows(state.s[2 * k], state.s[2 * k + 1]);
        put(warp.exchange->state[warp.half * kTiles + k], own[k], warp.lane);
    }
    const auto multiply = [&](const SplitRows& a, int tile) {
        const uint32_t at = vectors + places.vectors + (places.part ^ (tile * 32));
#pragma unroll
        for (int n = 0; n < kOwnTokens; ++n) {
            const uint32_t from = at + warp.tokens(n) * (8 * kChunkDepth * 2);
            uint32_t b[4];
            if constexpr (is_delta) {
                load_matrices(b, from);
                mma_split(by_keys[n], a, b);
            }
            load_matrices(b, from + 2 * kPlaneBytes);
            mma_split(by_queries[n], a, b);
        }
    };
#pragma unroll
    for (int k = 0; k < kTiles; ++k) multiply(own[k], warp.half * kTiles + k);
    warp.meet();
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
        const int tile = (warp.half ^ 1) * kTiles + k;
        multiply(take(warp.exchange->state[tile], warp.lane), tile);
    }
}

// c += x times a triangle at `from`. `x` are the operands of the warp's tiles of tokens, `others` those
// of the other tiles.
__device__ __forceinline__ void multiply_triangle(
    Results& c, const SplitRows (&x)[2], const SplitRows (&others)[2], uint32_t from,
    const PassPlaces& places, const PairWarp& warp
) {
    const auto multiply = [&](const SplitRows& a, int k) {
#pragma unroll
        for (int n = 0; n < kOwnTokens; ++n) {
            const int own = warp.tile(n / 2);
            if (k > own) continue;  // those tokens come before
            const int tile = own * (own + 1) / 2 + k;
            uint32_t b[4];
            load_matrices(b, from + places.triangle + tile * kTriangleTileBytes + n % 2 * 512);
            mma_split(c[n], a, b);
        }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        multiply(x[i], warp.tile(i));
        multiply(others[i], i == 0 ? 1 - warp.half : 2 + warp.half);
    }
}

// Takes the operands of the other warp's tiles of tokens.
__device__ __forceinline__ void take_others(
    SplitRows (&to)[2], const uint4 (&from)[kTokenTiles][2][kWarp], const PairWarp& warp
) {
    to[0] = take(from[1 - warp.half], warp.lane);
    to[1] = take(from[2 + warp.half], warp.lane);
}

// Splits results, and puts them where the other warp takes them.
__device__ __forceinline__ void split_results(
    SplitRows (&to)[2], uint4 (&there)[kTokenTiles][2][kWarp], const Results& from,
    const PairWarp& warp
) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        to[i] = split_rows(from[2 * i], from[2 * i + 1]);
        put(there[warp.tile(i)], to[i], warp.lane);
    }
}

// The state at the end of a chunk, from D times the decays that are left.
template <bool is_delta>
__device__ __forceinline__ void write_state(
    PassState<is_delta>& state, const SplitRows (&own)[2], const SplitRows (&others)[2],
    float grown, uint32_t keys, const PassPlaces& places, const PairWarp& warp
) {
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.s[n][e] *= grown;
    }
    const auto multiply = [&](const SplitRows& a, int tile) {
        const uint32_t at = keys + places.transposed + tile * (16 * kChunkDepth * 2);
#pragma unroll
        for (int n = 0; n < kOwnRows; ++n) {
            uint32_t b[4];
            load_transposed(b, at + (((warp.half * kOwnRows + n) * 16) ^ places.row));
            mma_split(state.s[n], a, b);
        }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        multiply(own[i], warp.tile(i));
        multiply(others[i], i == 0 ? 1 - warp.half : 2 + warp.half);
    }
}

// Computes one chunk of 16 columns, the first of which is `column` of the stage.
template <bool is_delta, int pairs>
__device__ __forceinline__ void compute_chunk(
    PassState<is_delta>& state, ChunkStage<pairs>& stage, float skip, int column,
    const PassPlaces& places, const PairWarp& warp
) {
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(&stage));
    const uint32_t head = base + sizeof(ChunkVectors);
    const ChunkFactors& factors = stage.head.factors;
    PairExchange& exchange = *warp.exchange;
    const int token = warp.lane % 4 * 2, place = column + warp.lane / 4;
    const auto index = [&](int n, int e) { return 8 * warp.tokens(n) + token + e % 2; };
    Results values, wanted;
#pragma unroll
    for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            values[n][e] = stage.values[index(n, e)][place + e / 2 * 8];
            wanted[n][e] = is_delta ? values[n][e] : factors.beta[index(n, e)] * values[n][e];
        }
    }
    rescale(state, wanted, warp);
    Results by_keys = {}, y = {};
    read_state(by_keys, y, state, base, places, warp);
#pragma unroll
    for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = index(n, e);
            wanted[n][e] *= state.scales[e / 2].x;
            if constexpr (is_delta) {
                wanted[n][e] =
                    factors.beta[at] * (wanted[n][e] - factors.grown[at] * by_keys[n][e]);
            }
            y[n][e] *= factors.grown[at];
        }
    }
    SplitRows own[2], others[2];
    Results d = {};
    if constexpr (is_delta) {
        split_results(own, exchange.wanted, wanted, warp);
        warp.meet();
        take_others(others, exchange.wanted, warp);
        multiply_triangle(d, own, others, head, places, warp);
    } else {
        warp.meet();  // the other warp has read the state, whose place the results take
#pragma unroll
        for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) d[n][e] = wanted[n][e];
        }
    }
    SplitRows own_left[2], others_left[2];
    split_results(own, exchange.results[0], d, warp);
#pragma unroll
    for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[n][e] *= factors.left[index(n, e)];
    }
    split_results(own_left, exchange.results[1], d, warp);
    warp.meet();
    take_others(others, exchange.results[0], warp);
    multiply_triangle(y, own, others, head + kTriangleBytes, places, warp);
    take_others(others_left, exchange.results[1], warp);
    write_state(state, own_left, others_left, factors.grown[kChunk - 1], base, places, warp);
#pragma unroll
    for (int n = 0; n < kOwnTokens; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = index(n, e);
            float result = y[n][e] * state.scales[e / 2].y;
            if constexpr (!is_delta) result = factors.scale[at] * result + skip * values[n][e];
            stage.values[at][place + e / 2 * 8] = result;
        }
    }
}

// Grid: parts of 16 columns per pair, heads, sequences.
template <bool is_delta, int pairs>
__global__ void __launch_bounds__(pairs* kPairThreads + kCopyThreads, 1) chunk_pass_kernel(
    MatrixState args, ChunkSpace space
) {
    extern __shared__ __align__(16) uint8_t shared[];
    PassSpace<pairs>& memory = *reinterpret_cast<PassSpace<pairs>*>(shared);
    let_next_begin();
    const int warp = static_cast<int>(uniform(threadIdx.x / kWarp)), lane = threadIdx.x % kWarp;
    const int head = blockIdx.y, seq = blockIdx.z;
    const int first = args.rows.row_starts[seq], last = args.rows.row_starts[seq + 1];
    if (last - first < kLeastChunkedRows) {
        wait_for_inputs();
        return;
    }
    const int key_head =
        args.is_tiled ? head % args.key_heads : head / (args.heads / args.key_heads);
    const int block_column = blockIdx.x * pairs * kPairColumns;
    if (warp >= 2 * pairs) {
        wait_for_inputs();
        const PassRows rows = {first / kChunk + seq, head, key_head, first, last, block_column};
        copy_chunks<is_delta>(memory, space, args, rows, threadIdx.x - pairs * kPairThreads);
        return;
    }
    const int pair = warp / 2, half = warp % 2, column = pair * kPairColumns;
    const PairWarp own = {half, lane, &memory.exchanges[pair], kPairBarrier + pair};
    const int64_t held = args.rows.slots[seq] * args.heads + head;
    float* head_state = args.states + held * args.depth * args.width;
    PassState<is_delta> state = {};
    state.scales[0] = state.scales[1] = make_float2(1.0f, 1.0f);
    const int first_row = half * (kChunkDepth / 2);
    if (args.rows.past_lens[seq] > 0) {
        state.template move<false>(head_state, args, first_row, block_column + column, lane);
    }
    const PassPlaces places(lane);
    const float skip = is_delta ? 0.0f : args.skip[head];
    wait_for_inputs();
    int current = 0;
    for (int row = first; row < last; row += kChunk, current ^= 1) {
        __syncthreads();
        compute_chunk<is_delta>(state, memory.stages[current], skip, column, places, own);
    }
    __syncthreads();
    state.template move<true>(head_state, args, first_row, block_column + column, lane);
}

#endif  // __CUDACC__

}  // namespace exl::cuda

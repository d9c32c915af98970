// The pass over the chunks of a sequence: the second kernel of the chunked form.
//
// Contract   chunks.cuh has the formulas and the layout of the workspace.
// Mapping    A warp has 16 columns of the state of one head, in registers from the first chunk to the
//            last. All its matrices are transposed: columns are rows of a product's result, so that
//            a result is the operand of the next product without an exchange between threads, and
//            warps need none. Two more warps copy the next chunk meanwhile.
// Floor      Shared memory: the warps of a block read 116 KiB per chunk each, 2,048 tokens of 32 heads
//            of 128 x 128 in 67 us at 128 bytes per clock. Tensor cores: 80 us in two warps per
//            multiprocessor.
#pragma once

#include "cuda/recurrent/chunks.cuh"

namespace exl::cuda {

constexpr int kCopyWarps = 2;
constexpr int kCopyThreads = kCopyWarps * kWarp;
constexpr int kPassColumns = 16;  // of a warp

// Operands of one chunk in shared memory. The pitch of values keeps the reads of a warp in
// different banks.
template <int warps>
struct alignas(16) ChunkStage {
    ChunkVectors vectors;
    ChunkHead head;
    float values[kChunk][warps * kPassColumns + 4];
};

#ifdef __CUDACC__

// Copies 4 bytes, or zeros.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global, bool is_there) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = is_there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
#endif
}

// Copies a chunk to shared memory: the copy warps' part of the pass.
template <bool is_delta, int warps>
__device__ __forceinline__ void copy_chunk(
    ChunkStage<warps>& to, const ChunkSpace& space, const MatrixState& args, int64_t slot,
    int head, int key_head, int row, int last, int thread
) {
    const auto copy = [thread](void* there, const void* from, int bytes) {
#pragma unroll 8
        for (int at = thread * 16; at < bytes; at += kCopyThreads * 16) {
            copy_async_16(
                static_cast<uint8_t*>(there) + at, static_cast<const uint8_t*>(from) + at
            );
        }
    };
    const ChunkHead& own = space.heads[slot * args.heads + head];
    copy(&to.vectors, &space.vectors[slot * args.key_heads + key_head], sizeof(ChunkVectors));
    if constexpr (is_delta) {
        copy(&to.head, &own, sizeof(ChunkHead));
    } else {
        copy(to.head.outer, own.outer, sizeof(ChunkHead) - kTriangleBytes);
    }
    constexpr int kColumns = warps * kPassColumns;
    const int place = thread % kColumns, column = blockIdx.x * kColumns + place;
    const bool is_inside = column < args.width;
    const float* values = args.x + args.value_first + static_cast<int64_t>(head) * args.width +
                          (is_inside ? column : 0);
#pragma unroll 8
    for (int token = thread / kColumns; token < kChunk; token += kCopyThreads / kColumns) {
        const bool is_there = is_inside && row + token < last;
        const int64_t from = is_there ? row + token : row;
        copy_async_4(&to.values[token][place], values + from * args.x_stride, is_there);
    }
    commit_copies();
}

// 16 columns of a state: s[n][e] has row 8 n + 2 (lane % 4) + e % 2 and column lane / 4 + 8 (e / 2).
template <bool is_delta>
struct PassState {
    float s[kChunkDepth / 8][4];

    template <bool is_store>
    __device__ __forceinline__ void move(
        float* head, const MatrixState& args, int column, int lane
    ) {
#pragma unroll
        for (int n = 0; n < kChunkDepth / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 8 * n + lane % 4 * 2 + e % 2;
                const int own = column + lane / 4 + e / 2 * 8;
                if (row >= args.depth || own >= args.width) continue;
                float& there = head[is_delta ? row * args.width + own : own * args.depth + row];
                if constexpr (is_store) {
                    there = s[n][e];
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

using Results = float[kChunk / 8][4];  // of 16 columns and 64 tokens, transposed

// c += the state times keys or queries at `from`.
template <bool is_delta>
__device__ __forceinline__ void read_state(
    Results& by_keys, Results& by_queries, const PassState<is_delta>& state, uint32_t keys,
    uint32_t queries, const PassPlaces& places
) {
#pragma unroll
    for (int k = 0; k < kChunkDepth / 16; ++k) {
        const SplitRows a = split_rows(state.s[2 * k], state.s[2 * k + 1]);
        const uint32_t at = places.vectors + (places.part ^ (k * 32));
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            uint32_t b[4];
            if constexpr (is_delta) {
                load_matrices(b, keys + at + n * (8 * kChunkDepth * 2));
                mma_split(by_keys[n], a, b);
            }
            load_matrices(b, queries + at + n * (8 * kChunkDepth * 2));
            mma_split(by_queries[n], a, b);
        }
    }
}

// c += x times a triangle.
__device__ __forceinline__ void multiply_triangle(
    Results& c, const Results& x, uint32_t from, const PassPlaces& places
) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
        const SplitRows a = split_rows(x[2 * k], x[2 * k + 1]);
#pragma unroll
        for (int n = 2 * k; n < kChunk / 8; ++n) {
            const int tile = n / 2 * (n / 2 + 1) / 2 + k;
            uint32_t b[4];
            load_matrices(b, from + places.triangle + tile * kTriangleTileBytes + n % 2 * 512);
            mma_split(c[n], a, b);
        }
    }
}

// The state at the end of a chunk. `d` has been multiplied by the decays that are left.
template <bool is_delta>
__device__ __forceinline__ void write_state(
    PassState<is_delta>& state, const Results& d, float grown, uint32_t keys,
    const PassPlaces& places
) {
#pragma unroll
    for (int n = 0; n < kChunkDepth / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.s[n][e] *= grown;
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
        const SplitRows a = split_rows(d[2 * k], d[2 * k + 1]);
        const uint32_t at = keys + places.transposed + k * (16 * kChunkDepth * 2);
#pragma unroll
        for (int n = 0; n < kChunkDepth / 8; ++n) {
            uint32_t b[4];
            load_transposed(b, at + ((n * 16) ^ places.row));
            mma_split(state.s[n], a, b);
        }
    }
}

struct PassOutput {
    float* y;  // of the chunk's first row and the warp's first column
    int64_t stride;
    int tokens, columns;
    float skip;
};

// Computes one chunk of 16 columns.
template <bool is_delta, int warps>
__device__ __forceinline__ void compute_chunk(
    PassState<is_delta>& state, const ChunkStage<warps>& stage, const PassOutput& out,
    const PassPlaces& places, int warp, int lane
) {
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(&stage));
    const uint32_t keys = base, queries = base + 2 * kPlaneBytes;
    const uint32_t head = base + sizeof(ChunkVectors);
    const ChunkFactors& factors = stage.head.factors;
    const int token = lane % 4 * 2, column = lane / 4;
    Results by_keys = {}, y = {};
    read_state(by_keys, y, state, keys, queries, places);
    Results wanted;
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = 8 * n + token + e % 2;
            const float value = stage.values[at][warp * kPassColumns + column + e / 2 * 8];
            const float known = is_delta ? factors.grown[at] * by_keys[n][e] : 0.0f;
            wanted[n][e] = factors.beta[at] * (value - known);
            y[n][e] *= factors.grown[at];
            if constexpr (!is_delta) y[n][e] += out.skip * value;
        }
    }
    Results d = {};
    if constexpr (is_delta) {
        multiply_triangle(d, wanted, head, places);
    } else {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) d[n][e] = wanted[n][e];
        }
    }
    multiply_triangle(y, d, head + kTriangleBytes, places);
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = 8 * n + token + e % 2, own = column + e / 2 * 8;
            if (at < out.tokens && own < out.columns) out.y[at * out.stride + own] = y[n][e];
            d[n][e] *= factors.left[at];
        }
    }
    write_state(state, d, factors.grown[kChunk - 1], keys, places);
}

// Grid: parts of 16 columns per warp, heads, sequences.
template <bool is_delta, int warps>
__global__ void __launch_bounds__((warps + kCopyWarps) * kWarp, 1)
    chunk_pass_kernel(MatrixState args, ChunkSpace space) {
    extern __shared__ __align__(16) uint8_t memory[];
    ChunkStage<warps>* stages = reinterpret_cast<ChunkStage<warps>*>(memory);
    let_next_begin();
    const int warp = static_cast<int>(uniform(threadIdx.x / kWarp)), lane = threadIdx.x % kWarp;
    const int head = blockIdx.y, seq = blockIdx.z;
    const int first = args.rows.row_starts[seq], last = args.rows.row_starts[seq + 1];
    if (last - first < kLeastChunkedRows) {
        wait_for_inputs();
        return;
    }
    const int chunks = (last - first + kChunk - 1) / kChunk;
    const int key_head =
        args.is_tiled ? head % args.key_heads : head / (args.heads / args.key_heads);
    if (warp >= warps) {
        wait_for_inputs();
        const int64_t slot = first / kChunk + seq;
        const int thread = threadIdx.x - warps * kWarp;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            copy_chunk<is_delta>(
                stages[chunk % 2], space, args, slot + chunk, head, key_head,
                first + chunk * kChunk, last, thread
            );
            wait_copies<0>();
            __syncthreads();  // the chunk is there, and the one before it is no longer read
        }
        return;
    }
    const int column = (blockIdx.x * warps + warp) * kPassColumns;
    const int64_t held = args.rows.slots[seq] * args.heads + head;
    float* head_state = args.states + held * args.depth * args.width;
    PassState<is_delta> state = {};
    if (args.rows.past_lens[seq] > 0) {
        state.template move<false>(head_state, args, column, lane);
    }
    const PassPlaces places(lane);
    PassOutput out = {};
    out.stride = static_cast<int64_t>(args.heads) * args.width;
    out.y = args.y + first * out.stride + static_cast<int64_t>(head) * args.width + column;
    out.columns = args.width - column;
    out.skip = is_delta ? 0.0f : args.skip[head];
    wait_for_inputs();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        __syncthreads();
        out.tokens = last - first - chunk * kChunk;
        compute_chunk<is_delta>(state, stages[chunk % 2], out, places, warp, lane);
        out.y += kChunk * out.stride;
    }
    state.template move<true>(head_state, args, column, lane);
}

#endif  // __CUDACC__

}  // namespace exl::cuda

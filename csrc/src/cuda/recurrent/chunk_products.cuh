// Products within each chunk: the first kernel of the chunked form.
//
// Contract   chunks.cuh has the formulas and the layout of the workspace.
// Mapping    A block has one chunk of one head. Its warps normalize and split keys and queries, warp w
//            multiplies 16 keys and 16 queries with the keys before them, and all invert I + A: two
//            halves of 32 rows by forward substitution, a column per thread, then the square below
//            the diagonal by products. The block of the first head of a key head stores the vectors.
// Decays     Sums of logarithms are float64 and kept as two float32 numbers: a token that empties the
//            state leaves the decays after it as exact as before.
// Floor      Reads x once and writes the workspace, at L2 bandwidth.
#pragma once

#include "cuda/recurrent/chunks.cuh"

namespace exl::cuda {

constexpr int kProductWarps = kChunk / 16;
constexpr int kProductThreads = kProductWarps * kWarp;
constexpr int kHalfChunk = kChunk / 2;
constexpr int kInversePitch = kChunk + 4;

static_assert(kProductThreads == 128, "a thread has two rows of four columns of a square of 32");

// Operands of the inversion. They take the place of keys and queries, which are stored by then.
struct InverseSpace {
    float inner[kChunk][kInversePitch], inverse[kChunk][kInversePitch];
    float square[kHalfChunk][kHalfChunk + 4];
};

struct alignas(16) ProductSpace {
    union {
        ChunkVectors vectors;
        InverseSpace inversion;
    };
    ChunkFactors factors;
    float totals[kChunk], rests[kChunk];  // logarithms of `grown`, and what they lack
    float scales[2][kChunk];              // of the scan's keys and queries
};

#ifdef __CUDACC__

// Decays and factors of the chunk's tokens, by one warp.
template <bool is_delta>
__device__ __forceinline__ void chunk_factors(
    ProductSpace& space, const MatrixState& args, const ChunkOfSequence& chunk, int head, int lane
) {
    const float decay = args.decay[head], dt_bias = args.dt_bias[head];
    double logs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = 2 * lane + i;
        const bool is_token = token < chunk.count;
        const int64_t at = (chunk.first + (is_token ? token : 0)) * args.step_stride + head;
        float steps = softplus(args.step[at] + dt_bias), beta = steps;
        if constexpr (is_delta) {
            beta = 1.0f / (1.0f + expf(-args.beta[at]));
        } else {
            beta = steps = fminf(fmaxf(steps, args.least_step), args.largest_step);
        }
        logs[i] = is_token ? -static_cast<double>(decay) * steps : 0.0;
        space.factors.beta[token] = is_token ? beta : 0.0f;
    }
    double total = logs[0] + logs[1];
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += other;
    }
    const double last = __shfl_sync(0xffffffffu, total, kWarp - 1);
    const double sums[2] = {total - logs[1], total};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = 2 * lane + i;
        space.totals[token] = static_cast<float>(sums[i]);
        space.rests[token] = static_cast<float>(sums[i] - static_cast<float>(sums[i]));
        space.factors.grown[token] = expf(static_cast<float>(sums[i]));
        space.factors.left[token] = expf(static_cast<float>(last - sums[i]));
    }
}

// Splits 16 rows of keys or queries per warp. `scale` multiplies normalized ones. Those of the scan
// are divided by `scales`.
template <bool is_delta>
__device__ __forceinline__ void split_vectors(
    uint8_t* to, float* scales, const float* x, const MatrixState& args,
    const ChunkOfSequence& chunk, float scale, int warp, int lane
) {
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const int token = warp * 16 + i;
        const bool is_token = token < chunk.count;
        const float* row = x + (chunk.first + (is_token ? token : 0)) * args.x_stride;
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = j / 2 * 64 + 2 * lane + j % 2;
            values[j] = is_token && at < args.depth ? row[at] : 0.0f;
        }
        if constexpr (is_delta) {
            const float squares = values[0] * values[0] + values[1] * values[1] +
                                  values[2] * values[2] + values[3] * values[3];
            const float factor = rsqrtf(warp_sum(squares) + kL2Eps) * scale;
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] *= factor;
        } else {
            const float largest = fmaxf(
                fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3]))
            );
            const float2 factors = scale_to(warp_max(largest), 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] *= factors.x;
            if (lane == 0) scales[token] = factors.y;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t high, low;
            split(values[2 * j], values[2 * j + 1], high, low);
            uint8_t* at = to + vector_place(token, j * 64 + 2 * lane);
            *reinterpret_cast<uint32_t*>(at) = high;
            *reinterpret_cast<uint32_t*>(at + kPlaneBytes) = low;
        }
    }
}

// c[n] = rows 16 tile .. of `x` times keys 8 n .., for keys that do not follow the rows.
__device__ __forceinline__ void multiply_keys(
    float (&c)[kChunk / 8][4], const uint8_t* x, const uint8_t* keys, int tile, int lane
) {
    const int row = lane % 8, part = lane / 8;
    const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(x));
    const uint32_t others = static_cast<uint32_t>(__cvta_generic_to_shared(keys));
#pragma unroll
    for (int k = 0; k < kChunkDepth / 16; ++k) {
        SplitRows a;
        const int own = tile * 16 + row + part % 2 * 8;
        const uint32_t at = from + vector_place(own, 16 * k + part / 2 * 8);
        load_matrices(a.high, at);
        load_matrices(a.low, at + kPlaneBytes);
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            if (n > 2 * tile + 1) continue;
            uint32_t b[4];
            load_matrices(
                b,
                others + part / 2 * kPlaneBytes + vector_place(8 * n + row, 16 * k + part % 2 * 8)
            );
            mma_split(c[n], a, b);
        }
    }
}

// Decay from token j to token i, 0 if j follows.
__device__ __forceinline__ float decay_between(const ProductSpace& space, int i, int j) {
    if (j > i) return 0.0f;
    return expf((space.totals[i] - space.totals[j]) + (space.rests[i] - space.rests[j]));
}

// Writes A, negated, to `inner`: 16 rows of a warp.
__device__ __forceinline__ void store_inner(
    ProductSpace& space, const float (&c)[kChunk / 8][4], int tile, int lane
) {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
        if (n > 2 * tile + 1) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = tile * 16 + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
            const float decay = i == j ? 0.0f : decay_between(space, i, j);
            space.inversion.inner[i][j] = -space.factors.beta[i] * decay * c[n][e];
        }
    }
}

// Writes P to the workspace: 16 rows of a warp.
__device__ __forceinline__ void store_outer(
    uint8_t* to, const ProductSpace& space, const float (&c)[kChunk / 8][4], int tile, int lane
) {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
        if (n > 2 * tile + 1) continue;
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int i = tile * 16 + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2;
            uint32_t high, low;
            split(
                decay_between(space, i, j) * c[n][e], decay_between(space, i, j + 1) * c[n][e + 1],
                high, low
            );
            *reinterpret_cast<uint32_t*>(to + triangle_place(i, j, 0)) = high;
            *reinterpret_cast<uint32_t*>(to + triangle_place(i, j, 1)) = low;
        }
    }
}

// Inverts one of the two diagonal squares of 32 rows: a column per lane.
__device__ __forceinline__ void invert_half(InverseSpace& space, int first, int lane) {
    float x[kHalfChunk];
#pragma unroll
    for (int i = 0; i < kHalfChunk; ++i) {
        float sums[4] = {i == lane ? 1.0f : 0.0f};
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 a = *reinterpret_cast<const float4*>(&space.inner[first + i][first + m]);
            sums[0] += a.x * x[m];
            if (m + 1 < i) sums[1] += a.y * x[m + 1];
            if (m + 2 < i) sums[2] += a.z * x[m + 2];
            if (m + 3 < i) sums[3] += a.w * x[m + 3];
        }
        x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        space.inverse[first + i][first + lane] = x[i];
    }
}

// c = a * b, squares of 32: two rows of four columns per thread.
template <int pitch_a, int pitch_b, int pitch_c>
__device__ __forceinline__ void multiply_square(
    float* c, const float* a, const float* b, int thread
) {
    const int row = thread / 8 * 2, column = thread % 8 * 4;
    float sums[2][4] = {};
#pragma unroll 8
    for (int k = 0; k < kHalfChunk; ++k) {
        const float4 right = *reinterpret_cast<const float4*>(b + k * pitch_b + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float left = a[(row + i) * pitch_a + k];
            sums[i][0] += left * right.x, sums[i][1] += left * right.y;
            sums[i][2] += left * right.z, sums[i][3] += left * right.w;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float4*>(c + (row + i) * pitch_c + column) =
            make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
}

// Inverts I - `inner`, whose diagonal and upper part are not read, and stores the inverse.
__device__ __forceinline__ void store_inverse(
    uint8_t* to, InverseSpace& space, int warp, int lane
) {
    const int thread = warp * kWarp + lane;
    if (warp < 2) invert_half(space, warp * kHalfChunk, lane);
    __syncthreads();
    multiply_square<kInversePitch, kInversePitch, kHalfChunk + 4>(
        space.square[0], space.inner[kHalfChunk], space.inverse[0], thread
    );
    __syncthreads();
    multiply_square<kInversePitch, kHalfChunk + 4, kInversePitch>(
        space.inverse[kHalfChunk], &space.inverse[kHalfChunk][kHalfChunk], space.square[0], thread
    );
    __syncthreads();
    for (int pair = thread; pair < kTriangleTiles * 128; pair += kProductThreads) {
        const int tile = pair / 128, tile_row = tile >= 6 ? 3 : tile >= 3 ? 2 : tile >= 1;
        const int i = tile_row * 16 + pair % 128 / 8;
        const int j = (tile - tile_row * (tile_row + 1) / 2) * 16 + pair % 8 * 2;
        const float2 two = *reinterpret_cast<const float2*>(&space.inverse[i][j]);
        uint32_t high, low;
        split(two.x, two.y, high, low);
        *reinterpret_cast<uint32_t*>(to + triangle_place(i, j, 0)) = high;
        *reinterpret_cast<uint32_t*>(to + triangle_place(i, j, 1)) = low;
    }
}

// Grid: slots of the workspace, heads.
template <bool is_delta>
__global__ void __launch_bounds__(kProductThreads, 3) chunk_products_kernel(
    MatrixState args, ChunkSpace to
) {
    extern __shared__ __align__(16) uint8_t memory[];
    ProductSpace& space = *reinterpret_cast<ProductSpace*>(memory);
    let_next_begin();
    const int warp = static_cast<int>(uniform(threadIdx.x / kWarp)), lane = threadIdx.x % kWarp;
    const int slot = blockIdx.x, head = blockIdx.y;
    const ChunkOfSequence chunk = chunk_in_slot(args.rows, slot);
    wait_for_inputs();
    if (chunk.count == 0) return;

    const int shared = args.heads / args.key_heads;
    const int key_head = args.is_tiled ? head % args.key_heads : head / shared;
    const bool is_first = args.is_tiled ? head == key_head : head == key_head * shared;
    const float* x = args.x + key_head * args.depth;
    const float scale = rsqrtf(static_cast<float>(args.depth));
    split_vectors<is_delta>(
        space.vectors.keys, space.scales[0], x + args.key_first, args, chunk, 1.0f, warp, lane
    );
    split_vectors<is_delta>(
        space.vectors.queries, space.scales[1], x + args.query_first, args, chunk, scale, warp, lane
    );
    if (warp == 0) chunk_factors<is_delta>(space, args, chunk, head, lane);
    __syncthreads();

    if (is_first) {
        uint4* there = reinterpret_cast<uint4*>(
            to.vectors + static_cast<int64_t>(slot) * args.key_heads + key_head
        );
        const uint4* here = reinterpret_cast<const uint4*>(&space.vectors);
        constexpr int kParts = sizeof(ChunkVectors) / sizeof(uint4);
#pragma unroll 8
        for (int i = threadIdx.x; i < kParts; i += kProductThreads) there[i] = here[i];
    }
    // A warp with few keys has many queries.
    const int mirrored = kProductWarps - 1 - warp;
    float by_keys[kChunk / 8][4] = {}, by_queries[kChunk / 8][4] = {};
    if constexpr (is_delta) {
        multiply_keys(by_keys, space.vectors.keys, space.vectors.keys, warp, lane);
    }
    multiply_keys(by_queries, space.vectors.queries, space.vectors.keys, mirrored, lane);
    __syncthreads();

    ChunkHead& own = to.heads[static_cast<int64_t>(slot) * args.heads + head];
    store_outer(own.outer, space, by_queries, mirrored, lane);
    if (threadIdx.x < kChunk) {
        const int token = threadIdx.x;
        own.factors.grown[token] = space.factors.grown[token];
        own.factors.left[token] = space.factors.left[token];
        own.factors.beta[token] =
            space.factors.beta[token] * (is_delta ? 1.0f : space.scales[0][token]);
        own.factors.scale[token] = is_delta ? 1.0f : space.scales[1][token];
    }
    if constexpr (is_delta) {
        store_inner(space, by_keys, warp, lane);
        // The square above the diagonal of the inverse is not stored, and its tiles are complete.
        __syncthreads();
        store_inverse(own.inverse, space.inversion, warp, lane);
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda

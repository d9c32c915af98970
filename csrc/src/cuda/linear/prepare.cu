// Prepares the inputs of quantized linears: norm, rounding to float16, and permutation into the
// layouts that the linear kernels read.
//
// Contract   exl/cuda/linear.h (exl_cuda_prepare), exl/cuda/exchange.h (exl_cuda_prepare_sums).
// Mapping    A block takes one row of the batch and a slice of one prepared form. It reads the
//            whole row, 16 bytes at a time, like every other block of that row: a row has some
//            16 KB and stays in the L2 cache. It keeps the row in shared memory and gathers its
//            slice from there. With few rows a form has many slices, because then the gather takes
//            most of the time: it reads random words of shared memory, about 3.5 per bank and
//            cycle. Prompts have a kernel of their own (prepare_many_rows.cuh).
// Accuracy   Squares are summed in an order that depends on k alone. A LayerNorm sums values, then
//            squares of their distances from the mean.
// Exchange   With partial sums of several GPUs, every block waits for all of a row, because it reads
//            all of it. The first block of a row stores the sums, and all of them empty the stage
//            that the previous exchange has used. An early reader waits for the end of the sending
//            kernel at its own end only, so that kernels end in order. Of divided sums, the blocks
//            of a rank's rows first add up and send one slice of their row each.
// Overlap    Permutations and norm weights are loaded before the wait for the previous kernel: they
//            come from memory.
// Floor      With few rows: a launch, one read from the L2 cache and one barrier. In a CUDA graph,
//            an H200 takes 1.1 us for an almost empty kernel, and 1.4 us for one row of 4096 here.
//            With many rows: the bytes at memory bandwidth.
#include <algorithm>
#include <type_traits>

#include "cuda/common/rows.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/linear/prepare_many_rows.cuh"
#include "exl/cuda/elementwise.h"

namespace exl::cuda {

constexpr int kPair = 2;  // positions per thread and gather

// The slices of form i are blocks end[i - 1] .. end[i] - 1 in the y dimension of the grid; form 0
// starts at block 0.
struct Slices {
    int end[3];
};

// In place of ExlPartialSums: x is complete.
struct NoSums {};

__device__ __forceinline__ const ExlPartialSums& parts_of(const ExlPartialSums& sums) {
    return sums;
}
__device__ __forceinline__ const ExlPartialSums& parts_of(const ExlSharedSums& sums) {
    return sums.parts;
}

// Adds the parts of all ranks to a row of x, for all ranks. This thread has vectors of four values at
// `index`, `index` + `count` and so on.
__device__ __forceinline__ void share_row(
    const ExlSharedSums& sums, const float* x, int64_t rank_stride, int64_t row, int k, int index,
    int count
) {
    for (int i = 4 * index; i < k; i += 4 * count) {
        const float4 states = *reinterpret_cast<const float4*>(x + i);
        float values[1][4] = {{states.x, states.y, states.z, states.w}};
        add_parts<1, 1>(sums.parts, rank_stride, row, i, 0, k, values, true, nullptr);
        const uint4 quad = make_uint4(
            sent_bits(values[0][0]), sent_bits(values[0][1]), sent_bits(values[0][2]),
            sent_bits(values[0][3])
        );
        for (int rank = 0; rank < sums.parts.ranks; ++rank) {
            store_parts(sums.wholes[rank] + row + i, quad);
        }
    }
}

// The values at `from`, once they have arrived.
__device__ __forceinline__ void await_values(
    const ExlPartialSums& sums, const float* from, float (&values)[kVector]
) {
    uint4 quads[kVector / 4];
    uint32_t spins = 0;
    uint64_t since = 0;
    do {
#pragma unroll
        for (int q = 0; q < kVector / 4; ++q) quads[q] = load_parts(from + 4 * q);
    } while (max(largest(quads[0]), largest(quads[1])) == EXL_CUDA_UNSENT &&
             !gives_up(sums.ended, sums.timeout_ms, ++spins, since));
#pragma unroll
    for (int q = 0; q < kVector / 4; ++q) {
        values[4 * q] = __uint_as_float(quads[q].x);
        values[4 * q + 1] = __uint_as_float(quads[q].y);
        values[4 * q + 2] = __uint_as_float(quads[q].z);
        values[4 * q + 3] = __uint_as_float(quads[q].w);
    }
}

// Values of two adjacent positions of a form, from input features `features` (-1: padding).
template <class T>
__device__ __forceinline__ __half2 gather(const T* row, int2 features, float factor) {
    const float first = features.x < 0 ? 0.0f : to_float(row[features.x]) * factor;
    const float second = features.y < 0 ? 0.0f : to_float(row[features.y]) * factor;
    return __halves2half2(from_float<__half>(first), from_float<__half>(second));
}

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Turns the row in shared memory into its LayerNorm. `sum` is that of the values that this thread
// has stored. Each thread reads and changes its own values, so that a barrier is needed only before
// other threads read them.
template <int threads, bool is_aligned>
__device__ __forceinline__ void normalize(
    const ExlPrepare& args, float* row, float sum, float (*partial)[threads / kWarp], int end
) {
    constexpr int kWarps = threads / kWarp, kStride = threads * kVector;
    const float mean = block_sum<kWarps>(sum, partial[0]) / args.k;
    float squares = 0.0f;
    for (int i = kVector * threadIdx.x; i < end; i += kStride) {
        float values[kVector];
        load_floats(row + i, kVector, true, values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            if (is_aligned || i + j < args.k) squares += (values[j] - mean) * (values[j] - mean);
        }
    }
    const float factor = rsqrtf(block_sum<kWarps>(squares, partial[1]) / args.k + args.eps);
    for (int i = kVector * threadIdx.x; i < end; i += kStride) {
        float values[kVector], weights[kVector], biases[kVector] = {};
        load_floats(row + i, kVector, true, values);
        load_floats(args.norm + i, args.k - i, is_aligned, weights);
        if (args.norm_bias != nullptr) {
            load_floats(args.norm_bias + i, args.k - i, is_aligned, biases);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            values[j] = (values[j] - mean) * factor * weights[j] + biases[j];
        }
        store_vector(row + i, kVector, true, values);
    }
    __syncthreads();
}

// The row is kept in shared memory as T: float with a norm, otherwise unchanged as float16. For an
// RMSNorm it is multiplied by the norm's weights, and values that are read from there by the factor
// of the row. A LayerNorm is computed in shared memory.
//
// Two thread blocks fit on a multiprocessor if `Sums` are shared ones, for `prepare` below.
template <class X, class T, bool is_aligned, int threads, bool is_layer_norm, class Sums>
__global__ void
__launch_bounds__(threads, std::is_same_v<Sums, ExlSharedSums> ? 2 : 1) prepare_kernel(
    const ExlPrepare args, const Slices slices, const bool may_be_small_batch, const Sums all_sums
) {
    extern __shared__ uint4 shared[];
    __shared__ float partial[2][threads / kWarp];
    constexpr int kSlice = threads * kPair;     // positions that a block gathers per iteration
    constexpr int kStride = threads * kVector;  // values that a block reads per load
    constexpr bool has_norm = sizeof(T) == sizeof(float);
    constexpr bool has_sums = !std::is_same_v<Sums, NoSums>;
    constexpr bool has_wholes = std::is_same_v<Sums, ExlSharedSums>;
    // Loads per thread before the first is used. With sums there are as many for each rank.
    constexpr int kInFlight = has_sums ? 1 : has_norm ? 2 : 4;
    T* row = reinterpret_cast<T*>(shared);
    let_next_begin();

    const int slice = blockIdx.y;
    const int form = slice < slices.end[0] ? 0 : slice < slices.end[1] ? 1 : 2;
    const ExlPrepared to = form == 0 ? args.to[0] : form == 1 ? args.to[1] : args.to[2];
    const int first_slice = form == 0 ? 0 : form == 1 ? slices.end[0] : slices.end[1];
    const int last_slice = form == 0 ? slices.end[0] : form == 1 ? slices.end[1] : slices.end[2];
    const int step = (last_slice - first_slice) * kSlice;
    const int count = to.plain ? 0 : 32 * to.num_blocks;
    int position = (slice - first_slice) * kSlice + kPair * threadIdx.x;
    int2 features = make_int2(-1, -1);
    if (position < count) features = features_at(to, position, args.k);
    // The warm-up pass (kWarmUpRows in common.cuh) reads an operand that is available before the
    // wait and at least as long as a row.
    const void* const ready = has_norm ? static_cast<const void*>(args.norm) : to.permutation;
    const bool warms_up = gridDim.x <= kWarmUpRows && ready != nullptr && !to.plain;
    int end = warms_up ? min(args.k, kInFlight * kStride) : args.k;
    Vector<float> weights[kInFlight];
    const auto load_weights = [&](int start) {
#pragma unroll
        for (int n = 0; has_norm && n < kInFlight; ++n) {
            const int i = start + n * kStride;
            if (i < end) weights[n] = load_vector(args.norm + i, args.k - i, is_aligned);
        }
    };
    if constexpr (is_layer_norm) {
        // The loads come after two sums over the block, so that registers would be too few.
        for (int i = kVector * threadIdx.x; i < args.k; i += kStride) {
            prefetch(args.norm + i);
            if (args.norm_bias != nullptr) prefetch(args.norm_bias + i);
        }
    } else {
        load_weights(kVector * threadIdx.x);
    }
    const int batch_row = blockIdx.x;
    const bool is_padding = batch_row >= args.m;
    const Place place =
        place_of(batch_row, args.m, args.least_rows, to.num_blocks, may_be_small_batch);
    __half* out = static_cast<__half*>(to.out);
    // A first iteration with `is_real` false is the warm-up pass.
#pragma unroll 1
    for (bool is_real = !warms_up;; is_real = true) {
        [[maybe_unused]] const int64_t sums_row = static_cast<int64_t>(batch_row) * args.k;
        [[maybe_unused]] const int64_t rank_stride = static_cast<int64_t>(args.m) * args.k;
        if (is_real) {
            if constexpr (has_sums) {
                const int early = parts_of(all_sums).early_rank;
                if (early < 0) {
                    wait_for_inputs();
                } else if (gridDim.x > kWarmUpRows && !is_padding) {
                    const float* first = parts_of(all_sums).parts + early * rank_stride;
                    if constexpr (has_wholes) {
                        const bool is_own = batch_row >> all_sums.row_shift == all_sums.own;
                        if (!is_own) first = all_sums.wholes[all_sums.own];
                    }
                    await_first(parts_of(all_sums), first + sums_row);
                }
            } else {
                wait_for_inputs();
            }
            end = args.k;
        }
        if (is_padding && to.plain) {
            if constexpr (has_sums) wait_for_inputs();
            return;
        }
        if constexpr (has_sums) {
            const int index = blockIdx.y * threads + threadIdx.x, count = gridDim.y * threads;
            bool has_spent = is_real && !is_padding;
            if constexpr (has_wholes) {
                const int shift = all_sums.spent_shift;
                if (has_spent && all_sums.spent_whole != nullptr) {
                    empty_values(all_sums.spent_whole + sums_row, args.k, index, count);
                }
                has_spent &= shift < 0 || batch_row >> shift == all_sums.own;
            }
            if (has_spent) {
                empty_row(parts_of(all_sums), rank_stride, sums_row, args.k, index, count);
            }
            if constexpr (has_wholes) {
                if (is_real && !is_padding && batch_row >> all_sums.row_shift == all_sums.own) {
                    const float* states =
                        static_cast<const float*>(args.x) + batch_row * args.x_stride;
                    share_row(all_sums, states, rank_stride, sums_row, args.k, index, count);
                }
            }
        }
        const X* x = is_real ? static_cast<const X*>(args.x) + batch_row * args.x_stride
                             : static_cast<const X*>(ready);
        __half* plain = out + static_cast<int64_t>(batch_row) * args.k;
        float sum = 0.0f;  // of squares; for a LayerNorm, of values
        for (int start = kVector * threadIdx.x; !is_padding && start < end;
             start += kInFlight * kStride) {
            Vector<X> vectors[kInFlight];
#pragma unroll
            for (int n = 0; n < kInFlight; ++n) {
                const int i = start + n * kStride;
                if (!has_wholes && i < end) vectors[n] = load_vector(x + i, args.k - i, is_aligned);
            }
            if constexpr (has_sums) {
                float sums[kInFlight][kVector];
#pragma unroll
                for (int n = 0; n < kInFlight; ++n) {
                    if constexpr (has_wholes) {
                        const float* from = all_sums.wholes[all_sums.own] + sums_row + start;
                        await_values(all_sums.parts, from, sums[n]);
                    } else {
                        vectors[n].to_floats(sums[n]);
                    }
                }
                if constexpr (!has_wholes) {
                    add_parts<kInFlight, kVector / 4>(
                        all_sums, rank_stride, sums_row, start, kStride, end, sums, is_real,
                        args.norm
                    );
                }
#pragma unroll
                for (int n = 0; n < kInFlight; ++n) {
                    const int i = start + n * kStride;
                    store_vector(reinterpret_cast<X*>(vectors[n].raw), kVector, true, sums[n]);
                    if (is_real && blockIdx.y == 0 && i < end) {
                        float* const sum = parts_of(all_sums).sum + sums_row;
                        store_vector(sum + i, kVector, true, sums[n]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kInFlight; ++n) {
                const int i = start + n * kStride;
                if (i >= end) break;
                float values[kVector];
                vectors[n].to_floats(values);
                if constexpr (has_norm) {
                    float factors[kVector] = {};
                    if constexpr (!is_layer_norm) weights[n].to_floats(factors);
#pragma unroll
                    for (int j = 0; j < kVector; ++j) {
                        if constexpr (is_layer_norm) {
                            sum += values[j];
                        } else {
                            sum = add_square(sum, values[j]);
                            values[j] *= factors[j];
                        }
                    }
                } else if (to.plain) {
                    store_vector(plain + i, args.k - i, is_aligned, values);
                    continue;
                }
                store_vector(row + i, kVector, true, values);
            }
            if constexpr (!is_layer_norm) load_weights(start + kInFlight * kStride);
        }
        if (!has_norm && to.plain) return;  // never with sums
        float factor = 1.0f;
        if constexpr (is_layer_norm) {
            normalize<threads, is_aligned>(args, row, sum, partial, is_padding ? 0 : end);
        } else if constexpr (has_norm) {
            factor = rms_factor(block_sum<threads / kWarp>(sum, partial[0]), args);
        } else {
            __syncthreads();
        }

        if (to.plain) {
            for (int i = kVector * threadIdx.x; i < args.k; i += kStride) {
                float values[kVector];
                load_floats(row + i, kVector, true, values);
#pragma unroll
                for (int j = 0; j < kVector; ++j) values[j] *= factor;
                store_vector(plain + i, args.k - i, is_aligned, values);
            }
            if constexpr (has_sums) wait_for_inputs();
            return;
        }
        while (position < count) {
            const __half2 values =
                is_padding ? __half2half2(__ushort_as_half(0)) : gather(row, features, factor);
            auto* const pair = reinterpret_cast<__half2*>(out + place.at(position));
            // Keeps the compiler from skipping the computation in the warm-up pass.
            asm volatile("" ::"l"(pair), "r"(*reinterpret_cast<const uint32_t*>(&values)));
            if (!is_real) break;
            *pair = values;
            position += step;
            if (position < count) features = features_at(to, position, args.k);
        }
        if (is_real) {
            if constexpr (has_sums) wait_for_inputs();
            return;
        }
    }
}

template <class X, class T, int threads, bool is_layer_norm = false, class Sums = NoSums>
static cudaError_t prepare(
    const ExlPrepare& args, const DeviceInfo& info, int rows, void* stream, const Sums& sums = {}
) {
    Slices slices = {};
    int total = 0;
    for (int form = 0; form < 3; ++form) {
        if (form < args.count && args.to[form].plain) {
            ++total;
        } else if (form < args.count) {
            // 1024 threads per multiprocessor, if there is enough work for them. Blocks that add up
            // parts of ranks read a row of each: half as many are faster.
            const bool adds = std::is_same_v<Sums, ExlPartialSums> && rows > kWarmUpRows;
            const int most_threads = info.multiprocessors * (adds ? 512 : 1024);
            const int wanted = most_threads / threads / (rows * args.count);
            const int positions = kBlockRows * args.to[form].num_blocks;
            const int most = static_cast<int>(ceil_div(positions, threads * kPair));
            total += std::clamp(wanted, 1, most);
        }
        slices.end[form] = total;
    }
    // The blocks of a row wait for those of other rows, so that all must run at once. Two of 512
    // threads fit on a multiprocessor.
    static_assert(!std::is_same_v<Sums, ExlSharedSums> || threads <= 512, "blocks that wait");
    if (std::is_same_v<Sums, ExlSharedSums> && rows * total > 2 * info.multiprocessors) {
        return cudaErrorInvalidValue;
    }
    bool needs_row = args.norm != nullptr;
    for (int form = 0; form < args.count; ++form) needs_row |= !args.to[form].plain;
    const int64_t row_bytes = needs_row ? ceil_div(args.k, kVector) * kVector * sizeof(T) : 0;
    const bool is_aligned = rows_are_aligned(args.x, args.k, args.x_stride, sizeof(X));
    auto* kernel = prepare_kernel<X, T, true, threads, is_layer_norm, Sums>;
    if constexpr (std::is_same_v<Sums, NoSums>) {
        if (!is_aligned) kernel = prepare_kernel<X, T, false, threads, is_layer_norm, Sums>;
    } else if (!is_aligned) {
        return cudaErrorInvalidValue;
    }
    return launch(
        kernel, dim3(rows, total), dim3(threads), static_cast<size_t>(row_bytes), stream, args,
        slices, is_small_batch(info, EXL_CUDA_CHUNK_ROWS), sums
    );
}

// With a norm, the number of threads must not depend on the number of rows: the sum of squares
// depends on it. Otherwise 512 threads are faster for a single row, 1024 for more.
template <class X>
static cudaError_t prepare(const ExlPrepare& args, const DeviceInfo& info, int rows, void* stream) {
    if (args.is_layer_norm) return prepare<X, float, kNormThreads, true>(args, info, rows, stream);
    if (const int together = rows_together<X>(args, info); together > 1) {
        return prepare_many_rows<X>(args, info, rows, together, stream);
    }
    if (args.norm != nullptr) return prepare<X, float, kNormThreads>(args, info, rows, stream);
    const bool is_short = rows == 1 || args.to[0].plain;
    if (is_short) return prepare<X, __half, 512>(args, info, rows, stream);
    return prepare<X, __half, 1024>(args, info, rows, stream);
}

// Checks the operands, and returns the rows that are written, padding included; -1: invalid.
static int rows_of(const ExlPrepare& args) {
    const bool fits = args.count >= 1 && args.count <= 3 && args.m >= 0 && args.k >= 1 &&
                      args.least_rows >= 0 && args.least_rows <= EXL_CUDA_CHUNK_ROWS &&
                      (args.x_dtype == kF32 || args.x_dtype == kF16) &&
                      (args.norm != nullptr || !args.is_layer_norm) &&
                      (args.norm_bias == nullptr || args.is_layer_norm);
    if (!fits) return -1;
    int rows = args.m;
    for (int form = 0; args.m > 0 && form < args.count; ++form) {
        const ExlPrepared& to = args.to[form];
        if (!to.plain && to.num_blocks < 1) return -1;
        const int rest = args.m % EXL_CUDA_CHUNK_ROWS, padded = std::max(rest, args.least_rows);
        if (!to.plain && rest > 0 && padded > 1) {
            rows = args.m - rest + 8 * exl_cuda_row_tiles(padded);
        }
    }
    return rows;
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" {

int exl_cuda_prepare(const ExlPrepare* args, void* stream) {
    const int rows = rows_of(*args);
    if (rows < 0) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    // A single plain form needs no gather.
    const bool is_rms_norm = args->norm != nullptr && !args->is_layer_norm;
    if (is_rms_norm && args->count == 1 && args->to[0].plain) {
        return exl_cuda_rms_norm(
            args->x, args->x_dtype, args->x_stride, args->norm, args->eps, args->m, args->k,
            args->to[0].out, kF16, args->k, stream
        );
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const auto run = args->x_dtype == kF32 ? prepare<float> : prepare<__half>;
    return run(*args, info, rows, stream);
}

int exl_cuda_prepare_shared_sums(const ExlPrepare* args, const ExlSharedSums* sums, void* stream) {
    const int rows = rows_of(*args);
    const int ranks = sums->parts.ranks;
    const bool fits = rows > kWarmUpRows && args->x_dtype == kF32 && args->norm != nullptr &&
                      ranks >= 1 && ranks <= EXL_CUDA_MAX_PEERS + 1 && args->k % kVector == 0;
    if (!fits) return cudaErrorInvalidValue;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (args->is_layer_norm) {
        return prepare<float, float, kNormThreads, true>(*args, info, rows, stream, *sums);
    }
    return prepare<float, float, kNormThreads, false>(*args, info, rows, stream, *sums);
}

int exl_cuda_prepare_sums(const ExlPrepare* args, const ExlPartialSums* sums, void* stream) {
    const int rows = rows_of(*args);
    const bool fits = rows >= 0 && args->x_dtype == kF32 && args->norm != nullptr &&
                      sums->ranks >= 1 && sums->ranks <= EXL_CUDA_MAX_PEERS + 1;
    if (!fits) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (args->is_layer_norm) {
        return prepare<float, float, kNormThreads, true>(*args, info, rows, stream, *sums);
    }
    return prepare<float, float, kNormThreads, false>(*args, info, rows, stream, *sums);
}

}  // extern "C"

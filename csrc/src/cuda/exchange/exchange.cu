// Sums over the GPUs of one host without a linear before or after them, and their memory.
//
// Contract   exl/cuda/exchange.h.
// Used for   Products of kernels that cannot send their sums, sums whose reader is not
//            exl_cuda_prepare, and those of prompts.
// Mapping    Four values per thread, or a packet of a large sum. A block has a part of one row; of
//            large sums, a part of every rank's share.
// Floor      A launch and the latency of a store to another GPU; with many rows, their bytes at the
//            bandwidth of the link.
#include "cuda/exchange/partial_sums.cuh"

namespace exl::cuda {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint4 unsent() {
    constexpr uint32_t kUnsent = EXL_CUDA_UNSENT;
    return make_uint4(kUnsent, kUnsent, kUnsent, kUnsent);
}

__global__ void __launch_bounds__(kThreads) tokens_kernel(const ExlTokens args) {
    let_next_begin();
    wait_for_inputs();
    const int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (row >= args.m) return;
    int64_t token = args.token_ids[row];
    for (int i = 0; i < args.num_copies; ++i) {
        store_part(args.copies[i] + row, static_cast<uint32_t>(token));
    }
    if (args.slot != nullptr) {
        uint32_t spins = 0, bits;
        uint64_t since = 0;
        do {
            bits = load_part(args.slot + row);
        } while (bits == EXL_CUDA_UNSENT && !gives_up(args.ended, args.timeout_ms, ++spins, since));
        store_part(args.slot + row, EXL_CUDA_UNSENT);
        token = bits;
        args.token_ids[row] = token;
    }
    const bool is_own = token >= args.first && token < args.last;
    args.own_ids[row] = is_own ? token - args.first : 0;
    args.is_own[row] = is_own;
}

__global__ void __launch_bounds__(kThreads) send_kernel(
    const float* part, int64_t part_stride, const int32_t* is_own, int k, float* to,
    const ExlPartialCopies copies, int64_t stride
) {
    wait_for_inputs();
    let_next_begin();  // not earlier: the reader of sums does not wait for this kernel
    const int i = 4 * static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
    if (i >= k) return;
    const int64_t row = blockIdx.x;
    const bool is_zero = is_own != nullptr && is_own[row] == 0;
    const float* from = part + row * part_stride + i;
    uint32_t bits[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!is_zero && i + j < k) bits[j] = sent_bits(from[j]);
    }
    const uint4 quad = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    const int64_t offset = row * stride + i;
    if (i + 4 <= k && stride % 4 == 0) {
        for (int n = 0; n < copies.count; ++n) store_parts(copies.to[n] + offset, quad);
        store_parts(to + offset, quad);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (i + j >= k) continue;
        for (int n = 0; n < copies.count; ++n) store_part(copies.to[n] + offset + j, bits[j]);
        store_part(to + offset + j, bits[j]);
    }
}

__global__ void __launch_bounds__(kThreads) settle_kernel(
    const ExlPartialSums sums, const float* x, int64_t x_stride, int k
) {
    let_next_begin();
    wait_for_inputs();
    const int index = static_cast<int>(blockIdx.y * kThreads + threadIdx.x), i = 4 * index;
    if (i >= k) return;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * k;
    const int64_t rank_stride = static_cast<int64_t>(gridDim.x) * k;
    if (sums.spent != nullptr) {
        empty_row(sums, rank_stride, row, k, index, static_cast<int>(gridDim.y * kThreads));
    }
    float values[1][4] = {};
    if (x != nullptr) {
        const float* from = x + blockIdx.x * x_stride + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) values[0][j] = from[j];
    }
    add_parts<1, 1>(sums, rank_stride, row, i, 0, k, values, true, nullptr);
    for (int rank = 0; rank < sums.ranks; ++rank) {
        store_parts(sums.parts + rank * rank_stride + row + i, unsent());
    }
    *reinterpret_cast<float4*>(sums.sum + row + i) =
        make_float4(values[0][0], values[0][1], values[0][2], values[0][3]);
}

__global__ void __launch_bounds__(kThreads) gather_kernel(
    float* area, int64_t area_stride, int first, int last, float* out, int64_t out_stride,
    const ExlPartialSums waiting
) {
    let_next_begin();
    wait_for_inputs();
    const int column = first + 4 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (column >= last) return;
    float* const from = area + blockIdx.y * area_stride + column;
    uint4 quad;
    uint32_t spins = 0, latest;
    uint64_t since = 0;
    do {
        quad = load_parts(from);
        // Columns from `last` on are never sent.
        if (column + 1 >= last) quad.y = 0;
        if (column + 2 >= last) quad.z = 0;
        if (column + 3 >= last) quad.w = 0;
        latest = largest(quad);
    } while (latest == EXL_CUDA_UNSENT &&
             !gives_up(waiting.ended, waiting.timeout_ms, ++spins, since));
    store_parts(from, unsent());
    const uint32_t bits[4] = {quad.x, quad.y, quad.z, quad.w};
    float* const to = out + blockIdx.y * out_stride + column;
    if (out_stride % 4 == 0 && column + 4 <= last) {
        *reinterpret_cast<uint4*>(to) = quad;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (column + j < last) to[j] = __uint_as_float(bits[j]);
    }
}

// ---- large sums --------------------------------------------------------------------------------

constexpr int kReduceThreads = 512;
constexpr int kInFlight = 4;  // packets that a thread loads before it stores them
constexpr int kPacketValues = EXL_CUDA_PACKET_VALUES;
constexpr int kStepBits = 13;  // the largest value of a packet has 2^13 to 2^14 steps
constexpr uint32_t kNotFinite = 255;

struct Packet {
    float values[kPacketValues];
};

__device__ __forceinline__ Packet load_floats(const uint4* from) {
    Packet packet;
#pragma unroll
    for (int n = 0; n < kPacketValues / 4; ++n) {
        const uint4 bits = from[n];
        packet.values[4 * n] = __uint_as_float(bits.x);
        packet.values[4 * n + 1] = __uint_as_float(bits.y);
        packet.values[4 * n + 2] = __uint_as_float(bits.z);
        packet.values[4 * n + 3] = __uint_as_float(bits.w);
    }
    return packet;
}

__device__ __forceinline__ void store_floats(uint4* to, const Packet& packet) {
#pragma unroll
    for (int n = 0; n < kPacketValues / 4; ++n) {
        const float* const v = packet.values + 4 * n;
        to[n] = make_uint4(
            __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
            __float_as_uint(v[3])
        );
    }
}

// The packet in the form of the link (exl/cuda/exchange.h).
__device__ __forceinline__ uint4 packed(const Packet& packet) {
    uint32_t largest_bits = 0;
#pragma unroll
    for (const float value : packet.values) {
        largest_bits = max(largest_bits, __float_as_uint(value) & 0x7fffffffu);
    }
    // The step is a normal number, so that it and its inverse are exact.
    const uint32_t exponent = max(largest_bits >> 23, static_cast<uint32_t>(kStepBits + 1));
    const float inverse = __uint_as_float((2 * 127 + kStepBits - exponent) << 23);
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        words[n] = (exponent >> (2 * n)) << 30;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int steps = __float2int_rn(packet.values[2 * n + half] * inverse);
            words[n] |= (static_cast<uint32_t>(min(steps, 0x3fff)) & 0x7fffu) << (15 * half);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ Packet unpacked(const uint4& bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t exponent = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) exponent |= (words[n] >> 30) << (2 * n);
    const float step = exponent == kNotFinite ? __uint_as_float(0x7fffffffu)
                                              : __uint_as_float((exponent - kStepBits) << 23);
    Packet packet;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        packet.values[2 * n] = static_cast<float>(static_cast<int>(words[n] << 17) >> 17) * step;
        packet.values[2 * n + 1] = static_cast<float>(static_cast<int>(words[n] << 2) >> 17) * step;
    }
    return packet;
}

// Barrier of the blocks with this number on all ranks. Their stores before it are visible after it.
// `round` counts the barriers and wraps.
__device__ __forceinline__ void rank_barrier(const ExlAllReduce& args, uint32_t round) {
    __threadfence_system();
    __syncthreads();
    const int other = static_cast<int>(threadIdx.x);
    if (other < args.ranks && other != args.own) {
        const int block = static_cast<int>(blockIdx.x) * (EXL_CUDA_MAX_PEERS + 1);
        int32_t* const theirs = args.flags[other] + block + args.own;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(round) : "memory");
        const int32_t* const own = args.flags[args.own] + block + other;
        uint32_t spins = 0;
        uint64_t since = 0;
        uint32_t reached;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(reached)
                         : "l"(own)
                         : "memory");
        } while (static_cast<int32_t>(reached - round) < 0 &&
                 !gives_up(args.ended, args.timeout_ms, ++spins, since));
    }
    __syncthreads();
}

// Calls move(i, load(i)) for packets i of first .. last - 1, with several loads in flight.
template <class Load, class Move>
__device__ __forceinline__ void for_packets(int64_t first, int64_t last, Load load, Move move) {
    for (int64_t at = first + threadIdx.x; at < last; at += kInFlight * kReduceThreads) {
        decltype(load(at)) packets[kInFlight] = {};
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int64_t i = at + n * kReduceThreads;
            if (i < last) packets[n] = load(i);
        }
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
            const int64_t i = at + n * kReduceThreads;
            if (i < last) move(i, packets[n]);
        }
    }
}

// Contract: exl_cuda_exchange_all_reduce, a reduce-scatter and an all-gather. Floor: 2 (W - 1) / W times
// `count` values of 2 bytes over the link in each direction, for W ranks. EXL_CUDA_REDUCE_BLOCKS blocks
// leave most multiprocessors to other kernels. kRanks is W, or 0 for any.
template <int kRanks>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_kernel(const ExlAllReduce args) {
    constexpr int kVectors = kPacketValues / 4;  // of 16 bytes, in a packet of `values`
    const int own = args.own, ranks = kRanks > 0 ? kRanks : args.ranks;
    const int64_t packets = args.count / kPacketValues, share = (packets + ranks - 1) / ranks;
    const int64_t each = (share + gridDim.x - 1) / gridDim.x;
    const int64_t first = min(share, each * blockIdx.x), last = min(share, first + each);
    auto* const values = reinterpret_cast<uint4*>(args.values);
    // Packets of this block in the share of a rank: first .. end(rank) - 1. The last shares may be
    // shorter.
    const auto end = [&](int rank) { return min(last, packets - rank * share); };
    const auto place = [&](int rank, int64_t i) { return values + kVectors * (rank * share + i); };
    wait_for_inputs();
    const auto round = static_cast<uint32_t>(args.rounds[blockIdx.x]);

    for (int step = 1; step < ranks; ++step) {  // each rank starts with another peer
        const int rank = (own + step) % ranks;
        for_packets(
            first, end(rank), [&](int64_t i) { return load_floats(place(rank, i)); },
            [&](int64_t i, const Packet& part) {
                store_parts(args.parts[rank] + 4 * (own * share + i), packed(part));
            }
        );
    }
    rank_barrier(args, round + 1);
    for_packets(
        first, end(own),
        [&](int64_t i) {
            Packet total = {};
#pragma unroll
            for (int rank = 0; rank < ranks; ++rank) {
                const Packet part =
                    rank == own ? load_floats(place(own, i))
                                : unpacked(load_parts(args.parts[own] + 4 * (rank * share + i)));
#pragma unroll
                for (int j = 0; j < kPacketValues; ++j) total.values[j] += part.values[j];
            }
            return packed(total);
        },
        [&](int64_t i, const uint4& total) {
            for (int rank = 0; rank < ranks; ++rank) {
                if (rank != own) store_parts(args.sums[rank] + 4 * (own * share + i), total);
            }
            store_floats(place(own, i), unpacked(total));
        }
    );
    rank_barrier(args, round + 2);
    for (int rank = 0; rank < ranks; ++rank) {
        if (rank == own) continue;
        for_packets(
            first, end(rank),
            [&](int64_t i) { return load_parts(args.sums[own] + 4 * (rank * share + i)); },
            [&](int64_t i, const uint4& total) { store_floats(place(rank, i), unpacked(total)); }
        );
    }
    if (threadIdx.x == 0) args.rounds[blockIdx.x] = static_cast<int32_t>(round + 2);
}

}  // namespace

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" {

int exl_cuda_exchange_empty(void* memory, int64_t bytes, void* stream) {
    static_assert(EXL_CUDA_UNSENT == 0xffffffffu, "a byte pattern");
    return cudaMemsetAsync(
        memory, 0xff, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)
    );
}

int exl_cuda_exchange_tokens(const ExlTokens* args, void* stream) {
    const bool fits =
        args->m >= 0 && args->num_copies >= 0 && args->num_copies <= EXL_CUDA_MAX_PEERS;
    if (!fits) return cudaErrorInvalidValue;
    if (args->m == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(ceil_div(args->m, kThreads)));
    return launch(tokens_kernel, grid, dim3(kThreads), 0, stream, *args);
}

int exl_cuda_exchange_send(
    const float* part, int64_t part_stride, const int32_t* is_own, int32_t m, int32_t k, float* to,
    const ExlPartialCopies* copies, int64_t stride, void* stream
) {
    const bool fits = m >= 0 && k >= 1 && copies->count >= 0 && copies->count <= EXL_CUDA_MAX_PEERS;
    if (!fits) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(k, 4 * kThreads)));
    return launch(
        send_kernel, grid, dim3(kThreads), 0, stream, part, part_stride, is_own, k, to, *copies,
        stride
    );
}

int exl_cuda_exchange_gather(
    float* area, int64_t area_stride, int32_t m, int32_t first, int32_t last, float* out,
    int64_t out_stride, const ExlPartialSums* waiting, void* stream
) {
    const bool fits = m >= 0 && first >= 0 && first % 4 == 0 && area_stride % 4 == 0;
    if (!fits) return cudaErrorInvalidValue;
    if (m == 0 || last <= first) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(ceil_div(last - first, 4 * kThreads)), m);
    return launch(
        gather_kernel, grid, dim3(kThreads), 0, stream, area, area_stride, first, last, out,
        out_stride, *waiting
    );
}

int exl_cuda_exchange_settle(
    const ExlPartialSums* sums, const float* x, int64_t x_stride, int32_t m, int32_t k, void* stream
) {
    const bool fits =
        m >= 0 && k >= 4 && k % 4 == 0 && sums->ranks >= 1 && sums->ranks <= EXL_CUDA_MAX_PEERS + 1;
    if (!fits) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(k, 4 * kThreads)));
    return launch(settle_kernel, grid, dim3(kThreads), 0, stream, *sums, x, x_stride, k);
}

int exl_cuda_exchange_all_reduce(const ExlAllReduce* args, void* stream) {
    const bool fits = args->count >= 0 && args->count % kPacketValues == 0 && args->ranks >= 1 &&
                      args->ranks <= EXL_CUDA_MAX_PEERS + 1 && args->own >= 0 &&
                      args->own < args->ranks &&
                      reinterpret_cast<uintptr_t>(args->values) % sizeof(uint4) == 0;
    if (!fits) return cudaErrorInvalidValue;
    if (args->count == 0 || args->ranks == 1) return cudaSuccess;
    const auto kernel = args->ranks == 2   ? all_reduce_kernel<2>
                        : args->ranks == 4 ? all_reduce_kernel<4>
                                           : all_reduce_kernel<0>;
    return launch(kernel, dim3(EXL_CUDA_REDUCE_BLOCKS), dim3(kReduceThreads), 0, stream, *args);
}

int exl_cuda_shared_new(int64_t bytes, void** memory, void* handle) {
    static_assert(sizeof(cudaIpcMemHandle_t) == EXL_CUDA_SHARED_HANDLE_BYTES, "a handle");
    cudaError_t error = cudaMalloc(memory, static_cast<size_t>(bytes));
    if (error == cudaSuccess) {
        error = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *memory);
        if (error != cudaSuccess) cudaFree(*memory);
    }
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the return value reports it
    return error;
}

int exl_cuda_shared_free(void* memory) { return cudaFree(memory); }

int exl_cuda_shared_open(const void* handle, void** memory) {
    const cudaError_t error = cudaIpcOpenMemHandle(
        memory, *static_cast<const cudaIpcMemHandle_t*>(handle), cudaIpcMemLazyEnablePeerAccess
    );
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the return value reports it
    return error;
}

int exl_cuda_shared_close(void* memory) { return cudaIpcCloseMemHandle(memory); }

}  // extern "C"

// The end of a column tile: sums of the warps of a cluster, then y.
//
// Always in the order of the split, so that the same inputs give the same bits. Thread blocks of a
// cluster read each other's shared memory.
#pragma once

#include "quant_unit.cuh"

namespace exl::cuda {

constexpr int kThreads = kWarps * kWarp;
constexpr int kPitch = 36;  // of a row of sums in shared memory: its lanes fall on 32 banks

#ifdef __CUDACC__

// Until all threads of the cluster have come, and what they wrote can be read.
__device__ __forceinline__ void wait_for_cluster(const QuantLinearArgs& args) {
    if (args.split_bits == 0) {
        __syncthreads();
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Four numbers of this thread block's shared memory, or from the same place in that of another one.
__device__ __forceinline__ float4 load_sums(
    const QuantLinearArgs& args, const float* from, int rank
) {
#if __CUDA_ARCH__ >= 900
    if (args.split_bits > 0) {
        float4 four;
        uint32_t address;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(address)
                     : "r"(shared_address(from)), "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "r"(address)
                     : "memory");
        return four;
    }
#endif
    return *reinterpret_cast<const float4*>(from);
}

template <class Shape>
struct WarpSums {
    alignas(16) float of[kWarps][Shape::kRows][kPitch];

    __device__ __forceinline__ void put(const Sums<Shape>& total, int warp, int lane, int m) {
        if (Shape::kIsOneRow && lane % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
            for (int c = 0; c < Shape::kKept; ++c) {
                const int row = 8 * i + 2 * (lane % 4) + c;
                if (row >= m) continue;
#pragma unroll
                for (int q = 0; q < 4; ++q) of[warp][row][8 * q + lane / 4] = total[i][q][c];
            }
        }
    }
    // Columns quad, quad + 1, quad + 2 and quad + 3, of all the cluster's warps.
    __device__ __forceinline__ float4 sum(
        const QuantLinearArgs& args, int across, int row, int quad
    ) const {
        float4 result = {};
        for (int rank = 0; rank < args.splits(); ++rank) {
#pragma unroll 4
            for (int warp = across; warp < kWarps; warp += args.wide()) {
                const float4 x = load_sums(args, &of[warp][row][quad], rank);
                result.x += x.x, result.y += x.y, result.z += x.z, result.w += x.w;
            }
        }
        return result;
    }
};

__device__ __forceinline__ void store(const QuantLinearArgs& args, int row, int column, float y) {
    const int64_t at = args.places != nullptr ? prepared_at(args.m, row, args.places[column])
                                              : row * args.y_stride + column;
    if (args.y_dtype == kF16) {
        static_cast<__half*>(args.y)[at] = from_float<__half>(y);
    } else {
        static_cast<float*>(args.y)[at] = y;
    }
}

// The cluster's sums of a tile to y.
template <class Shape>
__device__ __forceinline__ void write_tile(
    const QuantLinearArgs& args, uint32_t tile, const WarpSums<Shape>& sums
) {
    const int strips = 1 << args.part_bits(), rank = blockIdx.x & (args.splits() - 1);
    const TilePlace tile_place(args, tile);
    for (int i = rank * kThreads + threadIdx.x; i < strips * args.m * 8;
         i += args.splits() * kThreads) {
        const int quad = 4 * (i % 8), row = i / 8 % args.m, across = i / 8 / args.m;
        const StripPlace place(args, tile_place, across);
        const QuantPart& part = args.parts[place.part];
        const int first = 32 * place.strip + quad;
        const int count = min(4, part.n - first);
        if (count <= 0) continue;
        const float4 own = sums.sum(args, across, row, quad);
        const float4 up = args.is_gated() ? sums.sum(args, across + strips, row, quad) : float4{};
        const float* y_before = static_cast<const float*>(args.y) + row * args.y_stride +
                                part.first_column + first;
        float values[4] = {own.x, own.y, own.z, own.w};
        const float ups[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (c >= count) break;
            if (part.bias != nullptr) values[c] += part.bias[first + c];
            if (args.epilogue == EXL_EPILOGUE_ADD) values[c] += y_before[c];
            if (args.is_gated()) {
                const float* bias = args.parts[1].bias;
                values[c] = gate_of(args.gate, values[c]) *
                            (ups[c] + (bias != nullptr ? bias[first + c] : 0.0f));
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (c < count) store(args, row, part.first_column + first + c, values[c]);
        }
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda

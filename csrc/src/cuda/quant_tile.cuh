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

// A number of this thread block's shared memory, or from the same place in that of another one.
__device__ __forceinline__ float load_cluster(const float* from, int rank) {
    float x = 0.0f;
#if __CUDA_ARCH__ >= 900
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(from)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#endif
    return x;
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
    // Of a strip's column, of all the cluster's warps.
    __device__ __forceinline__ float sum(
        const QuantLinearArgs& args, int across, int row, int column
    ) const {
        float result = 0.0f;
        if (args.split_bits == 0) {
#pragma unroll 4
            for (int warp = across; warp < kWarps; warp += args.wide()) {
                result += of[warp][row][column];
            }
            return result;
        }
        for (int rank = 0; rank < args.splits(); ++rank) {
#pragma unroll 4
            for (int warp = across; warp < kWarps; warp += args.wide()) {
                result += load_cluster(&of[warp][row][column], rank);
            }
        }
        return result;
    }
};

// The cluster's sums of a tile to y. Little code: most of it runs once in a launch, and what takes
// the time then is to fetch it.
template <class Shape>
__device__ __forceinline__ void write_tile(
    const QuantLinearArgs& args, uint32_t tile, const WarpSums<Shape>& sums
) {
    const int strips = 1 << args.part_bits(), rank = blockIdx.x & (args.splits() - 1);
    const TilePlace tile_place(args, tile);
#pragma unroll 1
    for (int i = rank * kThreads + threadIdx.x; i < strips * args.m * 32;
         i += args.splits() * kThreads) {
        const int across = i / 32 / args.m, row = i / 32 - across * args.m;
        const StripPlace place(args, tile_place, across);
        const QuantPart& part = args.parts[place.part];
        const int of_part = 32 * place.strip + i % 32, column = part.first_column + of_part;
        if (of_part >= part.n) continue;
        int64_t at = row * args.y_stride + column;
        float y = 0.0f;
        if (args.epilogue == EXL_EPILOGUE_ADD) y = static_cast<const float*>(args.y)[at];
        if (args.places != nullptr) at = prepared_at(args.m, row, args.places[column]);
        if (part.bias != nullptr) y += part.bias[of_part];
        y += sums.sum(args, across, row, i % 32);
        if (args.is_gated()) {
            float up = sums.sum(args, across + strips, row, i % 32);
            if (args.parts[1].bias != nullptr) up += args.parts[1].bias[of_part];
            y = gate_of(args.gate, y) * up;
        }
        if (args.y_dtype == kF16) {
            static_cast<__half*>(args.y)[at] = from_float<__half>(y);
        } else {
            static_cast<float*>(args.y)[at] = y;
        }
    }
}

#endif  // __CUDACC__

}  // namespace exl::cuda

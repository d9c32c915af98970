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
    // Of a strip's column, of all the cluster's warps; `from` is its number of the strip's first warp.
    __device__ __forceinline__ float sum(const QuantLinearArgs& args, const float* from) const {
        float result = 0.0f;
        if (args.split_bits == 0) {
#pragma unroll 4
            for (int n = 0; n < kWarps >> args.wide_bits; ++n) {
                result += from[n * kWarpFloats << args.wide_bits];
            }
            return result;
        }
        for (int rank = 0; rank < args.splits(); ++rank) {
#pragma unroll 4
            for (int n = 0; n < kWarps >> args.wide_bits; ++n) {
                result += load_cluster(from + (n * kWarpFloats << args.wide_bits), rank);
            }
        }
        return result;
    }
    static constexpr int kWarpFloats = Shape::kRows * kPitch;
};

// A number of a tile, row by row of each strip, and what it needs beside the sums. Little code is
// left for the end of the tile: it runs once in most launches, and what takes the time then is to
// fetch it.
template <class Shape>
struct TileNumber {
    void* to = nullptr;  // null: there is no such number
    int from = 0;        // of WarpSums
    float bias = 0.0f, up_bias = 0.0f;
    float before = 0.0f;

    // Reads nothing that earlier kernels write.
    __device__ __forceinline__ TileNumber(const QuantLinearArgs& args, uint32_t tile, int i) {
        if (i >= 32 * args.m << args.part_bits()) return;
        int across = 0, row = i / 32;
        for (; row >= args.m; row -= args.m) ++across;  // four strips at most
        const StripPlace place(args, TilePlace(args, tile), across);
        const QuantPart& part = args.parts[place.part];
        const int of_part = 32 * place.strip + i % 32, column = part.first_column + of_part;
        if (of_part >= part.n) return;
        int64_t at = row * args.y_stride + column;
        if (args.places != nullptr) at = prepared_at(args.m, row, args.places[column]);
        to = static_cast<uint8_t*>(args.y) + (args.y_dtype == kF16 ? 2 : 4) * at;
        from = (across * Shape::kRows + row) * kPitch + i % 32;
        if (part.bias != nullptr) bias = part.bias[of_part];
        if (args.is_gated() && args.parts[1].bias != nullptr) up_bias = args.parts[1].bias[of_part];
    }
    // Asks for what is added to.
    __device__ __forceinline__ void read(const QuantLinearArgs& args) {
        if (to != nullptr && args.epilogue == EXL_EPILOGUE_ADD) before = *static_cast<float*>(to);
    }
    __device__ __forceinline__ void write(
        const QuantLinearArgs& args, const WarpSums<Shape>& sums
    ) const {
        if (to == nullptr) return;
        const float* own = &sums.of[0][0][0] + from;
        float y = before + bias + sums.sum(args, own);
        if (args.is_gated()) {
            const float up = up_bias + sums.sum(args, own + (sums.kWarpFloats << args.part_bits()));
            y = gate_of(args.gate, y) * up;
        }
        if (args.y_dtype == kF16) {
            *static_cast<__half*>(to) = from_float<__half>(y);
        } else {
            *static_cast<float*>(to) = y;
        }
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

// Epilogue of the decode kernel: split-K reduction over the warps of a cluster, then bias, gate and
// store.
//
// The reduction adds the k-slices in a fixed order, so that the same inputs give the same bits. The
// thread blocks of a cluster read each other's sums through distributed shared memory.
#pragma once

#include "cuda/common/predicated.cuh"
#include "cuda/elementwise/gate.cuh"
#include "cuda/exchange/partial_sums.cuh"
#include "cuda/linear/prepared.cuh"
#include "cuda/linear/quant_k_tile.cuh"

namespace exl::cuda {

constexpr int kThreads = kWarps * kWarp;
// Floats from one row of sums to the next in shared memory. The lanes of a store fall on 32
// different banks.
constexpr int kPitch = 36;

#ifdef __CUDACC__

// Barrier of all threads of the cluster. Writes before it are visible after it.
__device__ __forceinline__ void sync_cluster(const QuantLinearArgs& args) {
    if (args.split_bits == 0) {
        __syncthreads();
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Loads a float from the shared memory of the cluster's thread block `rank`, at the address that
// `from` has in this block.
__device__ __forceinline__ float load_remote(const float* from, int rank) {
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

// Sums of all warps of a thread block for one output tile.
template <class Shape>
struct WarpSums {
    alignas(16) float values[kWarps][Shape::kRows][kPitch];

    __device__ __forceinline__ void store(
        const PanelSums<Shape>& total, int warp, int lane, int m
    ) {
        if (Shape::kIsOneRow && lane % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
            for (int c = 0; c < Shape::kLaneRows; ++c) {
                const int row = 8 * i + 2 * (lane % 4) + c;
                if (row >= m) continue;
#pragma unroll
                for (int q = 0; q < 4; ++q) values[warp][row][8 * q + lane / 4] = total[i][q][c];
            }
        }
    }
    // Adds one output's sums of all warps of the cluster that work on its panel. `from` is the sum
    // of the first of these warps in this thread block.
    __device__ __forceinline__ float reduce(const QuantLinearArgs& args, const float* from) const {
        float result = 0.0f;
        if (args.split_bits == 0) {
#pragma unroll 4
            for (int n = 0; n < kWarps >> args.panel_bits; ++n) {
                result += from[n * kWarpFloats << args.panel_bits];
            }
            return result;
        }
        for (int rank = 0; rank < args.splits(); ++rank) {
#pragma unroll 4
            for (int n = 0; n < kWarps >> args.panel_bits; ++n) {
                result += load_remote(from + (n * kWarpFloats << args.panel_bits), rank);
            }
        }
        return result;
    }
    static constexpr int kWarpFloats = Shape::kRows * kPitch;
};

// One output element of a tile, and its operands other than the sums. The elements are numbered
// panel by panel, in each panel row by row.
//
// Addresses and bias are computed ahead of the main loop, so that the epilogue is short. Most
// launches run it once, and then fetching its instructions takes most of its time.
template <class Shape>
struct OutputElement {
    void* to = nullptr;  // null: no such element
    int from = 0;        // index of the first sum in WarpSums
    float bias = 0.0f, up_bias = 0.0f;
    float addend = 0.0f;

    // Reads nothing that previous kernels write, so that it can run before `wait_for_inputs`.
    __device__ __forceinline__ OutputElement(const QuantLinearArgs& args, uint32_t tile, int i) {
        if (i >= 32 * args.m << args.part_panel_bits()) return;
        int panel = 0, row = i / 32;
        for (; row >= args.m; row -= args.m) ++panel;  // at most four panels
        const PanelLocation location(args, TileLocation(args, tile), panel);
        const QuantPart& part = args.parts[location.part];
        const int part_column = 32 * location.panel + i % 32;
        const int column = part.first_column + part_column;
        if (part_column >= part.n) return;
        int64_t index = row * args.y_stride + column;
        if (args.inverse_permutation != nullptr) {
            index = prepared_at(args.m, row, args.inverse_permutation[column]);
        }
        to = static_cast<uint8_t*>(args.y) + (args.y_dtype == kF16 ? 2 : 4) * index;
        from = (panel * Shape::kRows + row) * kPitch + i % 32;
        if (part.bias != nullptr) bias = part.bias[part_column];
        if (args.is_gated() && args.parts[1].bias != nullptr) {
            up_bias = args.parts[1].bias[part_column];
        }
    }
    // Starts the load of y where the product is added to it.
    __device__ __forceinline__ void load_addend(const QuantLinearArgs& args) {
        if (to != nullptr && args.epilogue == EXL_EPILOGUE_ADD) addend = *static_cast<float*>(to);
    }
    // Nothing is stored unless `is_real`.
    __device__ __forceinline__ void store(
        const QuantLinearArgs& args, const WarpSums<Shape>& sums, bool is_real
    ) const {
        if (to == nullptr) return;
        const float* own = &sums.values[0][0][0] + from;
        float y = addend + bias + sums.reduce(args, own);
        if (args.has_activation()) {
            float up = 1.0f;
            if (args.is_gated()) {
                const float* up_sums = own + (sums.kWarpFloats << args.part_panel_bits());
                up = up_bias + sums.reduce(args, up_sums);
            }
            y = gated(args.gate, y, up);
        }
        if (args.y_dtype == kF16) {
            store_if(is_real, static_cast<__half*>(to), from_float<__half>(y));
        } else if (args.copies.count > 0) {
            if (!is_real) return;
            const uint32_t bits = sent_bits(y);
            send_part(args.copies, static_cast<float*>(to) - static_cast<float*>(args.y), bits);
            store_part(static_cast<float*>(to), bits);
        } else {
            store_if(is_real, static_cast<float*>(to), y);
        }
    }
};

#endif  // __CUDACC__

}  // namespace exl::cuda

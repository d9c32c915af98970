// The end of a column tile: sums of a block's warps, of the blocks that share the tile, then y.
//
// Always in the order of the split, so that the same inputs give the same bits: the block that
// comes last adds up what all have left in the workspace, itself included.
#pragma once

#include "quant_unit.cuh"

namespace exl::cuda {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kPitch = 36;  // of a row of sums in shared memory: its lanes fall on 32 banks

#ifdef __CUDACC__

__device__ __forceinline__ void add(float4& to, const float4& x) {
    to.x += x.x, to.y += x.y, to.z += x.z, to.w += x.w;
}

template <int kTiles>
struct WarpSums {
    alignas(16) float of[kWarps][8 * kTiles][kPitch];

    __device__ __forceinline__ void put(const Sums<kTiles>& total, int warp, int lane, int m) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int row = 8 * i + 2 * (lane % 4) + c % 2;
                if (row < m) of[warp][row][8 * (c / 2) + lane / 4] = total[i][c / 4][c % 4];
            }
        }
    }
    // Columns quad, quad + 1, quad + 2 and quad + 3.
    __device__ __forceinline__ float4 sum(int across, int wide, int row, int quad) const {
        float4 result = {};
#pragma unroll 4
        for (int warp = across; warp < kWarps; warp += wide) {
            add(result, *reinterpret_cast<const float4*>(&of[warp][row][quad]));
        }
        return result;
    }
};

// Where the sums of a tile come from: the block's warps, or the blocks that share it.
template <int kTiles>
struct TileSums {
    const WarpSums<kTiles>* warps;
    const float* partials;  // null: `warps` has them all
    int first_block, last_block;
    int wide, m;

    __device__ __forceinline__ float4 at(int across, int row, int quad) const {
        if (partials == nullptr) return warps->sum(across, wide, row, quad);
        const int64_t size = wide * m * 32;
        const float* from = partials + (across * m + row) * 32 + quad;
        const auto* first = reinterpret_cast<const float4*>(from + (2 * first_block + 1) * size);
        float4 result = __ldcg(first);
#pragma unroll 4
        for (int block = first_block + 1; block <= last_block; ++block) {
            add(result, __ldcg(reinterpret_cast<const float4*>(from + 2 * block * size)));
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

template <int kTiles>
__device__ void write_tile(
    const QuantLinearArgs& args, int group, int tile, const TileSums<kTiles>& sums
) {
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    const int strips = is_gated ? args.wide / 2 : args.wide;
    for (int i = threadIdx.x; i < strips * args.m * 8; i += kThreads) {
        const int quad = 4 * (i % 8), row = i / 8 % args.m, across = i / 8 / args.m;
        const StripPlace place(args, group, tile, across);
        const QuantPart& part = args.parts[place.part];
        const int first = 32 * place.strip + quad;
        const int count = min(4, part.n - first);
        if (count <= 0) continue;
        const float4 own = sums.at(across, row, quad);
        const float4 up = is_gated ? sums.at(across + strips, row, quad) : float4{};
        const float* y_before = static_cast<const float*>(args.y) + row * args.y_stride +
                                part.first_column + first;
        float values[4] = {own.x, own.y, own.z, own.w};
        const float ups[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (c >= count) break;
            if (part.bias != nullptr) values[c] += part.bias[first + c];
            if (args.epilogue == EXL_EPILOGUE_ADD) values[c] += y_before[c];
            if (is_gated) {
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

// Sums of a block's share of a tile to y; or to the workspace, and the last block to come adds up.
template <int kTiles>
__device__ void finish_tile(
    const QuantLinearArgs& args, const TileWalk& walk, const WarpSums<kTiles>& warps,
    bool* is_last_to_come
) {
    const uint32_t length = args.groups[walk.group].length, end = walk.end(args);
    TileSums<kTiles> sums = {&warps, nullptr, 0, 0, args.wide, args.m};
    if (walk.begin > 0 || end < length) {
        uint32_t start = walk.tile * length;
        for (uint32_t i = 0; i < walk.group; ++i) {
            start += args.groups[i].tiles * args.groups[i].length;
        }
        const int block = blockIdx.x, size = args.wide * args.m * 32;
        const int first = start / args.run, last = (start + length - 1) / args.run;
        float* to = args.partials + static_cast<int64_t>(2 * block + (block == first)) * size;
        for (int i = threadIdx.x; i < size / 4; i += kThreads) {
            reinterpret_cast<float4*>(to)[i] =
                warps.sum(i / 8 / args.m, args.wide, i / 8 % args.m, 4 * (i % 8));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            // The fences of one thread order what the barriers have ordered for it. The count goes
            // up to the number of blocks and back to zero.
            const uint32_t others = last - first;
            __threadfence();
            *is_last_to_come = atomicInc(&args.counters[first], others) == others;
            __threadfence();
        }
        __syncthreads();
        if (!*is_last_to_come) return;
        sums.partials = args.partials;
        sums.first_block = first, sums.last_block = last;
    }
    write_tile(args, walk.group, walk.tile, sums);
}

#endif  // __CUDACC__

}  // namespace exl::cuda

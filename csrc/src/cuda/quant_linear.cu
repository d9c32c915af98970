// y[m, n] = x[m, k] @ w (+ bias), of quantized matrices, for few rows: weights are read once for
// every 32 rows of the batch.
//
// Floor      strips * strip_bytes bytes over the memory's bandwidth.
// Mapping    The grid covers the multiprocessors once and shares out the bytes (quant_work.cuh);
//            every warp streams units through a ring of its own (quant_stream.cuh), turns codes into
//            A fragments in registers (quant_decode.cuh) and multiplies them with 8, 16 or 32 rows
//            of prepared inputs. Warps beside each other in a tile of several strips read the same
//            inputs at about the same time, through the first-level cache.
// Sums       float32. A unit is summed up before its scale is applied, units along a warp's share,
//            then warps, then blocks, always in this order. Codes count from 2^(bits - 1); zeros
//            and minimums become one more number a column, times the sum of a unit's inputs, which
//            a product with ones yields.
// Overlap    Weights fill the rings before the kernel ahead has ended, and a block leaves half of a
//            multiprocessor to the next kernel, which does the same.
#include <algorithm>

#include "quant_decode.cuh"
#include "quant_stream.cuh"

namespace exl::cuda {

namespace {

#ifndef EXL_TUNE_MINB
#define EXL_TUNE_MINB 2
#endif
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kChunkRows = 32;
constexpr int kPitch = 36;  // of a row of sums in shared memory: its lanes fall on 32 banks
constexpr int kCounters = 1024;  // of the workspace, and the most blocks of a grid
constexpr int kMostWide = 4;

// As much as leaves room for two blocks on a multiprocessor (228 KiB on 9.0, 164 KiB on 8.0).
__host__ __device__ constexpr int ring_bytes(int row_tiles) { return row_tiles == 4 ? 8960 : 10880; }
constexpr int sums_bytes(int row_tiles) {
    return kWarps * 8 * row_tiles * kPitch * static_cast<int>(sizeof(float));
}
constexpr int shared_bytes(int row_tiles) {
    return kWarps * (static_cast<int>(sizeof(RingState)) + ring_bytes(row_tiles)) +
           sums_bytes(row_tiles);
}

// ---- a unit ------------------------------------------------------------------------------------

// Sums of 32 columns and 8 * kTiles rows of the batch, as the C fragments lie.
template <int kTiles>
using Sums = float[kTiles][2][4];

// Rows of a block of the inputs, for this lane: 8 halves of each tile.
template <int kTiles>
struct InputRows {
    uint4 of_tile[kTiles];

    __device__ __forceinline__ void load(const __half* x) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            of_tile[i] = *reinterpret_cast<const uint4*>(x + i * 8 * 32);
        }
    }
};

template <int kStep, class Codes, int kTiles, bool kHasOffsets>
__device__ __forceinline__ void add_step(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const Codes& codes,
    const InputRows<kTiles>& rows
) {
    uint32_t left[4], right[4];
    codes.template fragment<0, kStep>(left);
    codes.template fragment<1, kStep>(right);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const uint4& of = rows.of_tile[i];
        const uint32_t b0 = kStep ? of.z : of.x, b1 = kStep ? of.w : of.y;
        mma_16816(sums[i][0], left, b0, b1);
        mma_16816(sums[i][1], right, b0, b1);
        if constexpr (kHasOffsets) {
            constexpr uint32_t kOnes = half_twice(1);
            const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
            mma_16816(input_sums[i], ones, b0, b1);
        }
    }
}

#ifndef EXL_TUNE_PIPE
template <int kCount, int kBits, int kTiles, bool kHasOffsets>
__device__ __forceinline__ void add_some(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const uint8_t* blocks, const __half* x,
    int block_halves, int lane
) {
    InputRows<kTiles> rows[kCount];
    BlockCodes<kBits> codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        rows[i].load(x + i * block_halves);
        codes[i].load(blocks + i * 128 * kBits, lane);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        add_step<0, BlockCodes<kBits>, kTiles, kHasOffsets>(sums, input_sums, codes[i], rows[i]);
        add_step<1, BlockCodes<kBits>, kTiles, kHasOffsets>(sums, input_sums, codes[i], rows[i]);
    }
}

template <int kBits, int kTiles, bool kHasOffsets>
__device__ __forceinline__ void add_blocks(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const uint8_t* blocks, int count,
    const __half* x, int block_halves, int lane
) {
    constexpr int kAtOnce = 4 / kTiles;
    if constexpr (kAtOnce > 1) {
        for (; count >= kAtOnce; count -= kAtOnce) {
            add_some<kAtOnce, kBits, kTiles, kHasOffsets>(
                sums, input_sums, blocks, x, block_halves, lane
            );
            blocks += kAtOnce * 128 * kBits;
            x += kAtOnce * block_halves;
        }
    }
#pragma unroll 1
    for (; count > 0; --count) {
        add_some<1, kBits, kTiles, kHasOffsets>(sums, input_sums, blocks, x, block_halves, lane);
        blocks += 128 * kBits;
        x += block_halves;
    }
}
#else
template <int kBits, int kTiles, bool kHasOffsets>
__device__ __forceinline__ void add_blocks(
    Sums<kTiles>& sums, float (&input_sums)[kTiles][4], const uint8_t* blocks, int count,
    const __half* x, int block_halves, int lane
) {
    InputRows<kTiles> rows, next_rows;
    BlockCodes<kBits> codes, next_codes;
    rows.load(x);
    codes.load(blocks, lane);
#pragma unroll 2
    for (int left = count - 1; left >= 0; --left) {
        // The next block's, or once more the last one's.
        x += left > 0 ? block_halves : 0;
        blocks += left > 0 ? 128 * kBits : 0;
        next_rows.load(x);
        next_codes.load(blocks, lane);
        add_step<0, BlockCodes<kBits>, kTiles, kHasOffsets>(sums, input_sums, codes, rows);
        add_step<1, BlockCodes<kBits>, kTiles, kHasOffsets>(sums, input_sums, codes, rows);
        rows = next_rows;
        codes = next_codes;
    }
}

#endif

// Scales or minimums of the lane's columns g, g + 8, g + 16, g + 24.
__device__ __forceinline__ void load_factors(
    float (&to)[4], const uint8_t* from, int scale_bytes, int g
) {
    if (scale_bytes == 4) {
        const float4 four = reinterpret_cast<const float4*>(from)[g];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const uint2 four = reinterpret_cast<const uint2*>(from)[g];
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
        const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
        to[0] = first.x, to[1] = first.y, to[2] = second.x, to[3] = second.y;
    }
}

// total += the unit at `bytes`, times the inputs at `x` (of this lane in block 0 of the matrix).
template <int kTiles, bool kHasOffsets>
__device__ __forceinline__ void add_unit(
    Sums<kTiles>& total, const QuantPart& part, uint32_t unit, const uint8_t* bytes,
    const __half* x, int block_halves, int lane
) {
    const int count = unit >> 24, bits = unit >> 16 & 0xff, first_block = unit & 0xffff;
    const uint8_t* blocks = bytes + part.header_bytes;
    x += first_block * block_halves;
    Sums<kTiles> sums = {};
    float input_sums[kTiles][4] = {};
    switch (bits) {
#define EXL_WIDTH(width)                                                                        \
    case width:                                                                                 \
        add_blocks<width, kTiles, kHasOffsets>(                                                 \
            sums, input_sums, blocks, count, x, block_halves, lane                              \
        );                                                                                      \
        break;
        EXL_WIDTH(2)
        EXL_WIDTH(3)
        EXL_WIDTH(4)
        EXL_WIDTH(5)
        EXL_WIDTH(6)
        EXL_WIDTH(8)
#undef EXL_WIDTH
    }
    float scales[4], offsets[4];
    load_factors(scales, bytes, part.scale_bytes, lane / 4);
    if constexpr (kHasOffsets) {
        const uint8_t* from = bytes + 32 * part.scale_bytes;
        const float middle = static_cast<float>(1 << (bits - 1));
        if (part.offset_kind == EXL_OFFSET_MINIMUMS) {
            load_factors(offsets, from, part.scale_bytes, lane / 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) offsets[i] += scales[i] * middle;
        } else if (part.offset_kind == EXL_OFFSET_ZEROS) {
            const uchar4 zeros = reinterpret_cast<const uchar4*>(from)[lane / 4];
            offsets[0] = scales[0] * (middle - zeros.x);
            offsets[1] = scales[1] * (middle - zeros.y);
            offsets[2] = scales[2] * (middle - zeros.z);
            offsets[3] = scales[3] * (middle - zeros.w);
        } else {
            offsets[0] = offsets[1] = offsets[2] = offsets[3] = 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float& to = total[i][c / 4][c % 4];
            to = fmaf(scales[c / 2], sums[i][c / 4][c % 4], to);
            if constexpr (kHasOffsets) to = fmaf(offsets[c / 2], input_sums[i][c % 2], to);
        }
    }
}

// ---- the end of a tile ---------------------------------------------------------------------------

template <int kTiles>
struct WarpSums {
    float of[kWarps][8 * kTiles][kPitch];

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
    __device__ __forceinline__ float sum(int across, int wide, int row, int column) const {
        float result = 0.0f;
        for (int warp = across; warp < kWarps; warp += wide) result += of[warp][row][column];
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

    __device__ __forceinline__ float at(int across, int row, int column) const {
        if (partials == nullptr) return warps->sum(across, wide, row, column);
        const int size = wide * m * 32;
        const float* from = partials + (across * m + row) * 32 + column;
        float result = __ldcg(from + static_cast<int64_t>(2 * first_block + 1) * size);
        for (int block = first_block + 1; block <= last_block; ++block) {
            result += __ldcg(from + static_cast<int64_t>(2 * block) * size);
        }
        return result;
    }
};

__device__ __forceinline__ void store(const QuantLinearArgs& args, int row, int column, float y) {
    const int64_t at = row * args.y_stride + column;
    if (args.y_dtype == kF16) {
        static_cast<__half*>(args.y)[at] = from_float<__half>(y);
    } else if (args.epilogue == EXL_EPILOGUE_ADD) {
        static_cast<float*>(args.y)[at] += y;
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
    for (int i = threadIdx.x; i < strips * args.m * 32; i += kThreads) {
        const int lane = i % 32, row = i / 32 % args.m, across = i / 32 / args.m;
        const StripPlace place(args, group, tile, across);
        const QuantPart& part = args.parts[place.part];
        const int column = 32 * place.strip + lane;
        if (column >= part.n) continue;
        float y = sums.at(across, row, lane) + (part.bias ? part.bias[column] : 0.0f);
        if (is_gated) {
            const float* bias = args.parts[1].bias;
            const float up = sums.at(across + strips, row, lane) + (bias ? bias[column] : 0.0f);
            y = gate_of(args.gate, y) * up;
        }
        store(args, row, part.first_column + column, y);
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
        for (int i = threadIdx.x; i < size; i += kThreads) {
            to[i] = warps.sum(i / 32 / args.m, args.wide, i / 32 % args.m, i % 32);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            // Counts up to the number of blocks and back to zero.
            const uint32_t others = last - first;
            *is_last_to_come = atomicInc(&args.counters[first], others) == others;
        }
        __syncthreads();
        if (!*is_last_to_come) return;
        __threadfence();
        sums.partials = args.partials;
        sums.first_block = first, sums.last_block = last;
    }
    write_tile(args, walk.group, walk.tile, sums);
}

// ---- the kernel ----------------------------------------------------------------------------------

template <int kTiles, bool kHasOffsets>
__global__ void __launch_bounds__(kThreads, kTiles == 4 ? 2 : EXL_TUNE_MINB) quant_linear_kernel(
    const __grid_constant__ QuantLinearArgs args
) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ bool is_last_to_come;
    constexpr int kRing = ring_bytes(kTiles);
    uint8_t* rings = shared;
    auto& warps = *reinterpret_cast<WarpSums<kTiles>*>(rings + kWarps * kRing);
    auto* states = reinterpret_cast<RingState*>(&warps + 1);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    let_next_begin();
    TileWalk walk(args, blockIdx.x);
    UnitStream<kRing, kWarps> stream(args, walk, states + warp, rings + warp * kRing, warp, lane);
    stream.fill();
    wait_for_inputs();

    // One row of inputs has no tile: all columns of B are that row, and column 0 is kept.
    const int block_halves = args.m == 1 ? 32 : kTiles * 8 * 32;
    const int lane_halves = 8 * (lane % 4) + (args.m == 1 ? 0 : 32 * (lane / 4));
    for (; walk.left > 0; walk.advance(args)) {
        const StripPlace place(args, walk.group, walk.tile, warp % args.wide);
        const QuantPart& part = args.parts[place.part];
        const __half* x = part.inputs + lane_halves;
        Sums<kTiles> total = {};
        RingEntry entry;
        do {
            entry = stream.front();
            if (entry.unit != 0) {
                add_unit<kTiles, kHasOffsets>(
                    total, part, entry.unit, stream.bytes(entry), x, block_halves, lane
                );
            }
            stream.pop(entry);
        } while (!entry.is_last);
        warps.put(total, warp, lane, args.m);
        __syncthreads();
        finish_tile(args, walk, warps, &is_last_to_come);
        __syncthreads();
    }
}

// ---- host ----------------------------------------------------------------------------------------

template <int kTiles>
cudaError_t launch_rows(
    const QuantLinearArgs& args, int blocks, bool has_offsets, cudaStream_t stream
) {
#ifdef EXL_TUNE_CARVE
    for (auto* k : {quant_linear_kernel<kTiles, true>, quant_linear_kernel<kTiles, false>})
        cudaFuncSetAttribute(reinterpret_cast<const void*>(k), cudaFuncAttributePreferredSharedMemoryCarveout, 100);
#endif
    auto* kernel = has_offsets ? quant_linear_kernel<kTiles, true> : quant_linear_kernel<kTiles, false>;
    return launch(kernel, dim3(blocks), dim3(kThreads), shared_bytes(kTiles), stream, args);
}

QuantPart part_of(const ExlQuantMatrix& w, const void* inputs, int first_column) {
    QuantPart part = {};
    part.tiles = w.tiles;
    part.units = w.units;
    part.bias = w.bias;
    part.inputs = static_cast<const __half*>(inputs);
    part.strip_bytes = static_cast<int>(w.strip_bytes);
    part.strips = static_cast<int>(ceil_div(w.n, 32));
    part.num_units = w.num_units;
    part.n = w.n;
    part.first_column = first_column;
    part.scale_bytes = w.scale_dtype == kF16 ? 2 : 4;
    part.offset_kind = w.offset_kind;
    const int offset_bytes = w.offset_kind == EXL_OFFSET_MIDDLE  ? 0
                             : w.offset_kind == EXL_OFFSET_ZEROS ? 1
                                                                 : part.scale_bytes;
    part.header_bytes = 32 * (part.scale_bytes + offset_bytes);
    return part;
}

// Shares the tiles out to at most `blocks` blocks: fewer where that saves the sharing of tiles or
// where a warp would have less than 1 KiB. The number of blocks.
int share_out(QuantLinearArgs& args, int64_t blocks) {
    const int64_t least = 1024 * kWarps / args.wide;
    blocks = std::max<int64_t>(1, std::min(blocks, args.length / least));
    const int64_t tiles = args.groups[0].tiles;
    if (args.num_groups == 1 && tiles <= blocks) {
        const int64_t even = tiles * (blocks / tiles);
        if (10 * even >= 9 * blocks) blocks = even;
    }
    args.run = static_cast<uint32_t>(ceil_div(args.length, blocks));
    return static_cast<int>(ceil_div(args.length, args.run));
}

// The most blocks of a grid: one for each multiprocessor.
int64_t most_blocks(const DeviceInfo& info) {
#ifndef EXL_TUNE_BLOCKS
#define EXL_TUNE_BLOCKS 1
#endif
    return std::min(info.multiprocessors * EXL_TUNE_BLOCKS, kCounters);
}

}  // namespace

}  // namespace exl::cuda

extern "C" {

int64_t exl_cuda_quant_linear_workspace(int32_t, int32_t max_m) {
    using namespace exl::cuda;
    DeviceInfo info;
    if (device_info(&info) != cudaSuccess) return 0;
    const int64_t rows = max_m < kChunkRows ? max_m : kChunkRows;
    return kCounters * sizeof(uint32_t) + most_blocks(info) * 2 * kMostWide * 32 * rows * sizeof(float);
}

int exl_cuda_quant_linear(const ExlQuantLinear* of, void* stream) {
    using namespace exl::cuda;
    const bool is_gated = of->epilogue == EXL_EPILOGUE_GATED;
    if (of->count < 1 || of->count > 3 || of->m < 1 || of->m > 128 || (is_gated && of->count != 2) ||
        (is_gated && of->parts[0]->n != of->parts[1]->n) ||
        (of->y_dtype != kF32 && (of->y_dtype != kF16 || of->epilogue == EXL_EPILOGUE_ADD)) ||
        of->workspace_bytes < exl_cuda_quant_linear_workspace(0, of->m)) {
        return cudaErrorInvalidValue;
    }
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    QuantLinearArgs args = {};
    bool has_offsets = false;
    int columns = 0;
    for (int i = 0; i < of->count; ++i) {
        args.parts[i] = part_of(*of->parts[i], of->inputs[i], is_gated ? 0 : columns);
        columns += of->parts[i]->n;
        has_offsets |= of->parts[i]->offset_kind != EXL_OFFSET_MIDDLE;
    }
    args.y_stride = of->y_stride;
    args.counters = static_cast<uint32_t*>(of->workspace);
    args.partials = reinterpret_cast<float*>(args.counters + kCounters);
    args.num_groups = is_gated ? 1 : of->count;
    args.y_dtype = of->y_dtype;
    args.epilogue = of->epilogue;
    args.gate = of->gate;
    for (int first = 0; first < of->m; first += kChunkRows) {
        args.m = of->m - first < kChunkRows ? of->m - first : kChunkRows;
        args.y = static_cast<uint8_t*>(of->y) + first * of->y_stride * (of->y_dtype == kF16 ? 2 : 4);
        args.wide = args.m > 8 ? 4 : args.m > 1 || is_gated ? 2 : 1;
        int64_t length = 0;
        for (uint32_t i = 0; i < args.num_groups; ++i) {
            const int strips = args.parts[i].strips;
            args.groups[i].length = args.parts[i].strip_bytes;
            args.groups[i].tiles =
                static_cast<int>(ceil_div(strips, is_gated ? args.wide / 2 : args.wide));
            length += static_cast<int64_t>(args.groups[i].tiles) * args.groups[i].length;
        }
        if (length > UINT32_MAX) return cudaErrorInvalidValue;
        args.length = static_cast<uint32_t>(length);
        for (int i = 0; i < of->count; ++i) {
            args.parts[i].inputs =
                static_cast<const __half*>(of->inputs[i]) +
                first / kChunkRows * exl_cuda_chunk_halves(kChunkRows, of->parts[i]->num_blocks);
        }
        const int blocks = share_out(args, most_blocks(info));
        const auto to = static_cast<cudaStream_t>(stream);
        const int row_tiles = exl_cuda_row_tiles(args.m);
        const cudaError_t error = row_tiles == 1   ? launch_rows<1>(args, blocks, has_offsets, to)
                                  : row_tiles == 2 ? launch_rows<2>(args, blocks, has_offsets, to)
                                                   : launch_rows<4>(args, blocks, has_offsets, to);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // extern "C"

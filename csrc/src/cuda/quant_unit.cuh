// A chunk of units of a quantized matrix times the inputs' rows that meet it, by one warp.
//
// total += scale * codes @ x + offset * sum(x) for each unit, for 32 columns and 1 row of the batch
// or some times 8; the offset is -scale * zero or a minimum, the sum of inputs a product with ones.
#pragma once

#include <type_traits>

#include "quant_decode.cuh"
#include "quant_stream.cuh"

#ifdef __CUDACC__

namespace exl::cuda {

// Rows of the batch of one launch: one, or so many tiles of 8. One row fills all columns of B.
template <int tiles, bool is_one_row>
struct RowShape {
    static constexpr int kTiles = tiles;
    static constexpr bool kIsOneRow = is_one_row;
    static constexpr int kKept = is_one_row ? 1 : 2;  // of the two adjacent columns of a C fragment
    static constexpr int kRows = is_one_row ? 1 : 8 * tiles;
    // Inputs of the next chunk are asked for a chunk ahead, where there are registers for them.
    static constexpr bool kIsAhead = tiles == 1;
};

// Sums of 32 columns, as the C fragments lie: [tile of 8 rows][8 columns][row of two].
template <class Shape>
using Sums = float[Shape::kTiles][4][Shape::kKept];

// Rows of a block of the inputs, for this lane: 8 halves of each tile.
template <int kTiles>
struct InputRows {
    uint4 of_tile[kTiles];

    // Asked for where it says so: left to the compiler, all of a unit's come after its products.
    __device__ __forceinline__ void load(const __half* x) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            uint4& to = of_tile[i];
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                         : "l"(x + i * 8 * 32));
        }
    }
};

// Scales or minimums of the lane's columns g, g + 8, g + 16, g + 24.
__device__ __forceinline__ void load_factors(
    float (&to)[4], const uint8_t* from, bool has_floats, int g
) {
    if (has_floats) {
        const float4 four = reinterpret_cast<const float4*>(from)[g];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const uint2 four = reinterpret_cast<const uint2*>(from)[g];
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
        const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
        to[0] = first.x, to[1] = first.y, to[2] = second.x, to[3] = second.y;
    }
}

// What the sums of a unit are multiplied with, of this lane's columns.
struct UnitFactors {
    float scales[4], offsets[4];

    __device__ __forceinline__ void load(const uint8_t* unit, const Chunks& chunk, int bits, int lane) {
        if (chunk.is_plain()) {  // with nothing to choose
            load_factors(scales, unit, false, lane / 4);
#pragma unroll
            for (int q = 0; q < 4; ++q) offsets[q] = -scales[q] * static_cast<float>(1 << (bits - 1));
            return;
        }
        const bool has_floats = chunk.has_floats();
        load_factors(scales, unit, has_floats, lane / 4);
        const uint8_t* from = unit + (has_floats ? 128 : 64);
        if (chunk.offset_kind() == EXL_OFFSET_MINIMUMS) {
            load_factors(offsets, from, has_floats, lane / 4);
        } else if (chunk.offset_kind() == EXL_OFFSET_ZEROS) {
            const uint32_t zeros = reinterpret_cast<const uint32_t*>(from)[lane / 4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                offsets[q] = -scales[q] * static_cast<float>(zeros >> 8 * q & 255);
            }
        } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) offsets[q] = -scales[q] * static_cast<float>(1 << (bits - 1));
        }
    }
};

// Sums of a unit, before its factors.
template <class Shape>
struct UnitSums {
    float codes[Shape::kTiles][2][4] = {};
    float inputs[Shape::kTiles][4] = {};

    template <int kStep, class Codes>
    __device__ __forceinline__ void add_step(
        const Codes& of, const InputRows<Shape::kTiles>& rows
    ) {
        constexpr uint32_t kOnes = 0x3c003c00;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        uint32_t left[4], right[4];
        of.template fragment<0, kStep>(left);
        of.template fragment<1, kStep>(right);
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i) {
            const uint4& x = rows.of_tile[i];
            const uint32_t b0 = kStep ? x.z : x.x, b1 = kStep ? x.w : x.y;
            mma_16816(codes[i][0], left, b0, b1);
            mma_16816(codes[i][1], right, b0, b1);
            mma_16816(inputs[i], ones, b0, b1);
        }
    }
    template <class Codes>
    __device__ __forceinline__ void add(const Codes& of, const InputRows<Shape::kTiles>& rows) {
        add_step<0>(of, rows);
        add_step<1>(of, rows);
    }

    template <int kBits>
    __device__ __forceinline__ void flush(Sums<Shape>& total, const UnitFactors& factors) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float scale = factors.scales[q] * unit_of_code(kBits, q);
#pragma unroll
            for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
                for (int c = 0; c < Shape::kKept; ++c) {
                    float& to = total[i][q][c];
                    to = fmaf(scale, codes[i][q / 2][2 * (q % 2) + c], to);
                    to = fmaf(factors.offsets[q], inputs[i][c], to);
                }
            }
        }
        *this = {};
    }
};

// Inputs of the launch, as a lane of a warp reads them.
struct InputReader {
    const QuantLinearArgs& args;
    int lane_halves;

    __device__ __forceinline__ InputReader(const QuantLinearArgs& args, int lane)
        : args(args), lane_halves(8 * (lane % 4) + (args.block_halves == 32 ? 0 : 32 * (lane / 4))) {
    }
    __device__ __forceinline__ const __half* at(const Chunks& chunk) const {
        return args.parts[chunk.part()].inputs + (chunk.block() * args.block_halves + lane_halves);
    }
    template <class Shape>
    __device__ __forceinline__ int pitch() const {
        return Shape::kIsOneRow ? 32 : args.block_halves;
    }
};

template <class Shape>
using ChunkRows = InputRows<Shape::kTiles>[Shape::kIsAhead ? kChunkBlocks : 1];

template <class Shape>
__device__ __forceinline__ void load_rows(
    ChunkRows<Shape>& rows, const Chunks& chunk, const InputReader& inputs
) {
    const __half* x = inputs.at(chunk);
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
        if (i < chunk.blocks()) rows[i].load(x + i * inputs.pitch<Shape>());
    }
}

// Chunks of one unit of four blocks, up to the end of the series or until the stream has a new one to
// open, all popped but the last. Inputs of the next chunk are asked for as those of this one have been
// used. `chunks` becomes what follows; whether the series is over.
template <int kBits, class Shape>
__device__ __forceinline__ bool add_whole(
    Sums<Shape>& total, ChunkRows<Shape>& rows, Chunks& chunks, ChunkStream& stream,
    const InputReader& inputs, int lane
) {
    const Chunks own = chunks;
    int header = inputs.args.parts[own.part()].header_bytes;
    asm("" : "+r"(header));  // not to be read again for every unit
    const int pitch = inputs.pitch<Shape>();
    const __half* x = inputs.at(own);
    int left = own.count();
#pragma unroll 1
    for (;;) {
        --left;
        x += kChunkBlocks * pitch;
        if (left == 0) {
            chunks = stream.next();
            x = inputs.at(chunks);
        }
        stream.wait();
        const uint8_t* bytes = stream.bytes();
        UnitFactors factors;
        factors.load(bytes, own, kBits, lane);
        UnitSums<Shape> sums;
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
            BlockCodes<kBits> codes;
            codes.load(bytes + header + i * 128 * kBits, lane);
            sums.add(codes, rows[i]);
            rows[i].load(x + i * pitch);  // of fewer blocks than four, what lies behind them too
        }
        sums.template flush<kBits>(total, factors);
        if (left == 0) return true;
        if (stream.goes_on()) {
            stream.pop_on();
            continue;
        }
        if (stream.must_open()) {
            chunks = own.last(left);
            return false;
        }
        stream.pop<false>();
    }
}

// One chunk of any units, block by block.
template <int kBits, class Shape>
__device__ __forceinline__ void add_blocks(
    Sums<Shape>& total, ChunkRows<Shape>& rows, const Chunks& chunk, const Chunks& next,
    const uint8_t* bytes, const InputReader& inputs, int lane
) {
    const int header = inputs.args.parts[chunk.part()].header_bytes;
    const int blocks = chunk.blocks(), unit_blocks = chunk.unit_blocks();
    const __half* x = inputs.at(Shape::kIsAhead ? next : chunk);
    UnitSums<Shape> sums;
    const uint8_t* unit = bytes;
    int in_unit = 0;
#pragma unroll(Shape::kIsAhead ? kChunkBlocks : 1)
    for (int i = 0; i < kChunkBlocks; ++i) {
        InputRows<Shape::kTiles>& own = rows[Shape::kIsAhead ? i : 0];
        if (i < blocks) {
            if (in_unit == 0) unit = bytes, bytes += header;
            BlockCodes<kBits> codes;
            codes.load(bytes, lane);
            bytes += 128 * kBits;
            if constexpr (!Shape::kIsAhead) own.load(x + i * inputs.pitch<Shape>());
            sums.add(codes, own);
            if (++in_unit == unit_blocks) {
                UnitFactors factors;
                factors.load(unit, chunk, kBits, lane);
                sums.template flush<kBits>(total, factors);
                in_unit = 0;
            }
        }
        if (Shape::kIsAhead && i < next.blocks()) own.load(x + i * inputs.pitch<Shape>());
    }
}

// total += chunks of the series at the front of the stream; whether a warp's share ends with them.
// `rows` are the inputs that meet the next chunk, where they are read ahead; `chunks` becomes what
// comes next.
template <class Shape>
__device__ __forceinline__ bool add_chunks(
    Sums<Shape>& total, ChunkRows<Shape>& rows, Chunks& chunks, ChunkStream& stream,
    const InputReader& inputs, int lane
) {
    const Chunks own = chunks;
    bool is_over = own.count() == 1;
    const auto add = [&](auto width) {
        constexpr int kBits = decltype(width)::value;
        if constexpr (Shape::kIsAhead) {
            if (own.is_whole()) {
                is_over = add_whole<kBits, Shape>(total, rows, chunks, stream, inputs, lane);
                return;
            }
        }
        chunks = is_over ? stream.next() : own.last(own.count() - 1);
        stream.wait();
        add_blocks<kBits, Shape>(total, rows, own, chunks, stream.bytes(), inputs, lane);
    };
    switch (own.bits()) {
        case 2: add(std::integral_constant<int, 2>()); break;
        case 3: add(std::integral_constant<int, 3>()); break;
        case 4: add(std::integral_constant<int, 4>()); break;
        case 5: add(std::integral_constant<int, 5>()); break;
        case 6: add(std::integral_constant<int, 6>()); break;
        case 8: add(std::integral_constant<int, 8>()); break;
        default:
            chunks = stream.next();
            stream.wait();
    }
    stream.pop<true>();
    const bool has_one_slot = inputs.args.slots == 1;
    if (has_one_slot && is_over) chunks = stream.front();
    if constexpr (Shape::kIsAhead) {
        if (has_one_slot || own.is_empty()) load_rows<Shape>(rows, chunks, inputs);
    }
    return is_over && own.is_last();
}

}  // namespace exl::cuda

#endif  // __CUDACC__

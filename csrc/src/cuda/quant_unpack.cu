// Quantized matrices made dense: float16 [k, columns] for a GEMM (exl_cuda_quant_unpack), and rows
// of the transpose as embeddings (exl_cuda_quant_embedding).
//
// unpack: a thread block takes one unit of four strips, a warp each. The unit's codes are loaded at
// once; block by block they are made float16 in the lanes that hold them, columns of 32 rows, and
// turned in shared memory into rows of 128 columns, 256 bytes, which go to where `order` says.
// A weight is scale * (code - zero) with one rounding: both factors are exact in float16, so that
// their product in float16 is the rounded one; other scales and minimums go through float32.
//
// Floor: bits / 8 + 2 bytes a weight. Most of them are written, and an H200 writes 3.15 TB/s (it
// copies 4.23): 37 us of 4096 x 14336, and 6 more to read 4 bits each. It takes 43.
#include <type_traits>

#include "quant_tiles.cuh"

namespace exl::cuda {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kGroupColumns = 8;  // what a thread writes of a row: 16 bytes
constexpr int kGroups = kWarps * kStripColumns / kGroupColumns;
constexpr int kGroupPairs = 16 * kGroupColumns + 4;  // of rows; 4: 8 groups meet no bank twice

// How codes become weights.
enum Form { kHalves, kFloats };

// Scales and zeros of the four columns that a lane has of its strip.
template <Form form>
struct Factors;

template <>
struct Factors<kHalves> {
    __half2 scale[4], zero[4];  // zero: 1024 more than it is

    // 1024 + code has the code as its last bits.
    __device__ __forceinline__ uint32_t weights(uint32_t codes, int quarter) const {
        const uint32_t raised = codes | 0x64006400u;
        const __half2 offset =
            __hsub2(reinterpret_cast<const __half2&>(raised), zero[quarter]);
        const __half2 product = __hmul2(offset, scale[quarter]);
        return reinterpret_cast<const uint32_t&>(product);
    }
};

template <>
struct Factors<kFloats> {
    float scale[4], zero[4], minimum[4];

    __device__ __forceinline__ float weight(uint32_t code, int quarter) const {
        return fmaf(scale[quarter], static_cast<float>(code) - zero[quarter], minimum[quarter]);
    }
    __device__ __forceinline__ uint32_t weights(uint32_t codes, int quarter) const {
        const __half2 both =
            __floats2half2_rn(weight(codes & 0xffff, quarter), weight(codes >> 16, quarter));
        return reinterpret_cast<const uint32_t&>(both);
    }
};

__device__ __forceinline__ float scale_at(const uint8_t* from, int type, int index) {
    return type == kF32 ? reinterpret_cast<const float*>(from)[index]
                        : __half2float(reinterpret_cast<const __half*>(from)[index]);
}

__device__ __forceinline__ void load_factors(
    const uint8_t* unit, const ExlQuantMatrix& w, UnitHead head, int bits, int lane,
    Factors<kHalves>& to
) {
    const uint2 scales = reinterpret_cast<const uint2*>(unit)[lane / 4];
    uint32_t zeros = (1u << (bits - 1)) * 0x01010101u;
    if (w.offset_kind == EXL_OFFSET_ZEROS) {
        zeros = reinterpret_cast<const uint32_t*>(unit + head.offsets())[lane / 4];
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32_t both = quarter < 2 ? scales.x : scales.y;
        const auto half = static_cast<unsigned short>(quarter % 2 ? both >> 16 : both);
        to.scale[quarter] = __half2half2(__ushort_as_half(half));
        const auto zero = static_cast<unsigned short>(0x6400u | (zeros >> 8 * quarter & 255));
        to.zero[quarter] = __half2half2(__ushort_as_half(zero));
    }
}

__device__ __forceinline__ void load_factors(
    const uint8_t* unit, const ExlQuantMatrix& w, UnitHead head, int bits, int lane,
    Factors<kFloats>& to
) {
    const uint8_t* offsets = unit + head.offsets();
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int index = lane / 4 * 4 + quarter;
        to.scale[quarter] = scale_at(unit, w.scale_dtype, index);
        to.zero[quarter] = w.offset_kind == EXL_OFFSET_MIDDLE  ? static_cast<float>(1 << (bits - 1))
                           : w.offset_kind == EXL_OFFSET_ZEROS ? static_cast<float>(offsets[index])
                                                               : 0.0f;
        to.minimum[quarter] =
            w.offset_kind == EXL_OFFSET_MINIMUMS ? scale_at(offsets, w.scale_dtype, index) : 0.0f;
    }
}

// Pairs of rows of the four strips' columns: [group of 8 columns][column of it][pair], padded.
using Tile = uint32_t[kGroups * kGroupPairs];

struct Output {
    __half* first;
    int64_t stride;
    int columns;
    bool is_aligned;  // rows can be written 16 bytes at a time
};

__device__ __forceinline__ void write_row(
    const Output& out, int feature, int column, const uint32_t (&halves)[4]
) {
    if (feature < 0 || column >= out.columns) return;
    __half* to = out.first + feature * out.stride + column;
    if (out.is_aligned && column + kGroupColumns <= out.columns) {
        *reinterpret_cast<uint4*>(to) = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < kGroupColumns; ++j) {
        const auto half = static_cast<unsigned short>(halves[j / 2] >> 16 * (j % 2));
        if (column + j < out.columns) to[j] = __ushort_as_half(half);
    }
}

// 32 rows of 128 columns: lanes take 8 groups of columns of 4 pairs of rows.
__device__ __forceinline__ void write_tile(
    const Tile& tile, int pair, int2 features, int column, const Output& out
) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < kGroups / 8; ++half) {
        const int group = 8 * half + lane % 8;
        uint32_t even[4], odd[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t a = tile[group * kGroupPairs + 16 * (2 * j) + pair];
            const uint32_t b = tile[group * kGroupPairs + 16 * (2 * j + 1) + pair];
            even[j] = __byte_perm(a, b, 0x5410);
            odd[j] = __byte_perm(a, b, 0x7632);
        }
        write_row(out, features.x, column + kGroupColumns * group, even);
        write_row(out, features.y, column + kGroupColumns * group, odd);
    }
}

template <Form form, int most_blocks, int bits>
__device__ __forceinline__ void unpack_unit(
    const ExlQuantMatrix& w, const ExlQuantUnit& unit, UnitHead head, int64_t strip, bool has_strip,
    int column, const Output& out, Tile* tiles
) {
    const int lane = threadIdx.x % kWarp;
    const uint8_t* from = w.tiles + strip * w.strip_bytes + unit.offset;
    Factors<form> factors;
    uint32_t words[most_blocks][bits];
    const int pair = threadIdx.x / 8;  // of rows, that this thread writes
    const int32_t* order = w.order + static_cast<int64_t>(unit.first_block) * kBlockRows;
    int2 features[most_blocks];
#pragma unroll
    for (int b = 0; b < most_blocks; ++b) {
        if (b < unit.blocks) features[b] = reinterpret_cast<const int2*>(order)[16 * b + pair];
    }
    if (has_strip) {
        load_factors(from, w, head, bits, lane, factors);
        const uint8_t* block = from + head.blocks();
#pragma unroll
        for (int b = 0; b < most_blocks; ++b, block += 128 * bits) {
            if (b >= unit.blocks) break;
            load_words<bits>(words[b], block, lane);
        }
    }
    wait_for_inputs();
    const int group = threadIdx.x / kWarp * 4;  // the strip's first
#pragma unroll
    for (int b = 0; b < most_blocks; ++b) {
        if (b >= unit.blocks) break;
        Tile& tile = tiles[b % 2];
        if (has_strip) {
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                uint32_t rows[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    rows[i] = factors.weights(codes_of<bits>(words[b], 4 * quarter + i), quarter);
                }
                // Column `lane / 4` of the group, pairs 4 t and up.
                const int at = (group + quarter) * kGroupPairs + 4 * lane;
                *reinterpret_cast<uint4*>(&tile[at]) =
                    make_uint4(rows[0], rows[1], rows[2], rows[3]);
            }
        }
        // Of two tiles: whoever writes one again has passed the barrier after its last reading.
        __syncthreads();
        write_tile(tile, pair, features[b], column, out);
    }
}

// `most_blocks`: of a unit, 1 or 4. With 1, fewer registers are taken, and so more thread blocks to
// a multiprocessor have about as much on its way: a tenth less time for groups of 32.
template <Form form, int most_blocks>
__global__ void __launch_bounds__(kThreads, 8) unpack_kernel(
    const ExlQuantMatrix w, int64_t first_strip, const Output out, UnitHead head
) {
    __shared__ alignas(16) Tile tiles[most_blocks == 1 ? 1 : 2];
    let_next_begin();
    const ExlQuantUnit unit = w.units[blockIdx.y];
    const int column = blockIdx.x * kWarps * kStripColumns;
    const int own = column + threadIdx.x / kWarp * kStripColumns;
    const int64_t strip = first_strip + own / kStripColumns;
    const bool has_strip = own < out.columns;
    const auto unpack = [&](auto width) {
        constexpr int bits = decltype(width)::value;
        unpack_unit<form, most_blocks, bits>(w, unit, head, strip, has_strip, column, out, tiles);
    };
    switch (unit.bits) {
        case 2: unpack(std::integral_constant<int, 2>()); break;
        case 3: unpack(std::integral_constant<int, 3>()); break;
        case 4: unpack(std::integral_constant<int, 4>()); break;
        case 5: unpack(std::integral_constant<int, 5>()); break;
        case 6: unpack(std::integral_constant<int, 6>()); break;
        default: unpack(std::integral_constant<int, 8>()); break;
    }
}

// One code of a block, its width known only now.
__device__ __forceinline__ uint32_t code_at(const uint8_t* block, int bits, int row, int column) {
    const int lane = 4 * (column % 8) + row / 8, pair = 4 * (column / 8) + row % 8 / 2;
    const int most = first_words(bits);
    const auto* words = reinterpret_cast<const uint32_t*>(block);
    uint32_t code = 0;
    for (int i = 0; i < num_pieces(bits, pair); ++i) {
        const Piece piece = piece_of(bits, pair, i);
        const bool is_first = piece.word < most;
        const uint32_t word = is_first ? words[lane * most + piece.word]
                                       : words[kWarp * most + lane * (bits - most) +
                                               piece.word - most];
        const uint32_t mask = (1u << piece.bits) - 1;
        code |= (word >> (piece.at + 16 * (row % 2)) & mask) << piece.first;
    }
    return code;
}

// A warp takes a unit of one column, a lane a row of each block.
__global__ void __launch_bounds__(kThreads) embedding_kernel(
    const ExlQuantMatrix w, const int64_t* token_ids, float* y, UnitHead head
) {
    let_next_begin();
    const int index = blockIdx.y * kWarps + threadIdx.x / kWarp;
    const int row = threadIdx.x % kWarp;
    const bool has_unit = index < w.num_units;
    ExlQuantUnit unit = {};
    if (has_unit) unit = w.units[index];
    wait_for_inputs();
    if (!has_unit) return;
    const int64_t token = token_ids[blockIdx.x];
    const int column = static_cast<int>(token % kStripColumns);
    const uint8_t* from = w.tiles + token / kStripColumns * w.strip_bytes + unit.offset;
    const float scale = scale_at(from, w.scale_dtype, scale_index(column));
    const uint8_t* offsets = from + head.offsets();
    float zero = 0.0f, minimum = 0.0f;
    if (w.offset_kind == EXL_OFFSET_MIDDLE) zero = static_cast<float>(1 << (unit.bits - 1));
    if (w.offset_kind == EXL_OFFSET_ZEROS) zero = offsets[scale_index(column)];
    if (w.offset_kind == EXL_OFFSET_MINIMUMS) {
        minimum = scale_at(offsets, w.scale_dtype, scale_index(column));
    }
    const int32_t* order = w.order + static_cast<int64_t>(unit.first_block) * kBlockRows;
    const uint8_t* block = from + head.blocks();
    for (int b = 0; b < unit.blocks; ++b, block += 128 * unit.bits) {
        const uint32_t code = code_at(block, unit.bits, row, column);
        const int feature = order[b * kBlockRows + row];
        if (feature < 0) continue;
        y[static_cast<int64_t>(blockIdx.x) * w.k + feature] =
            fmaf(scale, static_cast<float>(code) - zero, minimum);
    }
}

static UnitHead head_of(const ExlQuantMatrix& w) {
    return {static_cast<int>(scale_bytes_of(w.scale_dtype)), w.offset_kind};
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_quant_unpack(
    const ExlQuantMatrix* w, int32_t first_column, int32_t columns, void* out, int64_t out_stride,
    void* stream
) {
    const int64_t end = static_cast<int64_t>(first_column) + columns;
    const bool fits = first_column >= 0 && first_column % kStripColumns == 0 && columns >= 0 &&
                      end <= w->n && out_stride >= columns && w->num_units <= 65535;
    if (!fits) return cudaErrorInvalidValue;
    if (columns == 0) return cudaSuccess;
    const bool is_aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && out_stride % 8 == 0;
    const Output to = {static_cast<__half*>(out), out_stride, columns, is_aligned};
    const dim3 grid(
        static_cast<unsigned>(ceil_div(columns, kWarps * kStripColumns)), w->num_units
    );
    const bool in_halves = w->scale_dtype == kF16 && w->offset_kind != EXL_OFFSET_MINIMUMS;
    const auto of_one = in_halves ? unpack_kernel<kHalves, 1> : unpack_kernel<kFloats, 1>;
    const auto of_more = in_halves ? unpack_kernel<kHalves, kUnitBlocks>
                                   : unpack_kernel<kFloats, kUnitBlocks>;
    const auto kernel = w->num_units == w->num_blocks ? of_one : of_more;
    return launch(
        kernel, grid, dim3(kThreads), 0, stream, *w, first_column / kStripColumns, to, head_of(*w)
    );
}

extern "C" int exl_cuda_quant_embedding(
    const ExlQuantMatrix* w, const int64_t* token_ids, int32_t m, float* y, void* stream
) {
    if (m < 0) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(w->num_units, kWarps)));
    return launch(
        embedding_kernel, grid, dim3(kThreads), 0, stream, *w, token_ids, y, head_of(*w)
    );
}

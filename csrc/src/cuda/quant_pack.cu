// Repacks columns of a file's codes to the tiles of cuda.h (exl_cuda_quant_pack).
//
// A warp takes the blocks of one unit in one strip. First, lane = column, it brings a block's codes
// into shared memory as a little stream of bits for each column: the file's words as they are where
// the rows lie in order, else one byte a code. Then, lane = lane of the tile, each picks its 32
// codes and writes whole words. The four warps of a thread block take adjacent
// strips, so that a row of words is read 512 bytes at a time.
//
// Floor: the codes read and written once, 1.1 GB in 0.5 ms; picking takes some 300 instructions for
// 1024 codes, about as much again. Either is a hundredth of what a bus takes to bring the codes.
#include "quant_tiles.cuh"

namespace exl::cuda {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStageWords = 9;   // 32 codes of 8 bits, not at a word's start
constexpr int kStagePitch = 40;  // columns: lanes of a warp read rows 8 t of columns g

// Streams of bits of a block's columns in shared memory.
struct Stage {
    uint32_t (*words)[kStagePitch];
    int bits;   // of a code
    int shift;  // of row 0
    int rows;   // the rest is padding

    __device__ __forceinline__ uint32_t code(int row, int column) const {
        if (row >= rows) return 0;
        const int bit = shift + bits * row;
        const int word = bit / 32, at = bit % 32;
        uint32_t value = words[word][column] >> at;
        if (at + bits > 32) value |= words[word + 1][column] << (32 - at);
        return value & ((1u << bits) - 1);
    }
};

// One of GGML's blocks of 32 values: at which byte a float16 minimum, the fifth bits and the codes
// lie (-1: it has none). A float16 scale comes first.
struct GgmlBlock {
    int bits, bytes, minimum, high_bits, codes;
};
__host__ __device__ constexpr GgmlBlock ggml_block(int packing) {
    switch (packing) {
        case EXL_PACKING_Q4_0: return {4, 18, -1, -1, 2};
        case EXL_PACKING_Q4_1: return {4, 20, 2, -1, 4};
        case EXL_PACKING_Q5_0: return {5, 22, -1, 2, 6};
        case EXL_PACKING_Q5_1: return {5, 24, 2, 4, 8};
        default: return {8, 34, -1, -1, 2};
    }
}

// Blocks begin at any even byte.
__device__ __forceinline__ uint32_t read_word(const uint8_t* from) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

// A column's block as bytes, four to a word.
__device__ __forceinline__ void stage_ggml(
    const uint8_t* from, const GgmlBlock& block, uint32_t (*words)[kStagePitch], int lane
) {
    if (block.bits == 8) {
        for (int i = 0; i < 8; ++i) {
            words[i][lane] = read_word(from + block.codes + 4 * i) ^ 0x80808080u;
        }
        return;
    }
    const uint32_t high = block.high_bits < 0 ? 0 : read_word(from + block.high_bits);
    // Four bits to the fifth bits of four bytes.
    const auto fifth = [high](int i) {
        return ((high >> 4 * i & 15) * 0x00204081u & 0x01010101u) << 4;
    };
    for (int i = 0; i < 4; ++i) {
        const uint32_t both = read_word(from + block.codes + 4 * i);
        words[i][lane] = (both & 0x0f0f0f0fu) | fifth(i);
        words[i + 4][lane] = (both >> 4 & 0x0f0f0f0fu) | fifth(i + 4);
    }
}

// Codes of rows that lie anywhere: lane r has the source row of block row r.
__device__ __forceinline__ void stage_rows(
    const ExlQuantColumns& from, int bits, int source, int rows, int64_t column, bool is_inside,
    uint32_t (*words)[kStagePitch], int lane
) {
    const auto* stream = static_cast<const uint32_t*>(from.codes) + column;
    const auto* bytes = static_cast<const uint8_t*>(from.codes) + column;
    for (int i = 0; i < kBlockRows / 4; ++i) {
        uint32_t four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 4 * i + j;
            const int64_t at = __shfl_sync(0xffffffffu, source, row);
            if (row >= rows || !is_inside) continue;
            uint32_t code;
            if (from.packing == EXL_PACKING_BYTES) {
                code = bytes[at * from.row_stride];
            } else {
                const int64_t bit = at * bits;
                const uint32_t* here = stream + bit / 32 * from.row_stride;
                const int shift = static_cast<int>(bit % 32);
                code = here[0] >> shift;
                if (shift + bits > 32) code |= here[from.row_stride] << (32 - shift);
            }
            four |= (code & ((1u << bits) - 1)) << 8 * j;
        }
        words[i][lane] = four;
    }
}

template <int bits>
__device__ __forceinline__ void write_words(
    const uint32_t (&pairs)[kPairs], uint8_t* block, int lane
) {
    uint32_t words[bits] = {};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            if (i >= num_pieces(bits, pair)) break;
            const Piece piece = piece_of(bits, pair, i);
            const uint32_t mask = ((1u << piece.bits) - 1) * 0x00010001u;
            words[piece.word] |= (pairs[pair] >> piece.first & mask) << piece.at;
        }
    }
    store_words<bits>(words, block, lane);
}

__device__ __forceinline__ void write_block(const Stage& stage, int bits, uint8_t* to, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t pairs[kPairs];  // two codes each, in 16 bits each
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
        const int row = 8 * t + 2 * (pair % 4), column = 8 * (pair / 4) + g;
        pairs[pair] = stage.code(row, column) | stage.code(row + 1, column) << 16;
    }
    switch (bits) {
        case 2: write_words<2>(pairs, to, lane); break;
        case 3: write_words<3>(pairs, to, lane); break;
        case 4: write_words<4>(pairs, to, lane); break;
        case 5: write_words<5>(pairs, to, lane); break;
        case 6: write_words<6>(pairs, to, lane); break;
        default: write_words<8>(pairs, to, lane); break;
    }
}

// One number for each column: from [groups, columns] of T, or out of the columns' own blocks.
template <class T>
__device__ __forceinline__ void write_grid(
    const T* from, int64_t index, bool is_inside, uint8_t* to, int column
) {
    reinterpret_cast<T*>(to)[scale_index(column)] = is_inside ? from[index] : T(0);
}

__global__ void __launch_bounds__(kThreads) pack_kernel(
    const ExlQuantMatrix w, const ExlQuantColumns from, UnitHead head
) {
    __shared__ uint32_t stages[kWarps][kStageWords][kStagePitch];
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t strip = static_cast<int64_t>(blockIdx.y) * kWarps + warp;  // of these columns
    const int64_t column = strip * kStripColumns + lane;
    const bool is_inside = column < from.columns;
    if (strip * kStripColumns >= from.columns) return;

    const ExlQuantUnit unit = w.units[blockIdx.x];
    uint8_t* to =
        w.tiles + (from.first_column / kStripColumns + strip) * w.strip_bytes + unit.offset;
    const bool is_ggml = from.packing >= EXL_PACKING_Q4_0;
    const GgmlBlock ggml = ggml_block(from.packing);
    const uint8_t* own = static_cast<const uint8_t*>(from.codes) + column * from.row_stride +
                         static_cast<int64_t>(unit.first_block) * ggml.bytes;

    const int64_t index = static_cast<int64_t>(unit.group) * from.columns + column;
    if (is_ggml) {
        const auto* halves = reinterpret_cast<const uint16_t*>(own);
        write_grid(halves, 0, is_inside, to, lane);
        if (ggml.minimum >= 0) {
            write_grid(halves, ggml.minimum / 2, is_inside, to + head.offsets(), lane);
        }
    } else {
        const auto write = [&](const void* grid, int bytes, uint8_t* at) {
            const auto as = [&](auto* numbers) { write_grid(numbers, index, is_inside, at, lane); };
            if (bytes == 1) as(static_cast<const uint8_t*>(grid));
            if (bytes == 2) as(static_cast<const uint16_t*>(grid));
            if (bytes == 4) as(static_cast<const uint32_t*>(grid));
        };
        write(from.scales, head.scale_bytes, to);
        if (head.offset_kind != EXL_OFFSET_MIDDLE) {
            const bool has_zeros = head.offset_kind == EXL_OFFSET_ZEROS;
            write(from.offsets, has_zeros ? 1 : head.scale_bytes, to + head.offsets());
        }
    }
    to += head.blocks();

    const bool is_stream = from.packing == EXL_PACKING_WORDS && from.source_rows == nullptr;
    const int64_t first_bit = is_stream ? from.bit_offsets[blockIdx.x] : 0;
    for (int block = 0; block < unit.blocks; ++block, to += 128 * unit.bits) {
        // Padding comes after a block's rows.
        const int stored = from.stored_rows[(unit.first_block + block) * kBlockRows + lane];
        const int rows = __popc(__ballot_sync(0xffffffffu, stored >= 0));
        Stage stage = {stages[warp], 8, 0, rows};
        if (is_ggml) {
            if (is_inside) {
                stage_ggml(own + block * ggml.bytes, ggml, stage.words, lane);
            } else {
                for (int i = 0; i < kBlockRows / 4; ++i) stage.words[i][lane] = 0;
            }
        } else if (is_stream) {
            const int64_t bit = first_bit + static_cast<int64_t>(block) * kBlockRows * unit.bits;
            stage.bits = unit.bits;
            stage.shift = static_cast<int>(bit % 32);
            const int words = (stage.shift + rows * unit.bits + 31) / 32;
            const uint32_t* stream = static_cast<const uint32_t*>(from.codes) + column +
                                     bit / 32 * from.row_stride;
#pragma unroll
            for (int i = 0; i < kStageWords; ++i) {
                if (i < words) stage.words[i][lane] = is_inside ? stream[i * from.row_stride] : 0;
            }
        } else {
            const int source =
                stored < 0 || from.source_rows == nullptr ? stored : from.source_rows[stored];
            stage_rows(from, unit.bits, source, rows, column, is_inside, stage.words, lane);
        }
        __syncwarp();
        write_block(stage, unit.bits, to, lane);
        __syncwarp();
    }
}

// What strips begin with (cuda.h), a warp for each, once their units are there.
__global__ void __launch_bounds__(kThreads) pack_heads_kernel(
    const ExlQuantMatrix w, int first_strip, int strips, UnitHead head
) {
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int strip = blockIdx.x * kWarps + warp;
    if (strip >= strips) return;
    uint8_t* const to = w.tiles + (first_strip + strip) * w.strip_bytes;
    const bool has_minimums = head.offset_kind == EXL_OFFSET_MINIMUMS;
    float largest = 0.0f;
#pragma unroll 4
    for (int i = 0; i < w.num_units; ++i) {
        const uint8_t* unit = to + w.units[i].offset;
        const auto read = [&](const uint8_t* from) {
            return fabsf(
                head.scale_bytes == 4 ? reinterpret_cast<const float*>(from)[lane]
                                      : __half2float(reinterpret_cast<const __half*>(from)[lane])
            );
        };
        largest = fmaxf(largest, read(unit));
        if (has_minimums) largest = fmaxf(largest, read(unit + head.offsets()) / (1 << 20));
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    const int exponent = min(max(ilogbf(fmaxf(largest, 0x1p-100f)), -100), 100);
    const float unit = ldexpf(1.0f, -10 - exponent);
    if (lane < EXL_CUDA_STRIP_HEAD / 4) {
        reinterpret_cast<uint32_t*>(to)[lane] = lane == 0 ? __float_as_uint(unit) : 0;
    }
}

}  // namespace exl::cuda

extern "C" int exl_cuda_quant_pack(
    const ExlQuantMatrix* w, const ExlQuantColumns* columns, void* stream
) {
    using namespace exl::cuda;
    const ExlQuantColumns& from = *columns;
    const int64_t end = static_cast<int64_t>(from.first_column) + from.columns;
    const bool is_ggml = from.packing >= EXL_PACKING_Q4_0 && from.packing <= EXL_PACKING_Q8_0;
    const bool needs_bits = from.packing == EXL_PACKING_WORDS && from.source_rows == nullptr;
    const bool fits = from.first_column >= 0 && from.first_column % kStripColumns == 0 &&
                      from.columns > 0 && end <= w->n &&
                      (from.columns % kStripColumns == 0 || end == w->n) &&
                      from.packing >= EXL_PACKING_WORDS && from.packing <= EXL_PACKING_Q8_0 &&
                      (w->scale_dtype == kF16 || w->scale_dtype == kF32) &&
                      from.scale_dtype == w->scale_dtype && from.stored_rows != nullptr &&
                      (!needs_bits || from.bit_offsets != nullptr) &&
                      (is_ggml || from.scales != nullptr) &&
                      (is_ggml || w->offset_kind == EXL_OFFSET_MIDDLE || from.offsets != nullptr) &&
                      (!is_ggml || w->scale_dtype == kF16);
    if (!fits) return cudaErrorInvalidValue;
    const int64_t strips = ceil_div(from.columns, kStripColumns);
    const UnitHead head = {static_cast<int>(scale_bytes_of(w->scale_dtype)), w->offset_kind};
    const auto blocks = static_cast<unsigned>(ceil_div(strips, kWarps));
    const cudaError_t error = launch(
        pack_kernel, dim3(w->num_units, blocks), dim3(kThreads), 0, stream, *w, from, head
    );
    if (error != cudaSuccess) return error;
    return launch(
        pack_heads_kernel, dim3(blocks), dim3(kThreads), 0, stream, *w,
        from.first_column / kStripColumns, static_cast<int>(strips), head
    );
}

// Repacks columns from a file's layout into the packed layout.
//
// Contract   exl/cuda/linear.h (exl_cuda_quant_pack).
// Mapping    One warp repacks one k-tile of one column panel, block by block. In the first phase a
//            lane stands for a column: it copies the column's codes of the block into shared
//            memory, as a bit stream. If the file packs codes into words and has the rows in stored
//            order, the stream is the file's words unchanged, otherwise one byte per code. In the
//            second phase a lane stands for an MMA lane: it extracts its 32 codes and writes whole
//            words. The four warps of a thread block repack adjacent panels, so that one row of
//            words is read in segments of 512 bytes.
// Floor      Reading and writing the codes once: 0.5 ms for 1.1 GB. Extraction costs about 300
//            instructions per 1024 codes, which takes about as long again. Each is a hundredth of
//            the time that the bus needs to transfer the codes.
#include "cuda/linear/quant_tiles.cuh"

namespace exl::cuda {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
// Words of a column's stream: enough for 32 codes of 8 bits that do not begin at a word boundary.
constexpr int kStageWords = 9;
// Columns from one word to the next. Lanes 4 g + t read rows 8 t of columns g; with 4-bit codes
// these are words in 32 different banks.
constexpr int kStagePitch = 40;

// Codes of one block in shared memory: one bit stream per column.
struct Stage {
    uint32_t (*words)[kStagePitch];
    int bits;   // of a code
    int shift;  // bit at which row 0 begins
    int rows;   // rows from here on are padding, of code 0

    __device__ __forceinline__ uint32_t code(int row, int column) const {
        if (row >= rows) return 0;
        const int bit = shift + bits * row;
        const int word = bit / 32, at = bit % 32;
        uint32_t value = words[word][column] >> at;
        if (at + bits > 32) value |= words[word + 1][column] << (32 - at);
        return value & ((1u << bits) - 1);
    }
};

// GGML block type of 32 values, in `bytes` bytes. A float16 scale comes first. `minimum`,
// `high_bits` and `codes` are the byte offsets of a float16 minimum, of the fifth bits and of the
// codes (-1: the type has none).
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

// Reads a 32-bit word at an even byte: GGML blocks are aligned to 2 bytes only.
__device__ __forceinline__ uint32_t read_word(const uint8_t* from) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

// Stages one column's GGML block as one byte per code, four codes to a word.
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
    // Spreads four of the high bits to bit 4 of four bytes.
    const auto fifth = [high](int i) {
        return ((high >> 4 * i & 15) * 0x00204081u & 0x01010101u) << 4;
    };
    for (int i = 0; i < 4; ++i) {
        const uint32_t both = read_word(from + block.codes + 4 * i);
        words[i][lane] = (both & 0x0f0f0f0fu) | fifth(i);
        words[i + 4][lane] = (both >> 4 & 0x0f0f0f0fu) | fifth(i + 4);
    }
}

// Stages codes whose source rows are in any order, as one byte per code. Lane r passes the source
// row of row r of the block in `source`.
__device__ __forceinline__ void stage_rows(
    const ExlQuantColumns& from, int bits, int source, int rows, int64_t column, bool is_inside,
    uint32_t (*words)[kStagePitch], int lane
) {
    const auto* stream = static_cast<const uint32_t*>(from.codes) + column;
    const auto* bytes = static_cast<const uint8_t*>(from.codes) + column;
    for (int i = 0; i < kBlockRows / 4; ++i) {
        uint32_t packed = 0;
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
            packed |= (code & ((1u << bits) - 1)) << 8 * j;
        }
        words[i][lane] = packed;
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
            if (i >= num_fields(bits, pair)) break;
            const BitField field = field_of(bits, pair, i);
            const uint32_t mask = ((1u << field.bits) - 1) * 0x00010001u;
            words[field.word] |= (pairs[pair] >> field.first & mask) << field.shift;
        }
    }
    store_words<bits>(words, block, lane);
}

__device__ __forceinline__ void write_block(const Stage& stage, int bits, uint8_t* to, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t pairs[kPairs];  // two codes of 16 bits each
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

// Writes one column's scale or offset of a k-tile, and zero for padding columns. `from` is an array
// [groups, columns] of T, or the column's GGML block.
template <class T>
__device__ __forceinline__ void write_grid(
    const T* from, int64_t index, bool is_inside, uint8_t* to, int column
) {
    reinterpret_cast<T*>(to)[scale_index(column)] = is_inside ? from[index] : T(0);
}

__global__ void __launch_bounds__(kThreads) pack_kernel(
    const ExlQuantMatrix w, const ExlQuantColumns from, KTileHeader header
) {
    __shared__ uint32_t stages[kWarps][kStageWords][kStagePitch];
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t panel = static_cast<int64_t>(blockIdx.y) * kWarps + warp;  // in `from`
    const int64_t column = panel * kPanelColumns + lane;
    const bool is_inside = column < from.columns;
    if (panel * kPanelColumns >= from.columns) return;

    const ExlQuantKTile k_tile = w.k_tiles[blockIdx.x];
    uint8_t* to =
        w.tiles + (from.first_column / kPanelColumns + panel) * w.panel_bytes + k_tile.offset;
    const bool is_ggml = from.packing >= EXL_PACKING_Q4_0;
    const GgmlBlock ggml = ggml_block(from.packing);
    const uint8_t* own = static_cast<const uint8_t*>(from.codes) + column * from.row_stride +
                         static_cast<int64_t>(k_tile.first_block) * ggml.bytes;

    const int64_t index = static_cast<int64_t>(k_tile.group) * from.columns + column;
    if (is_ggml) {
        const auto* halves = reinterpret_cast<const uint16_t*>(own);
        write_grid(halves, 0, is_inside, to, lane);
        if (ggml.minimum >= 0) {
            write_grid(halves, ggml.minimum / 2, is_inside, to + header.offsets_at(), lane);
        }
    } else if (has_small_groups(header.offset_kind)) {
        constexpr int kGroupRows = kKTileBlocks * kBlockRows / kSmallGroups;
        const int64_t first = static_cast<int64_t>(k_tile.group) * kSmallGroups;
        const int64_t at = first * kGroupRows / EXL_CUDA_FACTOR_ROWS * from.columns + column;
        write_grid(static_cast<const uint16_t*>(from.scales), at, is_inside, to, lane);
        if (header.offset_kind == EXL_OFFSET_SMALL_MINIMUMS) {
            const auto* minimums = static_cast<const uint16_t*>(from.offsets);
            write_grid(minimums, at, is_inside, to + header.offsets_at(), lane);
        }
        for (int group = 0; group < kSmallGroups; ++group) {
            const int64_t index = (first + group) * from.columns + column;
            to[header.multiplier_at(lane, group)] = is_inside ? from.multipliers[index] : 0;
        }
    } else {
        const auto write = [&](const void* grid, int bytes, uint8_t* at) {
            const auto as = [&](auto* numbers) { write_grid(numbers, index, is_inside, at, lane); };
            if (bytes == 1) as(static_cast<const uint8_t*>(grid));
            if (bytes == 2) as(static_cast<const uint16_t*>(grid));
            if (bytes == 4) as(static_cast<const uint32_t*>(grid));
        };
        write(from.scales, header.scale_bytes, to);
        if (header.offset_kind != EXL_OFFSET_MIDDLE) {
            const bool has_zeros = header.offset_kind == EXL_OFFSET_ZEROS;
            write(from.offsets, has_zeros ? 1 : header.scale_bytes, to + header.offsets_at());
        }
    }
    to += header.size_bytes();

    const bool is_stream = from.packing == EXL_PACKING_WORDS && from.source_rows == nullptr;
    const int64_t first_bit = is_stream ? from.bit_offsets[blockIdx.x] : 0;
    for (int block = 0; block < k_tile.blocks; ++block, to += 128 * k_tile.bits) {
        // The padding rows of a block come after its stored rows.
        const int stored = from.stored_rows[(k_tile.first_block + block) * kBlockRows + lane];
        const int rows = __popc(__ballot_sync(0xffffffffu, stored >= 0));
        Stage stage = {stages[warp], 8, 0, rows};
        if (is_ggml) {
            if (is_inside) {
                stage_ggml(own + block * ggml.bytes, ggml, stage.words, lane);
            } else {
                for (int i = 0; i < kBlockRows / 4; ++i) stage.words[i][lane] = 0;
            }
        } else if (is_stream) {
            const int64_t bit = first_bit + static_cast<int64_t>(block) * kBlockRows * k_tile.bits;
            stage.bits = k_tile.bits;
            stage.shift = static_cast<int>(bit % 32);
            const int words = (stage.shift + rows * k_tile.bits + 31) / 32;
            const uint32_t* stream =
                static_cast<const uint32_t*>(from.codes) + column + bit / 32 * from.row_stride;
#pragma unroll
            for (int i = 0; i < kStageWords; ++i) {
                if (i < words) stage.words[i][lane] = is_inside ? stream[i * from.row_stride] : 0;
            }
        } else {
            const int source =
                stored < 0 || from.source_rows == nullptr ? stored : from.source_rows[stored];
            stage_rows(from, k_tile.bits, source, rows, column, is_inside, stage.words, lane);
        }
        __syncwarp();
        write_block(stage, k_tile.bits, to, lane);
        __syncwarp();
    }
}

// Writes the header of each column panel (exl/cuda/linear.h): the power of two that scales float16
// weights. One warp per panel. It runs after pack_kernel, because it needs the largest scale of all
// k-tiles.
__global__ void __launch_bounds__(kThreads) pack_panel_headers_kernel(
    const ExlQuantMatrix w, int first_panel, int panels, KTileHeader header
) {
    wait_for_inputs();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int panel = blockIdx.x * kWarps + warp;
    if (panel >= panels) return;
    uint8_t* const to = w.tiles + (first_panel + panel) * w.panel_bytes;
    const bool is_small = has_small_groups(header.offset_kind);
    const bool has_minimums = header.offset_kind == EXL_OFFSET_MINIMUMS ||
                              header.offset_kind == EXL_OFFSET_SMALL_MINIMUMS;
    float largest = 0.0f;
#pragma unroll 4
    for (int i = 0; i < w.num_k_tiles; ++i) {
        const uint8_t* k_tile = to + w.k_tiles[i].offset;
        const auto read = [&](const uint8_t* from) {
            return fabsf(
                header.scale_bytes == 4 ? reinterpret_cast<const float*>(from)[lane]
                                        : __half2float(reinterpret_cast<const __half*>(from)[lane])
            );
        };
        largest = fmaxf(largest, read(k_tile));
        if (has_minimums) largest = fmaxf(largest, read(k_tile + header.offsets_at()) / (1 << 20));
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    // The largest multipliers: a signed byte, one of 6 bits, or one of 4 bits.
    const int bits = w.k_tiles[0].bits;
    if (is_small) largest *= bits == 6 ? 128.0f : bits == 3 ? 32.0f : 15.0f;
    const int exponent = min(max(ilogbf(fmaxf(largest, 0x1p-100f)), -100), 100);
    const float factor = ldexpf(1.0f, -10 - exponent);
    if (lane < EXL_CUDA_PANEL_HEAD / 4) {
        reinterpret_cast<uint32_t*>(to)[lane] = lane == 0 ? __float_as_uint(factor) : 0;
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
    const bool fits =
        from.first_column >= 0 && from.first_column % kPanelColumns == 0 && from.columns > 0 &&
        end <= w->n && (from.columns % kPanelColumns == 0 || end == w->n) &&
        from.packing >= EXL_PACKING_WORDS && from.packing <= EXL_PACKING_Q8_0 &&
        (w->scale_dtype == kF16 || w->scale_dtype == kF32) && from.scale_dtype == w->scale_dtype &&
        from.stored_rows != nullptr && (!needs_bits || from.bit_offsets != nullptr) &&
        (is_ggml || from.scales != nullptr) &&
        (is_ggml || w->offset_kind == EXL_OFFSET_MIDDLE ||
         w->offset_kind == EXL_OFFSET_SMALL_MIDDLE || from.offsets != nullptr) &&
        (!is_ggml || w->scale_dtype == kF16) &&
        (!has_small_groups(w->offset_kind) ||
         (from.packing == EXL_PACKING_BYTES && from.multipliers != nullptr &&
          w->scale_dtype == kF16 && w->k % EXL_CUDA_FACTOR_ROWS == 0));
    if (!fits) return cudaErrorInvalidValue;
    const int64_t panels = ceil_div(from.columns, kPanelColumns);
    const KTileHeader header = {static_cast<int>(scale_bytes_of(w->scale_dtype)), w->offset_kind};
    const auto blocks = static_cast<unsigned>(ceil_div(panels, kWarps));
    const cudaError_t error = launch(
        pack_kernel, dim3(w->num_k_tiles, blocks), dim3(kThreads), 0, stream, *w, from, header
    );
    if (error != cudaSuccess) return error;
    return launch(
        pack_panel_headers_kernel, dim3(blocks), dim3(kThreads), 0, stream, *w,
        from.first_column / kPanelColumns, static_cast<int>(panels), header
    );
}

// Dequantizes matrices: float16 [k, columns] for a GEMM (exl_cuda_quant_unpack), and single columns
// as embeddings (exl_cuda_quant_embedding).
//
// Contract   exl/cuda/linear.h.
// Mapping    unpack: one thread block dequantizes one k-tile of four adjacent column panels, one
//            warp per panel. A warp loads all codes of its k-tile at once. Block by block, each
//            lane converts its codes to float16, 8 rows of 4 columns. The thread block transposes
//            them through shared memory into rows of 128 columns (256 bytes) and writes each row to
//            the input feature that the permutation names.
//            embedding: one warp per k-tile of one column, one lane per row of a block.
// Accuracy   One rounding per weight. With float16 scales and zeros, the scale and (code - zero)
//            are exact in float16, so that their float16 product is the correctly rounded weight.
//            Float32 scales and minimums are computed in float32 and rounded to float16 once.
// Floor      bits / 8 + 2 bytes per weight, most of them written. An H200 writes 3.15 TB/s (it
//            copies 4.23 TB/s): 37 us for 4096 x 14336 weights, and 6 us more to read 4 bits each.
//            The kernel takes 43 us.
#include <type_traits>

#include "cuda/linear/quant_tiles.cuh"

namespace exl::cuda {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kVectorColumns = 8;  // columns of a row that a thread writes at once: 16 bytes
constexpr int kVectors = kWarps * kPanelColumns / kVectorColumns;
// Words from one vector to the next in shared memory. The 4 extra words make the same word of 8
// vectors fall on 8 different banks.
constexpr int kVectorPitch = 16 * kVectorColumns + 4;

// Arithmetic that turns codes into weights: float16, or float32 rounded to float16, with one scale
// per column or with those of small groups.
enum Form { kHalves, kFloats, kSmallFloats };

__device__ __forceinline__ float number_of_e4m3(uint32_t code) {
    return 256.0f *
           __half2float(__ushort_as_half(static_cast<unsigned short>(halves_of_e4m3(code))));
}

// Replaces both codes of a pair by entries of a table, plus 128.
__device__ __forceinline__ uint32_t look_up_pair(int values, uint32_t codes) {
    const uint32_t found = look_up(values, (codes & 15) | (codes >> 12 & 0xf0));
    return (found & 0xff) | (found & 0xff00) << 8;
}

// Scales and zeros of a lane's four columns of its panel.
template <Form form>
struct Factors;

template <>
struct Factors<kHalves> {
    __half2 scale[4], zero[4];  // `zero` holds 1024 + zero

    // The float16 number 1024 + code has the code in its low mantissa bits.
    __device__ __forceinline__ uint32_t weights(uint32_t codes, int quarter, int) const {
        const uint32_t raised = codes | 0x64006400u;
        const __half2 offset = __hsub2(reinterpret_cast<const __half2&>(raised), zero[quarter]);
        const __half2 product = __hmul2(offset, scale[quarter]);
        return reinterpret_cast<const uint32_t&>(product);
    }
};

template <>
struct Factors<kFloats> {
    float scale[4], zero[4], minimum[4];
    bool is_e4m3;

    __device__ __forceinline__ float weight(uint32_t code, int quarter) const {
        const float number = is_e4m3 ? number_of_e4m3(code) : static_cast<float>(code);
        return fmaf(scale[quarter], number - zero[quarter], minimum[quarter]);
    }
    __device__ __forceinline__ uint32_t weights(uint32_t codes, int quarter, int) const {
        const __half2 both =
            __floats2half2_rn(weight(codes & 0xffff, quarter), weight(codes >> 16, quarter));
        return reinterpret_cast<const uint32_t&>(both);
    }
};

template <>
struct Factors<kSmallFloats> {
    float factor[4], minimum_factor[4];
    SmallMultipliers<kSmallGroups> multipliers;
    float middle;
    bool has_minimums;

    // `group`: the small group of both codes in the k-tile.
    __device__ __forceinline__ uint32_t weights(uint32_t codes, int quarter, int group) const {
        const float scale = factor[quarter] * (has_minimums ? multipliers.low(group, quarter)
                                                            : multipliers.whole(group, quarter));
        const float minimum =
            has_minimums ? -minimum_factor[quarter] * multipliers.high(group, quarter) : 0.0f;
        const __half2 both = __floats2half2_rn(
            fmaf(scale, static_cast<float>(codes & 0xffff) - middle, minimum),
            fmaf(scale, static_cast<float>(codes >> 16) - middle, minimum)
        );
        return reinterpret_cast<const uint32_t&>(both);
    }
};

__device__ __forceinline__ float scale_at(const uint8_t* from, int type, int index) {
    return type == kF32 ? reinterpret_cast<const float*>(from)[index]
                        : __half2float(reinterpret_cast<const __half*>(from)[index]);
}

__device__ __forceinline__ void load_factors(
    const uint8_t* k_tile, const ExlQuantMatrix& w, KTileHeader header, int bits, int lane,
    Factors<kHalves>& to
) {
    const uint2 scales = reinterpret_cast<const uint2*>(k_tile)[lane / 4];
    uint32_t zeros = middle_of(form_of(bits, w.values)) * 0x01010101u;
    if (w.offset_kind == EXL_OFFSET_ZEROS) {
        zeros = reinterpret_cast<const uint32_t*>(k_tile + header.offsets_at())[lane / 4];
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32_t pair = quarter < 2 ? scales.x : scales.y;
        const auto half = static_cast<unsigned short>(quarter % 2 ? pair >> 16 : pair);
        to.scale[quarter] = __half2half2(__ushort_as_half(half));
        const auto zero = static_cast<unsigned short>(0x6400u | (zeros >> 8 * quarter & 255));
        to.zero[quarter] = __half2half2(__ushort_as_half(zero));
    }
}

__device__ __forceinline__ void load_factors(
    const uint8_t* k_tile, const ExlQuantMatrix& w, KTileHeader header, int bits, int lane,
    Factors<kFloats>& to
) {
    const uint8_t* offsets = k_tile + header.offsets_at();
    const auto middle = static_cast<float>(middle_of(form_of(bits, w.values)));
    to.is_e4m3 = w.values == EXL_VALUES_E4M3;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int index = lane / 4 * 4 + quarter;
        to.scale[quarter] = scale_at(k_tile, w.scale_dtype, index);
        to.zero[quarter] = w.offset_kind == EXL_OFFSET_MIDDLE  ? middle
                           : w.offset_kind == EXL_OFFSET_ZEROS ? static_cast<float>(offsets[index])
                                                               : 0.0f;
        to.minimum[quarter] =
            w.offset_kind == EXL_OFFSET_MINIMUMS ? scale_at(offsets, w.scale_dtype, index) : 0.0f;
    }
}

__device__ __forceinline__ void load_factors(
    const uint8_t* k_tile, const ExlQuantMatrix& w, KTileHeader header, int bits, int lane,
    Factors<kSmallFloats>& to
) {
    to.has_minimums = w.offset_kind == EXL_OFFSET_SMALL_MINIMUMS;
    to.middle = to.has_minimums ? 0.0f : static_cast<float>(middle_of(bits));
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int index = lane / 4 * 4 + quarter;
        to.factor[quarter] = scale_at(k_tile, kF16, index);
        to.minimum_factor[quarter] =
            to.has_minimums ? scale_at(k_tile + header.offsets_at(), kF16, index) : 0.0f;
    }
    to.multipliers.load(k_tile + header.multipliers_at(), lane / 4);
}

// One block of the four panels in shared memory: [vector of 8 columns][column][pair of rows]. A
// word holds the weights of two adjacent rows. kVectorPitch pads each vector.
using StagedBlock = uint32_t[kVectors * kVectorPitch];

struct Output {
    __half* first;
    int64_t stride;
    int columns;
    bool is_aligned;  // rows can be stored 16 bytes at a time
};

__device__ __forceinline__ void write_row(
    const Output& out, int feature, int column, const uint32_t (&halves)[4]
) {
    if (feature < 0 || column >= out.columns) return;
    __half* to = out.first + feature * out.stride + column;
    if (out.is_aligned && column + kVectorColumns <= out.columns) {
        *reinterpret_cast<uint4*>(to) = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < kVectorColumns; ++j) {
        const auto half = static_cast<unsigned short>(halves[j / 2] >> 16 * (j % 2));
        if (column + j < out.columns) to[j] = __ushort_as_half(half);
    }
}

// Writes the 32 rows of 128 columns. The lanes of a warp cover 8 vectors of columns times 4 pairs
// of rows at a time.
__device__ __forceinline__ void write_block(
    const StagedBlock& staged, int pair, int2 features, int column, const Output& out
) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < kVectors / 8; ++half) {
        const int vector = 8 * half + lane % 8;
        uint32_t even[4], odd[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t a = staged[vector * kVectorPitch + 16 * (2 * j) + pair];
            const uint32_t b = staged[vector * kVectorPitch + 16 * (2 * j + 1) + pair];
            even[j] = __byte_perm(a, b, 0x5410);
            odd[j] = __byte_perm(a, b, 0x7632);
        }
        write_row(out, features.x, column + kVectorColumns * vector, even);
        write_row(out, features.y, column + kVectorColumns * vector, odd);
    }
}

template <Form form, int max_blocks, int bits>
__device__ __forceinline__ void unpack_k_tile(
    const ExlQuantMatrix& w, const ExlQuantKTile& k_tile, KTileHeader header, int64_t panel,
    bool has_panel, int column, const Output& out, StagedBlock* buffers
) {
    const int lane = threadIdx.x % kWarp;
    const uint8_t* from = w.tiles + panel * w.panel_bytes + k_tile.offset;
    Factors<form> factors;
    uint32_t words[max_blocks][bits];
    const int pair = threadIdx.x / 8;  // pair of rows that this thread writes
    const int32_t* permutation =
        w.permutation + static_cast<int64_t>(k_tile.first_block) * kBlockRows;
    int2 features[max_blocks];
#pragma unroll
    for (int b = 0; b < max_blocks; ++b) {
        if (b < k_tile.blocks) {
            features[b] = reinterpret_cast<const int2*>(permutation)[16 * b + pair];
        }
    }
    if (has_panel) {
        load_factors(from, w, header, bits, lane, factors);
        const uint8_t* block = from + header.size_bytes();
#pragma unroll
        for (int b = 0; b < max_blocks; ++b, block += 128 * bits) {
            if (b >= k_tile.blocks) break;
            load_words<bits>(words[b], block, lane);
        }
    }
    wait_for_inputs();
    const int vector = threadIdx.x / kWarp * 4;  // first vector of the panel
#pragma unroll
    for (int b = 0; b < max_blocks; ++b) {
        if (b >= k_tile.blocks) break;
        StagedBlock& staged = buffers[b % 2];
        if (has_panel) {
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                uint32_t rows[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t codes = pair_codes<bits>(words[b], 4 * quarter + i);
                    if (bits == 4 && is_table(w.values)) codes = look_up_pair(w.values, codes);
                    rows[i] = factors.weights(codes, quarter, 2 * b + i / 2);
                }
                // Column lane / 4 of the vector, pairs of rows 4 t .. 4 t + 3 with t = lane % 4.
                const int at = (vector + quarter) * kVectorPitch + 4 * lane;
                *reinterpret_cast<uint4*>(&staged[at]) =
                    make_uint4(rows[0], rows[1], rows[2], rows[3]);
            }
        }
        // One barrier per block suffices, because the two buffers alternate: a warp that writes a
        // buffer again has passed the barrier after the last read of that buffer.
        __syncthreads();
        write_block(staged, pair, features[b], column, out);
    }
}

// max_blocks: largest number of blocks of a k-tile, 1 or 4. The variant for 1 needs fewer
// registers, so that more thread blocks fit on a multiprocessor and keep about as many bytes in
// flight. It takes a tenth less time for groups of 32.
template <Form form, int max_blocks>
__global__ void __launch_bounds__(kThreads, 8) unpack_kernel(
    const ExlQuantMatrix w, int64_t first_panel, const Output out, KTileHeader header
) {
    __shared__ alignas(16) StagedBlock buffers[max_blocks == 1 ? 1 : 2];
    let_next_begin();
    const ExlQuantKTile k_tile = w.k_tiles[blockIdx.y];
    const int column = blockIdx.x * kWarps * kPanelColumns;
    const int own = column + threadIdx.x / kWarp * kPanelColumns;
    const int64_t panel = first_panel + own / kPanelColumns;
    const bool has_panel = own < out.columns;
    const auto unpack = [&](auto width) {
        constexpr int bits = decltype(width)::value;
        unpack_k_tile<form, max_blocks, bits>(
            w, k_tile, header, panel, has_panel, column, out, buffers
        );
    };
    switch (k_tile.bits) {
        case 2: unpack(std::integral_constant<int, 2>()); break;
        case 3: unpack(std::integral_constant<int, 3>()); break;
        case 4: unpack(std::integral_constant<int, 4>()); break;
        case 5: unpack(std::integral_constant<int, 5>()); break;
        case 6: unpack(std::integral_constant<int, 6>()); break;
        default: unpack(std::integral_constant<int, 8>()); break;
    }
}

// Reads one code of a block whose bit width is a run-time value.
__device__ __forceinline__ uint32_t code_at(const uint8_t* block, int bits, int row, int column) {
    const int lane = 4 * (column % 8) + row / 8, pair = 4 * (column / 8) + row % 8 / 2;
    const int first_words = first_part_words(bits);
    const auto* words = reinterpret_cast<const uint32_t*>(block);
    uint32_t code = 0;
    for (int i = 0; i < num_fields(bits, pair); ++i) {
        const BitField field = field_of(bits, pair, i);
        const bool is_first = field.word < first_words;
        const uint32_t word = is_first ? words[lane * first_words + field.word]
                                       : words
                                             [kWarp * first_words + lane * (bits - first_words) +
                                              field.word - first_words];
        const uint32_t mask = (1u << field.bits) - 1;
        code |= (word >> (field.shift + 16 * (row % 2)) & mask) << field.first;
    }
    return code;
}

// Each warp dequantizes one k-tile of one column, each lane one row of every block.
__global__ void __launch_bounds__(kThreads) embedding_kernel(
    const ExlQuantMatrix w, const int64_t* token_ids, float* y, KTileHeader header
) {
    let_next_begin();
    const int index = blockIdx.y * kWarps + threadIdx.x / kWarp;
    const int row = threadIdx.x % kWarp;
    const bool has_k_tile = index < w.num_k_tiles;
    ExlQuantKTile k_tile = {};
    if (has_k_tile) k_tile = w.k_tiles[index];
    wait_for_inputs();
    if (!has_k_tile) return;
    const int64_t token = token_ids[blockIdx.x];
    const int column = static_cast<int>(token % kPanelColumns);
    const uint8_t* from = w.tiles + token / kPanelColumns * w.panel_bytes + k_tile.offset;
    const float scale = scale_at(from, w.scale_dtype, scale_index(column));
    const uint8_t* offsets = from + header.offsets_at();
    float zero = 0.0f, minimum = 0.0f;
    const bool is_small = has_small_groups(w.offset_kind);
    if (w.offset_kind == EXL_OFFSET_MIDDLE || w.offset_kind == EXL_OFFSET_SMALL_MIDDLE) {
        zero = static_cast<float>(middle_of(form_of(k_tile.bits, w.values)));
    }
    if (w.offset_kind == EXL_OFFSET_ZEROS) zero = offsets[scale_index(column)];
    if (w.offset_kind == EXL_OFFSET_MINIMUMS || w.offset_kind == EXL_OFFSET_SMALL_MINIMUMS) {
        minimum = scale_at(offsets, w.scale_dtype, scale_index(column));
    }
    const int32_t* permutation =
        w.permutation + static_cast<int64_t>(k_tile.first_block) * kBlockRows;
    const uint8_t* block = from + header.size_bytes();
    for (int b = 0; b < k_tile.blocks; ++b, block += 128 * k_tile.bits) {
        const uint32_t code = code_at(block, k_tile.bits, row, column);
        float number = static_cast<float>(code);
        if (w.values == EXL_VALUES_E4M3) number = number_of_e4m3(code);
        if (is_table(w.values)) number = static_cast<float>(look_up(w.values, code) & 0xff);
        const int feature = permutation[b * kBlockRows + row];
        if (feature < 0) continue;
        float own_scale = scale, own_minimum = minimum;
        if (is_small) {
            const uint8_t multiplier = from[header.multiplier_at(column, 2 * b + row % 8 / 4)];
            const bool has_minimums = w.offset_kind == EXL_OFFSET_SMALL_MINIMUMS;
            own_scale *= has_minimums ? static_cast<float>(multiplier & 15)
                                      : static_cast<float>(static_cast<int8_t>(multiplier));
            own_minimum *= -static_cast<float>(multiplier >> 4);
        }
        y[static_cast<int64_t>(blockIdx.x) * w.k + feature] =
            fmaf(own_scale, number - zero, own_minimum);
    }
}

static KTileHeader header_of(const ExlQuantMatrix& w) {
    return {static_cast<int>(scale_bytes_of(w.scale_dtype)), w.offset_kind};
}

}  // namespace exl::cuda

using namespace exl::cuda;

extern "C" int exl_cuda_quant_unpack(
    const ExlQuantMatrix* w, int32_t first_column, int32_t columns, void* out, int64_t out_stride,
    void* stream
) {
    const int64_t end = static_cast<int64_t>(first_column) + columns;
    const bool fits = first_column >= 0 && first_column % kPanelColumns == 0 && columns >= 0 &&
                      end <= w->n && out_stride >= columns && w->num_k_tiles <= 65535;
    if (!fits) return cudaErrorInvalidValue;
    if (columns == 0) return cudaSuccess;
    const bool is_aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && out_stride % 8 == 0;
    const Output to = {static_cast<__half*>(out), out_stride, columns, is_aligned};
    const dim3 grid(
        static_cast<unsigned>(ceil_div(columns, kWarps * kPanelColumns)), w->num_k_tiles
    );
    const bool is_small = has_small_groups(w->offset_kind);
    const bool in_halves = w->scale_dtype == kF16 && w->offset_kind != EXL_OFFSET_MINIMUMS &&
                           w->values != EXL_VALUES_E4M3;
    const auto single_block = in_halves ? unpack_kernel<kHalves, 1> : unpack_kernel<kFloats, 1>;
    const auto multi_block =
        in_halves ? unpack_kernel<kHalves, kKTileBlocks> : unpack_kernel<kFloats, kKTileBlocks>;
    const auto kernel = is_small ? unpack_kernel<kSmallFloats, kKTileBlocks>
                        : w->num_k_tiles == w->num_blocks ? single_block
                                                          : multi_block;
    return launch(
        kernel, grid, dim3(kThreads), 0, stream, *w, first_column / kPanelColumns, to, header_of(*w)
    );
}

extern "C" int exl_cuda_quant_embedding(
    const ExlQuantMatrix* w, const int64_t* token_ids, int32_t m, float* y, void* stream
) {
    if (m < 0) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const dim3 grid(m, static_cast<unsigned>(ceil_div(w->num_k_tiles, kWarps)));
    return launch(
        embedding_kernel, grid, dim3(kThreads), 0, stream, *w, token_ids, y, header_of(*w)
    );
}

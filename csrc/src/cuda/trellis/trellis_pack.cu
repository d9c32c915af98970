// Repacks trellis codes for the kernels, and decodes them to float16 matrices.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_pack, exl_cuda_trellis_unpack).
// Mapping    A warp packs a step, and decodes one.
// Floor      The bytes read and written, at memory bandwidth; for decoding, the instructions of
//            trellis_values.cuh.
#include "cuda/trellis/trellis_values.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

namespace {

constexpr int kWarps = 8;

// Bits first .. first + kBits - 1 of a ring, at most 64. Bit b is bit 31 - b % 32 of word b / 32.
template <int kBits>
__device__ __forceinline__ uint64_t bits_at(const uint32_t* ring, int first) {
    const int word = first / 32, shift = first % 32;
    uint64_t bits = static_cast<uint64_t>(ring[word]) << 32;
    if (shift + kBits > 32) bits |= ring[word + 1];
    bits <<= shift;
    if (shift + kBits > 64) bits |= ring[word + 2] >> (32 - shift);
    return bits >> (64 - kBits);
}

template <int kTileWords>
__global__ void __launch_bounds__(kWarps* kWarp) pack_kernel(
    const ExlTrellisMatrix w, const uint16_t* tiles, const int64_t row_stride
) {
    using R = Rate<kTileWords>;
    // Later kernels read codes before their wait, so none may begin yet.
    wait_for_inputs();
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int k_steps = w.k / 32, lane = threadIdx.x % kWarp;
    const int64_t column = number / k_steps, step = number % k_steps;
    if (column >= w.n / kUnitColumns) return;
    uint64_t pieces[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int64_t row = 2 * step + i / kUnitTiles,
                      of_row = kUnitTiles * column + i % kUnitTiles;
        const auto* ring =
            reinterpret_cast<const uint32_t*>(tiles + row * row_stride + of_row * kTileWords);
        pieces[i] = bits_at<R::kBits>(ring, lane * R::kBits);
    }
    uint8_t* to = reinterpret_cast<uint8_t*>(w.words) + number * step_bytes(kTileWords);
#pragma unroll
    for (int i = 0; i < R::kWords; ++i) {
        *reinterpret_cast<uint32_t*>(to + word_offset(R::kWords, i, lane)) =
            word_of<kTileWords>(pieces, i);
    }
}

// Units of 128 rows whose columns a block decodes, side by side. Rows of the decoded tile in shared
// memory are 320 bytes apart, so that neither access has bank conflicts.
constexpr int kUnpackUnits = kWarps / kSteps, kUnpackColumns = kUnpackUnits * kUnitColumns;
constexpr int kUnpackStride = 320;

// out: [columns][k]. A block decodes a unit of 128 rows of 128 columns, a warp one of its steps. They
// are written from shared memory, 256 contiguous bytes at a time: warps would write 64.
template <int kTileWords, int kCodebook>
__global__ void __launch_bounds__(kWarps* kWarp) unpack_kernel(
    const ExlTrellisMatrix w, const int first_column, const int columns, __half* out
) {
    __shared__ __align__(16) uint8_t tile[kUnpackColumns * kUnpackStride];
    let_next_begin();
    const int k_units = w.k / kUnitRows, lane = threadIdx.x % kWarp;
    const int unit = blockIdx.x % k_units, block = blockIdx.x / k_units;
    const int of_unit = threadIdx.x / kWarp / kSteps, step = threadIdx.x / kWarp % kSteps;
    const int column = block * kUnpackUnits + of_unit;  // in units
    const bool exists = column < columns / kUnitColumns;
    StepWords<kTileWords> words;
    if (exists) {
        const int64_t number =
            static_cast<int64_t>(first_column / kUnitColumns + column) * k_units + unit;
        const auto* codes = reinterpret_cast<const uint8_t*>(w.words);
        words.load(codes + (number * kSteps + step) * step_bytes(kTileWords), lane);
    }
    wait_for_inputs();
    if (exists) {
        uint8_t* to = tile + (of_unit * kUnitColumns + lane / 4) * kUnpackStride + 64 * step +
                      16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < kUnitTiles; ++i) {
            uint32_t a[2][4];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                uint32_t states[kPositions];
                words.states(4 * row + i, states);
                fragment_of<kCodebook>(states, a[row]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<uint4*>(to + (16 * i + 8 * half) * kUnpackStride) =
                    make_uint4(a[0][half], a[0][2 + half], a[1][half], a[1][2 + half]);
            }
        }
    }
    __syncthreads();
    constexpr int kVectors = 2 * kUnitRows / 16;  // of a column
    const int left = min(kUnpackColumns, columns - block * kUnpackColumns);
    __half* to = out + static_cast<int64_t>(block) * kUnpackColumns * w.k + unit * kUnitRows;
#pragma unroll
    for (int i = threadIdx.x; i < kUnpackColumns * kVectors; i += kWarps * kWarp) {
        const int of_block = i / kVectors, vector = i % kVectors;
        if (of_block >= left) break;
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(of_block) * w.k + 8 * vector) =
            *reinterpret_cast<const uint4*>(tile + of_block * kUnpackStride + 16 * vector);
    }
}

struct Pack {
    template <int kTileWords, int kCodebook>
    cudaError_t run(
        const ExlTrellisMatrix& w, const void* tiles, int64_t row_stride, void* stream
    ) const {
        const int64_t steps = static_cast<int64_t>(w.n / kUnitColumns) * (w.k / 32);
        return launch(
            pack_kernel<kTileWords>, dim3(ceil_div(steps, kWarps)), dim3(kWarps * kWarp), 0, stream,
            w, static_cast<const uint16_t*>(tiles), row_stride
        );
    }
};

struct Unpack {
    template <int kTileWords, int kCodebook>
    cudaError_t run(
        const ExlTrellisMatrix& w, int first_column, int columns, void* out, void* stream
    ) const {
        const int64_t blocks = ceil_div(columns, kUnpackColumns) * (w.k / kUnitRows);
        return launch(
            unpack_kernel<kTileWords, kCodebook>, dim3(blocks), dim3(kWarps * kWarp), 0, stream, w,
            first_column, columns, static_cast<__half*>(out)
        );
    }
};

}  // namespace

}  // namespace exl::cuda::trellis

extern "C" int exl_cuda_trellis_pack(
    const ExlTrellisMatrix* w, const void* tiles, int64_t row_stride, void* stream
) {
    using namespace exl::cuda::trellis;
    if (!is_valid(*w)) return cudaErrorInvalidValue;
    // Codes do not depend on the codebook.
    return for_rate<EXL_CODEBOOK_MUL1>(w->tile_words, Pack(), *w, tiles, row_stride, stream);
}

extern "C" int exl_cuda_trellis_unpack(
    const ExlTrellisMatrix* w, int32_t first_column, int32_t columns, void* out, void* stream
) {
    using namespace exl::cuda::trellis;
    const bool fits = is_valid(*w) && first_column % kUnitColumns == 0 && first_column >= 0 &&
                      columns % kUnitColumns == 0 && columns > 0 && first_column + columns <= w->n;
    if (!fits) return cudaErrorInvalidValue;
    return for_codebook(*w, Unpack(), *w, first_column, columns, out, stream);
}

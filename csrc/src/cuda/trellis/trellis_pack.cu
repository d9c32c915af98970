// Repacks trellis codes for the kernels, and decodes them to float16 matrices.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_pack, exl_cuda_trellis_unpack).
// Mapping    A warp packs a step, and decodes one. Every 64 bytes that a warp writes are contiguous.
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

// out: [columns][k]. Eight lanes' worth of columns, 64 bytes of each, are written at a time.
template <int kTileWords, int kCodebook>
__global__ void __launch_bounds__(kWarps* kWarp) unpack_kernel(
    const ExlTrellisMatrix w, const int first_column, const int columns, __half* out
) {
    let_next_begin();
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int k_steps = w.k / 32, lane = threadIdx.x % kWarp;
    const int column = static_cast<int>(number / k_steps), step = number % k_steps;
    const bool exists = column < columns / kUnitColumns;
    StepWords<kTileWords> words;
    if (exists) {
        const int64_t first = static_cast<int64_t>(first_column / kUnitColumns) * k_steps;
        words.load(
            reinterpret_cast<const uint8_t*>(w.words) + (first + number) * step_bytes(kTileWords),
            lane
        );
    }
    wait_for_inputs();
    if (!exists) return;
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
        uint32_t a[2][4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t states[kPositions];
            words.states(4 * row + tile, states);
            fragment_of<kCodebook>(states, a[row]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t to = column * kUnitColumns + 16 * tile + 8 * half + lane / 4;
            *reinterpret_cast<uint4*>(out + to * w.k + 32 * step + 8 * (lane % 4)) =
                make_uint4(a[0][half], a[0][2 + half], a[1][half], a[1][2 + half]);
        }
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
        const int64_t steps = static_cast<int64_t>(columns / kUnitColumns) * (w.k / 32);
        return launch(
            unpack_kernel<kTileWords, kCodebook>, dim3(ceil_div(steps, kWarps)),
            dim3(kWarps * kWarp), 0, stream, w, first_column, columns, static_cast<__half*>(out)
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

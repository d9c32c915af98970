// Choice of a template instance by rate and codebook, and the check of a matrix.
#pragma once

#include <cuda_runtime.h>

#include "exl/cuda/trellis.h"

namespace exl::cuda::trellis {

inline bool is_valid(const ExlTrellisMatrix& w) {
    constexpr int kBlock = EXL_TRELLIS_BLOCK;
    return w.k >= kBlock && w.n >= kBlock && w.k % kBlock == 0 && w.n % kBlock == 0 &&
           w.first_in >= 0 && w.in_features >= 1 && w.first_in <= w.k - w.in_features &&
           w.first_out >= 0 && w.out_features >= 1 && w.first_out <= w.n - w.out_features;
}

// Calls `op.run<tile_words, codebook>(operands...)`.
template <int kCodebook, class Op, class... Operands>
cudaError_t for_rate(int tile_words, const Op& op, const Operands&... operands) {
    switch (tile_words) {
        case 16: return op.template run<16, kCodebook>(operands...);
        case 32: return op.template run<32, kCodebook>(operands...);
        case 48: return op.template run<48, kCodebook>(operands...);
        case 64: return op.template run<64, kCodebook>(operands...);
        case 80: return op.template run<80, kCodebook>(operands...);
        case 96: return op.template run<96, kCodebook>(operands...);
        case 112: return op.template run<112, kCodebook>(operands...);
        case 128: return op.template run<128, kCodebook>(operands...);
    }
    if constexpr (kCodebook == EXL_CODEBOOK_MUL1) {
        switch (tile_words) {
            case 24: return op.template run<24, kCodebook>(operands...);
            case 40: return op.template run<40, kCodebook>(operands...);
            case 56: return op.template run<56, kCodebook>(operands...);
        }
    }
    return cudaErrorInvalidValue;
}

template <class Op, class... Operands>
cudaError_t for_codebook(const ExlTrellisMatrix& w, const Op& op, const Operands&... operands) {
    switch (w.codebook) {
        case EXL_CODEBOOK_3INST: return for_rate<EXL_CODEBOOK_3INST>(w.tile_words, op, operands...);
        case EXL_CODEBOOK_MCG: return for_rate<EXL_CODEBOOK_MCG>(w.tile_words, op, operands...);
        case EXL_CODEBOOK_MUL1: return for_rate<EXL_CODEBOOK_MUL1>(w.tile_words, op, operands...);
    }
    return cudaErrorInvalidValue;
}

}  // namespace exl::cuda::trellis

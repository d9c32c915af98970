// Division of the matrices of experts into tiles, each for one thread block (experts.cu, one_row.cu).
#include <cstdlib>

#include "cuda/moe/experts.cuh"

namespace exl::cuda {

int unit_bits_for(const ExlExpertLinear& call) {
    const char* const text = std::getenv("EXL_ROW_OFF");
    const int off = text ? std::atoi(text) : 0;
    const bool is_dense = call.source == EXL_EXPERTS_DENSE;
    const int loads = is_dense && !(off & 64) ? 6 : off & 128 ? 2 : 3;
    int least = call.epilogue == EXL_EPILOGUE_GATED ? 1 : 0;
    if (least && call.n >= 2048 && !(off & 128)) least = 2;
    int slice_bits = 0;
    while (slice_bits < kWarpBits - least && call.num_loads >> (slice_bits + 1) >= loads) {
        ++slice_bits;
    }
    return kWarpBits - slice_bits;
}

}  // namespace exl::cuda

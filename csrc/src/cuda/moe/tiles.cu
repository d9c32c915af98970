// Division of the matrices of experts into tiles, each for one thread block (experts.cu, one_row.cu).
#include "cuda/moe/experts.cuh"

namespace exl::cuda {

int unit_bits_for(const ExlExpertLinear& call) {
    // A warp gets two loads or more, if a panel has them: with fewer, the start and the end of its work
    // take longer than the work.
    constexpr int kLeastLoads = 2;
    const int least = call.epilogue == EXL_EPILOGUE_GATED ? 1 : 0;
    int slice_bits = 0;
    while (slice_bits < kWarpBits - least && call.num_loads >> (slice_bits + 1) >= kLeastLoads) {
        ++slice_bits;
    }
    return kWarpBits - slice_bits;
}

}  // namespace exl::cuda

// The prompt kernel of experts for every rate of the codebook MUL1. A file per codebook, to compile
// them at the same time.
#include "cuda/trellis/trellis_experts_prompt.cuh"

namespace exl::cuda::trellis {

template cudaError_t launch_expert_prompt<EXL_CODEBOOK_MUL1>(
    int tile_words, const ExpertWork& work, int n_units, void* stream
);

}  // namespace exl::cuda::trellis

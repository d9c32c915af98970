// The decode kernel of experts for every rate of the codebook 3INST. A file per codebook, to compile
// them at the same time.
#include "cuda/trellis/trellis_experts_decode.cuh"

namespace exl::cuda::trellis {

template int expert_decode_blocks<EXL_CODEBOOK_3INST>(int tile_words);
template cudaError_t launch_expert_decode<EXL_CODEBOOK_3INST>(
    int tile_words, const ExpertWork& work, void* stream
);

}  // namespace exl::cuda::trellis

// The decode kernel for every rate of the codebook 3INST. A file per codebook, to compile them at
// the same time.
#include "cuda/trellis/trellis_decode.cuh"

namespace exl::cuda::trellis {

template cudaError_t launch_decode<EXL_CODEBOOK_3INST>(
    int tile_words, bool has_integers, const WorkArgs& args, void* stream
);

}  // namespace exl::cuda::trellis

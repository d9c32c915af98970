// The small-batch kernel for every rate of the codebook MUL1. A file per codebook, to compile them at
// the same time.
#include "cuda/trellis/trellis_batch.cuh"

namespace exl::cuda::trellis {

template cudaError_t launch_batch<EXL_CODEBOOK_MUL1>(
    int tile_words, const WorkArgs& args, void* stream
);

}  // namespace exl::cuda::trellis

// The decode kernel for every rate of the codebook MUL1. A file per codebook, to compile them at
// the same time.
#include "cuda/trellis/trellis_decode.cuh"

namespace exl::cuda::trellis {

template int decode_blocks<EXL_CODEBOOK_MUL1>(int tile_words, int rows);
template cudaError_t launch_decode<EXL_CODEBOOK_MUL1>(
    int tile_words, const WorkArgs& args, void* stream
);

}  // namespace exl::cuda::trellis

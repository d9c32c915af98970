// Chooses between the two forms of the delta rule and the state scan: token by token, and in chunks.
//
// The host does not know how long a sequence is. If a pass can have long ones, both forms are
// launched: each skips the sequences of the other.
#pragma once

#include "cuda/recurrent/chunk_pass.cuh"
#include "cuda/recurrent/chunk_products.cuh"

namespace exl::cuda {

// Bytes of the workspace, 0 if the device or the sizes have no chunked form.
inline int64_t chunk_space_bytes(
    const DeviceInfo& info, int64_t rows, int64_t seqs, int64_t heads, int64_t key_heads,
    int64_t depth
) {
    const bool has_chunks = info.capability >= 80 && depth <= kChunkDepth &&
                            info.shared_per_block >= static_cast<int>(sizeof(PassSpace<2>));
    if (!has_chunks || rows < kLeastChunkedRows || rows <= seqs) return 0;
    const int64_t slots = chunk_slots(rows, seqs);
    return slots * (key_heads * static_cast<int64_t>(sizeof(ChunkVectors)) +
                    heads * static_cast<int64_t>(sizeof(ChunkHead)));
}

#ifdef __CUDACC__

template <bool is_delta, int pairs>
cudaError_t launch_chunk_pass(const MatrixState& args, const ChunkSpace& space, void* stream) {
    const dim3 grid(
        static_cast<unsigned>(ceil_div(args.width, pairs * kPairColumns)), args.heads,
        args.rows.seqs
    );
    return launch(
        chunk_pass_kernel<is_delta, pairs>, grid, dim3(pairs * kPairThreads + kCopyThreads),
        sizeof(PassSpace<pairs>), stream, args, space
    );
}

template <bool is_delta>
cudaError_t run_chunks(
    const MatrixState& args, const DeviceInfo& info, void* workspace, void* stream
) {
    const int64_t slots = chunk_slots(args.rows.rows, args.rows.seqs);
    ChunkSpace space;
    space.vectors = static_cast<ChunkVectors*>(workspace);
    space.heads = reinterpret_cast<ChunkHead*>(space.vectors + slots * args.key_heads);
    const cudaError_t error = launch(
        chunk_products_kernel<is_delta>, dim3(static_cast<unsigned>(slots), args.heads),
        dim3(kProductThreads), sizeof(ProductSpace), stream, args, space
    );
    if (error != cudaSuccess) return error;
    // Blocks of one pair, where blocks of two would leave half of the multiprocessors idle.
    const int64_t longest = args.rows.rows / kLeastChunkedRows;
    const int64_t seqs = longest < args.rows.seqs ? longest : args.rows.seqs;
    const int64_t blocks = ceil_div(args.width, 2 * kPairColumns) * args.heads * seqs;
    return 2 * blocks <= info.multiprocessors ? launch_chunk_pass<is_delta, 1>(args, space, stream)
                                              : launch_chunk_pass<is_delta, 2>(args, space, stream);
}

template <bool is_delta>
cudaError_t run_recurrence(
    MatrixState args, void* workspace, int64_t workspace_bytes, void* stream
) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    const ExlStateRows& rows = args.rows;
    const int64_t needed =
        chunk_space_bytes(info, rows.rows, rows.seqs, args.heads, args.key_heads, args.depth);
    const bool is_chunked =
        needed > 0 && workspace != nullptr && rows.seqs > 0 && !args.is_invariant;
    if (is_chunked && workspace_bytes < needed) return cudaErrorInvalidValue;
    args.longest = is_chunked ? kLeastChunkedRows - 1 : rows.rows;
    if (cudaError_t error = run_matrix_state<is_delta ? Rule::kDelta : Rule::kScan>(args, stream);
        error != cudaSuccess) {
        return error;
    }
    return is_chunked ? run_chunks<is_delta>(args, info, workspace, stream) : cudaSuccess;
}

#endif  // __CUDACC__

}  // namespace exl::cuda

// Gated delta rule: the operands of the kernels in matrix_state.cuh and chunks.cuh.
#include "cuda/recurrent/chunk_launch.cuh"

extern "C" int exl_cuda_delta_rule(const ExlDeltaRule* args, void* stream) {
    const int64_t keys = static_cast<int64_t>(args->key_heads) * args->key_dim;
    exl::cuda::MatrixState state = {};
    state.rows = args->rows;
    state.x = args->qkv;
    state.x_stride = args->qkv_stride;
    state.key_first = keys;
    state.value_first = 2 * keys;
    state.step = args->ba + args->value_heads;
    state.beta = args->ba;
    state.step_stride = args->ba_stride;
    state.decay = args->decay;
    state.dt_bias = args->dt_bias;
    state.states = args->states;
    state.y = args->y;
    state.heads = args->value_heads;
    state.key_heads = args->key_heads;
    state.depth = args->key_dim;
    state.width = args->value_dim;
    state.is_tiled = args->is_tiled != 0;
    state.is_invariant = args->is_invariant != 0;
    if (args->is_by_row) {
        state.longest = args->rows.rows;
        return exl::cuda::run_matrix_state<exl::cuda::Rule::kDeltaByRow>(state, stream);
    }
    return exl::cuda::run_recurrence<true>(state, args->workspace, args->workspace_bytes, stream);
}

extern "C" int64_t exl_cuda_recurrence_workspace(
    int32_t rows, int32_t seqs, int32_t heads, int32_t key_heads, int32_t depth
) {
    exl::cuda::DeviceInfo info;
    if (exl::cuda::device_info(&info) != cudaSuccess) return 0;
    return exl::cuda::chunk_space_bytes(info, rows, seqs, heads, key_heads, depth);
}

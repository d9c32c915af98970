// Gated delta rule: the operands of the kernel in matrix_state.cuh.
#include "cuda/recurrent/matrix_state.cuh"

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
    return exl::cuda::run_matrix_state<true>(state, stream);
}

// State scan of Mamba-2: the operands of the kernels in matrix_state.cuh and chunks.cuh.
#include "cuda/recurrent/chunk_launch.cuh"

extern "C" int exl_cuda_state_scan(const ExlStateScan* args, void* stream) {
    const int64_t inputs = static_cast<int64_t>(args->heads) * args->head_dim;
    exl::cuda::MatrixState state = {};
    state.rows = args->rows;
    state.x = args->xbc;
    state.x_stride = args->xbc_stride;
    state.key_first = inputs;
    state.query_first = inputs + static_cast<int64_t>(args->groups) * args->state_size;
    state.step = args->dt;
    state.step_stride = args->dt_stride;
    state.decay = args->decay;
    state.dt_bias = args->dt_bias;
    state.skip = args->skip;
    state.states = args->states;
    state.y = args->y;
    state.heads = args->heads;
    state.key_heads = args->groups;
    state.depth = args->state_size;
    state.width = args->head_dim;
    state.least_step = args->least_step;
    state.largest_step = args->largest_step;
    state.is_invariant = args->is_invariant != 0;
    return exl::cuda::run_recurrence<false>(state, args->workspace, args->workspace_bytes, stream);
}

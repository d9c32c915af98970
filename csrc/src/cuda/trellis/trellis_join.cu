// Finishes a product with trellis codes that is added to y, and prepares y for the products that
// read it next: norm, factors suh, Hadamard transform.
//
// Contract   exl/cuda/trellis.h (ExlTrellisLinear.then).
// Mapping    A cluster of thread blocks has a row. A warp finishes blocks of 128 columns, and sends the
//            sum of their squares to all thread blocks. Then warps prepare the columns of their thread
//            block, one matrix each. A barrier of the cluster that orders memory would wait for the
//            stores of y.
// Accuracy   float32. The squares are added by block of 128, in an order that depends on the row's
//            length alone.
// Overlap    As in trellis_finish.cu. Factors of the preparation are loaded before the wait for the
//            previous kernel, too.
// Floor      A launch, a read from the L2 cache, five shuffles, a barrier and five shuffles in turn.
#include <algorithm>

#include "cuda/common/hopper.cuh"
#include "cuda/trellis/trellis_sums.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kCluster = 8;      // thread blocks per row
constexpr int kMaxWarps = 16;    // of a block
constexpr int kMaxBlocks = 256;  // of 128 columns, of a row

// `by_own_blocks` divides by own_blocks, the blocks of 128 columns of a thread block.
__global__ void __launch_bounds__(kMaxWarps* kWarp) join_kernel(
    const __grid_constant__ FinishArgs finish, const __grid_constant__ PrepareArgs prepare,
    int own_blocks, const Divisor by_own_blocks, float per_feature
) {
#if EXL_IS_HOPPER
    extern __shared__ float4 sums[];       // [own_blocks][32 lanes]
    __shared__ float squares[kMaxBlocks];  // of each block of the row
    __shared__ uint64_t arrived;
    let_next_begin();
    if (threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        fence_barrier_init();
        barrier_arrive_expecting(&arrived, finish.blocks * sizeof(float));
    }
    __syncthreads();
    cluster_arrive();
    const FinishPart& part = finish.parts[0];
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    const int warps = blockDim.x / kWarp, row = cluster_index();
    const int first_block = cluster_rank() * own_blocks;
    const int count = min(own_blocks, finish.blocks - first_block);  // or less than 0
    const int tasks = own_blocks * prepare.count;
    auto* const y = static_cast<float*>(finish.y) + row * finish.y_stride;
    const bool is_aligned = reinterpret_cast<uintptr_t>(y) % 16 == 0 && part.first_out % 4 == 0;
    const bool is_norm_aligned = prepare.is_aligned && part.first_out % 4 == 0;

    Factors factors;
    Halves suh;
    float norm[kValues];
    int number = 0, own = 0;  // of the matrix, and of the block, that a task prepares
    const auto load_weights = [&](int task) {
        number = by_own_blocks.divide(task), own = task - number * own_blocks;
        if (own >= count) return;
        const int value = EXL_TRELLIS_BLOCK * (first_block + own) + kValues * lane;
        suh = Halves(prepare.to[number].suh + value);
        load_values(prepare.norm, value - part.first_out, part.out_features, is_norm_aligned, norm);
    };
    int first = EXL_TRELLIS_BLOCK * (first_block + warp) + kValues * lane;
    if (warp < count) factors.load(part, first);
    if (warp < tasks) load_weights(warp);
    Slots slots(part, row, 0, first);
    cluster_wait();  // all blocks of the cluster have initialized their barriers
    wait_for_inputs();
#pragma unroll 1
    for (int task = warp; task < count; task += warps) {
        if (task != warp) {
            first = EXL_TRELLIS_BLOCK * (first_block + task) + kValues * lane;
            factors.load(part, first);
            slots = Slots(part, row, 0, first);
        }
        const int output = first - part.first_out;
        float v[kValues], old[kValues];
        RowSums row_sums;
        row_sums.load(part, slots, row, first, lane);
        load_values(y, output, part.out_features, is_aligned, old);
        row_sums.add(part, slots, lane, v);
        finish_block(factors, lane, v);
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            v[i] += old[i];
            if (output + i < 0 || output + i >= part.out_features) v[i] = 0.0f;
            square = fmaf(v[i], v[i], square);
        }
        square = warp_sum(square);
        if (lane < kCluster) send(squares + first_block + task, square, &arrived, lane);
        sums[task * kWarp + lane] = make_float4(v[0], v[1], v[2], v[3]);
        store_values(y, output, part.out_features, is_aligned, v);
    }
    __syncthreads();
    barrier_wait(&arrived, 0);
    float square = 0.0f;
#pragma unroll 1
    for (int i = lane; i < finish.blocks; i += kWarp) square += squares[i];
    const float factor = rsqrtf(fmaf(warp_sum(square), per_feature, prepare.eps));
#pragma unroll 1
    for (int task = warp; task < tasks; task += warps) {
        if (task != warp) load_weights(task);
        if (own >= count) continue;
        const float4 sum = sums[own * kWarp + lane];
        float v[kValues] = {sum.x * norm[0], sum.y * norm[1], sum.z * norm[2], sum.w * norm[3]};
        prepare_block(prepare.to[number], row, first_block + own, v, suh, factor, lane);
    }
#endif
}

}  // namespace

bool can_join(const FinishArgs& finish, const PrepareArgs& prepare, const DeviceInfo& info) {
    const FinishPart& part = finish.parts[0];
    bool fits = info.capability == 90 && finish.epilogue == EXL_EPILOGUE_ADD && !finish.sends &&
                finish.count == 1 && finish.m <= kDecodeRows && part.sums.columns != 0 &&
                finish.blocks <= kMaxBlocks && prepare.norm != nullptr &&
                prepare.features == part.out_features;
    for (int i = 0; i < prepare.count; ++i) {
        const Target& to = prepare.to[i];
        fits &= to.blocks == finish.blocks && to.first_in == part.first_out;
    }
    return fits;
}

cudaError_t launch_join(const FinishArgs& finish, const PrepareArgs& prepare, void* stream) {
    const int own_blocks = static_cast<int>(ceil_div(finish.blocks, kCluster));
    const int warps = std::min(own_blocks * prepare.count, kMaxWarps);
    const size_t bytes = own_blocks * EXL_TRELLIS_BLOCK * sizeof(float);
    return launch_clusters(
        join_kernel, dim3(kCluster * finish.m), dim3(warps * kWarp), kCluster, bytes, stream,
        finish, prepare, own_blocks, Divisor(own_blocks), 1.0f / prepare.features
    );
}

}  // namespace exl::cuda::trellis

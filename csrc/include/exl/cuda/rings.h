// Search for trellis codes (EXL3): the ring of states whose values come closest to given targets.
//
// exl/ops/rings.h defines rings, nodes and what is minimized. The results are those of the CPU
// kernels with fma, to the bit: every sum is made in the same order, and of equal ones, the state or
// the node with the lowest number wins.
#pragma once

#include "exl/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const float* targets;  // [count, 256], rows target_stride apart
    int64_t target_stride;
    const float* values;  // [65536], each of them a float16 number
    int32_t* states;      // [count, 256]
    int32_t count;
    int32_t even_bits;  // new bits of even positions, 1 to 8
    int32_t odd_bits;   // new bits of odd positions: as many, or one more and at most 4
    int32_t reach;      // 1 to 128
    void* workspace;
    int64_t workspace_bytes;
} ExlNearestRings;
// Device memory that a search needs on the current device: for every ring that it searches at a
// time, costs of all nodes before all positions. 0 where the device has not the shared memory that the
// rate needs: 130 KiB for even_bits 1, half of it for each bit more.
EXL_CUDA_API int64_t exl_cuda_nearest_rings_workspace(int32_t count, int32_t even_bits);
EXL_CUDA_API int exl_cuda_nearest_rings(const ExlNearestRings* args, void* stream);

#ifdef __cplusplus
}
#endif

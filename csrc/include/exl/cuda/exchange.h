// Sums over the GPUs of one host ("ranks"), through memory that all of them can access.
//
// Every rank has a buffer of EXL_CUDA_STAGES stages, each [ranks][m][k] float32. Slot r of a stage
// has the partial sums of rank r. A rank writes its partial sums to its slot in the buffers of all
// ranks (exl_cuda_quant_linear_sent or exl_cuda_exchange_send). Then it reads the slots of
// all ranks in its own buffer, and adds them in the order of the ranks (exl_cuda_prepare_sums
// or exl_cuda_exchange_settle). So all ranks have the same bits.
//
// There are no flags. A value that has not arrived has the bits EXL_CUDA_UNSENT, a NaN that no
// arithmetic instruction produces. Readers load values until none has these bits. A partial sum that
// has them is sent as another NaN.
//
// The exchanges of a pass take the stages in turn. A reader of stage s also empties the stage before
// it, which all of this rank's kernels have read. This is safe with three stages: a rank sends
// exchange i + 2 after it has read exchange i + 1. The other ranks sent that one after they had read
// exchange i, and emptied the stage of exchange i - 1, which is the stage of exchange i + 2.
//
// Before the first exchange of a pass every rank empties its whole buffer (exl_cuda_exchange_begin).
// The caller then synchronizes the ranks on the GPU, before any of them sends. So `m` and `k` may
// differ between passes, and an interrupted pass leaves nothing behind. All ranks make the same
// calls in the same order.
#pragma once

#include "exl/cuda/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_STAGES 3
#define EXL_CUDA_MAX_PEERS 7  // ranks besides the own one
#define EXL_CUDA_UNSENT 0xffffffffu
#define EXL_CUDA_SHARED_HANDLE_BYTES 64

// Sums to read: x + slot 0 + slot 1 + ..., for x [m, k] float32.
typedef struct {
    const float* parts;  // stage of the own buffer, [ranks][m][k]
    float* spent;        // the stage before it, which is emptied
    float* sum;          // [m, k]: receives the sums
    int32_t* ended;      // in page-locked memory of the host: other than 0: readers do not wait
    int32_t ranks;       // 0: nothing to read
    // A reader that has waited so long sets *ended, and its sums are void. 0: no limit.
    int32_t timeout_ms;
} ExlPartialSums;

// Copies of partial sums in the buffers of other ranks.
typedef struct {
    float* to[EXL_CUDA_MAX_PEERS];
    int32_t count;
} ExlPartialCopies;

// Empties `bytes` bytes at the start of a buffer.
EXL_CUDA_API int exl_cuda_exchange_begin(void* buffer, int64_t bytes, void* stream);

// Writes part [m, k] to `to` and to all copies. k is a multiple of 4.
EXL_CUDA_API int exl_cuda_exchange_send(
    const float* part, int64_t part_stride, int32_t m, int32_t k, float* to,
    const ExlPartialCopies* copies, void* stream
);

// sums->sum = x + the parts of all ranks; without x if it is null. `sum` may be x. k is a multiple of
// 4. Rows of x are x_stride elements apart.
EXL_CUDA_API int exl_cuda_exchange_settle(
    const ExlPartialSums* sums, const float* x, int64_t x_stride, int32_t m, int32_t k, void* stream
);

// exl_cuda_prepare for x plus the parts of all ranks, which is also stored in sums->sum. x is float32
// and another tensor than sums->sum, and there is a norm. Rows of x are multiples of 32 bytes and
// start at multiples of 16.
EXL_CUDA_API int exl_cuda_prepare_sums(
    const ExlPrepare* args, const ExlPartialSums* sums, void* stream
);

// exl_cuda_quant_linear with the store epilogue and a float32 y of partial sums. They are also sent
// to the same elements of the copies, whose rows are as far apart as those of y. m is at most
// EXL_CUDA_CHUNK_ROWS, and the mode is not the batch-invariant one.
EXL_CUDA_API int exl_cuda_quant_linear_sent(
    const ExlQuantLinear* args, const ExlPartialCopies* copies, void* stream
);

// Memory of the current device that other processes can open. These functions may synchronize the
// device.
EXL_CUDA_API int exl_cuda_shared_new(int64_t bytes, void** memory, void* handle);
EXL_CUDA_API int exl_cuda_shared_free(void* memory);
// Maps memory of another process, on any device of this host, for kernels of the current device.
EXL_CUDA_API int exl_cuda_shared_open(const void* handle, void** memory);
EXL_CUDA_API int exl_cuda_shared_close(void* memory);

#ifdef __cplusplus
}
#endif

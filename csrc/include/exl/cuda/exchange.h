// Sums over the GPUs of one host ("ranks"), through memory that all of them can access.
//
// Every rank has a buffer of EXL_CUDA_STAGES stages, each [ranks][m][k] float32. Slot r of a stage
// has the partial sums of rank r. A rank writes its partial sums to its slot in the buffers of all
// ranks (exl_cuda_quant_linear_sent, exl_cuda_trellis_linear_sent or exl_cuda_exchange_send). Then
// it reads the slots of all ranks in its own buffer, and adds them in the order of the ranks
// (exl_cuda_prepare_sums, exl_cuda_trellis_prepare_sums or exl_cuda_exchange_settle). So all ranks
// have the same bits.
//
// There are no flags. A value that has not arrived has the bits EXL_CUDA_UNSENT, a NaN that no
// arithmetic instruction produces. Readers load values until none has these bits. A partial sum that
// has them is sent as another NaN.
//
// The exchanges of a pass take the stages in turn. The functions that prepare inputs, whose blocks read
// the same parts, empty the stage before the one that they read: all kernels of this rank have read it.
// exl_cuda_exchange_settle also empties the stage that it reads. This is safe with three stages: a
// rank sends exchange i + 2 after it has read exchange i + 1. The other ranks sent that one after they
// had read exchange i, and emptied the stage of exchange i - 1, which is the stage of exchange i + 2.
//
// A kernel that sends ends some microseconds after its stores, because the other GPUs acknowledge
// them first. An early reader (`early_rank`) starts before that. It polls the places of the values,
// which are empty until the values arrive. A sending kernel starts its reader once all kernels
// before it have ended, so that the reader may read their results and overwrite their inputs.
//
// With many rows and ranks, the ranks divide the sums: every rank sends each row to one rank, which
// adds up the parts and sends the sum to all. That takes one more transfer, of fewer bytes in all: each
// rank sends 2 (W - 1) / W times m * k values instead of W - 1 times for W ranks. The areas for sums
// are emptied like the slots.
//
// A pass begins with the exchange of the embedding, which has a stage of its own, and ends with a sum
// that exl_cuda_exchange_settle reads, so that all stages are empty. A rank sends its part of the
// embedding after it has completed the pass before. So each pass may start with the first stage and
// have other sizes, and nothing else synchronizes the ranks. Tokens and logits have areas of their own,
// which their readers empty.
//
// Sums of prompts are too large for stages. exl_cuda_exchange_all_reduce divides them among the ranks:
// each rank stores its parts of the others' shares in their memory, adds up its own share, stores the
// sums in theirs, and copies the sums that it receives. The link limits them, so that parts and sums
// travel as packets of 8 values in 16 bytes: an exponent of 8 bits and 8 integers of 15 bits. The
// exponent e is that of the largest value as float32, at least 14, and a value is its integer times
// 2^(e - 140). So a value has an error of at most 2^-14 of the largest of its packet (float16 has 2^-12 of
// the value), and nothing overflows. A packet with a value that is not finite has the exponent 255, and
// arrives as NaNs. Thread block b of a rank waits for blocks b of the others alone. Flags say that a
// block's stores are complete. They count barriers and wrap: flags begin at -1 (empty), `rounds` at 0.
//
// At first every rank empties its whole buffer (exl_cuda_exchange_empty), and all ranks wait for each
// other. All ranks make the same calls in the same order.
#pragma once

#include "exl/cuda/linear.h"
#include "exl/cuda/trellis.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_STAGES 3
#define EXL_CUDA_MAX_PEERS 7  // ranks besides the own one
#define EXL_CUDA_UNSENT 0xffffffffu
#define EXL_CUDA_SHARED_HANDLE_BYTES 64
#define EXL_CUDA_REDUCE_BLOCKS 64  // thread blocks of exl_cuda_exchange_all_reduce
#define EXL_CUDA_PACKET_VALUES 8

// Sums to read: x + slot 0 + slot 1 + ..., for x [m, k] float32.
typedef struct {
    float* parts;    // stage of the own buffer, [ranks][m][k]
    float* spent;    // the stage before it, which is emptied
    float* sum;      // [m, k]: receives the sums
    int32_t* ended;  // in page-locked memory of the host: other than 0: readers do not wait
    int32_t ranks;   // 0: nothing to read
    // A reader that has waited so long sets *ended, and its sums are void. 0: no limit.
    int32_t timeout_ms;
    // -1: the reader begins once the kernel before it in the stream has ended. Otherwise that kernel
    // sends the parts of this rank, the reader begins before, and its results are in other memory
    // than the inputs of that kernel. exl_cuda_prepare_sums and exl_cuda_trellis_prepare_sums only.
    int32_t early_rank;
} ExlPartialSums;

// Sums that the ranks divide. Rank r adds up the parts of rows r << row_shift and following ones, and
// stores the sums in an area [m][k] of every rank.
typedef struct {
    ExlPartialSums parts;
    float* wholes[EXL_CUDA_MAX_PEERS + 1];  // the areas, by rank
    float* spent_whole;                     // the own one of the exchange before; null: it has none
    int32_t own;                            // rank
    int32_t row_shift;
    int32_t spent_shift;  // row_shift of the exchange before; -1: it was not divided
} ExlSharedSums;

// Copies of partial sums in the buffers of other ranks.
typedef struct {
    float* to[EXL_CUDA_MAX_PEERS];
    int32_t count;
    int32_t is_divided;  // 1: rows r << row_shift and following ones go to copy r alone, or to y
    int32_t row_shift;   // if there are not so many copies
} ExlPartialCopies;

// The tokens of a pass, which rank 0 sends to the others.
typedef struct {
    int64_t* token_ids;                   // [m]; with `slot`, they are overwritten
    int32_t* copies[EXL_CUDA_MAX_PEERS];  // rank 0: the slots of the other ranks
    int32_t num_copies;
    int32_t m;
    int32_t* slot;  // other ranks: [m], tokens of rank 0, which are awaited; null: do not wait
    int64_t first;  // tokens whose vectors this rank has: first to last - 1
    int64_t last;
    int64_t* own_ids;  // [m]: token - first, or 0 for tokens of other ranks
    int32_t* is_own;   // [m]: 1 or 0
    int32_t* ended;    // as in ExlPartialSums
    int32_t timeout_ms;
} ExlTokens;

// A large tensor of which every rank has a part. Each rank adds up a share of it: ceil(count /
// EXL_CUDA_PACKET_VALUES / ranks) packets; the last shares may be shorter.
typedef struct {
    float* values;  // [count], aligned to 16 bytes: this rank's part, which the sums replace
    int64_t count;  // a multiple of EXL_CUDA_PACKET_VALUES
    // Places in the memory of each rank, by rank. They belong to these sums alone.
    float* parts[EXL_CUDA_MAX_PEERS + 1];    // [ranks][share packets]: parts of the rank's share
    float* sums[EXL_CUDA_MAX_PEERS + 1];     // [ranks][share packets]: sums of the others' shares
    int32_t* flags[EXL_CUDA_MAX_PEERS + 1];  // [EXL_CUDA_REDUCE_BLOCKS][EXL_CUDA_MAX_PEERS + 1]
    int32_t* rounds;  // [EXL_CUDA_REDUCE_BLOCKS], in memory of this rank's own; zeros at first
    int32_t own;      // rank
    int32_t ranks;
    int32_t* ended;  // as in ExlPartialSums
    int32_t timeout_ms;
} ExlAllReduce;

// Empties `bytes` bytes.
EXL_CUDA_API int exl_cuda_exchange_empty(void* memory, int64_t bytes, void* stream);

EXL_CUDA_API int exl_cuda_exchange_tokens(const ExlTokens* args, void* stream);

// Writes part [m, k] to `to` and to all copies, whose rows are `stride` elements apart. Rows whose
// `is_own` is 0 are sent as zeros; it may be null.
EXL_CUDA_API int exl_cuda_exchange_send(
    const float* part, int64_t part_stride, const int32_t* is_own, int32_t m, int32_t k, float* to,
    const ExlPartialCopies* copies, int64_t stride, void* stream
);

// Moves columns first .. last - 1 of values that other ranks send to `area` [m, area_stride] to `out`
// [m, out_stride], and empties them. `first` and `area_stride` are multiples of 4.
EXL_CUDA_API int exl_cuda_exchange_gather(
    float* area, int64_t area_stride, int32_t m, int32_t first, int32_t last, float* out,
    int64_t out_stride, const ExlPartialSums* waiting, void* stream
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

// The same for sums that the ranks divide, and more than 8 rows. All ranks must run it at the same time.
EXL_CUDA_API int exl_cuda_prepare_shared_sums(
    const ExlPrepare* args, const ExlSharedSums* sums, void* stream
);

// exl_cuda_quant_linear with the store epilogue and a float32 y of partial sums. They are also sent
// to the same elements of the copies, whose rows are as far apart as those of y. y and the copies
// are aligned to 16 bytes. m is at most EXL_CUDA_CHUNK_ROWS, and the mode is not the batch-invariant
// one.
EXL_CUDA_API int exl_cuda_quant_linear_sent(
    const ExlQuantLinear* args, const ExlPartialCopies* copies, void* stream
);

// exl_cuda_trellis_prepare for x plus the parts of all ranks, which is also stored in sums->sum. x is
// float32 and another tensor than sums->sum, and there is a norm. Rows of x are multiples of 32 bytes
// and start at multiples of 16.
EXL_CUDA_API int exl_cuda_trellis_prepare_sums(
    const ExlTrellisPrepare* args, const ExlPartialSums* sums, void* stream
);

// exl_cuda_trellis_linear with the store epilogue and a float32 y of partial sums, which are also sent
// to the copies, as by exl_cuda_quant_linear_sent. The distances between y and the copies are multiples
// of 16 bytes, and the copies are not divided. No part has `sums`.
EXL_CUDA_API int exl_cuda_trellis_linear_sent(
    const ExlTrellisLinear* args, const ExlPartialCopies* copies, void* stream
);

// values = the sum of all ranks' values, in the order of the ranks, with the same bits on all of them:
// the rank that adds up a share rounds the others' parts and the sums to packets, not its own part. All
// ranks must run it at the same time, each on a GPU of its own.
EXL_CUDA_API int exl_cuda_exchange_all_reduce(const ExlAllReduce* args, void* stream);

// Memory of the current device that other processes can open, the only device memory that the library
// allocates. These functions may synchronize the device.
EXL_CUDA_API int exl_cuda_shared_new(int64_t bytes, void** memory, void* handle);
EXL_CUDA_API int exl_cuda_shared_free(void* memory);
// Maps memory of another process, on any device of this host, for kernels of the current device.
EXL_CUDA_API int exl_cuda_shared_open(const void* handle, void** memory);
EXL_CUDA_API int exl_cuda_shared_close(void* memory);

#ifdef __cplusplus
}
#endif

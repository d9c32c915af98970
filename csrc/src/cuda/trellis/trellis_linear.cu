// y = x @ parts for matrices with trellis codes: division of the work, launches, workspace.
//
// Contract   exl/cuda/trellis.h (exl_cuda_trellis_linear), exl/cuda/exchange.h
//            (exl_cuda_trellis_linear_sent).
// Launches   Successive parts of one rate, codebook and form share a launch of the decode kernel
//            (trellis_decode.cuh, up to 8 rows) or of the small-batch kernel (trellis_batch.cuh, 32
//            rows at a time). Its sums are in slots of the workspace (trellis_work.cuh). One launch
//            of the finish kernel (trellis_finish.cu) then makes the results of all parts, or one of
//            trellis_join.cu results and the inputs of the next products.
#include <algorithm>

#include "cuda/trellis/trellis_finish.cuh"
#include "cuda/trellis/trellis_rates.cuh"
#include "exl/cuda/linear.h"

namespace exl::cuda::trellis {

namespace {

constexpr int kMaxRows = 96;
constexpr int kBatchSharedBytes = 227 << 10;      // that the small-batch kernel may need
constexpr int kIntegerRows = 4;                   // most of the decode kernel
constexpr int kDecodeItems = 8, kBatchItems = 4;  // least per block, unless there is only one

bool has_batch_kernel(const DeviceInfo& info) { return info.shared_per_block >= kBatchSharedBytes; }

bool is_batch(const ExlTrellisInputs& part) {
    return part.form == EXL_TRELLIS_HALVES && part.rows > kDecodeRows;
}

// Floats of the slots of a launch with parts of n columns in total. Bounds for a workspace, too:
// every part may end within a group.
int64_t slot_floats(int64_t n, int parts, bool batch, int multiprocessors) {
    if (batch) {
        const int64_t groups = ceil_div(n, kBatchColumns) + parts;
        return (groups + multiprocessors) * kBatchRows * kBatchColumns;
    }
    return (n / kUnitColumns + kDecodeBlocks * multiprocessors) * kDecodeRows * kUnitColumns;
}

template <int kCodebook>
cudaError_t launch_codebook(const ExlTrellisInputs& of, const WorkArgs& work, void* stream) {
    const int tile_words = of.matrix->tile_words;
    return is_batch(of) ? launch_batch<kCodebook>(tile_words, work, stream)
                        : launch_decode<kCodebook>(
                              tile_words, of.form == EXL_TRELLIS_INTEGERS, work, stream
                          );
}

cudaError_t launch_product(const ExlTrellisInputs& of, const WorkArgs& work, void* stream) {
    switch (of.matrix->codebook) {
        case EXL_CODEBOOK_3INST: return launch_codebook<EXL_CODEBOOK_3INST>(of, work, stream);
        case EXL_CODEBOOK_MCG: return launch_codebook<EXL_CODEBOOK_MCG>(of, work, stream);
        case EXL_CODEBOOK_MUL1: return launch_codebook<EXL_CODEBOOK_MUL1>(of, work, stream);
    }
    return cudaErrorInvalidValue;
}

// Whether `then` prepares y.
bool is_followed(const ExlTrellisLinear& args) {
    const ExlTrellisPrepare& then = *args.then;
    return args.epilogue == EXL_EPILOGUE_ADD && args.count == 1 && then.norm != nullptr &&
           then.x == args.y && then.x_stride == args.y_stride && then.x_dtype == args.y_dtype &&
           then.m == args.m;
}

bool are_valid(const ExlTrellisLinear& args, const DeviceInfo& info) {
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    if (args.count < 1 || args.count > EXL_TRELLIS_MAX_PARTS || args.m < 0) return false;
    if (args.then != nullptr && !is_followed(args)) return false;
    if (is_gated && args.count != 2) return false;
    if (args.epilogue == EXL_EPILOGUE_ADD ? args.y_dtype != kF32
                                          : args.y_dtype != kF32 && args.y_dtype != kF16) {
        return false;
    }
    for (int i = 0; i < args.count; ++i) {
        const ExlTrellisInputs& part = args.parts[i];
        const ExlTrellisMatrix& w = *part.matrix;
        if (!is_valid(w) || w.k != args.parts[0].matrix->k) return false;
        if (args.sums[i] != nullptr) continue;
        const bool is_mul1 = w.codebook == EXL_CODEBOOK_MUL1;
        const bool is_decode = part.form == EXL_TRELLIS_INTEGERS
                                   ? is_mul1 && part.rows <= kIntegerRows
                                   : part.form == EXL_TRELLIS_HALVES && part.rows <= kDecodeRows;
        if (!is_decode && !(is_batch(part) && has_batch_kernel(info))) return false;
        if (args.m > part.rows || args.m > kMaxRows) return false;
        if (is_batch(part) != is_batch(args.parts[0])) return false;
    }
    if (is_gated) {
        const ExlTrellisMatrix &gate = *args.parts[0].matrix, &up = *args.parts[1].matrix;
        if (gate.n != up.n || gate.out_features != up.out_features ||
            gate.first_out != up.first_out) {
            return false;
        }
        const ExlTrellisMatrix* next = args.next.matrix;
        if (next != nullptr) {
            return is_valid(*next) && next->k == gate.n && next->first_in == gate.first_out &&
                   next->in_features == gate.out_features && args.next.rows >= args.m;
        }
    }
    return args.next.matrix == nullptr;
}

// Launches of the products of rows first_row .. first_row + rows - 1, and where their sums are.
class Products {
  public:
    Products(const ExlTrellisLinear& args, const DeviceInfo& info, FinishArgs* finish)
        : args_(args), info_(info), finish_(*finish), free_(static_cast<float*>(args.workspace)) {}

    cudaError_t run(int first_row, int rows, void* stream) {
        free_ = static_cast<float*>(args_.workspace);
        for (int first = 0; first < args_.count;) {
            int last = first + 1;
            while (last < args_.count && is_alike(first, last)) ++last;
            if (args_.sums[first] != nullptr) {
                const int64_t n = args_.parts[first].matrix->n;
                const auto* sums = static_cast<const __half*>(args_.sums[first]);
                Sums& from = finish_.parts[first].sums;
                from = {}, from.from = sums + first_row * n;
                last = first + 1;
            } else if (
                cudaError_t error = launch(first, last, first_row, rows, stream);
                error != cudaSuccess
            ) {
                return error;
            }
            first = last;
        }
        return cudaSuccess;
    }

  private:
    bool is_alike(int i, int j) const {
        const ExlTrellisMatrix &a = *args_.parts[i].matrix, &b = *args_.parts[j].matrix;
        return a.tile_words == b.tile_words && a.codebook == b.codebook && !args_.sums[j] &&
               args_.parts[i].form == args_.parts[j].form;
    }

    cudaError_t launch(int first, int last, int first_row, int rows, void* stream) {
        const bool batch = is_batch(args_.parts[first]);
        const int columns = batch ? kBatchColumns : kUnitColumns;
        const int k_units = args_.parts[first].matrix->k / kUnitRows;
        WorkArgs work = {};
        uint32_t groups = 0;
        int64_t n = 0;
        for (int i = 0; i < EXL_TRELLIS_MAX_PARTS; ++i) {
            const ExlTrellisInputs& part = args_.parts[std::min(first + i, last - 1)];
            const uint32_t first_group = groups;
            if (first + i < last) {
                groups += static_cast<uint32_t>(ceil_div(part.matrix->n, columns));
                n += part.matrix->n;
            }
            const Target target(part);
            // The inputs of a chunk of 32 rows are contiguous.
            const int64_t skipped = halves_bytes(first_row / kBatchRows * kBatchRows, target.k);
            work.parts[i] = {reinterpret_cast<const uint8_t*>(part.matrix->words),
                             target.out + skipped,
                             target.scales,
                             static_cast<uint32_t>(part.matrix->n / kUnitColumns),
                             first_group,
                             groups};
        }
        const uint32_t group_items = batch ? k_units : 2 * k_units, items = groups * group_items;
        const uint32_t most = info_.multiprocessors * (batch ? 1 : kDecodeBlocks);
        // With fewer items, adding the slots of more blocks would take longer.
        const int64_t busy = ceil_div(items, batch ? kBatchItems : kDecodeItems);
        const uint32_t blocks = std::min(most, static_cast<uint32_t>(busy));
        if (static_cast<uint64_t>(groups) * group_items >= (1ull << 31)) {
            return cudaErrorInvalidValue;
        }
        work.division = Division(items, blocks, group_items);
        work.sums = free_;
        work.m = rows;
        free_ += slot_floats(n, last - first, batch, info_.multiprocessors);
        const auto* end = static_cast<const char*>(args_.workspace) + args_.workspace_bytes;
        if (reinterpret_cast<const char*>(free_) > end) return cudaErrorInvalidValue;
        for (int i = first; i < last; ++i) {
            finish_.parts[i].sums = {
                work.sums, work.division, work.parts[i - first].first_group, columns,
                batch ? kBatchRows : kDecodeRows
            };
        }
        return launch_product(args_.parts[first], work, stream);
    }

    const ExlTrellisLinear& args_;
    const DeviceInfo& info_;
    FinishArgs& finish_;
    float* free_;  // of the workspace
};

FinishArgs finish_of(const ExlTrellisLinear& args) {
    FinishArgs finish = {};
    const bool is_gated = args.epilogue == EXL_EPILOGUE_GATED;
    for (int i = 0; i < args.count; ++i) {
        const ExlTrellisMatrix& w = *args.parts[i].matrix;
        FinishPart& part = finish.parts[i];
        part.svh = static_cast<const __half*>(w.svh), part.bias = w.bias;
        part.n = w.n, part.first_out = w.first_out, part.out_features = w.out_features;
        part.k_blocks = w.k / EXL_TRELLIS_BLOCK;
        if (args.sums[i] == nullptr) part.input_sums = Target(args.parts[i]).sums;
        if (i > 0 && !is_gated) {
            const FinishPart& before = finish.parts[i - 1];
            part.first_block = before.first_block + before.n / EXL_TRELLIS_BLOCK;
            part.y_column = before.y_column + before.out_features;
        }
        finish.blocks = part.first_block + w.n / EXL_TRELLIS_BLOCK;
    }
    finish.y_stride = args.y_stride, finish.y_dtype = args.y_dtype;
    finish.count = args.count, finish.epilogue = args.epilogue, finish.gate = args.gate;
    finish.has_next = args.next.matrix != nullptr;
    if (finish.has_next) finish.next = Target(args.next);
    return finish;
}

// exl_cuda_trellis_linear. With `copies` y is float32 partial sums, which are also sent to them.
cudaError_t trellis_linear(
    const ExlTrellisLinear& args, const ExlPartialCopies* copies, void* stream
) {
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (!are_valid(args, info)) return cudaErrorInvalidValue;
    PrepareArgs then = {};
    if (args.then != nullptr && !convert(*args.then, &then)) return cudaErrorInvalidValue;
    FinishArgs finish = finish_of(args);
    Products products(args, info, &finish);
    const int64_t y_bytes = args.y_dtype == kF32 ? 4 : 2;
    const int chunk = args.sums[0] != nullptr ? args.m : kBatchRows;
    for (int row = 0; row < args.m; row += chunk) {
        finish.m = std::min(chunk, args.m - row);
        finish.first_row = row;
        finish.y = static_cast<char*>(args.y) + row * args.y_stride * y_bytes;
        if (copies != nullptr) {
            finish.sends = true;
            finish.copies = *copies;
            for (int i = 0; i < copies->count; ++i) {
                finish.copies.to[i] += row * args.y_stride;
            }
        }
        if (cudaError_t error = products.run(row, finish.m, stream); error != cudaSuccess) {
            return error;
        }
        if (args.then != nullptr && finish.m == args.m && can_join(finish, then, info)) {
            return launch_join(finish, then, stream);
        }
        if (cudaError_t error = launch_finish(finish, stream); error != cudaSuccess) return error;
    }
    if (args.then == nullptr) return cudaSuccess;
    return static_cast<cudaError_t>(exl_cuda_trellis_prepare(args.then, stream));
}

}  // namespace

}  // namespace exl::cuda::trellis

extern "C" int exl_cuda_trellis_max_rows(int* rows) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    *rows = has_batch_kernel(info) ? kMaxRows : kDecodeRows;
    return cudaSuccess;
}

extern "C" int64_t exl_cuda_trellis_linear_workspace(int32_t n, int32_t rows) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (device_info(&info) != cudaSuccess) return 0;
    // Every part may have a launch of its own.
    int64_t floats = 0;
    for (int i = 0; i < EXL_TRELLIS_MAX_PARTS; ++i) {
        floats += slot_floats(
            i == 0 ? n : 0, EXL_TRELLIS_MAX_PARTS, rows > kDecodeRows, info.multiprocessors
        );
    }
    return 4 * floats;
}

extern "C" int exl_cuda_trellis_linear(const ExlTrellisLinear* args, void* stream) {
    return exl::cuda::trellis::trellis_linear(*args, nullptr, stream);
}

extern "C" int exl_cuda_trellis_linear_sent(
    const ExlTrellisLinear* args, const ExlPartialCopies* copies, void* stream
) {
    using namespace exl::cuda;
    bool fits = copies->count >= 0 && copies->count <= EXL_CUDA_MAX_PEERS && !copies->is_divided &&
                args->epilogue == EXL_EPILOGUE_STORE && args->y_dtype == kF32;
    for (const void* sums : args->sums) fits &= sums == nullptr;
    for (int i = 0; fits && i < copies->count; ++i) {
        const auto distance =
            reinterpret_cast<intptr_t>(copies->to[i]) - reinterpret_cast<intptr_t>(args->y);
        fits = distance % 16 == 0;  // vectors of y are also vectors of the copies
    }
    return fits ? trellis::trellis_linear(*args, copies, stream) : cudaErrorInvalidValue;
}

// MLPs of experts with trellis codes: launches, workspace, division of the work.
//
// Contract   exl/cuda/trellis_experts.h.
// Launches   Prepared inputs of each pair, with the sort of the pairs; products of gate and up, for
//            each rate that occurs; activation; products of down; weighted sum of each row.
#include <algorithm>

#include "cuda/trellis/trellis_experts_rows.cuh"
#include "cuda/trellis/trellis_rates.cuh"

namespace exl::cuda::trellis {

namespace {

constexpr int kBatchSharedBytes = 227 << 10;  // that the batch kernel may need

int decode_blocks_of(int codebook, int tile_words) {
    switch (codebook) {
        case EXL_CODEBOOK_3INST: return expert_decode_blocks<EXL_CODEBOOK_3INST>(tile_words);
        case EXL_CODEBOOK_MCG: return expert_decode_blocks<EXL_CODEBOOK_MCG>(tile_words);
    }
    return expert_decode_blocks<EXL_CODEBOOK_MUL1>(tile_words);
}

template <int kCodebook>
cudaError_t launch_codebook(
    int kernel, int tile_words, const ExpertWork& work, int n_units, void* stream
) {
    switch (kernel) {
        case EXL_EXPERTS_DECODE: return launch_expert_decode<kCodebook>(tile_words, work, stream);
        case EXL_EXPERTS_BATCH:
            return launch_expert_batch<kCodebook>(tile_words, work, n_units, stream);
    }
    return launch_expert_prompt<kCodebook>(tile_words, work, n_units, stream);
}

cudaError_t launch_product(
    int codebook, int kernel, int tile_words, const ExpertWork& work, int n_units, void* stream
) {
    switch (codebook) {
        case EXL_CODEBOOK_3INST:
            return launch_codebook<EXL_CODEBOOK_3INST>(kernel, tile_words, work, n_units, stream);
        case EXL_CODEBOOK_MCG:
            return launch_codebook<EXL_CODEBOOK_MCG>(kernel, tile_words, work, n_units, stream);
        case EXL_CODEBOOK_MUL1:
            return launch_codebook<EXL_CODEBOOK_MUL1>(kernel, tile_words, work, n_units, stream);
    }
    return cudaErrorInvalidValue;
}

bool are_valid(const ExlTrellisExperts& a, const DeviceInfo& info) {
    const ExlTrellisMatrix &wide = a.of_wide, &narrow = a.of_narrow;
    return is_valid(wide) && is_valid(narrow) && wide.codebook == narrow.codebook &&
           wide.codebook >= EXL_CODEBOOK_3INST && wide.codebook <= EXL_CODEBOOK_MUL1 &&
           wide.out_features == narrow.in_features && a.wide_rates != 0 && a.narrow_rates != 0 &&
           (a.parts == 1 || a.parts == 2) && a.m >= 0 && a.top_k >= 1 && a.experts >= 1 &&
           a.experts <= EXL_CUDA_MAX_EXPERTS &&
           static_cast<int64_t>(a.m) * a.top_k < INT32_MAX / 64 &&
           (a.x_dtype == kF32 || a.x_dtype == kF16) && a.kernel >= EXL_EXPERTS_DECODE &&
           a.kernel <= EXL_EXPERTS_PROMPT &&
           (a.kernel != EXL_EXPERTS_BATCH || info.shared_per_block >= kBatchSharedBytes) &&
           (a.kernel != EXL_EXPERTS_PROMPT || info.capability == 90);
}

// Buffers and launches of one call.
class Experts {
  public:
    Experts(const ExlTrellisExperts& args, const DeviceInfo& info)
        : args_(args), info_(info), pairs_(args.m * args.top_k), is_sorted_(args.m > 1) {
        const ExlTrellisMatrix &wide = args.of_wide, &narrow = args.of_narrow;
        const bool is_decode = args.kernel == EXL_EXPERTS_DECODE;
        tile_ = is_decode                          ? decode_tile(wide.codebook)
                : args.kernel == EXL_EXPERTS_BATCH ? kBatchTile
                                                   : kPromptTile;
        columns_ = is_decode ? kUnitColumns : kBatchGroupColumns;
        const int64_t most =
            is_sorted_ ? exl_cuda_max_items(pairs_, args.experts, tile_) : args.top_k;
        max_items_ = static_cast<int>(most);
        wide_ = shares_of(wide, args.wide_rates, args.parts);
        narrow_ = shares_of(narrow, args.narrow_rates, 1);
        const bool has_integers = is_decode && wide.codebook == EXL_CODEBOOK_MUL1;
        form_ = has_integers                        ? EXL_TRELLIS_INTEGERS
                : args.kernel == EXL_EXPERTS_PROMPT ? kNaturalForm
                                                    : EXL_TRELLIS_PLAIN;
        follows_ = narrow.first_in == wide.first_out && narrow.k == wide.n;
        const int64_t item_words = is_sorted_ ? 4 * (1 + most) + 2ll * pairs_ : 0;
        items_ = take(4 * item_words);
        for (int i = 0; i < args.parts; ++i) wide_inputs_[i] = take(inputs_bytes(wide.k));
        narrow_inputs_ = take(inputs_bytes(narrow.k));
        plain_ = take(follows_ ? 0 : 2ll * pairs_ * wide.out_features);
        const int64_t slots =
            std::max<int64_t>(wide_.slots() * static_cast<int64_t>(args.parts), narrow_.slots());
        sums_ = take(4 * most * slots * tile_ * columns_);
    }
    int64_t bytes() const { return size_; }

    cudaError_t run(void* stream) const {
        cudaError_t error = prepare(stream);
        if (error == cudaSuccess) error = multiply_wide(stream);
        if (error == cudaSuccess) error = activate(stream);
        if (error == cudaSuccess && !follows_) error = prepare_inner(stream);
        if (error == cudaSuccess) error = multiply_narrow(stream);
        return error == cudaSuccess ? add_up(stream) : error;
    }

  private:
    // Offset of `bytes` bytes of the workspace.
    int64_t take(int64_t bytes) {
        const int64_t first = size_;
        size_ += ceil_div(bytes, 256) * 256;
        return first;
    }
    template <class T>
    T* at(int64_t offset) const {
        return reinterpret_cast<T*>(static_cast<uint8_t*>(args_.workspace) + offset);
    }
    int64_t inputs_bytes(int k) const { return exl_cuda_trellis_inputs_bytes(form_, pairs_, k); }

    // One row's experts have about as many shares as thread blocks fit on the device. Shares of
    // whole groups need fewer slots and barriers.
    Shares shares_of(const ExlTrellisMatrix& w, uint32_t rates, int parts) const {
        const auto k_units = static_cast<uint32_t>(w.k / kUnitRows);
        const auto groups = static_cast<uint32_t>(ceil_div(w.n, columns_));
        const uint32_t units = groups * k_units;
        uint32_t count = groups;
        const bool is_decode = args_.kernel == EXL_EXPERTS_DECODE;
        if (is_decode || args_.is_split) {
            int per = 1;
            if (is_decode) {
                int rate = 2;
                while (rate < 16 && !(rates >> rate & 1)) ++rate;
                per = decode_blocks_of(w.codebook, 8 * rate);
            }
            const int blocks = per * info_.multiprocessors / (args_.top_k * parts);
            count = std::clamp(static_cast<uint32_t>(blocks), 1u, units);
            const uint32_t whole = count / groups * groups;
            if (10 * whole >= 9 * count) count = whole;
        }
        return {units, count, k_units, count % groups == 0};
    }

    ExpertItems items() const {
        ExpertItems items = {nullptr, nullptr, nullptr, args_.ids, max_items_, tile_};
        if (!is_sorted_) return items;
        items.num_items = at<int32_t>(items_);
        items.items = at<ExlExpertItem>(items_ + 16);
        items.pairs = reinterpret_cast<const int32_t*>(items.items + max_items_);
        return items;
    }
    int32_t* places() const { return at<int32_t>(items_ + 16 + 16ll * max_items_ + 4ll * pairs_); }
    Target target(const ExlTrellisMatrix& w, int64_t inputs) const {
        return Target(ExlTrellisInputs{&w, at<void>(inputs), form_, pairs_});
    }

    cudaError_t prepare(void* stream) const {
        const ExlTrellisMatrix& w = args_.of_wide;
        ExpertPrepareArgs to = {};
        to.x = args_.x, to.x_stride = args_.x_stride, to.x_dtype = args_.x_dtype;
        const int64_t bytes = args_.x_dtype == kF32 ? 4 : 2;
        to.is_aligned = reinterpret_cast<uintptr_t>(args_.x) % 16 == 0 &&
                        args_.x_stride * bytes % 16 == 0 && w.first_in % kValues == 0;
        to.pairs = pairs_, to.pairs_per_row = args_.top_k, to.parts = args_.parts;
        to.ids = args_.ids, to.matrices = args_.wide;
        for (int i = 0; i < args_.parts; ++i) to.to[i] = target(w, wide_inputs_[i]);
        to.sorts = is_sorted_;
        if (is_sorted_) {
            const ExpertItems sorted = items();
            to.sort = {
                args_.ids,
                args_.m,
                args_.top_k,
                args_.experts,
                tile_,
                const_cast<int32_t*>(sorted.num_items),
                const_cast<ExlExpertItem*>(sorted.items),
                const_cast<int32_t*>(sorted.pairs),
                places()
            };
        }
        return launch_expert_prepare(to, stream);
    }

    // The same for `plain_`, one row per pair.
    cudaError_t prepare_inner(void* stream) const {
        const ExlTrellisMatrix& w = args_.of_narrow;
        ExpertPrepareArgs to = {};
        to.x = at<void>(plain_), to.x_stride = w.in_features, to.x_dtype = kF16;
        to.is_aligned = w.in_features % kVector == 0 && w.first_in % kValues == 0;
        to.pairs = pairs_, to.pairs_per_row = 1, to.parts = 1;
        to.ids = args_.ids, to.matrices = args_.narrow;
        to.to[0] = target(w, narrow_inputs_);
        return launch_expert_prepare(to, stream);
    }

    cudaError_t multiply_wide(void* stream) const {
        ExpertWork work = {};
        work.matrices = args_.wide, work.shares = wide_;
        work.parts = static_cast<uint32_t>(args_.parts);
        for (int i = 0; i < args_.parts; ++i) {
            const Target from = target(args_.of_wide, wide_inputs_[i]);
            work.inputs[i] = from.out, work.scales[i] = from.scales;
        }
        work.is_early = !is_sorted_;
        return multiply(work, args_.of_wide, args_.wide_rates, stream);
    }

    cudaError_t multiply_narrow(void* stream) const {
        ExpertWork work = {};
        work.matrices = args_.narrow, work.shares = narrow_, work.parts = 1;
        const Target from = target(args_.of_narrow, narrow_inputs_);
        work.inputs[0] = from.out, work.scales[0] = from.scales;
        work.is_early = true;
        return multiply(work, args_.of_narrow, args_.narrow_rates, stream);
    }

    cudaError_t multiply(
        ExpertWork& work, const ExlTrellisMatrix& w, uint32_t rates, void* stream
    ) const {
        work.items = items();
        work.sums = at<float>(sums_);
        for (int rate = 2; rate <= 16; ++rate) {
            if (!(rates >> rate & 1)) continue;
            const cudaError_t error = launch_product(
                w.codebook, args_.kernel, 8 * rate, work, w.n / kUnitColumns, stream
            );
            if (error != cudaSuccess) return error;
            work.is_early = true;  // the launch before has waited for the items
        }
        return cudaSuccess;
    }

    cudaError_t activate(void* stream) const {
        const ExlTrellisMatrix& w = args_.of_wide;
        ExpertInnerArgs inner = {};
        inner.items = items();
        inner.slots = {at<float>(sums_), wide_, columns_, tile_};
        inner.matrices = args_.wide, inner.parts = args_.parts, inner.gate = args_.gate;
        inner.blocks = w.n / EXL_TRELLIS_BLOCK;
        inner.first_out = w.first_out, inner.out_features = w.out_features;
        if (follows_) {
            inner.next = args_.narrow;
            inner.to = target(args_.of_narrow, narrow_inputs_);
        } else {
            inner.plain = at<__half>(plain_);
        }
        return launch_expert_inner(inner, stream);
    }

    cudaError_t add_up(void* stream) const {
        const ExlTrellisMatrix& w = args_.of_narrow;
        ExpertOuterArgs outer = {};
        outer.slots = {at<float>(sums_), narrow_, columns_, tile_};
        outer.matrices = args_.narrow, outer.ids = args_.ids;
        outer.places = is_sorted_ ? places() : nullptr;
        outer.weights = args_.weights, outer.m = args_.m, outer.top_k = args_.top_k;
        outer.blocks = w.n / EXL_TRELLIS_BLOCK;
        outer.first_out = w.first_out, outer.out_features = w.out_features;
        outer.y = args_.y, outer.y_stride = args_.y_stride, outer.is_added = args_.is_added != 0;
        return launch_expert_outer(outer, stream);
    }

    const ExlTrellisExperts& args_;
    const DeviceInfo& info_;
    int pairs_;
    bool is_sorted_;  // one row's pairs are items as they are
    bool follows_;    // down takes the outputs of gate and up at the same places of their blocks
    int tile_, columns_, max_items_, form_;
    Shares wide_, narrow_;
    int64_t size_ = 0;
    int64_t items_, wide_inputs_[2], narrow_inputs_, plain_, sums_;  // offsets
};

}  // namespace

}  // namespace exl::cuda::trellis

extern "C" int64_t exl_cuda_trellis_experts_workspace(const ExlTrellisExperts* args) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (device_info(&info) != cudaSuccess || !are_valid(*args, info)) return 0;
    return Experts(*args, info).bytes();
}

extern "C" int exl_cuda_trellis_experts(const ExlTrellisExperts* args, void* stream) {
    using namespace exl::cuda;
    using namespace exl::cuda::trellis;
    DeviceInfo info;
    if (cudaError_t error = device_info(&info); error != cudaSuccess) return error;
    if (!are_valid(*args, info)) return cudaErrorInvalidValue;
    if (args->m == 0) return cudaSuccess;
    const Experts experts(*args, info);
    if (experts.bytes() > args->workspace_bytes) return cudaErrorInvalidValue;
    return experts.run(stream);
}

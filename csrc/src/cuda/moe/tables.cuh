// Tables of matrices and loads of the products of one row (one_row.cu), read before it is known which
// experts are used.
#pragma once

#include "cuda/moe/experts.cuh"

namespace exl::cuda {

constexpr int kMaxTableBytes = 8 << 10;  // in shared memory

#ifdef __CUDACC__

// Prefetches the table of matrices of `experts` experts into the L2 cache, by all threads of the grid.
__device__ __forceinline__ void prefetch_table(const ExlExpertLinear& call, int experts) {
    constexpr int kLineBytes = 128;
    const int64_t offset =
        (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLineBytes;
    const int64_t bytes = static_cast<int64_t>(experts) * call.parts * sizeof(ExlExpertMatrix);
    if (offset >= bytes) return;
    const auto* const table = reinterpret_cast<const uint8_t*>(call.matrices);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + offset));
}

// The tables of a part in shared memory: reads after the choice would wait behind those of weights.
// Without tables, they are read from global memory.
class Tables {
  public:
    // Of one matrix.
    struct Entry {
        const uint8_t* tiles;
        const float* bias;
        uint32_t kind_and_header;  // the low 14 bits of ExlExpertMatrix::kind are zero
        uint32_t panel_bytes;
    };
    static constexpr uint32_t kHeaderMask = (1 << 14) - 1;

    __host__ __device__ static int bytes(const ExlExpertLinear& call, int experts) {
        return static_cast<int>(
            call.num_loads * sizeof(ExlQuantLoad) + experts * call.parts * sizeof(Entry)
        );
    }
    __device__ __forceinline__ Tables(const ExlExpertLinear& call, int experts, uint8_t* memory)
        : call_(call),
          experts_(experts),
          loads_(reinterpret_cast<ExlQuantLoad*>(memory)),
          entries_(reinterpret_cast<Entry*>(loads_ + call.num_loads)) {}
    // By `count` threads, of which this is the one with number `first`; negative: none of them.
    __device__ __forceinline__ void fill(int first, int count) const {
        if (experts_ == 0 || first < 0) return;
        for (int i = first; i < experts_ * call_.parts; i += count) {
            const ExlExpertMatrix& w = call_.matrices[i];
            entries_[i] = {
                w.tiles, w.bias, w.kind | w.header_bytes, static_cast<uint32_t>(w.panel_bytes)
            };
        }
        for (int i = first; i < call_.num_loads; i += count) loads_[i] = call_.loads[i];
    }
    __device__ __forceinline__ ExlExpertMatrix at(int expert, int part) const {
        if (experts_ == 0) return matrix_of(call_, expert, part);
        const Entry& entry = entries_[expert * call_.parts + part];
        ExlExpertMatrix w = {};
        w.tiles = entry.tiles;
        w.loads = loads_;
        w.bias = entry.bias;
        w.panel_bytes = entry.panel_bytes;
        w.num_loads = call_.num_loads;
        w.kind = entry.kind_and_header & ~kHeaderMask;
        w.header_bytes = static_cast<int32_t>(entry.kind_and_header & kHeaderMask);
        return w;
    }
    __device__ __forceinline__ const float* bias(int expert, int part) const {
        const int index = expert * call_.parts + part;
        return experts_ == 0 ? call_.matrices[index].bias : entries_[index].bias;
    }

  private:
    const ExlExpertLinear& call_;
    int experts_;
    ExlQuantLoad* loads_;
    Entry* entries_;
};

#endif  // __CUDACC__

}  // namespace exl::cuda

// Instructions of compute capability 9.0 alone: barriers in shared memory that count bytes, bulk
// copies, products of a group of four warps. PTX ISA, chapters mbarrier, cp.async.bulk and wgmma.
#pragma once

#include "common.cuh"

// Machine code of 9.0a; in other passes of the compiler kernels that need it are empty.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EXL_IS_HOPPER 1
#else
#define EXL_IS_HOPPER 0
#endif

#if EXL_IS_HOPPER

namespace exl::cuda {

__device__ __forceinline__ uint32_t shared_offset(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers ----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_offset(barrier)), "r"(arrivals)
                 : "memory");
}
// Barriers that were begun are seen by copies too.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_offset(barrier)) : "memory");
}
// Arrives, and has the phase wait for so many bytes of copies as well.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_offset(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Until the phase of that parity is over; a barrier's first phase has parity 0. What came before
// is seen then, of the block itself and of copies, or of all blocks of the cluster.
template <bool of_cluster = false>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#define EXL_TRY_WAIT(order)                                                      \
    asm volatile(                                                                \
        "{\n .reg .pred over;\n"                                                 \
        " mbarrier.try_wait.parity" order ".b64 over, [%1], %2;\n"               \
        " selp.u32 %0, 1, 0, over;\n}"                                           \
        : "=r"(is_over)                                                          \
        : "r"(shared_offset(barrier)), "r"(parity)                               \
        : "memory"                                                               \
    )
    uint32_t is_over = 0;
    while (!is_over) {
        if constexpr (of_cluster) {
            EXL_TRY_WAIT(".acquire.cluster.shared::cta");
        } else {
            EXL_TRY_WAIT(".shared");
        }
    }
#undef EXL_TRY_WAIT
}

// Copies to where this thread wrote to shared memory begin after what it wrote.
__device__ __forceinline__ void fence_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Of `threads` threads that name the same one of the block's barriers.
template <int id, int threads>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}
// The cluster's barrier, for all threads of its blocks. It says that they have come, and nothing of
// what they wrote, which is cheap: with an order of their writes it would empty caches. A block that
// was launched alone is a cluster.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// Which of the launch's clusters this is, and which of its blocks; whole warps ask.
__device__ __forceinline__ uint32_t cluster_index() {
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return uniform(index);
}
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return uniform(rank);
}
// To this place in the shared memory of the cluster's block `rank`, whose barrier counts the bytes
// when they are there.
__device__ __forceinline__ void send(
    float4* to, const float4& four, uint64_t* barrier, uint32_t rank
) {
    asm volatile(
        "{\n .reg .b32 there, counts;\n"
        " mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counts, %1, %2;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[there], {%3, %4, %5, %6}, [counts];\n}"
        ::"r"(shared_offset(to)),
        "r"(shared_offset(barrier)), "r"(rank), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
        : "memory"
    );
}

// ---- copies ------------------------------------------------------------------------------------

// Multiples of 16 bytes from global to shared memory, which the barrier counts when they are there.
__device__ __forceinline__ void copy_bulk(
    void* shared, const void* global, uint32_t bytes, uint64_t* barrier
) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared_offset(shared)),
        "l"(global), "r"(bytes), "r"(shared_offset(barrier))
        : "memory"
    );
}

// ---- products of four warps ----------------------------------------------------------------------

// B [16 along k, rows] in shared memory without swizzle: matrices of 8 rows of 16 bytes, each of
// them 128 bytes on end, `k_stride` bytes apart along k and 128 bytes along the rows. The first word
// of its descriptor, of which one more is 16 bytes further on; the second is kMatrixStride.
__device__ __forceinline__ uint32_t matrix_start(const void* shared, uint32_t k_stride) {
    return (shared_offset(shared) & 0x3ffff) >> 4 | k_stride >> 4 << 16;
}
constexpr uint32_t kMatrixStride = 128 >> 4;

// Fragments that were written can be read by products that follow.
__device__ __forceinline__ void group_fence(uint32_t (&a)[2][4]) {
    asm volatile("wgmma.fence.sync.aligned;"
                 : "+r"(a[0][0]), "+r"(a[0][1]), "+r"(a[0][2]), "+r"(a[0][3]), "+r"(a[1][0]),
                   "+r"(a[1][1]), "+r"(a[1][2]), "+r"(a[1][3]));
}
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;"); }
template <int pending>
__device__ __forceinline__ void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending));
}
// Numbers that products have written are read after this only.
template <int count>
__device__ __forceinline__ void group_results(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i]));
}

// d [64, 2 * count] float32 += a [64, 16] float16 * b, which begins there; warp w of the group has
// rows 16 w .. 16 w + 15 of a and d, as fragments of m16n8k16: of d, one after the other along n.
// By rows: the 8 numbers of 16 bytes of b are of a row of k, not of a row of the batch.
#define EXL_F4(at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define EXL_F16(at) EXL_F4(at), EXL_F4(at + 4), EXL_F4(at + 8), EXL_F4(at + 12)
template <bool is_by_rows>
__device__ __forceinline__ void group_product(
    float (&d)[8], const uint32_t (&a)[4], uint32_t b
) {
    asm volatile(
        "{\n .reg .pred adds;\n .reg .b64 b;\n"
        " setp.ne.b32 adds, 1, 0;\n mov.b64 b, {%12, %13};\n"
        " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8, %9, %10, %11}, b, adds, 1, 1, %14;\n}"
        : EXL_F4(0), EXL_F4(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixStride), "n"(is_by_rows)
    );
}
template <bool is_by_rows>
__device__ __forceinline__ void group_product(
    float (&d)[16], const uint32_t (&a)[4], uint32_t b
) {
    asm volatile(
        "{\n .reg .pred adds;\n .reg .b64 b;\n"
        " setp.ne.b32 adds, 1, 0;\n mov.b64 b, {%20, %21};\n"
        " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16, %17, %18, %19}, b, adds, 1, 1, %22;\n}"
        : EXL_F16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixStride), "n"(is_by_rows)
    );
}
template <bool is_by_rows>
__device__ __forceinline__ void group_product(
    float (&d)[32], const uint32_t (&a)[4], uint32_t b
) {
    asm volatile(
        "{\n .reg .pred adds;\n .reg .b64 b;\n"
        " setp.ne.b32 adds, 1, 0;\n mov.b64 b, {%36, %37};\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32, %33, %34, %35}, b, adds, 1, 1, %38;\n}"
        : EXL_F16(0), EXL_F16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixStride), "n"(is_by_rows)
    );
}
#undef EXL_F16
#undef EXL_F4

}  // namespace exl::cuda

#endif  // EXL_IS_HOPPER

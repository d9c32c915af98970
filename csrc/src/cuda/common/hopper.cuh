// Instructions that only compute capability 9.0 has: mbarriers that count bytes, bulk copies, and
// matrix products of a warpgroup of four warps. See the PTX ISA on mbarrier, cp.async.bulk, wgmma.
#pragma once

#include "cuda/common/common.cuh"

// 1 while compiling for 9.0a. In other compiler passes, kernels that need these instructions have
// empty bodies.
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
// Makes initialized mbarriers visible to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_offset(barrier)) : "memory");
}
// Arrives, and adds `bytes` to the number of copied bytes that the current phase waits for.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_offset(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Arrives at the barrier that the cluster's block `rank` has at the same offset. Orders this block's
// memory accesses only.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_offset(barrier)),
        "r"(rank)
        : "memory"
    );
}
// Waits until the phase with this parity is complete. A barrier's first phase has parity 0.
// Afterwards earlier writes are visible: those of this block and of its bulk copies or, with
// `of_cluster`, those of all blocks of the cluster.
template <bool of_cluster = false>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#define EXL_TRY_WAIT(order)                        \
    asm volatile(                                  \
        "{\n .reg .pred over;\n"                   \
        " mbarrier.try_wait.parity" order          \
        ".b64 over, [%1], %2;\n"                   \
        " selp.u32 %0, 1, 0, over;\n}"             \
        : "=r"(is_over)                            \
        : "r"(shared_offset(barrier)), "r"(parity) \
        : "memory"                                 \
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

// Orders this thread's earlier writes to shared memory before later bulk copies to the same place.
__device__ __forceinline__ void fence_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Synchronizes `threads` threads of the block on its named barrier `id`.
template <int id, int threads>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}
// Cluster barrier, for all threads of all blocks of the cluster. It synchronizes execution and does
// not order memory accesses. That makes it cheap: the ordered form would flush caches. A block that
// was launched without a cluster is a cluster of one.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// Index of this cluster in the grid, and rank of this block in its cluster. Whole warps must call
// these.
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
// Stores `four` in the shared memory of the cluster's block `rank`, at the offset that `to` has in
// this block. That block's mbarrier, likewise at the offset of `barrier`, counts the bytes as they
// arrive.
__device__ __forceinline__ void send(
    float4* to, const float4& four, uint64_t* barrier, uint32_t rank
) {
    asm volatile(
        "{\n .reg .b32 there, counts;\n"
        " mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counts, %1, %2;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[there], {%3, %4, %5, %6}, [counts];\n}" ::"r"(shared_offset(to)),
        "r"(shared_offset(barrier)), "r"(rank), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
        : "memory"
    );
}

// The same for one number.
__device__ __forceinline__ void send(float* to, float one, uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n .reg .b32 there, counts;\n"
        " mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counts, %1, %2;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
        "[there], %3, [counts];\n}" ::"r"(shared_offset(to)),
        "r"(shared_offset(barrier)), "r"(rank), "f"(one)
        : "memory"
    );
}

// ---- copies ------------------------------------------------------------------------------------

// Bulk copy of `bytes` bytes, a multiple of 16, from global to shared memory. The mbarrier counts
// the bytes as they arrive.
__device__ __forceinline__ void copy_bulk(
    void* shared, const void* global, uint32_t bytes, uint64_t* barrier
) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_offset(shared)),
        "l"(global), "r"(bytes), "r"(shared_offset(barrier))
        : "memory"
    );
}

// The same into all blocks of the cluster that `blocks` has a bit for, at the same offset. In each
// of them the mbarrier at the same offset counts the bytes.
__device__ __forceinline__ void copy_bulk_to(
    uint16_t blocks, void* shared, const void* global, uint32_t bytes, uint64_t* barrier
) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_offset(shared)),
        "l"(global), "r"(bytes), "r"(shared_offset(barrier)), "h"(blocks)
        : "memory"
    );
}

// ---- registers ---------------------------------------------------------------------------------

// Changes the number of registers of each thread. All four warps of a warpgroup must call it, in a
// kernel with a bound on its registers.
template <int count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- warpgroup matrix products -----------------------------------------------------------------

// Low word of the matrix descriptor of B [16 along k, rows] in shared memory without swizzle. B
// consists of core matrices of 8 rows of 16 bytes, 128 contiguous bytes each. They are `k_stride`
// bytes apart along k and 128 bytes apart along the rows. Adding 1 to this word moves the start by
// 16 bytes. The high word is kMatrixStride.
__device__ __forceinline__ uint32_t matrix_start(const void* shared, uint32_t k_stride) {
    return (shared_offset(shared) & 0x3ffff) >> 4 | k_stride >> 4 << 16;
}
constexpr uint32_t kMatrixStride = 128 >> 4;

// Makes fragments that this thread has written readable by the products that follow.
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
// Keeps the compiler from moving reads of the products' results above this point. Call it after
// `group_wait`.
template <int count>
__device__ __forceinline__ void group_results(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i]));
}

// d [64, n] float32 += a [64, 16] float16 * b [16, n] float16, where n is twice the length of the
// array d, and `b` is the low word of the descriptor. Warp w of the group holds rows 16 w ..
// 16 w + 15 of a and d as m16n8k16 fragments; those of d follow one another along n. With
// `is_by_rows`, the 8 numbers in 16 bytes of b belong to one row of k. Otherwise they belong to one
// row of the batch.
#define EXL_F4(at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define EXL_F16(at) EXL_F4(at), EXL_F4(at + 4), EXL_F4(at + 8), EXL_F4(at + 12)
template <bool is_by_rows>
__device__ __forceinline__ void group_product(float (&d)[8], const uint32_t (&a)[4], uint32_t b) {
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
__device__ __forceinline__ void group_product(float (&d)[16], const uint32_t (&a)[4], uint32_t b) {
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
__device__ __forceinline__ void group_product(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
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

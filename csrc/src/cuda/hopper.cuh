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
// Until the phase of that parity is over; a barrier's first phase has parity 0.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t is_over = 0;
    while (!is_over) {
        asm volatile(
            "{\n .reg .pred over;\n"
            " mbarrier.try_wait.parity.shared.b64 over, [%1], %2;\n"
            " selp.u32 %0, 1, 0, over;\n}"
            : "=r"(is_over)
            : "r"(shared_offset(barrier)), "r"(parity)
            : "memory"
        );
    }
}

// Of `threads` threads that name the same one of the block's barriers.
template <int id, int threads>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}
// Until all threads of the cluster have come, and what they wrote can be read. A block that was
// launched alone is a cluster.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Which of the launch's clusters this is, and which of its blocks.
__device__ __forceinline__ uint32_t cluster_index() {
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// From this place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float4 load_cluster(const float4* from, int rank) {
    float4 four;
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_offset(from)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(address)
                 : "memory");
    return four;
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
// them 128 bytes on end, `k_stride` bytes apart along k and 128 bytes along the rows.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* shared, uint32_t k_stride) {
    const uint64_t start = (shared_offset(shared) & 0x3ffff) >> 4;
    constexpr uint64_t kRowStride = 128 >> 4;
    return start | static_cast<uint64_t>(k_stride >> 4) << 16 | kRowStride << 32;
}

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

// d [64, 2 * count] float32 = (adds ? d : 0) + a [64, 16] float16 * b; warp w of the group has rows
// 16 w .. 16 w + 15 of a and of d, as fragments of m16n8k16: of d, one after the other along n.
#define EXL_F4(at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define EXL_F16(at) EXL_F4(at), EXL_F4(at + 4), EXL_F4(at + 8), EXL_F4(at + 12)
__device__ __forceinline__ void group_product(
    float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool adds
) {
    asm volatile(
        "{\n .reg .pred adds;\n setp.ne.b32 adds, %13, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, adds, 1, 1, 0;\n}"
        : EXL_F4(0), EXL_F4(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds))
    );
}
__device__ __forceinline__ void group_product(
    float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool adds
) {
    asm volatile(
        "{\n .reg .pred adds;\n setp.ne.b32 adds, %21, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, adds, 1, 1, 0;\n}"
        : EXL_F16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds))
    );
}
__device__ __forceinline__ void group_product(
    float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool adds
) {
    asm volatile(
        "{\n .reg .pred adds;\n setp.ne.b32 adds, %37, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, adds, 1, 1, 0;\n}"
        : EXL_F16(0), EXL_F16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds))
    );
}
#undef EXL_F16
#undef EXL_F4

}  // namespace exl::cuda

#endif  // EXL_IS_HOPPER

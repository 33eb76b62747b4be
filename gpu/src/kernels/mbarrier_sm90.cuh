// mbarriers, bulk copies and distributed shared memory (DSMEM) of sm_90, under their PTX names.
#pragma once
#include "primitives_sm80.cuh"

#if __CUDA_ARCH__ >= 900
// A phase of the barrier completes after `arrivals` arrivals and all expected transaction bytes. Other threads may use
// it after __syncthreads().
__device__ __forceinline__ void mbarrier_init(void* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(void* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(void* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits until phase number `phase` has completed. The hardware compares parities: the caller must have seen every phase
// before it.
__device__ __forceinline__ void mbarrier_wait(void* barrier, u32 phase) {
    asm volatile("{\n .reg .pred done;\nWAIT%=:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 " @!done bra WAIT%=;\n}" ::"r"(smem_address(barrier)),
                 "r"(phase % 2)
                 : "memory");
}

// Bulk copy to shared memory by the copy engine; the barrier counts its bytes.
__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, u32 bytes, void* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(shared)),
                 "l"(global), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// Bulk copy from shared to global memory, which joins this thread's current group of stores.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_address(shared)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the copy engine has read all but the latest GROUPS of this thread's store groups from shared memory;
// their buffers may then be overwritten.
template <int GROUPS>
__device__ __forceinline__ void bulk_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
// Waits until these groups are complete.
template <int GROUPS>
__device__ __forceinline__ void bulk_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS) : "memory");
}

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ u32 cluster_nctarank() {
    u32 blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
// A barrier of all threads of the cluster, with release and acquire order.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Maps an address in this block's shared memory to the same location in block `rank` of the cluster.
__device__ __forceinline__ u32 mapa(const void* shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(shared)), "r"(rank));
    return address;
}
// Adds to, sets bits of, or stores to, the shared memory of block `rank`.
__device__ __forceinline__ void red_add_cluster(void* shared, u32 rank, u32 x) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(mapa(shared, rank)), "r"(x) : "memory");
}
__device__ __forceinline__ void red_or_cluster(void* shared, u32 rank, u32 x) {
    asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(mapa(shared, rank)), "r"(x) : "memory");
}
__device__ __forceinline__ void st_cluster(void* shared, u32 rank, uint2 x) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(mapa(shared, rank)), "r"(x.x), "r"(x.y) : "memory");
}
// The same, asynchronously; the mbarrier there counts the bytes.
__device__ __forceinline__ void st_async(void* shared, u32 rank, u32 x, u64& barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(mapa(shared, rank)),
                 "r"(x), "r"(mapa(&barrier, rank))
                 : "memory");
}
__device__ __forceinline__ void st_async(void* shared, u32 rank, uint2 x, u64& barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(mapa(shared, rank)),
        "r"(x.x), "r"(x.y), "r"(mapa(&barrier, rank))
        : "memory");
}
// Waits for the first phase, with acquire order at cluster scope: the st_async of other blocks are then visible.
__device__ __forceinline__ void mbarrier_wait_cluster(u64& barrier) {
    asm volatile("{\n .reg .pred done;\nWAIT%=:\n mbarrier.try_wait.parity.acquire.cluster.shared.b64 done, [%0], 0;\n"
                 " @!done bra WAIT%=;\n}" ::"r"(smem_address(&barrier))
                 : "memory");
}
#endif

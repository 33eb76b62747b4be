// sm_90 only: TMA tile copies issued by one thread, and asynchronous warpgroup MMA (wgmma) with both operands in shared
// memory.
//
// A box consists of rows of 64 elements (128 bytes) with the 128-byte swizzle, as `swizzled<8>` computes it.
#pragma once
#include "mbarrier_sm90.cuh"

constexpr int GROUP_THREADS = 128; // of a warpgroup
constexpr int WIDTH = 64;          // elements of a row of a box

// The 128 bytes that cuTensorMapEncodeTiled writes, for elements [head][row][component].
struct alignas(128) TensorMap {
    u64 opaque[16];
};

// TMA load of a box; the barrier counts its bytes, and elements out of range are zero. EVICT_FIRST: the L2 hint, so
// that what the kernel writes stays in L2. It took 2 to 3 % off Gram, whose parts are read again at once, and made
// Project, whose results are not read again, 6 to 11 % slower.
template <bool EVICT_FIRST>
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, u32 component, u32 row, u32 head,
                                         void* barrier) {
    u64 policy;
    if (EVICT_FIRST)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(shared)),
                 "l"(&map), "r"(component), "r"(row), "r"(head), "r"(smem_address(barrier)), "l"(policy)
                 : "memory");
}

// The producer's loop: loads `tiles` tiles, each SIDE boxes wide, into a ring. `full[stage]` completes when the tile
// has arrived, `empty[stage]` when all consumer warps have left it. `first_row(i)` is the first row of tile `i`.
template <bool EVICT_FIRST, int STAGES, int SIDE, int ROWS, class FirstRow>
__device__ __forceinline__ void tma_load_tiles(u16 (&ring)[STAGES][SIDE][ROWS][WIDTH], u64 (&full)[STAGES],
                                               u64 (&empty)[STAGES], const TensorMap& map, u32 tiles, u32 head,
                                               const FirstRow& first_row) {
    for (u32 i = 0; i < tiles; i++) {
        const u32 stage = i % STAGES;
        if (i >= STAGES) mbarrier_wait(&empty[stage], i / STAGES - 1);
        mbarrier_arrive_expect_tx(&full[stage], SIDE * ROWS * WIDTH * 2);
#pragma unroll
        for (int side = 0; side < SIDE; side++)
            tma_load<EVICT_FIRST>(ring[stage][side], map, side * WIDTH, first_row(i), head, &full[stage]);
    }
}

// TMA store of a box; elements out of range are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 component, u32 row, u32 head, const void* shared) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(component), "r"(row), "r"(head), "r"(smem_address(shared))
                 : "memory");
}

// Proxy fence: this thread's generic writes to shared memory become visible to TMA and wgmma. Writers call it before
// the barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barrier `barrier` (1 to 15) of `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at a named barrier for which others wait with `named_barrier_sync`.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Raises or lowers the registers per thread of the calling warpgroup to COUNT, a multiple of 8.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// The wgmma descriptor of an operand in a box. Not transposed: 16 components, which need not be the first, of 64 rows.
// Transposed: all components of 16 rows, the first of which is a multiple of 8.
__device__ __forceinline__ u64 smem_descriptor(const void* box) {
    constexpr u64 SWIZZLE_128B = 1ull << 62, EIGHT_ROWS = 8 * 2 * WIDTH;
    return SWIZZLE_128B | EIGHT_ROWS / 16 << 32 | (smem_address(box) & 0x3ffff) / 16;
}
// The descriptor of one (8, 8) matrix that repeats: both strides are 0.
__device__ __forceinline__ u64 smem_descriptor_repeated(const void* matrix) {
    return (smem_address(matrix) & 0x3ffff) / 16;
}

#if ELEMENT == 2
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif
#define WGMMA_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_16(c, i) WGMMA_4(c, i), WGMMA_4(c, i + 4), WGMMA_4(c, i + 8), WGMMA_4(c, i + 12)
#define WGMMA_32(c, i) WGMMA_16(c, i), WGMMA_16(c, i + 16)

// wgmma.m64n64k16: c = x y, or c += x y where `add`; y is transposed in shared memory. Thread 32 w + 4 g + l of the
// warpgroup holds
//   c[i] = c[16 w + g + 8 (i / 2 % 2)][8 (i / 4) + 2 l + i % 2]
template <bool X_TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&c)[32], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, "
                 "1, %35, 1;\n}"
                 : WGMMA_16(c, 0), WGMMA_16(c, 16)
                 : "l"(x), "l"(y), "r"((int)add), "n"((int)X_TRANSPOSED));
}
// wgmma.m64n8k16; y is not transposed.
template <bool X_TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&c)[4], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8k16." WGMMA_TYPES
                 " {%0, %1, %2, %3}, %4, %5, add, 1, 1, %7, 0;\n}"
                 : WGMMA_4(c, 0)
                 : "l"(x), "l"(y), "r"((int)add), "n"((int)X_TRANSPOSED));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most GROUPS of the committed groups are pending.
template <int GROUPS = 0>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Keeps the compiler from moving reads of the accumulators before `wgmma_wait` (CUTLASS: warpgroup_fence_operand).
template <int COUNT>
__device__ __forceinline__ void wgmma_keep(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}

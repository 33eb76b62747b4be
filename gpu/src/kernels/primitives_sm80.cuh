// PTX instructions of sm_80 and later under their PTX names; a comment says what the PTX manual does not.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Loads from a 32-bit shared memory address. The first function is for data that no longer changes.
__device__ __forceinline__ u32 ld_shared_const_u32(u32 address) {
    u32 x;
    asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ u32 ld_shared_u16(u32 address) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

// mma.m16n8k16: c += a b, a (16, 16) and b (16, 8) in f16, c (16, 8) in f32. Lane 4 g + l holds
//   a[i] = a[g + 8 (i & 1)][2 l + 8 (i >> 1) .. + 2]
//   b[i] = b[2 l + 8 i .. + 2][g]
//   c[i] = c[g + 8 (i >> 1)][2 l + (i & 1)]
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = a b.
__device__ __forceinline__ void mma_m16n8k16_f16_init(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// The same with a and b in bf16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with a and b of ELEMENT, f16 or bf16.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == 2
    mma_m16n8k16_bf16(c, a, b0, b1);
#else
    mma_m16n8k16_f16(c, a, b0, b1);
#endif
}
__device__ __forceinline__ void mma_m16n8k16_init(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == 2
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
#else
    mma_m16n8k16_f16_init(c, a, b0, b1);
#endif
}

// mma.sp.m16n8k32: c += a b, a (16, 32) and b (32, 8) in f16, c (16, 8) in f32. Of every four adjacent columns of a row
// of a, two are stored, and `metadata` selects them: four bits per four columns, 0x4 for the first two and 0xe for the
// last two. Lane 4 g + l holds
//   a[i] = the stored two of a[g + 8 (i & 1)][4 l + 16 (i >> 1) .. + 4]
//   b[i] = b[2 l + 8 i .. + 2][g]
//   c[i] = c[g + 8 (i >> 1)][2 l + (i & 1)]
// and lanes with l < 2 hold the metadata of columns 16 l to 16 l + 15: row g in the low half, row g + 8 in the high.
#if __CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5
#define MMA_SP "mma.sp::ordered_metadata" // PTX 8.5
#else
#define MMA_SP "mma.sp"
#endif
__device__ __forceinline__ void mma_sp_m16n8k32_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    asm(MMA_SP ".sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
               "{%0, %1, %2, %3}, %12, 0;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata));
}

// c = a b.
__device__ __forceinline__ void mma_sp_m16n8k32_f16_init(float (&c)[4], const u32 (&a)[4], const u32 (&b)[4],
                                                         u32 metadata) {
    asm(MMA_SP ".sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
               "{%13, %13, %13, %13}, %12, 0;"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "f"(0.f));
}

// mma.m16n8k32: c += a b (with `init` c = a b), a (16, 32) in u8, b (32, 8) in s8 or u8, c (16, 8) in s32. Lane 4 g + l
// holds, in bytes,
//   a[i] = a[g + 8 (i & 1)][4 l + 16 (i >> 1) .. + 4]
//   b[i] = b[4 l + 16 i .. + 4][g]
//   c[i] = c[g + 8 (i >> 1)][2 l + (i & 1)]
#define MMA_M16N8K32(B) "mma.sync.aligned.m16n8k32.row.col.s32.u8." B ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
__device__ __forceinline__ void mma_m16n8k32_u8s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(MMA_M16N8K32("s8") "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k32_u8s8_init(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(MMA_M16N8K32("s8") "{%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
__device__ __forceinline__ void mma_m16n8k32_u8u8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(MMA_M16N8K32("u8") "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two FP8 numbers (E4M3), in the low 16 bits, as two halves. NaN stays NaN.
__device__ __forceinline__ u32 e4m3_to_half2(u32 pair) {
    u32 halves;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
#else
    // Exponent and mantissa in the places of those of a half make a number 2^8 times too small; 0x7f becomes a NaN.
    const u32 bytes = prmt(pair, 0, 0x1404), magnitude = bytes >> 1 & 0x3f803f80u;
    const u32 scaled = magnitude | ((magnitude + 0x00800080u) & 0x40004000u) | (bytes & 0x80008000u);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(scaled), "r"(0x5c005c00u)); // 256
#endif
    return halves;
}

// Transposes an (8, 8) matrix of 16-bit elements of which lane 4 g + l holds row g, columns 2 l and 2 l + 1.
__device__ __forceinline__ u32 movmatrix_trans(u32 pair) {
    u32 transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// ldmatrix.x4: lanes 8 i to 8 i + 7 point to the 16-byte rows of matrix i; lane 4 g + l gets row g, columns 2 l and 2 l
// + 1 of each.
__device__ __forceinline__ void ldmatrix_x4(u32 (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(smem_address(row)));
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(smem_address(row)));
}

// A 16-byte chunk of a row of a tile of 16-bit elements, with the 128-byte XOR swizzle: chunk ^= row % 8, so that a
// column of chunks lies in different banks. Rows whose chunks are not a multiple of 8 are not swizzled.
template <int CHUNKS>
__device__ __forceinline__ u16* swizzled(u16* tile, int row, int chunk) {
    return tile + (row * CHUNKS + (CHUNKS % 8 ? chunk : chunk ^ (row & 7))) * 8;
}

__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
// Writes zeros if not `valid` (a source size of 0); `global` must then still be a device address.
__device__ __forceinline__ void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_4_zfill(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(shared)), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most GROUPS of this thread's copy groups are pending.
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch (PDL): lets the next kernel's blocks be scheduled as this kernel's blocks exit. That
// kernel must call `pdl_wait` before it reads what this one wrote. Before sm_90 both are no-ops, and kernels run one
// after the other.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the previous kernel has ended and its writes are visible. L1 is not coherent with them: loads before the
// wait bypass it.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads words that are read only once, without allocating a line in L1.
template <int WORDS>
__device__ __forceinline__ void ld_nc_no_allocate(u32* to, const void* from) {
    if constexpr (WORDS == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

__device__ __forceinline__ void prefetch_global_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Prefetches `bytes` bytes: `threads` threads share the lines of 128 bytes.
__device__ __forceinline__ void prefetch_global_l2(const u8* from, u64 bytes, u64 thread, u64 threads) {
    for (u64 at = 128 * thread; at < bytes; at += 128 * threads) prefetch_global_l2(from + at);
}

// A single 16-byte store. The compiler splits the assignment of a structure into four stores.
__device__ __forceinline__ void st_global_v4(void* to, const u32 (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void st_release(u32* to, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ u32 ld_acquire(const u32* from) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// atomicAdd with acq_rel order: the block's writes before its last barrier are visible to threads that acquire the new
// value.
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* counter, u32 x) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(x) : "memory");
    return old;
}

// What every kernel file starts with. No header is included, so that NVRTC needs none installed.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 FULL = 0xffffffffu;
constexpr int LANES = 32;
constexpr float NOTHING = -1e30f; // a maximum below every score, and yet a number
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as two halves, the first in the low bits.
__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ u16 float_to_bfloat(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Elements of queries, exact keys and values, and outputs: f16, or bf16 with -DBFLOAT.
#ifdef BFLOAT
__device__ __forceinline__ float element_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 float_to_element(float x) { return float_to_bfloat(x); }
#else
__device__ __forceinline__ float element_to_float(u16 bits) { return half_to_float(bits); }
__device__ __forceinline__ u16 float_to_element(float x) { return float_to_half(x); }
#endif

// Two floats as two elements, the first in the low bits.
__device__ __forceinline__ u32 pack_elements(float low, float high) {
#ifdef BFLOAT
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return pack_half2(low, high);
#endif
}

// Bytes of `a` (0 to 3) and `b` (4 to 7) picked by the nibbles of `selector`; 8 more takes a byte's sign instead.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
    return picked;
}

// c += a b, with a (16, 16) and b (16, 8) halves, c (16, 8) floats. Lane 4 g + l holds a[g + 8 (i & 1)][2 l + 8 (i >> 1)..+2]
// as a[i], b[2 l + 8 i..+2][g] as b[i], c[g + 8 (i >> 1)][2 l + (i & 1)] as c[i].
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b, with elements.
__device__ __forceinline__ void multiply_add_elements(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add(c, a, b0, b1);
#endif
}

// c = a b.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// c = a b, with elements.
__device__ __forceinline__ void multiply_elements(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
#else
    multiply(c, a, b0, b1);
#endif
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// With zeros in the place of what is not there.
__device__ __forceinline__ void copy_async_16_if(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_4_if(void* shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many groups are on their way.
template <int GROUPS>
__device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Four (8, 8) matrices of 16-bit elements, whose rows of 16 bytes the lanes point to, eight lanes a matrix: lane 4 g + l gets row g,
// columns 2 l and 2 l + 1, or of the transposed matrices.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_transposed(u32 (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row)));
}

// Where a row of a tile of 16-bit elements has a chunk of 16 bytes. Rows of eight chunks or more are turned, so that a column of chunks
// lies in different banks.
template <int CHUNKS>
__device__ __forceinline__ u16* chunk_at(u16* tile, int row, int chunk) {
    return tile + (row * CHUNKS + (CHUNKS % 8 ? chunk : chunk ^ (row & 7))) * 8;
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if __CUDA_ARCH__ >= 900
// A barrier whose phase ends when so many have arrived and all bytes that they expect have come. Others may use it after a barrier of
// the block.
__device__ __forceinline__ void make_barrier(void* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(void* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(void* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_in_bulk(void* shared, const void* global, u32 bytes, void* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Until the barrier's phase number `phase` has ended; one later has not.
__device__ __forceinline__ void wait_for_phase(void* barrier, u32 phase) {
    asm volatile("{\n .reg .pred done;\nWAIT%=:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra WAIT%=;\n}" ::"r"(
                     shared_address(barrier)),
                 "r"(phase % 2)
                 : "memory");
}
#endif

// Where kernels were launched to overlap: the next may have its blocks come in as this one's leave, and must wait for all of this
// one before it reads what it wrote.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Words that are read once: past L1.
template <int WORDS>
__device__ __forceinline__ void load_streaming(u32* to, const void* from) {
    if constexpr (WORDS == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// A condition that is the same in all lanes of a warp. The vote lets the compiler know, which only then keeps addresses that all
// lanes share in uniform registers: without it the base of shared memory is added to every address of a look-up.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(FULL, condition); }

// Adds to a counter; what the block wrote before its last barrier comes before, for whoever sees the sum in the same way.
__device__ __forceinline__ u32 add_and_order(u32* counter, u32 x) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(x) : "memory");
    return old;
}

// Sixteen bytes at once, which the compiler makes four stores of where it assigns a structure.
__device__ __forceinline__ void store_four(void* to, const u32 (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// The sum over the lanes up to this one.
__device__ __forceinline__ u32 sum_through_lane(u32 x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const u32 other = __shfl_up_sync(FULL, x, step);
        if (threadIdx.x % LANES >= step) x += other;
    }
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

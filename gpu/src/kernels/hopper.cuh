// What sm_90 alone has: boxes of rows that are copied by a thread for all, and products of warpgroups whose operands lie in shared
// memory and which run by themselves (wgmma).
//
// A box is rows of 64 elements, that is 128 bytes, whose chunks of 16 are turned as `chunk_at<8>` does.

constexpr int GROUP_THREADS = 128; // of a warpgroup
constexpr int WIDTH = 64;          // of a box

// cuTensorMapEncodeTiled's, of elements [head][row][component].
struct alignas(128) TensorMap {
    u64 opaque[16];
};

// A box to shared memory; the barrier expects its bytes. What the map does not reach is zeros. BEFORE_OTHERS: it leaves the second-level
// cache before all else, so that what the kernel writes stays there. That took 2 to 3 % off the second moments, whose parts are
// read again at once, and made projection, whose results are not, 6 to 11 % slower.
template <bool BEFORE_OTHERS>
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, u32 component, u32 row, u32 head, void* barrier) {
    u64 policy;
    if (BEFORE_OTHERS)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(component), "r"(row), "r"(head), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

// Has `tiles` tiles copied, each SIDE boxes wide and as soon as its place in the ring is free: a barrier says that it is full, another that
// all warps that read it have left it. `first_row(i)` is where tile `i` begins.
template <bool BEFORE_OTHERS, int STAGES, int SIDE, int ROWS, class FirstRow>
__device__ __forceinline__ void copy_tiles(u16 (&ring)[STAGES][SIDE][ROWS][WIDTH], u64 (&full)[STAGES], u64 (&empty)[STAGES],
                                           const TensorMap& map, u32 tiles, u32 head, const FirstRow& first_row) {
    for (u32 i = 0; i < tiles; i++) {
        const u32 stage = i % STAGES;
        if (i >= STAGES) wait_for_phase(&empty[stage], i / STAGES - 1);
        arrive_expecting(&full[stage], SIDE * ROWS * WIDTH * 2);
#pragma unroll
        for (int side = 0; side < SIDE; side++)
            copy_box<BEFORE_OTHERS>(ring[stage][side], map, side * WIDTH, first_row(i), head, &full[stage]);
    }
}

// A box from shared memory, but for what the map does not reach.
__device__ __forceinline__ void store_box(const TensorMap& map, u32 component, u32 row, u32 head, const void* shared) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(component), "r"(row),
                 "r"(head), "r"(shared_address(shared))
                 : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but so many groups of the thread's have been read from shared memory.
template <int GROUPS>
__device__ __forceinline__ void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}

// What warps wrote to shared memory is seen by boxes and products; for the writers, before a barrier.
__device__ __forceinline__ void show_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of some threads, which all name the same barrier, 1 to 15.
__device__ __forceinline__ void barrier_of(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Where products find an operand, in boxes. Not transposed: 16 components, which need not be the first, of 64 rows. Transposed: all
// components of 16 rows, which begin at a multiple of 8.
__device__ __forceinline__ u64 operand(const void* box) {
    constexpr u64 TURNED = 1ull << 62, EIGHT_ROWS = 8 * 2 * WIDTH;
    return TURNED | EIGHT_ROWS / 16 << 32 | (shared_address(box) & 0x3ffff) / 16;
}

// The same matrix of 8 x 8, wherever they look.
__device__ __forceinline__ u64 repeated_operand(const void* matrix) { return (shared_address(matrix) & 0x3ffff) / 16; }

#ifdef BFLOAT
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

// c = or += x y with 64 rows of x, 64 columns of y, 16 products a sum; y is found transposed. Thread 32 w + 4 g + l of the
// warpgroup has c[16 w + g + 8 (i / 2 % 2)][8 (i / 4) + 2 l + i % 2] as c[i].
template <bool X_TRANSPOSED>
__device__ __forceinline__ void multiply_async(float (&c)[32], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16." TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, %35, 1;\n}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 16)
                 : "l"(x), "l"(y), "r"((int)add), "n"((int)X_TRANSPOSED));
}
// The same with 8 columns, of a y that is not transposed.
template <bool X_TRANSPOSED>
__device__ __forceinline__ void multiply_async(float (&c)[4], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8k16." TYPES
                 " {%0, %1, %2, %3}, %4, %5, add, 1, 1, %7, 0;\n}"
                 : FOUR(c, 0)
                 : "l"(x), "l"(y), "r"((int)add), "n"((int)X_TRANSPOSED));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Sums stay in their registers until here.
template <int COUNT>
__device__ __forceinline__ void keep(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}

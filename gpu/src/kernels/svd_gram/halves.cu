// A block's part on sm_90, of 64 or 128 components: a warpgroup has 64 of them, and their products with themselves and those behind them.
//
// Nothing of a row passes through registers: a thread of its own has tiles copied to shared memory, where the tensor cores find both
// operands (wgmma). Warpgroups wait for tiles, not for each other, so that the sums of one are added up while the tensor cores
// have the other's.

constexpr int HALVES = DIM / 64, GROUP_THREADS = 128;
constexpr int THREADS = (HALVES + 1) * GROUP_THREADS; // of the last warpgroup, one thread has tiles copied
constexpr int STAGES = 6;

// cuTensorMapEncodeTiled's: elements [head][row][DIM], in boxes of 64 components of ROWS rows; behind the last row are zeros.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

struct Arguments {
    TensorMap rows;
    Sums sums;
};

struct Shared {
    u16 ring[STAGES][HALVES][ROWS][64]; // chunks turned as `chunk_at` does
    alignas(128) u32 ones[32];          // a matrix of 8 x 8
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host computes it, too");

// What the tensor cores find 16 rows of a tile by, transposed: 8 rows in 1024 bytes, the next 64 components behind all rows.
__device__ __forceinline__ u64 rows_descriptor(const u16* rows) {
    constexpr u64 TURNED = 1ull << 62, NEXT_HALF = ROWS * 128, NEXT_ROWS = 1024;
    return TURNED | NEXT_ROWS / 16 << 32 | NEXT_HALF / 16 << 16 | (shared_address(rows) & 0x3ffff) / 16;
}

// The same matrix of 8 x 8 wherever they look.
__device__ __forceinline__ u64 matrix_descriptor(const u32* matrix) { return (shared_address(matrix) & 0x3ffff) / 16; }

#ifdef BFLOAT
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

// c = or += x^T y over 16 rows, with 64 components of x and 2 COUNT of y. Thread 32 w + 4 g + l of the warpgroup holds
// c[16 w + g + 8 (i / 2 % 2)][8 (i / 4) + 2 l + i % 2] as c[i].
__device__ __forceinline__ void multiply_async(float (&c)[64], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k16." TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, 1, 1, 1, 1;\n}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
                 : "l"(x), "l"(y), "r"((int)add));
}
__device__ __forceinline__ void multiply_async(float (&c)[32], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16." TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 16)
                 : "l"(x), "l"(y), "r"((int)add));
}
// The same with 8 columns that need not be transposed.
__device__ __forceinline__ void multiply_async(float (&c)[4], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8k16." TYPES
                 " {%0, %1, %2, %3}, %4, %5, add, 1, 1, 1, 0;\n}"
                 : FOUR(c, 0)
                 : "l"(x), "l"(y), "r"((int)add));
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

// Registers of a thread, which with a third warpgroup do not suffice for a matrix unless that one gives some away.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    if (HALVES == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {
    if (HALVES == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Has the block's tiles copied, each as soon as its place in the ring is free.
__device__ __forceinline__ void copy_tiles(const Arguments& a, Shared& shared, const Range& range) {
    for (u32 i = 0; i < range.to - range.from; i++) {
        const u32 stage = i % STAGES;
        if (i >= STAGES) wait_for_phase(&shared.empty[stage], i / STAGES - 1);
        arrive_expecting(&shared.full[stage], TILE * 2);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                             shared_address(shared.ring[stage][half])),
                         "l"(&a.rows), "r"(half * 64), "r"((range.from + i) * ROWS), "r"(blockIdx.y), "r"(shared_address(&shared.full[stage]))
                         : "memory");
    }
}

// Components 64 HALF and on with those and the ones behind.
template <int HALF>
__device__ __forceinline__ void add_up(const Arguments& a, Shared& shared, const Range& range) {
    constexpr int COUNT = DIM / 2 - 32 * HALF;
    const int strip = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u64 ones = matrix_descriptor(shared.ones);
    TwoFloats totals[COUNT] = {}, row_totals[2] = {};
    float sums[COUNT], row_sums[4];
    for (u32 i = 0; i < range.to - range.from; i++) {
        const u32 stage = i % STAGES;
        wait_for_phase(&shared.full[stage], i / STAGES);
        begin_products();
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            const u64 rows = rows_descriptor(shared.ring[stage][HALF][step * 16]);
            multiply_async(row_sums, rows, ones, step > 0);
            multiply_async(sums, rows, rows, step > 0);
        }
        commit_products();
        wait_for_products();
        keep(sums), keep(row_sums);
        if (lane == 0) arrive(&shared.empty[stage]);
#pragma unroll
        for (int i = 0; i < COUNT; i++) totals[i].add(sums[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) row_totals[i].add(row_sums[2 * i]);
    }
    float* part = a.sums.part();
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (l == 0) part[DIM * DIM + strip * 16 + g + 8 * i] = row_totals[i].sum();
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const int row = strip * 16 + g + i / 2 % 2 * 8, column = 64 * HALF + i / 4 * 8 + 2 * l;
        *reinterpret_cast<float2*>(part + row * DIM + column) = make_float2(totals[i].sum(), totals[i + 1].sum());
    }
}

extern __shared__ __align__(1024) u8 memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x < 32) shared.ones[threadIdx.x] = ONES;
    if (threadIdx.x < STAGES) make_barrier(&shared.full[threadIdx.x], 1), make_barrier(&shared.empty[threadIdx.x], STRIPS);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the tensor cores see the ones
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Range range(a.sums);
    if (threadIdx.x >= HALVES * GROUP_THREADS) {
        leave_registers<40>();
        if (threadIdx.x == HALVES * GROUP_THREADS) copy_tiles(a, shared, range);
        return;
    }
    take_registers<232>();
    if (threadIdx.x < GROUP_THREADS)
        add_up<0>(a, shared, range);
    else
        add_up<HALVES - 1>(a, shared, range);
}

// Gram parts on sm_90, for DIM 64 and 128, with TMA and wgmma: `svd_gram` computes partial second moments of
// rows, X^T X and the sum of X per head; `svd_gram_join` adds them up. See gram.cuh for their precision.
//
// CPU twin: svd_core::Gram. Compile-time shape: DIM (64 or 128), ELEMENT (1 or 2), SHARED_BYTES. The floor is reading
// the rows.
//
// Launch: grid (part_count, heads), one block per multiprocessor. The matrix is cut into squares of 64 x 64, without
// the one below the diagonal. A warpgroup owns a square: one consumer for DIM 64, three for DIM 128. One thread of an
// additional warp, the producer, loads tiles of 128 rows by TMA into a ring of 6 in shared memory.
//
// wgmma reads both operands from shared memory, so rows never pass through registers. Warpgroups wait for tiles, not
// for each other: while one adds its accumulators to its compensated sums, the tensor cores work for another.
//
// Where the time went, for 8 heads of 32,768 rows on an H200: of 26.7 us, 2.5 were the second kernel; loads without
// products, sums and stores took 18.0. Since then TMA loads carry an L2 evict-first hint, and blocks store only the
// elements that `svd_gram_join` reads. At 32 heads the kernel reaches 83 % of the floor.
//
// Tried: loading rows before the PDL wait gained nothing. Issuing the products of the next tile before the sums of the
// current one needs more than the 128 registers that 13 warps leave. Clusters of blocks that add up their parts of a
// head in distributed shared memory would be the next step.
#include "svd_gram/gram.cuh"
#include "svd_gram/join.cuh"
#include "warp.cuh"
#include "wgmma_sm90.cuh"

constexpr int SIDE = DIM / WIDTH, SQUARES = SIDE * (SIDE + 1) / 2;
constexpr int THREADS = SQUARES * GROUP_THREADS + LANES; // the last warp is the producer
constexpr int STAGES = 6;

struct Arguments {
    TensorMap rows; // boxes of ROWS x WIDTH
    Sums sums;
};

struct Shared {
    u16 ring[STAGES][SIDE][ROWS][WIDTH];
    alignas(128) u32 ones[32];       // an (8, 8) matrix of ones
    u64 full[STAGES], empty[STAGES]; // mbarriers: the tile has arrived; all consumer warps have left it
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves enough");

// A consumer warpgroup: accumulates square (x, y) of the matrix and, on the diagonal, the sums of rows.
template <bool DIAGONAL>
__device__ __forceinline__ void accumulate_square(const Arguments& a, Shared& shared, const Range& range, int x,
                                                  int y) {
    const int warp = threadIdx.x / LANES % 4, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u64 ones = smem_descriptor_repeated(shared.ones);
    CompensatedSum totals[32] = {}, row_totals[2] = {};
    float sums[32], row_sums[4];
    for (u32 i = 0; i < range.to - range.from; i++) {
        const u32 stage = i % STAGES;
        mbarrier_wait(&shared.full[stage], i / STAGES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ROWS; step += 16) {
            const u64 left = smem_descriptor(shared.ring[stage][x][step]),
                      right = smem_descriptor(shared.ring[stage][y][step]);
            if (DIAGONAL) wgmma<true>(row_sums, left, ones, step > 0);
            wgmma<true>(sums, left, right, step > 0);
        }
        wgmma_commit();
        wgmma_wait();
        wgmma_keep(sums), wgmma_keep(row_sums);
        if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
#pragma unroll
        for (int i = 0; i < 32; i++) totals[i].add(sums[i]);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (DIAGONAL) row_totals[i].add(row_sums[2 * i]);
    }
    float* part = a.sums.part();
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (DIAGONAL && l == 0) part[DIM * DIM + WIDTH * x + 16 * warp + g + 8 * i] = row_totals[i].sum();
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        if (DIAGONAL && 8 * (i / 4) + 8 <= 16 * warp) continue; // below the diagonal blocks of 16 x 16, not read
        const int row = WIDTH * x + 16 * warp + g + 8 * (i / 2 % 2), column = WIDTH * y + 8 * (i / 4) + 2 * l;
        *reinterpret_cast<float2*>(part + row * DIM + column) = make_float2(totals[i].sum(), totals[i + 1].sum());
    }
}

extern __shared__ __align__(1024) u8 smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    if (threadIdx.x < 32) shared.ones[threadIdx.x] = ONES;
    if (threadIdx.x < STAGES)
        mbarrier_init(&shared.full[threadIdx.x], 1), mbarrier_init(&shared.empty[threadIdx.x], SQUARES * 4);
    fence_proxy_async();
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    const Range range(a.sums);
    const int square = threadIdx.x / GROUP_THREADS;
    if (threadIdx.x == SQUARES * GROUP_THREADS)
        tma_load_tiles<true>(shared.ring, shared.full, shared.empty, a.rows, range.to - range.from, blockIdx.y,
                             [&](u32 i) { return (range.from + i) * ROWS; });
    else if (square < SIDE)
        accumulate_square<true>(a, shared, range, square, square);
    else if (square < SQUARES)
        accumulate_square<false>(a, shared, range, 0, 1);
}

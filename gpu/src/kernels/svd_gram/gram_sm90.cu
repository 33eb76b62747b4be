// A block's part on sm_90, of 64 or 128 components: a warpgroup has a square of WIDTH x WIDTH of the matrix, that in
// the lower left left out.
//
// Nothing of a row passes through registers: a thread of its own has tiles copied to shared memory, where the tensor
// cores find both operands. Warpgroups wait for tiles, not for each other, so that the sums of one are added up while
// the tensor cores have those of another.
#include "svd_gram/gram.cuh"
#include "svd_gram/join.cuh"
#include "warp.cuh"
#include "wgmma_sm90.cuh"

constexpr int SIDE = DIM / WIDTH, SQUARES = SIDE * (SIDE + 1) / 2;
constexpr int THREADS = SQUARES * GROUP_THREADS + LANES; // the last warp has tiles copied
constexpr int STAGES = 6;

struct Arguments {
    TensorMap rows; // in boxes of ROWS
    Sums sums;
};

struct Shared {
    u16 ring[STAGES][SIDE][ROWS][WIDTH];
    alignas(128) u32 ones[32]; // a matrix of 8 x 8
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for enough");

// The square of row x and column y; on the diagonal, sums of rows, too.
template <bool DIAGONAL>
__device__ __forceinline__ void add_up(const Arguments& a, Shared& shared, const Range& range, int x, int y) {
    const int warp = threadIdx.x / LANES % 4, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u64 ones = smem_descriptor_repeated(shared.ones);
    TwoFloats totals[32] = {}, row_totals[2] = {};
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
        if (DIAGONAL && 8 * (i / 4) + 8 <= 16 * warp) continue; // below the strips' own blocks, which nobody reads
        const int row = WIDTH * x + 16 * warp + g + 8 * (i / 2 % 2), column = WIDTH * y + 8 * (i / 4) + 2 * l;
        *reinterpret_cast<float2*>(part + row * DIM + column) = make_float2(totals[i].sum(), totals[i + 1].sum());
    }
}

extern __shared__ __align__(1024) u8 memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
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
        add_up<true>(a, shared, range, square, square);
    else if (square < SQUARES)
        add_up<false>(a, shared, range, 0, 1);
}

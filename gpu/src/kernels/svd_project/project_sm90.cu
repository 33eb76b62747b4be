// Rows times a map on sm_90, of 64 or 128 components: rows come to shared memory and results leave it in boxes, and the
// products find rows and map there.
//
// CPU twin: svd_core::Map::project_into. Compile-time shape: DIM, 64 or 128; RANK, a multiple of 8; ELEMENT 1 or 2. The
// map is rounded to halves; with bfloats, to the sum of two, since one has 8 bits only.
//
// A block has a part of a head's rows. Its warpgroups take ROWS of them in turn. The floor is reading the rows and
// writing the components.
#include "element.cuh"
#include "warp.cuh"
#include "wgmma_sm90.cuh"

constexpr int GROUPS = 2, THREADS = GROUPS * GROUP_THREADS + LANES;     // the last warp has rows copied
constexpr int ROWS = 64;                                                // of a tile
constexpr int SIDE = DIM / WIDTH, COLUMNS = (RANK + WIDTH - 1) / WIDTH; // boxes across
constexpr int STAGES = 6;
// A thread that does not see every phase of a barrier takes an earlier one for a later: boxes do not come in the order
// of their copies.
static_assert(STAGES % GROUPS == 0, "a place in the ring is always the same warpgroup's");
#if ELEMENT == 2
constexpr int PARTS = 2; // of the map
#else
constexpr int PARTS = 1;
#endif

struct Arguments {
    TensorMap rows, out;  // in boxes of ROWS
    const float* columns; // [head][DIM][RANK]
    u64 n;
    u32 pdl; // whether the kernel before it writes no columns
};

struct Shared {
    u16 ring[STAGES][SIDE][ROWS][WIDTH];
    u16 map[PARTS][COLUMNS][DIM][WIDTH];
    u16 out[GROUPS][2][COLUMNS][ROWS][WIDTH];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for enough");

// The tiles of a block: every gridDim.x-th of a head.
__device__ __forceinline__ u32 tiles_of(const Arguments& a) {
    const u32 tiles = (u32)((a.n + ROWS - 1) / ROWS);
    return (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
}
__device__ __forceinline__ u32 first_row(u32 i) { return (blockIdx.x + i * gridDim.x) * ROWS; }

// Columns behind the rank are zeros.
__device__ __forceinline__ void load_map(const Arguments& a, Shared& shared) {
    constexpr int FOURS = COLUMNS * WIDTH / 4; // of a row of the map
    const float* columns = a.columns + (u64)blockIdx.y * DIM * RANK;
#pragma unroll 8
    for (int i = threadIdx.x; i < DIM * FOURS; i += GROUPS * GROUP_THREADS) {
        const int column = i % FOURS * 4, d = i / FOURS;
        float4 four = {0, 0, 0, 0};
        if (column < RANK) four = *reinterpret_cast<const float4*>(columns + d * RANK + column);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint2 rounded = make_uint2(pack_elements(four.x, four.y), pack_elements(four.z, four.w));
            u16* at = swizzled<8>(&shared.map[part][column / WIDTH][0][0], d, column % WIDTH / 8) + column % 8;
            *reinterpret_cast<uint2*>(at) = rounded;
            four.x -= to_float((u16)rounded.x), four.y -= to_float((u16)(rounded.x >> 16));
            four.z -= to_float((u16)rounded.y), four.w -= to_float((u16)(rounded.y >> 16));
        }
    }
    fence_proxy_async();
    named_barrier_sync(1, GROUPS * GROUP_THREADS);
}

__device__ __forceinline__ void project(const Arguments& a, Shared& shared) {
    const int group = threadIdx.x / GROUP_THREADS, thread = threadIdx.x % GROUP_THREADS;
    const int warp = thread / LANES, lane = thread % LANES, g = lane / 4, l = lane % 4;
    const u32 tiles = tiles_of(a);
    float sums[COLUMNS][32];
    int buffer = 0;
    for (u32 i = group; i < tiles; i += GROUPS, buffer ^= 1) {
        const u32 stage = i % STAGES;
        mbarrier_wait(&shared.full[stage], i / STAGES);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int step = 0; step < DIM; step += 16)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    wgmma<false>(sums[c], smem_descriptor(&shared.ring[stage][step / WIDTH][0][step % WIDTH]),
                                 smem_descriptor(shared.map[part][c][step]), part + step > 0);
        wgmma_commit();
        // Meanwhile, until the tile before the last has left its place.
        if (thread == 0) tma_store_wait_read<1>();
        named_barrier_sync(2 + group, GROUP_THREADS);
        wgmma_wait();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) wgmma_keep(sums[c]);
        if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int j = 0; j < 32; j += 2) {
                const int row = 16 * warp + g + 8 * (j / 2 % 2);
                u16* at = swizzled<8>(&shared.out[group][buffer][c][0][0], row, j / 4) + 2 * l;
                *reinterpret_cast<u32*>(at) = pack_elements(sums[c][j], sums[c][j + 1]);
            }
        fence_proxy_async();
        named_barrier_sync(2 + group, GROUP_THREADS);
        if (thread == 0) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                tma_store(a.out, c * WIDTH, first_row(i), blockIdx.y, shared.out[group][buffer][c]);
            tma_store_commit();
        }
    }
    if (thread == 0) tma_store_wait_read<0>();
}

extern __shared__ __align__(1024) u8 memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_project(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x < STAGES) mbarrier_init(&shared.full[threadIdx.x], 1), mbarrier_init(&shared.empty[threadIdx.x], 4);
    __syncthreads();
    const bool projects = warp_uniform(threadIdx.x < GROUPS * GROUP_THREADS);
    if (!a.pdl) pdl_wait();
    if (projects) load_map(a, shared);
    pdl_wait();
    pdl_trigger();
    if (projects)
        project(a, shared);
    else if (threadIdx.x == GROUPS * GROUP_THREADS)
        tma_load_tiles<false>(shared.ring, shared.full, shared.empty, a.rows, tiles_of(a), blockIdx.y, first_row);
}

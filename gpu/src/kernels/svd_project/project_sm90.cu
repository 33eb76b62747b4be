// Projects rows with a map on sm_90, for DIM 64 and 128, head by head: out = rows (n, DIM) times columns (DIM, RANK),
// with TMA and wgmma.
//
// CPU twin: svd_core::Map::project_into. Compile-time shape: DIM (64 or 128), RANK (a multiple of 8), ELEMENT (1 for
// f16, 2 for bf16), SHARED_BYTES. The map is rounded to f16; with bf16, whose significand has 8 bits, it is split into
// the sum of two elements.
//
// Launch: grid (blocks, heads), one block per multiprocessor, with PDL. A block takes every gridDim.x-th tile of 64
// rows of a head. One thread of the last warp, the producer, loads tiles by TMA into a ring of 6; two consumer
// warpgroups take tiles in turn. wgmma reads rows and map from shared memory, and results leave through shared memory
// by TMA.
//
// The floor is reading the rows and writing the results. Bound by memory, whose traffic alternates between reads and
// writes, and by the time before the first product: the map is loaded in steps, each of which waits for L2.
//
// Tried: half as many steps for the map made it 1 to 5 % faster; one step for all of it was up to 12 % slower, since
// its many instructions must be fetched first. None of these gained at every shape: a ring of eight tiles instead of
// six, three warpgroups instead of two, contiguous ranges of tiles, an L2 evict-first hint for rows or for results.
// Results with an evict-last hint took 1 to 4 % less, at the cost of the other contents of L2, so they have none.
#include "element.cuh"
#include "warp.cuh"
#include "wgmma_sm90.cuh"

constexpr int GROUPS = 2, THREADS = GROUPS * GROUP_THREADS + LANES;     // the last warp is the producer
constexpr int ROWS = 64;                                                // rows of a tile
constexpr int SIDE = DIM / WIDTH, COLUMNS = (RANK + WIDTH - 1) / WIDTH; // boxes per row of input and output
constexpr int STAGES = 6;
// Waits test the phase parity. A warpgroup that skipped a phase would mistake an older phase for it, since TMA loads
// complete out of order.
static_assert(STAGES % GROUPS == 0, "a stage always belongs to the same warpgroup");
// The map is split into MAP_TERMS elements whose sum is its f32 value, rounded.
#if ELEMENT == 2
constexpr int MAP_TERMS = 2;
#else
constexpr int MAP_TERMS = 1;
#endif

struct Arguments {
    TensorMap rows, out;  // boxes of ROWS x WIDTH
    const float* columns; // [head][DIM][RANK]
    u64 n;
    u32 pdl; // nonzero if the previous kernel does not write `columns`
};

struct Shared {
    u16 ring[STAGES][SIDE][ROWS][WIDTH];
    u16 map[MAP_TERMS][COLUMNS][DIM][WIDTH];
    u16 out[GROUPS][2][COLUMNS][ROWS][WIDTH]; // double-buffered
    u64 full[STAGES], empty[STAGES];          // mbarriers: the tile has arrived; all consumer warps have left it
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves enough");

// The number of tiles of a block, which takes every gridDim.x-th of a head, and the first row of its tile `i`.
__device__ __forceinline__ u32 tiles_of(const Arguments& a) {
    const u32 tiles = (u32)((a.n + ROWS - 1) / ROWS);
    return (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
}
__device__ __forceinline__ u32 first_row(u32 i) { return (blockIdx.x + i * gridDim.x) * ROWS; }

// Called by the consumers: writes the map to shared memory, swizzled. Columns at or above RANK are zeros.
__device__ __forceinline__ void load_map(const Arguments& a, Shared& shared) {
    constexpr int QUADS = COLUMNS * WIDTH / 4; // groups of four columns
    const float* columns = a.columns + (u64)blockIdx.y * DIM * RANK;
#pragma unroll 8
    for (int i = threadIdx.x; i < DIM * QUADS; i += GROUPS * GROUP_THREADS) {
        const int column = i % QUADS * 4, d = i / QUADS;
        float4 quad = {0, 0, 0, 0};
        if (column < RANK) quad = *reinterpret_cast<const float4*>(columns + d * RANK + column);
#pragma unroll
        for (int term = 0; term < MAP_TERMS; term++) {
            const uint2 rounded = make_uint2(pack_elements(quad.x, quad.y), pack_elements(quad.z, quad.w));
            u16* at = swizzled<8>(&shared.map[term][column / WIDTH][0][0], d, column % WIDTH / 8) + column % 8;
            *reinterpret_cast<uint2*>(at) = rounded;
            quad.x -= to_float((u16)rounded.x), quad.y -= to_float((u16)(rounded.x >> 16));
            quad.z -= to_float((u16)rounded.y), quad.w -= to_float((u16)(rounded.y >> 16));
        }
    }
    fence_proxy_async();
    named_barrier_sync(1, GROUPS * GROUP_THREADS);
}

// A consumer warpgroup.
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
        for (int term = 0; term < MAP_TERMS; term++)
#pragma unroll
            for (int step = 0; step < DIM; step += 16)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    wgmma<false>(sums[c], smem_descriptor(&shared.ring[stage][step / WIDTH][0][step % WIDTH]),
                                 smem_descriptor(shared.map[term][c][step]), term + step > 0);
        wgmma_commit();
        // While wgmma runs: waits until TMA has read the output buffer that this tile overwrites.
        if (thread == 0) bulk_store_wait_read<1>();
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
            bulk_store_commit();
        }
    }
    if (thread == 0) bulk_store_wait_read<0>();
}

extern __shared__ __align__(1024) u8 smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_project(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    if (threadIdx.x < STAGES) mbarrier_init(&shared.full[threadIdx.x], 1), mbarrier_init(&shared.empty[threadIdx.x], 4);
    __syncthreads();
    const bool is_consumer = warp_uniform(threadIdx.x < GROUPS * GROUP_THREADS);
    if (!a.pdl) pdl_wait(); // otherwise the map is loaded while the previous kernel ends
    if (is_consumer) load_map(a, shared);
    pdl_wait();
    pdl_trigger();
    if (is_consumer)
        project(a, shared);
    else if (threadIdx.x == GROUPS * GROUP_THREADS)
        tma_load_tiles<false>(shared.ring, shared.full, shared.empty, a.rows, tiles_of(a), blockIdx.y, first_row);
}

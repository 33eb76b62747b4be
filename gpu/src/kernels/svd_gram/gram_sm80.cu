// A block's part on any device: a warp has 16 components, and their products with the components of half the others,
// around a circle, so that every pair is computed once.
#include "primitives_sm80.cuh"
#include "svd_gram/gram.cuh"
#include "svd_gram/join.cuh"

constexpr int THREADS = STRIPS * LANES;
constexpr int PARTNERS = STRIPS / 2 + 1; // strips around the circle, its own first
constexpr int CHUNKS = DIM / 8;          // of 16 bytes, of a row
constexpr int STAGES = 3;
static_assert(STAGES * TILE * 2 == SHARED_BYTES, "the host computes it, too");

struct Arguments {
    Sums sums;
    const u16* rows;             // element [head][row][DIM], with these strides
    u64 head_stride, row_stride; // elements
};

extern __shared__ __align__(128) u16 ring[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const Arguments a) {
    const int strip = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    pdl_wait();
    pdl_trigger();
    const Range range(a.sums);
    // A thread fetches one chunk of every 16th row.
    const int fetched_row = threadIdx.x / CHUNKS, fetched_chunk = threadIdx.x % CHUNKS;
    const u16* rows = a.rows + blockIdx.y * a.head_stride + fetched_row * a.row_stride + fetched_chunk * 8;
    auto fetch = [&](u32 tile) {
        if (tile < range.to) {
            u16* to = ring + tile % STAGES * TILE;
            const u16* from = rows + (u64)tile * ROWS * a.row_stride;
            const int there = (int)min(a.sums.n - (u64)tile * ROWS, (u64)ROWS) - fetched_row;
#pragma unroll
            for (int i = 0; i < ROWS; i += 16)
                cp_async_16_zfill(swizzled<CHUNKS>(to, fetched_row + i, fetched_chunk),
                                  i < there ? from + i * a.row_stride : rows, i < there);
        }
        cp_async_commit();
    };
    for (u32 tile = range.from; tile < range.from + STAGES - 1; tile++) fetch(tile);
    // [partner][half of its 16 columns]: rows g and g + 8 of the strip, columns 2 l and 2 l + 1. Of sums of rows, one
    // row counts.
    TwoFloats totals[PARTNERS][2][4] = {}, row_totals[2][2] = {};
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    for (u32 tile = range.from; tile < range.to; tile++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        u16* at = ring + tile % STAGES * TILE;
        float sums[PARTNERS][2][4], row_sums[2][4];
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            // Transposed: components are the operands' rows and columns, rows of the tile what is summed over.
            u32 mine[4];
            ldmatrix_x4_trans(mine,
                              swizzled<CHUNKS>(at, step * 16 + lane % 8 + lane / 16 * 8, strip * 2 + lane / 8 % 2));
#pragma unroll
            for (int p = 0; p < PARTNERS; p++) {
                const int partner = (strip + p) % STRIPS;
                u32 others[4] = {mine[0], mine[2], mine[1], mine[3]};
                if (p > 0)
                    ldmatrix_x4_trans(others, swizzled<CHUNKS>(at, step * 16 + lane % 16, partner * 2 + lane / 16));
                auto add = [&](float (&sum)[4], const u32(&mine)[4], u32 b0, u32 b1) {
                    if (step == 0)
                        mma_m16n8k16_init(sum, mine, b0, b1);
                    else
                        mma_m16n8k16(sum, mine, b0, b1);
                };
                add(sums[p][0], mine, others[0], others[1]);
                add(sums[p][1], mine, others[2], others[3]);
                if (p == 0) {
                    add(row_sums[0], ones, others[0], others[1]);
                    add(row_sums[1], ones, others[2], others[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PARTNERS * 8; i++) totals[i / 8][i / 4 % 2][i % 4].add(sums[i / 8][i / 4 % 2][i % 4]);
#pragma unroll
        for (int i = 0; i < 4; i++) row_totals[i / 2][i % 2].add(row_sums[i / 2][i % 2]);
    }

    float* part = a.sums.part();
    if (g == 0)
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[DIM * DIM + strip * 16 + i / 2 * 8 + 2 * l + i % 2] = row_totals[i / 2][i % 2].sum();
#pragma unroll
    for (int p = 0; p < PARTNERS; p++) {
        // Strips across an even circle both have each other's block.
        if (STRIPS % 2 == 0 && p > 0 && p == STRIPS / 2 && strip >= STRIPS / 2) break;
        const int partner = (strip + p) % STRIPS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = strip * 16 + g + i / 2 % 2 * 8, column = partner * 16 + i / 4 * 8 + 2 * l + i % 2;
            part[partner < strip ? column * DIM + row : row * DIM + column] = totals[p][i / 4][i % 4].sum();
        }
    }
}

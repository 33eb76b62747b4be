// Gram parts on every device (sm_80 and later), with mma.m16n8k16: `svd_gram` computes partial second
// moments of rows, X^T X and the sum of X per head; `svd_gram_join` adds them up. See gram.cuh for their precision.
//
// CPU twin: svd_core::Gram. Compile-time shape: DIM (a multiple of 16 up to 128), ELEMENT (1 or 2), SHARED_BYTES. The
// floor is reading the rows.
//
// Launch: grid (part_count, heads), one warp per strip of 16 components, one block per multiprocessor. Strips lie on a
// circle: a warp multiplies its strip by itself and by the next STRIPS / 2 strips, so every pair of strips is computed
// once and all warps have the same work.
//
// Tiles of 128 rows pass through a ring of 3 in shared memory (cp.async, swizzled). The product sums over rows, so both
// operands are read with ldmatrix.trans.
#include "primitives_sm80.cuh"
#include "svd_gram/gram.cuh"
#include "svd_gram/join.cuh"

constexpr int THREADS = STRIPS * LANES;
constexpr int PARTNERS = STRIPS / 2 + 1; // strips that a warp multiplies by, its own first
constexpr int CHUNKS = DIM / 8;          // 16-byte chunks of a row
constexpr int STAGES = 3;
static_assert(STAGES * TILE * 2 == SHARED_BYTES, "the host computes the same size");

struct Arguments {
    Sums sums;
    const u16* rows;             // element [head][row][DIM], strided
    u64 head_stride, row_stride; // in elements
};

extern __shared__ __align__(128) u16 ring[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const Arguments a) {
    const int strip = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    pdl_wait();
    pdl_trigger();
    const Range range(a.sums);
    // A thread copies one chunk of every 16th row.
    const int load_row = threadIdx.x / CHUNKS, load_chunk = threadIdx.x % CHUNKS;
    const u16* rows = a.rows + blockIdx.y * a.head_stride + load_row * a.row_stride + load_chunk * 8;
    auto load_tile = [&](u32 tile) {
        if (tile < range.to) {
            u16* to = ring + tile % STAGES * TILE;
            const u16* from = rows + (u64)tile * ROWS * a.row_stride;
            const int valid = (int)min(a.sums.n - (u64)tile * ROWS, (u64)ROWS) - load_row;
#pragma unroll
            for (int i = 0; i < ROWS; i += 16)
                cp_async_16_zfill(swizzled<CHUNKS>(to, load_row + i, load_chunk),
                                  i < valid ? from + i * a.row_stride : rows, i < valid);
        }
        cp_async_commit();
    };
    for (u32 tile = range.from; tile < range.from + STAGES - 1; tile++) load_tile(tile);
    // [partner][half of its 16 columns]: accumulators, rows g and g + 8 of the strip, columns 2 l and 2 l + 1. Sums of
    // rows are a product with ones, all of whose rows are equal: only row g is kept.
    CompensatedSum totals[PARTNERS][2][4] = {}, row_totals[2][2] = {};
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    for (u32 tile = range.from; tile < range.to; tile++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_tile(tile + STAGES - 1);
        u16* at = ring + tile % STAGES * TILE;
        float sums[PARTNERS][2][4], row_sums[2][4];
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            // Transposed loads: components are rows of A and columns of B; the product sums over 16 rows of the tile.
            u32 own[4];
            ldmatrix_x4_trans(own,
                              swizzled<CHUNKS>(at, step * 16 + lane % 8 + lane / 16 * 8, strip * 2 + lane / 8 % 2));
#pragma unroll
            for (int p = 0; p < PARTNERS; p++) {
                const int partner = (strip + p) % STRIPS;
                u32 other[4] = {own[0], own[2], own[1], own[3]}; // the same matrices in the order of B
                if (p > 0)
                    ldmatrix_x4_trans(other, swizzled<CHUNKS>(at, step * 16 + lane % 16, partner * 2 + lane / 16));
                auto add = [&](float (&sum)[4], const u32(&x)[4], u32 b0, u32 b1) {
                    if (step == 0)
                        mma_m16n8k16_init(sum, x, b0, b1);
                    else
                        mma_m16n8k16(sum, x, b0, b1);
                };
                add(sums[p][0], own, other[0], other[1]);
                add(sums[p][1], own, other[2], other[3]);
                if (p == 0) {
                    add(row_sums[0], ones, other[0], other[1]);
                    add(row_sums[1], ones, other[2], other[3]);
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
        // On an even circle, opposite strips both computed their common block: only the first half writes it.
        if (STRIPS % 2 == 0 && p > 0 && p == STRIPS / 2 && strip >= STRIPS / 2) break;
        const int partner = (strip + p) % STRIPS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = strip * 16 + g + i / 2 % 2 * 8, column = partner * 16 + i / 4 * 8 + 2 * l + i % 2;
            part[partner < strip ? column * DIM + row : row * DIM + column] = totals[p][i / 4][i % 4].sum();
        }
    }
}

// Adds the parts of a head, in their order, to what was there.
//
// A block has 16 x 16 of the upper triangle and writes them below, too; the last one has the sums of rows.
#pragma once
#include "svd_gram/gram.cuh"

extern "C" __global__ void __launch_bounds__(256) svd_gram_join(const Sums a) {
    __shared__ double tile[16][17];
    const u32 head = blockIdx.y, y = threadIdx.x / 16, x = threadIdx.x % 16;
    u32 down = 0, across = blockIdx.x; // of tiles
    while (down < STRIPS && across >= STRIPS - down) across -= STRIPS - down++;
    across += down;
    const bool of_rows = down == STRIPS;
    if (of_rows && threadIdx.x >= DIM) return;
    const u32 row = of_rows ? DIM : down * 16 + y, column = of_rows ? threadIdx.x : across * 16 + x;
    // Nothing writes it meanwhile: it can be fetched before the kernel before has ended, from the second-level cache.
    double* matrix = a.matrices + (u64)head * DIM * DIM;
    double* at = of_rows ? a.sums + head * DIM + column : matrix + row * DIM + column;
    const double before = __ldcg(at);
    pdl_wait();
    pdl_trigger();
    const float* parts = a.parts + (u64)head * a.part_count * PART + row * DIM + column;
    double sum = 0;
#pragma unroll 16
    for (u32 part = 0; part < a.part_count; part++) sum += parts[(u64)part * PART];
    sum += before;
    if (of_rows) {
        *at = sum;
        return;
    }
    tile[y][x] = sum;
    __syncthreads();
    *at = down == across && x < y ? tile[x][y] : sum;
    if (down < across) matrix[(across * 16 + y) * DIM + down * 16 + x] = tile[x][y];
}

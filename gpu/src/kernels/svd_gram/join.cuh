// Adds the parts of a head, in order, to its f64 matrix and sum of rows: the second kernel of gram.cuh.
//
// CPU twin: svd_core::Gram, whose sums are in f64. Compile-time shape: DIM.
//
// Launch: grid (STRIPS (STRIPS + 1) / 2 + 1, heads), 256 threads. A block owns a 16 x 16 tile of the upper triangle and
// also writes its transpose; the last block of a head owns the sum of rows. A thread owns one element. The floor is
// reading the parts, from L2.
#pragma once
#include "svd_gram/gram.cuh"

extern "C" __global__ void __launch_bounds__(256) svd_gram_join(const Sums a) {
    __shared__ double tile[16][17];
    const u32 head = blockIdx.y, y = threadIdx.x / 16, x = threadIdx.x % 16;
    u32 tile_row = 0, tile_column = blockIdx.x;
    while (tile_row < STRIPS && tile_column >= STRIPS - tile_row) tile_column -= STRIPS - tile_row++;
    tile_column += tile_row;
    const bool is_row_sum = tile_row == STRIPS;
    if (is_row_sum && threadIdx.x >= DIM) return;
    const u32 row = is_row_sum ? DIM : tile_row * 16 + y, column = is_row_sum ? threadIdx.x : tile_column * 16 + x;
    // Loaded before the PDL wait: `svd_gram` does not write it, and all kernels before `svd_gram` have ended, since it
    // triggers after its own wait. The load bypasses L1 (ld.global.cg): L1 is not coherent with their writes.
    double* matrix = a.matrices + (u64)head * DIM * DIM;
    double* at = is_row_sum ? a.sums + head * DIM + column : matrix + row * DIM + column;
    const double previous = __ldcg(at);
    pdl_wait();
    pdl_trigger();
    const float* parts = a.parts + (u64)head * a.part_count * PART + row * DIM + column;
    double sum = 0;
#pragma unroll 16
    for (u32 part = 0; part < a.part_count; part++) sum += parts[(u64)part * PART];
    sum += previous;
    if (is_row_sum) {
        *at = sum;
        return;
    }
    tile[y][x] = sum;
    __syncthreads();
    *at = tile_row == tile_column && x < y ? tile[x][y] : sum;
    if (tile_row < tile_column) matrix[(tile_column * 16 + y) * DIM + tile_row * 16 + x] = tile[x][y];
}

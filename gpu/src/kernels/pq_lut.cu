// ADC lookup tables: inner products of queries with every centroid.
//
// CPU twin: pq_core::lut_into, which adds in ascending order of components and rounds every product; this file is
// compiled without contraction (`fmad`), so the results have the same bits. Compile-time shape: M, KSUB, DSUB, GROUP;
// ELEMENT of the queries.
// Launch: grid (subspace, head, sequence), THREADS threads, which share the KSUB centroids of the subspace. A thread
// scores its centroids for all GROUP queries, so that each centroid is read once.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr int THREADS = 256;

struct Arguments {
    const Element* queries; // [sequence][head][GROUP][M * DSUB]
    const float* centroids; // [head][M][KSUB][DSUB]
    float* luts;            // [sequence][head][GROUP][M][KSUB]
    float scale;            // factor of the queries
};

extern "C" __global__ void __launch_bounds__(THREADS) pq_lut(const Arguments a) {
    pdl_trigger(); // PDL: a search can count codes meanwhile
    __shared__ float queries[GROUP][DSUB];
    const u64 head = blockIdx.z * (u64)gridDim.y + blockIdx.y; // index over all sequences
    const u32 subspace = blockIdx.x;
    for (int i = threadIdx.x; i < GROUP * DSUB; i += THREADS)
        queries[i / DSUB][i % DSUB] =
            to_float(a.queries[(head * GROUP + i / DSUB) * M * DSUB + subspace * DSUB + i % DSUB]) * a.scale;
    __syncthreads();
    for (int entry = threadIdx.x; entry < KSUB; entry += THREADS) {
        const float* centroid = a.centroids + ((blockIdx.y * (u64)M + subspace) * KSUB + entry) * DSUB;
        float sums[GROUP] = {};
#pragma unroll 8
        for (int d = 0; d < DSUB; d++) {
            const float x = centroid[d];
#pragma unroll
            for (int g = 0; g < GROUP; g++) sums[g] += queries[g][d] * x;
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) a.luts[((head * GROUP + g) * M + subspace) * KSUB + entry] = sums[g];
    }
}

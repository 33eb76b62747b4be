// ADC scan: scores of all codes against lookup tables.
//
// CPU twin: pq_core::scan_into; the sums have the same order, so the results have the same bits. Compile-time shape: M,
// NBITS, GROUP, VEC, COPIES (tables.cuh).
// Launch: grid (chunk of CHUNK tokens, head, sequence), THREADS threads. A block keeps the head's tables in shared
// memory; a thread scores four consecutive tokens at a time. For groups of more than VEC queries the codes are read
// again for every VEC queries.
#include "pq_search/tables.cuh"
#include "primitives_sm80.cuh"

constexpr int THREADS = 512, CHUNK = 8192;

struct Arguments {
    const float* luts;  // [sequence][head][GROUP][M][KSUB]
    const u8* codes;    // [sequence][head][code_stride bytes]
    const u32* lengths; // [sequence]
    float* scores;      // [sequence][head][GROUP][capacity]
    u64 code_stride, capacity;
};

extern __shared__ __align__(16) Tables tables[];

extern "C" __global__ void __launch_bounds__(THREADS) pq_scan(const Arguments a) {
    const u64 row = blockIdx.z * (u64)gridDim.y + blockIdx.y;
    const u32 n = a.lengths[blockIdx.z], first = blockIdx.x * CHUNK, end = min(n, first + CHUNK);
    if (first >= n) return;
    for (int round = 0; round < ROUNDS; round++) {
        __syncthreads();
        load_tables<THREADS>(*tables, a.luts + row * GROUP * M * KSUB, round);
        __syncthreads();
        for (u32 token = first + 4 * threadIdx.x; token < end; token += 4 * THREADS) {
            float scores[4][VEC];
            const u8* codes = a.codes + row * a.code_stride;
            score_four(*tables, [&](int j) { return load_codes(codes, token, j); }, scores);
#pragma unroll
            for (int q = 0; q < VEC; q++)
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (round * VEC + q < GROUP && token + t < end)
                        a.scores[(row * GROUP + round * VEC + q) * a.capacity + token + t] = scores[t][q];
        }
    }
}

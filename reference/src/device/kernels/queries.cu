// Queries of a step into the space of each head's stored keys or codes.
//
// CPU twin: svd_core::Map::project_into. Compile-time shape: ELEMENT (1 for f16, 2 for bf16), HEAD_DIM, and GROUP query
// heads of a key/value head.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr u32 THREADS = 256;

struct ProjectArguments {
    const u16* queries; // element [sequence][head][GROUP][HEAD_DIM]
    const float* maps;  // [head][HEAD_DIM][HEAD_DIM]: component, then column; columns from the rank on are not read
    const u32* ranks;   // [head]
    u16* out;           // element, as the queries, up to the rank
    u32 heads;
};

constexpr u32 COLUMNS = 32, PARTS = THREADS / COLUMNS;

// Projects the queries of a step. A block has COLUMNS columns of a head, whose PARTS parts of the components are summed
// in shared memory: with a thread a column, one would wait for HEAD_DIM loads.
//
// Launch: grid (heads, sequences, HEAD_DIM / COLUMNS), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) project(const ProjectArguments a) {
    constexpr u32 DEPTH = HEAD_DIM / PARTS; // components of a part
    __shared__ float sums[PARTS][GROUP][COLUMNS];
    const u32 head = blockIdx.x, part = threadIdx.x / COLUMNS, column = blockIdx.z * COLUMNS + threadIdx.x % COLUMNS;
    if (blockIdx.z * COLUMNS >= a.ranks[head]) return;
    float map[DEPTH];
    const float* from = a.maps + ((u64)head * HEAD_DIM + part * DEPTH) * HEAD_DIM + column;
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) map[i] = __ldg(from + i * HEAD_DIM);
    pdl_wait(); // the previous kernel writes the queries
    pdl_trigger();
    const u64 at = ((u64)blockIdx.y * a.heads + head) * GROUP * HEAD_DIM;
#pragma unroll
    for (u32 g = 0; g < GROUP; g++) {
        const u16* query = a.queries + at + g * HEAD_DIM + part * DEPTH;
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) sum += map[i] * to_float(query[i]);
        sums[part][g][threadIdx.x % COLUMNS] = sum;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUP * COLUMNS; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) sum += sums[p][i / COLUMNS][i % COLUMNS];
        a.out[at + i / COLUMNS * HEAD_DIM + blockIdx.z * COLUMNS + i % COLUMNS] = to_element(sum);
    }
}

// ADC scores of tokens from lookup tables in shared memory: shared by scan.cu and search.cu.
//
// Compile-time shape: M, NBITS (up to 8), GROUP, VEC, COPIES. A table entry holds the partial scores of VEC queries (1,
// 2 or 4), so that one load serves all of them, and is stored COPIES times in a row. If these copies fill 128 bytes,
// every lane reads from its own banks, and lookups have no bank conflicts for any codes.
#pragma once
#include "pq_codes.cuh"

constexpr int KSUB = 1 << NBITS;
constexpr int ROUNDS = (GROUP + VEC - 1) / VEC; // passes over the codes, VEC queries each
constexpr bool CODES_IN_REGISTERS = M <= 8;     // M codes of four tokens fit a thread's registers
constexpr int UNROLL = CODES_IN_REGISTERS ? M : 4;

// Partial scores of VEC queries for one centroid.
struct alignas(4 * VEC) Entry {
    float scores[VEC];
};

struct Tables {
    Entry entries[M * KSUB][COPIES];
};

// Loads the tables of queries VEC * round to VEC * round + VEC - 1; queries beyond GROUP score 0. The lanes of a warp
// start with different copies, so that they write to different banks.
template <int THREADS>
__device__ void load_tables(Tables& tables, const float* luts, int round) {
#pragma unroll 2
    for (int i = threadIdx.x; i < M * KSUB; i += THREADS) {
        Entry entry;
#pragma unroll
        for (int q = 0; q < VEC; q++) {
            const int query = round * VEC + q;
            entry.scores[q] = query < GROUP ? __ldcg(luts + query * M * KSUB + i) : 0; // bypasses L1 (four_codes_of)
        }
#pragma unroll 8
        for (int copy = 0; copy < COPIES; copy++) tables.entries[i][(copy + i) % COPIES] = entry;
    }
}

// Scores of four tokens, added in ascending order of the subspaces; `codes_of(subspace)` returns their codes, one in
// each byte.
template <class CodesOf>
__device__ __forceinline__ void score_four(const Tables& tables, const CodesOf& codes_of, float (&scores)[4][VEC]) {
    const int copy = threadIdx.x % COPIES;
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int q = 0; q < VEC; q++) scores[t][q] = 0;
#pragma unroll UNROLL
    for (int j = 0; j < M; j++) {
        const u32 codes = codes_of(j);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const Entry entry = tables.entries[j * KSUB + (codes >> 8 * t & 0xff)][copy];
#pragma unroll
            for (int q = 0; q < VEC; q++) scores[t][q] += entry.scores[q];
        }
    }
}

// Codes of tokens `token` to `token + 3` in one subspace, one in each byte.
__device__ __forceinline__ u32 load_codes(const u8* codes, u32 token, int subspace) {
    return four_codes_of<NBITS>(run_of<M, NBITS>(codes, token, subspace), token % BLOCK_TOKENS);
}

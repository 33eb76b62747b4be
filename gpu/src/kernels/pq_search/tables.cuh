// Scores of tokens by tables in shared memory.
//
// Compile-time shape: M, NBITS (up to 8), GROUP; an entry has the numbers of VEC queries (1, 2 or 4), which are looked
// up at once, and stands COPIES times side by side: where that fills 128 bytes, every lane has banks of its own and
// look-ups never collide.
#pragma once
#include "pq_codes.cuh"

constexpr int KSUB = 1 << NBITS;
constexpr int ROUNDS = (GROUP + VEC - 1) / VEC; // of queries
constexpr bool FEW = M <= 8;                    // subspaces: their codes fit registers
constexpr int UNROLLED = FEW ? M : 4;

// Partial scores of VEC queries.
struct alignas(4 * VEC) Entry {
    float of[VEC];
};

struct Tables {
    Entry entries[M * KSUB][COPIES];
};

// Puts the tables of round `round` where look-ups find them; missing queries score 0. Lanes begin with different
// copies, and so with different banks.
template <int THREADS>
__device__ void load_tables(Tables& tables, const float* luts, int round) {
#pragma unroll 2
    for (int i = threadIdx.x; i < M * KSUB; i += THREADS) {
        Entry entry;
#pragma unroll
        for (int q = 0; q < VEC; q++) {
            const int query = round * VEC + q;
            entry.of[q] = query < GROUP ? __ldcg(luts + query * M * KSUB + i) : 0; // as codes are loaded
        }
#pragma unroll 8
        for (int copy = 0; copy < COPIES; copy++) tables.entries[i][(copy + i) % COPIES] = entry;
    }
}

// Scores of four tokens, added in the order of the subspaces; `codes_of(subspace)` has their codes, a byte each.
template <class CodesOf>
__device__ __forceinline__ void score_four(const Tables& tables, const CodesOf& codes_of, float (&scores)[4][VEC]) {
    const int copy = threadIdx.x % COPIES;
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int q = 0; q < VEC; q++) scores[t][q] = 0;
#pragma unroll UNROLLED
    for (int j = 0; j < M; j++) {
        const u32 codes = codes_of(j);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const Entry entry = tables.entries[j * KSUB + (codes >> 8 * t & 0xff)][copy];
#pragma unroll
            for (int q = 0; q < VEC; q++) scores[t][q] += entry.of[q];
        }
    }
}

// The codes of four tokens of a row.
__device__ __forceinline__ u32 load_codes(const u8* codes, u32 token, int subspace) {
    return four_codes_of<NBITS>(run_of<M, NBITS>(codes, token, subspace), token % BLOCK_TOKENS);
}

// Arguments of search.cu and search_histogram_sm90.cu.
#pragma once
#include "pq_search/keys.cuh"

struct Arguments {
    const float* luts;  // [row][GROUP][M][KSUB]; a row is a head of a sequence
    const u8* codes;    // [row][code_stride bytes]
    const u32* lengths; // [sequence]
    const u32* ks;      // [sequence]: tokens to select by score, in addition to sinks and recent tokens
    u32* tokens;        // [row][tokens_len]
    u32* counts;        // [sequence]: selected tokens, including sinks and recent ones
    float* stats;       // [row][GROUP][2], or null: maximum of the scores and sum of exponentials
    u32* workspace;
    u64 code_stride, tokens_len;
    u32 heads, rows, capacity, sinks, recent;
    u32 tickets; // whether blocks take chunks in the order in which they start, since they may not all be resident
    u32 pdl;     // whether codes, lengths and ks can be read before `pdl_wait`: the previous kernel does not write them
};

__device__ __forceinline__ SelectRange range_of(const Arguments& a, u32 sequence) {
    return {min(a.lengths[sequence], a.capacity), a.ks[sequence], a.sinks, a.recent};
}

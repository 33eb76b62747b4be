// The state of a sequence that sampling its next token changes.
#pragma once
#include "types.cuh"

constexpr u32 NO_TOKEN = ~0u; // the choice from logits that hold a NaN or an infinity

struct Picks {
    u32* tokens;     // [sequence]: fed to the next step
    u32* positions;  // [sequence]: of these
    u32* running;    // [sequence]: 0 once a token has ended the sequence
    u32* picked;     // [sequence][most]: the tokens in the order of the steps
    u32* counts;     // [sequence]: number of these tokens
    const u32* ends; // [n_ends]: tokens that end a sequence
    u32 n_ends, most;
};

// Called by one thread: makes `token` the next one. A sequence that has ended does not advance; NO_TOKEN ends it.
__device__ __forceinline__ void take(const Picks& p, u32 sequence, u32 token) {
    const u32 count = p.counts[sequence];
    if (!p.running[sequence] || count >= p.most) return;
    p.tokens[sequence] = token, p.positions[sequence] += 1;
    p.picked[(u64)sequence * p.most + count] = token, p.counts[sequence] = count + 1;
    bool ends = token == NO_TOKEN;
    for (u32 i = 0; i < p.n_ends; i++) ends |= token == p.ends[i];
    if (ends) p.running[sequence] = 0;
}

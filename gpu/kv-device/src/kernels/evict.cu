// The window of a layer: plans which tokens are about to leave it, stages their rows for a quantizer, so that the ring
// can advance while they are encoded, and copies the exact rows before and after a chunk of a prompt.
//
// CPU twin: the eviction of WindowedCache. Rows are 16-bit elements.
#include "types.cuh"

struct PlanArguments {
    const u32* positions; // [sequence]: of the next token
    u32* planned;         // [sequence]: tokens after the sinks planned so far
    u32* firsts;          // [sequence]: the first token planned now
    u32* counts;          // [sequence]: how many
    u32 sequences, sinks, ring, horizon;
};

// Plans the tokens that the next `horizon` steps overwrite and that are not planned yet.
//
// Launch: one block.
extern "C" __global__ void plan(const PlanArguments a) {
    for (u32 i = threadIdx.x; i < a.sequences; i += blockDim.x) {
        const u32 end = a.positions[i] + a.horizon, kept = a.sinks + a.ring, first = a.planned[i];
        const u32 leaving = end > kept ? end - kept : 0;
        const u32 count = leaving > first ? leaving - first : 0;
        a.firsts[i] = first, a.counts[i] = count, a.planned[i] = first + count;
    }
}

struct StageArguments {
    const uint4* rows; // [side][sequence][head][sinks + ring][chunk]
    uint4* staged;     // [side][sequence][head][most][chunk]
    const u32* firsts;
    const u32* counts;
    u32 sequences, heads, sinks, ring, most, chunks; // chunks of 16 bytes of a row
};

// Launch: grid (heads, sequences, keys and values), any number of threads.
extern "C" __global__ void stage(const StageArguments a) {
    const u32 sequence = blockIdx.y, first = a.firsts[sequence], count = a.counts[sequence];
    const u64 head = ((u64)blockIdx.z * a.sequences + sequence) * a.heads + blockIdx.x;
    for (u32 i = threadIdx.x; i < count * a.chunks; i += blockDim.x) {
        const u32 token = i / a.chunks, chunk = i % a.chunks, slot = a.sinks + (first + token) % a.ring;
        a.staged[(head * a.most + token) * a.chunks + chunk] =
            a.rows[(head * (a.sinks + a.ring) + slot) * a.chunks + chunk];
    }
}

struct ExactArguments {
    uint4* kept;              // [head][kept_capacity][chunk] of keys; values are `kept_side` chunks further on
    uint4* rows;              // [head][capacity][chunk] of keys; values are `rows_side` chunks further on
    u64 kept_side, rows_side;
    u32 tokens, stored;       // of the sequence, and how many of them after the sinks are not exact
    u32 moved;                // tokens after the sinks whose rows the later ones have taken: 0 in a ring
    u32 sinks, ring, kept_capacity, capacity, chunks;
    u32 restore; // 1 copies the kept rows to `rows`, 0 the other way
};

// Copies the exact tokens of one sequence to the rows of all its tokens, to which the chunks of a prompt attend, or
// back.
//
// Launch: grid (heads, keys and values), any number of threads.
extern "C" __global__ void exact(const ExactArguments a) {
    const u32 head = blockIdx.x, exact = a.tokens - a.stored;
    uint4* kept = a.kept + blockIdx.y * a.kept_side + (u64)head * a.kept_capacity * a.chunks;
    uint4* rows = a.rows + blockIdx.y * a.rows_side + (u64)head * a.capacity * a.chunks;
    for (u32 i = threadIdx.x; i < exact * a.chunks; i += blockDim.x) {
        const u32 at = i / a.chunks, chunk = i % a.chunks, token = at < a.sinks ? at : a.stored + at;
        const u32 slot = token < a.sinks ? token : a.sinks + (token - a.sinks - a.moved) % a.ring;
        uint4 &own = kept[slot * a.chunks + chunk], &row = rows[(u64)token * a.chunks + chunk];
        if (a.restore)
            row = own;
        else
            own = row;
    }
}

// Tokens of a layer that are about to leave the window: which ones, and copies of their rows for a quantizer, so that
// the ring may go on while they are encoded.
//
// CPU twin: the eviction of WindowedCache. Rows are 16-bit elements.
#include "types.cuh"

struct PlanArguments {
    const u32* positions; // [sequence]: of the token that comes next
    u32* planned;         // [sequence]: tokens behind the sinks that have been planned so far
    u32* firsts;          // [sequence]: the first of those that are planned now
    u32* counts;          // [sequence]: how many
    u32 sequences, sinks, ring, horizon;
};

// Plans the tokens that the next `horizon` steps overwrite, as far as they are not planned yet.
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

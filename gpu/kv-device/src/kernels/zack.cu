// ZACK between the products and attention: truncates tokens that leave the window to each head's ranks, and restores
// those rows for the chunks of a prompt. Rows arrive in the basis (bases.cu) whose first components are kept.
//
// CPU twin: ZackStore. Compile-time shape: HEAD_DIM; rows have 16-bit elements. Ranks are multiples of 8. The store is
// ordered by head; each head's rows have its rank.
#include "types.cuh"

constexpr u32 THREADS = 256;

struct Store {
    const u32* key_ranks;     // [head]
    const u32* value_ranks;   // [head]
    const u64* key_offsets;   // [head]: prefix sums of the ranks
    const u64* value_offsets; // [head]
    u16* keys;                // element [sequence][head][capacity][key rank]
    u16* values;              // element [sequence][head][capacity][value rank]
    u64 key_rank_sum, value_rank_sum;
    u64 capacity; // of a head, in tokens

    __device__ __forceinline__ u16* keys_of(u32 sequence, u32 head) const {
        return keys + capacity * (sequence * key_rank_sum + key_offsets[head]);
    }
    __device__ __forceinline__ u16* values_of(u32 sequence, u32 head) const {
        return values + capacity * (sequence * value_rank_sum + value_offsets[head]);
    }
};

constexpr u32 TOKENS = 32, CHUNKS = HEAD_DIM / 8; // tokens of a block; pieces of 16 bytes of a row

struct CutArguments {
    Store store;
    const u16* keys;   // element [sequence][head][rows][HEAD_DIM]
    const u16* values; // the same of values
    const u32* firsts; // [sequence]: the first token after the sinks
    const u32* counts; // [sequence]: how many
    u32 heads, sinks, ring, rows; // token t after the sinks is row sinks + t % ring of a head's `rows`
};

// Copies tokens into the store, without the last components of their rows.
//
// Launch: grid (heads, sequences, TOKENS tokens each), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) cut(const CutArguments a) {
    const u32 head = blockIdx.x, sequence = blockIdx.y, begin = blockIdx.z * TOKENS;
    if (begin >= a.counts[sequence]) return;
    const u32 first = a.firsts[sequence] + begin, count = min(a.counts[sequence] - begin, TOKENS);
    const u32 key_chunks = a.store.key_ranks[head] / 8, value_chunks = a.store.value_ranks[head] / 8;
    const u64 at = ((u64)sequence * a.heads + head) * a.rows;
    uint4* keys = (uint4*)a.store.keys_of(sequence, head) + (u64)first * key_chunks;
    uint4* values = (uint4*)a.store.values_of(sequence, head) + (u64)first * value_chunks;
    for (u32 i = threadIdx.x; i < count * CHUNKS; i += THREADS) {
        const u32 t = i / CHUNKS, c = i % CHUNKS;
        const u64 from = (at + a.sinks + (first + t) % a.ring) * CHUNKS + c;
        if (c < key_chunks) keys[t * key_chunks + c] = ((const uint4*)a.keys)[from];
        if (c < value_chunks) values[t * value_chunks + c] = ((const uint4*)a.values)[from];
    }
}

struct RestoreArguments {
    Store store;
    u16* keys;   // element [head][rows][HEAD_DIM], from the first token after the sinks on
    u16* values; // the same of values
    u32 tokens, rows;
};

// Rows of one sequence, with zeros for the truncated components.
//
// Launch: grid (heads, TOKENS tokens each), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) restore(const RestoreArguments a) {
    const u32 head = blockIdx.x, first = blockIdx.y * TOKENS, count = min(a.tokens - first, TOKENS);
    const u32 key_chunks = a.store.key_ranks[head] / 8, value_chunks = a.store.value_ranks[head] / 8;
    const uint4* keys = (const uint4*)a.store.keys_of(0, head) + (u64)first * key_chunks;
    const uint4* values = (const uint4*)a.store.values_of(0, head) + (u64)first * value_chunks;
    const u64 at = ((u64)head * a.rows + first) * CHUNKS;
    for (u32 i = threadIdx.x; i < count * CHUNKS; i += THREADS) {
        const u32 t = i / CHUNKS, c = i % CHUNKS;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        ((uint4*)a.keys)[at + i] = c < key_chunks ? keys[t * key_chunks + c] : zeros;
        ((uint4*)a.values)[at + i] = c < value_chunks ? values[t * value_chunks + c] : zeros;
    }
}

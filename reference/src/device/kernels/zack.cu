// ZACK between the products and attention: tokens that leave the window into rows of each head's ranks, those rows back
// for the chunks of a prompt, and the merge of attention over both parts. queries.cu projects queries.
//
// CPU twin: ZackStore. Compile-time shape: ELEMENT of rows and queries (1 for f16, 2 for bf16), HEAD_DIM, and GROUP
// query heads of a key/value head. Ranks are multiples of 8. Rows of the store lie head after head, each of its own
// rank.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr u32 THREADS = 256;

struct Store {
    const u32* key_ranks;     // [head]
    const u32* value_ranks;   // [head]
    const u64* key_offsets;   // [head]: sums of the ranks before
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

constexpr u32 TOKENS = 32, ROWS = THREADS / HEAD_DIM, OWN = TOKENS / ROWS; // tokens of a block, and of a thread

struct CutArguments {
    Store store;
    const u16* keys;   // element [sequence][head][rows][HEAD_DIM], rotated by RoPE
    const u16* values; // the same of values
    const float* maps; // as for the queries, of the keys
    const u32* firsts; // [sequence]: the first token behind the sinks
    const u32* counts; // [sequence]: how many
    u32 heads, sinks, ring, rows; // token t behind the sinks is row sinks + t % ring of a head's `rows`
};

// Takes tokens into the store: projects their keys, and cuts their values, which are rotated.
//
// Launch: grid (heads, sequences, TOKENS tokens each), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) cut(const CutArguments a) {
    __shared__ float shared[TOKENS][HEAD_DIM];
    const u32 head = blockIdx.x, sequence = blockIdx.y, begin = blockIdx.z * TOKENS;
    if (begin >= a.counts[sequence]) return;
    const u32 first = a.firsts[sequence] + begin, count = min(a.counts[sequence] - begin, TOKENS);
    const u64 at = ((u64)sequence * a.heads + head) * a.rows;
    auto row = [&](u32 t) { return (at + a.sinks + (first + t) % a.ring) * HEAD_DIM; };
    const u32 key_rank = a.store.key_ranks[head], value_rank = a.store.value_ranks[head];
    u16* values = a.store.values_of(sequence, head) + (u64)first * value_rank;
    for (u32 i = threadIdx.x; i < TOKENS * HEAD_DIM; i += THREADS) {
        const u32 t = i / HEAD_DIM, c = i % HEAD_DIM;
        shared[t][c] = t < count ? to_float(a.keys[row(t) + c]) : 0;
        if (t < count && c < value_rank) values[t * value_rank + c] = a.values[row(t) + c];
    }
    __syncthreads();
    const u32 column = threadIdx.x % HEAD_DIM, own = threadIdx.x / HEAD_DIM;
    if (column >= key_rank) return;
    const float* map = a.maps + (u64)head * HEAD_DIM * HEAD_DIM + column;
    float sums[OWN] = {};
#pragma unroll 8
    for (u32 c = 0; c < HEAD_DIM; c++) {
        const float m = __ldg(map + c * HEAD_DIM);
#pragma unroll
        for (u32 i = 0; i < OWN; i++) sums[i] += m * shared[own + i * ROWS][c];
    }
    u16* keys = a.store.keys_of(sequence, head) + (u64)first * key_rank;
#pragma unroll
    for (u32 i = 0; i < OWN; i++)
        if (own + i * ROWS < count) keys[(own + i * ROWS) * key_rank + column] = to_element(sums[i]);
}

struct RestoreArguments {
    Store store;
    const float* maps; // of the queries: a row back is one whose products with queries are those of the projections
    u16* keys;         // element [head][rows][HEAD_DIM], from the first token behind the sinks on
    u16* values;       // the same of values
    u32 tokens, rows;
};

// Rows of one sequence at full rank, with the products that the cut ones have.
//
// Launch: grid (heads, TOKENS tokens each), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) restore(const RestoreArguments a) {
    __shared__ float shared[TOKENS][HEAD_DIM];
    const u32 head = blockIdx.x, first = blockIdx.y * TOKENS, count = min(a.tokens - first, TOKENS);
    const u32 key_rank = a.store.key_ranks[head], value_rank = a.store.value_ranks[head];
    const u16* keys = a.store.keys_of(0, head) + (u64)first * key_rank;
    const u16* values = a.store.values_of(0, head) + (u64)first * value_rank;
    const u64 at = ((u64)head * a.rows + first) * HEAD_DIM;
    for (u32 i = threadIdx.x; i < TOKENS * HEAD_DIM; i += THREADS) {
        const u32 t = i / HEAD_DIM, c = i % HEAD_DIM;
        shared[t][c] = t < count && c < key_rank ? to_float(keys[t * key_rank + c]) : 0;
        if (t < count) a.values[at + i] = c < value_rank ? values[t * value_rank + c] : (u16)0;
    }
    __syncthreads();
    const u32 component = threadIdx.x % HEAD_DIM, own = threadIdx.x / HEAD_DIM;
    const float* map = a.maps + ((u64)head * HEAD_DIM + component) * HEAD_DIM;
    float sums[OWN] = {};
    for (u32 c = 0; c < key_rank; c++) {
        const float m = __ldg(map + c); // a row of the map stays in L1 from one column to the next
#pragma unroll
        for (u32 i = 0; i < OWN; i++) sums[i] += m * shared[own + i * ROWS][c];
    }
#pragma unroll
    for (u32 i = 0; i < OWN; i++)
        if (own + i * ROWS < count) a.keys[at + (own + i * ROWS) * HEAD_DIM + component] = to_element(sums[i]);
}

struct MergeArguments {
    u16* out;              // element [sequence][head][GROUP][HEAD_DIM]: attention to the exact tokens, then to all
    const u16* cut;        // the same of the store's tokens, up to the value rank
    const float* exact;    // [sequence][head][GROUP]: log-sum-exp of the scores
    const float* stored;   // the same of the store's
    const u32* value_ranks; // [head]
};

// Launch: grid (query heads of a sequence, sequences), HEAD_DIM threads.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) merge(const MergeArguments a) {
    pdl_wait(); // both parts are from the kernels before
    pdl_trigger();
    const u64 query = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const float exact = a.exact[query], stored = a.stored[query], most = fmaxf(exact, stored);
    const float own = __expf(exact - most), other = __expf(stored - most), scale = 1 / (own + other);
    const u64 at = query * HEAD_DIM + threadIdx.x;
    const float cut = threadIdx.x < a.value_ranks[blockIdx.x / GROUP] ? to_float(a.cut[at]) : 0;
    a.out[at] = to_element((own * to_float(a.out[at]) + other * cut) * scale);
}

// What a step of a cache with rows on the host needs besides codes: how many tokens it fetches, and the way of a token's
// rows to the host.
//
// CPU twin: Budget::k; the eviction of WindowedCache. Rows are 16-bit elements.
#include "types.cuh"

struct BudgetArguments {
    const u32* exact_lengths; // [sequence]
    const u32* coded_lengths; // [sequence]
    u32* ks;                  // [sequence]: tokens to fetch
    u32* counts;              // [sequence][head]: the same
    u32* attended;            // [sequence]: exact tokens and fetched ones
    double ratio;             // part of all tokens that is attended to; not read if `tokens`
    u32 tokens;               // to fetch, or 0 for `ratio`
    u32 reserved;             // sinks and window
    u32 sequences, heads;
};

// Launch: one block.
extern "C" __global__ void budget(const BudgetArguments a) {
    for (u32 i = threadIdx.x; i < a.sequences; i += blockDim.x) {
        const u32 n = a.coded_lengths[i];
        u32 k = a.tokens;
        if (k == 0) {
            const u64 all = (u64)ceil(a.ratio * (double)((u64)n + a.reserved)); // rounded as on the CPU: no sum follows
            k = all > a.reserved ? (u32)(all - a.reserved) : 1;
        }
        k = min(k, n);
        a.ks[i] = k, a.attended[i] = a.exact_lengths[i] + k;
        for (u32 head = 0; head < a.heads; head++) a.counts[i * a.heads + head] = k;
    }
}

struct LeaveArguments {
    const uint4* keys; // [sequence][head][capacity][chunk]: the layer's exact rows
    const uint4* values;
    uint4* host_keys; // [sequence][head][stored][chunk], in host memory
    uint4* host_values;
    uint4* staged;     // [sequence][head][ring][chunk]: keys, for the quantizer
    const u32* firsts; // [sequence]: the first token behind the sinks that leaves
    const u32* counts; // [sequence]: how many leave
    u32 heads, sinks, ring, capacity, stored;
    u32 chunks; // of 16 bytes of a row
};

// Copies rows of tokens that the ring will overwrite to the host, and their keys to the quantizer.
//
// Launch: grid (heads, sequences, keys and values), any number of threads. Stores to host memory are posted: the kernel
// waits for them only at its end.
extern "C" __global__ void leave(const LeaveArguments a) {
    const u32 sequence = blockIdx.y, first = a.firsts[sequence], count = a.counts[sequence];
    const bool is_values = blockIdx.z;
    const u64 head = (u64)sequence * a.heads + blockIdx.x;
    const uint4* rows = (is_values ? a.values : a.keys) + head * a.capacity * a.chunks;
    uint4* host = (is_values ? a.host_values : a.host_keys) + (head * a.stored + first) * a.chunks;
    uint4* staged = a.staged + head * a.ring * a.chunks;
    for (u32 i = threadIdx.x; i < count * a.chunks; i += blockDim.x) {
        const u32 slot = a.sinks + (first + i / a.chunks) % a.ring;
        const uint4 data = rows[(u64)slot * a.chunks + i % a.chunks];
        host[i] = data;
        if (!is_values) staged[i] = data;
    }
}

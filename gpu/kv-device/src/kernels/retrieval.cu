// Kernels of the caches that retrieve exact rows: lookup tables from codebooks, the number of tokens that a step
// selects, and the copy of new rows to their store in host or device memory.
//
// CPU twin: CodeLayout::table_into; TokenBudget::k; the eviction of WindowedCache. Rows are 16-bit elements.
#include "primitives_sm80.cuh"

struct BudgetArguments {
    const u32* coded_lengths; // [sequence]
    u32* ks;                  // [sequence]: tokens to choose
    u32* counts;              // [sequence][head]: the same
    double ratio;             // part of all tokens that is attended to; not read if `tokens`
    u32 tokens;               // to choose, or 0 for `ratio`
    u32 reserved;             // sinks and window, where they count towards the ratio
    u32 least;                // tokens that `ratio` gives at least
    u32 sequences, heads;
};

// Launch: one block.
extern "C" __global__ void budget(const BudgetArguments a) {
    for (u32 i = threadIdx.x; i < a.sequences; i += blockDim.x) {
        const u32 n = a.coded_lengths[i];
        u32 k = a.tokens;
        if (k == 0) {
            const u64 all = (u64)ceil(a.ratio * (double)((u64)n + a.reserved)); // rounded as on the CPU: no sum follows
            k = max(all > a.reserved ? (u32)(all - a.reserved) : 0, a.least);
        }
        k = min(k, n);
        a.ks[i] = k;
        for (u32 head = 0; head < a.heads; head++) a.counts[i * a.heads + head] = k;
    }
}

struct TabulateArguments {
    const float* centroids; // [head][m][ksub][2 pairs]
    u32* table;             // [head][ksub][m pairs]: word j + p m has components 2 p and 2 p + 1 of subspace j, as f16
    u32 m, ksub, pairs;
};

// Arranges codebooks as pq::CodeLayout does.
//
// Launch: grid (codes, heads), any number of threads.
extern "C" __global__ void tabulate(const TabulateArguments a) {
    const u32 code = blockIdx.x, words = a.m * a.pairs;
    const float* centroids = a.centroids + (u64)blockIdx.y * words * 2 * a.ksub;
    u32* row = a.table + ((u64)blockIdx.y * a.ksub + code) * words;
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        const float* pair = centroids + (((u64)(i % a.m) * a.ksub + code) * a.pairs + i / a.m) * 2;
        row[i] = pack_half2(pair[0], pair[1]);
    }
}

struct EvictArguments {
    const uint4* keys; // [sequence][head][capacity][chunk]: the layer's exact rows
    const uint4* values;
    uint4* stored_keys; // [sequence][head][stored][chunk], maybe in host memory; null to stage rows only
    uint4* stored_values;
    uint4* staged;     // [side][sequence][head][ring][chunk], for the quantizers: keys, or keys and values
    const u32* firsts; // [sequence]: the first token behind the sinks that leaves
    const u32* counts; // [sequence]: how many leave
    u32 heads, sinks, ring, capacity, stored;
    u32 chunks; // of 16 bytes of a row
    u32 staged_sides;
};

// Copies rows of tokens that the ring will overwrite to their store and to the quantizers.
//
// Launch: grid (heads, sequences, keys and values), any number of threads. Stores to host memory are posted: the kernel
// waits for them only at its end.
extern "C" __global__ void evict(const EvictArguments a) {
    const u32 sequence = blockIdx.y, first = a.firsts[sequence], count = a.counts[sequence];
    const bool is_values = blockIdx.z;
    const u64 head = (u64)sequence * a.heads + blockIdx.x;
    const uint4* rows = (is_values ? a.values : a.keys) + head * a.capacity * a.chunks;
    uint4* stored = (is_values ? a.stored_values : a.stored_keys) + (head * a.stored + first) * a.chunks;
    uint4* staged = a.staged + ((u64)blockIdx.z * gridDim.y * a.heads + head) * a.ring * a.chunks;
    for (u32 i = threadIdx.x; i < count * a.chunks; i += blockDim.x) {
        const u32 slot = a.sinks + (first + i / a.chunks) % a.ring;
        const uint4 data = rows[(u64)slot * a.chunks + i % a.chunks];
        if (a.stored_keys) stored[i] = data;
        if (blockIdx.z < a.staged_sides) staged[i] = data;
    }
}

struct CopyArguments {
    const uint4* keys; // [head][from_stride] chunks of 16 bytes, maybe in host memory
    const uint4* values;
    uint4* to_keys; // [head][to_stride], maybe in host memory
    uint4* to_values;
    u64 chunks; // of a head that are copied
    u64 from_stride, to_stride;
    u32 heads;
};

// Copies rows of a part of a prompt to their store, or from there.
//
// Launch: grid (blocks of a head, heads at a time, keys and values), any number of threads.
extern "C" __global__ void copy(const CopyArguments a) {
    constexpr int IN_FLIGHT = 4;
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 head = blockIdx.y; head < a.heads; head += gridDim.y) {
        const uint4* from = (blockIdx.z ? a.values : a.keys) + head * a.from_stride;
        uint4* to = (blockIdx.z ? a.to_values : a.to_keys) + head * a.to_stride;
        for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < a.chunks; first += step * IN_FLIGHT) {
            uint4 data[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (first + i * step < a.chunks) data[i] = from[first + i * step];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (first + i * step < a.chunks) to[first + i * step] = data[i];
        }
    }
}

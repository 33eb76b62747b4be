// What a cache that retrieves exact rows needs besides codes: their codebooks as tables, how many tokens a step
// chooses, which of them are on the device since the last step, and the way of rows to their store, which is in memory
// of the host or the device.
//
// CPU twin: CodeLayout::table_into; Budget::k; the eviction of WindowedCache. Rows are 16-bit elements.
#include "primitives_sm80.cuh"
#include "warp.cuh"

struct BudgetArguments {
    const u32* exact_lengths; // [sequence]
    const u32* coded_lengths; // [sequence]
    u32* ks;                  // [sequence]: tokens to choose
    u32* counts;              // [sequence][head]: the same
    u32* attended;            // [sequence]: exact tokens and chosen ones
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
        a.ks[i] = k, a.attended[i] = a.exact_lengths[i] + k;
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

constexpr int REUSE_THREADS = 1024;
constexpr u32 NOWHERE = 0xffffffffu;
static_assert(REUSE_THREADS == LANES * LANES, "a lane for the sum of every warp");

struct ReuseArguments {
    const u32* tokens; // [head][most]: chosen tokens, ascending; a head is one of a sequence
    const u32* counts; // [head]: how many
    u32* held_tokens;  // [head][most]: those of the last step, ascending
    u32* held_slots;   // [head][most]: the slot that has the rows of each
    u32* held_counts;  // [head]
    u32* slots;        // [head][most]: the slot of each token
    u32* misses;       // [head][most]: tokens whose rows are in no slot
    u32* places;       // [head][most]: the slot for each
    u32* miss_counts;  // [head]
    u64* fetched;      // misses so far
    u32 most;
    float forced; // part of the chosen tokens that misses, to time it, or a negative number
};

// Gives every chosen token a slot below the number of them. A token that the last step has chosen, too, keeps its slot;
// the others share the slots that are left.
//
// Launch: a block of REUSE_THREADS threads a head, with a bit of shared memory for each of `most` slots.
extern "C" __global__ void __launch_bounds__(REUSE_THREADS) reuse(const ReuseArguments a) {
    extern __shared__ u32 taken[]; // bits
    __shared__ u32 warp_sums[LANES];
    pdl_wait();
    pdl_trigger();
    const u32 head = blockIdx.x, k = a.counts[head], held = a.held_counts[head];
    const u64 at = (u64)head * a.most;
    const u32* tokens = a.tokens + at;
    u32 *held_tokens = a.held_tokens + at, *held_slots = a.held_slots + at, *slots = a.slots + at;
    u32 *misses = a.misses + at, *places = a.places + at;
    if (a.forced >= 0) {
        const u32 count = min((u32)rintf(a.forced * k), k);
        for (u32 i = threadIdx.x; i < count; i += REUSE_THREADS) misses[i] = tokens[i], places[i] = i;
        for (u32 i = threadIdx.x; i < k; i += REUSE_THREADS) slots[i] = i;
        if (threadIdx.x == 0) a.miss_counts[head] = count, atomicAdd(a.fetched, (u64)count);
        return;
    }
    for (u32 i = threadIdx.x; i < (k + 31) / 32; i += REUSE_THREADS) taken[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < k; i += REUSE_THREADS) {
        const u32 token = tokens[i];
        u32 low = 0, high = held; // the first held token that is not below
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (held_tokens[middle] < token)
                low = middle + 1;
            else
                high = middle;
        }
        const u32 slot = low < held && held_tokens[low] == token ? held_slots[low] : NOWHERE;
        if (slot < k) atomicOr(&taken[slot / 32], 1u << slot % 32);
        slots[i] = slot < k ? slot : NOWHERE;
    }
    __syncthreads();
    // Lists the tokens without a slot and the slots without a token: there are as many of both.
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 missing = 0, free = 0;
    for (u32 first = 0; first < k; first += REUSE_THREADS) {
        const u32 i = first + threadIdx.x;
        const bool is_missing = i < k && slots[i] == NOWHERE, is_free = i < k && !(taken[i / 32] >> i % 32 & 1);
        const u32 mine = (u32)is_missing | (u32)is_free << 16, inclusive = warp_inclusive_sum(mine);
        if (lane == LANES - 1) warp_sums[warp] = inclusive;
        __syncthreads();
        const u32 other = warp_sums[lane], all = __reduce_add_sync(FULL, other);
        const u32 before = inclusive - mine + __reduce_add_sync(FULL, lane < warp ? other : 0);
        if (is_missing) misses[missing + (before & 0xffff)] = i;
        if (is_free) places[free + (before >> 16)] = i;
        missing += all & 0xffff, free += all >> 16;
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < missing; i += REUSE_THREADS) {
        const u32 index = misses[i];
        slots[index] = places[i], misses[i] = tokens[index];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < k; i += REUSE_THREADS) held_tokens[i] = tokens[i], held_slots[i] = slots[i];
    if (threadIdx.x == 0) {
        a.held_counts[head] = k, a.miss_counts[head] = missing;
        atomicAdd(a.fetched, (u64)missing);
    }
}

struct LeaveArguments {
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
extern "C" __global__ void leave(const LeaveArguments a) {
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
};

// Copies rows of a part of a prompt to their store, or from there.
//
// Launch: grid (blocks, heads, keys and values), any number of threads.
extern "C" __global__ void copy(const CopyArguments a) {
    constexpr int IN_FLIGHT = 4;
    const bool is_values = blockIdx.z;
    const uint4* from = (is_values ? a.values : a.keys) + blockIdx.y * a.from_stride;
    uint4* to = (is_values ? a.to_values : a.to_keys) + blockIdx.y * a.to_stride;
    const u64 step = (u64)gridDim.x * blockDim.x;
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

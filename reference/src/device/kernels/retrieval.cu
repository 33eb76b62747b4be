// What a cache that retrieves exact rows needs besides codes: their codebooks as tables, how many tokens a step
// chooses, which of them are on the device since the last step, and the way of rows to their store, which is in memory
// of the host or the device.
//
// CPU twin: CodeLayout::table_into; Budget::k; the eviction of WindowedCache. Rows are 16-bit elements.
#include "primitives_sm80.cuh"
#include "warp.cuh"

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

constexpr int REUSE_THREADS = 1024;
constexpr u32 NOWHERE = 0xffffffffu;
static_assert(REUSE_THREADS == LANES * LANES, "a lane for the sum of every warp");

struct ReuseArguments {
    const u32* tokens; // [head][most]: chosen tokens, ascending; a head is one of a sequence
    const u32* counts; // [head]: how many, at most `most`
    uint2* held;       // [parity of the step][head][n_held]: tokens and their slots, the one chosen longest ago first
    u32* steps;        // [head]: steps so far
    u32* slots;        // [head][most]: the slot of each chosen token
    u32* missing;      // [head][most / 32, rounded up]: a bit for each whose row is in no slot
    u32* misses;       // [head][most]: these tokens
    u32* indices;      // [head][most]: the index of each among the chosen tokens
    u32* places;       // [head][most]: the slot for each
    u32* miss_counts;  // [head]
    u64* fetched;      // misses so far
    u32* found_at;     // [head][n_held]: for lists that threads take in turns
    u32 most, n_held;  // at least `most`
    u32 span;          // tokens that are looked up at once, a multiple of 128
    float forced;      // part of the chosen tokens that misses, to time it, or a negative number
};

// Consecutive entries of a list that a thread takes at once, so that their loads are in flight together. Stores follow
// all of them: the compiler moves no load before a store that may be to the same place.
constexpr u32 ENTRIES = 4, AT_ONCE = ENTRIES * REUSE_THREADS;

// How many entries the threads of a block before this one have, and all of them together. Every thread calls it; `sums`
// is free again behind the next barrier.
__device__ __forceinline__ u32 count_before(u32 mine, u32* sums, u32& all) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, inclusive = warp_inclusive_sum(mine);
    if (lane == LANES - 1) sums[warp] = inclusive;
    __syncthreads();
    const u32 other = sums[lane];
    all = __reduce_add_sync(FULL, other);
    return inclusive - mine + __reduce_add_sync(FULL, lane < warp ? other : 0);
}

// The chosen tokens of one span as bits in shared memory, so that a slot finds its token with two loads.
struct ChosenBits {
    u32* words;  // [span / 32]: a bit for every token
    u32* firsts; // [span / 32]: index of the first chosen token of a word, where a bit is set
    u32 span;

    __device__ __forceinline__ void clear() const {
        for (u32 i = threadIdx.x; i < span / 128; i += REUSE_THREADS)
            reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
    }

    // Adds the token with this index, which follows `previous` (NOWHERE for the first); both count from the span on.
    __device__ __forceinline__ void add(u32 token, u32 previous, u32 index) const {
        if (token >= span) return;
        atomicOr(&words[token / 32], 1u << token % 32);
        if (token / 32 != previous / 32) firsts[token / 32] = index;
    }

    // Adds the tokens of a list of `k`, which count from `base` on.
    __device__ __forceinline__ void add_all(const u32* tokens, u32 k, u32 base) const {
        for (u32 mine = ENTRIES * threadIdx.x; mine < k; mine += AT_ONCE) {
            u32 token[ENTRIES + 1];
#pragma unroll
            for (u32 j = 0; j <= ENTRIES; j++) {
                const u32 i = mine + j; // of the token behind this one
                token[j] = i > 0 && i <= k ? tokens[i - 1] - base : NOWHERE;
            }
#pragma unroll
            for (u32 j = 0; j < ENTRIES; j++)
                if (mine + j < k) add(token[j + 1], token[j], mine + j);
        }
    }

    // The index of a token, or NOWHERE.
    __device__ __forceinline__ u32 find(u32 token) const {
        if (token >= span) return NOWHERE;
        const u32 word = words[token / 32], bit = 1u << token % 32;
        return word & bit ? firsts[token / 32] + __popc(word & (bit - 1)) : NOWHERE;
    }
};

// A part of the chosen tokens that miss whatever slots have, spread evenly; the others are in the slots of their
// indices.
struct ForcedMisses {
    bool are_forced;
    u64 step; // misses of a token, in units of 2^-32
    u32 k;

    __device__ __forceinline__ ForcedMisses(float part, u32 k) : are_forced(part >= 0), step(0), k(k) {
        if (are_forced && k > 0) step = (((u64)min((u32)rintf(part * k), k) << 32) + k - 1) / k;
    }

    // The index of the chosen token that counts as the slot's, or NOWHERE.
    __device__ __forceinline__ u32 index_of(u32 slot) const {
        return slot < k && (slot + 1) * step >> 32 == slot * step >> 32 ? slot : NOWHERE;
    }
};

// What a thread has of the tokens that are held: ENTRIES of AT_ONCE at a time.
struct HeldEntries {
    const uint2* list; // [n]: tokens and slots
    u32* found_at;     // [n]: `index`, where there are more entries than the block takes at once
    u32 n;
    bool is_fresh; // no step has written the list: all slots are empty
    u32 token[ENTRIES], slot[ENTRIES], index[ENTRIES]; // among the chosen tokens, or NOWHERE

    __device__ __forceinline__ static u32 place(u32 first, u32 j) { return first + ENTRIES * threadIdx.x + j; }

    // Before the PDL wait, `early`, loads bypass L1.
    __device__ __forceinline__ void load(u32 first, bool early = false) {
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 i = place(first, j);
            const uint2 entry = is_fresh || i >= n ? make_uint2(NOWHERE, i) : early ? __ldcg(&list[i]) : list[i];
            token[j] = entry.x, slot[j] = entry.y, index[j] = NOWHERE;
        }
    }

    // Takes the entries from `first` on, with what has been found of them so far.
    __device__ __forceinline__ void turn_to(u32 first, bool is_found) {
        if (n <= AT_ONCE) return;
        load(first);
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (is_found && place(first, j) < n) index[j] = found_at[place(first, j)];
    }

    // Keeps what has been found for later turns.
    __device__ __forceinline__ void keep(u32 first) const {
        if (n <= AT_ONCE) return;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (place(first, j) < n) found_at[place(first, j)] = index[j];
    }
};

// Gives every chosen token a slot: the one that has its rows, or one of those whose tokens have not been chosen for
// longest (LRU). They are at the front of a list that each step writes anew: entries that it neither finds nor gives to
// another token keep their order, and those of chosen tokens follow.
//
// Launch: a block of REUSE_THREADS threads a head, with dynamic shared memory for ChosenBits and for `found`. A step
// begins with a launch without PDL, so what the step before has written is there before the wait.
extern "C" __global__ void __launch_bounds__(REUSE_THREADS) reuse(const ReuseArguments a) {
    extern __shared__ uint4 shared[];
    __shared__ u32 warp_sums[LANES];
    u32* words = reinterpret_cast<u32*>(shared);
    const ChosenBits bits = {words, words + a.span / 32, a.span};
    u32* found = words + a.span / 16; // [most / 32]: a bit for every chosen token that has a slot
    const u32 head = blockIdx.x, step = __ldcg(&a.steps[head]);
    const u64 list = (u64)head * a.most, of_parity = (u64)gridDim.x * a.n_held;
    uint2* next = a.held + (step + 1) % 2 * of_parity + (u64)head * a.n_held;
    const uint2* previous = a.held + step % 2 * of_parity + (u64)head * a.n_held;
    HeldEntries held = {previous, a.found_at + (u64)head * a.n_held, a.n_held, step == 0};
    held.load(0, true);
    bits.clear();
    for (u32 i = threadIdx.x; i < (a.most + 31) / 32; i += REUSE_THREADS) found[i] = 0;
    pdl_wait();
    pdl_trigger();
    const u32* tokens = a.tokens + list;
    u32 *slots = a.slots + list, *missing = a.missing + (u64)head * ((a.most + 31) / 32);
    u32 *misses = a.misses + list, *indices = a.indices + list, *places = a.places + list;
    const u32 k = a.counts[head], last = k ? tokens[k - 1] : 0, n = a.n_held;
    const ForcedMisses forced(a.forced, k);
    __syncthreads();
    // Looks up the tokens that are held among the chosen ones.
    for (u32 base = 0;; base += a.span) {
        bits.add_all(tokens, k, base);
        __syncthreads();
        for (u32 first = 0; first < n; first += AT_ONCE) {
            held.turn_to(first, base > 0);
#pragma unroll
            for (u32 j = 0; j < ENTRIES; j++) {
                u32 index = held.token[j] == NOWHERE ? NOWHERE : bits.find(held.token[j] - base);
                if (forced.are_forced) index = forced.index_of(held.slot[j]);
                if (held.place(first, j) >= n || index == NOWHERE) continue;
                slots[index] = held.slot[j], held.index[j] = index;
                atomicOr(&found[index / 32], 1u << index % 32);
            }
            held.keep(first);
        }
        __syncthreads();
        if (last - base < a.span) break;
        bits.clear();
        __syncthreads();
    }
    // Lists the tokens without a slot.
    u32 n_missing = 0;
    for (u32 first = 0; first < k; first += AT_ONCE) {
        const u32 mine = first + ENTRIES * threadIdx.x, exist = mine < k ? min(k - mine, ENTRIES) : 0;
        const u32 word = exist ? ~found[mine / 32] : 0, are_missing = word >> mine % 32 & ((1u << exist) - 1);
        u32 token[ENTRIES], all;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (are_missing >> j & 1) token[j] = tokens[mine + j];
        u32 before = n_missing + count_before(__popc(are_missing), warp_sums, all);
        if (exist && mine % 32 == 0) missing[mine / 32] = word;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (are_missing >> j & 1) misses[before] = token[j], indices[before++] = mine + j;
        n_missing += all;
        __syncthreads();
    }
    // Gives the first slots that were not found to those without, and writes the list of the next step.
    u32 passed = 0;
    for (u32 first = 0; first < n; first += AT_ONCE) {
        held.turn_to(first, true);
        u32 are_free = 0, all;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) are_free |= (held.place(first, j) < n && held.index[j] == NOWHERE) << j;
        const u32 before = passed + count_before(__popc(are_free), warp_sums, all);
        u32 rank[ENTRIES], index[ENTRIES], token[ENTRIES];
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            rank[j] = before + __popc(are_free & ((1u << j) - 1));
            if (are_free >> j & 1 && rank[j] < n_missing) index[j] = indices[rank[j]], token[j] = misses[rank[j]];
        }
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 slot = held.slot[j];
            if (held.place(first, j) >= n) continue;
            if (!(are_free >> j & 1)) {
                next[n - k + held.index[j]] = make_uint2(held.token[j], slot);
            } else if (rank[j] < n_missing) {
                places[rank[j]] = slot, slots[index[j]] = slot;
                next[n - k + index[j]] = make_uint2(token[j], slot);
            } else {
                next[rank[j] - n_missing] = make_uint2(held.token[j], slot);
            }
        }
        passed += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        a.steps[head] = step + 1, a.miss_counts[head] = n_missing;
        atomicAdd(a.fetched, (u64)n_missing);
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

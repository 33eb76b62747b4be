// Looks up which of the selected rows are resident on the device, and assigns slots to the others (LRU).
//
// CPU twin: pq_core::BlockCache with blocks of one token, by last use.
//
// Compile-time shape: SHORT, if no list has more than AT_ONCE entries. A head then has one block, which keeps its lists
// in registers and shared memory.
//
// Launch: grid (blocks, heads of all sequences) in clusters of a head's blocks, which are one if SHORT or before sm_90;
// THREADS threads, dynamic shared memory for `ChosenBits`, for `found` and, if SHORT, for `MissingTokens`. The blocks
// of a head share its lists: each has the bits of all chosen tokens, looks up its part of the held ones, and lists its
// part of the missing ones.
#include "mbarrier_sm90.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int THREADS = 1024;
constexpr u32 NO_SLOT = 0xffffffffu;
static_assert(THREADS == LANES * LANES, "a lane for the sum of every warp");
#ifdef SHORT
constexpr bool IS_SHORT = true;
#else
constexpr bool IS_SHORT = false;
#endif

struct Arguments {
    const u32* tokens; // [head][most]: chosen tokens, ascending; a head is one of a sequence
    const u32* counts; // [head]: how many, at most `most`
    uint2* held;       // [parity of the step][head][n_held]: tokens and their slots, the one chosen longest ago first
    u32* steps;        // [head]: steps so far
    u32* slots;        // [head][most]: the slot of each chosen token
    u32* missing;      // [head][most / 32, rounded up]: a bit for each whose row is in no slot
    u32* misses;       // [head][most]: these tokens
    u32* indices;      // [head][most]: the index of each among the chosen tokens; null if SHORT
    u32* places;       // [head][most]: the slot for each
    u32* miss_counts;  // [head]
    u64* fetched;      // misses so far
    u32* found_at;     // [head][n_held]: for lists that threads take in turns; null if SHORT
    u32 most, n_held;  // at least `most`
    u32 span;          // tokens that are looked up at once, a multiple of 128
    float forced;      // part of the chosen tokens that misses, to time it, or a negative number
};

// Entries of a list that a thread takes at once, so that their loads are in flight together: a warp has ENTRIES times
// LANES consecutive ones. Stores follow all loads: the compiler moves no load before a store that may be to the same
// place.
constexpr u32 ENTRIES = 4, AT_ONCE = ENTRIES * THREADS;

// The entry j of a thread; that of lane 0 is a multiple of LANES.
__device__ __forceinline__ u32 entry_of(u32 warp, u32 lane, u32 j) { return (warp * ENTRIES + j) * LANES + lane; }
__device__ __forceinline__ u32 entry(u32 j) { return entry_of(threadIdx.x / LANES, threadIdx.x % LANES, j); }

// How many entries the warps of a block before this one have, and all of them together; `mine` are the warp's. Every
// thread calls it; `sums` is free again behind the next barrier.
__device__ __forceinline__ u32 count_before(u32 mine, u32* sums, u32& all) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (lane == 0) sums[warp] = mine;
    __syncthreads();
    const u32 other = sums[lane];
    all = __reduce_add_sync(FULL, other);
    return __reduce_add_sync(FULL, lane < warp ? other : 0);
}

// The first n bits.
__device__ __forceinline__ u32 first_bits(u32 n) { return n < 32 ? (1u << n) - 1 : FULL; }

// The part of the chosen tokens that a thread has: ENTRIES of AT_ONCE at a time.
struct ChosenEntries {
    const u32* list;
    u32 k, capacity;
    u32 token[ENTRIES], previous[ENTRIES]; // NO_SLOT before the first token and behind the last one

    __device__ __forceinline__ ChosenEntries(const u32* list, u32 k, u32 capacity)
        : list(list), k(k), capacity(capacity) {
        if (IS_SHORT) load(0);
    }
    __device__ __forceinline__ void turn_to(u32 first) {
        if (!IS_SHORT) load(first);
    }

private:
    __device__ __forceinline__ void load(u32 first) {
        // Up to the capacity, so that loads do not wait for `k`.
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 i = first + entry(j);
            token[j] = i < capacity ? list[i] : NO_SLOT, previous[j] = i > 0 && i < capacity ? list[i - 1] : NO_SLOT;
        }
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (first + entry(j) >= k) token[j] = previous[j] = NO_SLOT;
    }
};

// The chosen tokens of one span as bits in shared memory, so that a slot finds its token with two loads.
struct ChosenBits {
    u32* words;  // [span / 32]: a bit for every token
    u32* firsts; // [span / 32]: index of the first chosen token of a word, where a bit is set
    u32 span;

    __device__ __forceinline__ void clear() const {
        for (u32 i = threadIdx.x; i < span / 128; i += THREADS)
            reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
    }

    // Adds the token with this index, which follows `previous`; both count from the span on.
    __device__ __forceinline__ void add(u32 token, u32 previous, u32 index) const {
        if (token >= span) return;
        atomicOr(&words[token / 32], 1u << token % 32);
        if (token / 32 != previous / 32) firsts[token / 32] = index;
    }

    // Adds the tokens of the span from `base` on; all others are beyond it.
    __device__ __forceinline__ void add_all(ChosenEntries& chosen, u32 base) const {
        for (u32 first = 0; first < chosen.k; first += AT_ONCE) {
            chosen.turn_to(first);
#pragma unroll
            for (u32 j = 0; j < ENTRIES; j++)
                add(chosen.token[j] - base, chosen.previous[j] - base, first + entry(j));
        }
    }

    // The index of a token, or NO_SLOT.
    __device__ __forceinline__ u32 find(u32 token) const {
        if (token >= span) return NO_SLOT;
        const u32 word = words[token / 32], bit = 1u << token % 32;
        return word & bit ? firsts[token / 32] + __popc(word & (bit - 1)) : NO_SLOT;
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

    // The index of the chosen token that counts as the slot's, or NO_SLOT.
    __device__ __forceinline__ u32 index_of(u32 slot) const {
        return slot < k && (slot + 1) * step >> 32 == slot * step >> 32 ? slot : NO_SLOT;
    }
};

// The blocks that share a head: a cluster, or one block.
struct Team {
#if __CUDA_ARCH__ >= 900 && !defined(SHORT)
    u32 rank = cluster_ctarank(), blocks = cluster_nctarank();

    __device__ __forceinline__ void arrive() const { cluster_arrive(); }
    __device__ __forceinline__ void wait() const { cluster_wait(); }
    __device__ __forceinline__ void set_bits(u32* word, u32 rank, u32 bits) const { red_or_cluster(word, rank, bits); }
    __device__ __forceinline__ void add(u32* to, u32 rank, u32 x) const { red_add_cluster(to, rank, x); }
#else
    static constexpr u32 rank = 0, blocks = 1;

    __device__ __forceinline__ void arrive() const {}
    __device__ __forceinline__ void wait() const { __syncthreads(); }
    __device__ __forceinline__ void set_bits(u32* word, u32, u32 bits) const { atomicOr(word, bits); }
    __device__ __forceinline__ void add(u32* to, u32, u32 x) const { atomicAdd(to, x); }
#endif

    __device__ __forceinline__ void sync() const { arrive(), wait(); }

    // Adds what the lanes of a warp have to this block's entry in the lists of all blocks.
    __device__ __forceinline__ void add_to_all(u32* of_block, u32 x) const {
        const u32 sum = __reduce_add_sync(FULL, x), lane = threadIdx.x % LANES;
        if (lane < blocks) add(of_block + rank, lane, sum);
    }
};

// The chosen tokens without a slot, and their indices among the chosen ones. If SHORT they are in shared memory, and no
// warp waits for what another one stores in L2.
struct MissingTokens {
    u32 *tokens, *indices;

    __device__ __forceinline__ void put(u32 at, u32 token, u32 index) const {
        tokens[at] = token, indices[at] = index;
    }
};

// Consecutive entries of a list of `n` that a block has; `each` of every block but the last ones.
struct Part {
    u32 each, first, end;

    __device__ __forceinline__ Part(const Team& team, u32 n, u32 multiple) {
        each = ((n + team.blocks - 1) / team.blocks + multiple - 1) / multiple * multiple;
        first = min(team.rank * each, n), end = min(first + each, n);
    }

    __device__ __forceinline__ u32 len() const { return end - first; }
    __device__ __forceinline__ u32 owner_of(u32 i) const { return IS_SHORT ? 0 : i / each; }
};

// The part of the tokens that are held that a thread has: ENTRIES of AT_ONCE at a time.
struct HeldEntries {
    const uint2* list; // tokens and slots
    u32* found_at;     // `index` of each, where there are more entries than the block takes at once
    Part part;
    bool is_fresh; // no step has written the list: all slots are empty
    u32 token[ENTRIES], slot[ENTRIES], index[ENTRIES]; // among the chosen tokens, or NO_SLOT

    __device__ __forceinline__ static u32 place(u32 first, u32 j) { return first + entry(j); }
    __device__ __forceinline__ bool has(u32 first, u32 j) const { return place(first, j) < part.end; }

    __device__ __forceinline__ bool takes_turns() const { return !IS_SHORT && part.len() > AT_ONCE; }

    // Before the PDL wait, `early`, loads bypass L1.
    __device__ __forceinline__ void load(u32 first, bool early = false) {
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 i = place(first, j);
            const uint2 entry =
                is_fresh || !has(first, j) ? make_uint2(NO_SLOT, i) : early ? __ldcg(&list[i]) : list[i];
            token[j] = entry.x, slot[j] = entry.y, index[j] = NO_SLOT;
        }
    }

    // Takes the entries from `first` on, with what has been found of them so far.
    __device__ __forceinline__ void turn_to(u32 first, bool is_found) {
        if (!takes_turns()) return;
        load(first);
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (is_found && has(first, j)) index[j] = found_at[place(first, j)];
    }

    // Keeps what has been found for later turns.
    __device__ __forceinline__ void keep(u32 first) const {
        if (!takes_turns()) return;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++)
            if (has(first, j)) found_at[place(first, j)] = index[j];
    }
};

// Gives every chosen token a slot: the one that has its rows, or one of those whose tokens have not been chosen for
// longest (LRU). They are at the front of a list that each step writes anew: entries that it neither finds nor gives to
// another token keep their order, and those of chosen tokens follow. A step begins with a launch without PDL, so what
// the step before has written is there before the wait.
extern "C" __global__ void __launch_bounds__(THREADS) residency(const Arguments a) {
    extern __shared__ uint4 shared[];
    __shared__ u32 warp_sums[LANES];
    __shared__ u32 chosen_found[LANES], held_found[LANES]; // of every block: how many of its part
    const Team team;
    u32* words = reinterpret_cast<u32*>(shared);
    const ChosenBits bits = {words, words + a.span / 32, a.span};
    u32* found = words + a.span / 16; // a bit for every chosen token of the block that has a slot
    u32* behind = found + (a.most + 31) / 32;
    const u32 head = blockIdx.y, step = __ldcg(&a.steps[head]), n = a.n_held, lane = threadIdx.x % LANES;
    const u64 list = (u64)head * a.most, of_parity = (u64)gridDim.y * n;
    uint2* next = a.held + (step + 1) % 2 * of_parity + (u64)head * n;
    const uint2* previous = a.held + step % 2 * of_parity + (u64)head * n;
    HeldEntries held = {previous, a.found_at + (u64)head * n, Part(team, n, LANES), step == 0};
    held.load(held.part.first, true);
    bits.clear();
    if (threadIdx.x < LANES) chosen_found[lane] = held_found[lane] = 0;
    for (u32 i = threadIdx.x; i < (a.most + 31) / 32; i += THREADS) found[i] = 0;
    team.arrive();
    pdl_wait();
    pdl_trigger();
    const u32* tokens = a.tokens + list;
    u32 *slots = a.slots + list, *missing = a.missing + (u64)head * ((a.most + 31) / 32);
    u32 *misses = a.misses + list, *places = a.places + list;
    const MissingTokens missing_tokens =
        IS_SHORT ? MissingTokens{behind, behind + a.most} : MissingTokens{misses, a.indices + list};
    const u32 k = a.counts[head], last = k ? tokens[k - 1] : 0;
    ChosenEntries entries(tokens, k, a.most);
    const Part chosen(team, k, 32);
    const ForcedMisses forced(a.forced, k);
    team.wait(); // nothing is found yet in any block
    // Looks up the tokens that are held among the chosen ones.
    u32 n_found = 0;
    for (u32 base = 0;; base += a.span) {
        bits.add_all(entries, base);
        __syncthreads();
        for (u32 first = held.part.first; first < held.part.end; first += AT_ONCE) {
            held.turn_to(first, base > 0);
#pragma unroll
            for (u32 j = 0; j < ENTRIES; j++) {
                u32 index = held.token[j] == NO_SLOT ? NO_SLOT : bits.find(held.token[j] - base);
                if (forced.are_forced) index = forced.index_of(held.slot[j]);
                if (!held.has(first, j) || index == NO_SLOT) continue;
                n_found += held.index[j] == NO_SLOT;
                slots[index] = held.slot[j], held.index[j] = index;
                const u32 owner = chosen.owner_of(index), i = index - owner * chosen.each;
                team.set_bits(&found[i / 32], owner, 1u << i % 32);
            }
            held.keep(first);
        }
        __syncthreads();
        if (last - base < a.span) break;
        bits.clear();
        __syncthreads();
    }
    team.add_to_all(held_found, n_found);
    team.sync(); // all that is found is in `found`
    u32 own_found = 0;
    for (u32 i = threadIdx.x; i < (chosen.len() + 31) / 32; i += THREADS) {
        missing[chosen.first / 32 + i] = ~found[i];
        own_found += __popc(found[i]);
    }
    team.add_to_all(chosen_found, own_found);
    team.sync();
    const u32 n_missing = k - __reduce_add_sync(FULL, chosen_found[lane]);
    u32 missing_before = chosen.first - __reduce_add_sync(FULL, lane < team.rank ? chosen_found[lane] : 0);
    u32 free_before = held.part.first - __reduce_add_sync(FULL, lane < team.rank ? held_found[lane] : 0);
    // Lists the tokens without a slot.
    const u32 warp = threadIdx.x / LANES, lower_lanes = first_bits(lane);
    for (u32 first = chosen.first; first < chosen.end; first += AT_ONCE) {
        u32 are_missing[ENTRIES], token[ENTRIES], mine = 0, all;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 i = first + entry_of(warp, 0, j);
            are_missing[j] = i < chosen.end ? ~found[(i - chosen.first) / 32] & first_bits(chosen.end - i) : 0;
            mine += __popc(are_missing[j]);
            if (are_missing[j] >> lane & 1) token[j] = IS_SHORT ? entries.token[j] : tokens[i + lane];
        }
        u32 before = missing_before + count_before(mine, warp_sums, all);
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 at = before + __popc(are_missing[j] & lower_lanes);
            if (are_missing[j] >> lane & 1) {
                missing_tokens.put(at, token[j], first + entry(j));
                if (IS_SHORT) misses[at] = token[j];
            }
            before += __popc(are_missing[j]);
        }
        missing_before += all;
        __syncthreads();
    }
    team.sync(); // the lists of all blocks
    // Gives the first slots that were not found to those without, and writes the list of the next step.
    for (u32 first = held.part.first; first < held.part.end; first += AT_ONCE) {
        held.turn_to(first, true);
        u32 are_free[ENTRIES], mine = 0, all;
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            are_free[j] = __ballot_sync(FULL, held.has(first, j) && held.index[j] == NO_SLOT);
            mine += __popc(are_free[j]);
        }
        u32 before = free_before + count_before(mine, warp_sums, all);
        u32 rank[ENTRIES], index[ENTRIES], token[ENTRIES];
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            rank[j] = before + __popc(are_free[j] & lower_lanes);
            before += __popc(are_free[j]);
            if (are_free[j] >> lane & 1 && rank[j] < n_missing)
                index[j] = missing_tokens.indices[rank[j]], token[j] = missing_tokens.tokens[rank[j]];
        }
#pragma unroll
        for (u32 j = 0; j < ENTRIES; j++) {
            const u32 slot = held.slot[j];
            if (!held.has(first, j)) continue;
            if (!(are_free[j] >> lane & 1)) {
                next[n - k + held.index[j]] = make_uint2(held.token[j], slot);
            } else if (rank[j] < n_missing) {
                places[rank[j]] = slot, slots[index[j]] = slot;
                next[n - k + index[j]] = make_uint2(token[j], slot);
            } else {
                next[rank[j] - n_missing] = make_uint2(held.token[j], slot);
            }
        }
        free_before += all;
        __syncthreads();
    }
    if (team.rank == 0 && threadIdx.x == 0) {
        a.steps[head] = step + 1, a.miss_counts[head] = n_missing;
        atomicAdd(a.fetched, (u64)n_missing);
    }
}

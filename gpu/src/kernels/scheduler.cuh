// Splits ragged work evenly over the blocks of a grid, on the device.
//
// The work is a list of entries (for instance heads or sequences) of one or more units each. The list may be the same
// for several rounds (for instance the sequences of a batch, once for every head). Every block takes a contiguous range
// of units, and the sizes of these ranges differ by at most one. A block thus has a part of an entry, several entries,
// or both. The host plans nothing: a captured graph stays valid as lengths change.
//
// The first units of an entry may represent the fixed cost of starting it, its overhead, which blocks do not share. The
// first entry of a block starts together with the block, so the overhead of the very first entry is left out.
//
// `softmax_reduce.cuh` merges the results of an entry that several blocks share.
#pragma once
#include "warp.cuh"

// The overhead of entry `e` of a round: `units_of.overhead(e)` if there is such a function, else 0.
template <typename Units>
__device__ __forceinline__ auto overhead_of(const Units& units_of, u32 e, int) -> decltype(units_of.overhead(e)) {
    return units_of.overhead(e);
}
template <typename Units>
__device__ __forceinline__ u32 overhead_of(const Units&, u32, long) {
    return 0;
}

// A block's range of units and its position in the list. It lives in shared memory: one warp calls `begin`, one thread
// calls the other functions, and the block synchronizes before it reads.
struct Work {
    u32 share, longer;       // every block that works has `share` units; the first `longer` blocks have one more
    u32 origin;              // first unit of the first block
    u32 end;                 // end of the block's range of units
    u32 entry;               // current entry, or the number of entries of all rounds when the block has no more
    u32 before, units;       // units of all entries before the current one, and units of the current one
    u32 overhead;            // of the current entry
    u32 from, to;            // the block's range within the current entry, in units
    u32 first_block, pieces; // first block that shares the current entry, and number of blocks that share it
    u32 last;                // nonzero if this block was the last of them to arrive

    // Called by one warp: finds the block's range and its first entry. `units_of(e)` returns the units of entry `e` of
    // a round, more than its overhead; the total of all rounds is below 2^32. If it gives the blocks less than `least`
    // units each, only the first blocks work, with `least` units or a few more. Returns true in the lane that found the
    // entry, which called `units_of` for that entry last, and in none if the block has no work. N.B. The start of a
    // kernel is bound by instruction fetch, so this stays short: each lane sums one run of entries, and only the lane
    // whose run contains the block's first unit reads its run again.
    template <typename Units>
    __device__ __forceinline__ bool begin(u32 entries, u32 block, u32 blocks, Units& units_of, u32 rounds = 1,
                                          u32 least = 0) {
        const u32 run = (entries + LANES - 1) / LANES, first = threadIdx.x * run;
        u32 run_units = 0;
#pragma unroll 4
        for (u32 i = 0; i < run; i++)
            if (first + i < entries) run_units += units_of(first + i);
        const u32 run_end = warp_inclusive_sum(run_units), of_round = __shfl_sync(FULL, run_end, LANES - 1);
        const u32 skipped = overhead_of(units_of, 0, 0), total = of_round * rounds - skipped;
        if (least > 0) blocks = max(min(blocks, total / least), 1u);
        share = total / blocks, longer = total - share * blocks, origin = skipped;
        const u32 block_begin = skipped + share * block + min(block, longer);
        const u32 block_end = least > 0 && block >= blocks ? block_begin : block_begin + share + (block < longer);
        const u32 round = rounds == 1 ? 0 : block_begin / of_round, unit = block_begin - round * of_round;
        u32 passed = run_end - run_units, e = first, count;
        const bool found = block_begin < block_end && passed <= unit && unit < run_end;
        while (warp_uniform(found && passed + (count = units_of(e)) <= unit)) passed += count, e++;
        if (block_begin == block_end && threadIdx.x == 0) entry = entries * rounds;
        if (found) {
            end = block_end, entry = round * entries + e, before = round * of_round + passed;
            units = count, overhead = overhead_of(units_of, e, 0);
            from = unit - passed, to = min(block_end - before, count);
            if (to <= overhead) entry = entries * rounds; // nothing but overhead
        }
        return found && to > overhead;
    }

    // Called by one thread: moves to the next entry. Returns false if the block has no more.
    template <typename Units>
    __device__ __forceinline__ bool advance(u32 entries, Units& units_of, u32 rounds = 1) {
        before += units, entry++;
        const u32 e = rounds == 1 ? entry : entry % entries;
        if (before >= end || end - before <= (overhead = overhead_of(units_of, e, 0))) {
            entry = entries * rounds;
            return false;
        }
        units = units_of(e);
        from = 0, to = min(end - before, units);
        return true;
    }

    // Called by one thread: finds the blocks that share the current entry. This is separate from `begin` and `advance`
    // because it divides: callers issue their first loads before it.
    __device__ __forceinline__ void find_sharers() {
        first_block = block_of(before + overhead);
        pieces = block_of(before + units - 1) - first_block + 1;
    }

    __device__ __forceinline__ u32 block_of(u32 unit) const {
        const u32 at = unit - origin, longer_end = longer * (share + 1);
        return at < longer_end ? at / (share + 1) : longer + (at - longer_end) / share;
    }
};

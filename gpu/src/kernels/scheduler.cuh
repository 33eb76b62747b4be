// Splits ragged work evenly over the blocks of a grid, on the device.
//
// The work is a list of entries (for instance heads or sequences) of one or more units each. Every block takes a
// contiguous range of units, and the sizes of these ranges differ by at most one. A block thus has a part of an entry,
// several entries, or both. The host plans nothing: a captured graph stays valid as lengths change.
//
// `softmax_reduce.cuh` merges the results of an entry that several blocks share.
#pragma once
#include "warp.cuh"

// A block's range of units and its position in the list. It lives in shared memory: one warp calls `begin`, one thread
// calls the other functions, and the block synchronizes before it reads.
struct Work {
    u32 share, longer;       // every block has `share` units; the first `longer` blocks have one more
    u32 end;                 // end of the block's range of units
    u32 entry;               // current entry, or the number of entries when the block has no more
    u32 before, units;       // units of all entries before the current one, and units of the current one
    u32 from, to;            // the block's range within the current entry, in units
    u32 first_block, pieces; // first block that shares the current entry, and number of blocks that share it
    u32 last;                // nonzero if this block was the last of them to arrive

    // Called by one warp: finds the block's range and its first entry. `units_of(entry)` returns the units of an entry;
    // their total is below 2^32. Returns true in at most one lane: the lane that found the entry, which called
    // `units_of` for that entry last.
    // N.B. The start of a kernel is bound by instruction fetch, so this stays short: each lane sums one run of entries,
    // and only the lane whose run contains the block's first unit reads its run again.
    template <typename Units>
    __device__ __forceinline__ bool begin(u32 entries, u32 block, u32 blocks, Units& units_of) {
        const u32 run = (entries + LANES - 1) / LANES, first = threadIdx.x * run;
        u32 run_units = 0;
#pragma unroll 4
        for (u32 i = 0; i < run; i++)
            if (first + i < entries) run_units += units_of(first + i);
        const u32 run_end = warp_inclusive_sum(run_units), total = __shfl_sync(FULL, run_end, LANES - 1);
        const u32 quotient = total / blocks, remainder = total - quotient * blocks;
        const u32 block_begin = quotient * block + min(block, remainder);
        const u32 block_end = block_begin + quotient + (block < remainder);
        if (block_begin == block_end && threadIdx.x == 0) entry = entries;
        u32 passed = run_end - run_units, e = first, count;
        const bool found = block_begin < block_end && passed <= block_begin && block_begin < run_end;
        while (warp_uniform(found && passed + (count = units_of(e)) <= block_begin)) passed += count, e++;
        if (found) {
            share = quotient, longer = remainder, end = block_end;
            entry = e, before = passed, units = count;
            from = block_begin - passed, to = min(block_end - passed, count);
        }
        return found;
    }

    // Called by one thread: moves to the next entry. Returns false if the block has no more.
    template <typename Units>
    __device__ __forceinline__ bool advance(u32 entries, Units& units_of) {
        before += units;
        if (before >= end) {
            entry = entries;
            return false;
        }
        units = units_of(++entry);
        from = 0, to = min(end - before, units);
        return true;
    }

    // Called by one thread: finds the blocks that share the current entry. This is separate from `begin` and `advance`
    // because it divides: callers issue their first loads before it.
    __device__ __forceinline__ void find_sharers() {
        first_block = block_of(before);
        pieces = block_of(before + units - 1) - first_block + 1;
    }

    __device__ __forceinline__ u32 block_of(u32 unit) const {
        const u32 longer_end = longer * (share + 1);
        return unit < longer_end ? unit / (share + 1) : longer + (unit - longer_end) / share;
    }
};

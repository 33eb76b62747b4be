// Work that is cut into equal parts on the device: a list of entries with so many units each (one or more), dealt to
// blocks in order, so that a block has a part of an entry, several entries, or both. Nothing is planned on the host: a
// captured graph stays valid as lengths change.
#pragma once
#include "warp.cuh"

struct Work {
    u32 share, longer;       // units of a block, of which the first `longer` have one more
    u32 end;                 // the unit after the block's last
    u32 entry;               // the current one; their number when there is none
    u32 before, units;       // units of the entries before it, and its own
    u32 from, to;            // the block's units of it
    u32 first_block, pieces; // the blocks that share it
    u32 last;                // whether this block was the last of them to arrive

    // For one warp: the block's part, and its first entry. `units_of` gives those of an entry, all of them fewer than
    // 2^32; true for the lane that asked it last for that entry, if there is one. What a kernel does first waits for
    // its instructions, so these are few: a lane adds up a run of entries, and one lane looks into its own again.
    template <typename Units>
    __device__ __forceinline__ bool begin(u32 entries, u32 block, u32 blocks, Units& units_of) {
        const u32 run = (entries + LANES - 1) / LANES, first = threadIdx.x * run;
        u32 mine = 0;
#pragma unroll 4
        for (u32 i = 0; i < run; i++)
            if (first + i < entries) mine += units_of(first + i);
        const u32 through = warp_inclusive_sum(mine), total = __shfl_sync(FULL, through, LANES - 1);
        const u32 each = total / blocks, rest = total - each * blocks;
        const u32 block_begin = each * block + min(block, rest), block_end = block_begin + each + (block < rest);
        if (block_begin == block_end && threadIdx.x == 0) entry = entries;
        u32 passed = through - mine, e = first, count;
        const bool here = block_begin < block_end && passed <= block_begin && block_begin < through;
        while (warp_uniform(here && passed + (count = units_of(e)) <= block_begin)) passed += count, e++;
        if (here) {
            share = each, longer = rest, end = block_end;
            entry = e, before = passed, units = count;
            from = block_begin - passed, to = min(block_end - passed, count);
        }
        return here;
    }

    // For one thread: the next entry. False if there is none.
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

    // For one thread: which blocks share the entry. Divisions, which can wait until the first loads are on their way.
    __device__ __forceinline__ void find_sharers() {
        first_block = block_of(before);
        pieces = block_of(before + units - 1) - first_block + 1;
    }

    __device__ __forceinline__ u32 block_of(u32 unit) const {
        const u32 in_longer = longer * (share + 1);
        return unit < in_longer ? unit / (share + 1) : longer + (unit - in_longer) / share;
    }
};

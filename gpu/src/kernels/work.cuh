// Work that is cut into equal parts on the device: a list of entries with so many units each, dealt to blocks in order, so that a
// block has a part of an entry, several entries, or both. Nothing is planned on the host: a captured graph stays valid as
// lengths change.
struct Work {
    u32 share, longer;       // units of a block, of which the first `longer` have one more
    u32 begin, end;          // the block's units
    u32 passed, group;       // units of the entries before `group`, which are the 32 that the current one is among
    u32 entry;               // the current one; their number when there is none
    u32 from, to;            // the block's units of it
    u32 first_block, pieces; // the blocks that share it
    u32 last;                // whether this block was the last of them to arrive

    __device__ __forceinline__ u32 block_of(u32 unit) const {
        const u32 in_longer = longer * (share + 1);
        return unit < in_longer ? unit / (share + 1) : longer + (unit - in_longer) / share;
    }

    // For one warp: the part of a block. `units` gives those of an entry, all of them fewer than 2^32.
    template <typename Units>
    __device__ __forceinline__ void cut(u32 entries, u32 block, u32 blocks, Units units) {
        u32 total = 0;
        for (u32 first = 0; first < entries; first += LANES) {
            const u32 mine = first + threadIdx.x;
            total += __reduce_add_sync(FULL, mine < entries ? units(mine) : 0);
        }
        if (threadIdx.x == 0) {
            share = total / blocks, longer = total % blocks;
            begin = share * block + min(block, longer);
            end = begin + share + (block < longer);
            passed = 0, group = 0;
        }
        __syncwarp();
    }

    // For the same warp: the first entry from `next` on that the block has a part in.
    template <typename Units>
    __device__ __forceinline__ void find(u32 entries, u32 next, Units units) {
        const u32 lane = threadIdx.x, mine_begin = begin, mine_end = end;
        u32 before = passed, first = group;
        for (; first < entries && before < mine_end; first += LANES) {
            const u32 count = first + lane < entries ? units(first + lane) : 0;
            u32 up_to = count;
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) {
                const u32 of_others = __shfl_up_sync(FULL, up_to, step);
                if (lane >= step) up_to += of_others;
            }
            const u32 entry_end = before + up_to, entry_begin = entry_end - count;
            const bool touched = first + lane >= next && count > 0 && entry_end > mine_begin && entry_begin < mine_end;
            const u32 all_touched = __ballot_sync(FULL, touched);
            if (all_touched) {
                if (lane == __ffs(all_touched) - 1) {
                    passed = before, group = first, entry = first + lane;
                    from = max(entry_begin, mine_begin) - entry_begin, to = min(entry_end, mine_end) - entry_begin;
                    first_block = block_of(entry_begin);
                    pieces = block_of(entry_end - 1) - first_block + 1;
                }
                __syncwarp();
                return;
            }
            before += __shfl_sync(FULL, up_to, LANES - 1);
        }
        if (lane == 0) entry = entries;
        __syncwarp();
    }
};

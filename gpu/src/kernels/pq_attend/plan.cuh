// What a block does next, worked out by its first warp: a part of a sequence's items.
struct Plan {
    u32 share, longer;       // items of a block, of which the first `longer` have one more
    u32 begin, end;          // the block's, among those of the batch
    u32 passed;              // items of the sequences before `group`
    u32 group;               // the 32 sequences that the current one is among
    u32 sequence, length, exact_length;
    u32 item, item_end;      // of the sequence; the exact tokens come first
    u32 first_block, pieces; // the blocks that share the sequence
    u32 last;                // whether this block was the last of them to arrive
};

static_assert(sizeof(Plan) <= BARRIER - PLAN, "room for the plan");

__device__ __forceinline__ u32 block_of_item(const Plan& plan, u32 item) {
    const u32 in_longer = plan.longer * (plan.share + 1);
    return item < in_longer ? item / (plan.share + 1) : plan.longer + (item - in_longer) / plan.share;
}

__device__ __forceinline__ u32 items_of(const Arguments& a, u32 sequence, u32& length, u32& exact_length) {
    if (sequence >= a.batch) return 0;
    length = a.lengths[sequence];
    exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
    return max((length + TILE - 1) / TILE + (exact_length + EXACT - 1) / EXACT, 1u); // an empty one has an output, too
}

__device__ __forceinline__ void find_part(const Arguments& a, Plan& plan) {
    const u32 lane = threadIdx.x;
    const Place place;
    u32 total = 0;
    for (u32 group = 0; group < a.batch; group += LANES) {
        u32 length, exact_length;
        total += __reduce_add_sync(FULL, items_of(a, group + lane, length, exact_length));
    }
    if (lane == 0) {
        plan.share = total / place.blocks, plan.longer = total % place.blocks;
        plan.begin = plan.share * place.block + min(place.block, plan.longer);
        plan.end = plan.begin + plan.share + (place.block < plan.longer);
        plan.passed = 0, plan.group = 0;
    }
    __syncwarp();
}

// The first sequence from `next` on that the block has a part in; the batch's size if there is none.
__device__ __forceinline__ void find_sequence(const Arguments& a, u32 next, Plan& plan) {
    const int lane = threadIdx.x;
    const u32 begin = plan.begin, end = plan.end;
    u32 passed = plan.passed;
    u32 group = plan.group;
    for (; group < a.batch && passed < end; group += LANES) {
        u32 length, exact_length;
        const u32 items = items_of(a, group + lane, length, exact_length);
        u32 up_to = items;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const u32 before = __shfl_up_sync(FULL, up_to, step);
            if (lane >= step) up_to += before;
        }
        const u32 to = passed + up_to, from = to - items;
        const u32 touched = __ballot_sync(FULL, group + lane >= next && items > 0 && to > begin && from < end);
        if (touched) {
            if (lane == __ffs(touched) - 1) {
                plan.passed = passed, plan.group = group;
                plan.sequence = group + lane, plan.length = length, plan.exact_length = exact_length;
                plan.item = max(from, begin) - from, plan.item_end = min(to, end) - from;
                plan.first_block = block_of_item(plan, from);
                plan.pieces = block_of_item(plan, to - 1) - plan.first_block + 1;
            }
            __syncwarp();
            return;
        }
        passed += __shfl_sync(FULL, up_to, LANES - 1);
    }
    if (lane == 0) plan.sequence = a.batch;
    __syncwarp();
}

// The loop on tiles, and the kernel. What was tried on an H200 and did not pay: asking for the tile after the next in the
// second-level cache (10 % slower with one query, where that cache is 92 % busy), or for the second tile while tables come (5 %
// slower); hints on the loads (no difference); both loads at the end of the loop (2 % slower); 8 warps for 16 with one query (7 %
// slower), 8 for 12 with four (as fast).

// Where a tile of a sequence lies among all tiles, of which there are fewer than 2^32.
struct Tiles {
#ifdef PAGED
    const u32* pages;
    u32 head;
    __device__ __forceinline__ Tiles(const Arguments& a, u32 sequence, u32 head)
        : pages(a.pages + (u64)sequence * a.max_pages), head(head) {}
    __device__ __forceinline__ u32 at(const Arguments& a, u32 tile) const {
        return (__ldg(pages + tile / a.page_tiles) * a.heads + head) * a.page_tiles + tile % a.page_tiles;
    }
#else
    u32 first;
    __device__ __forceinline__ Tiles(const Arguments& a, u32 sequence, u32 head)
        : first((sequence * a.heads + head) * a.page_tiles) {}
    __device__ __forceinline__ u32 at(const Arguments&, u32 tile) const { return first + tile; }
#endif
};

// Asks for the queries of the block in shared memory, a word a thread; those that a group lacks are zeros.
__device__ __forceinline__ void load_queries(const Arguments& a, const Plan& plan) {
    const Place place;
    const u32 first = place.slice * QUERIES, live = min(a.group - first, (u32)QUERIES);
    const u16* queries = a.queries + (((u64)plan.entry * a.heads + place.head) * a.group + first) * D;
    static_assert(TURNS * COPIES * WORDS <= THREADS, "a word a thread");
    const u32 query = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    if (query < TURNS * COPIES) {
        const bool there = query < live;
        copy_async_4_if(shared + QUERY_ROWS + query * QUERY_ROW + word * 4, queries + (there ? query * D + component<KEY_SUB>(word) : 0), there);
    }
    commit_copies();
}

// The block's part of one sequence; its first one waits for the tables.
__device__ __forceinline__ void attend_sequence(const Arguments& a, Plan& plan, bool is_first, State& state) {
    const Lane lane;
    const Place place;
    const u32 sequence = plan.entry, head = place.head;
    const Tiles tiles(a, sequence, head);
    u32 tile, tile_end;
    {
        const u32 exact_items = (plan.exact_length + EXACT - 1) / EXACT;
        u32 item = plan.from + lane.warp;
        if (item < exact_items) item += (exact_items - item + WARPS - 1) / WARPS * WARPS;
        tile = item - exact_items;
        tile_end = min(max(plan.to, exact_items) - exact_items, (plan.length + TILE - 1) / TILE);
    }

    Keys key_codes;
    Values value_codes;
    u32 next = 0; // where the warp's next tile lies
    load_queries(a, plan); // before the codes, behind which they would wait
    if (is_first) load_value_table(a);
    if (tile < tile_end) {
        next = tiles.at(a, tile);
        key_codes.load(a.key_codes + (u64)next * Keys::TILE_BYTES, lane.lane);
        value_codes.load(a.value_codes + (u64)next * Values::TILE_BYTES, lane.lane);
        if (tile + WARPS < tile_end) next = tiles.at(a, tile + WARPS);
    }


    if (lane.thread == 0) plan.find_sharers();
    state.clear();
    clear_results(lane);
    wait_for_all_but<0>();
    __syncthreads();
    attend_exact(a, plan);

    QueryColumns query;
    query.load(lane);
    const KeyOffsets key_offsets(lane);
    u32 value_offset = 0; // where its words lie in a row of the value table
#pragma unroll
    for (int i = 0; i < 4; i++) value_offset |= (u32)((8 * ((lane.l + i) & 3) + lane.g) * 4) << (8 * i);
    u8* weights = shared + WEIGHTS + lane.warp * PAIRS * 2 * TILE * 2;
    for (int i = lane.lane; i < PAIRS * 2 * TILE / 2; i += LANES) reinterpret_cast<u32*>(weights)[i] = 0;
    if (is_first) finish_key_table();

    while (uniform(tile < tile_end)) {
        float scores[COPIES][4];
        score_tile(scores, key_codes, query, key_offsets, lane);
        const u32 here = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        const u32 index = next;
        if (more) key_codes.load(a.key_codes + (u64)index * Keys::TILE_BYTES, lane.lane);
        if (tile + WARPS < tile_end) next = tiles.at(a, tile + WARPS);

#pragma unroll
        for (int i = 0; i < COPIES; i++) {
#pragma unroll
            for (int t = 0; t < 4; t++) scores[i][t] *= a.scale;
            if (here + TILE > plan.length) // the sequence's last tile
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (here + lane.g + 8 * t >= plan.length) scores[i][t] = -infinity();
        }
        uint2 packed[COPIES];
        state.weigh(packed, scores, lane);
        __syncwarp();
        if (lane.holds)
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                *reinterpret_cast<uint2*>(weights + (lane.turn * COPIES + i) * TILE * 2 + lane.g * 8) = packed[i];
        __syncwarp();

        {
            u32 codes[Values::EXPANDED];
            value_codes.expand(codes);
            wait_for_value_table();
            state.sums.add(codes, value_offset, weights, lane);
        }
        if (more) value_codes.load(a.value_codes + (u64)index * Values::TILE_BYTES, lane.lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_attend(const Arguments a) {
    load_key_table(a);
    Plan& plan = *reinterpret_cast<Plan*>(shared + PLAN);
    if (uniform(threadIdx.x < LANES)) plan.find_first(a);
    wait_for_previous_kernel(); // all but tables and lengths may come from it
    let_next_kernel_start();
    __syncthreads();
    bool is_first = true;
    for (; uniform(plan.entry < a.batch); is_first = false) {
        State state;
        attend_sequence(a, plan, is_first, state);
        finish_sequence(a, plan, state);
        if (threadIdx.x == 0) plan.find_next(a);
        __syncthreads();
    }
    wait_for_key_table();
    if (!is_first) wait_for_value_table();
}

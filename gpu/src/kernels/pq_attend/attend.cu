// The loop on tiles, and the kernel. What was tried and did not pay on an H200: asking for the tile after the next in the second-level
// cache (10 % slower with one query, where that cache is 92 % busy); hints on the loads (no difference); both loads at the end of
// the loop (2 % slower); 8 warps for 16 with one query (7 % slower), 8 for 12 with four (as fast).

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

// The queries of the block in shared memory; those that a group lacks are zeros.
__device__ __forceinline__ void load_queries(const Arguments& a, const Plan& plan) {
    const Place place;
    const u32 live = min(a.group - place.slice * QUERIES, (u32)QUERIES);
    const u16* queries = a.queries + (((u64)plan.entry * a.heads + place.head) * a.group + place.slice * QUERIES) * D;
    constexpr int WIDTH = 8; // elements of 16 bytes
    for (int i = threadIdx.x; i < QUERIES * D / WIDTH; i += THREADS) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        reinterpret_cast<uint4*>(shared + QUERY_ROWS)[i] =
            i * WIDTH / D < live ? __ldg(reinterpret_cast<const uint4*>(queries) + i) : zero;
    }
}

// The block's part of one sequence. `tables` waits for the tables, the first time.
template <typename Tables>
__device__ __forceinline__ void attend_sequence(const Arguments& a, const Plan& plan, Tables tables, State& state) {
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
    if (tile < tile_end) {
        next = tiles.at(a, tile);
        key_codes.load(a.key_codes + (u64)next * Keys::TILE_BYTES, lane.lane);
        value_codes.load(a.value_codes + (u64)next * Values::TILE_BYTES, lane.lane);
        if (tile + WARPS < tile_end) next = tiles.at(a, tile + WARPS);
    }

    state.sums.clear();
#pragma unroll
    for (int i = 0; i < COPIES; i++) state.max[i] = NOTHING, state.weight[i] = 0;
    load_queries(a, plan);
    __syncthreads();
    attend_exact(a, plan);

    const int g = lane.g, l = lane.l;
    // The queries in the order of each column's variant.
    const u16* queries = reinterpret_cast<const u16*>(shared + QUERY_ROWS);
    u32 query[TURNS][HALVES * 4][2];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int variant = COPIES == 1 ? (g - 2 * i) & 7 : (g / 2) ^ i;
        const u32 q = COPIES == 1 ? i : 2 * i + (g & 1);
#pragma unroll
        for (int step = 0; step < HALVES * 4; step++)
#pragma unroll
            for (int middle = 0; middle < 2; middle++) {
                const int flipped = COPIES == 1 ? middle ^ (variant / 4) : middle;
                const int word = step / 4 * 32 + 16 * flipped + 4 * ((step % 4) ^ (variant & 3)) + l;
                u32 pair = 0;
                if (q < QUERIES) pair = *reinterpret_cast<const u32*>(queries + q * D + component<KEY_SUB>(word));
#ifdef BFLOAT
                pair = pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#endif
                query[i][step][middle] = pair;
            }
    }

    tables();

    // Where the lane's words lie in a row. Lanes of g >= 4 have the 16-word halves swapped: they read them in the other order
    // (one copy), or from the copy in which they are swapped.
    u32 key_offset[3] = {0, 0, 0}, value_offset = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 word = 16 * ((i / 4) ^ (g / 4)) + 4 * ((i % 4) ^ (g & 3)) + l;
        key_offset[i / 3] |= (word * 4 + (COPIES == 2 && !FAR_COPY && g >= 4 ? ROW / 2 : 0)) << (8 * (i % 3));
    }
#pragma unroll
    for (int i = 0; i < 3; i++) key_offset[i] |= (FAR_COPY && g >= 4 ? 1u : 0u) << 24;
#pragma unroll
    for (int i = 0; i < 4; i++) value_offset |= (u32)((8 * ((l + i) & 3) + g) * 4) << (8 * i);
    const int swap = COPIES == 1 && g >= 4 ? 16 : 0; // bits

    u8* weights = shared + WEIGHTS + lane.warp * PAIRS * 2 * TILE * 2;
    for (int i = lane.lane; i < PAIRS * 2 * TILE / 2; i += LANES) reinterpret_cast<u32*>(weights)[i] = 0;

    while (uniform(tile < tile_end)) {
        // Scores of tokens g, g + 8, g + 16, g + 24 for the lane's queries.
        float scores[COPIES][4];
        {
            u32 codes[Keys::EXPANDED];
            key_codes.expand(codes);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float product[TURNS][4];
#pragma unroll
                for (int part = 0; part < HALVES; part++)
#pragma unroll
                    for (int step = 0; step < 4; step++) {
                        u32 operand[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) { // high = i & 1, middle = i / 2
                            const int code = key_code(half, part, step, i / 2, i & 1), offset = i / 2 * 4 + step;
                            u32 word = codes[code / 4];
                            if (COPIES == 1 && D / KEY_SUB >= 32) word = __funnelshift_l(word, word, swap);
                            const u32 selector = key_selector(code % 4, offset % 3);
                            operand[i] = look_up<KEY_TABLE>(permute_bytes(word, key_offset[offset / 3], selector), part);
                        }
#pragma unroll
                        for (int i = 0; i < TURNS; i++) {
                            const u32* q = query[i][part * 4 + step];
                            if (part + step == 0)
                                multiply(product[i], operand, q[0], q[1]);
                            else
                                multiply_add(product[i], operand, q[0], q[1]);
                        }
                    }
#pragma unroll
                for (int high = 0; high < 2; high++)
#pragma unroll
                    for (int i = 0; i < COPIES; i++) {
                        float score = 0;
#pragma unroll
                        for (int t = 0; t < TURNS; t++) {
                            const float* row = product[t] + 2 * high;
                            if (t == 0 || lane.turn == t) score = COPIES == 2 ? row[i] : lane.g & 1 ? row[1] : row[0];
                        }
                        scores[i][half * 2 + high] = score;
                    }
            }
        }
        const u32 here = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        const u32 index = next;
        if (more) key_codes.load(a.key_codes + (u64)index * Keys::TILE_BYTES, lane.lane);
        if (tile + WARPS < tile_end) next = tiles.at(a, tile + WARPS);

        float top[COPIES];
        bool grows = false;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
#pragma unroll
            for (int t = 0; t < 4; t++) scores[i][t] *= a.scale;
            if (here + TILE > plan.length) // the sequence's last tile
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (here + lane.g + 8 * t >= plan.length) scores[i][t] = -infinity();
            top[i] = fmaxf(fmaxf(scores[i][0], scores[i][1]), fmaxf(scores[i][2], scores[i][3]));
            grows |= lane.holds && top[i] > state.max[i] + 8;
        }
        if (uniform(grows)) {
            float keep[QUERIES];
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const int i = q % COPIES;
                const bool mine = lane.turn == q / COPIES;
                const float old = __shfl_sync(FULL, state.max[i], q / COPIES); // of a lane with g = 0
                const float max = warp_max(mine ? fmaxf(top[i], old) : NOTHING);
                keep[q] = exp2_approx(old - max);
                if (mine) state.max[i] = max, state.weight[i] *= keep[q];
            }
            state.sums.scale(keep);
        }
        uint2 packed[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            float p[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                p[t] = exp2_approx(scores[i][t] - state.max[i]);
                state.weight[i] += p[t];
            }
            packed[i] = make_uint2(pack_half2(p[0], p[1]), pack_half2(p[2], p[3]));
        }
        __syncwarp();
        if (lane.holds)
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                *reinterpret_cast<uint2*>(weights + (lane.turn * COPIES + i) * TILE * 2 + lane.g * 8) = packed[i];
        __syncwarp();

        {
            u32 codes[Values::EXPANDED];
            value_codes.expand(codes);
            state.sums.add(codes, value_offset, weights, lane);
        }
        if (more) value_codes.load(a.value_codes + (u64)index * Values::TILE_BYTES, lane.lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_attend(const Arguments a) {
    let_next_kernel_start();
    load_tables(a);
    wait_for_previous_kernel(); // all but the tables may come from it
    Plan& plan = *reinterpret_cast<Plan*>(shared + PLAN);
    if (threadIdx.x < LANES) {
        const Place place;
        plan.cut(a.batch, place.block, place.blocks, Items{a});
        find_sequence(a, 0, plan);
    }
    __syncthreads();
    bool waits = true;
    while (uniform(plan.entry < a.batch)) {
        State state;
        const auto tables = [&] {
            if (waits) finish_tables();
            waits = false;
        };
        attend_sequence(a, plan, tables, state);
        finish_sequence(a, plan, state);
        if (threadIdx.x < LANES) find_sequence(a, plan.entry + 1, plan);
        __syncthreads();
    }
    wait_for_tables();
}

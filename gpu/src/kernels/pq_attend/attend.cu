// Decode attention on product-quantized keys and values: the kernel, and a warp's loop over its tiles.
//
// CPU twins: pq_core::attend_into, pq_core::attend_exact_into. shape.cuh has the compile-time shape and explains the
// method. Launch: grid (block of a list's work, slice of the query groups, list of heads), THREADS threads, one block
// per multiprocessor. A block has an equal part of the work of its list; a warp has every WARPS-th tile of it.
//
// INTERLEAVED: a warp processes two tiles at a time, and the MMAs of one tile's values alternate with those of the next
// tile's keys, since a warp with one tile waits in turn for shared memory, MMAs and shuffles. Four queries at 8 bits
// for two components took 3 to 6 % less time with 8 such warps than with 12 that have one tile each; codes of fewer
// bits, which have to be expanded for both tiles, took up to 10 % more. Eight queries took 2 % less.
// Tried with two tiles, and slower: weights of a third tile in between, or other orders of the steps (1 to 5 %); the
// same loop as a member of a structure, which the compiler orders differently (2 to 6 %); code loads after the weights
// (10 to 26 %).
//
// Tried on an H200 with one tile at a time, and rejected: L2 prefetch of the tile after the next (10 % slower with one
// query, where L2 is 92 % busy, 1 to 5 % with four); L2 prefetch of the second tile during the copy of the tables (5 %
// slower); cache hints on the loads (no difference); codes of two tiles in flight in registers (8 warps; 4 % slower for
// 32,768 tokens, 2 % faster for 16 times as many).
#include "pq_attend/adjustments.cuh"
#include "pq_attend/exact.cuh"
#include "pq_attend/finish.cuh"
#include "pq_attend/plan.cuh"
#include "pq_attend/scores.cuh"
#include "pq_attend/sums.cuh"
#include "pq_attend/tables.cuh"

// Starts the copy of the block's queries to shared memory; queries beyond the group are zeros.
__device__ __forceinline__ void load_queries(const Arguments& a, const Plan& plan) {
    const GridCoord coord;
    const u32 first = coord.slice * QUERIES, live = min(a.group - first, (u32)QUERIES);
    const u16* queries = a.queries + (((u64)plan.sequence * a.heads + plan.head) * a.group + first) * D;
#pragma unroll
    for (u32 i = threadIdx.x; i < QUERIES * WORDS; i += THREADS) {
        const u32 query = i / WORDS, word = i % WORDS;
        const bool there = query < live;
        cp_async_4_zfill(shared + QUERY_ROWS + query * QUERY_ROW + word * 4,
                         queries + (there ? query * D + component<KEY_SUB>(word) : 0), there);
    }
    cp_async_commit();
}

// Converts bf16 queries to f16 for the products with coded keys, which are f16; each thread converts the queries that
// it has copied. Conversion between shared memory and MMAs led ptxas to another order of the loop over tiles (7 %
// slower).
__device__ __forceinline__ void convert_queries() {
#if ELEMENT == 2
#pragma unroll
    for (u32 i = threadIdx.x; i < QUERIES * WORDS; i += THREADS) {
        const u32 place = i / WORDS * QUERY_ROW + i % WORDS * 4;
        const u32 pair = *reinterpret_cast<const u32*>(shared + QUERY_ROWS + place);
        *reinterpret_cast<u32*>(shared + F16_QUERY_ROWS + place) =
            pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
#endif
}

// Runs `step`, which advances `tile`, until `tile` is `end` or above. A step takes from `tiles` the tile AHEAD rounds
// ahead.
template <typename BeginRun, typename Step>
__device__ __forceinline__ void for_tiles(u32& tile, u32 end, TilePlaces& tiles, BeginRun begin_run, Step step) {
    constexpr u32 AHEAD = INTERLEAVED ? 2 : 1;
    if constexpr (TilePlaces::PAGES) {
        while (warp_uniform(tile < end)) {
            if (warp_uniform(tiles.left() == 0 && tile + WARPS < end)) begin_run(tile + AHEAD * WARPS);
            const u32 run_end = min(end, tile + tiles.left() * WARPS);
            do step();
            while (warp_uniform(tile < run_end));
        }
    } else {
        while (warp_uniform(tile < end)) step();
    }
}

// Attends to the block's part of one sequence. With a new head, it waits for the tables.
__device__ __forceinline__ void attend_sequence(const Arguments& a, Plan& plan, State& state) {
    const Lane lane;
    const bool new_head = warp_uniform(plan.new_head), odd_phase = warp_uniform(plan.phase() % 2);
    // The warps take the block's items in turn, exact ones first.
    const u32 tile_end = plan.tile_end;
    u32 tile = plan.tile_begin + (lane.warp + WARPS - (plan.exact_end - plan.exact_begin) % WARPS) % WARPS;
    TilePlaces tiles;
    auto begin_run = [&](u32 first) {
        tiles.begin(a, plan.sequence, plan.head, min(first + Lane().lane * WARPS, tile_end - 1), plan.length);
    };
    if (warp_uniform(tile < tile_end)) begin_run(tile);

    Keys key_codes;
    Values value_codes;
    auto load_keys = [&](const TilePlace& place) { key_codes.load(a.key_codes, place, lane.lane); };
    auto load_values = [&](const TilePlace& place) { value_codes.load(a.value_codes, place, lane.lane); };
    const Adjustments adjustments(a, plan.sequence, plan.head, lane);
    prefetch_exact(a, plan);
    load_queries(a, plan); // before the codes: the queries would otherwise wait for these loads
    if (new_head) load_value_table(a, plan.head);
    if (tile < tile_end) {
        const TilePlace first = tiles.take(tile);
        load_keys(first), load_values(first);
        adjustments.copy(a, first, tile, lane);
    }

    if (lane.thread == 0) plan.find_sharers();
    state.clear();
    if (new_head) finish_key_table(odd_phase); // while the queries are in flight
    cp_async_wait<0>();
    convert_queries();
    __syncthreads();

    const QueryColumns query(lane);
    const KeyOffsets key_offsets(lane);
    const u32 value_offset = value_offset_of(lane);
    u8* weights = warp_weights(lane); // of the warp's tile

    TilePlace next{}; // of the warp's next tile
    auto load_next_keys = [&] {
        const bool there = tile + WARPS < tile_end;
        if (TilePlaces::PAGES || there) next = tiles.take(tile + WARPS);
        if (there) load_keys(next);
    };
    // Called once the weights of the tile are in registers: the adjustments of the next one take their place.
    auto copy_next = [&] {
        if constexpr (Adjustments::ANY) {
            __syncwarp();
            if (tile + WARPS < tile_end) adjustments.copy(a, next, tile + WARPS, lane);
        }
    };
    auto weigh = [&](const Scores& products) {
        float scores[LANE_QUERIES][4];
        products.extract(scores, lane);
        const u32 first = tile * TILE;
        TileAdjustments of_tile = adjustments.of_tile(lane);
#pragma unroll
        for (int i = 0; i < LANE_QUERIES; i++) {
#pragma unroll
            for (int t = 0; t < 4; t++) scores[i][t] = of_tile.score(scores[i][t], a.scale, i, t);
            if (first + TILE > plan.length) // the last tile of the sequence
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (first + lane.g + 8 * t >= plan.length) scores[i][t] = -infinity(), of_tile.mask(t);
        }
        uint2 packed[LANE_QUERIES];
        state.weigh(packed, scores, of_tile, lane);
        __syncwarp();
        if (lane.has_scores) Sums::Weights::put(weights, packed, lane);
        __syncwarp();
    };
    auto score = [&] {
        Scores scores;
        key_codes.expand(scores.codes);
#pragma unroll
        for (int k = 0; k < Scores::STEPS; k++) scores.add_step(k, query, key_offsets, lane);
        load_next_keys();
        weigh(scores);
    };
    auto add = [&] {
        u32 codes[Values::EXPANDED];
        value_codes.expand(codes);
        wait_for_value_table(odd_phase);
        const Sums::Weights tile_weights(weights, lane);
        copy_next();
#pragma unroll
        for (int k = 0; k < Sums::STEPS; k++) state.sums.add_step(k, codes, value_offset, tile_weights, lane);
    };
    auto add_and_score_next = [&] {
        constexpr int RATIO = Scores::STEPS / Sums::STEPS;
        Scores scores;
        u32 codes[Values::EXPANDED];
        key_codes.expand(scores.codes);
        value_codes.expand(codes);
        const Sums::Weights tile_weights(weights, lane);
        copy_next();
#pragma unroll
        for (int k = 0; k < Sums::STEPS; k++) {
            state.sums.add_step(k, codes, value_offset, tile_weights, lane);
#pragma unroll
            for (int i = 0; i < RATIO; i++) scores.add_step(k * RATIO + i, query, key_offsets, lane);
        }
        load_values(next);
        tile += WARPS;
        load_next_keys();
        weigh(scores);
    };

    if (INTERLEAVED) {
        if (warp_uniform(tile < tile_end)) score();
        wait_for_value_table(odd_phase);
        for_tiles(tile, max(tile_end, (u32)WARPS) - WARPS, tiles, begin_run, add_and_score_next);
        if (warp_uniform(tile < tile_end)) add();
    } else {
        for_tiles(tile, tile_end, tiles, begin_run, [&] {
            score();
            add();
            tile += WARPS;
            if (tile < tile_end) load_values(next);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_attend(const Arguments a) {
    const bool one_head = a.list_heads == 1; // known before the plan
    init_table_barriers();
    if (one_head) load_key_table(a, GridCoord().list);
    Plan& plan = *reinterpret_cast<Plan*>(shared + PLAN);
    if (warp_uniform(threadIdx.x < LANES)) plan.find_first(a);
    pdl_wait(); // the previous kernel may write everything but tables and lengths
    pdl_trigger();
    __syncthreads();
    while (warp_uniform(plan.has_work(a))) {
        if (warp_uniform(a.list_heads > 1 && plan.new_head)) load_key_table(a, plan.head);
        State state;
        attend_sequence(a, plan, state);
        finish_sequence(a, plan, state);
        if (threadIdx.x == 0) plan.find_next(a);
        __syncthreads();
    }
    // A block must not exit before its copies have completed.
    if (one_head || plan.tables > 0) wait_for_key_table(max(plan.tables, 1u) - 1);
    if (plan.tables > 0) wait_for_value_table(plan.phase());
}

// Weighted sums of coded values, as sums of weights by code.
//
// A block adds the weight of each token to the counter of its code, for each subspace, in shared memory; the sums of
// values are these counters times the codebook, once for all tokens of the block. A subspace of a token costs one
// atomic addition of 4 bytes per query, instead of a look-up of all its components (values.cuh). Conflict-free atomic
// additions of integers run at the rate of loads (16 of a warp in 22 cycles of an H200, 16-byte look-ups of the same
// codes in 71; of f32 150, of 64-bit integers 192: loops of compare-and-swap).
//
// So weights are integers: multiples of 2^-WEIGHT_BITS of the sum of the weights of all tokens. Integers add up in any
// order to the same bytes, and subtracting the selected tokens leaves no residue.
//
// Lane 4 g + l has the codes of subspaces 8 `set` + g for the tokens l + 4 half + 8 i (`CodeLayout`), in the order of
// (half, step, i), where `set` is (step + l) % SETS. The counters of a code have a bank for each lane: a subspace has
// COPIES = 4 / SETS of them.
#pragma once
#include "pq_hybrid/codes.cuh"
#include "pq_hybrid/plan.cuh"
#include "pq_hybrid/scored_tile.cuh"
#include "tile_indices.cuh"
#include "warp.cuh"

using Values = Packed<VALUE_M, VALUE_BITS>;

constexpr int VALUE_KSUB = 1 << VALUE_BITS;
constexpr int SETS = VALUE_M / 8, COPIES = 4 / SETS;
constexpr int TILES_IN_FLIGHT = 4; // of a warp: the one that it adds and those that it prefetches
// A row of counters, of a code: [query][bank].
constexpr int VALUE_SHARED_BYTES = VALUE_KSUB * ROW;

// The counter of a row for a query in a bank.
__device__ __forceinline__ u32* counter_of(u8* row, int query, int bank) {
    return reinterpret_cast<u32*>(row) + query * LANES + bank;
}

// The first bank of a subspace: its COPIES banks are adjacent.
__device__ __forceinline__ int bank_of(int subspace) { return subspace % 8 * 4 + subspace / 8 * COPIES; }

// Clears the counters. Called by THREADS threads; `thread` is the index of this one.
template <int THREADS>
__device__ __forceinline__ void prepare_values(const AttendArguments&, u32, u32 thread, u8* counters) {
    for (int i = thread; i < VALUE_SHARED_BYTES / 16; i += THREADS)
        reinterpret_cast<uint4*>(counters)[i] = make_uint4(0, 0, 0, 0);
}

// Offsets of the lane's banks for steps 2 i and 2 i + 1.
struct ValueOffsets {
    u32 pairs[(SETS + 1) / 2];

    __device__ __forceinline__ explicit ValueOffsets(int lane) {
        const auto at = [&](int step) { return 4 * (bank_of((step + lane) % SETS * 8 + lane / 4) + lane % 4 / SETS); };
#pragma unroll
        for (int i = 0; i < (SETS + 1) / 2; i++) {
            pairs[i] = pack_offsets(at(2 * i), at(2 * i + 1));
            keep_in_register(pairs[i]);
        }
    }
};

// The weight of a stored score of a tile in units of the counters; 0 for NaN.
__device__ __forceinline__ u32 weight_of(u16 code, float level, float base) {
    return __float2uint_rn(exp2_approx(near_score(code) - ORIGIN + (level - base)));
}

// Scores of a lane's token in a tile.
struct Scores {
    u16 of_query[GROUP];
    float levels[GROUP];

    // Bypasses L1, which may hold scores of the previous launch: this may precede `pdl_wait`.
    __device__ __forceinline__ void load(const ScoredTile& tile, int place) {
#pragma unroll
        for (int q = 0; q < GROUP; q++)
            of_query[q] = __ldcg(&tile.scores[q][place]), levels[q] = __ldcg(&tile.levels[q]);
    }
};

// Adds tiles to the counters.
struct CodeWeights {
    float base[GROUP];
    u8* counters;

    // `bases`: the base of each query.
    __device__ __forceinline__ CodeWeights(const float* bases, u8* counters) : counters(counters) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) base[q] = bases[q];
    }

    // `scores`: of token l + 4 half + 8 i, where 4 half + i = g.
    __device__ __forceinline__ void add(const Values& packed, const Scores& scores, const ValueOffsets& offsets) const {
        u32 own[GROUP], any = 0;
#pragma unroll
        for (int q = 0; q < GROUP; q++)
            any |= own[q] = weight_of(scores.of_query[q], scores.levels[q], base[q]);
        if (!warp_uniform(any != 0)) return; // all weights of the tile round to 0
        u32 codes[Values::EXPANDED];
        packed.expand(codes);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 weights[GROUP];
#pragma unroll
                for (int q = 0; q < GROUP; q++)
                    weights[q] = __shfl_sync(FULL, own[q], (half * 4 + i) * 4 + threadIdx.x % 4);
#pragma unroll
                for (int step = 0; step < SETS; step++) {
                    const u32 at = row_address(codes[half * SETS + step], offsets.pairs[step / 2], i, step);
#pragma unroll
                    for (int q = 0; q < GROUP; q++) atomicAdd(counter_of(counters + at, q, 0), weights[q]);
                }
            }
    }
};

// Empties the warp's results.
__device__ __forceinline__ void clear_results(float* results) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
        float* result = results + q * RESULT;
        for (int i = lane; i < D; i += LANES) result[i] = 0;
        if (lane == 0) result[D] = NEG_INF, result[D + 1] = 0;
    }
    __syncwarp();
}

// Adds the tiles of `walk` before `end` to the counters, and empties the warp's results. `row`: of the plan's sequence.
// `bases`: the base of each query.
__device__ __forceinline__ void sum_tiles(const AttendArguments& a, const Plan<AttendArguments>& plan, u64 row,
                                          TileWalk<ATTEND_WARPS> walk, u32 end, const float* bases, u8* counters,
                                          float* results) {
    const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    TileIndices tiles;
    auto begin_run = [&] { tiles.begin(a, plan.entry, blockIdx.y, min(walk.after(lane), end - 1)); };
    const u8* codes = a.codes + lane * Values::LANE_BYTES;
    const ScoredTile* scores = a.scores_of(row);
    struct Tile {
        u32 index; // in the sequence
        Values codes;
        Scores scores;
    };
    Tile ring[TILES_IN_FLIGHT];
    auto load = [&](Tile& ahead) {
        // Reloads the last tile instead of branching: the lanes of the warp might not reconverge after a branch.
        const u32 tile = min(walk.tile, end - 1);
        ahead.index = walk.tile;
        ahead.codes.load(codes + (u64)tiles.take(tile) * Values::TILE_BYTES);
        ahead.scores.load(scores[tile], place_of(l + g / 4 * 4 + g % 4 * 8));
    };
    auto load_next = [&](Tile& ahead) {
        walk.advance();
        if (TileIndices::PAGES && warp_uniform(tiles.left() == 0 && walk.tile < end)) begin_run();
        load(ahead);
    };
    const CodeWeights weights(bases, counters);
    bool goes_on = warp_uniform(walk.tile < end);
    if (goes_on) {
        begin_run();
        load(ring[0]);
#pragma unroll
        for (int i = 1; i < TILES_IN_FLIGHT - 1; i++) load_next(ring[i]);
        const ValueOffsets offsets(lane);
        do {
#pragma unroll
            for (int i = 0; i < TILES_IN_FLIGHT; i++) {
                load_next(ring[(i + TILES_IN_FLIGHT - 1) % TILES_IN_FLIGHT]);
                weights.add(ring[i].codes, ring[i].scores, offsets);
                goes_on = warp_uniform(ring[(i + 1) % TILES_IN_FLIGHT].index < end);
                if (!goes_on) break;
            }
        } while (goes_on);
    }
    clear_results(results);
}

// Adds the values of the warp's share of the codes, times their weights, to its results, and clears their counters.
// Called by all threads of the block when they have added and subtracted all tokens. Lane j + VALUE_M * i has
// subspace j.
__device__ __forceinline__ void add_coded_sums(const AttendArguments& a, u32 head, const float* bases, u8* counters,
                                               float* results) {
    constexpr int LANE_WORDS = WORDS / LANES, CODES = VALUE_KSUB / ATTEND_WARPS; // of a lane, of a warp
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, bank = bank_of(lane % VALUE_M);
    const u32* table = a.table + (u64)head * VALUE_KSUB * WORDS + lane;
    u32 words[CODES][LANE_WORDS]; // loaded while other warps add and subtract
#pragma unroll
    for (int i = 0; i < CODES * LANE_WORDS; i++)
        words[i / LANE_WORDS][i % LANE_WORDS] =
            __ldg(table + (i / LANE_WORDS * ATTEND_WARPS + warp) * WORDS + i % LANE_WORDS * LANES);
    float2 sums[GROUP][LANE_WORDS];
    int totals[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
        totals[q] = 0;
#pragma unroll
        for (int w = 0; w < LANE_WORDS; w++) sums[q][w] = make_float2(0, 0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CODES; i++)
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            u32* counter = counter_of(counters + (i * ATTEND_WARPS + warp) * ROW, q, bank);
            int weight = 0;
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) weight += counter[copy];
            totals[q] += weight;
#pragma unroll
            for (int w = 0; w < LANE_WORDS; w++) {
                const float2 pair = half2_to_float2(weight == 0 ? 0 : words[i][w]); // an unused centroid may be NaN
                sums[q][w].x += (float)weight * pair.x, sums[q][w].y += (float)weight * pair.y;
            }
        }
    __syncwarp();
    for (int code = warp; code < VALUE_KSUB; code += ATTEND_WARPS)
#pragma unroll
        for (int q = 0; q < GROUP; q++) *counter_of(counters + code * ROW, q, lane) = 0;
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
        float* result = results + q * RESULT;
        const float unit = bases[q] < infinity() ? 1 : bases[q] - bases[q]; // NaN: of an infinite score, or NaN
        const float max = fmaxf(bases[q], result[D]);
        const float keep = exp2_approx(result[D] - max), factor = exp2_approx(bases[q] - max) * unit;
        const float total = keep * result[D + 1] + factor * (float)totals[q];
        __syncwarp(); // all lanes have read the result
        if (lane == 0) result[D] = max, result[D + 1] = total;
#pragma unroll
        for (int w = 0; w < LANE_WORDS; w++) {
            const int word = lane + w * LANES, component = word % VALUE_M * (D / VALUE_M) + word / VALUE_M * 2;
            float2* to = reinterpret_cast<float2*>(result + component);
            *to = make_float2(keep * to->x + factor * sums[q][w].x, keep * to->y + factor * sums[q][w].y);
        }
    }
}

// Subtracts selected tokens from the counters.
struct CodedRows {
    const float* bases;

    // `of_queries`: the base of each query.
    __device__ __forceinline__ void begin(const float* of_queries) { bases = of_queries; }

    // Subtracts the `count` tokens of the list `selected` of a head of a sequence. A token has two lanes, with half of
    // the subspaces each, in an order that differs between lanes, which access different banks.
    __device__ __forceinline__ void subtract(const AttendArguments& a, u32 sequence, u32 head, const u32* selected,
                                             u32 count, u8* counters) {
        const u32 lane = threadIdx.x % LANES, i = lane / 2;
        const u32 token = __ldcg(selected + min(i, count - 1)); // bypasses L1: this may precede `pdl_wait`
        const ScoredTile& scored = a.scores_of((u64)sequence * a.heads + head)[token / TILE];
        TileIndices tiles;
        tiles.begin(a, sequence, head, token / TILE);
        const u8* tile = a.codes + (u64)tiles.own(token / TILE) * Values::TILE_BYTES;
        u32 weights[GROUP];
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            const u32 weight = weight_of(__ldcg(&scored.scores[q][place_of(token % TILE)]), __ldcg(&scored.levels[q]),
                                         bases[q]);
            weights[q] = i < count ? -weight : 0;
        }
        const u32 l = token % 4, half = token / 4 % 2;
#pragma unroll
        for (int k = 0; k < VALUE_M / 2; k++) {
            const u32 subspace = lane % 2 * (VALUE_M / 2) + (k + i) % (VALUE_M / 2);
            const u32 step = (subspace / 8 - l) % SETS;
            const u32 code = Values::code(tile, 4 * (subspace % 8) + l, half * SETS + step, token / 8 % 4);
            u8* at = counters + code * ROW;
#pragma unroll
            for (int q = 0; q < GROUP; q++)
                atomicAdd(counter_of(at, q, bank_of(subspace) + i % COPIES), weights[q]);
        }
    }

    // The counters have the differences already.
    __device__ __forceinline__ void add_to(float*) const {}
};

// First kernel of hybrid attention: the coded scores of all tokens, and the softmax statistics of each query.
//
// shape.cuh has the compile-time shape and explains the method. Launch: grid (block of a head's work, head), THREADS
// threads. A block builds the ADC table of a sequence's queries (lut.cuh); a warp then scores every WARPS-th tile of
// the block's part. An MMA with constant weights sums a lane's look-ups for two tokens over the four lanes that share
// these tokens, in f32: for four queries, 8 MMAs per tile replace 64 additions and 6 shuffles.
#include "pq_hybrid/addends.cuh"
#include "pq_hybrid/lut.cuh"
#include "pq_hybrid/norms.cuh"
#include "pq_hybrid/plan.cuh"
#include "pq_hybrid/scored_tile.cuh"
#include "pq_hybrid/stats.cuh"
#include "pq_search/radix.cuh"
#include "tile_indices.cuh"

constexpr int WARPS = SCORE_WARPS, THREADS = WARPS * LANES;
using KeyCodes = Packed<KEY_M, KEY_BITS>;

struct Shared {
    u8 lut[LUT_BYTES];
    LutBuilder builder;
    Stats warps[VEC][WARPS];
    Plan<SelectArguments> plan;
};
extern __shared__ __align__(128) u8 shared[];
static_assert(sizeof(Shared) <= SCORES_SHARED_BYTES, "the host reserves it");
__device__ __forceinline__ Shared& block() { return *reinterpret_cast<Shared*>(shared); }

// Weights of an MMA that sums table entries: column n selects operand register i = n / 2 % 2, which has the entries of
// token i (with eight queries, half i of an entry), and the even or the odd queries. Columns 4 to 7 are for the second
// half of the tile (with eight queries, the second token).
struct Selector {
    u32 b[2][2]; // [half of the tile or token][operand register]

    __device__ __forceinline__ explicit Selector(int lane) {
        const int n = lane / 4;
        const u32 one = n % 2 ? 0x3c000000 : 0x3c00; // as an f16
#pragma unroll
        for (int i = 0; i < 4; i++) {
            b[i / 2][i % 2] = n / 4 == i / 2 && n / 2 % 2 == i % 2 ? one : 0;
            keep_in_register(b[i / 2][i % 2]);
        }
    }
};

// Scores of a tile: a lane has all queries for the token at place `lane`, or four of eight queries for two tokens.
struct TileScores {
    static constexpr int QUERIES = VEC == 2 ? 2 : 4, SETS = VEC == 8 ? 2 : 1; // queries of a lane; tokens of a lane
    static constexpr int OF_QUERY = VEC == 8 ? 30 : 31; // bits in which the indices of the lanes of a query differ
    float sums[SETS][4];
    using Addends = TileAddends<QUERIES, SETS>;
    using Norms = KeyNorms<SETS>;

    // `LutBuilder::bases`.
    struct Bases {
        float of_sum[QUERIES], of_score[QUERIES];
    };

    static __device__ __forceinline__ int first_query(int lane) { return VEC == 8 ? lane % 2 * 4 : 0; }
    static __device__ __forceinline__ int place(int lane, int set) {
        return VEC == 8 ? lane / 4 * 4 + set * 2 + lane / 2 % 2 : lane;
    }

    // `bases`: of the lane's queries.
    __device__ __forceinline__ void look_up(const KeyCodes& packed, const LutOffsets& offsets, const Selector& selector,
                                            const Bases& bases, const Addends& addends, const Norms& norms) {
        u32 codes[KeyCodes::EXPANDED];
        packed.expand(codes);
#pragma unroll
        for (int i = 0; i < SETS * 4; i++) sums[i / 4][i % 4] = i % 4 < QUERIES ? bases.of_sum[i % QUERIES] : 0;
        if (HAS_ADDENDS && !HAS_KEY_NORMS) addends.add_to(sums);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 previous[2];
#pragma unroll
            for (int i = 0; i < STEPS * MIDDLES; i++) {
                const int step = i / MIDDLES, middle = i % MIDDLES;
                u32 entry[2][4]; // [token]: the words of its entry
#pragma unroll
                for (int token = 0; token < 2; token++) {
                    const int code = (half * STEPS * MIDDLES + i) * 2 + token;
                    const u32 address = row_address(codes[code / 4], offsets.pairs[step / 2], code % 4, step);
                    const u8* at = shared + address + middle * MIDDLE;
                    if constexpr (VEC == 2) {
                        entry[token][0] = *reinterpret_cast<const u32*>(at);
                    } else if constexpr (VEC == 4) {
                        const uint2 words = *reinterpret_cast<const uint2*>(at);
                        entry[token][0] = words.x, entry[token][1] = words.y;
                    } else {
                        const uint4 words = *reinterpret_cast<const uint4*>(at);
                        entry[token][0] = words.x, entry[token][1] = words.y;
                        entry[token][2] = words.z, entry[token][3] = words.w;
                    }
                }
                // Operands follow the order of the words of an entry, which saves moves between registers.
                if constexpr (VEC == 2) {
                    if (i % 2 == 0) {
                        previous[0] = entry[0][0], previous[1] = entry[1][0];
                    } else {
                        const u32 operand[4] = {previous[0], entry[0][0], previous[1], entry[1][0]};
                        mma_m16n8k16_f16(sums[0], operand, selector.b[half][0], selector.b[half][1]);
                    }
                } else if constexpr (VEC == 4) {
                    const u32 operand[4] = {entry[0][0], entry[0][1], entry[1][0], entry[1][1]};
                    mma_m16n8k16_f16(sums[0], operand, selector.b[half][0], selector.b[half][1]);
                } else {
#pragma unroll
                    for (int token = 0; token < 2; token++)
                        mma_m16n8k16_f16(sums[half], entry[token], selector.b[token][0], selector.b[token][1]);
                }
            }
        }
        if (VEC == 2) sums[0][0] += sums[0][2], sums[0][1] += sums[0][3]; // even and odd steps
        if constexpr (HAS_KEY_NORMS) {
            float others[SETS][4];
#pragma unroll
            for (int i = 0; i < SETS * 4; i++) others[i / 4][i % 4] = bases.of_score[i % QUERIES];
            if (HAS_ADDENDS) addends.add_to(others);
            norms.multiply_add(sums, others);
        }
    }
};

// Scores the block's part of a sequence, and returns the lane's statistics of its queries.
__device__ __forceinline__ void score_sequence(const SelectArguments& a, const LutWords<WARPS>& words,
                                               Stats (&stats)[TileScores::QUERIES]) {
    constexpr int QUERIES = TileScores::QUERIES, SETS = TileScores::SETS, OF_QUERY = TileScores::OF_QUERY;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const Plan<SelectArguments>& plan = block().plan;
    const u32 head = blockIdx.y, length = plan.length, end = min(plan.to, (length + TILE - 1) / TILE);
    TileIndices tiles;
    auto begin_run = [&](u32 first) { tiles.begin(a, plan.entry, head, min(first + lane * WARPS, end - 1)); };
    const u8* key_codes = a.codes + lane * KeyCodes::LANE_BYTES;
    KeyCodes keys;
    TileScores::Addends addends;
    TileScores::Norms norms;
    auto load = [&](u32 tile) {
        const u32 at = tiles.take(tile);
        keys.load(key_codes + (u64)at * KeyCodes::TILE_BYTES);
        norms.load(a, at, [&](int set) { return token_at(TileScores::place(lane, set)); });
        if (HAS_ADDENDS) addends.load(a.addends_of((u64)plan.entry * a.heads + head, tile), lane);
    };
    u32 tile = plan.from + warp;
    block().builder.build<WARPS>(a, plan.entry, head, words, shared);
    if (warp_uniform(tile < end)) begin_run(tile), load(tile); // not earlier: building the table needs all registers

    const int first_query = TileScores::first_query(lane);
    TileScores::Bases bases;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        bases.of_sum[q] = block().builder.bases[0][first_query + q], stats[q] = no_scores();
        if constexpr (HAS_KEY_NORMS) bases.of_score[q] = block().builder.bases[1][first_query + q];
    }
    const LutOffsets offsets(lane);
    const Selector selector(lane);
    const u64 row = (u64)plan.entry * a.heads + head;
    ScoredTile* scores = a.scores_of(row);
    while (warp_uniform(tile < end)) {
        if (TileIndices::PAGES && warp_uniform(tiles.left() == 0 && tile + WARPS < end)) begin_run(tile + WARPS);
        TileScores of_tile;
        of_tile.look_up(keys, offsets, selector, bases, addends, norms);
        ScoredTile& out = scores[tile];
        const u32 there = length - tile * TILE; // tokens from this tile on
        tile += WARPS;
        load(min(tile, end - 1)); // reloads the last tile rather than branching: the lanes might not reconverge
        bool exceeds = false;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const int place = TileScores::place(lane, set);
            const bool exists = token_at(place) < there;
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                float& score = of_tile.sums[set][q];
                if (!exists) score = -infinity();
                // Not within FARTHEST below and 8 above the level, in one comparison.
                exceeds |= !(fabsf(score - (stats[q].max - (FARTHEST - 8) / 2)) <= (FARTHEST + 8) / 2);
            }
        }
        // A maximum, which is the level of the tile, is raised, and the sum rescaled, only when a score exceeds it by
        // more than 8. It is the same in all lanes of a query, and finite, so that an infinite score remains infinite.
        const bool any_exceeds = warp_uniform(exceeds);
        if (any_exceeds) {
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                float max = stats[q].max;
#pragma unroll
                for (int set = 0; set < SETS; set++)
                    if (of_tile.sums[set][q] < infinity()) max = fmaxf(max, of_tile.sums[set][q]);
                max = max_of_lanes<OF_QUERY>(max);
                stats[q] = {max, stats[q].sum * exp2_approx(stats[q].max - max)};
            }
        }
        u16 codes[SETS][QUERIES];
#pragma unroll
        for (int i = 0; i < SETS * QUERIES; i++) {
            float& score = of_tile.sums[i / QUERIES][i % QUERIES];
            score -= stats[i % QUERIES].max;
            stats[i % QUERIES].sum += exp2_approx(score);
            codes[i / QUERIES][i % QUERIES] = near_code(score);
        }
        if (any_exceeds) {
#pragma unroll
            for (int i = 0; i < SETS * QUERIES; i++)
                codes[i / QUERIES][i % QUERIES] = any_code(of_tile.sums[i / QUERIES][i % QUERIES]);
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int q = 0; q < QUERIES; q++)
                if (VEC == GROUP || first_query + q < GROUP)
                    out.scores[first_query + q][TileScores::place(lane, set)] = codes[set][q];
        if (lane < VEC / QUERIES) {
#pragma unroll
            for (int q = 0; q < QUERIES; q += 2)
                *reinterpret_cast<float2*>(out.levels + first_query + q) = make_float2(stats[q].max, stats[q + 1].max);
        }
    }
}

// Merges the statistics of lanes and of warps; the selection kernel merges those of blocks.
__device__ __forceinline__ void finish_stats(const SelectArguments& a,
                                             const Stats (&stats)[TileScores::QUERIES]) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Shared& s = block();
#pragma unroll
    for (int q = 0; q < TileScores::QUERIES; q++) {
        const Stats all = merged_lanes<TileScores::OF_QUERY>(stats[q]);
        if (lane < VEC / TileScores::QUERIES) s.warps[TileScores::first_query(lane) + q][warp] = all;
    }
    const u64 row = (u64)s.plan.entry * a.heads + blockIdx.y;
    if (threadIdx.x == 0 && s.plan.from == 0) {
        s.plan.find_sharers();
        a.sharers[row] = {s.plan.first_block, s.plan.pieces};
    }
    __syncthreads();
    if (warp >= VEC) return;
    const Stats all = merged_lanes(lane < WARPS ? s.warps[warp][lane] : no_scores());
    if (lane == 0) a.stats[(row * gridDim.x + blockIdx.x) * VEC + warp] = all;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_hybrid_scores(const SelectArguments a) {
    Plan<SelectArguments>& plan = block().plan;
    for (bool is_first = true; is_first || warp_uniform(plan.entry < a.batch); is_first = false) {
        LutWords<WARPS> words;
        words.load(a, blockIdx.y);
        if (is_first) {
            if (warp_uniform(threadIdx.x < LANES)) plan.find_first(a);
            pdl_wait();
            begin_scores(a);
            __syncthreads();
            pdl_trigger();
            if (!warp_uniform(plan.entry < a.batch)) return;
        }
        const u64 rows = (u64)a.batch * a.heads, row = (u64)plan.entry * a.heads + blockIdx.y;
        if (plan.from == 0) Selection(a.selection, rows, row, a.chunks).clear<THREADS>();
        Stats stats[TileScores::QUERIES];
        score_sequence(a, words, stats);
        finish_stats(a, stats);
        __syncthreads();
        if (threadIdx.x == 0) plan.find_next(a);
        __syncthreads();
    }
}

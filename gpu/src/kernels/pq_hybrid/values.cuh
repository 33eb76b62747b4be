// Weighted sums of coded values.
//
// Lane 4 g + l looks up the words of subspace g (of 8), or of a subspace 8 `set` + g, for the tokens whose codes it
// holds (`CodeLayout`). Byte permutations pair the components of two tokens, so that components are the rows of the A
// operand and tokens its columns; all four lanes of a row then have to look up the same subspace. Lanes of different l
// would conflict in the same banks, so they process the sets in different orders, and the columns of the B operand are
// (set, query) with zero weights except in the step in which the lane has that set. Two sets leave room for four
// queries per MMA; a second copy of the table then avoids bank conflicts between lanes of equal set, where the device
// has shared memory for it (VALUE_COPIES 2). A code of 16 components counts as two sets.
#pragma once
#include "pq_hybrid/codes.cuh"
#include "pq_hybrid/norms.cuh"
#include "pq_hybrid/plan.cuh"
#include "pq_hybrid/scored_tile.cuh"
#include "tile_indices.cuh"
#include "warp.cuh"

using Values = Packed<VALUE_M, VALUE_BITS>;

constexpr int VALUE_KSUB = 1 << VALUE_BITS, VALUE_DSUB = D / VALUE_M;
constexpr int SETS = VALUE_M == 32 ? 4 : 2, SLOTS = SETS * VALUE_COPIES;     // SLOTS: pieces of a value of g
constexpr int PIECE = D / (8 * SETS), PIECE_WORDS = PIECE / 2;               // components of a look-up
constexpr int PIECE_BYTES = PIECE * 2, LINE_G = 128 / (PIECE_BYTES * SLOTS); // values of g per line of 128 bytes
constexpr int HALF_TABLE = 1 << 16, HALF_G = 2 * LINE_G;                     // distance of the table halves; g per half
constexpr int VALUE_SHARED_BYTES = (HALF_G < 8 ? HALF_TABLE : 0) + VALUE_KSUB * ROW;
constexpr int COLUMNS = 8 / SETS;                        // queries of an MMA
constexpr int MMAS = VEC <= COLUMNS ? 1 : VEC / COLUMNS; // MMAs for all queries

// Offset of a piece in its row.
__device__ __forceinline__ int piece_offset(int g, int set, int copy) {
    const int slot = g % LINE_G * SLOTS + set * VALUE_COPIES + copy;
    return g / LINE_G % 2 * 128 + slot * PIECE_BYTES;
}

// First component of a piece.
__device__ __forceinline__ int piece_component(int g, int set) {
    return VALUE_M == 8 ? g * VALUE_DSUB + set * PIECE : (set * 8 + g) * VALUE_DSUB;
}

// Copies the head's table to shared memory, one piece at a time. Called by THREADS threads; `thread` is the index of
// this one.
template <int THREADS>
__device__ __forceinline__ void prepare_values(const AttendArguments& a, u32 head, u32 thread, u8* to) {
    constexpr int PIECES = 8 * SETS; // pieces of a code
    const u32* table = a.table + (u64)head * VALUE_KSUB * WORDS;
#pragma unroll 8
    for (int i = thread; i < VALUE_KSUB * PIECES; i += THREADS) {
        const int code = i / PIECES, set = i % SETS, g = i / SETS % 8;
        const u32* from = table + code * WORDS + (VALUE_M == 8 ? g + set * PIECE_WORDS * 8 : set * 8 + g);
        u32 words[PIECE_WORDS];
#pragma unroll
        for (int w = 0; w < PIECE_WORDS; w++) words[w] = __ldg(from + w * VALUE_M);
#pragma unroll
        for (int copy = 0; copy < VALUE_COPIES; copy++) {
            u8* piece = to + g / HALF_G * HALF_TABLE + code * ROW + piece_offset(g, set, copy);
            if constexpr (PIECE_WORDS == 4)
                *reinterpret_cast<uint4*>(piece) = make_uint4(words[0], words[1], words[2], words[3]);
            else if constexpr (PIECE_WORDS == 2)
                *reinterpret_cast<uint2*>(piece) = make_uint2(words[0], words[1]);
            else
                *reinterpret_cast<u32*>(piece) = words[0];
        }
    }
}

// Offsets of the lane's pieces for steps 2 i and 2 i + 1; at step i the lane has set (i + l) % SETS.
struct ValueOffsets {
    u32 pairs[SETS / 2];

    __device__ __forceinline__ explicit ValueOffsets(int lane) {
        const int g = lane / 4, l = lane % 4;
        auto at = [&](int step) { return piece_offset(g, (step + l) % SETS, VALUE_COPIES == 2 ? l / 2 : 0); };
#pragma unroll
        for (int i = 0; i < SETS / 2; i++) {
            pairs[i] = pack_offsets(at(2 * i), at(2 * i + 1), g / HALF_G);
            keep_in_register(pairs[i]);
        }
    }
};

// A token's code of a subspace, and the table address of its piece for row g and `set`.
struct ValueLookUp {
    // `tile`: the bytes of the tile of `token`.
    static __device__ __forceinline__ u32 code(const u8* tile, u32 token, int g, int set) {
        const int l = token % 4, half = token / 4 % 2, step = (set - l) & (SETS - 1);
        return Values::code(tile, 4 * g + l, VALUE_M == 8 ? half : half * SETS + step, token / 8 % 4);
    }
    static __device__ __forceinline__ u32 address(u32 code, int g, int set) {
        return g / HALF_G * HALF_TABLE + code * ROW + piece_offset(g, set, 0);
    }
};

// A warp's sums over its tiles of values times their weights 2^(score - base). In the B operand, column n = g of the
// lane is query n % COLUMNS of set n / COLUMNS, for tokens l + 4 half + 8 i; MMA m has queries m * COLUMNS and up.
// Weights do not depend on the set: a lane computes those of half `half_of(lane)` and gets the others from the lane of
// the next set.
struct ValueSums {
    float sums[PIECE_WORDS][MMAS][4]; // components 2 w (+ 1: second pair) of row g, columns 2 l and 2 l + 1
    float base[MMAS], weight[MMAS];   // of the lane's query; `weight` is the lane's share
    u32 of_set[SETS];                 // ones in the steps in which the lane's column has its set

    static constexpr int OTHER_HALF = 4 * COLUMNS; // bit of the lane
    static __device__ __forceinline__ int half_of(int lane) { return lane / OTHER_HALF % 2; }

    // The sum over the lanes of a query.
    static __device__ __forceinline__ float over_lanes(float x) {
        x += __shfl_xor_sync(FULL, x, 1);
        x += __shfl_xor_sync(FULL, x, 2);
        return x + __shfl_xor_sync(FULL, x, OTHER_HALF);
    }

    // `bases`: the base of each query.
    __device__ __forceinline__ void clear(const float* bases, int lane) {
#pragma unroll
        for (int i = 0; i < PIECE_WORDS * MMAS * 4; i++) sums[i / 4 / MMAS][i / 4 % MMAS][i % 4] = 0;
#pragma unroll
        for (int m = 0; m < MMAS; m++)
            base[m] = bases[min(m * COLUMNS + lane / 4 % COLUMNS, GROUP - 1)], weight[m] = 0;
#pragma unroll
        for (int step = 0; step < SETS; step++) {
            of_set[step] = lane / 4 / COLUMNS == (step + lane) % SETS ? ~0u : 0;
            keep_in_register(of_set[step]);
        }
    }

    // Converts scores of the lane's half to weights of values, as pairs of f16 in `weights[half][mma]`. `levels`,
    // `norms`: of the tile.
    __device__ __forceinline__ void weigh(u32 (&weights)[2][MMAS][2], const uint2 (&scores)[MMAS],
                                          const float (&levels)[MMAS], const ValueNorms& norms, int lane) {
        const bool has_second = half_of(lane);
#pragma unroll
        for (int m = 0; m < MMAS; m++) {
            const float level = levels[m] - base[m];
            const u32 pairs[2] = {scores[m].x, scores[m].y};
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = exp2_approx(near_score(pairs[i / 2], i % 2) - ORIGIN + level);
            weight[m] += (p[0] + p[1]) + (p[2] + p[3]);
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = norms.weight_of_value(p[i], lane % 4 + 4 * has_second + 8 * i);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 own = pack_half2(p[2 * i], p[2 * i + 1]), other = __shfl_xor_sync(FULL, own, OTHER_HALF);
                weights[0][m][i] = has_second ? other : own, weights[1][m][i] = has_second ? own : other;
            }
        }
    }

    __device__ __forceinline__ void add(const Values& packed, const u32 (&weights)[2][MMAS][2],
                                        const ValueOffsets& offsets, const u8* table) {
        u32 codes[Values::EXPANDED];
        packed.expand(codes);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int step = 0; step < SETS; step++) {
                const u32 tokens = codes[VALUE_M == 8 ? half : half * SETS + step];
                u32 words[4][PIECE_WORDS];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u8* at = table + row_address(tokens, offsets.pairs[step / 2], i, step);
                    if constexpr (PIECE_WORDS == 4) {
                        const uint4 piece = *reinterpret_cast<const uint4*>(at);
                        words[i][0] = piece.x, words[i][1] = piece.y, words[i][2] = piece.z, words[i][3] = piece.w;
                    } else if constexpr (PIECE_WORDS == 2) {
                        const uint2 piece = *reinterpret_cast<const uint2*>(at);
                        words[i][0] = piece.x, words[i][1] = piece.y;
                    } else {
                        words[i][0] = *reinterpret_cast<const u32*>(at);
                    }
                }
#pragma unroll
                for (int w = 0; w < PIECE_WORDS; w++) {
                    const u32 operand[4] = {
                        prmt(words[0][w], words[1][w], 0x5410), prmt(words[0][w], words[1][w], 0x7632),
                        prmt(words[2][w], words[3][w], 0x5410), prmt(words[2][w], words[3][w], 0x7632)};
#pragma unroll
                    for (int m = 0; m < MMAS; m++)
                        mma_m16n8k16_f16(sums[w][m], operand, weights[half][m][0] & of_set[step],
                                         weights[half][m][1] & of_set[step]);
                }
            }
    }

    // Writes the warp's results: for each query its components, base and sum of weights.
    __device__ __forceinline__ void store(float* results, int lane) const {
        const int g = lane / 4, l = lane % 4;
#pragma unroll
        for (int m = 0; m < MMAS; m++) {
            const float total = over_lanes(weight[m]);
            const int own = m * COLUMNS + g % COLUMNS; // the lane's query
            if (l == 0 && g < COLUMNS && own < VEC) {
                float* result = results + own * RESULT;
                result[D] = base[m], result[D + 1] = total;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = 2 * l + i, query = m * COLUMNS + column % COLUMNS;
                if (query >= VEC) continue;
                float* to = results + query * RESULT + piece_component(g, column / COLUMNS);
#pragma unroll
                for (int w = 0; w < PIECE_WORDS; w++)
                    to[2 * w] = sums[w][m][i], to[2 * w + 1] = sums[w][m][2 + i];
            }
        }
        __syncwarp();
    }
};

// Writes the warp's results: the sums of the tiles of `walk` before `end`. `row`: of the plan's sequence. `bases`: the
// base of each query. `table`: of the values, in shared memory.
__device__ __forceinline__ void sum_tiles(const AttendArguments& a, const Plan<AttendArguments>& plan, u64 row,
                                          TileWalk<ATTEND_WARPS> walk, u32 end, const float* bases, const u8* table,
                                          float* results) {
    const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    TileIndices tiles;
    auto begin_run = [&] { tiles.begin(a, plan.entry, blockIdx.y, min(walk.after(lane), end - 1)); };
    const u8* codes = a.codes + lane * Values::LANE_BYTES;
    const ScoredTile* scores = a.scores_of(row);
    const int place = ValueSums::half_of(lane) * 16 + l * 4;
    struct Tile {
        Values codes;
        ValueNorms norms;
        uint2 scores[MMAS]; // four of the lane's half
        float levels[MMAS];
    };
    auto load = [&](Tile& ahead) {
        // Reloads the last tile instead of branching: the lanes of the warp might not reconverge after a branch.
        const u32 tile = min(walk.tile, end - 1), at = tiles.take(tile);
        ahead.codes.load(codes + (u64)at * Values::TILE_BYTES);
        ahead.norms.load(a, at, lane);
#pragma unroll
        for (int m = 0; m < MMAS; m++) {
            const int query = min(m * COLUMNS + g % COLUMNS, GROUP - 1);
            // Bypasses L1, which may hold scores of the previous launch: this may precede `pdl_wait`.
            ahead.scores[m] = __ldcg(reinterpret_cast<const uint2*>(&scores[tile].scores[query][place]));
            ahead.levels[m] = __ldcg(&scores[tile].levels[query]);
        }
    };
    ValueSums sums;
    sums.clear(bases, lane);
    if (warp_uniform(walk.tile < end)) {
        // Not a ring of two, as code_weights.cuh has: ptxas schedules that differently, with pages and large batches
        // 13 % slower.
        Tile even, odd;
        begin_run();
        load(even);
        const ValueOffsets offsets(lane);
        auto add = [&](Tile& tile, Tile& next) {
            walk.advance();
            if (TileIndices::PAGES && warp_uniform(tiles.left() == 0 && walk.tile < end)) begin_run();
            load(next); // prefetches one tile ahead
            u32 weights[2][MMAS][2], any = 0;
            sums.weigh(weights, tile.scores, tile.levels, tile.norms, lane);
#pragma unroll
            for (int i = 0; i < 4 * MMAS; i++) any |= weights[i / 2 / MMAS][i / 2 % MMAS][i % 2];
            // A tile is skipped if all its weights have underflowed.
            if (warp_uniform(any != 0)) sums.add(tile.codes, weights, offsets, table);
        };
        do {
            add(even, odd);
            if (!warp_uniform(walk.tile < end)) break;
            add(odd, even);
        } while (warp_uniform(walk.tile < end));
    }
    sums.store(results, lane);
}

// The results have the sums already.
__device__ __forceinline__ void add_coded_sums(const AttendArguments&, u32, const float*, const u8*, float*) {}

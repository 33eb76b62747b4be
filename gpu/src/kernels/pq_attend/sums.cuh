// A warp's softmax state: maxima, sums of weights, and weighted sums of values in the accumulators of mma.m16n8k16.
//
// In step s of 4, a lane looks up word 8 ((s + l) & 3) + g of a 32-word half, for 8 tokens of a tile: 4 half + l + 8 i
// with i = 0 to 3, half = 0 or 1. `Sums` has one form for one query and another for several.
#pragma once
#include "pq_attend/adjustments.cuh"
#include "pq_attend/codes.cuh"
#include "warp.cuh"

// Byte offsets of a lane's words in a row of the value table, one byte for each step.
__device__ __forceinline__ u32 value_offset_of(const Lane& lane) {
    u32 offset = 0;
#pragma unroll
    for (int step = 0; step < 4; step++) offset |= (u32)((8 * ((lane.l + step) & 3) + lane.g) * 4) << (8 * step);
    return offset;
}

// Adjacent components of a sum, which a lane stores at once: those of two words if words have adjacent components.
constexpr int RUN = QUERIES == 1 ? 1 : VALUE_SUB == 2 ? 4 : 2;
template <int N>
struct alignas(N * 4) Floats {
    float x[N];
};
using Run = Floats<RUN>;

// Four words of a step: tokens 4 half + l + 8 t.
__device__ __forceinline__ void look_up_values(u32 (&words)[4], const u32 (&codes)[Values::EXPANDED], u32 offset,
                                               int half, int step, int part) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const int code = value_code(half, step, t / 2, part, t & 1);
        words[t] = look_up<VALUE_TABLE>(prmt(codes[code / 4], offset, value_selector(code % 4, step)), part);
    }
}

#if QUERIES == 1
// One query: the B operand is the identity times the weight of the lane's token, so that the MMA multiplies and adds
// each lane's own words, which form the A operand unchanged.
struct Sums {
    static constexpr int STEPS = 2 * 2 * HALVES;

    // A tile's weights as B operands, from f16 [query][position 4 (token & 7) + token / 8].
    struct Weights {
        u32 words[2][4];

        // Stores the weights of tokens g, g + 8, g + 16 and g + 24.
        static __device__ __forceinline__ void put(u8* weights, const uint2 (&packed)[1], const Lane& lane) {
            *reinterpret_cast<uint2*>(weights + lane.g * 8) = packed[0];
        }

        __device__ __forceinline__ Weights(const u8* weights, const Lane& lane) {
            const bool diagonal = lane.g / 2 == lane.l;
            const u32 even = diagonal ? lane.g & 1 ? 0x1044 : 0x4410 : 0x4444,
                      odd = diagonal ? lane.g & 1 ? 0x3244 : 0x4432 : 0x4444;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint2 p = *reinterpret_cast<const uint2*>(weights + (half * 4 + lane.l) * 8);
                words[half][0] = prmt(p.x, 0, even), words[half][1] = prmt(p.x, 0, odd);
                words[half][2] = prmt(p.y, 0, even), words[half][3] = prmt(p.y, 0, odd);
            }
        }
    };

    // D = 128: [step][component 0 and 1 of the word of part 0, then of part 1]. D = 64: [step / 2][components of step,
    // then of step + 1].
    float sums[2 * HALVES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2 * HALVES * 4; i++) sums[i / 4][i % 4] = 0;
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int i = 0; i < 2 * HALVES * 4; i++) sums[i / 4][i % 4] *= factor;
    }

    __device__ __forceinline__ void add_step(int k, const u32 (&codes)[Values::EXPANDED], u32 offset,
                                             const Weights& weights, const Lane&) {
        const int half = k / (2 * HALVES), i = k % (2 * HALVES);
        u32 low[4], high[4]; // rows g and g + 8 of A: the two parts of a step, or two steps
        look_up_values(low, codes, offset, half, HALVES == 2 ? i : 2 * i, 0);
        look_up_values(high, codes, offset, half, HALVES == 2 ? i : 2 * i + 1, HALVES == 2);
#pragma unroll
        for (int t = 0; t < 4; t += 2) {
            const u32 operand[4] = {low[t], high[t], low[t + 1], high[t + 1]};
            mma_m16n8k16_f16(sums[i], operand, weights.words[half][t], weights.words[half][t + 1]);
        }
    }

    // Component `i & 1` of the word of part `i / 2`, in the chunk that the lane has at a step.
    __device__ __forceinline__ float at(int step, int i) const {
        return HALVES == 2 ? sums[step][i] : sums[step / 2][2 * (step & 1) + i];
    }

    // Calls `put(component, sums)` for the components whose sums this lane collects. The four lanes of equal g have
    // sums of different tokens; lane l has chunk c at step (c - l) & 3. Lane l collects chunk l from all four: its own
    // step 0, step 2 of lane l ^ 2, and the sums of lanes l ^ 1 and l ^ 3.
    template <typename Put>
    __device__ __forceinline__ void visit(const Lane& lane, Put put) const {
        const bool is_odd = lane.l & 1;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            const float one = at(1, i), three = at(3, i);
            const float of_neighbour = (is_odd ? three : one) + __shfl_xor_sync(FULL, is_odd ? one : three, 2);
            const Run sum{at(0, i) + __shfl_xor_sync(FULL, at(2, i), 2) + __shfl_xor_sync(FULL, of_neighbour, 1)};
            put(component<VALUE_SUB>(8 * lane.l + lane.g + i / 2 * 32) + (i & 1), sum);
        }
    }
};
#else
// Several queries: byte permutations pair the components of two tokens, so that tokens are the rows of the B operand
// and one component of each of 8 words its columns. The A operand has the weights. Its rows g and g + 8 are those of
// query g % QUERIES, for chunks with the lowest bit 0 and 1. Of the tokens of every two lanes, the metadata select
// those whose words belong to such a chunk. The highest bit of the chunk depends on the lane, too: with 8 queries,
// lanes exchange the words of two steps, so that all have the same; with fewer, it is that of g / QUERIES, and the
// weights of lanes with the other one are zero.
struct Sums {
    static constexpr int STEPS = 2 * HALVES * (VALUES_EXCHANGED ? 1 : 2);
    static constexpr int HIGHS = VALUES_EXCHANGED ? 2 : 1; // highest bits of the chunk with separate rows

    // A tile's weights for the row's query: of the tokens of even lanes, and of odd ones.
    struct Weights {
        static constexpr int MASKS = VALUES_EXCHANGED ? 1 : 2;
        u32 even[2][MASKS], odd[2][MASKS]; // [half of the tile][highest bit of the step]
        u32 selection;                     // metadata

        // Stores the weights of tokens g, g + 8, g + 16 and g + 24 in an order in which a lane loads its own at once.
        static __device__ __forceinline__ void put(u8* weights, const uint2 (&packed)[2], const Lane& lane) {
            u8* place =
                weights + lane.first_query * WEIGHT_ROW + (lane.g / 2 & 1) * 16 + lane.g / 4 * 8 + lane.g % 2 * 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                *reinterpret_cast<u32*>(place + i * WEIGHT_ROW) = packed[i].x;
                *reinterpret_cast<u32*>(place + i * WEIGHT_ROW + 32) = packed[i].y;
            }
        }

        __device__ __forceinline__ Weights(const u8* weights, const Lane& lane) {
            const uint4 p = *reinterpret_cast<const uint4*>(weights + lane.g % QUERIES * WEIGHT_ROW + lane.l * 16);
            const int high = (lane.l ^ lane.g / QUERIES) & 1;
#pragma unroll
            for (int i = 0; i < MASKS; i++) {
                const bool here = VALUES_EXCHANGED || high == i;
                even[0][i] = here ? p.x : 0, odd[0][i] = here ? p.y : 0;
                even[1][i] = here ? p.z : 0, odd[1][i] = here ? p.w : 0;
            }
            selection = lane.l & 1 ? 0x4444eeeeu : 0xeeee4444u;
        }
    };

    // [part][component of a word][highest bit of the chunk][word 2 l + i % 2, lowest bit of the chunk]
    float sums[HALVES][2][HIGHS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HALVES * 2 * HIGHS * 4; i++)
            sums[i / (8 * HIGHS)][i / 4 / HIGHS % 2][i / 4 % HIGHS][i % 4] = 0;
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int i = 0; i < HALVES * 2 * HIGHS * 4; i++)
            sums[i / (8 * HIGHS)][i / 4 / HIGHS % 2][i / 4 % HIGHS][i % 4] *= factor;
    }

    // Adds the words of an even step and of the odd one after it, of four tokens each. The chunk is step + l: at an odd
    // step, odd lanes carry to its highest bit.
    __device__ __forceinline__ void add_words(float (&even)[4], float (&odd)[4], const u32 (&words)[2][4],
                                              const Weights& weights, int half, int high) {
        const u32 even_lanes = weights.even[half][high], odd_lanes = weights.odd[half][high],
                  odd_lanes_carried = weights.odd[half][(high ^ 1) % Weights::MASKS];
        const u32 rows[4] = {even_lanes, odd_lanes, odd_lanes_carried, even_lanes};
#pragma unroll
        for (int component = 0; component < 2; component++) {
            const u32 selector = component ? 0x7632 : 0x5410;
            const u32 operand[4] = {prmt(words[0][0], words[0][1], selector), prmt(words[0][2], words[0][3], selector),
                                    prmt(words[1][0], words[1][1], selector), prmt(words[1][2], words[1][3], selector)};
            mma_sp_m16n8k32_f16(component ? odd : even, rows, operand, weights.selection);
        }
    }

    __device__ __forceinline__ void add_step(int k, const u32 (&codes)[Values::EXPANDED], u32 offset,
                                             const Weights& weights, const Lane& lane) {
        const int half = k / (STEPS / 2), part = k % HALVES;
        if constexpr (VALUES_EXCHANGED) {
            u32 words[2][2][4]; // [highest bit of the chunk][lowest bit of the step]
#pragma unroll
            for (int low = 0; low < 2; low++) {
                u32 first[4], second[4];
                look_up_values(first, codes, offset, half, low, part);
                look_up_values(second, codes, offset, half, 2 + low, part);
                const bool swapped = (lane.l + low) & 2; // the highest bit of the chunk is not that of the step
#pragma unroll
                for (int t = 0; t < 4; t++) exchange(words[0][low][t], words[1][low][t], first[t], second[t], swapped);
            }
#pragma unroll
            for (int high = 0; high < 2; high++)
                add_words(sums[part][0][high], sums[part][1][high], words[high], weights, half, 0);
        } else {
            const int high = k / HALVES % 2;
            u32 words[2][4];
#pragma unroll
            for (int low = 0; low < 2; low++) look_up_values(words[low], codes, offset, half, 2 * high + low, part);
            add_words(sums[part][0][0], sums[part][1][0], words, weights, half, high);
        }
    }

    // Calls `put(component, sums)` for the runs of components whose sums this lane has, of query g % QUERIES.
    template <int N = RUN, typename Put>
    __device__ __forceinline__ void visit(const Lane& lane, Put put) const {
        if (lane.g >= 2 * QUERIES) return; // rows without a query
#pragma unroll
        for (int i = 0; i < HALVES * HIGHS * 2; i++) {
            const int part = i / (2 * HIGHS), high = i / 2 % HIGHS, low = i % 2;
            const int chunk = 2 * (VALUES_EXCHANGED ? high : lane.g / QUERIES & 1) + low;
            const int word = 32 * part + 8 * chunk + 2 * lane.l;
            const float(&even)[4] = sums[part][0][high], (&odd)[4] = sums[part][1][high];
            if constexpr (N == 4) {
                put(component<VALUE_SUB>(word),
                    Floats<N>{even[2 * low], odd[2 * low], even[2 * low + 1], odd[2 * low + 1]});
            } else {
                put(component<VALUE_SUB>(word), Floats<N>{even[2 * low], odd[2 * low]});
                put(component<VALUE_SUB>(word + 1), Floats<N>{even[2 * low + 1], odd[2 * low + 1]});
            }
        }
    }
};
#endif

// By how much a score may exceed the maximum: 2^LAG times the norm of a value is within the range of f16.
constexpr float LAG = NORMS ? 4 : 8;

// A warp's online softmax over its tiles so far.
struct State {
    Sums sums;
    float max[LANE_QUERIES], weight[LANE_QUERIES]; // of the lane's queries; `weight` is the lane's share of the sum

    __device__ __forceinline__ void clear() {
        sums.clear();
#pragma unroll
        for (int i = 0; i < LANE_QUERIES; i++) max[i] = NEG_INF, weight[i] = 0;
    }

    // Converts scores to f16 weights, exp2(score - maximum), times the norms of the values. Raises the maximum, and
    // rescales the sums, only when a score exceeds it by more than LAG.
    __device__ __forceinline__ void weigh(uint2 (&weights)[LANE_QUERIES], const float (&scores)[LANE_QUERIES][4],
                                          const TileAdjustments& of_tile, const Lane& lane) {
        float lane_max[LANE_QUERIES];
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < LANE_QUERIES; i++) {
            lane_max[i] = fmaxf(fmaxf(scores[i][0], scores[i][1]), fmaxf(scores[i][2], scores[i][3]));
            exceeds |= lane.has_scores && lane_max[i] > max[i] + LAG;
        }
        if (warp_uniform(exceeds)) {
            float keep = 1; // of the query of the lane's sums
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const int i = q % LANE_QUERIES;
                const bool mine = lane.has(q);
                const float old = __shfl_sync(FULL, max[i], Lane::lane_of(q));
                const float new_max = warp_max(mine ? fmaxf(lane_max[i], old) : NEG_INF);
                const float factor = exp2_approx(old - new_max);
                if (mine) max[i] = new_max, weight[i] *= factor;
                if (q == lane.g % QUERIES) keep = factor;
            }
            sums.scale(keep);
        }
#pragma unroll
        for (int i = 0; i < LANE_QUERIES; i++) {
            float p[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                p[t] = exp2_approx(scores[i][t] - max[i]);
                weight[i] += p[t];
                if constexpr (NORMS) p[t] *= of_tile.value_norms[t];
            }
            weights[i] = make_uint2(pack_half2(p[0], p[1]), pack_half2(p[2], p[3]));
        }
    }
};

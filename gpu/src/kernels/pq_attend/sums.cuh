// A warp's softmax state: maxima, sums of weights, and weighted sums of values in the accumulators of mma.m16n8k16.
//
// In step s of 4, a lane looks up word 8 ((s + l) & 3) + g of a 32-word half, for 8 tokens of a tile: 4 half + l + 8 i
// with i = 0 to 3, half = 0 or 1. `Sums` has one form for one query and another for several.
#pragma once
#include "pq_attend/codes.cuh"
#include "warp.cuh"

// Byte offsets of a lane's words in a row of the value table, one byte for each step.
__device__ __forceinline__ u32 value_offset_of(const Lane& lane) {
    u32 offset = 0;
#pragma unroll
    for (int step = 0; step < 4; step++) offset |= (u32)((8 * ((lane.l + step) & 3) + lane.g) * 4) << (8 * step);
    return offset;
}

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

    __device__ __forceinline__ void scale(const float (&factors)[1]) {
#pragma unroll
        for (int i = 0; i < 2 * HALVES * 4; i++) sums[i / 4][i % 4] *= factors[0];
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

    // Calls `put(component, sum)` for the components of which this lane collects the sums. The four lanes of equal g
    // have sums of different tokens; lane l has chunk c at step (c - l) & 3. Lane l collects chunk l from all four: its
    // own step 0, step 2 of lane l ^ 2, and the sums of lanes l ^ 1 and l ^ 3.
    template <typename Put>
    __device__ __forceinline__ void visit(int, const Lane& lane, Put put) const {
        const bool is_odd = lane.l & 1;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            const float one = at(1, i), three = at(3, i);
            const float of_neighbour = (is_odd ? three : one) + __shfl_xor_sync(FULL, is_odd ? one : three, 2);
            const float sum = at(0, i) + __shfl_xor_sync(FULL, at(2, i), 2) + __shfl_xor_sync(FULL, of_neighbour, 1);
            put(component<VALUE_SUB>(8 * lane.l + lane.g + i / 2 * 32) + (i & 1), sum);
        }
    }
};
#else
// Several queries: byte permutations pair the components of two tokens, so that components are the rows of the A
// operand and tokens its columns. The columns of the B operand are (chunk of 8 words, query of a pair); its weights are
// zero but in the one step at which the lane's words belong to that chunk.
struct Sums {
    static constexpr int STEPS = 2 * 4;

    // A tile's weights for query g & 1 of each pair, before the mask.
    struct Weights {
        uint2 tokens[2][PAIRS];

        __device__ __forceinline__ Weights(const u8* weights, const Lane& lane) {
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++)
                tokens[i / PAIRS][i % PAIRS] = *reinterpret_cast<const uint2*>(
                    weights + (2 * (i % PAIRS) + (lane.g & 1)) * TILE * 2 + (i / PAIRS * 4 + lane.l) * 8);
        }
    };

    float sums[HALVES][PAIRS][4]; // [component of a word if D = 128][pair][query of the pair, + 2 for the upper rows]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HALVES * PAIRS * 4; i++) sums[i / 4 / PAIRS][i / 4 % PAIRS][i % 4] = 0;
    }

    __device__ __forceinline__ void scale(const float (&factors)[QUERIES]) {
#pragma unroll
        for (int i = 0; i < HALVES * QUERIES * 2; i++) {
            const int query = i / 2 % QUERIES;
            sums[i / 2 / QUERIES][query / 2][(query & 1) + i % 2 * 2] *= factors[query];
        }
    }

    __device__ __forceinline__ void add_step(int k, const u32 (&codes)[Values::EXPANDED], u32 offset,
                                             const Weights& weights, const Lane& lane) {
        const int half = k / 4, step = k % 4;
        u32 words[HALVES][4];
#pragma unroll
        for (int part = 0; part < HALVES; part++) look_up_values(words[part], codes, offset, half, step, part);
        const bool mine = step == ((lane.g / 2 - lane.l) & 3);
#pragma unroll
        for (int odd = 0; odd < HALVES; odd++) {
            // Rows g: words of part 0. Rows g + 8: words of part 1, or the odd components of part 0.
            constexpr u32 EVEN_OF_BOTH = 0x5410, ODD_OF_BOTH = 0x7632;
            const u32 lower = odd ? ODD_OF_BOTH : EVEN_OF_BOTH, upper = HALVES == 1 ? ODD_OF_BOTH : lower;
            const u32(&a)[4] = words[0], (&b)[4] = words[HALVES - 1];
            const u32 operand[4] = {prmt(a[0], a[1], lower), prmt(b[0], b[1], upper), prmt(a[2], a[3], lower),
                                    prmt(b[2], b[3], upper)};
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const uint2& p = weights.tokens[half][i];
                mma_m16n8k16_f16(sums[odd][i], operand, mine ? p.x : 0, mine ? p.y : 0);
            }
        }
    }

    // Calls `put(component, sum)` for the lane's components of a query.
    template <typename Put>
    __device__ __forceinline__ void visit(int query, const Lane& lane, Put put) const {
#pragma unroll
        for (int i = 0; i < HALVES * 2; i++) {
            const int upper = i % 2, word = 8 * lane.l + lane.g + (HALVES == 2 ? upper * 32 : 0);
            put(component<VALUE_SUB>(word) + (HALVES == 2 ? i / 2 : upper),
                sums[i / 2][query / 2][(query & 1) + 2 * upper]);
        }
    }
};
#endif

// A warp's online softmax over its tiles so far.
struct State {
    Sums sums;
    float max[COPIES],
        weight[COPIES]; // of the lane's queries, COPIES * mma_index + i; `weight` is the lane's share of the sum

    __device__ __forceinline__ void clear() {
        sums.clear();
#pragma unroll
        for (int i = 0; i < COPIES; i++) max[i] = NOTHING, weight[i] = 0;
    }

    // Converts scores to f16 weights, exp2(score - maximum). Raises the maximum, and rescales the sums, only when a
    // score exceeds it by more than 8.
    __device__ __forceinline__ void weigh(uint2 (&weights)[COPIES], const float (&scores)[COPIES][4],
                                          const Lane& lane) {
        float lane_max[COPIES];
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            lane_max[i] = fmaxf(fmaxf(scores[i][0], scores[i][1]), fmaxf(scores[i][2], scores[i][3]));
            exceeds |= lane.has_scores && lane_max[i] > max[i] + 8;
        }
        if (warp_uniform(exceeds)) {
            float keep[QUERIES];
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const int i = q % COPIES;
                const bool mine = lane.mma_index == q / COPIES;
                const float old = __shfl_sync(FULL, max[i], q / COPIES); // of the lane with g = 0 that has query q
                const float new_max = warp_max(mine ? fmaxf(lane_max[i], old) : NOTHING);
                const float factor = exp2_approx(old - new_max);
                if (mine) max[i] = new_max, weight[i] *= factor; // `keep[q]` would be indexed, in local memory
                keep[q] = factor;
            }
            sums.scale(keep);
        }
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            float p[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                p[t] = exp2_approx(scores[i][t] - max[i]);
                weight[i] += p[t];
            }
            weights[i] = make_uint2(pack_half2(p[0], p[1]), pack_half2(p[2], p[3]));
        }
    }
};

// Weighted sums of the coded values of a tile, and the softmax of its scores.
//
// The A operand has components as rows and tokens as columns: lane 4 g + l holds components 2 g and 2 g + 1 of each
// part of 16, of the token quads l and l + 4. A weight, with the norm, is an integer of 16 bits in two limbs of 8: two
// columns of the B operand. The tensor cores add the products of all tiles; the sums leave the registers when the unit
// of the weights changes.
//
// The unit follows the tiles. It is such that the largest weight of a tile and query has 10 to 16 bits, so a token
// loses at most 2^-11 of the largest of its tile, whatever the tiles before had. (With the largest weight so far as
// unit a long tail next to it would lose all of its weight.) A tile adds less than 32 * 255 * 255 to a sum, and the
// unit changes at the latest after 256 tiles.
#pragma once
#include "sq_attend/ring.cuh"
#include "sq_attend/uniform_codes.cuh"

constexpr float LOG_WEIGHT_LIMIT = 15.9943535f; // of 255 * 256
// The largest weight of a tile is at most 1, and at least 2^-WINDOW, of the limit of the unit, which is 2^MARGIN times
// that of the tile that changes it.
constexpr float WINDOW = 6, MARGIN = 1;
constexpr u32 MAX_TILES = 256; // that add to the integers

using ValueCodes = UniformCodes<VALUE_SLOTS, VALUE_BITS>;

// Components 2 g, 2 g + 1 of token quad l, then of quad l + 4.
template <int R = 0>
__device__ __forceinline__ void load_values(ValueCodes& codes, u32 values, const Lane& lane) {
    constexpr Row ROW = row_of(VALUE_SLOTS, R);
    constexpr int FIRST = ROW.first * VECTOR / CHUNK_WORDS, OF_VECTOR = VECTOR / CHUNK_WORDS;
    u32(&words)[4] = codes.words[R];
    if constexpr (ROW.slots == 8) {
        const uint2 first = ld_stage_v2(values + lane.values + FIRST * CHUNK),
                    second = ld_stage_v2(values + lane.later_values + FIRST * CHUNK);
        words[0] = first.x, words[1] = first.y, words[2] = second.x, words[3] = second.y;
    } else {
        const u32 chunk = lane.l % ROW.slots * OF_VECTOR + lane.g / 2;
        const uint2 both = ld_stage_v2(values + chunk_place<FIRST>(chunk) + lane.g % 2 * 8);
        words[0] = both.x, words[1] = both.y;
        // The later quad shares the words, four bits up; in rows of two slots, so do quads l and l + 2.
        const u32 up = ROW.slots * (lane.l / ROW.slots);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (ROW.slots < 4) words[i] = __funnelshift_r(words[i], words[i], up);
            words[i + 2] = __funnelshift_r(words[i], words[i], 4);
        }
    }
    if constexpr (R + 1 < ValueCodes::ROWS) load_values<R + 1>(codes, values, lane);
}

// The state of query l of every set. The warp's results, one row a query, are in shared memory: the sums of components,
// in units of 2^max, that the registers do not have.
struct Sums {
    float* results;
    float step; // the value of a unit of weight and code
    int sums[SETS][PARTS][4]; // limbs of component 2 g, then of 2 g + 1
    float limit[SETS];        // logarithm of the largest weight that integers can have
    float recent[SETS];       // sum of the weights of the lane's tokens since the unit changed, in units of the limit
    u32 limbs[SETS][2];       // sums of limbs of these weights, with norms
    float max[SETS], weight[SETS]; // of the results: the unit, and the sum of the weights of the lane's tokens
    u32 tiles = 0;                 // since the unit changed

    __device__ __forceinline__ Sums(float* results, float step, const Lane& lane) : results(results), step(step) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            max[set] = limit[set] = NEG_INF, weight[set] = 0;
            clear(set);
#pragma unroll
            for (int p = 0; p < PARTS; p++) *two(set, p, lane) = make_float2(0, 0);
        }
    }

    // Adds a tile with the scores of tokens 4 g to 4 g + 3, logarithms to base 2, and the bytes of these tokens' norms.
    // `new_block`: the tiles before were of another block, whose mean error is `error`.
    __device__ __forceinline__ void add(const float (&scores)[SETS][4], u32 norms, u32 values, bool new_block,
                                        const u16* error, const Lane& lane) {
        // A weight is 2^(score + code / 16) for the byte `code` of the norm, which is 2^(code / 16 - 8).
        float with_norm[SETS][4], top[SETS]; // of the lane's tokens
        bool moves = tiles == MAX_TILES || MEAN_ERRORS && new_block;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            top[set] = NEG_INF;
#pragma unroll
            for (int t = 0; t < 4; t++) {
                // A byte in the mantissa of 2^23 is added to it.
                const float code = __uint_as_float(prmt(norms, 0x4b000000, 0x7440 + t)) - 8388608.f;
                with_norm[set][t] = scores[set][t] + code * .0625f;
                top[set] = fmaxf(top[set], with_norm[set][t]);
            }
            const u32 near = __ballot_sync(FULL, top[set] >= limit[set] - WINDOW);
            moves |= top[set] > limit[set] || (near & 0x11111111u << lane.l) == 0;
        }
        if (warp_uniform(moves)) {
            flush(error, lane);
#pragma unroll
            for (int set = 0; set < SETS; set++) {
#pragma unroll
                for (int step = 4; step < LANES; step *= 2)
                    top[set] = fmaxf(top[set], __shfl_xor_sync(FULL, top[set], step));
                if (top[set] > limit[set] || top[set] < limit[set] - WINDOW) limit[set] = top[set] + MARGIN;
            }
        }
        tiles++;
        u32 weights[SETS][2];
#pragma unroll
        for (int set = 0; set < SETS; set++) weigh(set, scores[set], with_norm[set], weights[set], lane);
        ValueCodes codes;
        load_values(codes, values, lane);
        add_part<0>(codes, weights);
    }

    // Adds what the registers have to the results, and the mean error of the block to each of its tokens.
    __device__ __forceinline__ void flush(const u16* error, const Lane& lane) {
        constexpr float OFFSET = (.5f - (1 << (VALUE_BITS - 1))) * ValueCodes::SCALE; // from codes to levels
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float new_max = fmaxf(max[set], limit[set]);
            const float keep = exp2_approx(max[set] - new_max), gain = exp2_approx(limit[set] - new_max);
            const float unit = gain * step, offset = OFFSET * over_tokens(of_limbs(limbs[set][0], limbs[set][1]));
            const float mass = MEAN_ERRORS ? gain * over_tokens(recent[set]) : 0;
            max[set] = new_max, weight[set] = keep * weight[set] + gain * recent[set];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int(&s)[4] = sums[set][p];
                float2 x = *two(set, p, lane);
                x.x = keep * x.x + unit * (of_limbs(s[0], s[1]) + offset);
                x.y = keep * x.y + unit * (of_limbs(s[2], s[3]) + offset);
#if MEAN_ERRORS
                const float2 of_part = half2_to_float2(__ldg(reinterpret_cast<const u32*>(error) + p * 8 + lane.g));
                x.x += mass * of_part.x, x.y += mass * of_part.y;
#endif
                *two(set, p, lane) = x;
            }
            clear(set);
        }
        tiles = 0;
    }

    // Completes the results, for `reduce`. Called after the last `flush`.
    __device__ __forceinline__ void store(const Lane& lane) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float total = over_tokens(weight[set]);
            float* result = results + (4 * set + lane.l) * RESULT;
            if (lane.g == 0) result[D] = max[set], result[D + 1] = total;
        }
    }

  private:
    // Components 2 g and 2 g + 1 of a part of the result of query l of a set.
    __device__ __forceinline__ float2* two(int set, int part, const Lane& lane) const {
        return reinterpret_cast<float2*>(results + (4 * set + lane.l) * RESULT + part * 16 + 2 * lane.g);
    }

    __device__ __forceinline__ void clear(int set) {
        recent[set] = 0, limbs[set][0] = limbs[set][1] = 0;
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) sums[set][i / 4][i % 4] = 0;
    }

    template <typename Integer>
    static __device__ __forceinline__ float of_limbs(Integer high, Integer low) {
        return (float)high * 256 + (float)low;
    }

    // The sum over the lanes that share l.
    static __device__ __forceinline__ float over_tokens(float x) {
#pragma unroll
        for (int step = 4; step < LANES; step *= 2) x += __shfl_xor_sync(FULL, x, step);
        return x;
    }

    // The weights of a tile as B operands.
    __device__ __forceinline__ void weigh(int set, const float (&scores)[4], const float (&with_norm)[4], u32 (&b)[2],
                                          const Lane& lane) {
        const float unit = limit[set] - LOG_WEIGHT_LIMIT;
        u32 integer[4]; // in the mantissa of 2^23, to which they are added
#pragma unroll
        for (int t = 0; t < 4; t++) {
            recent[set] += exp2_approx(scores[t] - limit[set]); // the norm's code is not negative: at most 1
            integer[t] = __float_as_uint(exp2_approx(with_norm[t] - unit) + 8388608.f);
        }
        const u32 high_limbs = pack_second_bytes(integer[0], integer[1], integer[2], integer[3]);
        const u32 low_limbs = pack_low_bytes(integer[0], integer[1], integer[2], integer[3]);
        limbs[set][0] = __dp4a(high_limbs, 0x01010101u, limbs[set][0]);
        limbs[set][1] = __dp4a(low_limbs, 0x01010101u, limbs[set][1]);

        // Transposes: lane 4 g + l has quad g of query l; as B operand it has quads l and l + 4 of column g. Lanes 4 to
        // 7 of each l swap the high limbs of their quads for the low limbs of those of lanes 0 to 3.
        const bool is_later = lane.g >= 4;
        const u32 other = __shfl_xor_sync(FULL, is_later ? high_limbs : low_limbs, 16);
        const u32 first = is_later ? other : high_limbs, second = is_later ? low_limbs : other;
        const int from = 4 * (lane.l + 4 * (lane.g % 2)) + lane.g / 2;
        b[0] = __shfl_sync(FULL, first, from), b[1] = __shfl_sync(FULL, second, from);
    }

    template <int P>
    __device__ __forceinline__ void add_part(const ValueCodes& codes, const u32 (&weights)[SETS][2]) {
        const u32 a[4] = {codes.template code<P>(0), codes.template code<P>(1), codes.template code<P>(2),
                          codes.template code<P>(3)};
#pragma unroll
        for (int set = 0; set < SETS; set++) mma_m16n8k32_u8u8(sums[set][P], a, weights[set][0], weights[set][1]);
        if constexpr (P + 1 < PARTS) add_part<P + 1>(codes, weights);
    }
};

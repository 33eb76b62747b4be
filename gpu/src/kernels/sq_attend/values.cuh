// Weighted sums of the coded values of a tile, and the softmax of its scores.
//
// The A operand has components as rows and tokens as columns: lane 4 g + l holds components 2 g and 2 g + 1 of each
// part of 16, of the token quads l and l + 4. A weight, with the norm, is an integer of 16 bits in two limbs of 8: two
// columns of the B operand. Integers are in units of the largest weight of the tile and query, so that a token loses at
// most 2^-17 of it, and all tokens that have no weight next to another lose at most 32 * 2^-17 of the other's. (Units
// of the largest weight so far would lose all of a long tail.) A tile's sums are below 32 * 255 * 15 per limb; they
// become floats at once.
#pragma once
#include "sq_attend/shape.cuh"

constexpr float WEIGHT_LIMIT = 65280; // 255 * 256
constexpr int VALUE_SLOTS = PARTS * VALUE_BITS, VALUE_ROWS = rows_before(VALUE_SLOTS, VALUE_SLOTS);
// The running maximum rises only when a tile's exceeds it by more, so that sums are rarely scaled.
constexpr float HEADROOM = 24;

struct Values {
    u32 words[VALUE_ROWS][4]; // components 2 g, 2 g + 1 of token quad l, then, in a row of 8 slots, of quad l + 4

    template <int R = 0>
    __device__ __forceinline__ void load(const u32* tile, const Lane& lane) {
        constexpr Row ROW = row_of(VALUE_SLOTS, R);
        const u32* from = tile + (ROW.first + lane.l % (ROW.slots < 4 ? ROW.slots : 4)) * VECTOR + 2 * lane.g;
        ld_nc_no_allocate<2>(words[R], from);
        if constexpr (ROW.slots == 8) ld_nc_no_allocate<2>(words[R] + 2, from + 4 * VECTOR);
        if constexpr (R + 1 < VALUE_ROWS) load<R + 1>(tile, lane);
    }

    // The codes of part p, as an A operand.
    template <int P>
    __device__ __forceinline__ void codes(u32 (&a)[4], const Lane& lane) const {
        constexpr int SLOT = P * VALUE_BITS, END = row_at(VALUE_SLOTS, SLOT).first + row_at(VALUE_SLOTS, SLOT).slots;
        constexpr int LEADING = VALUE_BITS < END - SLOT ? VALUE_BITS : END - SLOT; // bits in the row of the first slot
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = field<SLOT, LEADING, VALUE_BITS - LEADING>(i, lane);
            if constexpr (LEADING < VALUE_BITS) a[i] |= field<END, VALUE_BITS - LEADING, 0>(i, lane);
        }
    }

  private:
    // `TAKEN` bits from a slot on, moved to those of the code above `BELOW`.
    template <int SLOT, int TAKEN, int BELOW>
    __device__ __forceinline__ u32 field(int i, const Lane& lane) const {
        constexpr Row ROW = row_at(VALUE_SLOTS, SLOT);
        static_assert(ROW.slots > 1, "a multiple of 32 components");
        constexpr int UP = SLOT - ROW.first - BELOW + 32;
        constexpr u32 MASK = ((1u << TAKEN) - 1 << BELOW) * 0x01010101u;
        constexpr int INDEX = rows_before(VALUE_SLOTS, ROW.first);
        const u32* row = words[INDEX];
        if constexpr (ROW.slots == 8) return __funnelshift_r(row[i], row[i], UP) & MASK;
        // The later quad shares the words, four bits up; in rows of two slots, so do quads l and l + 2.
        const u32 word = row[i % 2], up = UP + i / 2 * 4 + (ROW.slots == 2 ? lane.l / 2 * 2 : 0);
        return __funnelshift_r(word, word, up) & MASK;
    }
};

// The state of query l of every set.
struct Sums {
    float sums[SETS][PARTS][2]; // of components 2 g and 2 g + 1: integer weights times codes
    float max[SETS];            // equal in all lanes that share l
    // Of the lane's own tokens: sums of weights, those of the current block, and sums of integer weights.
    float weight[SETS], of_block[SETS], integers[SETS];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            max[set] = NOTHING, weight[set] = of_block[set] = integers[set] = 0;
#pragma unroll
            for (int i = 0; i < 2 * PARTS; i++) sums[set][i / 2][i % 2] = 0;
        }
    }

    // Adds a tile with the scores of tokens 4 g to 4 g + 3, logarithms to base 2, and the norms of these tokens.
    __device__ __forceinline__ void add(const float (&scores)[SETS][4], u32 norms, const Values& values,
                                        const Lane& lane) {
        u32 weights[SETS][2];
        float unit[SETS];
#pragma unroll
        for (int set = 0; set < SETS; set++) unit[set] = weigh(set, scores[set], norms, weights[set], lane);
        add_part<0>(values, weights, unit, lane);
    }

    // Adds the mean error of the block's values to every token of the block.
    __device__ __forceinline__ void end_block(const u16* error, float per_step, const Lane& lane) {
#if MEAN_ERRORS
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float mass = over_tokens(of_block[set]) * per_step;
            weight[set] += of_block[set], of_block[set] = 0;
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float2 of_part = half2_to_float2(__ldg(reinterpret_cast<const u32*>(error) + p * 8 + lane.g));
                sums[set][p][0] += mass * of_part.x, sums[set][p][1] += mass * of_part.y;
            }
        }
#endif
    }

    // Writes a result row of each query, for `reduce`. `step` is the value of one unit of weight and code.
    __device__ __forceinline__ void store(float* results, float step, const Lane& lane) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float* result = results + (4 * set + lane.l) * RESULT;
            const float total = over_tokens(weight[set] + of_block[set]);
            const float offset = over_tokens(integers[set]) * (.5f - (1 << (VALUE_BITS - 1)));
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                *reinterpret_cast<float2*>(result + p * 16 + 2 * lane.g) =
                    make_float2((sums[set][p][0] + offset) * step, (sums[set][p][1] + offset) * step);
            if (lane.g == 0) result[D] = max[set], result[D + 1] = total;
        }
    }

  private:
    // The sum over the lanes that share l.
    static __device__ __forceinline__ float over_tokens(float x) {
#pragma unroll
        for (int step = 4; step < LANES; step *= 2) x += __shfl_xor_sync(FULL, x, step);
        return x;
    }

    // The weights of a tile as B operands; returns the value of their unit. A weight is 2^(score + code / 16) for the
    // byte `code` of the norm, which is 2^(code / 16 - 8).
    __device__ __forceinline__ float weigh(int set, const float (&scores)[4], u32 norms, u32 (&b)[2],
                                           const Lane& lane) {
        float with_norm[4], top = NOTHING;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            // A byte in the mantissa of 2^23 is added to it.
            const float code = __uint_as_float(prmt(norms, 0x4b000000, 0x7440 + t)) - 8388608.f;
            with_norm[t] = scores[t] + code * .0625f;
            top = fmaxf(top, with_norm[t]);
        }
#pragma unroll
        for (int step = 4; step < LANES; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
        if (warp_uniform(top > max[set] + HEADROOM)) {
            const float new_max = fmaxf(max[set], top), rescale = exp2_approx(max[set] - new_max);
            max[set] = new_max, weight[set] *= rescale, of_block[set] *= rescale, integers[set] *= rescale;
#pragma unroll
            for (int i = 0; i < 2 * PARTS; i++) sums[set][i / 2][i % 2] *= rescale;
        }
        const float unit = exp2_approx(top - max[set]);
        int integer[4], high[4], sum = 0;
        float weights = 0;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            weights += exp2_approx(scores[t] - top); // the norm's code is not negative: at most 1
            integer[t] = __float2int_rz(exp2_approx(with_norm[t] - top) * WEIGHT_LIMIT + .5f);
            high[t] = integer[t] >> 8, sum += integer[t];
        }
        of_block[set] += unit * weights, integers[set] += unit * sum;

        // Transposes: lane 4 g + l has quad g of query l; as B operand it has quads l and l + 4 of column g. Lanes 4 to
        // 7 of each l swap the high limbs of their quads for the low limbs of those of lanes 0 to 3.
        const u32 high_limbs = pack_low_bytes(high), low_limbs = pack_low_bytes(integer);
        const bool is_later = lane.g >= 4;
        const u32 other = __shfl_xor_sync(FULL, is_later ? high_limbs : low_limbs, 16);
        const u32 first = is_later ? other : high_limbs, second = is_later ? low_limbs : other;
        const int from = 4 * (lane.l + 4 * (lane.g % 2)) + lane.g / 2;
        b[0] = __shfl_sync(FULL, first, from), b[1] = __shfl_sync(FULL, second, from);
        return unit;
    }

    template <int P>
    __device__ __forceinline__ void add_part(const Values& values, const u32 (&weights)[SETS][2],
                                             const float (&unit)[SETS], const Lane& lane) {
        u32 a[4];
        values.codes<P>(a, lane);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            int products[4];
            mma_m16n8k32_u8u8_init(products, a, weights[set][0], weights[set][1]);
#pragma unroll
            for (int i = 0; i < 2; i++)
                sums[set][P][i] += unit[set] * (float)(products[2 * i] * 256 + products[2 * i + 1]);
        }
        if constexpr (P + 1 < PARTS) add_part<P + 1>(values, weights, unit, lane);
    }
};

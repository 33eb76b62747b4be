// Coded scores of a tile in 16 bits: distances from a level of the tile, in steps of 2^-8.
//
// A level is at most 8 below the highest score of the warp so far. Scores down to FARTHEST (144 as a natural logarithm)
// below it are exact to 2^-9, about the rounding of the table's entries. So the tokens that are left are as exact as
// those that lead, however far the selected tokens lead: an f16 of the distance is exact to 2^-11 of it, which is 4 %
// of a weight at 120. Farther scores have the 10 bits of mantissa of an f16. This takes half the bytes of f32.
//
// A level is a score, not a whole step, so that the token that sets it is exact. So equal scores in tiles of different
// levels may be up to two steps apart in the selection, which then does not prefer the first of them.
//
// With c the code, 32768 + c / 256 is the float of bits 0x47000000 | c: one permutation of bytes and an addition decode
// a score. Where its rounding to a step does not matter, that addition is also that of the level.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"

constexpr u16 NO_SCORE = 0;                // minus infinity: a token that is hidden, masked or behind the last one
constexpr u32 FAR_CODES = 8192;            // codes of scores farther below the level than FARTHEST, and NO_SCORE
constexpr float ORIGIN = 32768 + 240;      // of the level: codes reach from 240 below to 16 above it
constexpr float FARTHEST = 208;            // 240 - FAR_CODES / 256
constexpr u32 FARTHEST_BITS = 0x43500000u; // of the float FARTHEST
constexpr int FAR_SHIFT = 13;              // bits of the float that a far code leaves out

// The code of a score less its level, from -FARTHEST to 8.
__device__ __forceinline__ u16 near_code(float score) { return (u16)__float_as_uint(score + ORIGIN); }

// The code of any score less its level, at most 8, or infinite or NaN: then the query's statistics say so.
__device__ __forceinline__ u16 any_code(float score) {
    if (score >= -FARTHEST) return near_code(score);
    if (!(score > -infinity())) return NO_SCORE;
    const u32 half = 1u << (FAR_SHIFT - 1), steps = (__float_as_uint(-score) - FARTHEST_BITS + half) >> FAR_SHIFT;
    return FAR_CODES - 1 - min(steps, FAR_CODES - 2);
}

// The score of code `i` of a pair, less the level and plus ORIGIN, if it is near. Others give at most -FARTHEST, so
// their weights are 0 if the level is at most 80 above the score of weight 1.
__device__ __forceinline__ float near_score(u32 pair, int i = 0) {
    return __uint_as_float(prmt(pair, 0x4700, i ? 0x5432 : 0x5410));
}

// The score of any code, less the level.
__device__ __forceinline__ float any_score(u16 code) {
    if (code == NO_SCORE) return -infinity();
    if (code >= FAR_CODES) return near_score(code) - ORIGIN;
    return -__uint_as_float(FARTHEST_BITS + ((FAR_CODES - 1 - code) << FAR_SHIFT));
}

// Excludes a token from the sums of a row.
__device__ __forceinline__ void hide(ScoredTile* scores, u32 token) {
    u16* code = &scores[token / TILE].scores[0][place_of(token % TILE)];
#pragma unroll
    for (int q = 0; q < GROUP; q++) code[q * TILE] = NO_SCORE;
}

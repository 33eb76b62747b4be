// Compile-time shape and arguments of attention on scalar codes.
//
// HEAD_DIM (64, 96, 128 or 256), QUERIES (4 or 8: of a block), KEY_SLOTS (bits of each byte lane of a tile of keys),
// KEY_WIDTH (bits of every component of the keys, 0 if they differ), VALUE_BITS (1 to 4), BLOCK (tokens that share
// steps and queries, a multiple of 32), ELEMENT (1 for f16, 2 for bf16), WARPS, RESIDENT (blocks of a multiprocessor),
// STAGES (of a warp's ring, 2 or more), MEAN_ERRORS (0 or 1), ADDENDS (0 or 1), SHARED_BYTES, PAGED or not.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"
#include "sq_tile.cuh"
#include "warp.cuh"

constexpr int SETS = QUERIES / 4; // of four queries, whose two limbs fill the 8 columns of an MMA
constexpr int THREADS = WARPS * LANES;
constexpr int RESULT = D + 4; // floats of a result row: components, maximum, sum of weights, padding
constexpr int VALUE_SLOTS = PARTS * VALUE_BITS;

struct Arguments {
    const u32* keys;      // [page or sequence][head][block][tile of block][vector][16]
    const u32* values;    // the same
    const u8* norms;      // [page or sequence][head][block][BLOCK]
    const u16* errors;    // f16 [page or sequence][head][block][D]
    const u16* addends;   // f16 [sequence][head][tile of sequence][query of group][TILE], in units of the score
    const uint2* queries; // [sequence][head][block of sequence][query of group][quad]: high and low limbs
    const float2* units;  // [sequence][head][block of sequence][query of group]: unit and offset of the scores
    const u32* tables;    // [head][KeyTable::WORDS]; not read if KEY_WIDTH
    const u32* lengths;   // [sequence]
    const u32* pages;     // PAGED: [sequence][max_pages]
    float* partials;      // [block of the grid][2][QUERIES][RESULT]
    u32* arrived;         // [sequence][head][slice], zero between launches
    u16* out;             // element [sequence][head][query of group][D]
    float* log_sum_exp;   // [sequence][head][query of group], or null
    u32 batch, heads, group;
    u32 blocks, max_pages; // blocks of tokens of a page or sequence, and pages of a sequence
    u32 query_blocks;      // blocks of tokens of a sequence's queries
    u32 addend_tiles;      // tiles of a sequence's addends
    float value_step;      // between the levels of a value of norm 1
};

constexpr int CHUNK = 16, CHUNK_WORDS = CHUNK / 4; // bytes of an asynchronous copy

// The place of chunk FIRST + c of keys or values in a stage, in bytes: see ring.cuh.
template <int FIRST = 0>
__device__ __forceinline__ u32 chunk_place(u32 c) {
    const u32 in_lines = FIRST % 32 + c;
    return (FIRST / 32 * 32 + (in_lines ^ in_lines / 8 % 4 * 2)) * CHUNK;
}

// Lane 4 g + l of a warp, and its places in rows of 8 slots of a stage: of the keys of column l and tokens 4 g to 4 g +
// 3, and of components 2 g and 2 g + 1 of the values of token quads l and l + 4.
struct Lane {
    int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4, warp = threadIdx.x / LANES;
    u32 keys = chunk_place(8 * l + g), values = chunk_place(4 * l + g / 2) + g % 2 * 8,
        later_values = chunk_place(4 * (l + 4) + g / 2) + g % 2 * 8;

    __device__ __forceinline__ Lane() {
        keep_in_register(keys), keep_in_register(values), keep_in_register(later_values);
    }
};

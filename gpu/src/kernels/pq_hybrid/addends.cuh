// Addends of the coded scores of a tile, if ADDENDS: f16 [GROUP][TILE], tokens of the tile in order.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"

#ifdef ADDENDS
constexpr bool HAS_ADDENDS = true;
#else
constexpr bool HAS_ADDENDS = false;
#endif

// The addends of a lane of scores.cu, for QUERIES queries and SETS tokens. A lane loads two tokens of one query, and
// movmatrix transposes these into two queries of one token: half as many loads, of whole lines. The sums are in f32.
template <int QUERIES, int SETS>
struct TileAddends {
    static constexpr int PAIRS = QUERIES / 2;
    u32 loaded[SETS][PAIRS];

    // Lane 4 g + l loads tokens 2 l and 2 l + 1 of row g of an (8, 8) matrix, whose columns are adjacent tokens. After
    // the transposition, lanes 4 g + i hold the queries of rows 2 i and 2 i + 1.
    static __device__ __forceinline__ int offset(int lane, int set, int pair) {
        const int g = lane / 4, l = lane % 4, i = g / 2;
        const int query = (VEC == 8 ? i % 2 * 4 : 0) + pair * 2 + g % 2;
        const int eight = VEC == 8 ? set * 2 + i / 2 : i; // index of 8 tokens in the tile
        return min(query, GROUP - 1) * TILE + eight * 8 + l * 2;
    }

    __device__ __forceinline__ void load(const u16* tile, int lane) {
#pragma unroll
        for (int i = 0; i < SETS * PAIRS; i++)
            ld_nc_no_allocate<1>(&loaded[i / PAIRS][i % PAIRS], tile + offset(lane, i / PAIRS, i % PAIRS));
    }

    __device__ __forceinline__ void add_to(float (&sums)[SETS][4]) const {
#pragma unroll
        for (int i = 0; i < SETS * PAIRS; i++) {
            const u32 pair = movmatrix_trans(loaded[i / PAIRS][i % PAIRS]);
            float(&of_token)[4] = sums[i / PAIRS];
            const float2 addends = half2_to_float2(pair);
            of_token[i % PAIRS * 2] += addends.x * LOG2_E, of_token[i % PAIRS * 2 + 1] += addends.y * LOG2_E;
        }
    }
};

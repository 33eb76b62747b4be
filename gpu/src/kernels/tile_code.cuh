// A code in a tile of `CodeLayout`, for kernels that decode single tokens.
//
// Compile-time shape: HEAD_DIM; KEPT_M codes of KEPT_BITS bits a vector, in the tiles of pq_encode.cu; KEYS or not.
#pragma once
#include "types.cuh"

constexpr u32 TILE = 32;
constexpr u32 WORDS = HEAD_DIM / 2, CODE_WORDS = WORDS / KEPT_M; // words of two elements: of a row, of a code
constexpr u32 LANE_CODES = TILE * KEPT_M / LANES, LANE_WORDS = LANE_CODES * KEPT_BITS / 32;
constexpr u32 WIDTH = KEPT_BITS == 6 ? LANE_WORDS / 3 : LANE_WORDS < 4 ? LANE_WORDS : 4;
constexpr u32 TILE_WORDS = LANE_WORDS * LANES;

// The lane that holds a code, and the index of the code among those of the lane: the inverse of token_and_code
// (pq_encode.cu). The host's CodeLayout has the same formula.
__device__ __forceinline__ void place_of(u32 token, u32 code, u32& lane, u32& place) {
    constexpr u32 PARTS = KEPT_M < 64 ? 1 : 2;
    const u32 part = code / 32;
#ifdef KEYS
    constexpr u32 STEPS = KEPT_M < 16 ? 2 : 4, MIDDLES = KEPT_M < 32 ? 1 : 2;
    const u32 half = token / 16, high = token / 8 % 2, g = token % 8;
    const u32 middle = code / 16 % 2, step = code / 4 % STEPS ^ g % STEPS, l = code % 4;
    place = ((half * PARTS + part) * STEPS + step) * MIDDLES * 2 + middle * 2 + high;
#else
    constexpr u32 STEPS = KEPT_M < 16 ? 1 : KEPT_M < 32 ? 2 : 4;
    const u32 half = token / 4 % 2, l = token % 4, i = token / 8, g = code % 8;
    const u32 step = (code / 8 + 4 - l) % 4 % STEPS;
    place = (((half * STEPS + step) * 2 + i / 2) * PARTS + part) * 2 + i % 2;
#endif
    lane = 4 * g + l;
}

// A code of a tile.
__device__ __forceinline__ u32 code_at(const u8* tile, u32 token, u32 code) {
    u32 lane, place;
    place_of(token, code, lane, place);
    const u32 index = place / 4; // of four codes, one in each byte
    auto byte = [&](u32 word) -> u32 {
        return tile[((word / WIDTH * LANES + lane) * WIDTH + word % WIDTH) * 4 + place % 4];
    };
    if constexpr (KEPT_BITS == 8) return byte(index);
    if constexpr (KEPT_BITS == 4) return byte(index / 2) >> 4 * (index % 2) & 15;
    const u32 first = index / 4 * 3; // three words hold four times four codes
    if (index % 4 < 3) return byte(first + index % 4) & 63;
    return byte(first) >> 6 | byte(first + 1) >> 6 << 2 | byte(first + 2) >> 6 << 4;
}

// The pair of components of word `word` of a vector whose code there is `code`; `table` is the head's.
__device__ __forceinline__ u32 decoded_pair(const u32* table, u32 code, u32 word) {
    return __ldg(table + code * WORDS + word / CODE_WORDS + word % CODE_WORDS * KEPT_M);
}

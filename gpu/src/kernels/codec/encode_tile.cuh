// A tile that is being encoded: the launch's arguments, its rows, and the models of its lanes.
#pragma once
#ifdef MAP_DIM
#include "codec/maps.cuh"
#endif
#include "codec/tile.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES;
constexpr int MAX_BIN = 32767, COST_BITS = 8;
constexpr u16 ESCAPE = 0xffff; // code of an escaped bin
constexpr bool HAS_RECIPROCALS = CONTEXTS * SYMBOLS <= 96; // which fit shared memory

struct Arguments {
    const Planes* planes;
    u8* slots;      // [plane][token block][tile], `slot_bytes` each
    u16* lengths;   // [plane][token block][tile], in units of two bytes
    u16* workspace; // [warp of the grid][4 * `bins_of_tile`]
    u32* failed;    // maximum of (index of the tile) + 1 over tiles with values that are not finite
#ifdef MAP_DIM
    u16* bins;        // [plane][token block][tile] of `bins_of_tile` numbers
    const Maps* maps; // [plane of the frame]
#else
    const void* absent[2]; // so that the host needs only one structure
#endif
    PlanesAt rows; // planes of this launch
    Place place;
    u32 planes_here, first_plane, tokens, block_tokens, slot_bytes;
};

struct Shared {
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
    u32 reciprocals[HAS_RECIPROCALS ? CONTEXTS * SYMBOLS : 1][LANES]; // (2^32 - 1) / slots of each symbol
    u32 state_bits[WARPS][LANES];
};

// A tile that is being encoded, in the workspace of its warp.
struct Tile {
    u32 rows, lanes;
    u16* bins;    // at `bin_index`
    u16* codes;   // the same, for tables by context; may be the memory of `bins`
    u16* words;   // filled downwards from its end, 2 * LANES * rows
    u16* escapes; // the first of the escaped bins, in order of row, then lane
    u32 escape_count;
};

// GROUP rows of a lane.
struct alignas(16) Rows {
    u32 pairs[GROUP / 2];

    __device__ __forceinline__ u16 operator[](u32 i) const {
        const u32 pair = i < 4 ? (i < 2 ? pairs[0] : pairs[1]) : i < 6 ? pairs[2] : pairs[3];
        return (u16)(pair >> 16 * (i % 2));
    }
    __device__ __forceinline__ void set(int i, u16 x) {
        pairs[i / 2] = i % 2 ? pairs[i / 2] & 0xffff | (u32)x << 16 : x;
    }
};

// The lane's rows of a group, in `bins` or `codes`.
__device__ __forceinline__ Rows& rows_of(u16* of, u32 group) {
    return *reinterpret_cast<Rows*>(of + bin_index(group * GROUP, threadIdx.x % LANES));
}

// The model of a lane: the plane's, or a family that the tile names.
struct Model {
    const Symbol* symbols;
    u32 stride, low_bits;
    const u32* escapes; // index of the escape symbol by context, LANES apart

    __device__ Symbol symbol(u32 context, u32 i) const { return symbols[(context * SYMBOLS + i) * stride]; }
    __device__ u32 escape(u32 context) const { return escapes[context * LANES]; }
};

// The code of a bin: its symbol and low bits, ignoring the escape.
__device__ __forceinline__ u32 code_of(int bin, u32 low_bits) {
    const int shifted = bin + half_of(low_bits);
    return zigzag(shifted >> low_bits) << low_bits | (shifted & ((1 << low_bits) - 1));
}

// Shared by decode.cu, encode.cu and quantize_mma.cu, the kernels for codec-core's tiles (codec-core/FORMAT.md). A tile
// is up to 32 channels of a block of tokens; a warp owns it, a lane a channel.
//
// Compile-time shape, in addition to that of place.cuh: CONTEXTS (1 or 3) and SYMBOLS (a power of two up to 64) of the
// models, PREVIOUS (defined if a value is predicted from the previous token), FAMILY_BYTES, TILE_MODEL_BYTES. Compiled
// with --fmad=false: every floating-point operation rounds on its own, as on the CPU, so results have the same bits.
#pragma once
#include "codec/frame.cuh"
#include "codec/place.cuh"

constexpr int PRECISION = 12, MAX_SYMBOLS = 64;
constexpr u32 SLOTS = 1u << PRECISION;
constexpr u32 LOW = 1u << 16; // lower bound of the rANS state: a state below it takes a word
constexpr int TILES = (CHANNELS + LANES - 1) / LANES;
// Kinds of tiles: bins of fixed width, rANS with the plane's models, rANS with families that the tile names.
constexpr u32 FIXED = 0, PLANE_LANES = 1, OWN_LANES = 2;
constexpr int HEAD_BYTES = 4; // header of a tile

// A symbol of a model: its first slot in the upper 12 bits (the cdf), its number of slots in the lower 13, and
// ESCAPE_BITS if it is the escape, the last symbol. Entries after the escape have no slots, and their highest 13 bits
// are set. (ESCAPE_BITS are two bits, since compilers shift a single one before they test it.)
//
// So the symbol of a slot is the last one that is at most `slot_key(slot)`, and the difference of these two, without
// its lower 20 bits, is the slot's index in the symbol.
typedef u32 Symbol;
constexpr int FIRST_SLOT_SHIFT = 20;
constexpr u32 ESCAPE_BITS = 3u << 13;
__device__ __forceinline__ u32 first_slot(Symbol symbol) { return symbol >> FIRST_SLOT_SHIFT; }
__device__ __forceinline__ u32 slots(Symbol symbol) { return symbol & ((1u << 13) - 1); }
__device__ __forceinline__ bool is_escape(Symbol symbol) { return symbol & ESCAPE_BITS; }
// The key of the slot in the lower 12 bits of a state.
__device__ __forceinline__ u32 slot_key(u32 state) {
    return state * (1u << FIRST_SLOT_SHIFT) + (1u << (FIRST_SLOT_SHIFT - 1)) - 1;
}

// A parametric model, named by one byte in the stream.
struct Family {
    u32 low_bits, escape;
    Symbol symbols[MAX_SYMBOLS];
};

// The models and constants of a tile's channels, one lane each. `Planes::pack` of the host writes them.
struct TileModel {
    double deviations[LANES]; // standard deviation of bins that the model expects
    u32 shapes[LANES];        // distribution of the families
    u32 low_bits[LANES];
    float steps[LANES], mean[LANES], factors[LANES]; // the mean is 0 if transform.cu subtracts it
    float centroids[2];
    u32 levels;                   // levels of a scaling by token, or 0 for one step per channel
    u32 contexts;                 // distinct contexts of these models, at most CONTEXTS
    u32 escapes[CONTEXTS][LANES]; // index of the escape symbol
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
};

// All planes of a model. `tiles` is [plane][tile]; the host allocates as many planes as there are.
struct Planes {
    Family families[256];
    TileModel tiles[1][TILES];
};
static_assert(sizeof(Family) == FAMILY_BYTES && sizeof(TileModel) == TILE_MODEL_BYTES,
              "the host writes the same layout");

__device__ __forceinline__ u32 lanes_below(int lane) { return (1u << lane) - 1; }

// Maps 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ..., and back.
__device__ __forceinline__ u32 zigzag(int x) { return (u32)((x << 1) ^ (x >> 31)); }
__device__ __forceinline__ int unzigzag(u32 x) { return (int)(x >> 1) ^ -(int)(x & 1); }

// Half of the range of the low bits, which is added to a bin before the low bits are split off.
__device__ __forceinline__ int half_of(u32 low_bits) { return (1 << low_bits) >> 1; }

// The context of the row after `symbol`.
__device__ __forceinline__ u32 context_after(u32 symbol, bool escaped) {
    return symbol == 0 || escaped ? 0 : 2 - symbol % 2;
}

// The reconstruction point of a bin, in steps: bins 1 and 2 are shifted by their centroids.
__device__ __forceinline__ float centre(int bin, float centroid_1, float centroid_2) {
    const int size = abs(bin);
    const float shift = size == 1 ? centroid_1 : size == 2 ? centroid_2 : 0.f;
    return (float)bin + (bin < 0 ? -shift : shift);
}

__device__ __forceinline__ float power_of_two(u32 exponent) { return __uint_as_float((127 + exponent) << 23); }

// Rounds to the nearest integer, ties to even, after clamping to +-2^20. Adding 1.5 * 2^23 rounds in one operation.
constexpr float ROUND = 12582912.f;
__device__ __forceinline__ int bin_of(float x) {
    constexpr float LIMIT = 1 << 20;
    return (int)__float_as_uint(fminf(fmaxf(x, -LIMIT), LIMIT) + ROUND) - (int)__float_as_uint(ROUND);
}

// The layout of a tile's bins for the encoder: eight consecutive rows of a lane are adjacent, for one load. FAR_BIN
// marks a bin that quantize_mma.cu could not compute; its other bins are at most half as far from zero.
constexpr int GROUP = 8;
constexpr u32 FAR_BIN = 0x8000;
__device__ __forceinline__ u32 bins_of_tile(u32 block_tokens) {
    return (block_tokens + GROUP - 1) / GROUP * GROUP * LANES;
}
__device__ __forceinline__ u32 bin_index(u32 row, u32 lane) {
    return (row / GROUP * LANES + lane) * GROUP + row % GROUP;
}

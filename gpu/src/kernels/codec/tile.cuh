// What coding and decoding of codec-core's tiles have in common (codec-core/FORMAT.md): a warp takes a tile, a lane a
// channel.
//
// Compile-time shape, beside that of place.cuh: CONTEXTS (1 or 3) and SYMBOLS (a power of two, up to 64) of the models;
// PREVIOUS where a number is predicted from the one before. Compiled without contraction (--fmad=false): every
// operation on floats is rounded by itself, as on the CPU.
#pragma once
#include "codec/place.cuh"

constexpr int PRECISION = 12, MAX_SYMBOLS = 64;
constexpr u32 SLOTS = 1u << PRECISION;
constexpr u32 LOW = 1u << 16; // states below take a word
constexpr int TILES = (CHANNELS + LANES - 1) / LANES;
constexpr u32 FIXED = 0, PLANE_LANES = 1, OWN_LANES = 2;
constexpr int HEAD_BYTES = 4;

// A symbol of a model: its first slot in the upper half, how many it has in the lower one. Behind the last symbol, the
// escape, all start at SLOTS.
typedef u32 Symbol;
__device__ __forceinline__ u32 first_slot(Symbol symbol) { return symbol >> 16; }
__device__ __forceinline__ u32 slots(Symbol symbol) { return symbol & 0xffff; }
__device__ __forceinline__ bool is_escape(Symbol symbol) { return first_slot(symbol) + slots(symbol) == SLOTS; }

// A model that a byte names.
struct Family {
    u32 low_bits, escape;
    Symbol symbols[MAX_SYMBOLS];
};

// What is known of a tile's channels; `Planes::pack` of the host lays it out.
struct TileModel {
    double deviations[LANES]; // of bins, that the model expects
    u32 shapes[LANES];        // of the families
    u32 low_bits[LANES];
    float steps[LANES], mean[LANES], factors[LANES]; // the mean is 0 where transform.cu takes it out
    float centroids[2];
    u32 levels;   // of a step for each token; 0 for one for each channel
    u32 contexts; // that differ
    u32 escapes[CONTEXTS][LANES];
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
};

// All that decoding needs: the families, then (plane, tile).
struct Planes {
    Family families[256];
    TileModel tiles[1][TILES];
};
static_assert(sizeof(Family) == FAMILY_BYTES && sizeof(TileModel) == TILE_MODEL_BYTES, "the host lays them out");

__device__ __forceinline__ u32 lanes_below(int lane) { return (1u << lane) - 1; }

// 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ..., and back.
__device__ __forceinline__ u32 zigzag(int x) { return (u32)((x << 1) ^ (x >> 31)); }
__device__ __forceinline__ int unzigzag(u32 x) { return (int)(x >> 1) ^ -(int)(x & 1); }

// What is added to a bin before its low bits are cut off.
__device__ __forceinline__ int half_of(u32 low_bits) { return (1 << low_bits) >> 1; }

// The context that a symbol leaves behind.
__device__ __forceinline__ u32 context_after(u32 symbol, bool escaped) {
    return symbol == 0 || escaped ? 0 : 2 - symbol % 2;
}

// What a bin decodes to, in steps.
__device__ __forceinline__ float centre(int bin, float one, float two) {
    const int size = abs(bin);
    const float shift = size == 1 ? one : size == 2 ? two : 0.f;
    return (float)bin + (bin < 0 ? -shift : shift);
}

__device__ __forceinline__ u32 load_u16(const u8* at) { return at[0] | at[1] << 8; }

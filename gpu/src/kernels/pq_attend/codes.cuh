// Packed codes of one tile in a lane's registers, and lookups in the tables.
//
// A tile is one run of codes. With HALF_TILES it is two, tokens 0 to 15 and 16 to 31, each in a page of its own. A run
// stores LOADS times WIDTH 32-bit words for each lane, as [load][lane][width], for keys and values alike. A lane's
// codes are in the order of their use; several words of a vector share a code when it has more than two components.
#pragma once
#include "pq_attend/shape.cuh"
#include "pq_attend/tile_places.cuh"
#include "primitives_sm80.cuh"

template <int BITS, int SUB>
struct Packed {
    static constexpr int CODES = TILE * WORDS / (SUB / 2) / LANES;
    static constexpr int EXPANDED = CODES / 4; // registers with one code in each byte
    static constexpr int WORDS32 = CODES * BITS / 32, RUN_WORDS = WORDS32 / RUNS;
    static constexpr int WIDTH = BITS == 6 ? RUN_WORDS / 3 : RUN_WORDS < 4 ? RUN_WORDS : 4;
    static constexpr int LOADS = RUN_WORDS / WIDTH;
    static constexpr int RUN_BYTES = RUN_WORDS * 4 * LANES;
    u32 words[WORDS32];

    // Loads the tile from the memory of all runs.
    __device__ __forceinline__ void load(const u8* codes, const TilePlace& place, int lane) {
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const u8* from = codes + (u64)place.runs[run] * RUN_BYTES + lane * WIDTH * 4;
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                ld_nc_no_allocate<WIDTH>(words + run * RUN_WORDS + i * WIDTH, from + i * LANES * WIDTH * 4);
        }
    }

    __device__ __forceinline__ void expand(u32 (&codes)[EXPANDED]) const {
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < EXPANDED; i++) codes[i] = words[i];
        } else if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < WORDS32; i++) {
                codes[2 * i] = words[i] & 0x0f0f0f0fu;
                codes[2 * i + 1] = words[i] >> 4 & 0x0f0f0f0fu;
            }
        } else { // three words hold four registers: the fourth in their top two bits each
#pragma unroll
            for (int i = 0; i < EXPANDED / 4; i++) {
                const u32 a = words[3 * i], b = words[3 * i + 1], c = words[3 * i + 2];
                codes[4 * i] = a & 0x3f3f3f3fu;
                codes[4 * i + 1] = b & 0x3f3f3f3fu;
                codes[4 * i + 2] = c & 0x3f3f3f3fu;
                codes[4 * i + 3] = (a >> 6 & 0x03030303u) | (b >> 4 & 0x0c0c0c0cu) | (c >> 2 & 0x30303030u);
            }
        }
    }
};
using Keys = Packed<KEY_BITS, KEY_SUB>;
using Values = Packed<VALUE_BITS, VALUE_SUB>;
static_assert(Keys::RUN_BYTES == KEY_RUN_BYTES && Values::RUN_BYTES == VALUE_RUN_BYTES, "the host computes it, too");

// Index, among a lane's codes, of the code for token 16 `half` + 8 `high` + g, word 32 `part` + 16 `middle` + 4 (step ^
// (g & 3)) + l of a key. The host's CodeLayout has the same formula.
__device__ __forceinline__ constexpr int key_code(int half, int part, int step, int middle, int high) {
    constexpr int M = D / KEY_SUB, MIDDLES = M < 32 ? 1 : 2, PARTS = M < 64 ? 1 : 2;
    return ((half * PARTS + part % PARTS) * 4 + step) * MIDDLES * 2 + middle % MIDDLES * 2 + high;
}

// Index, among a lane's codes, of the code for token 4 `half` + l + 8 (2 `high` + `odd`), word 32 `part` + 8 ((step +
// l) & 3) + g of a value. The host's CodeLayout has the same formula.
__device__ __forceinline__ constexpr int value_code(int half, int step, int high, int part, int odd) {
    constexpr int M = D / VALUE_SUB, STEPS = M < 32 ? 2 : 4, PARTS = M < 64 ? 1 : 2;
    const int of_run = RUNS == 2 ? (high * 2 + half) * STEPS + step % STEPS : (half * STEPS + step % STEPS) * 2 + high;
    return (of_run * PARTS + part % PARTS) * 2 + odd;
}

// A word of half `part` of a table row. The constant offset is added to the pointer and not to the address, so that it
// becomes an immediate of the load.
template <int TABLE>
__device__ __forceinline__ u32 look_up(u32 address, int part) {
    return *reinterpret_cast<const u32*>(shared + address + (TABLE + part * (ROW / 2)));
}

// Two words, in the other order in lanes with `swapped`.
__device__ __forceinline__ void exchange(u32& first, u32& second, u32 a, u32 b, bool swapped) {
    first = swapped ? b : a, second = swapped ? a : b;
}

// Selectors for prmt(codes, offsets), which builds an address. Byte 0: byte `b` of the lane's offsets. Byte 1: code
// `k`, the row of 256 bytes. Byte 2: the bit of the table copy. Byte 3: zero.
__device__ __forceinline__ constexpr u32 key_selector(int k, int b) { return 4 + b | k << 4 | 7 << 8 | 15 << 12; }
__device__ __forceinline__ constexpr u32 value_selector(int k, int b) {
    return 4 + b | k << 4 | (12 + b) << 8 | (12 + b) << 12;
}

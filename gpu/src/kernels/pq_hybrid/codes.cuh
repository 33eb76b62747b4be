// Packed codes of one tile in a lane's registers, and addresses of table entries.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"

// A tile stores LOADS times WIDTH words for each lane, as [load][lane][width]; a lane has M codes. Codes of 6 bits are
// those of keys.
template <int M, int BITS>
struct Packed {
    static constexpr int EXPANDED = M / 4; // registers with one code in each byte
    static constexpr int COUNT = M * BITS / 32, WIDTH = BITS == 6 ? COUNT / 3 : COUNT < 4 ? COUNT : 4;
    static constexpr int LOADS = COUNT / WIDTH;
    static constexpr int LANE_BYTES = WIDTH * 4, TILE_BYTES = COUNT * 4 * LANES;
    u32 words[COUNT];

    // `tile`: the bytes of the tile, from lane * LANE_BYTES on.
    __device__ __forceinline__ void load(const u8* tile) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) ld_nc_no_allocate<WIDTH>(words + i * WIDTH, tile + i * LANES * LANE_BYTES);
    }

    // Code `k` of register `i` of the result of `expand` in lane `lane`; `tile`: the bytes of the tile.
    static __device__ __forceinline__ u32 code(const u8* tile, int lane, int i, int k) {
        static_assert(BITS != 6, "values have 4 or 8 bits");
        const int word = BITS == 8 ? i : i / 2;
        const u32 byte = __ldg(tile + (word / WIDTH * LANES + lane) * LANE_BYTES + word % WIDTH * 4 + k);
        return BITS == 8 ? byte : i % 2 ? byte >> 4 : byte & 0xf;
    }

    __device__ __forceinline__ void expand(u32 (&codes)[EXPANDED]) const {
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) codes[i] = words[i];
        } else if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
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

constexpr int ROW = 256; // bytes of a row of a table in shared memory; a code has one or two rows

// Offsets in a row for two steps, and the index of the table half, for `row_address`.
__device__ __forceinline__ u32 pack_offsets(u32 even, u32 odd, u32 half = 0) { return even | odd << 8 | half << 16; }

// Address of code `k` of a register of codes, with the offset of step `step`: byte 0 is the offset, byte 1 the code,
// byte 2 the table half, 2^16 bytes apart.
__device__ __forceinline__ u32 row_address(u32 codes, u32 offsets, int k, int step) {
    return prmt(codes, offsets, (4 + step % 2) | k << 4 | 6 << 8 | 7 << 12);
}

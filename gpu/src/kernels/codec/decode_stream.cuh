// The input of the decoder for a tile: its bytes, the initial states of its lanes, and its stream of words.
#pragma once
#include "codec/tile.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

// A tile that is being decoded.
struct Tile {
    const u8 *at, *end; // remaining bytes
    u32 rows;
    bool bad;    // malformed
    bool stored; // all rows have been stored, meaningful or not
};

// Reads the initial rANS state of every lane: its length in bits, then the bits below its highest one. The stream has
// none for lanes without a channel (`used` is false).
__device__ u32 read_states(Tile& tile, bool used, u32 lanes) {
    const int lane = threadIdx.x % LANES;
    const u32 length_bytes = (lanes + 1) / 2;
    if (warp_uniform(tile.end - tile.at < length_bytes)) return tile.bad = true, LOW;
    const u32 bits = used ? 16 + (tile.at[lane / 2] >> (4 * (lane % 2)) & 15) : 0;
    tile.at += length_bytes;
    const u32 bits_end = warp_inclusive_sum(bits), first = bits_end - bits,
              all = __shfl_sync(FULL, bits_end, LANES - 1);
    if (warp_uniform(tile.end - tile.at < (all + 7) / 8)) return tile.bad = true, LOW;
    u64 window = 0;
    if (used)
        for (u32 byte = first / 8; byte * 8 < first + bits; byte++)
            window |= (u64)tile.at[byte] << (8 * (byte - first / 8));
    if (all % 8 && tile.at[all / 8] >> all % 8) tile.bad = true;
    tile.at += (all + 7) / 8;
    return used ? 1u << bits | ((u32)(window >> first % 8) & ((1u << bits) - 1)) : LOW;
}

// The next words of a warp's stream, double-buffered in two halves: one is loaded while the other is read. Its
// alignment allows adding an offset to the address with a bitwise or.
struct alignas(256) Ring {
    u32 pairs[2 * LANES];
};
constexpr u32 HALF_BYTES = sizeof(Ring) / 2;

// A warp's stream of 16-bit words, which may begin at any byte. Each lane that needs a word takes one, in lane order.
class WordReader {
    Ring& ring;
    u32 address; // of the ring
    const u8 *next, *end;
    u32 prefetched; // the lane's four bytes of the half that follows those in the ring
    u32 taken = 0;  // bytes

    // Loads the lane's four bytes of the next 128. Aligned words past the end are not read and count as zeros.
    __device__ u32 load() {
        const u64 address = (u64)next + 4 * (threadIdx.x % LANES), aligned = address & ~3ull;
        const u32 low = aligned < (u64)end ? *(const u32*)aligned : 0,
                  high = aligned + 4 < (u64)end ? *(const u32*)(aligned + 4) : 0;
        next += HALF_BYTES;
        return __funnelshift_r(low, high, 8 * (address & 3));
    }

    __device__ void fill(u32 half) {
        __syncwarp();
        ring.pairs[half % 2 * LANES + threadIdx.x % LANES] = prefetched;
        prefetched = load();
        __syncwarp();
    }

  public:
    __device__ WordReader(Ring& ring, const u8* from, const u8* to)
        : ring(ring), address(smem_address(&ring)), next(from), end(to) {
        prefetched = load();
        fill(0);
        fill(1);
    }

    __device__ u32 bytes_taken() const { return taken; }

    // rANS renormalization: each lane whose state is below LOW takes a word. Refills a half of the ring once all of its
    // words are taken.
    __device__ __forceinline__ void refill(u32& state) {
        const bool needed = state < LOW;
        const u32 mask = __ballot_sync(FULL, needed);
        const u32 at = taken + 2 * __popc(mask & lanes_below(threadIdx.x % LANES));
        const u32 word = ld_shared_u16(at & (sizeof(Ring) - 1) | address);
        if (needed) state = state << 16 | word;
        const u32 before = taken;
        taken += 2 * __popc(mask);
        if (warp_uniform((before ^ taken) >= HALF_BYTES)) fill(before / HALF_BYTES);
    }
};

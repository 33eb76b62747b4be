// Builds the index of a frame from the lengths of its tiles, for decode.cu to read the output of encode.cu and join.cu.
//
// CPU twin: codec_core::assemble_frame, without header, plane ids and checksums. There is no compile-time shape.
//
// Launch: one block of 256 threads. A warp processes an entry (a block of tokens of a plane) at a time. The floor is
// the launch latency: an index of 8,192 tokens of a layer has 64 entries.
#include "warp.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr u32 HEADER_BYTES = 64, ENTRY_BYTES = 12; // of an entry before the lengths of its tiles

struct Arguments {
    const u16* lengths; // [entry][tile], in units of two bytes
    u8* frame;
    u64* frame_bytes;   // the length of the frame is added
    u32 planes, entries, tiles;
};

extern "C" __global__ void __launch_bounds__(THREADS) codec_index(Arguments a) {
    __shared__ u32 sums[WARPS];
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, entry_bytes = ENTRY_BYTES + 2 * a.tiles;
    u8* index = a.frame + HEADER_BYTES + 4 * a.planes;
    u64 words = 0; // of all entries before those of this round
    for (u32 first = 0; first < a.entries; first += WARPS) {
        const u32 entry = first + warp;
        u8* to = index + (u64)entry * entry_bytes;
        u32 sum = 0;
        if (entry < a.entries)
            for (u32 tile = lane; tile < a.tiles; tile += LANES) {
                const u32 length = a.lengths[(u64)entry * a.tiles + tile];
                u8* at = to + ENTRY_BYTES + 2 * tile;
                at[0] = (u8)length, at[1] = (u8)(length >> 8), sum += length;
            }
        sum = __reduce_add_sync(FULL, sum);
        __syncthreads(); // the sums of the previous round have been read
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        u64 end = words;
        for (u32 i = 0; i < WARPS; i++) {
            words += sums[i];
            if (i <= warp) end += sums[i];
        }
        if (entry < a.entries && lane < 8) to[lane] = (u8)(2 * end >> 8 * lane);
    }
    if (threadIdx.x == 0)
        *a.frame_bytes += HEADER_BYTES + 4 * a.planes + (u64)a.entries * entry_bytes + 4 + 2 * words;
}

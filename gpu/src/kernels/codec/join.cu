// Concatenates coded tiles of varying length from fixed-size slots into one payload: the second kernel of encoding.
//
// CPU twin: codec_core::encode_frame. There is no compile-time shape.
//
// Launch: grid ceil(tiles / count), 256 threads. A block owns `count` tiles, at most COUNT = 64; a warp copies a tile
// at a time. Each block sums the lengths of all tiles before its own, so that no scan kernel is needed. The floor is
// reading and writing the payload.
//
// N.B. With a fixed 256 tiles per block, the 2,048 tiles of a layer's 8,192 tokens took 672 us in 8 blocks.
#include "warp.cuh"

constexpr int THREADS = 256, COUNT = 64;
constexpr u32 AT_ONCE = 8; // words that a lane loads before it stores any

struct Arguments {
    const u8* slots;    // [tile], `slot_bytes` each
    const u16* lengths; // [tile], in units of two bytes
    u8* payload;
    u64* payload_bytes; // written, even if it exceeds `capacity`
    u64 capacity;       // of the payload, in bytes; blocks whose tiles do not fit write nothing
    u32 tiles, slot_bytes, count;
};

extern "C" __global__ void __launch_bounds__(THREADS) codec_join(Arguments a) {
    __shared__ u64 sums[THREADS / LANES];
    __shared__ u64 starts[COUNT + 1]; // in units of two bytes
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 first = blockIdx.x * a.count, count = min(a.tiles - first, a.count);
    u64 before = 0;
    for (u32 i = threadIdx.x; i < first; i += THREADS) before += a.lengths[i];
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) before += __shfl_xor_sync(FULL, before, step);
    if (lane == 0) sums[warp] = before;
    __syncthreads();
    if (warp == 0) {
        u64 start = 0;
        for (int i = 0; i < THREADS / LANES; i++) start += sums[i];
        for (u32 i = 0; i < count; i += LANES) { // 32 tiles at a time: the sum of their lengths fits 32 bits
            const u32 length = i + lane < count ? a.lengths[first + i + lane] : 0;
            const u32 sum = warp_inclusive_sum(length);
            if (i + lane < count) starts[i + lane] = start + sum - length;
            start += __shfl_sync(FULL, sum, LANES - 1);
        }
        if (lane == 0) starts[count] = start;
    }
    __syncthreads();
    if (threadIdx.x == 0 && first + count == a.tiles) *a.payload_bytes = 2 * starts[count];
    if (2 * starts[count] > a.capacity) return;
    for (u32 tile = warp; tile < count; tile += THREADS / LANES) {
        const u16* from = (const u16*)(a.slots + (u64)(first + tile) * a.slot_bytes);
        u16* to = (u16*)a.payload + starts[tile];
        const u32 length = (u32)(starts[tile + 1] - starts[tile]);
        for (u32 i = lane; i < length; i += AT_ONCE * LANES) {
            u16 words[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++)
                if (i + j * LANES < length) words[j] = from[i + j * LANES];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++)
                if (i + j * LANES < length) to[i + j * LANES] = words[j];
        }
    }
}

// Rows by number, from device memory or, over the bus, from pinned host memory.
//
// Compile-time shape: ROW_BYTES, a multiple of 16. A lane moves 16 bytes of IN_FLIGHT rows at a time: what bounds it on
// the bus is how many reads are under way.
#include "types.cuh"

constexpr int PARTS = ROW_BYTES / 16, THREADS = 256, IN_FLIGHT = 8;

struct Arguments {
    const uint4* keys;   // [head][row][PARTS]
    const uint4* values; // the same
    const u32* rows;     // [head][list_len]
    const u32* places;   // [head][list_len]: where each goes, or null for its place in the list
    const u32* counts;   // [head]: entries of the lists, or null for list_len
    uint4* keys_out;     // [head][out_len][PARTS]
    uint4* values_out;
    u64 head_rows, list_len, out_len;
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Arguments a) {
    const u32 head = blockIdx.y;
    const bool is_values = blockIdx.z;
    const u32* rows = a.rows + head * a.list_len;
    const u32* places = a.places ? a.places + head * a.list_len : nullptr;
    const uint4* from = (is_values ? a.values : a.keys) + head * a.head_rows * PARTS;
    uint4* to = (is_values ? a.values_out : a.keys_out) + head * a.out_len * PARTS;
    const u64 count = a.counts ? a.counts[head] : a.list_len, parts = count * PARTS, step = (u64)gridDim.x * THREADS;
    for (u64 first = (u64)blockIdx.x * THREADS + threadIdx.x; first < parts; first += step * IN_FLIGHT) {
        uint4 data[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 part = first + i * step;
            if (part < parts) data[i] = from[(u64)rows[part / PARTS] * PARTS + part % PARTS];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 part = first + i * step;
            if (part < parts) to[(places ? places[part / PARTS] : part / PARTS) * PARTS + part % PARTS] = data[i];
        }
    }
}

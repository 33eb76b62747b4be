// Gathers rows by index, from device memory or, over PCIe, from pinned host memory.
//
// Compile-time shape: ROW_BYTES, a multiple of 16. Launch: grid (blocks, head, keys or values, then the same for held
// rows), THREADS threads, which stride over the 16-byte chunks of all listed rows of the head. A thread has IN_FLIGHT
// loads of 16 bytes in flight: over PCIe, the number of outstanding reads limits the throughput. Two blocks a
// multiprocessor are enough for that, and leave room for the next kernel, which may start at once.
#include "primitives_sm80.cuh"

constexpr int CHUNKS = ROW_BYTES / 16, THREADS = 128, IN_FLIGHT = 4;

// Rows of earlier launches on the device.
struct Held {
    uint4* keys; // [head][len][CHUNKS], or null for none
    uint4* values;
    const u32* slots;  // [head][list_len]: the held row of each output row
    const u32* hits;   // [head][list_len]: output rows that are held; the others are listed
    const u32* counts; // [head]: how many are held
    u64 len;
};

struct Arguments {
    const uint4* keys;   // [head][row][CHUNKS]
    const uint4* values; // as keys
    const u32* rows;     // [head][list_len]: row indices
    const u32* places;   // [head][list_len]: output row of each, or null for its index in the list
    const u32* counts;   // [head]: rows in the list, or null for list_len
    uint4* keys_out;     // [head][out_len][CHUNKS]
    uint4* values_out;
    u64 head_rows, list_len, out_len;
    Held held;
};

extern "C" __global__ void __launch_bounds__(THREADS, 8) gather(const Arguments a) {
    pdl_wait();
    pdl_trigger();
    const u32 head = blockIdx.y;
    const bool is_values = blockIdx.z % 2, is_hits = blockIdx.z / 2;
    const u64 list = head * a.list_len;
    const u32* slots = a.held.slots + list;
    const u32* rows = is_hits ? nullptr : a.rows + list;
    const u32* places = is_hits ? a.held.hits + list : a.places ? a.places + list : nullptr;
    uint4* held = a.held.keys ? (is_values ? a.held.values : a.held.keys) + head * a.held.len * CHUNKS : nullptr;
    const uint4* from = is_hits ? held : (is_values ? a.values : a.keys) + head * a.head_rows * CHUNKS;
    uint4* to = (is_values ? a.values_out : a.keys_out) + head * a.out_len * CHUNKS;
    const u32* counts = is_hits ? a.held.counts : a.counts;
    const u64 count = counts ? counts[head] : a.list_len, chunks = count * CHUNKS, step = (u64)gridDim.x * THREADS;
    for (u64 first = (u64)blockIdx.x * THREADS + threadIdx.x; first < chunks; first += step * IN_FLIGHT) {
        uint4 data[IN_FLIGHT];
        u64 place[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 entry = (first + i * step) / CHUNKS;
            if (entry >= count) continue;
            place[i] = places ? places[entry] : entry;
            const u32 row = is_hits ? slots[place[i]] : rows[entry];
            data[i] = from[(u64)row * CHUNKS + (first + i * step) % CHUNKS];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 entry = (first + i * step) / CHUNKS, part = (first + i * step) % CHUNKS;
            if (entry >= count) continue;
            to[place[i] * CHUNKS + part] = data[i];
            if (held && !is_hits) held[slots[place[i]] * CHUNKS + part] = data[i];
        }
    }
}

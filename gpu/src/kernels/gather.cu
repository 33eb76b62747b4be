// Gathers rows by index, from device memory or, over PCIe, from pinned host memory.
//
// Compile-time shape: ROW_BYTES, a multiple of 16. Launch: grid (blocks, head, keys and values), THREADS threads, which
// stride over the 16-byte chunks of all listed rows of the head. A thread has IN_FLIGHT loads of 16 bytes in flight:
// over PCIe, the number of outstanding reads limits the throughput, and two blocks per multiprocessor are enough. The
// next kernel may start at once: with 40 registers per thread, even three blocks leave room for it.
#include "primitives_sm80.cuh"

constexpr int CHUNKS = ROW_BYTES / 16, THREADS = 128, IN_FLIGHT = 4;

struct Arguments {
    const uint4* keys;   // [head][row][CHUNKS]
    const uint4* values; // as keys
    const u32* rows;     // [head][list_len]: row indices
    const u32* places;   // [head][list_len]: output row of each, or null for its index in the list
    const u32* counts;   // [head]: rows in the list, or null for list_len
    uint4* keys_out;     // [head][out_len][CHUNKS]
    uint4* values_out;
    u64 head_rows, list_len, out_len;
    const u8* prefetch; // bytes to prefetch into L2 while rows cross PCIe
    u64 prefetch_len;
};

extern "C" __global__ void __launch_bounds__(THREADS, 12) gather(const Arguments a) {
    // Before the wait: L2 is coherent, so the previous kernel may still write these bytes.
    const u64 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const u64 blocks = (u64)gridDim.z * gridDim.y * gridDim.x;
    prefetch_global_l2(a.prefetch, a.prefetch_len, block * THREADS + threadIdx.x, blocks * THREADS);
    pdl_wait();
    pdl_trigger();
    const u32 head = blockIdx.y;
    const bool is_values = blockIdx.z;
    const u32* rows = a.rows + head * a.list_len;
    const u32* places = a.places ? a.places + head * a.list_len : nullptr;
    const uint4* from = (is_values ? a.values : a.keys) + head * a.head_rows * CHUNKS;
    uint4* to = (is_values ? a.values_out : a.keys_out) + head * a.out_len * CHUNKS;
    const u64 count = a.counts ? a.counts[head] : a.list_len, chunks = count * CHUNKS, step = (u64)gridDim.x * THREADS;
    for (u64 first = (u64)blockIdx.x * THREADS + threadIdx.x; first < chunks; first += step * IN_FLIGHT) {
        uint4 data[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 chunk = first + i * step;
            if (chunk < chunks) data[i] = from[(u64)rows[chunk / CHUNKS] * CHUNKS + chunk % CHUNKS];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 chunk = first + i * step;
            if (chunk < chunks)
                to[(places ? places[chunk / CHUNKS] : chunk / CHUNKS) * CHUNKS + chunk % CHUNKS] = data[i];
        }
    }
}

// Gathers rows by index, from device memory or, over PCIe, from host memory. On sm_90 gather_sm90.cu replaces
// this kernel.
//
// gather.cuh has the compile-time shape. Launch: THREADS threads, which stride over the 16-byte chunks of all listed
// rows of the head. A thread has IN_FLIGHT loads of 16 bytes in flight: over PCIe, the number of outstanding reads
// limits the throughput, and two blocks per multiprocessor are enough.
#include "gather.cuh"

constexpr int CHUNKS = ROW_BYTES / 16, THREADS = 128, IN_FLIGHT = 4;

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Arguments a) {
    a.prefetch_to_l2<THREADS>();
    const Rows rows(a);
    const u64 chunks = rows.count * CHUNKS, step = (u64)gridDim.x * THREADS;
    for (u64 first = (u64)blockIdx.x * THREADS + threadIdx.x; first < chunks; first += step * IN_FLIGHT) {
        uint4 data[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 chunk = first + i * step;
            if (chunk < chunks)
                data[i] = reinterpret_cast<const uint4*>(rows.from(chunk / CHUNKS))[chunk % CHUNKS];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u64 chunk = first + i * step;
            if (chunk < chunks) reinterpret_cast<uint4*>(rows.to(chunk / CHUNKS))[chunk % CHUNKS] = data[i];
        }
    }
}

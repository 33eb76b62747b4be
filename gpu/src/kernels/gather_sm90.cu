// gather.cu on sm_90: rows by bulk copies.
//
// gather.cuh has the compile-time shape, to which PIECE is added: a thread has up to PIECE bytes of one row in flight.
// Launch: LANES threads. Bulk copies bypass L1. Loads that cross PCIe slowed the loads of other kernels on the
// multiprocessor, such as the next one, which may start at once: L1 seems to return them in order.
#include "gather.cuh"
#include "mbarrier_sm90.cuh"

constexpr u32 PIECES = (ROW_BYTES + PIECE - 1) / PIECE;

extern "C" __global__ void __launch_bounds__(LANES) gather(const Arguments a) {
    __shared__ __align__(128) u8 slots[LANES][PIECE];
    __shared__ u64 arrived;
    if (threadIdx.x == 0) mbarrier_init(&arrived, LANES);
    __syncwarp();
    pdl_wait();
    pdl_trigger();
    const Rows rows(a);
    // The block's pieces, in rounds of equal size: few pieces in a last round would leave the link idle.
    const u64 pieces = rows.count * PIECES, end = pieces * (blockIdx.x + 1) / gridDim.x;
    u64 first = pieces * blockIdx.x / gridDim.x;
    const u64 rounds = max((end - first + LANES - 1) / LANES, 1ull), round = (end - first + rounds - 1) / rounds;
    for (u32 phase = 0; phase < rounds; first += round) {
        const u64 i = first + threadIdx.x;
        const u32 offset = i % PIECES * PIECE, bytes = min((u32)PIECE, ROW_BYTES - offset);
        const bool exists = threadIdx.x < round && i < end;
        if (exists) {
            mbarrier_arrive_expect_tx(&arrived, bytes);
            cp_async_bulk(slots[threadIdx.x], rows.from(i / PIECES) + offset, bytes, &arrived);
        } else {
            mbarrier_arrive(&arrived);
        }
        if (phase == 0) a.prefetch_to_l2<LANES>(); // now that the first rows are on their way
        mbarrier_wait(&arrived, phase++);
        if (exists) bulk_store(rows.to(i / PIECES) + offset, slots[threadIdx.x], bytes);
        bulk_store_commit();
        bulk_store_wait_read<0>();
    }
    bulk_store_wait<0>();
}

// `load` of int8_rows.cu on sm_90: records by bulk copies, as in gather_sm90.cu of `kv-gpu`.
//
// Launch: grid (any number, heads), LANES threads, which have a record each in flight.
#include "int8_rows.cuh"
#include "mbarrier_sm90.cuh"

extern "C" __global__ void __launch_bounds__(LANES) load(const LoadArguments a) {
    __shared__ __align__(128) u8 slots[LANES][RECORD];
    __shared__ u64 arrived;
    if (threadIdx.x == 0) mbarrier_init(&arrived, LANES);
    __syncwarp();
    pdl_wait();
    pdl_trigger();
    const Tokens tokens(a, blockIdx.y);
    const u32 lane = threadIdx.x, end = (u64)tokens.count * (blockIdx.x + 1) / gridDim.x;
    u32 first = (u64)tokens.count * blockIdx.x / gridDim.x;
    const u32 rounds = max((end - first + LANES - 1) / LANES, 1u), round = (end - first + rounds - 1) / rounds;
    for (u32 phase = 0; phase < rounds; first += round) {
        const bool exists = lane < round && first + lane < end;
        const u32 row = exists ? tokens.place(first + lane) : 0;
        if (exists) {
            mbarrier_arrive_expect_tx(&arrived, RECORD);
            cp_async_bulk(slots[lane], tokens.record(first + lane), RECORD, &arrived);
        } else {
            mbarrier_arrive(&arrived);
        }
        if (phase == 0) { // now that the first records are on their way
            const u64 block = blockIdx.y * gridDim.x + blockIdx.x, blocks = (u64)gridDim.y * gridDim.x;
            prefetch_global_l2(a.prefetch, a.prefetch_len, block * LANES + lane, blocks * LANES);
        }
        mbarrier_wait(&arrived, phase++);
#pragma unroll 4
        for (u32 i = 0; i < LANES; i += LANES / SHARERS) {
            const u32 slot = i + lane / SHARERS, to = __shfl_sync(FULL, row, slot);
            const bool stored = __shfl_sync(FULL, exists, slot);
            if (stored) tokens.dequantize(reinterpret_cast<const uint4*>(slots[slot])[lane % SHARERS], to, lane);
        }
        __syncwarp(); // the slots are read
    }
}

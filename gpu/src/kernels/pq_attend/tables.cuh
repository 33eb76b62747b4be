// Copies of a head's key and value tables to shared memory: cp.async.bulk with an mbarrier each on sm_90, cp.async on
// sm_80. `phase` is the parity of the barriers: it changes with every head of the block.
#pragma once
#include "mbarrier_sm90.cuh"
#include "pq_attend/shape.cuh"
#include "warp.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int LOADERS = THREADS - LANES; // threads that issue copies: all but warp 0
#endif

// Starts copying a table. On sm_90 it uses cp.async.bulk: 16 cp.async per thread kept the load/store units busy for
// 2,000 cycles. The blocks of a head start together, so each one begins at a different piece to spread the requests
// over L2. Warp 0 plans meanwhile; all other warps issue, since one warp alone took 9 us more for rows of 64
// components.
template <int ROWS>
__device__ __forceinline__ void load_table(u8* to, const u8* tables, u32 head, int barrier) {
    const u8* from = tables + (u64)head * ROWS * WORDS * 4;
    const Lane lane;
#if __CUDA_ARCH__ >= 900
    if (warp_uniform(lane.warp == 0)) return;
    const int loader = lane.thread - LANES;
    constexpr int PARTS = 16, PIECE_ROWS = WORDS * 4 == ROW ? ROWS / PARTS : 1, PIECES = ROWS / PIECE_ROWS;
    static_assert(ROWS % PARTS == 0, "as many rows in each");
#pragma unroll
    for (int first = 0; first < PIECES; first += LOADERS) {
        if (first + loader >= PIECES) break;
        const int row = (first + loader + blockIdx.x * (PIECES / PARTS)) % PIECES * PIECE_ROWS;
        cp_async_bulk(to + row * ROW, from + row * WORDS * 4, PIECE_ROWS * WORDS * 4, shared + barrier);
    }
#else
    for (int i = lane.thread; i < ROWS * CHUNKS; i += THREADS)
        cp_async_16(to + i / CHUNKS * ROW + i % CHUNKS * 16, from + i * 16);
#endif
}

// Called once, by all threads.
__device__ __forceinline__ void init_table_barriers() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES) mbarrier_init(shared + KEY_BARRIER, 1), mbarrier_init(shared + VALUE_BARRIER, 1);
    __syncthreads();
#endif
}

__device__ __forceinline__ void load_key_table(const Arguments& a, u32 head) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES) mbarrier_arrive_expect_tx(shared + KEY_BARRIER, KEY_ROWS * WORDS * 4);
#endif
    load_table<KEY_ROWS>(shared + KEY_TABLE, a.key_table, head, KEY_BARRIER);
}

__device__ __forceinline__ void load_value_table(const Arguments& a, u32 head) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES) mbarrier_arrive_expect_tx(shared + VALUE_BARRIER, VALUE_ROWS * WORDS * 4);
#endif
    load_table<VALUE_ROWS>(shared + VALUE_TABLE, a.value_table, head, VALUE_BARRIER);
}

// Waits for the key table. A block must not exit before its copies have completed.
__device__ __forceinline__ void wait_for_key_table(u32 phase) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(shared + KEY_BARRIER, phase);
#else
    cp_async_wait_all(); // waits for the copies of both tables
    __syncthreads();
#endif
}

// Waits for the value table, whose copy must have been started; it, too, must complete before the block exits.
__device__ __forceinline__ void wait_for_value_table(u32 phase) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(shared + VALUE_BARRIER, phase);
#endif
}

// Waits for the key table and writes its second copy, in which the 16-word halves of every 32 words are swapped. The
// caller synchronizes the block before the copy is read.
__device__ __forceinline__ void finish_key_table(u32 phase) {
    wait_for_key_table(phase);
    if constexpr (COPIES == 2) {
        constexpr int COPY = KEY_TABLE + (FAR_COPY ? COPY_DISTANCE : ROW / 2), CHUNK_COUNT = KEY_ROWS * CHUNKS;
        // Chunks in flight per thread. More of them, or an unrolled loop, need more registers than 16 warps have here;
        // launches took 1 to 2 % longer with 6.
        constexpr int BATCH = 2;
        const Lane lane;
#pragma unroll 1
        for (int first = 0; first < CHUNK_COUNT; first += BATCH * THREADS) {
            uint4 chunks[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = first + k * THREADS + lane.thread;
                if (i < CHUNK_COUNT)
                    chunks[k] =
                        *reinterpret_cast<const uint4*>(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = first + k * THREADS + lane.thread;
                if (i < CHUNK_COUNT)
                    *reinterpret_cast<uint4*>(shared + COPY + i / CHUNKS * ROW + (i % CHUNKS ^ 4) * 16) = chunks[k];
            }
        }
    }
}

// The head's tables in shared memory.
#pragma once
#include "mbarrier_sm90.cuh"
#include "pq_attend/shape.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int LOADERS = THREADS - LANES; // all threads but those of the first warp
#endif

// Asks for a table. On sm_90 the copy engine brings it, for 16 copies a thread kept the load units busy for 2,000
// cycles, in pieces, the first of which differs from block to block: the blocks of a head start together, and would all
// ask the same part of the second-level cache. The first warp has no part in it, so that it can plan meanwhile. All
// others have: rows of 64 components by one warp took 9 us more.
template <int ROWS>
__device__ __forceinline__ void load_table(u8* to, const u8* tables, int barrier) {
    const u8* from = tables + (u64)Place().head * ROWS * WORDS * 4;
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

__device__ __forceinline__ void load_key_table(const Arguments& a) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES) {
        mbarrier_init(shared + KEYS_HERE, 1);
        mbarrier_init(shared + VALUES_HERE, 1);
        mbarrier_arrive_expect_tx(shared + KEYS_HERE, KEY_ROWS * WORDS * 4);
        mbarrier_arrive_expect_tx(shared + VALUES_HERE, VALUE_ROWS * WORDS * 4);
    }
    __syncthreads();
#endif
    load_table<KEY_ROWS>(shared + KEY_TABLE, a.key_table, KEYS_HERE);
}

__device__ __forceinline__ void load_value_table(const Arguments& a) {
    load_table<VALUE_ROWS>(shared + VALUE_TABLE, a.value_table, VALUES_HERE);
}

// A block must not end before it has come.
__device__ __forceinline__ void wait_for_key_table() {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(shared + KEYS_HERE, 0);
#else
    cp_async_wait_all(); // of all
    __syncthreads();
#endif
}

// Nor before this one has, once it was asked for.
__device__ __forceinline__ void wait_for_value_table() {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(shared + VALUES_HERE, 0);
#endif
}

// Waits for the keys', and makes the second copy of it: the halves of every 32 words swapped.
__device__ __forceinline__ void finish_key_table() {
    wait_for_key_table();
    if constexpr (COPIES == 2) {
        constexpr int COPY = KEY_TABLE + (FAR_COPY ? COPY_DISTANCE : ROW / 2), CHUNK_COUNT = KEY_ROWS * CHUNKS;
        constexpr int BATCH = 3; // on their way at once; with 6, launches took 1 to 2 % longer
        const Lane lane;
#pragma unroll
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
        __syncthreads();
    }
}

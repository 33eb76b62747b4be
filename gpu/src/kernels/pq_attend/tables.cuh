// Copies of a head's key and value tables to shared memory: cp.async.bulk with an mbarrier each on sm_90, cp.async on
// sm_80. `phase` is the parity of the barriers: it changes with every head of the block.
#pragma once
#include "mbarrier_sm90.cuh"
#include "pq_attend/shape.cuh"
#include "warp.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int LOADERS = THREADS - LANES; // threads that issue copies: all but warp 0
constexpr int STARTS = 16;               // places of a table at which blocks begin to copy it
#endif

// Starts copying a table. On sm_90 it uses cp.async.bulk: 16 cp.async per thread kept the load/store units busy for
// 2,000 cycles. The blocks of a head start together, so each one begins at a different piece to spread the requests
// over L2. Each of PARTS equal parts of the table has an mbarrier. Warp 0 plans meanwhile; all other warps issue, since
// one warp alone took 9 us more for rows of 64 components.
template <int ROWS, int PARTS>
__device__ __forceinline__ void load_table(u8* to, const u8* tables, u32 head, int barriers) {
    const u8* from = tables + (u64)head * ROWS * WORDS * 4;
    const Lane lane;
#if __CUDA_ARCH__ >= 900
    if (warp_uniform(lane.warp == 0)) return;
    const int loader = lane.thread - LANES;
    constexpr int PIECE_ROWS = WORDS * 4 == ROW ? ROWS / STARTS : 1, PIECES = ROWS / PIECE_ROWS;
    static_assert(ROWS % STARTS == 0 && STARTS % PARTS == 0, "as many rows in each");
#pragma unroll
    for (int first = 0; first < PIECES; first += LOADERS) {
        if (first + loader >= PIECES) break;
        const int row = (first + loader + blockIdx.x * (PIECES / STARTS)) % PIECES * PIECE_ROWS;
        cp_async_bulk(to + row * ROW, from + row * WORDS * 4, PIECE_ROWS * WORDS * 4,
                      shared + barriers + row / (ROWS / PARTS) * 8);
    }
#else
    for (int i = lane.thread; i < ROWS * CHUNKS; i += THREADS)
        cp_async_16(to + i / CHUNKS * ROW + i % CHUNKS * 16, from + i * 16);
#endif
}

// Called once, by all threads. N.B. One thread sets up all barriers: four threads with one each led ptxas to another
// order of the loop over tiles, which took 3 % longer.
__device__ __forceinline__ void init_table_barriers() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES)
#pragma unroll
        for (int i = 0; i <= KEY_PARTS; i++) mbarrier_init(shared + KEY_BARRIERS + 8 * i, 1); // and VALUE_BARRIER
    __syncthreads();
#endif
}

__device__ __forceinline__ void load_key_table(const Arguments& a, u32 head) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES)
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++)
            mbarrier_arrive_expect_tx(shared + KEY_BARRIERS + 8 * part, KEY_ROWS / KEY_PARTS * WORDS * 4);
#endif
    load_table<KEY_ROWS, KEY_PARTS>(shared + KEY_TABLE, a.key_table, head, KEY_BARRIERS);
}

__device__ __forceinline__ void load_value_table(const Arguments& a, u32 head) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == LANES) mbarrier_arrive_expect_tx(shared + VALUE_BARRIER, VALUE_ROWS * WORDS * 4);
#endif
    load_table<VALUE_ROWS, 1>(shared + VALUE_TABLE, a.value_table, head, VALUE_BARRIER);
}

// Waits for a part of the key table.
__device__ __forceinline__ void wait_for_key_part(int part, u32 phase) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(shared + KEY_BARRIERS + 8 * part, phase);
#endif
}

// Waits for the key table. A block must not exit before its copies have completed.
__device__ __forceinline__ void wait_for_key_table(u32 phase) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int part = 0; part < KEY_PARTS; part++) mbarrier_wait(shared + KEY_BARRIERS + 8 * part, phase);
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

// Waits for the key table and writes its second copy, in which the 16-word halves of every 32 words are swapped, part
// by part, as the parts arrive. The caller synchronizes the block before the copy is read.
__device__ __forceinline__ void finish_key_table(u32 phase) {
#if __CUDA_ARCH__ >= 900
    if (COPIES == 1) wait_for_key_table(phase);
    // The first part that the block has begun to copy with its first row.
    const int first_part = (blockIdx.x % STARTS + STARTS / KEY_PARTS - 1) / (STARTS / KEY_PARTS) % KEY_PARTS;
#else
    wait_for_key_table(phase);
    const int first_part = 0;
#endif
    if constexpr (COPIES == 2) {
        constexpr int COPY = KEY_TABLE + (FAR_COPY ? COPY_DISTANCE : ROW / 2);
        constexpr int CHUNK_COUNT = KEY_ROWS * CHUNKS, PART_CHUNKS = CHUNK_COUNT / KEY_PARTS;
        // Chunks in flight per thread. More of them, or an unrolled loop, need more registers than 16 warps have here;
        // launches took 1 to 2 % longer with 6.
        constexpr int BATCH = 2;
        const Lane lane;
#pragma unroll 1
        for (int step = 0; step < CHUNK_COUNT; step += BATCH * THREADS) {
            uint4 chunks[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int n = step + k * THREADS + lane.thread, i = (n + first_part * PART_CHUNKS) % CHUNK_COUNT;
                if (n < CHUNK_COUNT) {
                    wait_for_key_part(i / PART_CHUNKS, phase);
                    chunks[k] =
                        *reinterpret_cast<const uint4*>(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16);
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int n = step + k * THREADS + lane.thread, i = (n + first_part * PART_CHUNKS) % CHUNK_COUNT;
                if (n < CHUNK_COUNT)
                    *reinterpret_cast<uint4*>(shared + COPY + i / CHUNKS * ROW + (i % CHUNKS ^ 4) * 16) = chunks[k];
            }
        }
    }
}

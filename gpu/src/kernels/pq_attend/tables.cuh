// The head's tables in shared memory.

// Asks for both. On sm_90 the copy engine brings them: 16 copies a thread kept the load units busy for 2,000 cycles, and the first
// codes and queries behind them.
__device__ __forceinline__ void load_tables(const Arguments& a) {
    const Lane lane;
    const Place place;
    const u8* keys = a.key_table + (u64)place.head * KEY_ROWS * WORDS * 4;
    const u8* values = a.value_table + (u64)place.head * VALUE_ROWS * WORDS * 4;
#if __CUDA_ARCH__ >= 900
    if (lane.thread == 0) {
        make_barrier(shared + BARRIER, 1);
        arrive_expecting(shared + BARRIER, (KEY_ROWS + VALUE_ROWS) * WORDS * 4);
    }
    __syncthreads();
    if constexpr (WORDS * 4 == ROW) {
        if (lane.thread == 0) {
            copy_in_bulk(shared + KEY_TABLE, keys, KEY_ROWS * ROW, shared + BARRIER);
            copy_in_bulk(shared + VALUE_TABLE, values, VALUE_ROWS * ROW, shared + BARRIER);
        }
    } else {
        for (int i = lane.thread; i < KEY_ROWS; i += THREADS)
            copy_in_bulk(shared + KEY_TABLE + i * ROW, keys + i * WORDS * 4, WORDS * 4, shared + BARRIER);
        for (int i = lane.thread; i < VALUE_ROWS; i += THREADS)
            copy_in_bulk(shared + VALUE_TABLE + i * ROW, values + i * WORDS * 4, WORDS * 4, shared + BARRIER);
    }
#else
    for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, keys + i * 16);
    for (int i = lane.thread; i < VALUE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + VALUE_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, values + i * 16);
#endif
}

// A block must not end before they have come.
__device__ __forceinline__ void wait_for_tables() {
#if __CUDA_ARCH__ >= 900
    wait_for_phase(shared + BARRIER, 0);
#else
    wait_for_copies();
#endif
}

// Waits for them, and makes the second copy of the keys': the halves of every 32 words swapped.
__device__ __forceinline__ void finish_tables() {
    wait_for_tables();
    __syncthreads();
    if constexpr (COPIES == 2) {
        const Lane lane;
#pragma unroll 4
        for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16);
            constexpr int COPY = KEY_TABLE + (FAR_COPY ? COPY_DISTANCE : ROW / 2);
            *reinterpret_cast<uint4*>(shared + COPY + i / CHUNKS * ROW + (i % CHUNKS ^ 4) * 16) = chunk;
        }
        __syncthreads();
    }
}

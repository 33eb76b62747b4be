// Asks for both tables of a head.
__device__ __forceinline__ void load_tables(const Arguments& a) {
    const Lane lane;
    const Place place(a);
    const u8* keys = a.key_table + (u64)place.head * KEY_ROWS * WORDS * 4;
    const u8* values = a.value_table + (u64)place.head * VALUE_ROWS * WORDS * 4;
    for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, keys + i * 16);
    for (int i = lane.thread; i < VALUE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + VALUE_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, values + i * 16);
}

// Waits for them, and makes the second copy of the keys': the halves of every 32 words swapped.
__device__ __forceinline__ void finish_tables() {
    wait_for_copies();
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

// The head's tables in shared memory.

#if __CUDA_ARCH__ >= 900
constexpr int LOADERS = THREADS - LANES; // all threads but those of the first warp

// Has the copy engine bring a table. In pieces, the first of which differs from block to block: the blocks of a head start together, and
// would all ask the same part of the second-level cache.
template <int ROWS>
__device__ __forceinline__ void load_table(u8* to, const u8* from, void* barrier, int loader) {
    constexpr int PARTS = 16, PIECE_ROWS = WORDS * 4 == ROW ? ROWS / PARTS : 1, PIECES = ROWS / PIECE_ROWS;
    static_assert(ROWS % PARTS == 0, "as many rows in each");
#pragma unroll
    for (int first = 0; first < PIECES; first += LOADERS) {
        if (first + loader >= PIECES) break;
        const int row = (first + loader + blockIdx.x * (PIECES / PARTS)) % PIECES * PIECE_ROWS;
        copy_in_bulk(to + row * ROW, from + row * WORDS * 4, PIECE_ROWS * WORDS * 4, barrier);
    }
}
#endif

// Asks for both. On sm_90 the copy engine brings them, for 16 copies a thread kept the load units busy for 2,000 cycles, and the first warp
// has no part in it, so that it can plan meanwhile. All others have: rows of 64 components by one warp took 9 us more.
__device__ __forceinline__ void load_tables(const Arguments& a) {
    const Lane lane;
    const Place place;
    const u8* keys = a.key_table + (u64)place.head * KEY_ROWS * WORDS * 4;
    const u8* values = a.value_table + (u64)place.head * VALUE_ROWS * WORDS * 4;
#if __CUDA_ARCH__ >= 900
    const int loader = lane.thread - LANES;
    if (loader == 0) {
        make_barrier(shared + KEYS_HERE, 1);
        make_barrier(shared + VALUES_HERE, 1);
        arrive_expecting(shared + KEYS_HERE, KEY_ROWS * WORDS * 4);
        arrive_expecting(shared + VALUES_HERE, VALUE_ROWS * WORDS * 4);
    }
    __syncthreads();
    if (uniform(lane.warp == 0)) return;
    load_table<KEY_ROWS>(shared + KEY_TABLE, keys, shared + KEYS_HERE, loader);
    load_table<VALUE_ROWS>(shared + VALUE_TABLE, values, shared + VALUES_HERE, loader);
#else
    for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, keys + i * 16);
    for (int i = lane.thread; i < VALUE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + VALUE_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, values + i * 16);
#endif
}

__device__ __forceinline__ void wait_for_key_table() {
#if __CUDA_ARCH__ >= 900
    wait_for_phase(shared + KEYS_HERE, 0);
#else
    wait_for_copies(); // of both
#endif
}

// A block must not end before it has come.
__device__ __forceinline__ void wait_for_value_table() {
#if __CUDA_ARCH__ >= 900
    wait_for_phase(shared + VALUES_HERE, 0);
#endif
}

// Waits for the keys', and makes the second copy of it: the halves of every 32 words swapped.
__device__ __forceinline__ void finish_key_table() {
    wait_for_key_table();
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

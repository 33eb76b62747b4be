// Radix select of a row's k highest keys over blocks of CHUNK tokens: the second half of search.cu and of
// pq_hybrid/select.cu, which compute the keys.
//
// Compile-time shape: that of keys.cuh; ROW_BYTES.
// 1. The kernel that writes the keys counts them by their highest 11 bits in `Row::histogram`.
// 2. `collect` copies the keys that share those bits with the k-th highest key.
// 3. `write` finds the threshold among them and writes the selected tokens in order. A block spins on the counts of the
//    preceding chunks, which belong to blocks that started earlier.
// Both have SELECT_THREADS threads and grid (chunk, row).
#pragma once
#include "pq_search/keys.cuh"
#include "primitives_sm80.cuh"

constexpr int CHUNK = 8192;
// Threads that select need fewer registers than threads that score, so these blocks are larger.
constexpr int SELECT_THREADS = 1024, TOKENS_PER_THREAD = CHUNK / SELECT_THREADS;
constexpr int HIGH_BUCKETS = 2048, LOW_BUCKETS = 1024, LOW_BITS = 10; // radix digits of a key: 11, 10 and 10 bits
static_assert(1 << (KEY_WIDTH - 2 * LOW_BITS) == HIGH_BUCKETS && 1 << LOW_BITS == LOW_BUCKETS, "the digits make a key");

// State of a row between the kernels.
struct alignas(16) Row {
    u32 histogram[HIGH_BUCKETS];
    u32 candidates; // number of keys in `Workspace::candidates`
    u32 high_bits;  // highest 11 bits of the k-th highest key, which all candidates share
    u32 k;          // rank of that key among the candidates; 0 if `threshold` is already known
    Threshold threshold;
    u32 started; // blocks of `write` that have started
};

static_assert(sizeof(Row) == ROW_BYTES, "the host reserves it");

// The state of one row that the kernels of a selection share.
struct Selection {
    u32* keys;       // [capacity]
    u32* candidates; // [capacity]: keys with the highest bits of the k-th
    Row* row;
    u64* chunk_counts; // [chunk]: COUNTS_READY, tokens above the threshold (31 bits), tokens equal to it (32 bits)

    static __device__ __forceinline__ u64 bytes(u64 rows, u64 chunks) {
        return rows * (chunks * (CHUNK * 8 + 8) + sizeof(Row));
    }
    // The memory of `row`, one of `rows`, in a workspace at `at`.
    __device__ __forceinline__ Selection(u8* at, u64 rows, u32 row, u64 chunks) {
        const u64 capacity = chunks * CHUNK;
        keys = (u32*)at + row * capacity, at += rows * capacity * 4;
        candidates = (u32*)at + row * capacity, at += rows * capacity * 4;
        this->row = (Row*)at + row, at += rows * sizeof(Row);
        chunk_counts = (u64*)at + row * chunks;
    }
    // Clears the state, with all threads of one block.
    template <int THREADS>
    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < HIGH_BUCKETS; i += THREADS) row->histogram[i] = 0;
        if (threadIdx.x == 0) row->candidates = 0, row->started = 0;
    }
};

// A thread's keys of a chunk.
struct Keys {
    u32 key[TOKENS_PER_THREAD];

    __device__ __forceinline__ Keys(const u32* keys, u32 token, u32 end) {
#pragma unroll
        for (int i = 0; i < TOKENS_PER_THREAD; i += 4)
            if (token + i < end) ld_nc_no_allocate<4>(key + i, keys + token + i);
    }
};

__device__ __forceinline__ void collect(const SelectRange& range, const Selection& work) {
    __shared__ u32 collected[CHUNK];
    __shared__ u32 count, place;
    const u32 first = blockIdx.x * CHUNK, lane = threadIdx.x % LANES;
    if (range.k == 0 || range.k == range.end - range.first) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            work.row->threshold = range.k ? select_all() : select_none(), work.row->k = 0;
        return;
    }
    const u32 token = first + TOKENS_PER_THREAD * threadIdx.x;
    const Keys keys(work.keys, token, min(range.n, first + CHUNK));
    const Bucket high = find_bucket<SELECT_THREADS, HIGH_BUCKETS>(work.row->histogram, range.k);
    const u32 k = range.k - high.above;
    if (k == high.count) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            work.row->threshold = select_from(high.index << 2 * LOW_BITS), work.row->k = 0;
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) work.row->high_bits = high.index, work.row->k = k;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    u32 is_candidate = 0; // bit t: token + t is a candidate
#pragma unroll
    for (int t = 0; t < TOKENS_PER_THREAD; t++)
        is_candidate |= (range.contains(token + t) && keys.key[t] >> 2 * LOW_BITS == high.index) << t;
    // One atomicAdd per warp reserves space for all candidates of its lanes.
    const u32 inclusive = warp_inclusive_sum(__popc(is_candidate));
    u32 start;
    if (lane == LANES - 1) start = atomicAdd(&count, inclusive);
    start = __shfl_sync(FULL, start, LANES - 1) + inclusive - __popc(is_candidate);
#pragma unroll
    for (int t = 0; t < TOKENS_PER_THREAD; t++)
        if (is_candidate >> t & 1) collected[start++] = keys.key[t];
    __syncthreads();
    if (threadIdx.x == 0 && count) place = atomicAdd(&work.row->candidates, count);
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) work.candidates[place + i] = collected[i];
}

// The threshold: the `k`-th highest of the candidates, which all have `high_bits` as their highest bits.
__device__ Threshold threshold_among(const u32* candidates, u32 count, u32 k, u32 high_bits) {
    __shared__ u32 counts[LOW_BUCKETS];
    auto find_digit = [&](u32 high, int shift) {
        for (int i = threadIdx.x; i < LOW_BUCKETS; i += SELECT_THREADS) counts[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) {
            const u32 key = candidates[i];
            if (key >> shift >> LOW_BITS == high) atomicAdd(&counts[key >> shift & (LOW_BUCKETS - 1)], 1);
        }
        __syncthreads();
        return find_bucket<SELECT_THREADS, LOW_BUCKETS>(counts, k);
    };
    const Bucket mid = find_digit(high_bits, LOW_BITS);
    k -= mid.above;
    const u32 high = high_bits << LOW_BITS | mid.index;
    if (k == mid.count) return select_from(high << LOW_BITS);
    const Bucket low = find_digit(high, 0);
    return {high << LOW_BITS | low.index, k - low.above};
}

// `tickets`: set if the blocks may not all be resident.
template <class Out>
__device__ __forceinline__ void write(const SelectRange& range, const Selection& work, const Out& out, bool tickets) {
    // A block waits for the chunks before its own, but CUDA does not promise that blocks of lower index start first.
    // Unless all blocks are resident at once, they take chunks in the order in which they start; that costs 0.8 us.
    u32 chunk = blockIdx.x;
    if (tickets) {
        __shared__ u32 ticket;
        if (threadIdx.x == 0) ticket = atomicAdd(&work.row->started, 1);
        __syncthreads();
        chunk = ticket;
    }
    const u32 first = chunk * CHUNK, end = min(range.n, first + CHUNK);
    const u32 token = first + TOKENS_PER_THREAD * threadIdx.x;
    if (first >= end) return;
    const Keys keys(work.keys, token, end);
    // Every block recomputes the threshold: cheaper than a serial block at the end of the previous kernel.
    const Row& state = *work.row;
    const Threshold threshold =
        state.k ? threshold_among(work.candidates, state.candidates, state.k, state.high_bits) : state.threshold;
    u32 above = 0, ties = 0; // bit t: token + t
#pragma unroll
    for (int t = 0; t < TOKENS_PER_THREAD; t++) {
        if (token + t >= end) continue;
        if (!range.contains(token + t)) {
            out.put_always(token + t);
            continue;
        }
        above |= (keys.key[t] > threshold.key) << t;
        ties |= (keys.key[t] == threshold.key) << t;
    }
    u32 place = __popc(above), tie = __popc(ties), all_above, all_ties;
    scan_selected<SELECT_THREADS>(place, tie, all_above, all_ties);

    // Waits for the counts of all chunks before this one.
    __shared__ u32 chunks_above, chunks_ties;
    constexpr u64 COUNTS_READY = 1ull << 63;
    if (threadIdx.x < LANES) {
        if (threadIdx.x == 0) {
            const u64 mine = COUNTS_READY | (u64)all_above << 32 | all_ties;
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(work.chunk_counts + chunk), "l"(mine) : "memory");
        }
        u32 sum_above = 0, sum_ties = 0;
        for (u32 before = threadIdx.x; before < chunk; before += LANES) {
            u64 other;
            do
                asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                             : "=l"(other)
                             : "l"(work.chunk_counts + before)
                             : "memory");
            while (!(other & COUNTS_READY));
            sum_above += (u32)(other >> 32) & 0x7fffffff, sum_ties += (u32)other;
        }
        sum_above = __reduce_add_sync(FULL, sum_above), sum_ties = __reduce_add_sync(FULL, sum_ties);
        if (threadIdx.x == 0) chunks_above = sum_above, chunks_ties = sum_ties;
    }
    __syncthreads();
    place += chunks_above, tie += chunks_ties;
#pragma unroll
    for (int t = 0; t < TOKENS_PER_THREAD; t++) {
        const bool is_above = above >> t & 1, is_tie = ties >> t & 1;
        if (is_above || (is_tie && tie < threshold.ties))
            out.put_selected(place + min(tie, threshold.ties), token + t);
        place += is_above, tie += is_tie;
    }
}

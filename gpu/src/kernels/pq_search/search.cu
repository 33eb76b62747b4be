// Selects the tokens that a group of query heads attends to: the k of highest weight, sinks and recent tokens, in
// ascending order. It supports lookup tables of any size that fits shared memory.
//
// CPU twin: pq_core::search_into. Compile-time shape: M, NBITS, GROUP, VEC, COPIES (tables.cuh), MAX_RULE (select.cuh).
// Four kernels of grid (chunk of CHUNK tokens, row), each launched with PDL; a row is a head of a sequence.
//
// 1. `stats`: computes the scores and keeps only the softmax statistics of the chunk.
// 2. `keys`: computes the scores again, which costs less than writing and reading 4 bytes per token and query. The
//    group's weight of a token becomes a key, and the block counts the keys by their highest 11 bits. Tokens whose
//    weight has underflowed are scored a third time, for the logarithm.
// 3. `collect`: copies the keys that share those bits with the k-th highest key (radix select).
// 4. `write`: finds the threshold among them and writes the selected tokens in order. A block spins on the counts of
//    the preceding chunks, which belong to blocks that started earlier.
//
// Cost: M lookups per token, twice for every VEC queries, and 4 bytes per token, written once and read twice. No pipe
// was full in ncu: the kernels used 39, 36, 29 and 31 % of the issue slots, and L1 and shared memory were half busy in
// the two that score. Tried without gain: computing the scores of all passes before their maximum; further unrolling of
// the search among candidates.
#include "pq_search/select.cuh"
#include "pq_search/tables.cuh"
#include "primitives_sm80.cuh"

constexpr int CHUNK = 8192;
constexpr int SCORE_THREADS = 512, SCORE_WARPS = SCORE_THREADS / LANES, SCORE_PASSES = CHUNK / (4 * SCORE_THREADS);
// Threads that select need fewer registers than threads that score, so these blocks are larger.
constexpr int SELECT_THREADS = 1024, TOKENS_PER_THREAD = CHUNK / SELECT_THREADS;
constexpr int HIGH_BUCKETS = 2048, LOW_BUCKETS = 1024, LOW_BITS = 10; // radix digits of a key: 11, 10 and 10 bits
static_assert(1 << (KEY_BITS - 2 * LOW_BITS) == HIGH_BUCKETS && 1 << LOW_BITS == LOW_BUCKETS, "the digits make a key");

// State of a row between the kernels.
struct alignas(16) Row {
    u32 histogram[HIGH_BUCKETS];
    u32 candidates; // number of keys in `Workspace::candidates`
    u32 high_bits;  // highest 11 bits of the k-th highest key, which all candidates share
    u32 k;          // rank of that key among the candidates; 0 if `threshold` is already known
    Threshold threshold;
    u32 started; // blocks of `write` that have started
};

struct Workspace {
    u32* keys;       // [capacity]
    u32* candidates; // [capacity]: keys with the highest bits of the k-th
    Row* row;
    u64* chunk_counts; // [chunk]: COUNTS_READY, tokens above the threshold (31 bits), tokens equal to it (32 bits)
    Softmax* partial;  // [chunk][GROUP]

    __device__ Workspace(const Arguments& a, u32 row) {
        const u64 chunks = gridDim.x, capacity = chunks * CHUNK;
        u8* at = (u8*)a.workspace;
        keys = (u32*)at + row * capacity, at += a.rows * capacity * 4;
        candidates = (u32*)at + row * capacity, at += a.rows * capacity * 4;
        this->row = (Row*)at + row, at += a.rows * sizeof(Row);
        chunk_counts = (u64*)at + row * chunks, at += a.rows * chunks * 8;
        partial = (Softmax*)at + row * chunks * GROUP;
    }
};
static_assert(sizeof(Row) == ROW_BYTES, "the host reserves it");

extern __shared__ __align__(16) Tables tables[];

// A thread's codes of a chunk. If M is small they are all loaded at once, so that their latencies overlap.
struct Codes {
    u32 prefetched[CODES_IN_REGISTERS ? SCORE_PASSES : 1][CODES_IN_REGISTERS ? M : 1];
    const u8* row;
    u32 first;

    __device__ Codes(const Arguments& a, u32 row_index, u32 chunk_first) : row(a.codes + row_index * a.code_stride) {
        first = chunk_first + 4 * threadIdx.x;
        if (CODES_IN_REGISTERS)
#pragma unroll
            for (int pass = 0; pass < SCORE_PASSES; pass++)
#pragma unroll
                for (int j = 0; j < M; j++)
                    prefetched[pass][j] = first + 4 * pass * SCORE_THREADS < a.capacity
                                              ? load_codes(row, first + 4 * pass * SCORE_THREADS, j)
                                              : 0;
    }
    __device__ __forceinline__ void score(int pass, float (&scores)[4][VEC]) const {
        score_four(
            *tables,
            [&](int j) {
                return CODES_IN_REGISTERS ? prefetched[pass][j] : load_codes(row, first + 4 * pass * SCORE_THREADS, j);
            },
            scores);
    }
};

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 1) pq_search_stats(const Arguments a) {
    if (!a.pdl) pdl_wait();
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    const Codes codes(a, row, first);
    const SelectRange range(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) work.chunk_counts[blockIdx.x] = 0;
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS) work.row->histogram[i] = 0;
        if (threadIdx.x == 0) work.row->candidates = 0, work.row->started = 0;
        if (threadIdx.x == 0 && row % a.heads == 0) a.counts[row / a.heads] = range.output_count();
    }
    __shared__ Softmax warp_results[SCORE_WARPS][VEC];
    const u32 end = min(range.n, first + CHUNK);
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0) __syncthreads();
        load_tables<SCORE_THREADS>(*tables, a.luts + (u64)row * GROUP * M * KSUB, round);
        __syncthreads();
        Softmax softmax[VEC];
#pragma unroll
        for (int q = 0; q < VEC; q++) softmax[q] = empty_softmax();
#pragma unroll
        for (int pass = 0; pass < SCORE_PASSES; pass++) {
            const u32 token = first + 4 * (pass * SCORE_THREADS + threadIdx.x);
            if (token >= end) break;
            float scores[4][VEC];
            codes.score(pass, scores);
#pragma unroll
            for (int q = 0; q < VEC; q++) {
                float max = softmax[q].max;
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (token + t < end) max = fmaxf(max, scores[t][q]);
                max = fminf(max, MAX_SCORE);
                const float base = max == -infinity() ? 0 : max;
                softmax[q].sum *= softmax[q].max == -infinity() ? 1 : exp2_approx((softmax[q].max - base) * LOG2_E);
                softmax[q].max = max;
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (token + t < end) softmax[q].sum += weight_of(scores[t][q], base, 1);
            }
        }
#pragma unroll
        for (int q = 0; q < VEC; q++) {
            const Softmax all = warp_softmax(softmax[q]);
            if (lane == 0) warp_results[warp][q] = all;
        }
        __syncthreads();
        static_assert(SCORE_WARPS <= LANES, "a lane for every warp");
        const int query = round * VEC + warp;
        if (warp < VEC && query < GROUP) {
            const Softmax all = warp_softmax(lane < SCORE_WARPS ? warp_results[lane][warp] : empty_softmax());
            if (lane == 0) work.partial[blockIdx.x * GROUP + query] = all;
        }
    }
}

// Softmax statistics of all chunks for a row's queries: maximum and reciprocal of the sum of exponentials.
__device__ void finish_softmax(const Arguments& a, const Workspace& work, u32 row, float (&max)[GROUP],
                               float (&scale)[GROUP]) {
    const int lane = threadIdx.x % LANES;
    for (int query = threadIdx.x / LANES; query < GROUP; query += SCORE_WARPS) {
        Softmax all = empty_softmax();
        for (u32 chunk = lane; chunk < gridDim.x; chunk += LANES) all.add(work.partial[chunk * GROUP + query]);
        all = warp_softmax(all);
        if (lane == 0) {
            max[query] = all.finite_max(), scale[query] = 1.f / all.sum;
            float* stats = a.stats ? a.stats + ((u64)row * GROUP + query) * 2 : nullptr;
            if (stats && blockIdx.x == 0) stats[0] = all.max, stats[1] = all.sum;
        }
    }
    __syncthreads();
}

// A score from the tables in global memory: shared memory holds the tables of one round only.
__device__ __noinline__ float score_again(const Arguments& a, u32 row, u32 token, int query) {
    const float* luts = a.luts + ((u64)row * GROUP + query) * M * KSUB;
    const u8* codes = a.codes + row * a.code_stride;
    float score = 0;
    for (int j = 0; j < M; j++)
        score += __ldcg(luts + j * KSUB + code_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS));
    return score;
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 1) pq_search_keys(const Arguments a) {
    __shared__ float max[GROUP], scale[GROUP];
    __shared__ u32 counts[HIGH_BUCKETS];
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS) counts[i] = 0;
    // These loads may precede `pdl_wait`: `pq_search_stats` writes none of this, and triggered only after its own wait.
    const Codes codes(a, row, first);
    const SelectRange range(a, row / a.heads);
    load_tables<SCORE_THREADS>(*tables, a.luts + (u64)row * GROUP * M * KSUB, 0);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    finish_softmax(a, work, row, max, scale);
    const u32 end = min(range.n, first + CHUNK);
    if (first >= end) return;
    float weights[SCORE_PASSES][4] = {};
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0) {
            __syncthreads();
            load_tables<SCORE_THREADS>(*tables, a.luts + (u64)row * GROUP * M * KSUB, round);
            __syncthreads();
        }
#pragma unroll
        for (int pass = 0; pass < SCORE_PASSES; pass++) {
            const u32 token = first + 4 * (pass * SCORE_THREADS + threadIdx.x);
            if (token >= end) break;
            float scores[4][VEC];
            codes.score(pass, scores);
#pragma unroll
            for (int q = 0; q < VEC; q++) {
                const int query = round * VEC + q;
                if (query >= GROUP) continue;
#pragma unroll
                for (int t = 0; t < 4; t++)
                    weights[pass][t] = combine(weights[pass][t], weight_of(scores[t][q], max[query], scale[query]));
            }
        }
    }
#pragma unroll
    for (int pass = 0; pass < SCORE_PASSES; pass++) {
        const u32 token = first + 4 * (pass * SCORE_THREADS + threadIdx.x);
        if (token >= end) continue;
        u32 keys[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            keys[t] =
                key_of(weights[pass][t], max, scale, [&](int query) { return score_again(a, row, token + t, query); });
            if (range.contains(token + t)) atomicAdd(&counts[keys[t] >> 2 * LOW_BITS], 1);
        }
        st_global_v4(work.keys + token, keys);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS)
        if (counts[i]) atomicAdd(&work.row->histogram[i], counts[i]);
}

// A thread's keys of a chunk.
struct Keys {
    u32 key[TOKENS_PER_THREAD];

    __device__ __forceinline__ Keys(const u32* keys, u32 token, u32 end) {
#pragma unroll
        for (int i = 0; i < TOKENS_PER_THREAD; i += 4)
            if (token + i < end) ld_nc_no_allocate<4>(key + i, keys + token + i);
    }
};

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_collect(const Arguments a) {
    __shared__ u32 collected[CHUNK];
    __shared__ u32 count, place;
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK, lane = threadIdx.x % LANES;
    const SelectRange range(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
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

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_write(const Arguments a) {
    const u32 row = blockIdx.y;
    const SelectRange range(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    const Output out{a.tokens + row * a.tokens_len, a.tokens_len, range};
    // A block waits for the chunks before its own, but CUDA does not promise that blocks of lower index start first.
    // Unless all blocks are resident at once, they take chunks in the order in which they start; that costs 0.8 us.
    u32 chunk = blockIdx.x;
    if (a.tickets) {
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
        if (is_above || (is_tie && tie < threshold.ties)) out.put_selected(place + min(tie, threshold.ties), token + t);
        place += is_above, tie += is_tie;
    }
}

// Selects the tokens that a group of query heads attends to: the k of highest weight, sinks and recent tokens, in
// ascending order. It supports lookup tables of any size that fits shared memory.
//
// CPU twin: pq_core::search_into. Compile-time shape: M, NBITS, GROUP, VEC, COPIES (tables.cuh), MAX_RULE (keys.cuh).
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
#include "pq_search/radix.cuh"
#include "pq_search/select.cuh"
#include "pq_search/tables.cuh"

constexpr int SCORE_THREADS = 512, SCORE_WARPS = SCORE_THREADS / LANES, SCORE_PASSES = CHUNK / (4 * SCORE_THREADS);

struct Workspace : Selection {
    Softmax* partial; // [chunk][GROUP]

    __device__ Workspace(const Arguments& a, u32 row) : Selection((u8*)a.workspace, a.rows, row, gridDim.x) {
        partial = (Softmax*)((u8*)a.workspace + bytes(a.rows, gridDim.x)) + (u64)row * gridDim.x * GROUP;
    }
};

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
    const SelectRange range = range_of(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) work.chunk_counts[blockIdx.x] = 0;
    if (blockIdx.x == 0) {
        work.clear<SCORE_THREADS>();
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
    const SelectRange range = range_of(a, row / a.heads);
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

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_collect(const Arguments a) {
    const SelectRange range = range_of(a, blockIdx.y / a.heads);
    pdl_wait();
    pdl_trigger();
    collect(range, Workspace(a, blockIdx.y));
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_write(const Arguments a) {
    const SelectRange range = range_of(a, blockIdx.y / a.heads);
    pdl_wait();
    pdl_trigger();
    const Output out{a.tokens + blockIdx.y * a.tokens_len, a.tokens_len, range};
    write(range, Workspace(a, blockIdx.y), out, a.tickets);
}

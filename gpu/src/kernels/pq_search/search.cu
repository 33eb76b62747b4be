// The tokens that a group of query heads attends to, for tables of any size that shared memory holds.
//
// CPU twin: pq_core::search_into. Four kernels, each launched while the one before ends; a block of threads has CHUNK
// tokens of a row.
//
// 1. `stats`: scores, of which only the softmax numbers are kept.
// 2. `keys`: the scores again, in the place of 4 bytes a token and query written and read; the group's weight of a
// token becomes a
//    key, and the keys' highest 11 bits are counted. Tokens whose weight has vanished are scored once more, for its
//    logarithm.
// 3. `collect`: keys that share those bits with the wanted one.
// 4. `write`: the cut among them, and the chosen tokens in order; a block waits for the counts of those before it,
// which started earlier.
#include "pq_search/select.cuh"
#include "pq_search/tables.cuh"
#include "primitives_sm80.cuh"

constexpr int CHUNK = 8192;
constexpr int SCORE_THREADS = 512, SCORE_WARPS = SCORE_THREADS / LANES, SCORE_PASSES = CHUNK / (4 * SCORE_THREADS);
constexpr int SELECT_THREADS = 1024, EACH = CHUNK / SELECT_THREADS;   // tokens of a thread, with fewer registers
constexpr int HIGH_BUCKETS = 2048, LOW_BUCKETS = 1024, LOW_BITS = 10; // of keys: 11 bits, then 10, then 10

// A row's workspace.
struct alignas(16) Row {
    u32 high[HIGH_BUCKETS];
    u32 candidates; // keys that share the highest bits of the wanted one
    u32 bucket;     // those bits
    u32 wanted;     // of the candidates; 0 where `cut` is known
    Cut cut;
    u32 started; // blocks of `write` that have started
};

struct Workspace {
    u32* keys;       // [capacity]
    u32* candidates; // [capacity]
    Row* row;
    u64* chosen;      // [chunk]: a mark, and the tokens above the cut and equal to it
    Softmax* partial; // [chunk][GROUP]

    __device__ Workspace(const Arguments& a, u32 row) {
        const u64 chunks = gridDim.x, capacity = chunks * CHUNK;
        u8* at = (u8*)a.workspace;
        keys = (u32*)at + row * capacity, at += a.rows * capacity * 4;
        candidates = (u32*)at + row * capacity, at += a.rows * capacity * 4;
        this->row = (Row*)at + row, at += a.rows * sizeof(Row);
        chosen = (u64*)at + row * chunks, at += a.rows * chunks * 8;
        partial = (Softmax*)at + row * chunks * GROUP;
    }
};
static_assert(sizeof(Row) == ROW_BYTES, "the host reserves it");

extern __shared__ __align__(16) Tables tables[];

// A thread's codes of a chunk: all at once, where they are few, so that their ways through memory pdl.
struct Codes {
    u32 ahead[FEW ? SCORE_PASSES : 1][FEW ? M : 1];
    const u8* row;
    u32 first;

    __device__ Codes(const Arguments& a, u32 row_index, u32 chunk_first) : row(a.codes + row_index * a.code_stride) {
        first = chunk_first + 4 * threadIdx.x;
        if (FEW)
#pragma unroll
            for (int pass = 0; pass < SCORE_PASSES; pass++)
#pragma unroll
                for (int j = 0; j < M; j++)
                    ahead[pass][j] = first + 4 * pass * SCORE_THREADS < a.capacity
                                         ? load_codes(row, first + 4 * pass * SCORE_THREADS, j)
                                         : 0;
    }
    __device__ __forceinline__ void score(int pass, float (&scores)[4][VEC]) const {
        score_four(
            *tables, [&](int j) { return FEW ? ahead[pass][j] : load_codes(row, first + 4 * pass * SCORE_THREADS, j); },
            scores);
    }
};

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 1) pq_search_stats(const Arguments a) {
    if (!a.pdl) pdl_wait();
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    const Codes codes(a, row, first);
    const Middle middle(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) work.chosen[blockIdx.x] = 0;
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS) work.row->high[i] = 0;
        if (threadIdx.x == 0) work.row->candidates = 0, work.row->started = 0;
        if (threadIdx.x == 0 && row % a.heads == 0) a.counts[row / a.heads] = middle.found();
    }
    __shared__ Softmax of_warps[SCORE_WARPS][VEC];
    const u32 end = min(middle.n, first + CHUNK);
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0) __syncthreads();
        load_tables<SCORE_THREADS>(*tables, a.luts + (u64)row * GROUP * M * KSUB, round);
        __syncthreads();
        Softmax softmax[VEC];
#pragma unroll
        for (int q = 0; q < VEC; q++) softmax[q] = no_scores();
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
            if (lane == 0) of_warps[warp][q] = all;
        }
        __syncthreads();
        static_assert(SCORE_WARPS <= LANES, "a lane for every warp");
        const int query = round * VEC + warp;
        if (warp < VEC && query < GROUP) {
            const Softmax all = warp_softmax(lane < SCORE_WARPS ? of_warps[lane][warp] : no_scores());
            if (lane == 0) work.partial[blockIdx.x * GROUP + query] = all;
        }
    }
}

// Softmax numbers of a row's queries: maximum and reciprocal of the sum.
__device__ void finish_softmax(const Arguments& a, const Workspace& work, u32 row, float (&max_of)[GROUP],
                               float (&scale_of)[GROUP]) {
    const int lane = threadIdx.x % LANES;
    for (int query = threadIdx.x / LANES; query < GROUP; query += SCORE_WARPS) {
        Softmax all = no_scores();
        for (u32 chunk = lane; chunk < gridDim.x; chunk += LANES) all.add(work.partial[chunk * GROUP + query]);
        all = warp_softmax(all);
        if (lane == 0) {
            max_of[query] = all.finite_max(), scale_of[query] = 1.f / all.sum;
            float* stats = a.stats ? a.stats + ((u64)row * GROUP + query) * 2 : nullptr;
            if (stats && blockIdx.x == 0) stats[0] = all.max, stats[1] = all.sum;
        }
    }
    __syncthreads();
}

// A score from the tables in global memory: shared memory has those of one round.
__device__ __noinline__ float score_again(const Arguments& a, u32 row, u32 token, int query) {
    const float* luts = a.luts + ((u64)row * GROUP + query) * M * KSUB;
    const u8* codes = a.codes + row * a.code_stride;
    float score = 0;
    for (int j = 0; j < M; j++)
        score += __ldcg(luts + j * KSUB + code_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS));
    return score;
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 1) pq_search_keys(const Arguments a) {
    __shared__ float max_of[GROUP], scale_of[GROUP];
    __shared__ u32 counts[HIGH_BUCKETS];
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS) counts[i] = 0;
    // Nothing writes these meanwhile: they can be fetched before the kernel before has ended.
    const Codes codes(a, row, first);
    const Middle middle(a, row / a.heads);
    load_tables<SCORE_THREADS>(*tables, a.luts + (u64)row * GROUP * M * KSUB, 0);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    finish_softmax(a, work, row, max_of, scale_of);
    const u32 end = min(middle.n, first + CHUNK);
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
                    weights[pass][t] =
                        combine(weights[pass][t], weight_of(scores[t][q], max_of[query], scale_of[query]));
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
            keys[t] = key_of(weights[pass][t], max_of, scale_of,
                             [&](int query) { return score_again(a, row, token + t, query); });
            if (middle.has(token + t)) atomicAdd(&counts[keys[t] >> 2 * LOW_BITS], 1);
        }
        st_global_v4(work.keys + token, keys);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SCORE_THREADS)
        if (counts[i]) atomicAdd(&work.row->high[i], counts[i]);
}

// A thread's keys of a chunk.
struct Keys {
    u32 of[EACH];

    __device__ __forceinline__ Keys(const u32* keys, u32 token, u32 end) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4)
            if (token + i < end) ld_nc_no_allocate<4>(of + i, keys + token + i);
    }
};

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_collect(const Arguments a) {
    __shared__ u32 collected[CHUNK];
    __shared__ u32 count, place;
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK, lane = threadIdx.x % LANES;
    const Middle middle(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    if (middle.wanted == 0 || middle.wanted == middle.end - middle.first) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            work.row->cut = middle.wanted ? all_keys() : no_keys(), work.row->wanted = 0;
        return;
    }
    const u32 token = first + EACH * threadIdx.x;
    const Keys keys(work.keys, token, min(middle.n, first + CHUNK));
    const Found high = find_bucket<SELECT_THREADS, HIGH_BUCKETS>(work.row->high, middle.wanted);
    const u32 wanted = middle.wanted - high.above;
    if (wanted == high.count) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            work.row->cut = keys_from(high.bucket << 2 * LOW_BITS), work.row->wanted = 0;
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) work.row->bucket = high.bucket, work.row->wanted = wanted;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    u32 inside = 0; // bits, one a token
#pragma unroll
    for (int t = 0; t < EACH; t++) inside |= (middle.has(token + t) && keys.of[t] >> 2 * LOW_BITS == high.bucket) << t;
    // A warp takes room for all that it has.
    const u32 through = warp_inclusive_sum(__popc(inside));
    u32 start;
    if (lane == LANES - 1) start = atomicAdd(&count, through);
    start = __shfl_sync(FULL, start, LANES - 1) + through - __popc(inside);
#pragma unroll
    for (int t = 0; t < EACH; t++)
        if (inside >> t & 1) collected[start++] = keys.of[t];
    __syncthreads();
    if (threadIdx.x == 0 && count) place = atomicAdd(&work.row->candidates, count);
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) work.candidates[place + i] = collected[i];
}

// The cut among keys that share their highest bits.
__device__ Cut cut_among(const u32* candidates, u32 count, u32 wanted, u32 bucket) {
    __shared__ u32 counts[LOW_BUCKETS];
    auto spread = [&](u32 high, int shift) {
        for (int i = threadIdx.x; i < LOW_BUCKETS; i += SELECT_THREADS) counts[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) {
            const u32 key = candidates[i];
            if (key >> shift >> LOW_BITS == high) atomicAdd(&counts[key >> shift & (LOW_BUCKETS - 1)], 1);
        }
        __syncthreads();
        return find_bucket<SELECT_THREADS, LOW_BUCKETS>(counts, wanted);
    };
    const Found middle = spread(bucket, LOW_BITS);
    wanted -= middle.above;
    const u32 high = bucket << LOW_BITS | middle.bucket;
    if (wanted == middle.count) return keys_from(high << LOW_BITS);
    const Found low = spread(high, 0);
    return {high << LOW_BITS | low.bucket, wanted - low.above};
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_search_write(const Arguments a) {
    const u32 row = blockIdx.y;
    const Middle middle(a, row / a.heads);
    pdl_wait();
    pdl_trigger();
    const Workspace work(a, row);
    const Output out{a.tokens + row * a.tokens_len, a.tokens_len, middle};
    // Blocks take the chunks of a row in the order in which they start, since CUDA does not promise that blocks of
    // lower index start first: a block waits for those of the chunks before its own, which then all run.
    __shared__ u32 chunk;
    if (threadIdx.x == 0) chunk = atomicAdd(&work.row->started, 1);
    __syncthreads();
    const u32 first = chunk * CHUNK, end = min(middle.n, first + CHUNK), token = first + EACH * threadIdx.x;
    if (first >= end) return;
    const Keys keys(work.keys, token, end);
    // Every block finds the cut by itself: no kernel before has to end with one block that does.
    const Row& found = *work.row;
    const Cut cut = found.wanted ? cut_among(work.candidates, found.candidates, found.wanted, found.bucket) : found.cut;
    u32 above = 0, ties = 0; // bits, one a token
#pragma unroll
    for (int t = 0; t < EACH; t++) {
        if (token + t >= end) continue;
        if (!middle.has(token + t)) {
            out.put_anyway(token + t);
            continue;
        }
        above |= (keys.of[t] > cut.key) << t;
        ties |= (keys.of[t] == cut.key) << t;
    }
    u32 place = __popc(above), tie = __popc(ties), all_above, all_ties;
    scan_chosen<SELECT_THREADS>(place, tie, all_above, all_ties);

    // Chunks before this one.
    __shared__ u32 chunks_above, chunks_ties;
    constexpr u64 MARK = 1ull << 63;
    if (threadIdx.x < LANES) {
        if (threadIdx.x == 0) {
            const u64 mine = MARK | (u64)all_above << 32 | all_ties;
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(work.chosen + chunk), "l"(mine) : "memory");
        }
        u32 sum_above = 0, sum_ties = 0;
        for (u32 before = threadIdx.x; before < chunk; before += LANES) {
            u64 other;
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(other) : "l"(work.chosen + before) : "memory");
            while (!(other & MARK));
            sum_above += (u32)(other >> 32) & 0x7fffffff, sum_ties += (u32)other;
        }
        sum_above = __reduce_add_sync(FULL, sum_above), sum_ties = __reduce_add_sync(FULL, sum_ties);
        if (threadIdx.x == 0) chunks_above = sum_above, chunks_ties = sum_ties;
    }
    __syncthreads();
    place += chunks_above, tie += chunks_ties;
#pragma unroll
    for (int t = 0; t < EACH; t++) {
        const bool is_above = above >> t & 1, is_tie = ties >> t & 1;
        if (is_above || (is_tie && tie < cut.ties)) out.put_chosen(place + min(tie, cut.ties), token + t);
        place += is_above, tie += is_tie;
    }
}

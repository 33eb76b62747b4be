// The same for codes of up to 12 bits a token, subspaces together, in one kernel.
//
// A token's scores depend on its joint code alone, of which there are 4,096 at most: tokens are counted, and only codes
// are scored. A cluster of BLOCKS blocks has a row. Every block counts the joint codes of its tokens and tells each
// other block the counts of that one's share of the codes, which scores them and tells all others keys and counts, from
// which each finds the cut by itself. Only then does it look at its tokens again, to write. Of sm_90; before, search.cu
// does it.
//
// What blocks tell each other they store in each other's memory, where a barrier counts the bytes that have come.
// Barriers of the cluster in their place order global memory, too, which took longer than the exchange.
//
// Every block doing all codes was slower (20 us for 8 heads of 131,072 at (2, 6)): reading all counts of all took 4 us,
// scoring 3.
#include "mbarrier_sm90.cuh"
#include "pq_codes.cuh"
#include "pq_search/select.cuh"

constexpr int BLOCKS = 8, THREADS = 1024, WARPS = THREADS / LANES;
constexpr int JOINT_BITS = M * NBITS, JOINT = 1 << JOINT_BITS, KSUB = 1 << NBITS;
constexpr int SHARE = JOINT > BLOCKS ? JOINT / BLOCKS : 1;   // codes of a block
constexpr int CODES = JOINT > THREADS ? JOINT / THREADS : 1; // of a thread, when it comes to the cut
constexpr int ROOM = CODES * THREADS;
constexpr int EACH = 16;   // tokens of a thread at a time
constexpr int AT_ONCE = 4; // queries
constexpr u8 NOT = 0, TIE = 1, ABOVE = 2;
constexpr int HIGH_BUCKETS = 2048, LOW_BUCKETS = 1024, LOW_BITS = 10; // of keys: 11 bits, then 10, then 10
constexpr int SLICES = WARPS / AT_ONCE; // of the block's codes, each with a warp for every query at a time
static_assert(SHARE <= THREADS, "a thread has a code or none");
static_assert(EACH * THREADS < 1 << 16, "as many tokens at a time as a scan counts");

struct Shared {
    u32 joint[EACH * THREADS / 2]; // codes of the block's first tokens, two in a word
    u32 counts[ROOM];              // of this block's tokens in the middle
    float luts[GROUP][M * KSUB];
    u32 high[HIGH_BUCKETS], low[2][LOW_BUCKETS];
    u32 totals[SHARE];              // of the block's codes
    float max[GROUP], scale[GROUP]; // of all codes
    uint2 above_and_ties_of[WARPS]; // of a warp's codes, in this block's tokens
    // What the blocks of the cluster tell each other, and when it has come.
    alignas(8) Softmax of_slices[GROUP][BLOCKS * SLICES];
    uint2 keys[JOINT];            // and how many tokens have them
    uint2 above_and_ties[BLOCKS]; // of a block's tokens
    u32 counts_of[BLOCKS][SHARE]; // of this block's share of the codes
    u64 counts_here, softmax_here, keys_here, places_here;
    u8 chosen[ROOM];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for enough");

// Joint codes of 16 tokens, `token` being a multiple of 16, two in a word.
__device__ __forceinline__ void load_joint_codes(const u8* codes, u32 token, u32 (&joint)[EACH / 2]) {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) joint[i] = 0;
#pragma unroll
    for (int j = 0; j < M; j++) {
        u32 of_subspace[4];
        sixteen_codes_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS, of_subspace);
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            joint[2 * i] |= prmt(of_subspace[i], 0, 0x4140) << NBITS * j;
            joint[2 * i + 1] |= prmt(of_subspace[i], 0, 0x4342) << NBITS * j;
        }
    }
}
__device__ __forceinline__ u32 nth(const u32 (&joint)[EACH / 2], int i) {
    return joint[i / 2] >> 16 * (i % 2) & 0xffff;
}

__device__ __forceinline__ float score_of(const float* luts, u32 joint) {
    float score = 0;
#pragma unroll
    for (int j = 0; j < M; j++) score += luts[j * KSUB + (joint >> NBITS * j & (KSUB - 1))];
    return clean(score);
}

__device__ __forceinline__ u32 load_joint_code(const u8* codes, u32 token) {
    u32 joint = 0;
#pragma unroll
    for (int j = 0; j < M; j++)
        joint |= code_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS) << NBITS * j;
    return joint;
}

// The cut among keys that occur `count` times each.
__device__ Cut find_cut(Shared& shared, const u32 (&keys)[CODES], const u32 (&count)[CODES], u32 wanted) {
#pragma unroll
    for (int i = 0; i < CODES; i++)
        if (count[i]) atomicAdd(&shared.high[keys[i] >> 2 * LOW_BITS], count[i]);
    __syncthreads();
    Found found = find_bucket<THREADS, HIGH_BUCKETS>(shared.high, wanted);
    u32 high = found.bucket;
#pragma unroll
    for (int digit = 0; digit < 2; digit++) {
        const int shift = LOW_BITS * (1 - digit);
        wanted -= found.above;
        if (wanted == found.count) return keys_from(high << shift << LOW_BITS);
#pragma unroll
        for (int i = 0; i < CODES; i++)
            if (count[i] && keys[i] >> shift >> LOW_BITS == high)
                atomicAdd(&shared.low[digit][keys[i] >> shift & (LOW_BUCKETS - 1)], count[i]);
        __syncthreads();
        found = find_bucket<THREADS, LOW_BUCKETS>(shared.low[digit], wanted);
        high = high << LOW_BITS | found.bucket;
    }
    return {high, wanted - found.above};
}

extern __shared__ __align__(16) u8 memory[];

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    pq_search_histogram(const Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 row = blockIdx.y, rank = cluster_ctarank(), lane = threadIdx.x % LANES;
    for (int i = threadIdx.x; i < ROOM; i += THREADS) shared.counts[i] = 0;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += THREADS) shared.high[i] = 0;
    for (int i = threadIdx.x; i < 2 * LOW_BUCKETS; i += THREADS) (&shared.low[0][0])[i] = 0;
    if (threadIdx.x == 0) {
        u64* const barriers[] = {&shared.counts_here, &shared.softmax_here, &shared.keys_here, &shared.places_here};
        const u32 bytes[] = {rank * SHARE < JOINT ? (u32)sizeof(shared.counts_of) : 0, sizeof(shared.of_slices),
                             sizeof(shared.keys), sizeof(shared.above_and_ties)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mbarrier_init(barriers[i], 1);
            mbarrier_arrive_expect_tx(barriers[i], bytes[i]);
        }
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); // this block's barriers are there
    if (!a.pdl) pdl_wait();
    const Middle middle(a, row / a.heads);
    const u8* codes = a.codes + row * a.code_stride;
    const u32 span = (middle.n + BLOCKS * EACH - 1) / (BLOCKS * EACH) * EACH, first = rank * span,
              end = min(middle.n, first + span);
    u32 token = first + EACH * threadIdx.x, joint[EACH / 2];
    if (token < end) {
        load_joint_codes(codes, token, joint);
#pragma unroll
        for (int i = 0; i < EACH / 2; i++) shared.joint[i * THREADS + threadIdx.x] = joint[i];
    }
    __syncthreads();
    while (token < end) {
        if (token >= middle.first && token + EACH <= min(end, middle.end)) // all compete, as for most threads
#pragma unroll
            for (int i = 0; i < EACH; i++) atomicAdd(&shared.counts[nth(joint, i)], 1);
        else
            for (int i = 0; i < EACH; i++)
                if (token + i < end && middle.has(token + i)) atomicAdd(&shared.counts[nth(joint, i)], 1);
        token += EACH * THREADS;
        if (token < end) load_joint_codes(codes, token, joint);
    }
    pdl_wait();
    pdl_trigger();
    // On their way while counts are.
    constexpr int TABLES = GROUP * M * KSUB, TABLES_EACH = (TABLES + THREADS - 1) / THREADS;
    float table[TABLES_EACH];
#pragma unroll
    for (int i = 0; i < TABLES_EACH; i++)
        if (i * THREADS + threadIdx.x < TABLES)
            table[i] = __ldcg(a.luts + (u64)row * TABLES + i * THREADS + threadIdx.x);
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // the others' barriers are there
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        const u32 code = threadIdx.x + i * THREADS;
        if (code < JOINT)
            st_async(&shared.counts_of[rank][code % SHARE], code / SHARE, shared.counts[code], shared.counts_here);
    }

    // The block's share of the codes.
    const u32 code = (rank * SHARE + threadIdx.x) % JOINT;
    const bool has_code = threadIdx.x < SHARE && rank * SHARE + threadIdx.x < JOINT;
    mbarrier_wait_cluster(shared.counts_here);
    u32 total = 0;
    if (has_code)
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++) total += shared.counts_of[block][threadIdx.x];
    if (threadIdx.x < SHARE) shared.totals[threadIdx.x] = total;
#pragma unroll
    for (int i = 0; i < TABLES_EACH; i++)
        if (i * THREADS + threadIdx.x < TABLES) (&shared.luts[0][0])[i * THREADS + threadIdx.x] = table[i];
    __syncthreads();
    const int warp = threadIdx.x / LANES;
    for (int query = warp % AT_ONCE; query < GROUP; query += AT_ONCE) {
        const float* luts = shared.luts[query];
        const int slice = warp / AT_ONCE;
        Softmax mine = no_scores();
        for (u32 i = slice * LANES + lane; i < SHARE; i += SLICES * LANES)
            if (shared.totals[i]) mine.add(softmax_of(score_of(luts, rank * SHARE + i), (float)shared.totals[i]));
        // Sinks and recent tokens were not counted.
        const u32 sinks = middle.first, others = sinks + middle.n - middle.end;
        for (u32 i = (rank * SLICES + slice) * LANES + lane; i < others; i += BLOCKS * SLICES * LANES)
            mine.add(softmax_of(score_of(luts, load_joint_code(codes, i < sinks ? i : middle.end + i - sinks)), 1));
        mine = warp_softmax(mine);
        if (lane < BLOCKS)
            st_async(&shared.of_slices[query][rank * SLICES + slice], lane,
                     make_uint2(__float_as_uint(mine.max), __float_as_uint(mine.sum)), shared.softmax_here);
    }
    if (warp < GROUP) {
        mbarrier_wait_cluster(shared.softmax_here);
        static_assert(BLOCKS * SLICES == 2 * LANES, "two slices a lane");
        Softmax all = shared.of_slices[warp][lane];
        all.add(shared.of_slices[warp][LANES + lane]);
        all = warp_softmax(all);
        if (lane == 0) {
            shared.max[warp] = all.finite_max(), shared.scale[warp] = 1.f / all.sum;
            float* stats = a.stats ? a.stats + ((u64)row * GROUP + warp) * 2 : nullptr;
            if (stats && rank == 0) stats[0] = all.max, stats[1] = all.sum;
        }
    }
    __syncthreads();
    float weight = 0;
    if (has_code)
#pragma unroll 4
        for (int query = 0; query < GROUP; query++)
            weight =
                combine(weight, weight_of(score_of(shared.luts[query], code), shared.max[query], shared.scale[query]));
    const u32 key =
        key_of(weight, shared.max, shared.scale, [&](int query) { return score_of(shared.luts[query], code); });
    if (has_code)
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++)
            st_async(shared.keys + code, block, make_uint2(key, total), shared.keys_here);
    mbarrier_wait_cluster(shared.keys_here);
    u32 keys[CODES], count[CODES];
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        const u32 joint = threadIdx.x + i * THREADS;
        const uint2 both = joint < JOINT ? shared.keys[joint] : make_uint2(0, 0);
        keys[i] = both.x, count[i] = both.y;
    }

    const u32 competing = middle.end - middle.first;
    Cut cut = middle.wanted ? all_keys() : no_keys();
    if (middle.wanted && middle.wanted < competing) cut = find_cut(shared, keys, count, middle.wanted);
    u32 above = 0, ties = 0; // of this block
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        const u32 joint = threadIdx.x + i * THREADS, mine = shared.counts[joint];
        const bool is_above = keys[i] > cut.key, is_tie = keys[i] == cut.key;
        above += is_above ? mine : 0, ties += is_tie ? mine : 0;
        shared.chosen[joint] = is_above ? ABOVE : is_tie ? TIE : NOT;
    }
    above = __reduce_add_sync(FULL, above), ties = __reduce_add_sync(FULL, ties);
    if (lane == 0) shared.above_and_ties_of[warp] = make_uint2(above, ties);
    __syncthreads();
    if (warp == 0) {
        const uint2 of_warp = shared.above_and_ties_of[lane];
        above = __reduce_add_sync(FULL, of_warp.x), ties = __reduce_add_sync(FULL, of_warp.y);
        if (lane < BLOCKS) st_async(shared.above_and_ties + rank, lane, make_uint2(above, ties), shared.places_here);
    }
    mbarrier_wait_cluster(shared.places_here); // the last that others store here
    const uint2 others = lane < rank ? shared.above_and_ties[lane] : make_uint2(0, 0);
    u32 above_before = __reduce_add_sync(FULL, others.x), ties_before = __reduce_add_sync(FULL, others.y);

    const Output out{a.tokens + row * a.tokens_len, a.tokens_len, middle};
    if (rank == 0 && threadIdx.x == 0 && row % a.heads == 0) a.counts[row / a.heads] = middle.found();
    for (u32 start = first; start < end; start += EACH * THREADS) {
        const u32 token = start + EACH * threadIdx.x;
        u32 joint[EACH / 2], is_above = 0, is_tie = 0;
        if (token < end) {
            if (start == first)
#pragma unroll
                for (int i = 0; i < EACH / 2; i++) joint[i] = shared.joint[i * THREADS + threadIdx.x];
            else
                load_joint_codes(codes, token, joint);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const u8 chosen = shared.chosen[nth(joint, i)];
                is_above |= (chosen == ABOVE) << i, is_tie |= (chosen == TIE) << i;
            }
            // Those that do not compete.
            if (token < middle.first || token + EACH > middle.end)
                for (int i = 0; i < EACH; i++) {
                    if (middle.has(token + i)) continue;
                    is_above &= ~(1u << i), is_tie &= ~(1u << i);
                    if (token + i < end) out.put_anyway(token + i);
                }
        }
        u32 place = __popc(is_above), tie = __popc(is_tie), all_above, all_ties;
        scan_chosen<THREADS>(place, tie, all_above, all_ties);
        place += above_before, tie += ties_before;
        above_before += all_above, ties_before += all_ties;
        for (u32 rest = is_above | is_tie; rest; rest &= rest - 1) {
            const int i = __ffs(rest) - 1;
            if (is_above >> i & 1) {
                out.put_chosen(place + min(tie, cut.ties), token + i);
                place++;
            } else {
                if (tie < cut.ties) out.put_chosen(place + tie, token + i);
                tie++;
            }
        }
    }
}

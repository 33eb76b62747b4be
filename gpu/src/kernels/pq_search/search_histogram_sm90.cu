// Search for joint codes of at most 12 bits, in one kernel (sm_90; otherwise search.cu): selects the k tokens of
// highest weight, sinks and recent tokens, in ascending order.
//
// CPU twin: pq_core::search_into. Compile-time shape: M, NBITS with M * NBITS <= 12, GROUP, MAX_RULE (keys.cuh).
// Launch: grid (blocks, row) of clusters of all blocks of a row, THREADS threads; a row is a head of a sequence. The
// number of blocks is a power of two, at most MOST_BLOCKS and at most that of the joint codes.
//
// A token's scores depend only on its joint code, the codes of all subspaces side by side, which has at most 4,096
// values. The kernel therefore counts tokens and scores joint codes. The cluster has one row, and each of its blocks
//
// 1. builds a histogram of the joint codes of its tokens and sends every peer the counts of that peer's share of the
//    codes,
// 2. scores its own share and sends all blocks the softmax statistics, then the keys and total counts,
// 3. finds the threshold redundantly, and marks each joint code as above it, equal to it or below it,
// 4. reads its tokens' codes again and writes the selected tokens. A warp with many lists its own in shared memory and
//    stores them in order; if each thread stored its own, a store would touch up to 32 sectors.
//
// Blocks exchange through distributed shared memory (st.async, which a single block must not use); an mbarrier in the
// receiver counts the bytes. A cluster barrier would also order global memory, which took longer than the exchange:
// st.async took 1 us less.
//
// Bound by the latency of this chain of short steps. One level of sums, one barrier, half of the scans' shuffles and
// the test of each counted token, all since removed, took 0.5 us. Scoring all codes in every block was slower (20 us
// for 8 heads of 131,072 tokens at (2, 6)): reading the counts of all blocks took 4 us, scoring 3.
#include "mbarrier_sm90.cuh"
#include "pq_codes.cuh"
#include "pq_search/select.cuh"

constexpr int MOST_BLOCKS = 8, THREADS = 1024, WARPS = THREADS / LANES;
constexpr int JOINT_BITS = M * NBITS, JOINT_CODES = 1 << JOINT_BITS, KSUB = 1 << NBITS;
constexpr int CODES_PER_THREAD = JOINT_CODES > THREADS ? JOINT_CODES / THREADS : 1; // in find_threshold
constexpr int PADDED_CODES = CODES_PER_THREAD * THREADS;
constexpr int TOKENS_PER_THREAD = 16; // tokens that a thread loads at a time
constexpr int CONCURRENT_QUERIES = 4; // queries processed at the same time, each by SLICES warps
constexpr u32 BELOW = 0, ABOVE = 1, TIE = 1 << TOKENS_PER_THREAD; // classes of joint codes, by their keys
constexpr int HIGH_BUCKETS = 2048, LOW_BUCKETS = 1024, LOW_BITS = 10; // radix digits of a key: 11, 10 and 10 bits
static_assert(1 << (KEY_WIDTH - 2 * LOW_BITS) == HIGH_BUCKETS && 1 << LOW_BITS == LOW_BUCKETS, "the digits make a key");
constexpr int SLICES = WARPS / CONCURRENT_QUERIES; // slices of a block's codes, one warp each
static_assert(TOKENS_PER_THREAD * THREADS < 1 << 16, "a scan counts fewer than 2^16 tokens at a time");

struct Shared {
    // Joint codes of the block's first tokens, two in a word; in step 4, a warp's part is its list of selected tokens.
    u32 joint[WARPS][TOKENS_PER_THREAD / 2][LANES];
    u32 counts[PADDED_CODES]; // [joint code]: competing tokens of this block; in step 4 its class
    float luts[GROUP][M * KSUB];
    u32 high_histogram[HIGH_BUCKETS], low_histograms[2][LOW_BUCKETS];
    float max[GROUP], scale[GROUP];   // of the row's softmax
    uint2 warp_above_and_ties[WARPS]; // per warp: this block's tokens whose codes are above and equal to the threshold
    // Filled by all blocks of the cluster, and the mbarriers that count the bytes.
    alignas(8) Softmax slice_softmax[GROUP][MOST_BLOCKS * SLICES];
    uint2 keys[JOINT_CODES];           // [joint code]: key, and count in the row
    uint2 above_and_ties[MOST_BLOCKS]; // [block]: its tokens above and equal to the threshold
    u32 peer_counts[JOINT_CODES];      // [block][code of this block's share]: counts; then those of block 0 are totals
    u64 counts_barrier, softmax_barrier, keys_barrier, above_and_ties_barrier;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for enough");

// Joint codes of tokens `token` to `token + 15`, two in a word; `token` is a multiple of 16.
__device__ __forceinline__ void load_joint_codes(const u8* codes, u32 token, u32 (&joint)[TOKENS_PER_THREAD / 2]) {
#pragma unroll
    for (int i = 0; i < TOKENS_PER_THREAD / 2; i++) joint[i] = 0;
#pragma unroll
    for (int j = 0; j < M; j++) {
        u32 subspace_codes[4];
        sixteen_codes_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS, subspace_codes);
#pragma unroll
        for (int i = 0; i < TOKENS_PER_THREAD / 4; i++) {
            joint[2 * i] |= prmt(subspace_codes[i], 0, 0x4140) << NBITS * j;
            joint[2 * i + 1] |= prmt(subspace_codes[i], 0, 0x4342) << NBITS * j;
        }
    }
}
__device__ __forceinline__ u32 joint_code(const u32 (&joint)[TOKENS_PER_THREAD / 2], int i) {
    return joint[i / 2] >> 16 * (i % 2) & 0xffff;
}

// Bits of a thread's tokens, `token` and the following, that are below `end`.
__device__ __forceinline__ u32 tokens_below(u32 end, u32 token) {
    return (1u << min(end - min(token, end), TOKENS_PER_THREAD)) - 1;
}

// The lowest `count` set bits of `bits`.
__device__ __forceinline__ u32 lowest_set_bits(u32 bits, u32 count) {
    if (__popc(bits) <= count) return bits;
    u32 lowest = 0;
    for (; count; count--, bits &= bits - 1) lowest |= bits & -bits;
    return lowest;
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

// The threshold for the `k`-th highest key; `keys[i]` occurs `count[i]` times.
__device__ Threshold find_threshold(Shared& shared, const u32 (&keys)[CODES_PER_THREAD],
                                    const u32 (&count)[CODES_PER_THREAD], u32 k) {
#pragma unroll
    for (int i = 0; i < CODES_PER_THREAD; i++)
        if (count[i]) atomicAdd(&shared.high_histogram[keys[i] >> 2 * LOW_BITS], count[i]);
    __syncthreads();
    Bucket found = find_bucket<THREADS, HIGH_BUCKETS>(shared.high_histogram, k);
    u32 high = found.index;
#pragma unroll
    for (int digit = 0; digit < 2; digit++) {
        const int shift = LOW_BITS * (1 - digit);
        k -= found.above;
        if (k == found.count) return select_from(high << shift << LOW_BITS);
#pragma unroll
        for (int i = 0; i < CODES_PER_THREAD; i++)
            if (count[i] && keys[i] >> shift >> LOW_BITS == high)
                atomicAdd(&shared.low_histograms[digit][keys[i] >> shift & (LOW_BUCKETS - 1)], count[i]);
        __syncthreads();
        found = find_bucket<THREADS, LOW_BUCKETS>(shared.low_histograms[digit], k);
        high = high << LOW_BITS | found.index;
    }
    return {high, k - found.above};
}

extern __shared__ __align__(16) u8 memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_search_histogram(const Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 row = blockIdx.y, rank = cluster_ctarank(), warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 blocks = gridDim.x, block_bits = 31 - __clz(blocks);
    const bool is_alone = blocks == 1; // then a thread uses the counts and keys of its own codes, without an exchange
    // The block scores joint codes `first_code` to `first_code + share - 1`.
    const u32 share_bits = JOINT_BITS - block_bits, share = 1 << share_bits, first_code = rank << share_bits;
    for (int i = threadIdx.x; i < PADDED_CODES; i += THREADS) shared.counts[i] = 0;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += THREADS) shared.high_histogram[i] = 0;
    for (int i = threadIdx.x; i < 2 * LOW_BUCKETS; i += THREADS) (&shared.low_histograms[0][0])[i] = 0;
    if (threadIdx.x == 0) {
        u64* const barriers[] = {&shared.counts_barrier, &shared.softmax_barrier, &shared.keys_barrier,
                                 &shared.above_and_ties_barrier};
        const u32 bytes[] = {sizeof(shared.peer_counts), blocks * SLICES * GROUP * (u32)sizeof(Softmax),
                             sizeof(shared.keys), blocks * (u32)sizeof(uint2)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mbarrier_init(barriers[i], 1);
            mbarrier_arrive_expect_tx(barriers[i], bytes[i]);
        }
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); // this block's mbarriers are initialized
    if (!a.pdl) pdl_wait();
    const SelectRange range = range_of(a, row / a.heads);
    const u8* codes = a.codes + row * a.code_stride;
    const u32 span = ((range.n + blocks * TOKENS_PER_THREAD - 1) / TOKENS_PER_THREAD >> block_bits) * TOKENS_PER_THREAD,
              first = rank * span, end = min(range.n, first + span);
    u32 token = first + TOKENS_PER_THREAD * threadIdx.x, joint[TOKENS_PER_THREAD / 2];
    if (token < end) {
        load_joint_codes(codes, token, joint);
#pragma unroll
        for (int i = 0; i < TOKENS_PER_THREAD / 2; i++) shared.joint[warp][i][lane] = joint[i];
    }
    __syncthreads();
    while (token < end) {
        // Most threads hold only tokens that compete, and need no test per token.
        if (token >= range.first && token + TOKENS_PER_THREAD <= min(end, range.end))
#pragma unroll
            for (int i = 0; i < TOKENS_PER_THREAD; i++) atomicAdd(&shared.counts[joint_code(joint, i)], 1);
        else
            for (int i = 0; i < TOKENS_PER_THREAD; i++)
                if (token + i < end && range.contains(token + i)) atomicAdd(&shared.counts[joint_code(joint, i)], 1);
        token += TOKENS_PER_THREAD * THREADS;
        if (token < end) load_joint_codes(codes, token, joint);
    }
    pdl_wait();
    pdl_trigger();
    // The tables arrive during the exchange of the counts.
    constexpr int TABLE_LEN = GROUP * M * KSUB, TABLE_PER_THREAD = (TABLE_LEN + THREADS - 1) / THREADS;
    float table[TABLE_PER_THREAD];
#pragma unroll
    for (int i = 0; i < TABLE_PER_THREAD; i++)
        if (i * THREADS + threadIdx.x < TABLE_LEN)
            table[i] = __ldcg(a.luts + (u64)row * TABLE_LEN + i * THREADS + threadIdx.x);
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // all mbarriers are initialized
    __syncthreads();
    // Counts of the block's share of the codes, of all tokens of the row.
    u32* total_counts = is_alone ? shared.counts : shared.peer_counts;
    if (!is_alone) {
#pragma unroll
        for (int i = 0; i < CODES_PER_THREAD; i++) {
            const u32 code = threadIdx.x + i * THREADS;
            if (code < JOINT_CODES)
                st_async(&shared.peer_counts[first_code + code % share], code >> share_bits, shared.counts[code],
                         shared.counts_barrier);
        }
        mbarrier_wait_cluster(shared.counts_barrier);
        for (u32 i = threadIdx.x; i < share; i += THREADS) {
            u32 total_count = 0;
#pragma unroll
            for (u32 block = 0; block < MOST_BLOCKS; block++)
                if (block < blocks) total_count += shared.peer_counts[(block << share_bits) + i];
            total_counts[i] = total_count;
        }
    }
#pragma unroll
    for (int i = 0; i < TABLE_PER_THREAD; i++)
        if (i * THREADS + threadIdx.x < TABLE_LEN) (&shared.luts[0][0])[i * THREADS + threadIdx.x] = table[i];
    __syncthreads();
    for (int query = warp % CONCURRENT_QUERIES; query < GROUP; query += CONCURRENT_QUERIES) {
        const float* luts = shared.luts[query];
        const int slice = warp / CONCURRENT_QUERIES;
        // A selection instead of a branch lets the loads of several codes overlap.
        const auto occurring_score = [&](u32 i) {
            const float score = score_of(luts, first_code + i);
            return total_counts[i] ? score : -infinity();
        };
        // The maximum first, so that a code takes one exponential.
        Softmax mine = empty_softmax();
        for (u32 i = slice * LANES + lane; i < share; i += SLICES * LANES)
            mine.max = fmaxf(mine.max, occurring_score(i));
        const float base = mine.finite_max();
        for (u32 i = slice * LANES + lane; i < share; i += SLICES * LANES)
            mine.sum += (float)total_counts[i] * exp2_approx((occurring_score(i) - base) * LOG2_E);
        // Sinks and recent tokens do not compete, so they are not in the histogram.
        const u32 sinks = range.first, others = sinks + range.n - range.end;
        for (u32 i = (rank * SLICES + slice) * LANES + lane; i < others; i += blocks * SLICES * LANES)
            mine.add(repeated_score(score_of(luts, load_joint_code(codes, i < sinks ? i : range.end + i - sinks)), 1));
        mine = warp_softmax(mine);
        if (is_alone)
            shared.slice_softmax[query][slice] = mine;
        else if (lane < blocks)
            st_async(&shared.slice_softmax[query][rank * SLICES + slice], lane,
                     make_uint2(__float_as_uint(mine.max), __float_as_uint(mine.sum)), shared.softmax_barrier);
    }
    if (is_alone) __syncthreads();
    if (warp < GROUP) {
        if (!is_alone) mbarrier_wait_cluster(shared.softmax_barrier);
        static_assert(MOST_BLOCKS * SLICES == 2 * LANES, "two slices a lane");
        const Softmax* slices = shared.slice_softmax[warp];
        Softmax all = lane < blocks * SLICES ? slices[lane] : empty_softmax();
        if (LANES + lane < blocks * SLICES) all.add(slices[LANES + lane]);
        all = warp_softmax(all);
        if (lane == 0) {
            shared.max[warp] = all.finite_max(), shared.scale[warp] = 1.f / all.sum;
            float* stats = a.stats ? a.stats + ((u64)row * GROUP + warp) * 2 : nullptr;
            if (stats && rank == 0) stats[0] = all.max, stats[1] = all.sum;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < share; i += THREADS) {
        const u32 code = first_code + i;
        float weight = 0;
#pragma unroll 4
        for (int query = 0; query < GROUP; query++)
            weight =
                combine(weight, weight_of(score_of(shared.luts[query], code), shared.max[query], shared.scale[query]));
        const u32 key =
            key_of(weight, shared.max, shared.scale, [&](int query) { return score_of(shared.luts[query], code); });
        const uint2 key_and_count = make_uint2(key, total_counts[i]);
        if (is_alone)
            shared.keys[code] = key_and_count;
        else
#pragma unroll
            for (u32 block = 0; block < MOST_BLOCKS; block++)
                if (block < blocks) st_async(shared.keys + code, block, key_and_count, shared.keys_barrier);
    }
    if (!is_alone) mbarrier_wait_cluster(shared.keys_barrier);
    u32 keys[CODES_PER_THREAD], count[CODES_PER_THREAD];
#pragma unroll
    for (int i = 0; i < CODES_PER_THREAD; i++) {
        const u32 joint = threadIdx.x + i * THREADS;
        const uint2 both = joint < JOINT_CODES ? shared.keys[joint] : make_uint2(0, 0);
        keys[i] = both.x, count[i] = both.y;
    }

    const u32 competing = range.end - range.first;
    Threshold threshold = range.k ? select_all() : select_none();
    if (range.k && range.k < competing) threshold = find_threshold(shared, keys, count, range.k);
    u32 above = 0, ties = 0; // of this block's tokens
#pragma unroll
    for (int i = 0; i < CODES_PER_THREAD; i++) {
        const u32 joint = threadIdx.x + i * THREADS, mine = shared.counts[joint];
        const bool is_above = keys[i] > threshold.key, is_tie = keys[i] == threshold.key;
        above += is_above ? mine : 0, ties += is_tie ? mine : 0;
        shared.counts[joint] = is_above ? ABOVE : is_tie ? TIE : BELOW;
    }
    above = __reduce_add_sync(FULL, above), ties = __reduce_add_sync(FULL, ties);
    if (lane == 0) shared.warp_above_and_ties[warp] = make_uint2(above, ties);
    __syncthreads();
    if (!is_alone) {
        if (warp == 0) {
            const uint2 warp_sums = shared.warp_above_and_ties[lane];
            above = __reduce_add_sync(FULL, warp_sums.x), ties = __reduce_add_sync(FULL, warp_sums.y);
            if (lane < blocks)
                st_async(shared.above_and_ties + rank, lane, make_uint2(above, ties), shared.above_and_ties_barrier);
        }
        // After this wait no block stores here any more, so a block may exit.
        mbarrier_wait_cluster(shared.above_and_ties_barrier);
    }
    const uint2 others = lane < rank ? shared.above_and_ties[lane] : make_uint2(0, 0);
    u32 above_before = __reduce_add_sync(FULL, others.x), ties_before = __reduce_add_sync(FULL, others.y);

    const Output out{a.tokens + row * a.tokens_len, a.tokens_len, range};
    if (rank == 0 && threadIdx.x == 0 && row % a.heads == 0) a.counts[row / a.heads] = range.output_count();
    const u32* code_class = shared.counts;
    u16* list = reinterpret_cast<u16*>(shared.joint[warp]); // offsets from the warp's first token
    for (u32 start = first; start < end; start += TOKENS_PER_THREAD * THREADS) {
        const u32 token = start + TOKENS_PER_THREAD * threadIdx.x;
        u32 joint[TOKENS_PER_THREAD / 2], classes = 0; // sum of the tokens' classes, token i's shifted by i
        if (token < end) {
            if (start == first)
#pragma unroll
                for (int i = 0; i < TOKENS_PER_THREAD / 2; i++) joint[i] = shared.joint[warp][i][lane];
            else
                load_joint_codes(codes, token, joint);
#pragma unroll
            for (int i = 0; i < TOKENS_PER_THREAD; i++) classes += code_class[joint_code(joint, i)] << i;
        }
        const u32 exist = tokens_below(end, token),
                  compete = exist & tokens_below(range.end, token) & ~tokens_below(range.first, token);
        const u32 is_above = classes & compete, is_tie = classes >> TOKENS_PER_THREAD & compete;
        u32 above = __popc(is_above), ties = __popc(is_tie), all_above, all_ties;
        scan_selected<THREADS>(above, ties, all_above, all_ties);
        above += above_before, ties = min(ties + ties_before, threshold.ties);
        above_before += all_above, ties_before += all_ties;

        // Sinks and recent tokens are always selected: those before `token` precede it in the output, too.
        const u32 selected = (exist & ~compete) | is_above | lowest_set_bits(is_tie, threshold.ties - ties);
        const u32 place = min(token, range.first) + above + ties + (token - min(token, range.end));
        const u32 count = __reduce_add_sync(FULL, __popc(selected));
        if (count <= LANES) { // few sectors in any order
            u32 next = place;
            for (u32 bits = selected; bits; bits &= bits - 1) out.put(next++, token + __ffs(bits) - 1);
            continue;
        }
        const u32 warp_place = __shfl_sync(FULL, place, 0);
        u16* next = list + (place - warp_place);
#pragma unroll
        for (int i = 0; i < TOKENS_PER_THREAD; i++)
            if (selected >> i & 1) *next++ = lane * TOKENS_PER_THREAD + i;
        __syncwarp();
        const u32 warp_token = token - lane * TOKENS_PER_THREAD;
        for (u32 i = lane; i < count; i += LANES) out.put(warp_place + i, warp_token + list[i]);
    }
}

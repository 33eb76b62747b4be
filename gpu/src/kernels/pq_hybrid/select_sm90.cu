// Second part of hybrid attention on sm_90: select.cu as one kernel, in which a cluster of blocks has a row.
//
// shape.cuh has the compile-time shape and explains the method. Launch: grid (block of the row, row), clusters of all
// blocks of a row, THREADS threads. Each block
//
// 1. computes the keys of its part of the tokens and counts them by their highest 11 bits, then, among those that share
//    these bits with the k-th highest key of the row, by their next 10 bits, then by their lowest 10: after each count
//    it adds its counts to those of all blocks, in distributed shared memory;
//    if ADAPTIVE, the first count decides k;
// 2. counts its tokens above and equal to that key, tells the other blocks, and writes those that are selected.
//
// Keys lie in shared memory, or in the workspace where a block has more than KEYS of them.
#include "mbarrier_sm90.cuh"
#include "pq_hybrid/budget.cuh"

constexpr int THREADS = SELECT_THREADS, WARPS = THREADS / LANES;
constexpr int MOST_BLOCKS = 16;          // of a cluster
constexpr u32 KEYS = 32768;              // in shared memory
constexpr u32 NO_KEY = 1u << KEY_WIDTH; // of places without a token: negative
// Tokens of a thread at a time: the scores of more queries need more registers.
constexpr int PLACES = GROUP <= 4 ? 4 : 2;

template <class T>
struct alignas(4 * PLACES) Places {
    T at[PLACES];
};

// Scores of a lane's places in a tile.
struct LaneScores {
    static constexpr u32 STEP = THREADS / (TILE / PLACES); // tiles of a block at a time
    Places<float> of_query[GROUP];

    // `scores`: of the lane's places in the block's first tile.
    __device__ __forceinline__ void load(const float* scores, u32 tile) {
#pragma unroll
        for (int q = 0; q < GROUP; q++)
            of_query[q] = *reinterpret_cast<const Places<float>*>(scores + ((u64)tile * GROUP + q) * TILE);
    }
};

struct Shared {
    u32 keys[KEYS]; // in the order of the scores
    // By the digits of a key: the keys of this block, and of all blocks of the cluster, which they add themselves.
    u32 counts[HIGH_BUCKETS + 2 * LOW_BUCKETS], totals[HIGH_BUCKETS + 2 * LOW_BUCKETS];
    uint2 of_block[MOST_BLOCKS], of_warp[WARPS]; // tokens above the threshold, and equal to it
    Normalizers normalizers;
#ifdef ADAPTIVE
    Budget budget;
#endif
};
extern __shared__ __align__(16) u8 memory[];
static_assert(sizeof(Shared) <= SELECT_SHARED_BYTES, "the host reserves it");

// Adds the counts of all blocks of the cluster.
template <int BUCKETS>
__device__ __forceinline__ void add_in_cluster(const u32* counts, u32* totals) {
    __syncthreads();
    const u32 blocks = cluster_nctarank();
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS)
        if (const u32 count = counts[i])
            for (u32 rank = 0; rank < blocks; rank++) red_add_cluster(totals + i, rank, count);
    cluster_arrive();
    cluster_wait();
}

// Counts the keys whose highest bits are `high`, by the LOW_BITS bits from bit `shift` on.
__device__ __forceinline__ void count_digit(u32* counts, const uint4* keys, u32 count, u32 high, int shift) {
    const u32 least = high << LOW_BITS << shift, range = 1u << LOW_BITS << shift;
    for (u32 i = threadIdx.x; i < count / 4; i += THREADS) {
        const uint4 four = keys[i];
        const u32 lower[4] = {four.x - least, four.y - least, four.z - least, four.w - least};
        if (min(min(lower[0], lower[1]), min(lower[2], lower[3])) >= range) continue;
#pragma unroll
        for (const u32 bits : lower)
            if (bits < range) atomicAdd(&counts[bits >> shift], 1);
    }
}

// The row's threshold for its `k` highest keys, whose first digits have been counted and added.
__device__ __forceinline__ Threshold find_threshold(Shared& shared, const uint4* keys, u32 count, u32 k) {
    u32 *counts = shared.counts, *totals = shared.totals;
    Bucket digit = find_bucket<THREADS, HIGH_BUCKETS>(totals, k);
    u32 high = digit.index;
    counts += HIGH_BUCKETS, totals += HIGH_BUCKETS;
#pragma unroll
    for (int shift = LOW_BITS; shift >= 0; shift -= LOW_BITS) {
        k -= digit.above;
        if (k == digit.count) return select_from(high << shift << LOW_BITS);
        count_digit(counts, keys, count, high, shift);
        add_in_cluster<LOW_BUCKETS>(counts, totals);
        digit = find_bucket<THREADS, LOW_BUCKETS>(totals, k);
        high = high << LOW_BITS | digit.index;
        counts += LOW_BUCKETS, totals += LOW_BUCKETS;
    }
    return {high, k - digit.above};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_hybrid_select(const SelectArguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 row = blockIdx.y, rank = cluster_ctarank(), warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (int i = threadIdx.x; i < HIGH_BUCKETS + 2 * LOW_BUCKETS; i += THREADS) shared.counts[i] = shared.totals[i] = 0;
    cluster_arrive();
    SelectRange range = range_of(a, row);
    const u32 tiles = (range.n + TILE - 1) / TILE, span = (tiles + gridDim.x - 1) / gridDim.x;
    const u32 first = min(rank * span, tiles), count = min(span, tiles - first); // tiles of this block
#ifdef ADAPTIVE
    if (warp >= GROUP) shared.budget.load(a, row, rank, gridDim.x);
#endif
    pdl_wait();
    pdl_trigger();
    u32* keys = span * TILE <= KEYS ? shared.keys : selection_of(a, row).keys + first * TILE;
    const u32 place = lane % (TILE / PLACES) * PLACES;
    const float* scores = a.scores_of(row) + (u64)first * (GROUP * TILE) + place;
    u32 tile = threadIdx.x / (TILE / PLACES);
    LaneScores ahead; // the loads of the next tile overlap with the keys of this one
    if (tile < count) ahead.load(scores, tile);
    if (threadIdx.x < GROUP * LANES) shared.normalizers.load(a, row);
    cluster_wait(); // all counts are zero
    __syncthreads(); // normalizers
#ifdef ADAPTIVE
    if (range.k == 0 && rank == 0 && threadIdx.x == 0) put_found(a, row, 0);
#endif
    if (range.k == 0) return;

    const Normalizers normalizers = shared.normalizers;
#ifdef ADAPTIVE
    if (warp < GROUP) {
        const Stats stats = shared.budget.block_stats(warp);
        const uint2 bits = make_uint2(__float_as_uint(stats.max), __float_as_uint(stats.sum));
        if (lane < gridDim.x) st_cluster(&shared.budget.of_block[rank][warp], lane, bits);
    }
#endif
    for (; tile < count; tile += LaneScores::STEP) {
        const LaneScores of_tile = ahead;
        if (tile + LaneScores::STEP < count) ahead.load(scores, tile + LaneScores::STEP);
        Places<u32> key;
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            float score[GROUP];
#pragma unroll
            for (int q = 0; q < GROUP; q++) score[q] = of_tile.of_query[q].at[i];
            const bool exists = (first + tile) * TILE + token_at(place + i) < range.n;
            key.at[i] = exists ? normalizers.key_of_scores(score) : NO_KEY;
            if (exists) atomicAdd(&shared.counts[key.at[i] >> 2 * LOW_BITS], 1);
        }
        *reinterpret_cast<Places<u32>*>(keys + tile * TILE + place) = key;
    }
    __syncthreads();
    if (IS_ADAPTIVE || range.k < range.n) add_in_cluster<HIGH_BUCKETS>(shared.counts, shared.totals);
#ifdef ADAPTIVE
    if (warp == 0) {
        const u32 rows = shared.budget.find(a, row, shared.totals, range.n, shared.normalizers, gridDim.x);
        if (lane == 0) shared.budget.rows = rows;
    }
    __syncthreads();
    range.k = min(range.k, shared.budget.rows);
    if (rank == 0 && threadIdx.x == 0) put_found(a, row, range.k);
    if (range.k == 0) return;
#endif
    const uint4* fours = reinterpret_cast<const uint4*>(keys);
    const Threshold threshold =
        range.k == range.n ? select_all() : find_threshold(shared, fours, count * TILE, range.k);

    // A warp has consecutive tiles, four at a time.
    const u32 of_warp = (count + 4 * WARPS - 1) / (4 * WARPS) * 4;
    const u32 from = min(warp * of_warp, count), to = min(from + of_warp, count);
    const int limit = threshold.key;
    u32 above = 0, ties = 0;
    for (u32 i = from * 8 + lane; i < to * 8; i += LANES) {
        const uint4 four = fours[i];
        const int of_lane[4] = {(int)four.x, (int)four.y, (int)four.z, (int)four.w};
#pragma unroll
        for (const int key : of_lane) above += key > limit, ties += key == limit;
    }
    above = __reduce_add_sync(FULL, above), ties = __reduce_add_sync(FULL, ties);
    if (lane == 0) shared.of_warp[warp] = make_uint2(above, ties);
    __syncthreads();
    const auto sum_before = [&](const uint2* counts, u32 end) {
        const uint2 mine = lane < end ? counts[lane] : make_uint2(0, 0);
        return make_uint2(__reduce_add_sync(FULL, mine.x), __reduce_add_sync(FULL, mine.y));
    };
    if (warp == 0) {
        const uint2 all = sum_before(shared.of_warp, WARPS);
        if (lane < gridDim.x) st_cluster(shared.of_block + rank, lane, all);
    }
    cluster_arrive();
    cluster_wait();
    const uint2 of_blocks = sum_before(shared.of_block, rank), of_warps = sum_before(shared.of_warp, warp);
    above = of_blocks.x + of_warps.x, ties = of_blocks.y + of_warps.y;
    const SelectedOutput out(a, row, range);
    const u32 lanes_before = (1u << lane) - 1;
    for (u32 begin = from; begin < to; begin += 4) {
        const u32 i = begin * 8 + lane;
        const uint4 four = i < to * 8 ? fours[i] : make_uint4(NO_KEY, NO_KEY, NO_KEY, NO_KEY);
        const int highest = max(max((int)four.x, (int)four.y), max((int)four.z, (int)four.w));
        // Most tiles have no token of the selection.
        for (u32 lanes = __ballot_sync(FULL, highest >= limit); lanes;) {
            const u32 in_four = (__ffs(lanes) - 1) / 8, tile = begin + in_four;
            lanes &= ~(0xffu << in_four * 8);
            const int key = keys[tile * TILE + place_of(lane)];
            const u32 is_above = __ballot_sync(FULL, key > limit), is_tie = __ballot_sync(FULL, key == limit);
            const u32 tie = ties + __popc(is_tie & lanes_before);
            if (key > limit || (key == limit && tie < threshold.ties))
                out.put_selected(above + __popc(is_above & lanes_before) + min(tie, threshold.ties),
                                 (first + tile) * TILE + lane);
            above += __popc(is_above), ties += __popc(is_tie);
        }
    }
}

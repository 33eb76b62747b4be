// Second part of hybrid attention on sm_90: select.cu as one kernel, with one cluster of blocks per row.
//
// shape.cuh has the compile-time shape and explains the method. Launch: grid (block of the row, row), clusters of all
// blocks of a row, THREADS threads. Each block
//
// 1. computes the keys of its part of the tokens and builds a histogram of their highest 11 bits, which decides k if
//    ADAPTIVE; lists the tokens whose keys reach the highest bits of the row's k-th highest key; builds a histogram of
//    the next 10 bits of the keys that share these bits, then of the lowest 10. Blocks sum each histogram over the
//    cluster in distributed shared memory;
// 2. counts its tokens above and equal to the k-th highest key, sends these counts to the other blocks, and writes its
//    selected tokens.
//
// Keys are in shared memory, or in the workspace if a block has more than KEYS of them.
#include "mbarrier_sm90.cuh"
#include "pq_hybrid/budget.cuh"

constexpr int THREADS = SELECT_THREADS, WARPS = THREADS / LANES;
constexpr int MOST_BLOCKS = 16;          // maximum blocks of a cluster
constexpr u32 KEYS = 32768;              // capacity in shared memory
constexpr u32 NO_KEY = 1u << KEY_WIDTH; // key of places without a token: negative
// Tokens per thread and step: the scores of more queries need more registers.
constexpr int PLACES = GROUP <= 4 ? 4 : 2;

template <class T>
struct alignas(sizeof(T) * PLACES) Places {
    T at[PLACES];
};

// Scores of a lane's places in a tile, and the tile's levels.
struct LaneScores {
    static constexpr u32 STEP = THREADS / (TILE / PLACES); // tiles per step of a block
    Places<u16> of_query[GROUP];
    float levels[VEC];

    __device__ __forceinline__ void load(const ScoredTile& tile, u32 place) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) of_query[q] = *reinterpret_cast<const Places<u16>*>(&tile.scores[q][place]);
#pragma unroll
        for (int q = 0; q < VEC; q += 2) {
            const float2 two = *reinterpret_cast<const float2*>(tile.levels + q);
            levels[q] = two.x, levels[q + 1] = two.y;
        }
    }
};

constexpr u32 MOST_LISTED = 192; // capacity of a warp's list
struct Listed {
    int key;
    u32 index; // in the block's part of the tokens
};

struct Shared {
    u32 keys[KEYS]; // in the order of the scores
    Listed lists[WARPS][MOST_LISTED];
    // Histograms of the digits of keys: of this block, and of the cluster, to which each block adds its own.
    u32 counts[HIGH_BUCKETS + 2 * LOW_BUCKETS], totals[HIGH_BUCKETS + 2 * LOW_BUCKETS];
    uint2 of_block[MOST_BLOCKS], of_warp[WARPS]; // tokens above the threshold, and equal to it
    Normalizers normalizers;
#ifdef ADAPTIVE
    Budget budget;
#endif
};
extern __shared__ __align__(16) u8 memory[];
static_assert(sizeof(Shared) <= SELECT_SHARED_BYTES, "the host reserves it");

// Adds 1 to a count if `condition` holds, with a predicate: branches would serialize the atomics of several tokens.
__device__ __forceinline__ void count_if(bool condition, u32* count) {
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p red.relaxed.cta.shared.add.u32 [%1], 1;\n}" ::"r"(
                     (u32)condition),
                 "r"(smem_address(count))
                 : "memory");
}

// Sums the counts over all blocks of the cluster.
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

// The tokens of a warp whose highest digit reaches the threshold's bucket, in ascending order: a list and, if the list
// overflows, all tokens of the tiles from `rest` on.
struct WarpTokens {
    u32 listed = 0, rest = 0, end = 0; // `rest` to `end`: tiles of the block

    // Lists the tokens of tiles `from` to `to` whose keys are at least `least`. Most tiles have none.
    __device__ __forceinline__ void list(Listed* list, const u32* keys, u32 from, u32 to, int least) {
        const u32 lane = threadIdx.x % LANES, lanes_before = (1u << lane) - 1;
        const uint4* fours = reinterpret_cast<const uint4*>(keys);
        const auto load = [&](u32 tile) { // the lane's part of four tiles
            const u32 i = tile * 8 + lane;
            return i < to * 8 ? fours[i] : make_uint4(NO_KEY, NO_KEY, NO_KEY, NO_KEY);
        };
        end = rest = to;
        uint4 next[2] = {load(from), load(from + 4)}; // prefetched: keys may be in global memory
        for (u32 begin = from; begin < to; begin += 4) {
            const uint4 four = next[0];
            next[0] = next[1], next[1] = load(begin + 8);
            const int key[4] = {(int)four.x, (int)four.y, (int)four.z, (int)four.w};
            u32 found[4], count = 0; // lanes whose keys are found
#pragma unroll
            for (int i = 0; i < 4; i++) count += __popc(found[i] = __ballot_sync(FULL, key[i] >= least));
            if (count == 0) continue;
            if (listed + count > MOST_LISTED) {
                rest = begin;
                break;
            }
            const u32 in_tile = 0xffu << lane / 8 * 8;
            u32 place = listed;
#pragma unroll
            for (int i = 0; i < 4; i++) place += __popc(found[i] & ((1u << lane / 8 * 8) - 1));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 token = token_at(lane % 8 * 4 + i), of_tile = found[i] & in_tile;
                if (key[i] >= least)
                    list[place + __popc(of_tile & lanes_before)] = {key[i], (begin + lane / 8) * TILE + token};
                place += __popc(of_tile);
            }
            listed += count;
        }
        __syncwarp();
    }

    // Calls `f` with the key and the index in the block's part, for LANES tokens at a time.
    template <class F>
    __device__ __forceinline__ void for_each(const Listed* list, const u32* keys, const F& f) const {
        const u32 lane = threadIdx.x % LANES, steps = (listed + LANES - 1) / LANES;
        for (u32 step = 0; step < steps + (end - rest); step++) {
            if (step < steps) {
                const u32 i = step * LANES + lane;
                const Listed token = i < listed ? list[i] : Listed{(int)NO_KEY, 0};
                f(token.key, token.index);
            } else {
                const u32 tile = rest + step - steps;
                f((int)keys[tile * TILE + place_of(lane)], tile * TILE + lane);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_hybrid_select(const SelectArguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 row = blockIdx.y, rank = cluster_ctarank(), warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (int i = threadIdx.x; i < HIGH_BUCKETS + 2 * LOW_BUCKETS; i += THREADS) shared.counts[i] = shared.totals[i] = 0;
    cluster_arrive();
    pdl_trigger(); // attention blocks load their tables while other blocks still score
    SelectRange range = range_of(a, row);
    const u32 tiles = (range.n + TILE - 1) / TILE, span = (tiles + gridDim.x - 1) / gridDim.x;
    const u32 first = min(rank * span, tiles), count = min(span, tiles - first); // tiles of this block
#ifdef ADAPTIVE
    if (warp >= GROUP) shared.budget.load(a, row, rank, gridDim.x);
#endif
    pdl_wait();
    end_scores(a);
    u32* keys = span * TILE <= KEYS ? shared.keys : selection_of(a, row).keys + first * TILE;
    const u32 place = lane % (TILE / PLACES) * PLACES;
    const ScoredTile* scores = a.scores_of(row) + first;
    u32 tile = threadIdx.x / (TILE / PLACES);
    LaneScores ahead; // the loads of the next tile overlap with the keys of this one
    if (tile < count) ahead.load(scores[tile], place);
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
        if (tile + LaneScores::STEP < count) ahead.load(scores[tile + LaneScores::STEP], place);
        // Nearly all weights are heavy (`is_heavy`). One test per lane instead of one per token keeps the tokens of the
        // loop independent of each other.
        Places<u32> key;
        bool all_heavy = true;
        float level[GROUP];
#pragma unroll
        for (int q = 0; q < GROUP; q++) level[q] = of_tile.levels[q] - normalizers.log_sum[q] - ORIGIN;
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            float score[GROUP];
#pragma unroll
            for (int q = 0; q < GROUP; q++) score[q] = near_score(of_tile.of_query[q].at[i]);
            const float weight = Normalizers::weight_of(score, level);
            key.at[i] = heavy_key(weight), all_heavy &= is_heavy(weight);
        }
        if (!all_heavy) {
            const ScoredTile& again = scores[tile];
#pragma unroll
            for (int i = 0; i < PLACES; i++) {
                float score[GROUP];
#pragma unroll
                for (int q = 0; q < GROUP; q++) score[q] = near_score(again.scores[q][place + i]);
                key.at[i] = shared.normalizers.key_of_any(
                    Normalizers::weight_of(score, level),
                    [&](int q) { return any_score(again.scores[q][place + i]) + again.levels[q]; });
            }
        }
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            const bool exists = (first + tile) * TILE + token_at(place + i) < range.n;
            count_if(exists, &shared.counts[key.at[i] >> 2 * LOW_BITS]);
            if (!exists) key.at[i] = NO_KEY;
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
    // Each warp has consecutive tiles and processes four at a time.
    const u32 of_warp = (count + 4 * WARPS - 1) / (4 * WARPS) * 4;
    const u32 from = min(warp * of_warp, count), to = min(from + of_warp, count);
    Listed* list = shared.lists[warp];
    WarpTokens tokens;
    Threshold threshold = select_all();
    if (range.k == range.n) {
        tokens.list(list, keys, from, to, 0);
    } else {
        u32 k = range.k, *counts = shared.counts + HIGH_BUCKETS, *totals = shared.totals + HIGH_BUCKETS;
        Bucket digit = find_bucket<THREADS, HIGH_BUCKETS>(shared.totals, k);
        u32 least = digit.index << 2 * LOW_BITS;
        tokens.list(list, keys, from, to, least);
        int shift = 2 * LOW_BITS;
#pragma unroll 1 // the second round hits the instruction cache
        while (k - digit.above < digit.count && shift > 0) {
            k -= digit.above, shift -= LOW_BITS;
            tokens.for_each(list, keys, [&](int key, u32) {
                const u32 lower = (key - least) >> shift;
                if (lower < LOW_BUCKETS) atomicAdd(&counts[lower], 1);
            });
            add_in_cluster<LOW_BUCKETS>(counts, totals);
            digit = find_bucket<THREADS, LOW_BUCKETS>(totals, k);
            least |= digit.index << shift, counts += LOW_BUCKETS, totals += LOW_BUCKETS;
        }
        k -= digit.above;
        threshold = k == digit.count ? select_from(least) : Threshold{least, k};
    }

    const int limit = threshold.key;
    u32 above = 0, ties = 0;
    tokens.for_each(list, keys, [&](int key, u32) { above += key > limit, ties += key == limit; });
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
    tokens.for_each(list, keys, [&](int key, u32 index) {
        const u32 is_above = __ballot_sync(FULL, key > limit), is_tie = __ballot_sync(FULL, key == limit);
        const u32 tie = ties + __popc(is_tie & lanes_before);
        if (key > limit || (key == limit && tie < threshold.ties))
            out.put_selected(above + __popc(is_above & lanes_before) + min(tie, threshold.ties), first * TILE + index);
        above += __popc(is_above), ties += __popc(is_tie);
    });
}

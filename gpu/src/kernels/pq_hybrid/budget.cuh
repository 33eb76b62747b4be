// The number of rows that a head reads, if ADAPTIVE: enough to keep the expected error of every query's output below a
// bound.
//
// CPU twin: pq_core::RowBudget::Error, whose module derives the estimate. Weights are bucketed by the first digit of
// their keys, so that the histogram of the radix select is all that the estimate needs of the coded tokens.
#pragma once
#include "element.cuh"
#include "pq_hybrid/selection.cuh"

constexpr float MARGIN = 2.5f; // MARGIN of the CPU twin

struct alignas(8) Budget {
    static constexpr int WARPS = SELECT_THREADS / LANES, MOST_BLOCKS = 16;
    // Buckets of weights from 2^-40 to 2^8, the lower end of the first one, and its index in the counts of digits.
    static constexpr u32 BUCKETS = 8 * 48, FIRST_BITS = (127 - 40) << 3,
                         FIRST = (HEAVY >> 20) + FIRST_BITS - ((127 - 100) << 3), PER_LANE = BUCKETS / LANES;

    Stats of_warp[GROUP][WARPS];      // of the row's sinks and window
    Stats of_block[MOST_BLOCKS][GROUP];
    float variance[GROUP]; // of the exact scores about the coded ones
    u32 rows;

    // Called by all warps of a block but the first GROUP: the statistics of every `step`-th exact token from `first`
    // on, and the variances. It may precede `pdl_wait`: scores.cu has already waited for the inputs that this reads.
    __device__ __forceinline__ void load(const SelectArguments& a, u32 row, u32 first, u32 step) {
        const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        if (warp < 2 * GROUP) find_variance(a, row, warp - GROUP);
        const Stats stats = exact_stats(a, row, first + step * (warp - GROUP), step * (WARPS - GROUP));
        if (lane < GROUP) of_warp[lane][warp] = stats;
    }

    // Called by warp `query`, after a barrier: the statistics of the block's exact tokens, in all lanes.
    __device__ __forceinline__ Stats block_stats(u32 query) const {
        const u32 lane = threadIdx.x % LANES;
        return merged_lanes(lane >= GROUP ? of_warp[query][lane] : no_scores());
    }

    // Called by one warp: the number of rows that a head with `n` coded tokens reads, given the counts of the first
    // digits of its keys. `of_block` holds the statistics of `blocks` blocks.
    __device__ __forceinline__ u32 find(const SelectArguments& a, u32 row, const u32* counts, u32 n,
                                        const Normalizers& normalizers, u32 blocks) const {
        const u32 lane = threadIdx.x % LANES;
        float factor = 0; // `fmaxf` ignores the NaN of a query that is not finite
        if (lane < GROUP) {
            float max = NEG_INF, sum = 0;
            for (u32 i = 0; i < blocks; i++) max = fmaxf(max, of_block[i][lane].max);
            for (u32 i = 0; i < blocks; i++) sum += of_block[i][lane].sum * exp2_approx(of_block[i][lane].max - max);
            const float share = 1 / (1 + exp2_approx(max + __log2f(sum) - normalizers.log_sum[lane]));
            factor = fmaxf(0, (expm1f(variance[lane]) + a.bound.value_errors[row % a.heads]) * share * share);
        }
        factor = warp_max(factor);
        const float expected = a.bound.bound / MARGIN;
        return factor == 0 ? 0 : above(counts, n, expected * expected / factor); // codes without an error are exact
    }

private:
    // The variance of a query's scores.
    __device__ __forceinline__ void find_variance(const SelectArguments& a, u32 row, u32 query) {
        const u32 lane = threadIdx.x % LANES;
        const u16* queries = a.queries + ((u64)row * GROUP + query) * D;
        float sum = 0;
        if (a.errors)
            for (u32 d = lane; d < D; d += LANES) {
                const float x = to_float(__ldcg(queries + d)) * (a.scale * LN_2);
                sum += x * x * __ldg(a.errors + row % a.heads * D + d);
            }
        sum = warp_sum(sum);
        if (lane == 0) variance[query] = sum;
    }

    // A warp's statistics of exact tokens: lane q has those of query q.
    __device__ __forceinline__ static Stats exact_stats(const SelectArguments& a, u32 row, u32 first, u32 step) {
        constexpr int PAIRS = D / 2 / LANES; // pairs of components of a lane
        const u32 lane = threadIdx.x % LANES, at = lane * PAIRS;
        const u32 length = a.bound.exact_lengths ? __ldg(a.bound.exact_lengths + row / a.heads) : 0;
        Stats stats = no_scores();
        if (!warp_uniform(first < length)) return stats;
        // Bypasses L1, which may hold queries of the previous launch.
        const u32* queries = reinterpret_cast<const u32*>(a.bound.queries) + (u64)row * GROUP * WORDS + at;
        u32 query[GROUP][PAIRS];
#pragma unroll
        for (int i = 0; i < GROUP * PAIRS; i++)
            query[i / PAIRS][i % PAIRS] = __ldcg(queries + i / PAIRS * WORDS + i % PAIRS);
        const u64 first_key = (u64)row * a.bound.exact_capacity * WORDS;
        const u32* keys = reinterpret_cast<const u32*>(a.bound.exact_keys) + first_key + at;
        for (u32 token = first; token < length; token += step) {
            float key[PAIRS][2], score = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) unpack(__ldcg(keys + (u64)token * WORDS + i), key[i]);
#pragma unroll
            for (int q = 0; q < GROUP; q++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    float pair[2];
                    unpack(query[q][i], pair);
                    dot += pair[0] * key[i][0] + pair[1] * key[i][1];
                }
                dot = warp_sum(dot);
                if (lane == q) score = dot * a.scale;
            }
            stats = merged(stats, {score, 1});
        }
        return stats;
    }

    static __device__ __forceinline__ void unpack(u32 pair, float (&x)[2]) {
        x[0] = to_float((u16)pair), x[1] = to_float((u16)(pair >> 16));
    }

    // The number of largest weights to leave out so that the squares of the others sum to at most `budget`.
    static __device__ __forceinline__ u32 above(const u32* counts, u32 n, float budget) {
        const u32 lane = threadIdx.x % LANES;
        const auto end = [](u32 bucket) { return __uint_as_float((bucket + FIRST_BITS) << 20); };
        u32 count[PER_LANE], tokens = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) tokens += count[i] = counts[FIRST + lane * PER_LANE + i];
        // The first bucket includes all smaller weights.
        const u32 smaller = n - __reduce_add_sync(FULL, tokens);
        if (lane == 0) count[0] += smaller, tokens += smaller;
        float square[PER_LANE], squares = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const u32 bucket = lane * PER_LANE + i;
            const float least = bucket == 0 ? 0 : end(bucket), most = end(bucket + 1);
            squares += square[i] = (float)count[i] * ((least * least + least * most + most * most) / 3);
        }
        const float inclusive = warp_inclusive_sum(squares);
        float left = __shfl_up_sync(FULL, inclusive, 1);
        if (lane == 0) left = 0;
        u32 higher = n - (warp_inclusive_sum(tokens) - tokens), rows = 0;
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            left += square[i], higher -= count[i];
            if (exceeds || !(left > budget)) continue;
            const u32 bucket = lane * PER_LANE + i;
            const float least = bucket == 0 ? 0 : end(bucket);
            rows = higher + min(__float2uint_ru((left - budget) / (least * least)), count[i]);
            exceeds = true;
        }
        const u32 lanes = __ballot_sync(FULL, exceeds);
        return lanes ? __shfl_sync(FULL, rows, __ffs(lanes) - 1) : 0;
    }
};

// Called by one thread of a row, after its last use of `range`.
__device__ __forceinline__ void put_found(const SelectArguments& a, u32 row, u32 rows) {
    a.bound.found[row] = rows;
    if (a.bound.total) atomicAdd(a.bound.total, (u64)rows);
}

// Shared by the selection kernels: keys that order tokens by their weight for a group of query heads, the search for
// the threshold key, and the range of candidate tokens.
//
// Compile-time shape: GROUP query heads of a KV head; MAX_RULE if a token's weight is the maximum over the group's
// queries, otherwise it is their sum.
#pragma once
#include "warp.cuh"

// Tokens `first` to `end` are candidates, `k` of which are selected. The sinks before them and the recent tokens after
// them are always selected.
struct SelectRange {
    u32 n, first, end, k;

    __device__ SelectRange(u32 n, u32 most, u32 sinks, u32 recent) : n(n) {
        first = min(sinks, n);
        end = n - min(recent, n - first);
        k = min(most, end - first);
    }
    __device__ bool contains(u32 token) const { return token >= first && token < end; }
    __device__ u32 output_count() const { return n - (end - first) + k; }
};

constexpr float MAX_SCORE = 3.40282347e38f;

// Replaces NaN by minus infinity and plus infinity by the largest float, so that one bad score does not make the
// softmax statistics NaN.
__device__ __forceinline__ float clean(float score) { return fminf(fmaxf(score, -infinity()), MAX_SCORE); }

// Softmax statistics of scores: maximum and sum of exponentials.
struct Softmax {
    float max, sum;

    __device__ __forceinline__ float finite_max() const { return max == -infinity() ? 0 : max; }

    __device__ __forceinline__ void add(const Softmax& other) {
        Softmax both = {fmaxf(max, other.max), 0};
        const float base = both.finite_max();
        // The maximum of an empty sum is minus infinity: the sum stays 0 and is not scaled.
        both.sum = (max == -infinity() ? sum : sum * exp2_approx((max - base) * LOG2_E)) +
                   (other.max == -infinity() ? other.sum : other.sum * exp2_approx((other.max - base) * LOG2_E));
        *this = both;
    }
};

// exp(score - max) * scale, at most 1. `__saturatef` turns NaN into 0.
__device__ __forceinline__ float weight_of(float score, float max, float scale) {
    return __saturatef(exp2_approx((score - max) * LOG2_E) * scale);
}

__device__ __forceinline__ Softmax empty_softmax() { return {-infinity(), 0}; }
// Statistics of `times` equal scores.
__device__ __forceinline__ Softmax repeated_score(float score, float times) {
    return {score, score == -infinity() ? 0 : times};
}

// Merges the statistics of all lanes. The maximum is reduced first, so that each lane scales its sum once.
__device__ __forceinline__ Softmax warp_softmax(const Softmax& softmax) {
    Softmax all = {warp_max(softmax.max), 0};
    const float keep = exp2_approx((softmax.max - all.finite_max()) * LOG2_E);
    // The maximum of an empty sum is minus infinity: the sum stays 0 and is not scaled.
    all.sum = warp_sum(softmax.max == -infinity() ? softmax.sum : softmax.sum * keep);
    return all;
}

// The group rule: folds one query's weight into the combined weight of the previous queries.
__device__ __forceinline__ float combine(float all, float weight) {
#ifdef MAX_RULE
    return weight > all ? weight : all;
#else
    return all + weight;
#endif
}

// Weights of at least MIN_WEIGHT are compared as they are, smaller ones by their logarithms, which do not underflow
// (pq_core::combine_group_into).
constexpr float MIN_WEIGHT = 0x1p-100f;
constexpr int KEY_WIDTH = 31;   // three radix digits: 11, 10 and 10 bits
constexpr u32 HEAVY = 1u << 30; // top bit of a key: set for weights, clear for logarithms

// An integer below HEAVY with the order of the float `x`, which is not NaN; the two lowest bits are lost.
__device__ __forceinline__ u32 key_of_logarithm(float x) {
    const u32 bits = __float_as_uint(x + 0.f);
    return (bits ^ ((u32)((int)bits >> 31) | 1u << 31)) >> 2;
}

// Half the logarithm of the group's weight, from the scores of its queries. Scores are halved because the difference of
// two finite scores can overflow; that of their halves cannot.
template <class ScoreOf>
__device__ float half_log_weight(const float* max, const float* scale, const ScoreOf& score_of) {
    float highest = -infinity(), sum = 0;
    for (int query = 0; query < GROUP; query++) {
        const float half = .5f * clean(score_of(query)) + (.5f * __logf(scale[query]) - .5f * max[query]);
        if (half > highest) {
            sum = sum * exp2_approx((highest - half) * (2 * LOG2_E)) + 1;
            highest = half;
        } else if (half > -infinity()) {
            sum += exp2_approx((half - highest) * (2 * LOG2_E));
        }
    }
#ifdef MAX_RULE
    return highest;
#else
    return sum > 0 ? highest + .5f * __logf(sum) : highest;
#endif
}

// Whether a weight is compared as it is, and its key in that case. A NaN is not.
__device__ __forceinline__ bool is_heavy(float weight) { return weight >= MIN_WEIGHT; }
__device__ __forceinline__ u32 heavy_key(float weight) {
    return HEAVY | (__float_as_uint(weight) - __float_as_uint(MIN_WEIGHT));
}

// The selection key of a token: from its weight or, if that has underflowed, its logarithm; with one query, the score
// takes the place of the logarithm. `score_of` is called only after underflow.
template <class ScoreOf>
__device__ __forceinline__ u32 key_of(float weight, const float* max, const float* scale, const ScoreOf& score_of) {
    if (is_heavy(weight)) return heavy_key(weight);
    return key_of_logarithm(GROUP == 1 ? clean(score_of(0)) : half_log_weight(max, scale, score_of));
}
static_assert(GROUP <= 16, "the bits of a weight of at most 16, less those of MIN_WEIGHT, are below HEAVY");

// A bucket of a histogram of keys, the number of keys in higher buckets, and the number of keys in it.
struct Bucket {
    u32 index, above, count;
};

// Finds the bucket with the `k`-th highest key among `BUCKETS` counts; k is at least 1 and at most the sum of the
// counts. Called by all threads of the block; between two calls there must be a `__syncthreads`.
template <int THREADS, int BUCKETS>
__device__ Bucket find_bucket(const u32* counts, u32 k) {
    constexpr int PER_THREAD = BUCKETS / THREADS, WARPS = THREADS / LANES;
    static_assert(PER_THREAD >= 1, "a thread has at least one bucket");
    __shared__ u32 warp_sums[WARPS];
    __shared__ Bucket found;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 mine[PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) sum += mine[i] = counts[BUCKETS - 1 - (threadIdx.x * PER_THREAD + i)];
    const u32 inclusive = warp_inclusive_sum(sum);
    if (lane == LANES - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 before = __reduce_add_sync(FULL, lane < warp ? warp_sums[lane] : 0);
    u32 above = before + inclusive - sum;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (above < k && k <= above + mine[i])
            found = {(u32)(BUCKETS - 1 - (threadIdx.x * PER_THREAD + i)), above, mine[i]};
        above += mine[i];
    }
    __syncthreads();
    return found;
}

// Keys above `key` are selected, and the first `ties` of the tokens whose key equals it.
struct Threshold {
    u32 key, ties;
};
__device__ __forceinline__ Threshold select_all() { return {0, 0xffffffffu}; }
__device__ __forceinline__ Threshold select_none() { return {0xffffffffu, 0}; }
// Selects every key that is at least `key`.
__device__ __forceinline__ Threshold select_from(u32 key) {
    if (key == 0) return select_all();
    return {key - 1, 0};
}

// Exclusive block-wide prefix sums of `above` and `ties`, and their totals `all_above` and `all_ties`. Both totals must
// be below 2^16: they share a word.
template <int THREADS>
__device__ void scan_selected(u32& above, u32& ties, u32& all_above, u32& all_ties) {
    constexpr int WARPS = THREADS / LANES;
    __shared__ u32 warp_totals[WARPS];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 mine = above | ties << 16, inclusive = warp_inclusive_sum(mine);
    __syncthreads();
    if (lane == LANES - 1) warp_totals[warp] = inclusive;
    __syncthreads();
    const u32 other = lane < WARPS ? warp_totals[lane] : 0, all = __reduce_add_sync(FULL, other);
    const u32 before = inclusive - mine + __reduce_add_sync(FULL, lane < warp ? other : 0);
    above = before & 0xffff, ties = before >> 16, all_above = all & 0xffff, all_ties = all >> 16;
}

// Writes selected tokens in ascending order.
struct Output {
    u32* tokens;
    u64 capacity;
    SelectRange range;

    __device__ __forceinline__ void put(u32 place, u32 token) const {
        if (place < capacity) tokens[place] = token;
    }
    __device__ __forceinline__ void put_selected(u32 place, u32 token) const { put(range.first + place, token); }
    // Sinks come first; recent tokens follow the k tokens selected by score.
    __device__ __forceinline__ void put_always(u32 token) const {
        put(token < range.first ? token : range.first + range.k + (token - range.end), token);
    }
};

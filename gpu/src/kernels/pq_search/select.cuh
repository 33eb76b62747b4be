// What both searches share: the arguments, keys of weights, softmax numbers, and the search for a cut.
#pragma once
#include "warp.cuh"

struct Arguments {
    const float* luts;  // [row][GROUP][M][KSUB]; a row is a head of a sequence
    const u8* codes;    // [row][code_stride bytes]
    const u32* lengths; // [sequence]
    const u32* ks;      // [sequence]: tokens to find beside the sinks and the recent ones
    u32* tokens;        // [row][tokens_len]
    u32* counts;        // [sequence]
    float* stats;       // [row][GROUP][2], or null: maximum and sum of exponentials
    u32* workspace;
    u64 code_stride, tokens_len;
    u32 heads, rows, capacity, sinks, recent;
    u32 pdl; // whether the kernel before it writes no codes, lengths or ks
};

// Which tokens compete, and how many of them are wanted. The sinks before and the recent ones behind are in anyway.
struct Middle {
    u32 n, first, end, wanted;

    __device__ Middle(const Arguments& a, u32 sequence) {
        n = min(a.lengths[sequence], a.capacity);
        first = min(a.sinks, n);
        end = n - min(a.recent, n - first);
        wanted = min(a.ks[sequence], end - first);
    }
    __device__ bool has(u32 token) const { return token >= first && token < end; }
    __device__ u32 found() const { return n - (end - first) + wanted; }
};

constexpr float MAX_SCORE = 3.40282347e38f;

// A NaN score counts as minus infinity, plus infinity as the largest float: one bad score must not decide for all
// tokens.
__device__ __forceinline__ float clean(float score) { return fminf(fmaxf(score, -infinity()), MAX_SCORE); }

// Maximum and sum of exponentials of scores.
struct Softmax {
    float max, sum;

    __device__ __forceinline__ float finite_max() const { return max == -infinity() ? 0 : max; }

    __device__ __forceinline__ void add(const Softmax& other) {
        Softmax both = {fmaxf(max, other.max), 0};
        const float base = both.finite_max();
        // A sum of nothing must stay nothing, though its maximum is infinitely far below.
        both.sum = (max == -infinity() ? sum : sum * exp2_approx((max - base) * LOG2_E)) +
                   (other.max == -infinity() ? other.sum : other.sum * exp2_approx((other.max - base) * LOG2_E));
        *this = both;
    }
};

// exp(score - max) * scale, which is at most 1. Saturation makes a NaN 0.
__device__ __forceinline__ float weight_of(float score, float max, float scale) {
    return __saturatef(exp2_approx((score - max) * LOG2_E) * scale);
}

__device__ __forceinline__ Softmax no_scores() { return {-infinity(), 0}; }
// As many times the same score.
__device__ __forceinline__ Softmax softmax_of(float score, float times) {
    return {score, score == -infinity() ? 0 : times};
}

// Of all lanes: the maximum first, so that every sum is scaled once.
__device__ __forceinline__ Softmax warp_softmax(const Softmax& softmax) {
    Softmax all = {warp_max(softmax.max), 0};
    const float keep = exp2_approx((softmax.max - all.finite_max()) * LOG2_E);
    // A sum of nothing must stay nothing, though its maximum is infinitely far below.
    all.sum = warp_sum(softmax.max == -infinity() ? softmax.sum : softmax.sum * keep);
    return all;
}

// One weight of several queries'.
__device__ __forceinline__ float combine(float all, float weight) {
#ifdef MAX_RULE
    return weight > all ? weight : all;
#else
    return all + weight;
#endif
}

// Weights from this on are compared as they are, lighter ones by their logarithms, which do not vanish:
// pq_core::combine_group_into.
constexpr float LEAST_WEIGHT = 0x1p-100f;
constexpr u32 HEAVY = 1u << 31; // of a key; half of the keys are left for logarithms

// An integer that orders as a float that is a number does; the lowest bit is lost.
__device__ __forceinline__ u32 key_of_logarithm(float x) {
    const u32 bits = __float_as_uint(x + 0.f);
    return (bits ^ ((u32)((int)bits >> 31) | 1u << 31)) >> 1;
}

// Half the logarithm of the group's weight, from the scores of its queries: halves of any two finite scores can be
// subtracted.
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

// The key by which a token is selected: its weight, or, where that has vanished, its logarithm; a query alone has the
// order of its scores. Only then are scores asked for.
template <class ScoreOf>
__device__ __forceinline__ u32 key_of(float weight, const float* max, const float* scale, const ScoreOf& score_of) {
    if (weight >= LEAST_WEIGHT) return HEAVY | (__float_as_uint(weight) - __float_as_uint(LEAST_WEIGHT)) << 1;
    return key_of_logarithm(GROUP == 1 ? clean(score_of(0)) : half_log_weight(max, scale, score_of));
}
static_assert(GROUP <= 16, "a weight of at most 16 leaves the highest bit of its key free");

// Where the wanted key was cornered: the bucket, keys above it, and keys in it.
struct Found {
    u32 bucket, above, count;
};

// The bucket with the `wanted`-th highest key (1 or more, and there are as many) among `BUCKETS` counts. Between two
// calls threads must meet.
template <int THREADS, int BUCKETS>
__device__ Found find_bucket(const u32* counts, u32 wanted) {
    constexpr int EACH = BUCKETS / THREADS, WARPS = THREADS / LANES;
    static_assert(EACH >= 1, "a thread has a bucket or more");
    __shared__ u32 warp_sums[WARPS];
    __shared__ Found found;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 mine[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += mine[i] = counts[BUCKETS - 1 - (threadIdx.x * EACH + i)];
    const u32 through = warp_inclusive_sum(sum);
    if (lane == LANES - 1) warp_sums[warp] = through;
    __syncthreads();
    const u32 before = __reduce_add_sync(FULL, lane < warp ? warp_sums[lane] : 0);
    u32 above = before + through - sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (above < wanted && wanted <= above + mine[i])
            found = {(u32)(BUCKETS - 1 - (threadIdx.x * EACH + i)), above, mine[i]};
        above += mine[i];
    }
    __syncthreads();
    return found;
}

// Keys above `key` are selected, and the first `ties` of those equal to it.
struct Cut {
    u32 key, ties;
};
__device__ __forceinline__ Cut all_keys() { return {0, 0xffffffffu}; }
__device__ __forceinline__ Cut no_keys() { return {0xffffffffu, 0}; }
// All keys from `key` on.
__device__ __forceinline__ Cut keys_from(u32 key) {
    if (key == 0) return all_keys();
    return {key - 1, 0};
}

// Sums over the threads before this one, and over all, of numbers above the cut and of ties, below 2^16 each.
template <int THREADS>
__device__ void scan_chosen(u32& above, u32& ties, u32& all_above, u32& all_ties) {
    constexpr int WARPS = THREADS / LANES;
    __shared__ u32 of_warps[WARPS];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 mine = above | ties << 16, through = warp_inclusive_sum(mine);
    __syncthreads();
    if (lane == LANES - 1) of_warps[warp] = through;
    __syncthreads();
    const u32 other = lane < WARPS ? of_warps[lane] : 0, all = __reduce_add_sync(FULL, other);
    const u32 before = through - mine + __reduce_add_sync(FULL, lane < warp ? other : 0);
    above = before & 0xffff, ties = before >> 16, all_above = all & 0xffff, all_ties = all >> 16;
}

// Writes the tokens that a thread has chosen, in order, and those that are in anyway.
struct Output {
    u32* tokens;
    u64 room;
    Middle middle;

    __device__ __forceinline__ void put(u32 place, u32 token) const {
        if (place < room) tokens[place] = token;
    }
    __device__ __forceinline__ void put_chosen(u32 place, u32 token) const { put(middle.first + place, token); }
    __device__ __forceinline__ void put_anyway(u32 token) const {
        put(token < middle.first ? token : middle.first + middle.wanted + (token - middle.end), token);
    }
};

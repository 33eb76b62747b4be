// Top-p sampling of the next tokens: from the most likely ones that hold `top_p` of the probability.
//
// CPU twin: Sampler::sample, which draws from the same distribution, but with other random numbers.
//
// Nothing is sorted. A round draws a token from all that are more likely than a pivot. The token is in the nucleus if
// the more likely tokens hold less than `top_p`; else its weight is the next pivot. Tokens of the nucleus are always
// above the pivot, so each is drawn in proportion to its weight. Source: FlashInfer (arXiv 2501.01005), sampling by
// rejection.
//
// Launch: one block of THREADS per sequence, from `first` on. Cost: the logits are read once for the maximum and once
// per round, from L2; one round fewer if `top_p` is 1. The order of all sums is fixed, so a seed draws the same tokens.
#include "picks.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / LANES;

struct Arguments {
    const float* logits; // [sequence][vocab]
    Picks picks;
    u64 seed;
    float temperature; // above 0
    float top_p;       // above 0, at most 1
    u32 vocab, first;
};

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), as in rng.rs: its output for a state.
__device__ __forceinline__ u64 scramble(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// A number in 0..1 for a round of a sequence's token.
__device__ __forceinline__ float uniform(u64 seed, u32 sequence, u32 position, u32 round) {
    constexpr u64 GOLDEN = 0x9e3779b97f4a7c15;
    const u64 of_token = scramble(seed + ((u64)sequence << 32 | position) * GOLDEN);
    return (scramble(of_token + (round + 1) * GOLDEN) >> 40) * 0x1p-24f;
}

// Sums over a block: returns the sum of all threads; `before` becomes that of the threads before this one.
__device__ __forceinline__ float block_sums(float x, float& before) {
    __shared__ float of_warps[WARPS];
    const int warp = threadIdx.x / LANES;
    const float sum = warp_inclusive_sum(x);
    if (threadIdx.x % LANES == LANES - 1) of_warps[warp] = sum;
    __syncthreads();
    float all = 0, earlier = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) earlier = all;
        all += of_warps[w];
    }
    before = earlier + (sum - x);
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(const Arguments a) {
    __shared__ float maxima[WARPS];
    __shared__ float passed, drawn_weight;
    __shared__ u32 first, owner, drawn;
    pdl_wait();
    pdl_trigger();
    const u32 sequence = a.first + blockIdx.x, position = a.picks.positions[sequence];
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const float* logits = a.logits + (u64)sequence * a.vocab;

    float largest = -infinity(); // infinity if a logit is not finite
#pragma unroll 8
    for (u32 i = threadIdx.x; i < a.vocab; i += THREADS)
        largest = fabsf(logits[i]) < infinity() ? fmaxf(largest, logits[i]) : infinity();
    largest = warp_max(largest);
    if (threadIdx.x == 0) first = a.vocab - 1;
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, maxima[w]);
    if (largest == infinity()) {
        if (threadIdx.x == 0) take(a.picks, sequence, NO_TOKEN);
        return;
    }
    // Differences from the largest: quotients of the logits themselves overflow at a low temperature. A weight is at
    // most 1, and 0 for tokens not above the pivot.
    float pivot = 0;
    const auto weight = [&](u32 i) {
        const float w = logits[i] == largest ? 1.0f : expf((logits[i] - largest) / a.temperature);
        return w > pivot ? w : 0.0f;
    };

    float all = 0;
    for (u32 round = 0;; round++) {
        float own = 0, before;
#pragma unroll 8
        for (u32 i = threadIdx.x; i < a.vocab; i += THREADS) {
            const float w = weight(i);
            own += w;
            if (w == 1) atomicMin(&first, i);
        }
        const float above = block_sums(own, before);
        if (round == 0) all = above;
        if (round > 0 && above < a.top_p * all) break; // the previous token is in the nucleus
        // The most likely token, in case rounding leaves none.
        if (threadIdx.x == 0) owner = THREADS, drawn = first, drawn_weight = 1;
        __syncthreads();
        const float target = uniform(a.seed, sequence, position, round) * above;
        // Rounding may give adjacent threads the same sum.
        if (before <= target && target < before + own) atomicMin(&owner, threadIdx.x);
        __syncthreads();
        if (threadIdx.x == owner) passed = before;
        __syncthreads();
        // A warp walks through the tokens of the owner's sum.
        if (warp == 0 && owner < THREADS) {
            float sum = passed;
            for (u32 base = owner; base < a.vocab; base += LANES * THREADS) {
                const u32 i = base + lane * THREADS;
                const float w = i < a.vocab ? weight(i) : 0;
                const float until = sum + warp_inclusive_sum(w);
                const u32 likely = __ballot_sync(FULL, w > 0);
                const u32 reached = __ballot_sync(FULL, w > 0 && until > target);
                const u32 at = reached ? __ffs(reached) - 1 : likely ? 31 - __clz(likely) : LANES;
                if (lane == at) drawn = i, drawn_weight = w;
                if (reached) break;
                sum = __shfl_sync(FULL, until, LANES - 1);
            }
        }
        __syncthreads();
        pivot = drawn_weight;
        if (a.top_p >= 1 || pivot >= 1) break; // every token is in the nucleus, or none is more likely
    }
    if (threadIdx.x == 0) take(a.picks, sequence, drawn);
}

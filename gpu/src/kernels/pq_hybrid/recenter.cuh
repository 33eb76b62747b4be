// A second pass over a row whose selected tokens lead the others by their codes, but not by their rows.
//
// Weights of codes are relative to the sum over all coded tokens, the selected ones included, which attend.cu knows
// before it sums. The exact rows of the selected tokens usually have about the weight of their codes, and rounding
// relative to it does not matter. If they have far less, the other tokens decide, and of these rounding has left
// little: what subtraction leaves behind can exceed them. The block that writes a row's outputs sees this, since their
// sum of weights is far below that of the codes. It then hides the selected tokens, stores all scores relative to the
// highest of the others, and attends to the whole row again. One block takes as long for it as all blocks of the row
// together, but no other row pays for it: the sum of the exact rows is known last.
#pragma once
#include "pq_hybrid/scored_tile.cuh"
#include "pq_hybrid/stats.cuh"
#include "softmax_reduce.cuh"

// The score (a logarithm to base 2) of weight 1 for a query, given the statistics of the coded scores.
__device__ __forceinline__ float weight_base(const Stats& scores) {
    return scores.sum == 0 ? NEG_INF : scores.max + __log2f(scores.sum) - WEIGHT_BITS;
}

// The logarithm to base 2 of the coded weight over the weight of the output at which the errors of a pass are below
// 2^-10: subtraction on tensor cores leaves up to 2^-16 of the coded weight, otherwise single weights are rounded to
// 2^-30 of it or less.
constexpr float MOST_LOSS = IS_BESIDE && !IS_BY_CODE ? 6 : 10;

// Whether an output has lost too much to rounding relative to `base`. False if the base is not a number.
__device__ __forceinline__ bool is_lost(const Sum& sum, float base) {
    const bool has_codes = base > NEG_INF && base < infinity();
    return has_codes && !(sum.max + __log2f(sum.weight) >= base + WEIGHT_BITS - MOST_LOSS);
}

// Of two queries by code, the calling convention of a function takes 52 bytes from the registers of sm_80. If
// CONCURRENT_SELECT, on sm_90, what is inlined takes up to 24 bytes, and a function none.
#ifdef CONCURRENT_SELECT
#define RECENTER_INLINED __noinline__
#else
#define RECENTER_INLINED __forceinline__
#endif

// Written by other threads, too.
__device__ __forceinline__ float level_of(const ScoredTile& tile, int query) { return __ldcg(&tile.levels[query]); }

// Calls `f(tile, scores)` for the warp's tiles of a row, with the scores of the token at place `lane`.
template <int WARPS, class F>
__device__ __forceinline__ void for_each_tile(ScoredTile* scores, u32 length, const F& f) {
#pragma unroll 1
    for (u32 t = threadIdx.x / LANES; warp_uniform(t * TILE < length); t += WARPS) {
        ScoredTile& tile = scores[t];
        float of_token[GROUP];
#pragma unroll
        for (int q = 0; q < GROUP; q++)
            of_token[q] = any_score(__ldcg(&tile.scores[q][threadIdx.x % LANES])) + level_of(tile, q);
        f(tile, of_token);
    }
}

// Called by all threads of a block: hides the `selected` tokens, stores the scores of a row of `length` tokens relative
// to the highest one and finds the bases of the queries. `results`: [WARPS][VEC][RESULT], scratch.
template <int WARPS>
__device__ RECENTER_INLINED void recenter(ScoredTile* scores, u32 length, const u32* selected, u32 count,
                                          float* results, float* bases) {
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (u32 i = threadIdx.x; i < count; i += WARPS * LANES) hide(scores, __ldcg(selected + i));
    __syncthreads();
    Stats stats[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; q++) stats[q] = no_scores();
    for_each_tile<WARPS>(scores, length, [&](const ScoredTile&, const float(&of_token)[GROUP]) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) stats[q] = merged(stats[q], {of_token[q], 1});
    });
    const auto result = [&](u32 of_warp, u32 q) { return results + (of_warp * VEC + q) * RESULT; };
#pragma unroll
    for (int q = 0; q < GROUP; q++) {
        const Stats of_warp = merged_lanes(stats[q]);
        if (lane == 0) result(warp, q)[0] = of_warp.max, result(warp, q)[1] = of_warp.sum;
    }
    __syncthreads();
    if (warp_uniform(warp < GROUP)) {
        const float* of_warp = result(min(lane, WARPS - 1), warp);
        const Stats all = merged_lanes(lane < WARPS ? Stats{of_warp[0], of_warp[1]} : no_scores());
        __syncwarp(); // all lanes have read
        if (lane == 0) {
            if (bases[warp] < infinity()) bases[warp] = weight_base(all); // that of a NaN or infinite score stays
            result(0, warp)[2] = all.max;
        }
    }
    __syncthreads();
    for_each_tile<WARPS>(scores, length, [&](ScoredTile& tile, const float(&of_token)[GROUP]) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            // The level moves by whole steps, so that no score is rounded again.
            const float before = level_of(tile, q), steps = rintf((result(0, q)[2] - before) * 256);
            const float level = before == NEG_INF ? before : before + steps * (1.f / 256); // or it has no scores
            tile.scores[q][lane] = any_code(of_token[q] - level);
            __syncwarp(); // all lanes have read the level
            if (lane == 0) tile.levels[q] = level;
        }
    });
    __syncthreads();
}

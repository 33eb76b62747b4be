// Shared by both forms of the selection (select.cu, select_sm90.cu): the keys of tokens, and the output of selected
// tokens.
#pragma once
#include "pq_hybrid/scored_tile.cuh"
#include "pq_hybrid/stats.cuh"
#include "pq_search/radix.cuh"

static_assert(CHUNK == CHUNK_TOKENS, "rows of scores are whole chunks");

__device__ __forceinline__ SelectRange range_of(const SelectArguments& a, u32 row) {
    const u32 sequence = row / a.heads;
    return {a.lengths[sequence], min(a.ks[sequence], a.selected_len), 0, 0};
}

// If ADAPTIVE, called only after the end of `pq_hybrid_count`.
__device__ __forceinline__ SelectRange found_range_of(const SelectArguments& a, u32 row, SelectRange range) {
    if (IS_ADAPTIVE) range.k = min(range.k, __ldcg(a.bound.found + row));
    return range;
}

__device__ __forceinline__ Selection selection_of(const SelectArguments& a, u32 row) {
    return {a.selection, (u64)a.batch * a.heads, row, a.chunks};
}

// Softmax statistics of a row's queries, in shared memory.
struct Normalizers {
    float log_sum[GROUP];           // logarithm to base 2 of the sum of 2^score
    float max[GROUP], scale[GROUP]; // as in keys.cuh, for natural logarithms

    // Called by the first GROUP warps of a block: merges the statistics of the blocks of scores.cu.
    __device__ __forceinline__ void load(const SelectArguments& a, u64 row) {
        const u32 query = threadIdx.x / LANES;
        const Stats all = row_stats(a, row, query);
        if (threadIdx.x % LANES > 0) return;
        log_sum[query] = all.max + __log2f(all.sum);
        max[query] = all.max * LN_2, scale[query] = 1.f / all.sum;
    }

    // The weight of a token, as by pq_core::combine_group_into: the sum or the maximum of its weights over the group's
    // queries. It is NaN if a score is. `score`: as by `near_score`; `level`: of the token's tile, less `log_sum` and
    // ORIGIN.
    static __device__ __forceinline__ float weight_of(const float (&score)[GROUP], const float (&level)[GROUP]) {
        float weight = 0;
#pragma unroll
        for (int q = 0; q < GROUP; q++) weight = combine(weight, exp2_approx(score[q] + level[q]));
        return weight;
    }

    // The key of a token, from `weight_of` unless that has underflowed or is NaN: tokens of equal codes must have equal
    // keys, whether or not their neighbors' weights have underflowed.
    template <class ScoreOf>
    __device__ __forceinline__ u32 key_of_any(float weight, const ScoreOf& score_of) const {
        if (is_heavy(weight)) return heavy_key(weight);
        weight = 0;
        for (int q = 0; q < GROUP; q++) // `fmaxf` replaces NaN
            weight = combine(weight, exp2_approx(fmaxf(score_of(q) - log_sum[q], -infinity())));
        return key_of(weight, max, scale, [&](int q) { return score_of(q) * LN_2; });
    }
};

// Writes the selected tokens in ascending order and, if `hides`, hides their coded scores from attend.cu.
struct SelectedOutput : Output {
    ScoredTile* hidden; // scores of the row, or null

    __device__ __forceinline__ SelectedOutput(const SelectArguments& a, u32 row, const SelectRange& range)
        : Output{a.selected + (u64)row * a.selected_len, a.selected_len, range},
          hidden(a.hides ? a.scores_of(row) : nullptr) {}

    __device__ __forceinline__ void put_selected(u32 place, u32 token) const {
        Output::put_selected(place, token);
        if (hidden) hide(hidden, token);
    }
};

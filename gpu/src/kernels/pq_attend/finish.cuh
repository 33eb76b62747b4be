// Merges a warp's softmax state and its exact tokens into its results in shared memory, and reduces these to the output
// of a sequence.
#pragma once
#include "pq_attend/exact.cuh"
#include "pq_attend/sums.cuh"
#include "softmax_reduce.cuh"

__device__ __forceinline__ void add_tiles(const State& state, const Lane& lane) {
    float* results = warp_results(lane);
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        float* result = results + q * RESULT;
        const bool mine = lane.has_scores && lane.mma_index == q / COPIES;
        const float weight = warp_sum(mine ? state.weight[q % COPIES] : 0);
        const float max = __shfl_sync(FULL, state.max[q % COPIES], q / COPIES); // equal in all lanes that have it
        const float old_max = result[D], old_weight = result[D + 1], new_max = fmaxf(max, old_max);
        const float keep = exp2_approx(max - new_max), keep_old = exp2_approx(old_max - new_max);
        state.sums.add_to(result, q, keep_old, keep, lane);
        __syncwarp(); // all lanes have read the maximum and the sum of weights
        if (lane.lane == 0) result[D] = new_max, result[D + 1] = keep_old * old_weight + keep * weight;
    }
}

// Adds the exact tokens, and reduces the results of the warps, and of the blocks that share the sequence, to its
// output.
__device__ __forceinline__ void finish_sequence(const Arguments& a, Plan& plan, const State& state) {
    const Lane lane;
    clear_results(lane);
    in_turns(lane, [&] { add_tiles(state, lane); });
    attend_exact(a, plan);
    const GridCoord coord;
    const u64 sequence_head = (u64)plan.sequence * a.heads + plan.head;
    const u64 first_query = sequence_head * a.group + coord.slice * QUERIES;
    const u32 live = min(a.group - coord.slice * QUERIES, (u32)QUERIES);
    reduce<QUERIES, D, SLOTS, RESULT, THREADS, (QUERIES > 4)>(
        reinterpret_cast<const float*>(shared + RESULTS), live, plan, coord.block,
        a.partials + (u64)coord.index() * 2 * QUERIES * RESULT, a.arrived + sequence_head * coord.slices + coord.slice,
        [&](u32 query, int component, const Sum& sum) {
            *reinterpret_cast<u32*>(a.out + (first_query + query) * D + component) = sum.normalized();
            if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
        });
}

// Adds the tiles to the results of the warp.
#pragma once
#include "pq_attend/exact.cuh"
#include "pq_attend/sums.cuh"
#include "softmax_reduce.cuh"

__device__ __forceinline__ void add_tiles(const State& state, const Lane& lane) {
    float* results = warp_results(lane);
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        float* result = results + q * RESULT;
        const bool mine = lane.holds && lane.turn == q / COPIES;
        const float weight = warp_sum(mine ? state.weight[q % COPIES] : 0);
        const float max = __shfl_sync(FULL, state.max[q % COPIES], q / COPIES); // all lanes that hold it have the same
        const float exact_max = result[D], exact_weight = result[D + 1], top = fmaxf(max, exact_max);
        const float keep = exp2_approx(max - top), keep_exact = exp2_approx(exact_max - top);
        state.sums.add_to(result, q, keep_exact, keep, lane);
        __syncwarp(); // all lanes have read
        if (lane.lane == 0) result[D] = top, result[D + 1] = keep_exact * exact_weight + keep * weight;
    }
}

// The warps' results become the output of a sequence.
__device__ __forceinline__ void finish_sequence(const Arguments& a, Plan& plan, const State& state) {
    add_tiles(state, Lane());
    const Place place;
    const u64 sequence_head = (u64)plan.entry * a.heads + place.head;
    const u64 first_query = sequence_head * a.group + place.slice * QUERIES;
    const u32 live = min(a.group - place.slice * QUERIES, (u32)QUERIES);
    reduce<QUERIES, D, WARPS, RESULT>(
        reinterpret_cast<const float*>(shared + RESULTS), live, plan, place.block,
        a.partials + (u64)place.index() * 2 * QUERIES * RESULT, a.arrived + sequence_head * place.slices + place.slice,
        [&](u32 query, int component, const Sum& sum) {
            *reinterpret_cast<u32*>(a.out + (first_query + query) * D + component) = sum.normalized();
            if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
        });
}

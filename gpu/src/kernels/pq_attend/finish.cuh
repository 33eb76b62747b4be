// Merges a warp's softmax state and its exact tokens into its results in shared memory, and reduces these to the output
// of a sequence.
#pragma once
#include "pq_attend/exact.cuh"
#include "pq_attend/sums.cuh"
#include "softmax_reduce.cuh"

// Stores the sums over tiles in the warp's results, or adds them to those of a warp with an earlier turn. The shuffles
// of all queries come first, so that they do not wait for one another. A lane has sums of query g % QUERIES.
__device__ __forceinline__ void put_tiles(const State& state, bool add, const Lane& lane) {
    float weights[QUERIES], max = NEG_INF, weight = 0;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        weights[q] = lane.has(q) ? state.weight[q % LANE_QUERIES] : 0;
        const float of_query = __shfl_sync(FULL, state.max[q % LANE_QUERIES], Lane::lane_of(q));
        if (q == lane.g % QUERIES) max = of_query;
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
#pragma unroll
        for (int q = 0; q < QUERIES; q++) weights[q] += __shfl_xor_sync(FULL, weights[q], step);
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
        if (q == lane.g % QUERIES) weight = weights[q];

    float* result = warp_results(lane) + lane.g % QUERIES * RESULT;
    float keep_old = 0, keep = 1;
    if (add) {
        const float old_max = result[D], old_weight = result[D + 1], new_max = fmaxf(max, old_max);
        keep_old = exp2_approx(old_max - new_max), keep = exp2_approx(max - new_max);
        max = new_max, weight = keep_old * old_weight + keep * weight;
        __syncwarp(); // all lanes have read the maxima and the sums of weights
    }
    state.sums.visit(lane, [&](int component, const Run& run) {
        Run* place = reinterpret_cast<Run*>(result + component);
        Run sum = run;
        if (add) {
            const Run old = *place;
#pragma unroll
            for (int i = 0; i < RUN; i++) sum.x[i] = keep_old * old.x[i] + keep * run.x[i];
        }
        *place = sum;
    });
    if (lane.l == 0 && lane.g < QUERIES) result[D] = max, result[D + 1] = weight;
    __syncwarp();
}

// Adds the exact tokens, and reduces the results of the warps, and of the blocks that share the sequence, to its
// output.
__device__ __forceinline__ void finish_sequence(const Arguments& a, Plan& plan, const State& state) {
    const Lane lane;
    in_turns(lane, [&](int turn) { put_tiles(state, turn > 0, lane); });
    attend_exact(a, plan);
    const GridCoord coord;
    const u64 sequence_head = (u64)plan.sequence * a.heads + plan.head;
    const u64 first_query = sequence_head * a.group + coord.slice * QUERIES;
    const u32 live = min(a.group - coord.slice * QUERIES, (u32)QUERIES);
    reduce<QUERIES, D, SLOTS, RESULT, THREADS, (QUERIES >= 4)>(
        reinterpret_cast<const float*>(shared + RESULTS), live, plan, coord.block,
        a.partials + (u64)coord.index() * 2 * QUERIES * RESULT, a.arrived + sequence_head * coord.slices + coord.slice,
        [&](u32 query, int component, const Sum& sum) {
            *reinterpret_cast<u32*>(a.out + (first_query + query) * D + component) = sum.normalized();
            if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
        });
}

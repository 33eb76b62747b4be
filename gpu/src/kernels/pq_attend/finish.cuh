// Merges a warp's softmax state and its exact tokens into its results in shared memory, and reduces these to the output
// of a sequence.
#pragma once
#include "pq_attend/exact.cuh"
#include "pq_attend/sums.cuh"
#include "softmax_reduce.cuh"

// Puts the sums over tiles into the warp's results: as they are, or added to those of a warp with an earlier turn. The
// shuffles of all queries come first, so that they do not wait for one another.
__device__ __forceinline__ void put_tiles(const State& state, bool add, const Lane& lane) {
    float weight[QUERIES], max[QUERIES];
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        weight[q] = lane.has_scores && lane.mma_index == q / COPIES ? state.weight[q % COPIES] : 0;
        max[q] = __shfl_sync(FULL, state.max[q % COPIES], q / COPIES); // equal in all lanes that have it
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
#pragma unroll
        for (int q = 0; q < QUERIES; q++) weight[q] += __shfl_xor_sync(FULL, weight[q], step);

    float* results = warp_results(lane);
    float keep_old[QUERIES], keep[QUERIES];
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        keep_old[q] = 0, keep[q] = 1;
        if (!add) continue;
        const float old_max = results[q * RESULT + D], old_weight = results[q * RESULT + D + 1];
        const float new_max = fmaxf(max[q], old_max);
        keep_old[q] = exp2_approx(old_max - new_max), keep[q] = exp2_approx(max[q] - new_max);
        max[q] = new_max, weight[q] = keep_old[q] * old_weight + keep[q] * weight[q];
    }
    if (add) __syncwarp(); // all lanes have read the maxima and the sums of weights
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        float* result = results + q * RESULT;
        state.sums.visit(q, lane, [&](int component, float sum) {
            result[component] = add ? keep_old[q] * result[component] + keep[q] * sum : sum;
        });
        if (lane.lane == 0) result[D] = max[q], result[D + 1] = weight[q];
    }
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

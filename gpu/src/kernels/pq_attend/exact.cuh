// Attention on the exact tokens of a sequence, which initializes the warp's results: per query the sum of values, the
// maximum of the scores and the sum of weights.
//
// CPU twin: pq_core::attend_exact_into. A warp processes one token at a time; each lane has D / 32 components.
#pragma once
#include "element.cuh"
#include "pq_attend/codes.cuh"
#include "pq_attend/plan.cuh"

__device__ __forceinline__ float* warp_results(const Lane& lane) {
    return reinterpret_cast<float*>(shared + RESULTS) + lane.warp * QUERIES * RESULT;
}

// Initializes the warp's results to those of an empty set of tokens.
__device__ __forceinline__ void clear_results(const Lane& lane) {
    constexpr int FOURS = RESULT / 4; // float4s of a query; the last one has maximum and sum of weights
    float4* results = reinterpret_cast<float4*>(warp_results(lane));
#pragma unroll
    for (int i = lane.lane; i < QUERIES * FOURS; i += LANES)
        results[i] = make_float4(i % FOURS == FOURS - 1 ? NOTHING : 0, 0, 0, 0);
    __syncwarp();
}

// Attends to the warp's exact tokens. Their sums overwrite the results, which stay as they are if there are none.
__device__ __forceinline__ void attend_exact(const Arguments& a, const Plan& plan) {
    const Lane lane;
    const u32 item_end = min(plan.to, (plan.exact_length + EXACT_PER_ITEM - 1) / EXACT_PER_ITEM);
    if (warp_uniform(plan.from + lane.warp >= item_end)) return;
    const u64 sequence_head = (u64)plan.entry * a.heads + GridCoord().head;
    constexpr int E = D / LANES; // components of a lane
    float q[QUERIES][E], sum[QUERIES][E], max[QUERIES], weight[QUERIES];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        max[i] = NOTHING, weight[i] = 0;
#pragma unroll
        for (int e = 0; e < E; e++) sum[i][e] = 0;
#pragma unroll
        for (int e = 0; e < E; e += 2) {
            const u32 pair = *reinterpret_cast<const u32*>(shared + QUERY_ROWS + i * QUERY_ROW +
                                                           word_of<KEY_SUB>(lane.lane * E + e) * 4);
            q[i][e] = to_float((u16)pair) * a.scale, q[i][e + 1] = to_float((u16)(pair >> 16)) * a.scale;
        }
    }
    for (u32 item = plan.from + lane.warp; warp_uniform(item < item_end); item += WARPS) {
        const u32 first = item * EXACT_PER_ITEM, count = min(plan.exact_length - first, (u32)EXACT_PER_ITEM);
        const u64 at = (sequence_head * a.exact_capacity + first) * D + lane.lane * E;
        for (u32 t = 0; warp_uniform(t < count); t++) {
            float key[E], value[E];
#pragma unroll
            for (int e = 0; e < E; e++) key[e] = to_float(a.exact_keys[at + t * D + e]);
#pragma unroll
            for (int e = 0; e < E; e++) value[e] = to_float(a.exact_values[at + t * D + e]);
#pragma unroll
            for (int i = 0; i < QUERIES; i++) {
                float score = 0;
#pragma unroll
                for (int e = 0; e < E; e++) score += q[i][e] * key[e];
                score = warp_sum(score);
                const float new_max = fmaxf(max[i], score), rescale = exp2_approx(max[i] - new_max),
                            p = exp2_approx(score - new_max);
                max[i] = new_max;
                weight[i] = weight[i] * rescale + p;
#pragma unroll
                for (int e = 0; e < E; e++) sum[i][e] = sum[i][e] * rescale + p * value[e];
            }
        }
    }
    float* results = warp_results(lane);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        float* result = results + i * RESULT + lane.lane * E;
        if constexpr (E == 4)
            *reinterpret_cast<float4*>(result) = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        else
            *reinterpret_cast<float2*>(result) = make_float2(sum[i][0], sum[i][1]);
        if (lane.lane == 0) results[i * RESULT + D] = max[i], results[i * RESULT + D + 1] = weight[i];
    }
    __syncwarp();
}

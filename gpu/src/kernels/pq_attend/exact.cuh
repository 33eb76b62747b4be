// The warp's results of a sequence: per query the sum of values, and maximum and sum of weights.
#pragma once
#include "element.cuh"
#include "pq_attend/codes.cuh"
#include "pq_attend/plan.cuh"

__device__ __forceinline__ float* warp_results(const Lane& lane) {
    return reinterpret_cast<float*>(shared + RESULTS) + lane.warp * QUERIES * RESULT;
}

// Those of no tokens.
__device__ __forceinline__ void clear_results(const Lane& lane) {
    constexpr int FOURS = RESULT / 4; // of a query; the last has maximum and weight
    float4* results = reinterpret_cast<float4*>(warp_results(lane));
#pragma unroll
    for (int i = lane.lane; i < QUERIES * FOURS; i += LANES)
        results[i] = make_float4(i % FOURS == FOURS - 1 ? NOTHING : 0, 0, 0, 0);
    __syncwarp();
}

// They start with its exact tokens, if it has any. The lanes share the components of a vector.
__device__ __forceinline__ void attend_exact(const Arguments& a, const Plan& plan) {
    const Lane lane;
    const u32 item_end = min(plan.to, (plan.exact_length + EXACT - 1) / EXACT);
    if (warp_uniform(plan.from + lane.warp >= item_end)) return;
    const u64 sequence_head = (u64)plan.entry * a.heads + Place().head;
    constexpr int E = D / LANES; // components a lane
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
        const u32 first = item * EXACT, count = min(plan.exact_length - first, (u32)EXACT);
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
                const float top = fmaxf(max[i], score), keep = exp2_approx(max[i] - top), p = exp2_approx(score - top);
                max[i] = top;
                weight[i] = weight[i] * keep + p;
#pragma unroll
                for (int e = 0; e < E; e++) sum[i][e] = sum[i][e] * keep + p * value[e];
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

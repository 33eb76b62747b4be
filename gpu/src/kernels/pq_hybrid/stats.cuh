// Merges softmax statistics.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "warp.cuh"

__device__ __forceinline__ Stats no_scores() { return {NOTHING, 0}; }

__device__ __forceinline__ Stats merged(const Stats& a, const Stats& b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp2_approx(a.max - max) + b.sum * exp2_approx(b.max - max)};
}

// Over the lanes whose indices differ in the bits of `MASK`.
template <int MASK = LANES - 1>
__device__ __forceinline__ Stats merged_lanes(const Stats& stats) {
    float max = stats.max;
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) max = fmaxf(max, __shfl_xor_sync(FULL, max, bit));
    float sum = stats.sum * exp2_approx(stats.max - max);
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) sum += __shfl_xor_sync(FULL, sum, bit);
    return {max, sum};
}

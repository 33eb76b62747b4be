// Merges softmax statistics.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

// A flag by which the selection, which waits for the end of the scoring kernel, releases concurrent attention blocks,
// which meanwhile load their tables. These start only after all scoring blocks have passed `begin_scores`.
__device__ __forceinline__ void begin_scores(const Arguments& a) {
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) st_release(a.scored, 0), __threadfence();
}
__device__ __forceinline__ void end_scores(const Arguments& a) {
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) st_release(a.scored, 1);
}
__device__ __forceinline__ void await_scores(const Arguments& a) {
    while (ld_acquire(a.scored) == 0) {}
}

__device__ __forceinline__ Stats no_scores() { return {NEG_INF, 0}; }

__device__ __forceinline__ Stats merged(const Stats& a, const Stats& b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp2_approx(a.max - max) + b.sum * exp2_approx(b.max - max)};
}

// The maximum over the lanes whose indices differ in the bits of `MASK`.
template <int MASK>
__device__ __forceinline__ float max_of_lanes(float max) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) max = fmaxf(max, __shfl_xor_sync(FULL, max, bit));
    return max;
}

// Merges the statistics of the lanes whose indices differ in the bits of `MASK`.
template <int MASK = LANES - 1>
__device__ __forceinline__ Stats merged_lanes(const Stats& stats) {
    const float max = max_of_lanes<MASK>(stats.max);
    float sum = stats.sum * exp2_approx(stats.max - max);
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) sum += __shfl_xor_sync(FULL, sum, bit);
    return {max, sum};
}

// Called by a warp: merges a query's statistics from the blocks of scores.cu. Bypasses L1, which may hold those of the
// previous launch: this may precede `pdl_wait`.
__device__ __forceinline__ Stats row_stats(const Arguments& a, u64 row, u32 query) {
    const u64 sharers = __ldcg(reinterpret_cast<const u64*>(a.sharers + row));
    const u32 lane = threadIdx.x % LANES, first = (u32)sharers, count = (u32)(sharers >> 32);
    const float2* parts = reinterpret_cast<const float2*>(a.stats + row * a.blocks * VEC + query);
    Stats all = no_scores();
    for (u32 i = lane; i < a.blocks; i += LANES) {
        const float2 part = __ldcg(parts + i * VEC); // of every block: the loads overlap with that of `sharers`
        if (i - first < count) all = merged(all, {part.x, part.y});
    }
    return merged_lanes(all);
}

// Reductions and scans over the lanes of a warp.
#pragma once
#include "types.cuh"

// A condition that is the same in all lanes. The vote tells the compiler so; only then does it keep addresses that all
// lanes share in uniform registers. Without it the base of shared memory is added to every address of a look-up.
__device__ __forceinline__ bool warp_uniform(bool condition) { return __any_sync(FULL, condition); }

// Keeps a value that is computed before a loop in a register: the compiler would recompute it in every iteration.
__device__ __forceinline__ void keep_in_register(u32& x) { asm volatile("" : "+r"(x)); }

// The sum over this lane and those before it.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const T other = __shfl_up_sync(FULL, x, step);
        if (threadIdx.x % LANES >= step) x += other;
    }
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

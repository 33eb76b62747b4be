// The levels of codes, in the arithmetic of pq_core::sq: kernels that include this are compiled without fused
// multiply-adds, so that numbers are the same bit for bit.
#pragma once
#include "sq_tile.cuh"

// 2^(i / 16) as pq_core::sq rounds it.
__constant__ float SIXTEENTHS[16] = {1.f,        1.0442738f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f,
                                     1.2968396f, 1.3542556f, 1.4142135f, 1.4768261f, 1.5422108f, 1.6104903f,
                                     1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};
__device__ __forceinline__ float power_of_two(u32 biased_exponent) { return __uint_as_float(biased_exponent << 23); }

// The step of a component of keys, and the norm of a value, from their bytes.
__device__ __forceinline__ float decode_step(u32 code) {
    return SIXTEENTHS[code % 8 * 2] * power_of_two(code / 8 + 127 - 16);
}
__device__ __forceinline__ float decode_norm(u32 code) {
    return SIXTEENTHS[code % 16] * power_of_two(code / 16 + 127 - 8);
}

// The level of a code in steps.
__device__ __forceinline__ float level_of(float code, float half_range) { return code + .5f - half_range; }

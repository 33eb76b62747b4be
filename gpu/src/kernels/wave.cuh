// Cosine and sine of an angle that is a fraction of a turn. Products of 64-bit fractions with positions are exact modulo
// a turn.
#pragma once
#include "types.cuh"

// Turns less whole ones, in units of 2^-64.
__device__ __forceinline__ u64 fraction_of(double turns) {
    return (u64)((turns - floor(turns)) * 18446744073709551616.);
}

// The cosine and the sine of an angle in units of 2^-32 turns.
__device__ __forceinline__ float2 wave_at(u32 turn) {
    const float angle = (int)turn * 1.46291808e-9f; // 2 pi / 2^32
    float2 wave;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(wave.x) : "f"(angle));
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(wave.y) : "f"(angle));
    return wave;
}

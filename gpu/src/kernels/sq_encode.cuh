// Common to the encoding of both sides: arguments, and the arithmetic of pq_core::sq, which is compiled without fused
// multiply-adds, so that codes are the same bit for bit.
#pragma once
#include "sq_blocks.cuh"
#include "sq_levels.cuh"

struct Arguments : BlockArguments {
    const float* rows; // [sequence][head][max_rows][D]
    float steps[9];    // of a Gaussian, by bits
};

// Rows of a code tile in shared memory: the padding keeps the bytes of one component in different banks.
constexpr int CODE_ROW = D + 4;

// A component of a row: one that is not finite counts as 0.
__device__ __forceinline__ float finite(float x) { return fabsf(x) < infinity() ? x : 0; }

// The byte of x, rounded down; 0 for NaN.
__device__ __forceinline__ u32 saturated_byte(float x) { return min(__float2uint_rz(x), 255u); }

// The code of a number of `per_step * x` steps.
__device__ __forceinline__ float code_of(float x, float per_step, float half_range) {
    x = x * per_step + half_range;
    x = x > 0 ? x : 0;
    const float top = 2 * half_range - 1;
    return truncf(x < top ? x : top);
}

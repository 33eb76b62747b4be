// The element type of rows, queries and outputs: ELEMENT is 0 (f32), 1 (f16) or 2 (bf16), as `kv_gpu::VectorElement`
// numbers them.
#pragma once
#include "types.cuh"

#if ELEMENT == 0
typedef float Element;
__device__ __forceinline__ float to_float(Element x) { return x; }
__device__ __forceinline__ Element to_element(float x) { return x; }
#elif ELEMENT == 1
typedef u16 Element;
__device__ __forceinline__ float to_float(Element x) { return half_to_float(x); }
__device__ __forceinline__ Element to_element(float x) { return float_to_half(x); }
#else
typedef u16 Element;
__device__ __forceinline__ float to_float(Element x) { return bfloat_to_float(x); }
__device__ __forceinline__ Element to_element(float x) { return float_to_bfloat(x); }
#endif

// Two floats as two 16-bit elements, the first in the low bits.
__device__ __forceinline__ u32 pack_elements(float low, float high) {
#if ELEMENT == 2
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return pack_half2(low, high);
#endif
}

// Integer types, warp constants and float helpers of every kernel. No system header is included, so NVRTC needs none
// installed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 FULL = 0xffffffffu; // mask of all lanes
constexpr int LANES = 32;
constexpr float NEG_INF =
    -1e30f; // the maximum of no scores: below every score, and finite, so that no difference is NaN
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// The nearest finite number: an infinity would be one in every sum, and NaN where its weight is 0.
__device__ __forceinline__ u16 float_to_finite_half(float x) {
    constexpr float MOST = 65504;
    return float_to_half(fminf(fmaxf(x, -MOST), MOST));
}

__device__ __forceinline__ float bfloat_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 float_to_bfloat(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Two floats as two halves, the first in the low bits.
__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 half2_to_float2(u32 packed) {
    return make_float2(half_to_float((u16)packed), half_to_float((u16)(packed >> 16)));
}

// Picks four of the bytes of `a` (0 to 3) and `b` (4 to 7) by the nibbles of `selector`; bit 3 of a nibble replicates
// the byte's sign.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
    return picked;
}

// The low bytes of four numbers, the first in the low byte; their second bytes.
__device__ __forceinline__ u32 pack_low_bytes(u32 x0, u32 x1, u32 x2, u32 x3) {
    return prmt(prmt(x0, x1, 0x0040), prmt(x2, x3, 0x0040), 0x5410);
}
__device__ __forceinline__ u32 pack_second_bytes(u32 x0, u32 x1, u32 x2, u32 x3) {
    return prmt(prmt(x0, x1, 0x0051), prmt(x2, x3, 0x0051), 0x5410);
}

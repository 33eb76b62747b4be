// Eight consecutive elements or floats, which a thread moves in 16 or 32 bytes, and RoPE of sixteen. Addresses are
// aligned to them.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"

struct Eight {
    float x[8];

    __device__ __forceinline__ static Eight of(const u16* from) {
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        Eight eight;
#pragma unroll
        for (int i = 0; i < 8; i++) eight.x[i] = to_float((u16)(pairs[i / 2] >> 16 * (i % 2)));
        return eight;
    }
    __device__ __forceinline__ static Eight of(const float* from) {
        Eight eight;
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4*>(eight.x + i) = *reinterpret_cast<const float4*>(from + i);
        return eight;
    }
    __device__ __forceinline__ void store(u16* to) const {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = pack_elements(x[2 * i], x[2 * i + 1]);
        st_global_v4(to, pairs);
    }
    __device__ __forceinline__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
    // Adds a bias, if there is one.
    __device__ __forceinline__ void add(const float* bias, u32 at) {
        if (!bias) return;
        const Eight other = of(bias + at);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] += other.x[i];
    }
};

// RoPE of eight components of the first half of a head and their partners in the second half; sign -1 undoes it.
__device__ __forceinline__ void turn(Eight& first, Eight& second, const float* cos_at, const float* sin_at,
                                     float sign = 1) {
    const Eight cos = Eight::of(cos_at), sin = Eight::of(sin_at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float sine = sign * sin.x[j], turned = first.x[j] * cos.x[j] - second.x[j] * sine;
        second.x[j] = second.x[j] * cos.x[j] + first.x[j] * sine, first.x[j] = turned;
    }
}

// RoPE of keys after the inverse transform, before they are rounded: pairs of components i and i + HEAD_DIM / 2.
//
// CPU twin: codec_core's RopeTable::halves. Compile-time shape: that of maps.cuh; ROPE, defined if keys are rotated. A
// rotated plane's columns of the inverse map are permuted: columns 2 i and 2 i + 1 are a pair, so that the thread that
// has one component of a pair also has the other. Without ROPE columns are components.
#pragma once
#include "codec/place.cuh"

// Whether the rows of a plane of the launch are rotated: keys are the even planes.
__device__ __forceinline__ bool is_rotated(u32 plane) {
#ifdef ROPE
    return plane % 2 == 0;
#else
    return false;
#endif
}

#ifdef ROPE
static_assert(HEAD_DIM % 4 == 0 && MAP_DIM % HEAD_DIM == 0, "four columns are two pairs of a head");
constexpr int HALF = HEAD_DIM / 2;

// Cosines and sines of the angles of pairs.
struct Rope {
    const float *cos, *sin; // [token of the frame][HALF]
};

// The angles of two pairs: those of four columns from a multiple of 4 on.
struct Angles {
    float2 cos, sin;

    static __device__ __forceinline__ Angles of(const Rope& rope, u32 token, u32 column) {
        const u64 at = (u64)token * HALF + column / 2 % HALF;
        return {*reinterpret_cast<const float2*>(rope.cos + at), *reinterpret_cast<const float2*>(rope.sin + at)};
    }
};

// Adds the mean to a pair and rotates it, with the operations of the CPU.
__device__ __forceinline__ void rotate(float& x, float& y, float mean_x, float mean_y, float cos, float sin) {
    const float a = clamp_finite(x + mean_x), b = clamp_finite(y + mean_y);
    x = a * cos - b * sin, y = b * cos + a * sin;
}

// The same for the two pairs (x.x, y.x) and (x.y, y.y); `mean` is that of their columns.
__device__ __forceinline__ void rotate(float2& x, float2& y, const float4& mean, const Angles& angles) {
    rotate(x.x, y.x, mean.x, mean.y, angles.cos.x, angles.sin.x);
    rotate(x.y, y.y, mean.z, mean.w, angles.cos.y, angles.sin.y);
}
#endif

// The component of a map's head that a column of the inverse transform computes.
template <class Index> // int or u32
__device__ __forceinline__ Index component_of(Index column, bool rotated) {
#ifdef ROPE
    if (rotated) return column / 2 / HALF * HEAD_DIM + column / 2 % HALF + column % 2 * HALF;
#endif
    return column;
}

#if defined(ROPE) && ELEMENT != 0
// Adds the mean to four columns of a token, rotates them and stores them, each two adjacent components in one store if
// they are aligned.
__device__ __forceinline__ void store_rotated(Element* token, const Place& place, u32 first_channel, u32 column,
                                              const float4& mean, const float* low, const float* high,
                                              const Angles& angles) {
    float2 x = make_float2(low[0], high[0]), y = make_float2(low[1], high[1]);
    rotate(x, y, mean, angles);
    const Element first[2] = {decoded_element(x.x), decoded_element(x.y)},
                  second[2] = {decoded_element(y.x), decoded_element(y.y)};
    Element* to = token + place.of_channel(first_channel + component_of(column, true));
    if ((u64)to % 4 == 0) {
        *reinterpret_cast<u32*>(to) = first[0] | (u32)first[1] << 16;
        *reinterpret_cast<u32*>(to + HALF) = second[0] | (u32)second[1] << 16;
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) to[i] = first[i], to[HALF + i] = second[i];
}
#endif

// The maps of the codec's linear transform.
//
// Compile-time shape: that of place.cuh; MAP_DIM, the size of a head of the maps, which need not be HEAD_DIM; ROPE,
// defined if keys are rotated after the inverse transform.
#pragma once
#include "codec/place.cuh"
#include "codec/rope.cuh"

struct Maps {
    float forward[CHANNELS][MAP_DIM]; // row i: weights of component i in the coefficients of its head
    float inverse[CHANNELS][MAP_DIM]; // row i: weights of coefficient i in the components of its head
    float mean[CHANNELS];
};

// The argument of the kernels that turn rows into coefficients in f32, and back.
struct TransformArguments {
    const Maps* maps;    // [plane of the frame]
    float* coefficients; // [plane of the launch][token of the launch][CHANNELS]
    PlanesAt rows;       // planes of the launch
    Place place;
    u32 first_plane, first_token, tokens; // those of the launch
#ifdef ROPE
    Rope rope;
#endif
};

// The coefficient of a channel, from the row of its token, with the CPU's bits: products and sums are rounded one by
// one, in the order of the components. (The CPU skips components of zero, which changes no sum.)
__device__ __forceinline__ float exact_coefficient(const Maps& maps, const Place& place, const Element* row,
                                                   u32 channel) {
    const u32 first = channel / MAP_DIM * MAP_DIM;
    const float* map = &maps.forward[first][channel - first];
    float sum = 0;
#pragma unroll 8
    for (u32 i = 0; i < MAP_DIM; i++) {
        const float component = __fsub_rn(to_float(row[place.of_channel(first + i)]), maps.mean[first + i]);
        sum = __fadd_rn(sum, __fmul_rn(component, map[i * MAP_DIM]));
    }
    return sum;
}

// Two values, the first in the low bits, rounded to bf16, and the rounding residuals.
__device__ __forceinline__ void split(float low, float high, u32& rounded, u32& rest) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(high), "f"(low));
    const float lost_low = low - __uint_as_float(rounded << 16),
                lost_high = high - __uint_as_float(rounded & 0xffff0000);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rest) : "f"(lost_high), "f"(lost_low));
}

#if ELEMENT != 0
// Adds the mean to four channels of a token and stores them, in one store if they are adjacent and aligned.
__device__ __forceinline__ void store_four(Element* token, const Place& place, u32 channel, const float4& mean,
                                           const float* low, const float* high) {
    const Element four[4] = {decoded_element(low[0] + mean.x), decoded_element(low[1] + mean.y),
                             decoded_element(high[0] + mean.z), decoded_element(high[1] + mean.w)};
    Element* to = token + place.of_channel(channel);
    if (HEAD_DIM % 4 == 0 && (u64)to % 8 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(four[0] | (u32)four[1] << 16, four[2] | (u32)four[3] << 16);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) token[place.of_channel(channel + j)] = four[j];
}
#endif

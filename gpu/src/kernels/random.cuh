// Pseudo-random numbers: a hash of tensor and index, so that a peer in another language has the same ones.
//
// mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16 (32 bits). The hash of element i
// of a tensor is mix(i ^ mix(tensor)), i modulo 2^32; the number is ((hash >> 8) * 2^-23 - 1) * amplitude in f32. Its
// standard deviation is amplitude / sqrt(3).
//
// CPU twin: kv_device::hashed.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16, x *= 0x7feb352du;
    x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ x >> 16;
}

__device__ __forceinline__ float hashed(u32 tensor, u64 i, float amplitude) {
    return ((mix((u32)i ^ mix(tensor)) >> 8) * 0x1p-23f - 1) * amplitude;
}

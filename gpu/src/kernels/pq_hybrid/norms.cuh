// Norms of the coded values of a tile, if VALUE_NORMS: f16 [TILE], tokens of the tile in order. They are factors of the
// weights with which values are summed, not of the weights in the softmax.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"

// A lane loads the norm of one token, and shuffles give it those of the tokens that it weighs: one register for a tile
// ahead instead of four.
struct TileNorms {
    u16 own; // of token `lane`

    // `tile`: its index among all tiles.
    __device__ __forceinline__ void load(const AttendArguments& a, u32 tile, int lane) {
        if constexpr (HAS_VALUE_NORMS) own = __ldg(a.value_norms + (u64)tile * TILE + lane);
    }

    // The weight of a token's value: 0 for a token without weight, whose norm may be NaN, since it may be behind the
    // last one. Called by all lanes of the warp.
    __device__ __forceinline__ float weight_of_value(float weight, int token) const {
        if constexpr (!HAS_VALUE_NORMS) return weight;
        return times_norm(weight, (u16)__shfl_sync(FULL, (u32)own, token));
    }

    static __device__ __forceinline__ float times_norm(float weight, u16 norm) {
        return weight == 0 ? 0 : weight * half_to_float(norm);
    }
};

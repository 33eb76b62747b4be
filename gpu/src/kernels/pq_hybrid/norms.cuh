// Norms of the coded tokens of a tile: f16 [TILE], the tokens in order. Those of keys, if KEY_NORMS, are factors of
// what codes contribute to the scores. Those of values, if VALUE_NORMS, are factors of the weights with which values
// are summed, not of the weights in the softmax.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "primitives_sm80.cuh"

// The norms of the keys of a lane's SETS tokens.
template <int SETS>
struct KeyNorms {
    u16 of_set[SETS];

    // `tile`: its index among all tiles. `token_of(set)`: a token of the lane.
    template <class TokenOf>
    __device__ __forceinline__ void load(const SelectArguments& a, u32 tile, const TokenOf& token_of) {
        if constexpr (HAS_KEY_NORMS)
#pragma unroll
            for (int set = 0; set < SETS; set++) of_set[set] = __ldg(a.norms + (u64)tile * TILE + token_of(set));
    }

    // Multiplies the scores of codes and adds `others` to them. Those of tokens behind the last one may be NaN.
    __device__ __forceinline__ void multiply_add(float (&scores)[SETS][4], const float (&others)[SETS][4]) const {
#pragma unroll
        for (int i = 0; i < SETS * 4; i++)
            scores[i / 4][i % 4] = scores[i / 4][i % 4] * half_to_float(of_set[i / 4]) + others[i / 4][i % 4];
    }
};

// A lane loads the norm of one token's value, and shuffles give it those of the tokens that it weighs: one register for
// a tile ahead instead of four.
struct ValueNorms {
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

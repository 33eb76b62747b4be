// Codes in the layout of `pq_core::pack`: blocks of 64 tokens; a block has one run of 8 * BITS bytes for each subspace;
// a run has one bit plane for each set bit of BITS, of 8, 4, 2 or 1 bits per token, in this order.
#pragma once
#include "types.cuh"

constexpr u32 BLOCK_TOKENS = 64;

// The code of token `i` of a run.
template <int BITS>
__device__ __forceinline__ u32 code_of(const u8* run, u32 i) {
    u32 code = 0;
    int shift = 0;
#pragma unroll
    for (int width = 8; width; width /= 2)
        if (BITS & width) {
            const u32 byte = run[i % (8 * width)];
            code |= (byte >> (i / (8 * width) * width) & ((1u << width) - 1)) << shift;
            run += 8 * width, shift += width;
        }
    return code;
}

// Codes of tokens `i` to `i + 3` of a run, one in each byte; `i` is a multiple of 4, BITS at most 8. The loads bypass
// L1 (`ld.global.cg`): L1 is not coherent with the previous kernel's writes before `pdl_wait`.
template <int BITS>
__device__ __forceinline__ u32 four_codes_of(const u8* run, u32 i) {
    u32 codes = 0;
    int shift = 0;
#pragma unroll
    for (int width = 8; width; width /= 2)
        if (BITS & width) {
            const u32 bytes = __ldcg((const u32*)(run + i % (8 * width)));
            codes |= (bytes >> (i / (8 * width) * width) & 0x01010101u * ((1u << width) - 1)) << shift;
            run += 8 * width, shift += width;
        }
    return codes;
}

// Codes of tokens `i` to `i + 15` of a run, four in a word; `i` is a multiple of 16, BITS at most 8.
template <int BITS>
__device__ __forceinline__ void sixteen_codes_of(const u8* run, u32 i, u32 (&codes)[4]) {
    int shift = 0;
#pragma unroll
    for (int word = 0; word < 4; word++) codes[word] = 0;
#pragma unroll
    for (int width = 8; width; width /= 2)
        if (BITS & width) {
            const u32 mask = 0x01010101u * ((1u << width) - 1);
            const uint2* at = reinterpret_cast<const uint2*>(run + i % (8 * width));
            const uint2 first = at[0], second = width > 1 ? at[1] : first;
            const u32 words[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
            for (int word = 0; word < 4; word++) {
                // The one-bit plane has 8 bytes: the codes of the second 8 tokens are the next bit of the same bytes.
                const u32 part = i / (8 * width) + (width > 1 ? 0 : word / 2);
                codes[word] |= (words[word] >> part * width & mask) << shift;
            }
            run += 8 * width, shift += width;
        }
}

// The run of one subspace in the block of `token`.
template <int SUBSPACES, int BITS>
__device__ __forceinline__ const u8* run_of(const u8* codes, u32 token, int subspace) {
    return codes + ((u64)(token / BLOCK_TOKENS) * SUBSPACES + subspace) * 8 * BITS;
}

// Mean errors of the values of a block of tokens: value minus decoded value. Attention averages what is lost of single
// values, but not what they have in common.
#pragma once
#include "types.cuh"

constexpr u32 MEAN_TOKENS = 256; // of a block: `MEAN_TOKENS` of the host
// The block that is not whole has sums of parts, so that what a step reads does not depend on how far the tokens behind
// it have been encoded meanwhile.
constexpr u32 PART_TOKENS = 16, PARTS = MEAN_TOKENS / PART_TOKENS;

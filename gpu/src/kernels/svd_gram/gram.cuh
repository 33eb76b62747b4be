// Second moments of rows: sums of x^T x and of x, for all heads.
//
// CPU twin: svd_core::Gram, whose sums are in f64. Compile-time shape: DIM, a multiple of 16 up to 128; ELEMENT 1 or 2.
//
// Products of halves are exact in f32. Tensor cores add them up there for the 128 rows of a tile; above, a sum is two
// floats, its value and what rounding has lost of it, of which a block leaves one; across blocks it is in f64. Tensor
// cores cut off rather than round: of 256 rows a diagonal sum came out too low by 1e-6 of itself, so tiles are not
// longer.
//
// A block has a part of a head's rows and all of its matrix: strips.cu on every device, squares.cu on sm_90. A second
// kernel (join.cu) adds the blocks' matrices in their order to what was there. The floor is reading the rows, which
// pass through a ring of tiles.
#pragma once
#include "primitives_sm80.cuh"

constexpr int STRIPS = DIM / 16; // of 16 components, of which a warp has one
constexpr int ROWS = 128;        // of a tile
constexpr int TILE = ROWS * DIM; // elements
constexpr int PART =
    DIM * (DIM + 1); // numbers of a block's part: the matrix, of which the columns from the row's on count; sums

// What comes out.
struct Sums {
    double* matrices; // [head][DIM][DIM], added to
    double* sums;     // [head][DIM], added to
    float* parts;     // [head][part][PART]
    u64 n;            // rows
    u32 part_count;

    __device__ __forceinline__ float* part() const {
        return parts + ((u64)blockIdx.y * part_count + blockIdx.x) * PART;
    }
};

// The tiles of a block.
struct Range {
    u32 from, to;

    __device__ explicit Range(const Sums& a) {
        const u64 tiles = (a.n + ROWS - 1) / ROWS;
        from = (u32)(tiles * blockIdx.x / a.part_count), to = (u32)(tiles * (blockIdx.x + 1) / a.part_count);
    }
};

// A sum of floats and what rounding has lost of it.
struct TwoFloats {
    float high, low;

    // Exact where the sum is the greater one; else what is lost is no more than the rounding of `x` itself.
    __device__ __forceinline__ void add(float x) {
        const float sum = high + x;
        low += x - (sum - high), high = sum;
    }
    __device__ __forceinline__ float sum() const { return high + low; }
};

#if ELEMENT == 2
constexpr u32 ONES = 0x3f803f80;
#else
constexpr u32 ONES = 0x3c003c00;
#endif

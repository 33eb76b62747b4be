// Shared by gram_sm80.cu and gram_sm90.cu, which compute second moments of rows: per head, the Gram matrix X^T X and
// the sum of the rows X.
//
// CPU twin: svd_core::Gram, whose sums are in f64. Compile-time shape: DIM (a multiple of 16 up to 128), ELEMENT (1 for
// f16, 2 for bf16), SHARED_BYTES.
//
// Two kernels, both launched with PDL. `svd_gram`, grid (part_count, heads): a block accumulates the whole matrix of a
// head over its part of the rows and writes it as one part. `svd_gram_join` (join.cuh) adds the parts of a head, in
// order, to the matrices in f64, so the same inputs give the same bytes.
//
// Precision. Products of two 16-bit elements are exact in f32. Tensor cores accumulate them in f32 over the ROWS = 128
// rows of a tile. Over the tiles of a block a sum is a pair of floats, its value and its rounding error; a part has
// their sum in one float. Over parts it is in f64.
// N.B. Tensor cores truncate rather than round: with tiles of 256 rows a sum on the diagonal was too low by a relative
// 1e-6, so tiles are not longer.
//
// The floor is reading the rows, which pass through a ring of tiles in shared memory.
#pragma once
#include "primitives_sm80.cuh"

constexpr int STRIPS = DIM / 16; // strips of 16 components
constexpr int ROWS = 128;        // rows of a tile
constexpr int TILE = ROWS * DIM; // elements of a tile
// Floats of a part: the matrix, of which only the upper triangle is used, then the sum of the rows.
constexpr int PART = DIM * (DIM + 1);

// Outputs and scratch of both kernels.
struct Sums {
    double* matrices; // [head][DIM][DIM], added to
    double* sums;     // [head][DIM], added to
    float* parts;     // [head][part][PART]
    u64 n;            // rows of a head
    u32 part_count;

    __device__ __forceinline__ float* part() const {
        return parts + ((u64)blockIdx.y * part_count + blockIdx.x) * PART;
    }
};

// The tiles of a block: a contiguous range.
struct Range {
    u32 from, to;

    __device__ explicit Range(const Sums& a) {
        const u64 tiles = (a.n + ROWS - 1) / ROWS;
        from = (u32)(tiles * blockIdx.x / a.part_count), to = (u32)(tiles * (blockIdx.x + 1) / a.part_count);
    }
};

// A compensated sum: its value and the accumulated rounding error.
struct CompensatedSum {
    float high, low;

    // Fast2Sum: the error is exact where |high| >= |x|. Elsewhere the loss is at most the rounding error of `x` itself.
    __device__ __forceinline__ void add(float x) {
        const float sum = high + x;
        low += x - (sum - high), high = sum;
    }
    __device__ __forceinline__ float sum() const { return high + low; }
};

// Two elements equal to 1, in one word.
#if ELEMENT == 2
constexpr u32 ONES = 0x3f803f80;
#else
constexpr u32 ONES = 0x3c003c00;
#endif

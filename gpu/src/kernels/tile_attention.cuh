// Decode attention of a warp to tiles of 16 tokens, for 8 queries: scores, softmax and weighted sums on tensor cores.
// The including kernel loads the tiles.
//
// Compile-time shape: DIM (64 or 128), ELEMENT. In the layouts below the lane is 4 g + l.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int TILE = 16, QUERIES = 8;
constexpr int RESULT = DIM + 4; // floats of a result row: components, maximum, sum of weights, padding

// Reductions over the lanes that share l, which hold the same columns of an accumulator.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

__device__ __forceinline__ u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// B fragments of query g: words[j][i] holds components 32 j + 8 l + 2 i and the next one.
struct TileQueries {
    u32 words[DIM / 32][4];

    // Loads the first `rank` components of row `row`, that of query g; zeros if the query does not exist.
    __device__ __forceinline__ void load(const u16* queries, u64 row, bool exists, u32 rank, int l) {
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (exists && 32 * j + 8 * l < rank)
                four = __ldg(reinterpret_cast<const uint4*>(queries + row * DIM + 32 * j + 8 * l));
#pragma unroll
            for (int i = 0; i < 4; i++) words[j][i] = word_of(four, i);
        }
    }

    // Unscaled scores of a tile: token g with queries 2 l and 2 l + 1, then token g + 8 with both.
    // keys[i][j]: token g + 8 i, components 32 j + 8 l to + 7.
    __device__ __forceinline__ void scores(const uint4 (&keys)[2][DIM / 32], float (&scores)[4]) const {
#pragma unroll
        for (int t = 0; t < 4; t++) scores[t] = 0;
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            const uint4 &upper = keys[0][j], &lower = keys[1][j];
            const u32 even[4] = {upper.x, lower.x, upper.y, lower.y}, odd[4] = {upper.z, lower.z, upper.w, lower.w};
            mma_m16n8k16(scores, even, words[j][0], words[j][1]);
            mma_m16n8k16(scores, odd, words[j][2], words[j][3]);
        }
    }
};

// The weighted sums of values so far, with their softmax.
struct TileSums {
    // Accumulator 4 j + i holds component 64 j + 8 g + 2 i of queries 2 l and 2 l + 1, then the next component of both.
    float sums[DIM / 16][4];
    // Running maximum, equal in all lanes that share l, and sum of weights of the lane's own tokens, of queries 2 l and
    // 2 l + 1.
    float max[2] = {NEG_INF, NEG_INF}, weight[2] = {0, 0};

    __device__ __forceinline__ TileSums() {
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) sums[i / 4][i % 4] = 0;
    }

    // The tile's weights, as B fragments of the tokens; `first` is the tile's first token. Tokens at or above the
    // length have weight 0.
    __device__ __forceinline__ uint2 weights(float (&scores)[4], float scale, u32 first, u32 length, int g) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            scores[t] *= scale;
            if (first + TILE > length && first + g + t / 2 * 8 >= length) scores[t] = -infinity();
        }
        // Lazy rescaling: the running maximum rises only when a score exceeds it by more than 8. Weights are then at
        // most 2^8, which 16-bit elements hold.
        const float tile_max[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        if (warp_uniform(tile_max[0] > max[0] + 8 || tile_max[1] > max[1] + 8)) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const float new_max = fmaxf(max[q], column_max(tile_max[q]));
                const float rescale = exp2_approx(max[q] - new_max);
                max[q] = new_max, weight[q] *= rescale;
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) sums[i][q] *= rescale, sums[i][q + 2] *= rescale;
            }
        }
        float p[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            p[t] = exp2_approx(scores[t] - max[t % 2]);
            weight[t % 2] += p[t];
        }
        return make_uint2(movmatrix_trans(pack_elements(p[0], p[1])), movmatrix_trans(pack_elements(p[2], p[3])));
    }

    // Adds the first `rank` components of a tile's values, rounded up to 64. values[i][j]: token 2 l + {0, 1, 8, 9}[i],
    // components 64 j + 8 g to + 7.
    __device__ __forceinline__ void add(const uint4 (&values)[4][DIM / 64], const uint2& weights, u32 rank) {
#pragma unroll
        for (int j = 0; j < DIM / 64; j++)
            if (64 * j < rank)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 word[4], operand[4];
#pragma unroll
                    for (int t = 0; t < 4; t++) word[t] = word_of(values[t][j], i);
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        operand[2 * t] = prmt(word[2 * t], word[2 * t + 1], 0x5410);
                        operand[2 * t + 1] = prmt(word[2 * t], word[2 * t + 1], 0x7632);
                    }
                    mma_m16n8k16(sums[j * 4 + i], operand, weights.x, weights.y);
                }
    }

    // Writes a result row of each query, for `reduce` of softmax_reduce.cuh.
    __device__ __forceinline__ void store(float* results, int g, int l) const {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float* result = results + (2 * l + q) * RESULT;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
                *reinterpret_cast<float2*>(result + i / 4 * 64 + 8 * g + i % 4 * 2) =
                    make_float2(sums[i][q], sums[i][q + 2]);
            const float sum = column_sum(weight[q]);
            if (g == 0) result[DIM] = max[q], result[DIM + 1] = sum;
        }
    }
};

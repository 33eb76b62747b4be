// Attention of a warp to exact rows, ROWS_PER_ITEM at a time, on tensor cores.
//
// CPU twin: pq_core::attend_exact_into. Queries are the 8 columns of every MMA. Lane 4 g + l loads 16-byte chunks of
// keys g and g + 8, and of values 2 l, 2 l + 1, 2 l + 8 and 2 l + 9. Each chunk is an operand without rearrangement,
// since the components of a dot product, and the rows of a result, may be in any order.
#pragma once
#include "element.cuh"
#include "pq_hybrid/plan.cuh"
#include "primitives_sm80.cuh"

struct RowSums {
    static constexpr int CHUNKS = D / 32,
                         PARTS = D / 64; // chunks of a key, and groups of 8 chunks of a value, per lane
    float sums[PARTS][4][4]; // [group of chunks][word of a chunk][component of the word * 2 + query of the lane's pair]
    float max[2], weight[2]; // of queries 2 l and 2 l + 1; `weight` is the lane's share

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < PARTS * 16; i++) sums[i / 16][i / 4 % 4][i % 4] = 0;
        max[0] = max[1] = NEG_INF, weight[0] = weight[1] = 0;
    }

    // Adds `count` rows; `row_of(i)` is the index of row i in `keys` and `values`. `queries`: [GROUP][D].
    template <typename RowOf>
    __device__ __forceinline__ void add(const u16* queries, const u16* keys, const u16* values, u32 count, float scale,
                                        const RowOf& row_of) {
        const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
        uint4 key[2][CHUNKS], value[4][PARTS];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u64 row = row_of(min(g + 8 * i, count - 1));
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                key[i][c] = *reinterpret_cast<const uint4*>(keys + row * D + (l + 4 * c) * 8);
        }
        auto load_values = [&](int part) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u64 row = row_of(min(2 * l + i % 2 + i / 2 * 8, count - 1));
                value[i][part] = *reinterpret_cast<const uint4*>(values + row * D + (g + 8 * part) * 8);
            }
        };
        load_values(0);                 // the other part later: registers do not hold both
        float scores[4] = {0, 0, 0, 0}; // row g + 8 (i / 2), query 2 l + i % 2
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint4 query = make_uint4(0, 0, 0, 0);
            if (g < GROUP) query = __ldg(reinterpret_cast<const uint4*>(queries + g * D + (l + 4 * c) * 8));
            const uint4 low = key[0][c], high = key[1][c];
            const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            mma_m16n8k16(scores, first, query.x, query.y);
            mma_m16n8k16(scores, second, query.z, query.w);
        }
        if (PARTS == 2) load_values(PARTS - 1);
        float keep[2];
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
            for (int i = q; i < 4; i += 2) scores[i] = g + i / 2 * 8 < count ? scores[i] * scale : -infinity();
            float new_max = fmaxf(max[q], fmaxf(scores[q], scores[q + 2]));
#pragma unroll
            for (int lanes = 4; lanes < LANES; lanes *= 2)
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL, new_max, lanes));
            keep[q] = exp2_approx(max[q] - new_max);
            max[q] = new_max;
            scores[q] = exp2_approx(scores[q] - new_max), scores[q + 2] = exp2_approx(scores[q + 2] - new_max);
            weight[q] = weight[q] * keep[q] + scores[q] + scores[q + 2];
        }
        const u32 weights[2] = {movmatrix_trans(pack_elements(scores[0], scores[1])),
                                movmatrix_trans(pack_elements(scores[2], scores[3]))};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const u32 words[4][4] = {{value[0][part].x, value[0][part].y, value[0][part].z, value[0][part].w},
                                     {value[1][part].x, value[1][part].y, value[1][part].z, value[1][part].w},
                                     {value[2][part].x, value[2][part].y, value[2][part].z, value[2][part].w},
                                     {value[3][part].x, value[3][part].y, value[3][part].z, value[3][part].w}};
#pragma unroll
            for (int w = 0; w < 4; w++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[part][w][i] *= keep[i % 2];
                const u32 operand[4] = {prmt(words[0][w], words[1][w], 0x5410), prmt(words[0][w], words[1][w], 0x7632),
                                        prmt(words[2][w], words[3][w], 0x5410), prmt(words[2][w], words[3][w], 0x7632)};
                mma_m16n8k16(sums[part][w], operand, weights[0], weights[1]);
            }
        }
    }

    // Merges the sums into the warp's results, which hold the sums of the coded tokens.
    __device__ __forceinline__ void add_to(float* results) const {
        const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float total = weight[q];
#pragma unroll
            for (int lanes = 4; lanes < LANES; lanes *= 2) total += __shfl_xor_sync(FULL, total, lanes);
            float* result = results + min(2 * l + q, VEC - 1) * RESULT;
            const float new_max = fmaxf(max[q], result[D]);
            const float keep = exp2_approx(result[D] - new_max), factor = exp2_approx(max[q] - new_max);
            total = keep * result[D + 1] + factor * total;
            __syncwarp(); // all lanes have read the result
            if (2 * l + q >= VEC) continue;
            if (g == 0) result[D] = new_max, result[D + 1] = total;
#pragma unroll
            for (int i = 0; i < PARTS * 4; i++) {
                float2* to = reinterpret_cast<float2*>(result + (g + i / 4 * 8) * 8 + i % 4 * 2);
                *to = make_float2(keep * to->x + factor * sums[i / 4][i % 4][q],
                                  keep * to->y + factor * sums[i / 4][i % 4][2 + q]);
            }
        }
        __syncwarp();
    }
};

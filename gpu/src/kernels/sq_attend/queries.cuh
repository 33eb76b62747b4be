// The queries of a block of tokens as integers: B operands of the products with keys.
//
// CPU twin: `round_query` of pq_core::sq. A component times its step is z units, and z = 128 high + low, with high in
// -127 to 127 and low in -64 to 63: the limbs of query q are columns 2 q and 2 q + 1 of an MMA, which a group of four
// fills. A sum of 256 products with codes of 8 bits is below 2^23 for the high limbs, so sums times 128 fit 32 bits.
// The score is (sum + offset) * unit, where the offset moves the codes to their levels: c + 1/2 - 2^(b - 1).
#pragma once
#include "sq_attend/keys.cuh"

constexpr float QUERY_LIMIT = 16256; // 127 * 128
constexpr int QUERY_WORDS = SETS * QUADS * 8; // of a warp, [set][quad][column]

// Factor and offset of the scores of query l of each set.
struct BlockQueries {
    float unit[SETS], offset[SETS];

    // Rounds the `live` queries of a slice, the others being zeros, and stores them in `words`. Called by the warp.
    __device__ __forceinline__ void load(const float* queries, const u8* steps, u32 live, float scale,
                                         const KeyTable& table, u32* words, const Lane& lane) {
        constexpr int OF_LANE = (QUADS + LANES - 1) / LANES; // quads
        float step[OF_LANE][4];
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            const int quad = lane.lane + i * LANES;
            const u32 codes = quad < QUADS ? __ldg(reinterpret_cast<const u32*>(steps) + quad) : 0;
#pragma unroll
            for (int j = 0; j < 4; j++) step[i][j] = exp2_approx((codes >> 8 * j & 255) * .125f - 16);
        }
        __syncwarp(); // all lanes have read the queries of the block before
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            u32 limbs[OF_LANE][8];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                float x[OF_LANE][4];
                u32 largest = 0; // bits of a magnitude, which are in the order of the magnitudes; NaN is the largest
#pragma unroll
                for (int i = 0; i < OF_LANE; i++) {
                    const int quad = lane.lane + i * LANES;
                    float4 four = make_float4(0, 0, 0, 0);
                    if (quad < QUADS && 4 * set + q < live)
                        four = __ldg(reinterpret_cast<const float4*>(queries + (4 * set + q) * D) + quad);
                    x[i][0] = four.x * step[i][0], x[i][1] = four.y * step[i][1];
                    x[i][2] = four.z * step[i][2], x[i][3] = four.w * step[i][3];
#pragma unroll
                    for (int j = 0; j < 4; j++) largest = max(largest, __float_as_uint(fabsf(x[i][j])));
                }
                const float top = __uint_as_float(__reduce_max_sync(FULL, largest));
                const float per_unit = top > 0 ? QUERY_LIMIT / top : 0;
                int sum = 0;
#pragma unroll
                for (int i = 0; i < OF_LANE; i++) {
                    int high[4], low[4], of_quad = 0;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int z = __float2int_rz(x[i][j] * per_unit + copysignf(.5f, x[i][j]));
                        high[j] = (z + 64) >> 7, low[j] = z - 128 * high[j], of_quad += z;
                    }
                    limbs[i][2 * q] = pack_low_bytes(high), limbs[i][2 * q + 1] = pack_low_bytes(low);
                    const int quad = lane.lane + i * LANES;
                    if (quad < QUADS) sum += of_quad * table.offset(quad);
                }
                sum = __reduce_add_sync(FULL, sum);
                // NaN if a component is not finite.
                const float one = top < infinity() ? top / QUERY_LIMIT * scale : top * 0;
                if (lane.l == q) unit[set] = one, offset[set] = one * (.5f * sum);
            }
#pragma unroll
            for (int i = 0; i < OF_LANE; i++) {
                const int quad = lane.lane + i * LANES;
                uint4* to = reinterpret_cast<uint4*>(words + (set * QUADS + quad) * 8);
                if (quad < QUADS) {
                    to[0] = make_uint4(limbs[i][0], limbs[i][1], limbs[i][2], limbs[i][3]);
                    to[1] = make_uint4(limbs[i][4], limbs[i][5], limbs[i][6], limbs[i][7]);
                }
            }
        }
        __syncwarp();
    }
};

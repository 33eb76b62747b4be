// The queries of a block of tokens as integers: B operands of the products with keys.
//
// CPU twin: `round_query` of pq_core::sq. A component times its step is z units, and z = 256 high + low, with high in
// -64 to 64 and low in -128 to 127: the limbs of query q are columns 2 q and 2 q + 1 of an MMA, which a group of four
// fills. A sum of 256 products of z with a byte is below 2^31. (A sixteenth bit would fit, too, but scores would no
// longer be those of the CPU.) The score is (sum + offset) * unit, where the offset moves the codes to their levels: c
// + 1/2 - 2^(b - 1).
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
            for (int j = 0; j < 4; j++) // 2^(code / 8 - 16), the code in the mantissa of 2^23
                step[i][j] = exp2_approx(__uint_as_float(prmt(codes, 0x4b000000, 0x7440 + j)) * .125f - 1048592.f);
        }
        __syncwarp(); // all lanes have read the queries of the block before
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float x[4][OF_LANE][4];
#pragma unroll
            for (int q = 0; q < 4; q++)
#pragma unroll
                for (int i = 0; i < OF_LANE; i++) {
                    const int quad = lane.lane + i * LANES;
                    float4 four = make_float4(0, 0, 0, 0);
                    if (quad < QUADS && 4 * set + q < live)
                        four = __ldg(reinterpret_cast<const float4*>(queries + (4 * set + q) * D) + quad);
                    x[q][i][0] = four.x * step[i][0], x[q][i][1] = four.y * step[i][1];
                    x[q][i][2] = four.z * step[i][2], x[q][i][3] = four.w * step[i][3];
                }
#pragma unroll
            for (int q = 0; q < 4; q++) {
                u32 largest = 0; // bits of a magnitude, which are in the order of the magnitudes; NaN is the largest
#pragma unroll
                for (int i = 0; i < OF_LANE * 4; i++)
                    largest = max(largest, __float_as_uint(x[q][i / 4][i % 4]) & 0x7fffffffu);
                const float top = __uint_as_float(__reduce_max_sync(FULL, largest));
                const float per_unit = top > 0 ? __fdividef(QUERY_LIMIT, top) : 0;
                u32 sum = 0;
#pragma unroll
                for (int i = 0; i < OF_LANE; i++) {
                    u32 z[4], high[4], of_quad = 0; // low bits of floats of 1.5 * 2^23, to which z is added
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        z[j] = __float_as_uint(x[q][i][j] * per_unit + 12582912.f);
                        high[j] = z[j] + 128, of_quad += z[j] - 0x4b400000u;
                    }
                    const int quad = lane.lane + i * LANES;
                    if (quad < QUADS)
                        *reinterpret_cast<uint2*>(words + (set * QUADS + quad) * 8 + 2 * q) =
                            make_uint2(pack_second_bytes(high[0], high[1], high[2], high[3]),
                                       pack_low_bytes(z[0], z[1], z[2], z[3]));
#if KEY_WIDTH
                    sum += of_quad;
#else
                    if (quad < QUADS) sum += of_quad * table.offset(quad);
#endif
                }
                sum = __reduce_add_sync(FULL, sum);
                // NaN if a component is not finite.
                const float one = top < infinity() ? top * (scale / QUERY_LIMIT) : top * 0;
                constexpr float LEVEL = KEY_WIDTH ? .5f * (1 - (1 << KEY_WIDTH)) : .5f;
                if (lane.l == q) unit[set] = one * (1.f / KEY_SCALE), offset[set] = one * (LEVEL * (int)sum);
            }
        }
        __syncwarp();
    }
};

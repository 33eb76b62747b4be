// A warp's scores of a tile: keys times queries.
#pragma once
#include "pq_attend/codes.cuh"

// The queries as the columns of the products want them: in the order of each column's variant.
struct QueryColumns {
    u32 words[TURNS][HALVES * 4][2];

    // Four matrices at a time, of two steps and both halves of 16 words; column g of each is four words of a query. A
    // lane says where one column of one of them lies.
    __device__ __forceinline__ void load(const Lane& lane) {
        const int column = lane.lane % 8, middle = lane.lane / 8 % 2, odd = lane.lane / 16;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int variant = COPIES == 1 ? (column - 2 * i) & 7 : (column / 2) ^ i;
            const int query = COPIES == 1 ? i : 2 * i + (column & 1),
                      flipped = COPIES == 1 ? middle ^ (variant / 4) : middle;
            const u8* row = shared + QUERY_ROWS + query * QUERY_ROW + flipped * 64;
#pragma unroll
            for (int step = 0; step < HALVES * 4; step += 2) {
                u32 pairs[4];
                ldmatrix_x4(pairs, row + step / 4 * 128 + (((step % 4) ^ odd ^ (variant & 3)) * 16));
#pragma unroll
                for (int j = 0; j < 4; j++) {
#if ELEMENT == 2
                    pairs[j] = pack_half2(__uint_as_float(pairs[j] << 16), __uint_as_float(pairs[j] & 0xffff0000u));
#endif
                    words[i][step + j / 2][j % 2] = pairs[j];
                }
            }
        }
    }
};

// Where a lane's words lie in a row of the key table, and which of its codes come first. Lanes of g >= 4 have the
// 16-word halves swapped: they read them in the other order (one copy), or from the copy in which they are swapped.
struct KeyOffsets {
    u32 bytes[3] = {0, 0, 0}; // three of them, and the copy's bit
    int swap;                 // bits by which codes are rotated

    __device__ __forceinline__ KeyOffsets(const Lane& lane) {
        const int g = lane.g, l = lane.l;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 word = 16 * ((i / 4) ^ (g / 4)) + 4 * ((i % 4) ^ (g & 3)) + l;
            bytes[i / 3] |= (word * 4 + (COPIES == 2 && !FAR_COPY && g >= 4 ? ROW / 2 : 0)) << (8 * (i % 3));
        }
#pragma unroll
        for (int i = 0; i < 3; i++) bytes[i] |= (FAR_COPY && g >= 4 ? 1u : 0u) << 24;
        swap = COPIES == 1 && g >= 4 ? 16 : 0;
    }
};

// The products of a tile's keys with the queries, in steps.
struct Scores {
    static constexpr int STEPS = 2 * HALVES * 4;
    u32 codes[Keys::EXPANDED];
    float product[2][TURNS][4]; // [half of the tile]: tokens g and g + 8

    // Halves by turns, so that a product does not wait for the one before it.
    __device__ __forceinline__ void add_step(int k, const QueryColumns& query, const KeyOffsets& offsets) {
        const int half = k % 2, step = k / 2 % 4, part = k / 8;
        u32 operand[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { // high = i & 1, middle = i / 2
            const int code = key_code(half, part, step, i / 2, i & 1), offset = i / 2 * 4 + step;
            u32 word = codes[code / 4];
            if (COPIES == 1 && D / KEY_SUB >= 32) word = __funnelshift_l(word, word, offsets.swap);
            const u32 selector = key_selector(code % 4, offset % 3);
            operand[i] = look_up<KEY_TABLE>(prmt(word, offsets.bytes[offset / 3], selector), part);
        }
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const u32* q = query.words[i][part * 4 + step];
            if (part + step == 0)
                mma_m16n8k16_f16_init(product[half][i], operand, q[0], q[1]);
            else
                mma_m16n8k16_f16(product[half][i], operand, q[0], q[1]);
        }
    }

    // Of tokens g, g + 8, g + 16, g + 24 for the lane's queries.
    __device__ __forceinline__ void take(float (&scores)[COPIES][4], const Lane& lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int high = 0; high < 2; high++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    float score = 0;
#pragma unroll
                    for (int t = 0; t < TURNS; t++) {
                        const float* row = product[half][t] + 2 * high;
                        if (t == 0 || lane.turn == t) score = COPIES == 2 ? row[i] : lane.g & 1 ? row[1] : row[0];
                    }
                    scores[i][half * 2 + high] = score;
                }
    }
};

// A warp's scores of a tile: key words, looked up by code, are the A operand of mma.m16n8k16, queries the B operand.
//
// Each row g of A has its words in an order of its own, the variant of g (shape.cuh), so a column of B is a query in
// the order of one variant.
#pragma once
#include "pq_attend/codes.cuh"

// The B operands: columns are queries, in the word order of the column's variant.
struct QueryColumns {
    u32 words[KEY_MMAS][HALVES * 4][2];

    // One ldmatrix.x4 loads two steps and both 16-word halves; a column g of each matrix is four words of a query. Each
    // lane gives the address of one column of one matrix.
    __device__ __forceinline__ void load(const Lane& lane) {
        const int column = lane.lane % 8, middle = lane.lane / 8 % 2, odd = lane.lane / 16;
#pragma unroll
        for (int i = 0; i < KEY_MMAS; i++) {
            const int variant = COPIES == 1 ? (column - 2 * i) & 7 : (column / 2) ^ i;
            const int query = COPIES == 1 ? i : 2 * i + (column & 1),
                      flipped = COPIES == 1 ? middle ^ (variant / 4) : middle;
            const u8* row = shared + F16_QUERY_ROWS + query * QUERY_ROW + flipped * 64;
#pragma unroll
            for (int step = 0; step < HALVES * 4; step += 2) {
                u32 pairs[4];
                ldmatrix_x4(pairs, row + step / 4 * 128 + (((step % 4) ^ odd ^ (variant & 3)) * 16));
#pragma unroll
                for (int j = 0; j < 4; j++) words[i][step + j / 2][j % 2] = pairs[j];
            }
        }
    }
};

// Byte offsets of a lane's words in a row of the key table. Lanes with g >= 4 use the two 16-word halves in swapped
// order: with one table copy they also rotate their codes, with two they read the copy whose halves are swapped.
struct KeyOffsets {
    u32 bytes[3] = {0, 0, 0}; // three offsets, and the bit of the table copy in byte 3
    int swap;                 // rotation of the codes in bits

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

// The products of a tile's keys with the queries, computed in STEPS steps.
struct Scores {
    static constexpr int STEPS = 2 * HALVES * 4;
    u32 codes[Keys::EXPANDED];
    float product[2][KEY_MMAS][4]; // accumulators [half of the tile]: tokens g and g + 8

    // Steps alternate between the halves of the tile, so that consecutive MMAs have different accumulators.
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
        for (int i = 0; i < KEY_MMAS; i++) {
            const u32* q = query.words[i][part * 4 + step];
            if (part + step == 0)
                mma_m16n8k16_f16_init(product[half][i], operand, q[0], q[1]);
            else
                mma_m16n8k16_f16(product[half][i], operand, q[0], q[1]);
        }
    }

    // Extracts the scores of tokens g, g + 8, g + 16 and g + 24 for the lane's queries.
    __device__ __forceinline__ void extract(float (&scores)[COPIES][4], const Lane& lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int high = 0; high < 2; high++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    float score = 0;
#pragma unroll
                    for (int t = 0; t < KEY_MMAS; t++) {
                        const float* row = product[half][t] + 2 * high;
                        if (t == 0 || lane.mma_index == t) score = COPIES == 2 ? row[i] : lane.g & 1 ? row[1] : row[0];
                    }
                    scores[i][half * 2 + high] = score;
                }
    }
};

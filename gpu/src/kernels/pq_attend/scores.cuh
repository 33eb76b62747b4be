// A warp's scores of a tile: key words, looked up by code, are the A operand of mma.m16n8k16, queries the B operand.
//
// Each row g of A has its own word order, the variant of g (shape.cuh), so a column of B is a query in the order of one
// variant. The words of row g at a step are those of block `step ^ (g & 3)` of 4 words.
#pragma once
#include "pq_attend/codes.cuh"

#if QUERIES <= COPIES
// The B operands: a column is a query in the word order of one variant.
struct QueryColumns {
    u32 words[HALVES * 4][2];

    // One ldmatrix.x4 loads two steps and both 16-word halves; a column g of each matrix is four words of a query. Each
    // lane gives the address of one column of one matrix.
    __device__ __forceinline__ explicit QueryColumns(const Lane& lane) {
        const int column = lane.lane % 8, middle = lane.lane / 8 % 2, odd = lane.lane / 16;
        const int variant = column / MMA_QUERIES, flipped = COPIES == 2 ? 0 : variant / 4;
        const u8* row = shared + F16_QUERY_ROWS + column % MMA_QUERIES * QUERY_ROW + (middle ^ flipped) * 64;
#pragma unroll
        for (int step = 0; step < HALVES * 4; step += 2) {
            u32 pairs[4];
            ldmatrix_x4(pairs, row + step / 4 * 128 + (((step % 4) ^ odd ^ (variant & 3)) * 16));
#pragma unroll
            for (int j = 0; j < 4; j++) words[step + j / 2][j % 2] = pairs[j];
        }
    }

    __device__ __forceinline__ void multiply(float (&product)[KEY_MMAS][4], const u32 (&keys)[4], int step) const {
        const u32(&q)[2] = words[step];
        if (step == 0)
            mma_m16n8k16_f16_init(product[0], keys, q[0], q[1]);
        else
            mma_m16n8k16_f16(product[0], keys, q[0], q[1]);
    }
};
#else
// The B operands: a column is a query in the word order of one variant, with the words of an even step and of the odd
// one after it side by side. The metadata of a row select those of its block.
struct QueryColumns {
    u32 words[KEY_MMAS][HALVES * 2][4]; // [MMA][pair of steps]
    u32 selection;                      // metadata of even steps

    __device__ __forceinline__ explicit QueryColumns(const Lane& lane) {
        const int column = lane.g, pair = column / 2;
        const int odd = lane.l & 1; // rows 2 l and 2 l + 1 of each matrix are a word of an odd block
#pragma unroll
        for (int i = 0; i < KEY_MMAS; i++) {
            const int variant = (pair ^ i) & (VARIANTS - 1);
            // Bits of the variant: g & 2, unless lanes exchange words, and g & 4 with one table copy.
            const int later = KEYS_EXCHANGED ? 0 : variant & 1, flipped = COPIES == 2 ? 0 : variant / (VARIANTS / 2);
            const int query = i * MMA_QUERIES + pair / VARIANTS * 2 + (column & 1);
            const u8* row = shared + F16_QUERY_ROWS + query * QUERY_ROW + (odd * 4 + lane.l / 2) * 4;
#pragma unroll
            for (int steps = 0; steps < HALVES * 2; steps++) {
                const u8* block = row + steps / 2 * 128 + ((steps ^ later) & 1) * 32;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    words[i][steps][j] =
                        *reinterpret_cast<const u32*>(block + (j / 2 ^ flipped) * 64 + j % 2 * 8);
                }
            }
        }
        selection = lane.g & 1 ? 0xeeeeeeeeu : 0x44444444u;
    }

    __device__ __forceinline__ void multiply(float (&product)[KEY_MMAS][4], const u32 (&keys)[4], int step) const {
        const u32 metadata = step & 1 ? selection ^ 0xaaaaaaaau : selection; // 0xe for 0x4 and 0x4 for 0xe
#pragma unroll
        for (int i = 0; i < KEY_MMAS; i++) {
            if (step == 0)
                mma_sp_m16n8k32_f16_init(product[i], keys, words[i][step / 2], metadata);
            else
                mma_sp_m16n8k32_f16(product[i], keys, words[i][step / 2], metadata);
        }
    }
};
#endif

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
    static constexpr int STEPS = 2 * HALVES * (KEYS_EXCHANGED ? 2 : 4);
    u32 codes[Keys::EXPANDED];
    float product[2][KEY_MMAS][4]; // accumulators [half of the tile]: tokens g and g + 8

    __device__ __forceinline__ void look_up_keys(u32 (&operand)[4], const KeyOffsets& offsets, int half, int part,
                                                 int step) const {
#pragma unroll
        for (int i = 0; i < 4; i++) { // high = i & 1, middle = i / 2
            const int code = key_code(half, part, step, i / 2, i & 1), offset = i / 2 * 4 + step;
            u32 word = codes[code / 4];
            if (COPIES == 1 && D / KEY_SUB >= 32) word = __funnelshift_l(word, word, offsets.swap);
            const u32 selector = key_selector(code % 4, offset % 3);
            operand[i] = look_up<KEY_TABLE>(prmt(word, offsets.bytes[offset / 3], selector), part);
        }
    }

    // Steps alternate between the halves of the tile, so that consecutive MMAs have different accumulators.
    __device__ __forceinline__ void add_step(int k, const QueryColumns& query, const KeyOffsets& offsets,
                                             const Lane& lane) {
        const int half = k % 2;
        if constexpr (KEYS_EXCHANGED) {
            const int step = k / 2 % 2, part = k / 4;
            u32 words[2][4], operands[2][4]; // of `step` and `step` + 2
#pragma unroll
            for (int i = 0; i < 2; i++) look_up_keys(words[i], offsets, half, part, step + 2 * i);
#pragma unroll
            for (int i = 0; i < 4; i++) exchange(operands[0][i], operands[1][i], words[0][i], words[1][i], lane.g & 2);
#pragma unroll
            for (int i = 0; i < 2; i++) query.multiply(product[half], operands[i], part * 4 + step + 2 * i);
        } else {
            const int step = k / 2 % 4, part = k / 8;
            u32 operand[4];
            look_up_keys(operand, offsets, half, part, step);
            query.multiply(product[half], operand, part * 4 + step);
        }
    }

    // Extracts the scores of tokens g, g + 8, g + 16 and g + 24 for the lane's queries.
    __device__ __forceinline__ void extract(float (&scores)[LANE_QUERIES][4], const Lane& lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int high = 0; high < 2; high++)
#pragma unroll
                for (int i = 0; i < LANE_QUERIES; i++) {
                    float score = 0;
#pragma unroll
                    for (int t = 0; t < KEY_MMAS; t++) {
                        const float* row = product[half][t] + 2 * high;
                        if (t == 0 || lane.mma_index == t) score = QUERIES > 1 ? row[i] : lane.g & 1 ? row[1] : row[0];
                    }
                    scores[i][half * 2 + high] = score;
                }
    }
};

// Products of queries and coded keys of a tile.
//
// The A operand has tokens as rows and quads of components as columns: lane 4 g + l holds column l of the layout, the
// quads l, l + 4 and so on, of tokens 4 g to 4 g + 3, which are 16 bytes of each row of the tile. A shift and a mask
// make a register of the operand from a word: four codes.
//
// Where all components have the same width, the shifts are known when the kernel is compiled, and a lane keeps its B
// operands for all tiles of a block. Otherwise which quad has which bits of a row differs from column to column, so
// every lane takes these from a table; the B operand follows by the quad's number. A code that two rows share is two
// columns of the product with the same query: each field is at its place in the code.
#pragma once
#include "sq_attend/ring.cuh"
#include "sq_attend/uniform_codes.cuh"
#include "sq_key_table.cuh"

// The words of tokens 4 g to 4 g + 3 of a row, for column l.
template <int R>
__device__ __forceinline__ uint4 key_row(u32 keys, const Lane& lane) {
    constexpr Row ROW = row_of(KEY_SLOTS, R);
    constexpr int FIRST = ROW.first * VECTOR / CHUNK_WORDS, PAIRS = ROW.slots / 2; // of vectors: 32 tokens
    if constexpr (PAIRS == 4) return ld_stage_v4(keys + lane.keys + FIRST * CHUNK);
    const int chunk = PAIRS ? lane.l % (PAIRS ? PAIRS : 1) * 8 + lane.g : lane.g % 4;
    return ld_stage_v4(keys + chunk_place<FIRST>(chunk));
}

#if KEY_WIDTH
struct KeyProducts {
    u32 queries[SETS][PARTS]; // B operands: quad l + 4 p, column g

    __device__ __forceinline__ KeyProducts(const KeyTable&, const Lane&) {}

    // Called with the block's queries as integers, [set][quad][column].
    __device__ __forceinline__ void begin_block(const u32* words, const Lane& lane) {
#pragma unroll
        for (int i = 0; i < SETS * PARTS; i++)
            queries[i / PARTS][i % PARTS] = words[(i / PARTS * QUADS + i % PARTS * COLUMNS + lane.l) * 8 + lane.g];
    }

    // sums[set][i]: of tokens 4 g + 2 i and 4 g + 2 i + 1 with the two limbs of query l.
    __device__ __forceinline__ void multiply(int (&sums)[SETS][2][4], u32 keys, const Lane& lane) const {
        UniformCodes<KEY_SLOTS, KEY_WIDTH> codes;
        load_row<0>(codes, keys, lane);
        add_parts<0>(sums, codes);
    }

  private:
    template <int R>
    static __device__ __forceinline__ void load_row(UniformCodes<KEY_SLOTS, KEY_WIDTH>& codes, u32 keys,
                                                    const Lane& lane) {
        const uint4 four = key_row<R>(keys, lane);
        u32(&words)[4] = codes.words[R];
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        constexpr int OF_ROW = row_of(KEY_SLOTS, R).slots;
        if constexpr (OF_ROW < 8) {
            // Unit 2 l + h: h is the half of the tokens.
            const u32 unit = 2 * lane.l + (OF_ROW == 1 ? lane.g / 4 : 0), up = OF_ROW * (unit / OF_ROW);
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = __funnelshift_r(words[i], words[i], up);
        }
        if constexpr (R + 1 < UniformCodes<KEY_SLOTS, KEY_WIDTH>::ROWS) load_row<R + 1>(codes, keys, lane);
    }

    template <int P>
    __device__ __forceinline__ void add_parts(int (&sums)[SETS][2][4],
                                              const UniformCodes<KEY_SLOTS, KEY_WIDTH>& codes) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 a[4] = {codes.template code<P>(2 * i), codes.template code<P>(2 * i + 1),
                              codes.template code<P + 1>(2 * i), codes.template code<P + 1>(2 * i + 1)};
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                if (P == 0)
                    mma_m16n8k32_u8s8_init(sums[set][i], a, queries[set][P], queries[set][P + 1]);
                else
                    mma_m16n8k32_u8s8(sums[set][i], a, queries[set][P], queries[set][P + 1]);
            }
        }
        if constexpr (P + 2 < PARTS) add_parts<P + 2>(sums, codes);
    }
};
#else
// Steps that every row takes, without a branch. Most rows have three or four fields, two a step; absent fields have no
// bits.
__device__ constexpr int fixed_steps(int row) { return row_of(KEY_SLOTS, row).slots > 2 ? 2 : 1; }
__device__ constexpr int fixed_steps_before(int row) {
    int steps = 0;
    for (int i = 0; i < row; i++) steps += fixed_steps(i);
    return steps;
}

struct KeyProducts {
    // Of the fixed steps of a tile, a lane keeps the fields for all tiles of a head, and the B operands for
    // those of a block: as many as registers suffice for.
    static constexpr int FIXED_STEPS = fixed_steps_before(KEY_ROWS);
    static constexpr int KEPT = RESIDENT > 2 || SETS > 1 ? 0 : FIXED_STEPS < 4 ? FIXED_STEPS : 4;

    const KeyTable table;
    const u8* queries; // the block's integers, from column g of quad 0
    uint4 fields[KEPT ? KEPT : 1];
    u32 operands[KEPT ? KEPT : 1][SETS][2];

    // Called when the table is complete in shared memory.
    __device__ __forceinline__ KeyProducts(const KeyTable& table, const Lane& lane) : table(table) {
        keep<0>(lane);
    }
    __device__ __forceinline__ void begin_block(const u32* words, const Lane& lane) {
        queries = reinterpret_cast<const u8*>(words + lane.g);
#pragma unroll
        for (int i = 0; i < KEPT; i++) load_operands(operands[i], fields[i]);
    }

    __device__ __forceinline__ void multiply(int (&sums)[SETS][2][4], u32 keys, const Lane& lane) const {
#pragma unroll
        for (int i = 0; i < SETS * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
        add_row<0>(sums, keys, lane);
    }

  private:
    template <int R>
    __device__ __forceinline__ void keep(const Lane& lane) {
        constexpr int FIRST = fixed_steps_before(R);
#pragma unroll
        for (int i = 0; i < fixed_steps(R); i++)
            if (FIRST + i < KEPT) fields[FIRST + i] = table.fields<R>(lane.l)[i * COLUMNS];
        if constexpr (R + 1 < KEY_ROWS) keep<R + 1>(lane);
    }

    // A field of four codes. The rotation is the low five bits of `rotation`.
    static __device__ __forceinline__ u32 take(u32 word, u32 rotation, u32 mask) {
        return __funnelshift_r(word, word, rotation) & mask;
    }

    __device__ __forceinline__ void load_operands(u32 (&b)[SETS][2], const uint4& field) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            b[set][0] = *reinterpret_cast<const u32*>(queries + (field.x & ~31u) + set * QUADS * 32);
            b[set][1] = *reinterpret_cast<const u32*>(queries + (field.z & ~31u) + set * QUADS * 32);
        }
    }

    // Two fields.
    static __device__ __forceinline__ void add_step(int (&sums)[SETS][2][4], const u32 (&words)[4], const uint4& field,
                                                    const u32 (&b)[SETS][2], u32 up) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 *two = words + 2 * i,
                      a[4] = {take(two[0], field.x + up, field.y), take(two[1], field.x + up, field.y),
                              take(two[0], field.z + up, field.w), take(two[1], field.z + up, field.w)};
#pragma unroll
            for (int set = 0; set < SETS; set++) mma_m16n8k32_u8s8(sums[set][i], a, b[set][0], b[set][1]);
        }
    }
    __device__ __forceinline__ void add_step(int (&sums)[SETS][2][4], const u32 (&words)[4], const uint4& field,
                                             u32 up) const {
        u32 b[SETS][2];
        load_operands(b, field);
        add_step(sums, words, field, b, up);
    }

    template <int R>
    __device__ __forceinline__ void add_row(int (&sums)[SETS][2][4], u32 keys, const Lane& lane) const {
        const uint4 four = key_row<R>(keys, lane);
        const u32 words[4] = {four.x, four.y, four.z, four.w};
        // The two halves of the tokens share the words of a row of one slot.
        const u32 up = row_of(KEY_SLOTS, R).slots == 1 ? lane.g / 4 : 0;
        constexpr int FIRST = fixed_steps_before(R);
        const uint4* of_row = table.fields<R>(lane.l);
        uint4 field[fixed_steps(R)]; // together, so that their loads overlap
#pragma unroll
        for (int i = 0; i < fixed_steps(R); i++) field[i] = FIRST + i < KEPT ? fields[FIRST + i] : of_row[i * COLUMNS];
#pragma unroll
        for (int i = 0; i < fixed_steps(R); i++)
            if (FIRST + i < KEPT)
                add_step(sums, words, field[i], operands[FIRST + i], up);
            else
                add_step(sums, words, field[i], up);
#pragma unroll 1
        for (u32 step = fixed_steps(R), steps = table.steps(R); step < steps; step++)
            add_step(sums, words, of_row[step * COLUMNS], up);
        if constexpr (R + 1 < KEY_ROWS) add_row<R + 1>(sums, keys, lane);
    }
};
#endif

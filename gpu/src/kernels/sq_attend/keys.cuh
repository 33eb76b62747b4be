// Products of queries and coded keys of a tile.
//
// The A operand has tokens as rows and quads of components as columns: lane 4 g + l holds column l of the layout, the
// quads l, l + 4 and so on, of tokens 4 g to 4 g + 3, which are 16 bytes of each row of the tile. A rotation and a mask
// make a register of the operand from a word: four codes. Which quad has which bits of a row differs from column to
// column, so every lane takes these from a table; the B operand follows by the quad's number. A code that two rows
// share is two columns of the product with the same query: each field is at its place in the code.
#pragma once
#include "sq_attend/shape.cuh"
#include "sq_key_table.cuh"

struct Keys {
    u32 words[KEY_ROWS][4]; // of tokens 4 g to 4 g + 3

    template <int R = 0>
    __device__ __forceinline__ void load(const u32* tile, const Lane& lane) {
        constexpr Row ROW = row_of(KEY_SLOTS, R);
        constexpr int PAIRS = ROW.slots / 2; // of vectors: 32 tokens
        const int at = PAIRS ? lane.l % (PAIRS ? PAIRS : 1) * 2 * VECTOR + 4 * lane.g : 4 * (lane.g % 4);
        ld_nc_no_allocate<4>(words[R], tile + ROW.first * VECTOR + at);
        if constexpr (R + 1 < KEY_ROWS) load<R + 1>(tile, lane);
    }

    // sums[set][i]: of tokens 4 g + 2 i and 4 g + 2 i + 1 with the two limbs of query l.
    __device__ __forceinline__ void multiply(int (&sums)[SETS][2][4], const KeyTable& table, const u32* queries,
                                             const Lane& lane) const {
#pragma unroll
        for (int i = 0; i < SETS * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
        add_row<0>(sums, table, reinterpret_cast<const u8*>(queries + lane.g), lane);
    }

  private:
    // A field of four codes. The rotation is the low five bits of `rotation`.
    static __device__ __forceinline__ u32 take(u32 word, u32 rotation, u32 mask) {
        return __funnelshift_r(word, word, rotation) & mask;
    }

    template <int R>
    __device__ __forceinline__ void add_row(int (&sums)[SETS][2][4], const KeyTable& table, const u8* query,
                                            const Lane& lane) const {
        // The two halves of the tokens share the words of a row of one slot.
        const u32 up = row_of(KEY_SLOTS, R).slots == 1 ? lane.g / 4 : 0;
        const uint4* fields = table.fields<R>(lane.l);
#pragma unroll 1
        for (u32 step = table.steps(R); step; step--, fields += COLUMNS) {
            const uint4 field = *fields;
            u32 b[SETS][2];
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                b[set][0] = *reinterpret_cast<const u32*>(query + (field.x & ~31u) + set * QUADS * 32);
                b[set][1] = *reinterpret_cast<const u32*>(query + (field.z & ~31u) + set * QUADS * 32);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 *two = words[R] + 2 * i,
                          a[4] = {take(two[0], field.x + up, field.y), take(two[1], field.x + up, field.y),
                                  take(two[0], field.z + up, field.w), take(two[1], field.z + up, field.w)};
#pragma unroll
                for (int set = 0; set < SETS; set++) mma_m16n8k32_u8s8(sums[set][i], a, b[set][0], b[set][1]);
            }
        }
        if constexpr (R + 1 < KEY_ROWS) add_row<R + 1>(sums, table, query, lane);
    }
};

// Codes of one width, by compile-time shifts and masks.
//
// Code p fills the slots p WIDTH to p WIDTH + WIDTH - 1 of its unit, from bit 0 of the rows upwards; a code that
// crosses the end of a row has its leading bits there. Codes are moved to the top of their bytes, times 2^(8 - WIDTH):
// all shifts are to the left, which both integer pipes do.
#pragma once
#include "sq_tile.cuh"

template <int SLOTS, int WIDTH>
struct UniformCodes {
    static constexpr int ROWS = rows_before(SLOTS, SLOTS), SCALE = 1 << (8 - WIDTH);
    u32 words[ROWS][4]; // of four units, or tokens of one, with the unit's bits lowest

    // Code P of each of the words: a register of a fragment each.
    template <int P>
    __device__ __forceinline__ u32 code(int i) const {
        constexpr Row ROW = row_at(SLOTS, P * WIDTH);
        constexpr int INDEX = rows_before(SLOTS, ROW.first), OFFSET = P * WIDTH - ROW.first;
        constexpr int LEADING = WIDTH < ROW.slots - OFFSET ? WIDTH : ROW.slots - OFFSET, REST = WIDTH - LEADING;
        u32 code = words[INDEX][i] << (8 - OFFSET - LEADING) & bits(LEADING) << (8 - LEADING);
        if constexpr (REST > 0) {
            static_assert(row_of(SLOTS, INDEX + 1).slots >= REST, "a code crosses the end of one row");
            code |= words[INDEX + 1][i] << (8 - WIDTH) & bits(REST) << (8 - WIDTH);
        }
        return code;
    }

  private:
    static __device__ constexpr u32 bits(int count) { return ((1u << count) - 1) * 0x01010101u; }
};

// Where the codes of a head's keys are in a tile of KEY_SLOTS slots.
#pragma once
#include "sq_tile.cuh"

constexpr int KEY_ROWS = rows_before(KEY_SLOTS, KEY_SLOTS);

// Steps of the rows before a row: a row of 8 slots has at most 8 fields, two a step.
__device__ constexpr int steps_before(int row) {
    int steps = 0;
    for (int i = 0; i < row; i++) steps += (row_of(KEY_SLOTS, i).slots + 1) / 2;
    return steps;
}

// A head's table: `KeyTable` of kv_gpu::sq makes it.
struct KeyTable {
    static constexpr int COUNTS = (KEY_ROWS + 3) / 4 * 4, ENTRIES = COUNTS + QUADS;
    static constexpr int WORDS = ENTRIES + steps_before(KEY_ROWS) * COLUMNS * 4;

    const u32* words; // [row] steps; [quad] 1 - 2^bits; [step][column] rotation | quad << 5 and mask of two fields

    __device__ __forceinline__ u32 steps(int row) const { return words[row]; }
    __device__ __forceinline__ int offset(int quad) const { return (int)words[COUNTS + quad]; }
    template <int ROW>
    __device__ __forceinline__ const uint4* fields(int column) const {
        constexpr int FIRST = steps_before(ROW) * COLUMNS;
        return reinterpret_cast<const uint4*>(words + ENTRIES) + FIRST + column;
    }
};

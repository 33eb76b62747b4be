// The layout of scalar codes: tiles of 32 tokens, as pq_core::sq describes it, in blocks.
//
// Compile-time shape: HEAD_DIM, BLOCK (tokens of a block, a multiple of 32), PAGED or not.
#pragma once
#include "types.cuh"

constexpr int D = HEAD_DIM, QUADS = D / 4, PARTS = D / 16; // components by 4 (keys) and by 16 (values)
constexpr int TILE = 32, BLOCK_TILES = BLOCK / TILE, COLUMNS = 4, VECTOR = 16; // words of a vector

// A row of a tile: 8 slots, or 4, 2 or 1 in the last rows. Its first vector has the number of its first slot.
struct Row {
    int first, slots;
};

__device__ constexpr Row row_at(int slots, int slot) {
    Row row{slot / 8 * 8, 8};
    if (row.first + 8 <= slots) return row;
    for (int size = 4; size; size /= 2) {
        row.slots = size;
        if (!(slots & size)) continue;
        if (slot < row.first + size) break;
        row.first += size;
    }
    return row;
}

// The number of rows that begin before a slot: the index of the row at it.
__device__ constexpr int rows_before(int slots, int slot) {
    int rows = 0;
    for (int first = 0; first < slot; rows++) first += row_at(slots, first).slots;
    return rows;
}

__device__ constexpr Row row_of(int slots, int index) {
    Row row = row_at(slots, 0);
    for (int i = 0; i < index; i++) row = row_at(slots, row.first + row.slots);
    return row;
}

// The index of a block of a sequence's tokens in all arrays of blocks.
template <typename Arguments>
__device__ __forceinline__ u64 place_of(const Arguments& a, u32 sequence, u32 head, u32 block) {
#ifdef PAGED
    const u32 page = __ldg(a.pages + (u64)sequence * a.max_pages + block / a.blocks);
    return ((u64)page * a.heads + head) * a.blocks + block % a.blocks;
#else
    return ((u64)sequence * a.heads + head) * a.blocks + block;
#endif
}

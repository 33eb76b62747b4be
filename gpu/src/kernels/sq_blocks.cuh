// Blocks of coded rows: the common first arguments of the kernels that write them and read them.
#pragma once
#include "types.cuh"

struct BlockArguments {
    const u32* firsts; // [sequence]: block of the sequence that the first row begins
    const u32* counts; // [sequence]: rows
    const u32* tables; // keys: [head][KeyTable::WORDS]
    const u32* pages;  // PAGED: [sequence][max_pages]
    u8* scales;        // keys: steps, values: norms; [page or sequence][head][block][D or BLOCK]
    u32* words;        // [page or sequence][head][block][tile of block][vector][16]
    u16* errors;       // values: f16 [page or sequence][head][block][D], or null
    u32 heads, max_rows;
    u32 blocks, max_pages; // blocks of a page or sequence, and pages of a sequence
};

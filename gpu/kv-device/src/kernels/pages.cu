// Copies rows of a sequence between the pages of a cache and the rows of all its tokens, to which the chunks of a
// prompt attend.
//
// CPU twin: none. Rows are 16-bit elements.
#include "types.cuh"

struct Arguments {
    uint4* paged;      // [page][head][page_tokens][chunk] of keys; values are `paged_side` chunks further on
    uint4* rows;       // [head][capacity][chunk] of keys; values are `rows_side` chunks further on
    const u32* pages;  // of the sequence
    u64 paged_side, rows_side;
    u32 first, count;  // tokens to copy
    u32 page_tokens, capacity, chunks; // chunks of 16 bytes of a row
    u32 restore;       // 1 copies pages to rows, 0 the other way
};

// Launch: grid (any, heads, keys and values), any number of threads.
extern "C" __global__ void copy(const Arguments a) {
    const u32 head = blockIdx.y, heads = gridDim.y;
    uint4* paged = a.paged + blockIdx.z * a.paged_side;
    uint4* rows = a.rows + blockIdx.z * a.rows_side + (u64)head * a.capacity * a.chunks;
    const u64 n = (u64)a.count * a.chunks;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const u32 token = a.first + (u32)(i / a.chunks), chunk = (u32)(i % a.chunks);
        const u64 at = ((u64)a.pages[token / a.page_tokens] * heads + head) * a.page_tokens + token % a.page_tokens;
        uint4 &in_page = paged[at * a.chunks + chunk], &row = rows[(u64)token * a.chunks + chunk];
        if (a.restore)
            row = in_page;
        else
            in_page = row;
    }
}

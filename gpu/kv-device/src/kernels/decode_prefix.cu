// Decodes the tokens before a chunk of a prompt to rows, from their codes in MILLION's cache.
//
// CPU twin: pq_core::decode_into. Compile-time shape: HEAD_DIM; KEPT_M codes of KEPT_BITS
// bits a vector, in the tiles of pq_encode.cu; KEYS or not; ELEMENT of the rows (1 for f16, 2 for bf16).
#include "element.cuh"
#include "tile_code.cuh"

constexpr u32 THREADS = 256;

struct DecodeArguments {
    const u32* codes; // [page, if there are any][head][tile][TILE_WORDS]
    const u32* table; // [head][code][WORDS]: pairs of f16, in the order of the layout
    u32* rows;        // [head][capacity][WORDS]: pairs of elements, of the first coded token on
    const u32* pages; // of the sequence, or null
    u32 tokens;       // coded ones
    u32 tiles;        // of a head, in a page if there are any
    u32 capacity;     // rows of a head
};

// Launch: a block a tile, grid (tiles that have tokens, heads), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) decode(const DecodeArguments a) {
    __shared__ u32 tile[TILE_WORDS];
    const u32 head = blockIdx.y, first = blockIdx.x * TILE;
    const u64 page = a.pages ? a.pages[blockIdx.x / a.tiles] : 0, own = a.pages ? blockIdx.x % a.tiles : blockIdx.x;
    const u32* codes = a.codes + ((page * gridDim.y + head) * a.tiles + own) * TILE_WORDS;
    for (u32 i = threadIdx.x; i < TILE_WORDS; i += THREADS) tile[i] = codes[i];
    __syncthreads();
    const u32* table = a.table + (u64)head * (WORDS << KEPT_BITS);
    u32* rows = a.rows + ((u64)head * a.capacity + first) * WORDS;
    for (u32 i = threadIdx.x; i < TILE * WORDS; i += THREADS) {
        const u32 token = i / WORDS, word = i % WORDS;
        if (first + token >= a.tokens) break;
        const u32 code = code_at(reinterpret_cast<const u8*>(tile), token, word / CODE_WORDS);
        const u32 pair = decoded_pair(table, code, word);
        rows[i] = pack_elements(half_to_float((u16)pair), half_to_float((u16)(pair >> 16)));
    }
}

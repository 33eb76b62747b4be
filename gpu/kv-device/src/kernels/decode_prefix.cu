// Decodes the tokens before a chunk of a prompt to rows, from their codes in MILLION's cache.
//
// CPU twin: pq_core::decode_into. Compile-time shape: HEAD_DIM; KEPT_M codes of KEPT_BITS
// bits a vector, in the tiles of pq_encode.cu; KEYS or not; ELEMENT of the rows (1 for f16, 2 for bf16).
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr u32 TILE = 32;
constexpr u32 WORDS = HEAD_DIM / 2, CODE_WORDS = WORDS / KEPT_M; // words of two elements: of a row, of a code
constexpr u32 LANE_CODES = TILE * KEPT_M / LANES, LANE_WORDS = LANE_CODES * KEPT_BITS / 32;
constexpr u32 WIDTH = KEPT_BITS == 6 ? LANE_WORDS / 3 : LANE_WORDS < 4 ? LANE_WORDS : 4;
constexpr u32 TILE_WORDS = LANE_WORDS * LANES, THREADS = 256;

// The lane that holds a code, and the index of the code among those of the lane: the inverse of token_and_code
// (pq_encode.cu). The host's CodeLayout has the same formula.
__device__ __forceinline__ void place_of(u32 token, u32 code, u32& lane, u32& place) {
    constexpr u32 PARTS = KEPT_M < 64 ? 1 : 2;
    const u32 part = code / 32;
#ifdef KEYS
    constexpr u32 MIDDLES = KEPT_M < 32 ? 1 : 2;
    const u32 half = token / 16, high = token / 8 % 2, g = token % 8;
    const u32 middle = code / 16 % 2, step = code / 4 % 4 ^ g % 4, l = code % 4;
    place = ((half * PARTS + part) * 4 + step) * MIDDLES * 2 + middle * 2 + high;
#else
    constexpr u32 STEPS = KEPT_M < 32 ? 2 : 4;
    const u32 half = token / 4 % 2, l = token % 4, i = token / 8, g = code % 8;
    const u32 step = (code / 8 + 4 - l) % 4 % STEPS;
    place = (((half * STEPS + step) * 2 + i / 2) * PARTS + part) * 2 + i % 2;
#endif
    lane = 4 * g + l;
}

// A code of a tile in shared memory.
__device__ __forceinline__ u32 code_at(const u8* tile, u32 token, u32 code) {
    u32 lane, place;
    place_of(token, code, lane, place);
    const u32 index = place / 4; // of four codes, one in each byte
    auto byte = [&](u32 word) -> u32 {
        return tile[((word / WIDTH * LANES + lane) * WIDTH + word % WIDTH) * 4 + place % 4];
    };
    if constexpr (KEPT_BITS == 8) return byte(index);
    if constexpr (KEPT_BITS == 4) return byte(index / 2) >> 4 * (index % 2) & 15;
    const u32 first = index / 4 * 3; // three words hold four times four codes
    if (index % 4 < 3) return byte(first + index % 4) & 63;
    return byte(first) >> 6 | byte(first + 1) >> 6 << 2 | byte(first + 2) >> 6 << 4;
}

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
        const u32 token = i / WORDS, word = i % WORDS, code = word / CODE_WORDS;
        if (first + token >= a.tokens) break;
        const u32 row = code_at(reinterpret_cast<const u8*>(tile), token, code);
        const u32 pair = __ldg(table + row * WORDS + code + word % CODE_WORDS * KEPT_M);
        rows[i] = pack_elements(half_to_float((u16)pair), half_to_float((u16)(pair >> 16)));
    }
}

// Decode attention on product-quantized keys and values (MILLION, DAC 2025, III-B), with exact tokens beside them.
//
// CPU twins: pq_core::attend_into, pq_core::attend_exact_into. Compile-time shape: HEAD_DIM 64 or 128; QUERIES 1, 2 or
// 4 (query heads that one block serves; a larger group is cut into slices); KEY_BITS, VALUE_BITS 4, 6 or 8; KEY_SUB,
// VALUE_SUB 2, 4 or 8 components a code; COPIES 1 or 2 of the key table; WARPS; INTERLEAVED 0 or 1; PAGED or not;
// ELEMENT 1 or 2.
//
// A decoded vector is WORDS = HEAD_DIM / 2 words of two halves. The tables of a head lie in shared memory with one row
// of 256 bytes a code, so that the address of a word is one byte permutation of (code, lane's offset), and so that 32
// lanes that look up 32 different words never meet in a bank, whatever the codes. What follows from that:
//
// * Keys (scores.cuh). Lane 4 g + l looks up words of tokens g and g + 8 of 16, but lanes of different g at different
// words: row g of the
//   matrix multiply-add has its words in an order of its own (a "variant"). A column of the other operand is a query in
//   the order of one variant, so that one element a row of the product is a score, and it is whole. With one table
//   there are 8 variants and one query an instruction; a second table with its halves of 32 words swapped leaves 4
//   variants and two queries.
// * Values (sums.cuh). Lane 4 g + l looks up word g of four chunks of 8 in rotated order for 8 tokens. For one query
// the
//   words are operands as they are; for more, byte permutations pair tokens, and the weights are masked to the chunk
//   that a column stands for.
// * Every warp works alone, with its own softmax, on tiles of 32 tokens whose codes arrive in registers. Scores are
// powers of
//   two; sums are rescaled when a maximum grows by more than 8, which halves still hold.
//
// The sequences of a batch lie behind each other as work items (an item is a tile, or 8 exact tokens), and the blocks
// of a head have equal parts of that list (work.cuh). A sequence that several blocks share is reduced by the last of
// them (reduce.cuh).
#pragma once
#include "types.cuh"

constexpr int D = HEAD_DIM, WORDS = D / 2, HALVES = D / 64; // HALVES: 32-word halves of a row
constexpr int TILE = 32;
constexpr int EXACT = 8;          // exact tokens of a work item
constexpr int ROW = 256;          // bytes
constexpr int CHUNKS = WORDS / 4; // of 16 bytes, in a row of a table as it comes
constexpr int THREADS = WARPS * LANES;
constexpr int PAIRS = QUERIES / 2;
constexpr int TURNS = QUERIES / COPIES; // multiply-adds per key operand

// A code stands for SUB / 2 words, m words apart: word w has components (w % m) * SUB + 2 (w / m) and the next.
template <int SUB>
__device__ __forceinline__ constexpr int component(int word) {
    return (word % (D / SUB)) * SUB + word / (D / SUB) * 2;
}
template <int SUB>
__device__ __forceinline__ constexpr int word_of(int component) {
    return component / SUB + component % SUB / 2 * (D / SUB);
}

struct Arguments {
    const u8* key_codes; // [page][head][tile of page][tile bytes]
    const u8* value_codes;
    const u8* key_table; // [head][row][WORDS] pairs of halves
    const u8* value_table;
    const u16* queries;    // [sequence][head][query of group][D]
    const u32* lengths;    // [sequence] coded tokens
    const u32* pages;      // [sequence][page of sequence]; not read unless PAGED, a sequence is then its own page
    const u16* exact_keys; // [sequence][head][exact_capacity][D]
    const u16* exact_values;
    const u32* exact_lengths; // [sequence], or null
    float* partials;          // [block][2][QUERIES][RESULT]
    u32* arrived;             // [sequence][head][slice], zeros
    u16* out;                 // as queries
    float* log_sum_exp;       // [sequence][head][query of group], or null
    u32 batch, heads, group;
    u32 page_tiles, max_pages, exact_capacity;
    float scale; // of scores, times log2 e
};

// Which thread of the block this is. Read anew wherever it is made, so that nothing of it stays in registers over the
// loop on tiles, which has none to spare.
struct Lane {
    int thread, warp, lane, g, l; // lane = 4 g + l
    int turn;                     // which of the TURNS products holds this lane's scores
    bool holds;                   // whether any does

    __device__ __forceinline__ Lane() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp = thread / LANES, lane = thread % LANES, g = lane / 4, l = lane % 4;
        turn = COPIES == 1 ? (l - g / 2) & 3 : l ^ (g & 3);
        holds = turn < TURNS;
    }
};

// Which part of the work the block has: the grid is (part of a head's work, slice of its group, head).
struct Place {
    u32 block = blockIdx.x, blocks = gridDim.x, slice = blockIdx.y, slices = gridDim.y, head = blockIdx.z;

    __device__ __forceinline__ u32 index() const { return (head * slices + slice) * blocks + block; }
};

// Shared memory.
constexpr int KEY_TABLE = 0, KEY_ROWS = 1 << KEY_BITS, VALUE_ROWS = 1 << VALUE_BITS;
constexpr bool FAR_COPY = COPIES == 2 && D == 128; // else the second copy is the second half of the rows
constexpr int COPY_DISTANCE = 65536;               // one bit of the address
constexpr int VALUE_TABLE = (FAR_COPY ? COPY_DISTANCE : 0) + KEY_ROWS * ROW;
constexpr int WEIGHTS = VALUE_TABLE + VALUE_ROWS * ROW;       // [WARPS][QUERIES][TILE] halves
constexpr int RESULTS = WEIGHTS + WARPS * QUERIES * TILE * 2; // [WARPS][QUERIES][RESULT] floats
constexpr int RESULT = D + 4;                                 // components, maximum, sum of weights, padding
constexpr int QUERY_ROWS =
    RESULTS + WARPS * QUERIES * RESULT * 4; // [QUERIES] rows of words in the order of the key table
constexpr int QUERY_ROW = D * 2 + 64;       // bytes: two rows begin in different halves of the banks
constexpr int PLAN = QUERY_ROWS + QUERIES * QUERY_ROW;
constexpr int KEYS_HERE = PLAN + 56, VALUES_HERE = KEYS_HERE + 8; // barriers of the tables' arrival
constexpr int SHARED = PLAN + 72;
extern __shared__ __align__(128) u8 shared[];

static_assert(SHARED == SHARED_BYTES, "the host computes it, too");

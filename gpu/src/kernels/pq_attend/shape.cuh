// Decode attention on product-quantized keys and values (MILLION, DAC 2025, III-B) and on exact tokens: compile-time
// shape, arguments, thread and block indices, shared memory.
//
// CPU twins: pq_core::attend_into, pq_core::attend_exact_into. Compile-time shape: HEAD_DIM 64 or 128; QUERIES 1, 2, 4
// or 8 (query heads of one block; a larger group is split into slices); KEY_BITS, VALUE_BITS 4, 6 or 8; KEY_SUB,
// VALUE_SUB 2, 4 or 8 components per code; COPIES 1 or 2 of the key table; WARPS; INTERLEAVED 0 or 1; ADDENDS and
// NORMS 0 or 1 (adjustments.cuh); EXACT_FP8 0 or 1 (exact.cuh); PAGED or not, and then HALF_TILES or not; ELEMENT 1
// (f16) or 2 (bf16).
//
// A decoded vector is WORDS = HEAD_DIM / 2 words of two f16. The tables of a head lie in shared memory, one row of 256
// bytes per code. The address of a word is therefore one byte permutation of (code, lane's offset), and 32 lanes that
// look up 32 different word offsets have no bank conflict for any codes. This determines the rest:
//
// * Keys (scores.cuh). Lane 4 g + l looks up words of tokens g and g + 8 of 16, but lanes of different g look up
//   different words: row g of the A operand has its own word order (a "variant"). A column of the B operand is a query
//   in the order of one variant, so that one element of each row of the accumulator is a complete score. With one table
//   copy there are 8 variants; a second copy, in which the 16-word halves of every 32 words are swapped, leaves 4. For
//   several queries, variants cost MMAs. Sparse MMAs (mma.sp) halve their number: the B operand has the words of two
//   steps side by side, and metadata say, row by row, to which of the two a word belongs. For more than two queries per
//   copy, lanes also exchange words of two steps: half as many again, for one select per word.
// * Values (sums.cuh). Lane 4 g + l looks up word g of four chunks of 8 words, in an order rotated by l, for 8 tokens.
//   For one query the words are MMA operands as they are. For several, byte permutations pair tokens, and the weights
//   are the A operand of sparse MMAs: metadata select, row by row, the lanes whose words belong to the row's chunk.
// * Each warp works on its own, with its own softmax, on tiles of 32 tokens whose codes are loaded to registers.
//   Weights are 2^(score - maximum), of scores that include log2(e). The maximum lags: it is raised, and sums are
//   rescaled, only when a score exceeds it by more than 8, and f16 represents the weights until then.
//
// The heads are divided into lists, with the same number of blocks each. For every head of a list, the sequences of the
// batch form a list of work items (an item is a tile, or 16 exact tokens), which is divided evenly among the blocks of
// the list (plan.cuh). A list of one head spares its blocks from changing tables; lists of several heads keep all
// multiprocessors busy where the number of heads does not divide theirs. The last block to finish reduces a sequence
// that several blocks share (softmax_reduce.cuh).
//
// Memory floor: every code is read once for up to QUERIES query heads. One query is bound by shared memory, 76 % busy
// at batch 8: 128 lookups per lane and tile. More queries are bound by instruction issue, where MMAs cost most: a
// scheduler issues next to nothing else in the 6 clocks of a dense m16n8k16 or the 8 of a sparse m16n8k32 (H200). A
// tile of 8 queries has 32 sparse MMAs; with dense ones and variants alone it had 128.
#pragma once
#include "types.cuh"

#if EXACT_FP8
typedef u8 ExactElement; // E4M3
#else
typedef u16 ExactElement; // ELEMENT
#endif

constexpr int D = HEAD_DIM, WORDS = D / 2, HALVES = D / 64; // HALVES: 32-word halves of a row
constexpr int TILE = 32;
#ifdef HALF_TILES
constexpr int RUNS = 2; // runs of codes of a tile, each at its own address (codes.cuh)
#else
constexpr int RUNS = 1;
#endif
constexpr int EXACT_TILE = 16;    // exact tokens of a work item
constexpr int ROW = 256;          // bytes of a table row in shared memory
constexpr int CHUNKS = WORDS / 4; // 16-byte chunks of a table row in global memory
constexpr int THREADS = WARPS * LANES;
constexpr int LANE_QUERIES = QUERIES == 1 ? 1 : 2; // queries of which a lane has scores
// Sparse MMAs, and lanes that exchange words, each halve the number of variants of keys. Values are exchanged, too.
constexpr bool KEYS_SPARSE = QUERIES > COPIES, KEYS_EXCHANGED = QUERIES > 2 * COPIES;
constexpr int VARIANTS = 8 / COPIES / (KEYS_SPARSE ? 2 : 1) / (KEYS_EXCHANGED ? 2 : 1); // of the columns of an MMA
constexpr bool VALUES_EXCHANGED = QUERIES == 8;
constexpr int MMA_QUERIES = 8 / VARIANTS, KEY_MMAS = QUERIES / MMA_QUERIES; // MMAs of one key operand
// Bytes of a query's weights of a tile. The padding puts the queries whose weights lanes store into different banks.
constexpr int WEIGHT_ROW = QUERIES == 1 ? TILE * 2 : TILE * 2 + 16;
constexpr int WEIGHT_ROWS = QUERIES + (NORMS ? 2 : 0); // of a warp; the norms of a tile have separate rows

// A code decodes to SUB / 2 words, D / SUB words apart: word w has components (w % (D / SUB)) * SUB + 2 (w / (D / SUB))
// and the next one.
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
    const u8* key_table; // [head][row][WORDS] pairs of f16
    const u8* value_table;
    const u16* queries;    // [sequence][head][query of group][D]
    const u32* lengths;    // [sequence]: coded tokens
    const u32* pages;      // [sequence][page of sequence]; read only if PAGED, else a sequence is its own page
    const ExactElement* exact_keys; // [sequence][head][exact_capacity][D]
    const ExactElement* exact_values;
    const u32* exact_lengths; // [sequence], or null
    float* partials;          // [block][2][QUERIES][RESULT]
    u32* arrived;             // [sequence][head][slice]: blocks that have finished; zero before and after a launch
    u16* out;                 // as queries
    float* log_sum_exp;       // [sequence][head][query of group], or null
    u32 batch, heads, list_heads, group; // list_heads: heads of a list
    u32 page_tiles, max_pages, exact_capacity;
    float scale; // factor of the scores, times log2(e)
    const u8* addends;    // f16 [sequence][head][addend_tiles][query of group][TILE]; read only if ADDENDS
    const u8* key_norms;  // f16 [page][head][tile of page][token of tile]; read only if NORMS
    const u8* value_norms;
    u32 addend_tiles;
    const float2* exact_factors; // [head]: of exact keys and values; read only if EXACT_FP8
};

// Thread indices. `volatile` makes every construction read %tid again, so that no index occupies a register across the
// loop over tiles, which has none to spare.
struct Lane {
    int thread, warp, lane, g, l; // lane = 4 g + l
    int mma_index;                // the MMA whose accumulator has this lane's scores
    bool has_scores;              // whether there is such an MMA
    int first_query;              // the first of the LANE_QUERIES queries of these scores

    __device__ __forceinline__ Lane() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp = thread / LANES, lane = thread % LANES, g = lane / 4, l = lane % 4;
        if (QUERIES == 1) {
            mma_index = (l - g / 2) & 3, first_query = 0;
        } else {
            const int variant = !KEYS_SPARSE ? g : KEYS_EXCHANGED && COPIES == 1 ? g / 4 : g / 2;
            mma_index = (l ^ variant) & (VARIANTS - 1), first_query = mma_index * MMA_QUERIES + l / VARIANTS * 2;
        }
        has_scores = mma_index < KEY_MMAS;
    }

    // Whether the lane has scores of the query.
    __device__ __forceinline__ bool has(int query) const {
        return has_scores && first_query == query / LANE_QUERIES * LANE_QUERIES;
    }
    // A lane with scores of the query.
    static __device__ __forceinline__ constexpr int lane_of(int query) {
        return query / MMA_QUERIES + query % MMA_QUERIES / 2 * VARIANTS;
    }
};

// Grid coordinates: (block of the list's work, slice of the query group, list of heads).
struct GridCoord {
    u32 block = blockIdx.x, blocks = gridDim.x, slice = blockIdx.y, slices = gridDim.y, list = blockIdx.z;

    __device__ __forceinline__ u32 index() const { return (list * slices + slice) * blocks + block; }
};

// Layout of shared memory, in bytes.
constexpr int KEY_TABLE = 0, KEY_ROWS = 1 << KEY_BITS, VALUE_ROWS = 1 << VALUE_BITS;
constexpr bool FAR_COPY = COPIES == 2 && D == 128;   // else the second copy is in the second half of the rows
constexpr int COPY_DISTANCE = 65536;                 // a power of two: the copy is one bit of the address
constexpr bool SHARED_ROWS = COPIES == 1 && D == 64; // a key in the first half of a row, a value in the second half
constexpr int VALUE_TABLE = SHARED_ROWS ? ROW / 2 : (FAR_COPY ? COPY_DISTANCE : 0) + KEY_ROWS * ROW;
constexpr int WEIGHTS = // [WARPS][WEIGHT_ROWS][WEIGHT_ROW]
    SHARED_ROWS ? (KEY_ROWS > VALUE_ROWS ? KEY_ROWS : VALUE_ROWS) * ROW : VALUE_TABLE + VALUE_ROWS * ROW;
constexpr int RESULTS = WEIGHTS + WARPS * WEIGHT_ROWS * WEIGHT_ROW; // [SLOTS][QUERIES][RESULT] floats
// Floats of a result: components, maximum, sum of weights, and padding that puts consecutive results into different
// halves of the banks.
constexpr int RESULT = D + 16;
// Results of warps: with 8 queries, there is room for four, which several warps share.
constexpr int SLOTS = QUERIES == 8 ? 4 : WARPS;
constexpr int QUERY_ROWS =
    RESULTS + SLOTS * QUERIES * RESULT * 4; // [QUERIES] rows of words in the order of the key table
constexpr int QUERY_ROW = D * 2 + 64;       // bytes: consecutive rows start in different halves of the banks
constexpr int F16_QUERY_ROWS = QUERY_ROWS + (ELEMENT == 2 ? QUERIES * QUERY_ROW : 0); // the same, for coded keys
constexpr int PLAN = F16_QUERY_ROWS + QUERIES * QUERY_ROW;
constexpr int KEY_BARRIER = PLAN + 96, VALUE_BARRIER = KEY_BARRIER + 8; // mbarriers of the table copies
constexpr int SHARED = PLAN + 112;
extern __shared__ __align__(128) u8 shared[];

static_assert(SHARED == SHARED_BYTES, "the host computes it, too");

__device__ __forceinline__ u8* warp_weights(const Lane& lane) {
    return shared + WEIGHTS + lane.warp * WEIGHT_ROWS * WEIGHT_ROW;
}

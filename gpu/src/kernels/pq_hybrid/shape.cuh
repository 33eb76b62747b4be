// Hybrid attention: one softmax over the codes of all tokens, except that the few tokens with the largest weights have
// their exact rows. Compile-time shape and arguments.
//
// CPU twins: pq_core::hybrid_select_into, pq_core::hybrid_attend_into, pq_core::attend_exact_into. Compile-time shape:
// HEAD_DIM 64 or 128; GROUP 1 to 8 query heads per KV head; KEY_M, VALUE_M 8, 16 or 32 subspaces; KEY_BITS,
// VALUE_BITS 4 or 8; KEY_BITS also 6, with KEY_M 16 or 32; HISTOGRAM_VALUES (code_weights.cuh) or VALUE_COPIES 1 or 2
// (values.cuh); ELEMENT 1 (f16) or 2 (bf16); MAX_RULE (keys.cuh); PAGED or not; ADAPTIVE or not (budget.cuh); ADDENDS
// or not (addends.cuh); KEY_NORMS, VALUE_NORMS or not (norms.cuh).
//
// A step is two operations, so that rows can be fetched in between:
//
// 1. Select: scores.cu writes the coded scores of all tokens and the softmax statistics of each query; select.cu or
//    select_sm90.cu turns them into keys, and selects the tokens with the k highest.
// 2. Attend: attend.cu adds the coded values of all other tokens and the exact rows of the selected tokens, sinks and
//    window. On sm_90, if there are few rows, it runs while a few multiprocessors select: it then adds the coded values
//    of all tokens, and subtracts those of the selected ones. Otherwise the selection hides their scores. Where the
//    selected tokens lead by their codes but not by their rows, a row is summed once more (recenter.cuh).
//
// Codes and tables are in the layout of `pq::CodeLayout`, as pq_attend/attend.cu reads them: lane 4 g + l of a warp
// reads codes of one quarter of the subspaces (keys) or one eighth (values), rotated by lane. Both kernels arrange
// their tables or counters in shared memory so that the lanes of a wavefront access different banks, whatever their
// codes.
//
// Scores are logarithms to base 2. Floor at 32/8 heads x 131,072 tokens with 16 codes per key and value: 33.5 MB of
// codes take 8 us. Shared memory serves 32 wavefronts per tile of 32 tokens for the scores of four queries and 64 for
// the values: 4.5 and 9 us at 132 multiprocessors and 1.75 GHz. The values of one query take 16 atomic additions.
#pragma once
#include "types.cuh"

constexpr int D = HEAD_DIM, WORDS = D / 2; // a vector is WORDS pairs of f16
constexpr int TILE = 32;
#ifdef ADAPTIVE
constexpr bool IS_ADAPTIVE = true;
#else
constexpr bool IS_ADAPTIVE = false;
#endif
#ifdef CONCURRENT_SELECT
constexpr bool IS_BESIDE = true;
#else
constexpr bool IS_BESIDE = false;
#endif
#ifdef HISTOGRAM_VALUES
constexpr bool IS_BY_CODE = true;
#else
constexpr bool IS_BY_CODE = false;
#endif
#ifdef KEY_NORMS
constexpr bool HAS_KEY_NORMS = true;
#else
constexpr bool HAS_KEY_NORMS = false;
#endif
#ifdef VALUE_NORMS
constexpr bool HAS_VALUE_NORMS = true;
#else
constexpr bool HAS_VALUE_NORMS = false;
#endif
// The logarithm to base 2 of the sum of a query's coded weights in attend.cu. Counters of 32 bits hold such sums with a
// sign: those of a block that subtracts more than it has added are negative. With f16, weights down to 2^-39 of the sum
// are represented; times norms, which are below 2^8, down to 2^-32 of it.
constexpr float WEIGHT_BITS = IS_BY_CODE ? 30 : HAS_VALUE_NORMS ? 8 : 15;
// Queries of a table entry.
constexpr int VEC = GROUP <= 2 ? 2 : GROUP <= 4 ? 4 : 8;

// Softmax statistics of a query.
struct Stats {
    float max, sum; // of scores, and of 2^(score - max)
};

// The blocks that share the scoring of a row.
struct Sharers {
    u32 first, count;
};

// The coded scores of a tile.
struct alignas(VEC == 2 ? 8 : 16) ScoredTile {
    u16 scores[GROUP][TILE]; // codes of scored_tile.cuh, less the level of the query; tokens by `place_of`
    float levels[VEC];
};

constexpr u64 CHUNK_TOKENS = 8192; // CHUNK of radix.cuh
constexpr int RESULT = D + 4; // floats of a partial result: components, maximum, sum of weights, padding

// The common first arguments of all kernels. A row is a head of a sequence.
struct Arguments {
    const u32* lengths; // [sequence]: coded tokens
    const u32* pages;   // [sequence][page of sequence]; read only if PAGED
    const u32* ks;      // [sequence]: tokens to select; if ADAPTIVE, the maximum
    ScoredTile* scores; // [row][chunk][tile]; if `hides`, the selection sets those of selected tokens to NO_SCORE
    Sharers* sharers;   // [row]
    Stats* stats;       // [row][block of the head][VEC]
    u32* scored;        // whether scores, sharers and stats are complete: see `await_scores`
    u32 batch, heads, page_tiles, max_pages, selected_len;
    u32 chunks;  // capacity of a sequence in chunks of CHUNK tokens
    u32 blocks;  // scoring blocks of a head
    float scale; // factor of the scores, times log2(e)
    u32 hides;   // whether the selection hides tokens; otherwise attend.cu may run concurrently and subtracts them

    __device__ __forceinline__ ScoredTile* scores_of(u64 row) const {
        return scores + row * chunks * (CHUNK_TOKENS / TILE);
    }
};

// The bound that determines the number of tokens that a row selects, if ADAPTIVE.
struct ErrorBound {
    const u16* queries;        // [sequence][head][GROUP][D], in the space of the exact rows
    const u16* exact_keys;     // [sequence][head][exact_capacity][D]
    const u32* exact_lengths;  // [sequence], or null
    const float* value_errors; // [head]: mean squared errors of the coded values over the variance of the values
    u32* found;                // [row]: number of selected tokens
    u64* total;                // incremented by the sum of `found` over all rows, or null
    u32 exact_capacity;
    float bound; // of the length of an output's error over the deviation of the values
};

// Arguments of the scoring and selection kernels.
struct SelectArguments : Arguments {
    const u8* codes;     // [page][head][tile of page][tile bytes]
    const u32* table;    // [head][code][WORDS]: word j + p * M has components 2 p and 2 p + 1 of subspace j
    const u16* norms;    // f16 [page][head][tile of page][TILE], read only if KEY_NORMS
    const u16* queries;  // [sequence][head][GROUP][D], in the space of the codes
    const float* errors; // [head][D], or null: mean squared errors of the coded keys
    u32* selected;       // [sequence][head][selected_len]
    u8* selection;       // radix.cuh
    u32 tickets;         // radix.cuh
    ErrorBound bound;    // budget.cuh
    const u16* addends;  // [sequence][head][addend_tiles][GROUP][TILE] in f16, read only if ADDENDS
    u32 addend_tiles;

    __device__ __forceinline__ const u16* addends_of(u64 row, u32 tile) const {
        return addends + (row * addend_tiles + tile) * (GROUP * TILE);
    }
};

// Arguments of the attention kernel.
struct AttendArguments : Arguments {
    const u8* codes;          // codes of the values, in the layout of the keys
    const u32* table;         // codebooks of the values
    const u16* value_norms;   // f16 [page][head][tile of page][TILE], read only if VALUE_NORMS
    const u16* queries;       // [sequence][head][GROUP][D]
    const u16* exact_keys;    // [sequence][head][exact_capacity][D]
    const u16* exact_values;  // as exact_keys
    const u32* exact_lengths; // [sequence], or null
    const u32* selected;      // [sequence][head][selected_len]
    const u32* row_list;      // [sequence][head][selected_len]: row of each token, or null: selected[i] has row i
    const u16* row_keys;      // [sequence][head][row_capacity][D]
    const u16* row_values;    // as row_keys
    float* partials;          // [head][block of the head][2][VEC][RESULT]
    u32* counts;              // [sequence][head]: blocks that have finished; zero before and after a launch
    u16* out;                 // as queries
    float* log_sum_exp;       // [sequence][head][GROUP], or null
    const u32* found;         // [row]: number of selected tokens, if ADAPTIVE
    u64 row_capacity;
    u32 exact_capacity;
    u32 rows_arrive; // whether the previous kernel writes the selected rows: they are read after `pdl_wait`, everything
                     // else before it
};

// Index of token `t` of a tile among its scores: the order in which the lanes of attend.cu read weights.
__device__ __forceinline__ constexpr int place_of(int t) { return (t % 8) * 4 + t / 8; }
__device__ __forceinline__ constexpr int token_at(int place) { return place / 4 + place % 4 * 8; }

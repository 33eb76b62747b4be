// Decode attention on projected keys and values: every KV head has its own key rank and value rank.
//
// CPU twin: svd_core::attend_exact_into. Source: ZACK, 5.1 and 5.3, with work split over tokens as well as heads.
//
// Compile-time shape: DIM (64 or 128; no rank is above it), ELEMENT (1 for f16, 2 for bf16), WARPS (12 for DIM 128 and
// 16 for DIM 64: registers limit it), SHARED_BYTES, PAGED or not. Ranks are multiples of 8 and are read on the device.
//
// Launch: grid (blocks, slices) with about one block per multiprocessor in total; WARPS warps per block. A block serves
// QUERIES = 8 query heads of a group; a larger group has several slices (blockIdx.y). The entries of the work
// (scheduler.cuh) are the KV heads of all sequences. Work is split by tokens and ranks: the cost of a tile of 16 tokens
// is proportional to its components plus a constant; a head also has a fixed cost. Within its part of an entry, a block
// deals tiles to its warps in turn.
//
// The floor is reading every kept component once. A warp holds a tile of 16 tokens entirely in registers: nothing
// passes through shared memory. Lane 4 g + l:
//
// - Scores = keys (A operand, rows are tokens) times queries (B operand). A lane loads 16 bytes of tokens g and g + 8,
//   which are its A fragments of two mma. This permutes the components within 32; the queries are loaded in the same
//   order.
// - The accumulators have tokens as rows. movmatrix transposes the weights into the B operand of the next mma.
// - Output = values transposed (A operand, rows are components) times weights. A lane loads 16 bytes, components 8 g to
//   8 g + 7, of the four tokens that its fragments need. prmt pairs two tokens, and the rows of mma i are components
//   2 i and 2 i + 1 of every 8. Its columns are the queries whose maxima the lane holds.
//
// Bound by, for one sequence of 32,768 tokens with 8 KV heads on an H200: about 8 us of launch, work distribution and
// reduction in addition to the loads. Loops start after 2.0 us and end after 15 to 20 us, a block finishes its
// reduction 1.5 us later, and the last block of a head another 2 us later. In between, loads run at full memory
// bandwidth.
//
// Tried: loading the offsets earlier gained nothing. Two tiles in flight per warp, with 8 warps instead of 12, took up
// to 3 % less time here, but 1 to 2 % more for long sequences and for batches at half rank, in one measurement each.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"
#include "softmax_reduce.cuh"
#include "tile_attention.cuh"

constexpr int THREADS = WARPS * LANES;
constexpr int KEY_CHUNKS = DIM / 32;   // a lane holds 8 components of each, of two tokens
constexpr int VALUE_CHUNKS = DIM / 64; // a lane holds 8 components of each, of four tokens
// Costs in units of work. One unit is the cost of eight components of a key. VALUE_COST is the cost of eight components
// of a value, TILE_COST the fixed cost of a tile, and ENTRY_COST the fixed cost of starting and ending an entry in a
// block that has more work; without it, blocks with parts of two heads ended last. The costs were fitted to times of
// tiles in blocks of different ranks.
// N.B. With costs of 1, 20 and 832, blocks of low ranks left their loops 9 % later than the mean, and batches at half
// rank took 4 to 5 % longer.
constexpr u32 VALUE_COST = 2, TILE_COST = 80, ENTRY_COST = 3000;
constexpr int SHARED = WARPS * QUERIES * RESULT * 4 + (int)sizeof(Work);
static_assert(SHARED <= SHARED_BYTES, "the host reserves enough");

struct Arguments {
    const u16* keys; // element [sequence][head][capacity][rank of the head]
    const u16* values;
    const u16* queries;               // element [sequence][head][query of group][DIM]; only the key rank is read
    const u32* lengths;               // [sequence]
    const u32* key_ranks;             // [head]
    const u32* value_ranks;           // [head]
    const u64* key_offsets;           // [head]: sum of the key ranks of all earlier heads
    const u64* value_offsets;         // [head]: sum of the value ranks of all earlier heads
    float* partials;                  // [block][2][QUERIES][RESULT]
    u32* arrived;                     // [sequence][head][slice], zero between launches
    u16* out;                         // element [sequence][head][query of group][DIM]; only the value rank is written
    float* log_sum_exp;               // [sequence][head][query of group], or null
    u64 key_rank_sum, value_rank_sum; // over all heads
    u64 capacity;                     // capacity of a sequence (PAGED: of a page) in tokens
    u32 batch, heads, group;
    float scale;      // factor of the scores, times log2(e)
    const u32* pages; // PAGED: [sequence][max_pages]: in keys and values, a page takes the place of a sequence
    u32 max_pages;
};

extern __shared__ __align__(16) float shared[];

// Units of an entry (a KV head of a sequence): first the fixed cost of the entry, then its tiles.
struct Units {
    const Arguments& a;

    __device__ __forceinline__ u32 tile_cost(u32 head) const {
        return (a.key_ranks[head] + VALUE_COST * a.value_ranks[head]) / 8 + TILE_COST;
    }

    __device__ __forceinline__ u32 operator()(u32 entry) const {
        const u32 tiles = (a.lengths[entry / a.heads] + TILE - 1) / TILE;
        return ENTRY_COST + tiles * tile_cost(entry % a.heads);
    }
};

// The number of tiles of an entry whose first unit is before `unit`.
__device__ __forceinline__ u32 tiles_before(u32 unit, u32 tile_cost) {
    return unit > ENTRY_COST ? (unit - ENTRY_COST + tile_cost - 1) / tile_cost : 0;
}

// The keys and values of a tile, laid out as mma fragments of lane 4 g + l. Components at or above the rank are zeros.
// Tokens at or above the length repeat the last token, so that no load is out of bounds; their weights are zero.
struct Tile {
    uint4 keys[2][KEY_CHUNKS];     // [i][j]: token g + 8 i, components 32 j + 8 l to + 7
    uint4 values[4][VALUE_CHUNKS]; // [i][j]: token 2 l + {0, 1, 8, 9}[i], components 64 j + 8 g to + 7

    __device__ __forceinline__ void load_keys(const u16* rows, u32 rank, u32 first, u32 length, int g, int l) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u16* row = rows + (u64)min(first + 8 * i + g, length - 1) * rank;
#pragma unroll
            for (int j = 0; j < KEY_CHUNKS; j++) load_zfill(keys[i][j], row + 32 * j + 8 * l, 32 * j + 8 * l < rank);
        }
    }

    __device__ __forceinline__ void load_values(const u16* rows, u32 rank, u32 first, u32 length, int g, int l) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u16* row = rows + (u64)min(first + 2 * l + i % 2 + i / 2 * 8, length - 1) * rank;
#pragma unroll
            for (int j = 0; j < VALUE_CHUNKS; j++)
                load_zfill(values[i][j], row + 64 * j + 8 * g, 64 * j + 8 * g < rank);
        }
    }

    static __device__ __forceinline__ void load_zfill(uint4& to, const u16* from, bool valid) {
        to = make_uint4(0, 0, 0, 0);
        if (valid) ld_nc_no_allocate<4>(reinterpret_cast<u32*>(&to), from);
    }
};

// Addresses of the keys and values of a head of a sequence. A tile of 16 tokens is in one page.
struct Head {
    const Arguments& a;
    const u16 *keys, *values; // PAGED: of page 0
    u32 key_rank, value_rank;
#ifdef PAGED
    u32 first_page; // index of the sequence's first page in the table
    u32 page, next; // page numbers of this tile and of the warp's next one, whose load is in flight
    static constexpr bool AHEAD = DIM == 128;
#endif

    __device__ __forceinline__ Head(const Arguments& a, u32 sequence, u32 head) : a(a) {
        key_rank = a.key_ranks[head], value_rank = a.value_ranks[head];
        keys = a.keys + a.capacity * a.key_offsets[head], values = a.values + a.capacity * a.value_offsets[head];
#ifdef PAGED
        first_page = sequence * a.max_pages;
#else
        keys += sequence * a.capacity * a.key_rank_sum, values += sequence * a.capacity * a.value_rank_sum;
#endif
    }

#ifdef PAGED
    __device__ __forceinline__ u32 page_of(u32 tile) const { return tile / ((u32)a.capacity / TILE); }
    __device__ __forceinline__ u32 load_page(u32 tile) const { return __ldg(a.pages + first_page + page_of(tile)); }
#endif

    // `begin` is called with the warp's first tile and `advance` with each next one, before its rows are used. Page
    // numbers are loaded one tile ahead, except for DIM 64, where no register is free for that and more warps hide the
    // latency of the loads.
    __device__ __forceinline__ void begin(u32 tile, u32 tile_end) {
#ifdef PAGED
        if (AHEAD && tile < tile_end) next = load_page(tile);
        if (tile < tile_end) advance(tile, tile_end);
#endif
    }
    __device__ __forceinline__ void advance(u32 tile, u32 tile_end) {
#ifdef PAGED
        page = AHEAD ? next : load_page(tile);
        if (AHEAD && tile + WARPS < tile_end) next = load_page(tile + WARPS);
#endif
    }

    // The rows of a tile, offset by the tokens before its page, so that `tile` indexes them.
    __device__ __forceinline__ const u16* keys_of(u32 tile) const {
#ifdef PAGED
        return keys + a.capacity * (page * a.key_rank_sum - (u64)page_of(tile) * key_rank);
#else
        return keys;
#endif
    }
    __device__ __forceinline__ const u16* values_of(u32 tile) const {
#ifdef PAGED
        return values + a.capacity * (page * a.value_rank_sum - (u64)page_of(tile) * value_rank);
#else
        return values;
#endif
    }
};

// Attends to the block's part of an entry. Each warp writes a result row per query to shared memory, for `reduce`.
__device__ __forceinline__ void attend_entry(const Arguments& a, Work& work) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 sequence = work.entry / a.heads, head = work.entry % a.heads, length = a.lengths[sequence];
    Head rows(a, sequence, head);
    const u32 key_rank = rows.key_rank, value_rank = rows.value_rank;
    const u32 tile_cost = Units{a}.tile_cost(head);
    // A tile belongs to the block whose range contains the tile's first unit.
    const u32 tile_end = tiles_before(work.to, tile_cost);
    u32 tile = tiles_before(work.from, tile_cost) + warp;
    rows.begin(tile, tile_end);

    Tile loaded;
    if (tile < tile_end) {
        loaded.load_keys(rows.keys_of(tile), key_rank, tile * TILE, length, g, l);
        loaded.load_values(rows.values_of(tile), value_rank, tile * TILE, length, g, l);
    }

    if (threadIdx.x == 0) work.find_sharers(); // divisions, hidden behind the first loads

    const u32 query_index = blockIdx.y * QUERIES + g;
    TileQueries queries;
    queries.load(a.queries, (u64)work.entry * a.group + query_index, query_index < a.group, key_rank, l);
    TileSums sums;
    while (warp_uniform(tile < tile_end)) {
        const u32 first = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        float scores[4];
        queries.scores(loaded.keys, scores);
        if (more) {
            rows.advance(tile, tile_end);
            loaded.load_keys(rows.keys_of(tile), key_rank, tile * TILE, length, g, l);
        }

        const uint2 weights = sums.weights(scores, a.scale, first, length, g);
        sums.add(loaded.values, weights, value_rank);
        if (more) loaded.load_values(rows.values_of(tile), value_rank, tile * TILE, length, g, l);
    }

    sums.store(shared + warp * QUERIES * RESULT, g, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_attend(const Arguments a) {
    Work& work = *reinterpret_cast<Work*>(shared + WARPS * QUERIES * RESULT);
    const u32 entries = a.batch * a.heads;
    Units units{a};
    if (warp_uniform(threadIdx.x < LANES)) work.begin(entries, blockIdx.x, gridDim.x, units);
    pdl_wait(); // the previous kernel may write all inputs except lengths, ranks and offsets
    pdl_trigger();
    __syncthreads();
    while (warp_uniform(work.entry < entries)) {
        attend_entry(a, work);
        const u32 entry = work.entry, value_rank = a.value_ranks[entry % a.heads];
        const u64 first_query = (u64)entry * a.group + blockIdx.y * QUERIES;
        const u32 queries = min(a.group - blockIdx.y * QUERIES, (u32)QUERIES);
        float* own_partials = a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * QUERIES * RESULT;
        reduce<QUERIES, DIM, WARPS, RESULT>(
            shared, queries, work, blockIdx.x, own_partials, a.arrived + (u64)entry * gridDim.y + blockIdx.y,
            [&](u32 query, int component, const Sum& sum) {
                u32* out = reinterpret_cast<u32*>(a.out + (first_query + query) * DIM + component);
                if (component < value_rank) *out = sum.normalized();
                if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
            });
        __syncthreads();
        if (threadIdx.x == 0) work.advance(entries, units);
        __syncthreads();
    }
}

// Causal attention of a prompt's queries on projected keys and values, on sm_90, with TMA and wgmma: every KV head has
// its own key rank and value rank.
//
// CPU twin: svd_core::attend_exact_into, row by row. Source: FlashAttention-3 (arXiv 2407.08608); ragged ranks: ZACK,
// 5.3.
//
// Compile-time shape: DIM (64 or 128; no rank is above it), ELEMENT (1 for f16, 2 for bf16), SHARED_BYTES, PAGED or
// not. Ranks are multiples of 8 and are read on the device. The products of a head are those of its higher rank,
// rounded up to a multiple of 32: there is one instance of `attend` for each.
//
// Launch: one block per multiprocessor. A block takes row blocks of 64 rows (queries) per consumer warpgroup in turn,
// longest first. In the last warpgroup, one warp loads tiles of 128 keys by TMA into a ring, another one tiles of
// values, and two load the queries of the next row block. A consumer computes the scores of a tile while the tensor
// cores add up the values of the previous tile; the softmax of one warpgroup overlaps with the products of the others,
// which take turns by named barriers.
//
// Row blocks that would leave multiprocessors idle in the last round of the grid are split by their keys (split-K
// attention; ZACK splits their rows). Equal parts, rather than equal shares of all tiles, are in step: query heads that
// share keys read the same tiles at the same time, so that L2 serves all but one. With equal shares, a chunk of 128
// queries over 32,768 tokens took 1.35 times as long.
//
// The tiles of a row block end at the last key that its last row sees, and the first tile begins before key 0, where
// TMA reads zeros. No value beyond a row block's own is used, so memory there may hold anything.
//
// With pages, boxes have the largest power of two of tokens that divides a page, and a tile consists of several boxes
// of any pages. Tiles end at a multiple of the box instead; the warp that loads values replaces those after a row
// block's last one by zeros, since their weights are 0 but they may be NaN. A tile in pages of 16 tokens takes up to 32
// TMA instructions. With all of them issued by one warp, such pages took 1.3 times as long as none.
//
// A tensor map has the pitch of its rows, which is the rank, or DIM where rows are padded: there is one map per rank
// and side. Its third dimension steps over 8 elements, so that the offset of a head in the buffer is a coordinate and
// the maps serve every head.
//
// The floor is the rate of the tensor cores, within the power limit; at half rank exponentials take as long.
// PERFORMANCE.md says what was tried.
#include "element.cuh"
#include "svd_prefill/merge.cuh"
#include "svd_prefill/wgmma.cuh"
#include "warp.cuh"

constexpr int GROUPS = DIM == 64 ? 3 : 2;             // consumer warpgroups; more need more registers than there are
constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS; // the last warpgroup loads
constexpr int CONSUMER_WARPS = GROUPS * GROUP_THREADS / LANES;
constexpr int QUERY_THREADS = GROUP_THREADS - 2 * LANES;                               // that load queries
constexpr int LOAD_REGISTERS = DIM == 64 ? 32 : 40, REGISTERS = DIM == 64 ? 160 : 232; // per thread
static_assert((LOAD_REGISTERS + GROUPS * REGISTERS) * GROUP_THREADS <= 65536 / THREADS / 8 * 8 * THREADS,
              "a block starts with so many registers; setmaxnreg would wait for more for ever");
constexpr int ROWS = 64 * GROUPS;                                                      // rows of a row block
constexpr int TOKENS = 128;                                                            // tokens of a tile
constexpr int SIDE = DIM / WIDTH;                                                      // boxes per row
#ifdef PAGED
constexpr bool PAGES = true;
#else
constexpr bool PAGES = false;
#endif
constexpr int STAGES = 2;       // of the rings, and of the queries
constexpr int COLUMN_STEP = 32; // ranks are rounded up to its multiples
constexpr int MAPS = 16;        // ranks up to 128
constexpr u32 LEAST_TILES = 4;  // of a part of a row block
constexpr u32 RESULT = result_floats(DIM / 2);

struct Arguments {
    TensorMap keys[MAPS], values[MAPS]; // of ranks 8, 16, ...: [8 elements][token][component], boxes of `box` x WIDTH
    const u32* pages;                   // PAGED: [sequence][max_pages]: a page takes the place of a sequence
    const u16* queries;                 // element [sequence][row][query head][DIM], strided; only the key rank is read
    const u32* lengths;                 // [sequence]: number of keys
    const u32* counts;                  // [sequence]: number of queries; they belong to the last tokens
    const u32* key_ranks;               // [head]
    const u32* value_ranks;             // [head]
    const u64* key_offsets;             // [head]: sum of the key ranks of all earlier heads
    const u64* value_offsets;           // [head]: the same of the value ranks
    u16* out;                           // as the queries; only the value rank is written, if `padded` zeros after it
    float* results;                     // [row block][part][consumer warp][RESULT]: of those after the first `whole`
    u32* arrived;                       // [row block][consumer warp]: counters of the same
    u64 sequence_stride, row_stride, query_stride; // in elements, of queries and outputs
    u32 key_chunks, value_chunks;                  // sums of the ranks, in units of 8
    u32 capacity, box, max_pages; // capacity of a sequence (PAGED: of a page) and of a box in tokens
    u32 heads, group;
    u32 window;      // keys that a row sees, its own included
    u32 near_tokens; // tokens of a head whose keys and values stay in L2
    u32 row_blocks;  // of the longest sequence
    u32 whole;       // row blocks that fill rounds of the grid, of all sequences and query heads
    u32 parts;       // of every other one, unless it has few tiles
    u32 total;       // `whole`, and the parts of all others
    float scale;     // factor of the scores, times log2(e)
    u32 padded;      // rows of keys and values take DIM elements each, as in the maps
};

struct Shared {
    u16 queries[STAGES][SIDE][ROWS][WIDTH];
    u16 keys[STAGES][SIDE][TOKENS][WIDTH];
    u16 values[STAGES][SIDE][TOKENS][WIDTH];
    // mbarriers: a stage has been loaded; all consumer warps have left it.
    u64 queries_full[STAGES], keys_full[STAGES], values_full[STAGES];
    u64 queries_empty[STAGES], keys_empty[STAGES], values_empty[STAGES];
    u64 last_values; // PAGED: the values of a row block's first tile have been loaded, but have no zeros yet
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves enough");

// A row block of a query head, or a part of its tiles.
struct RowBlock {
    u32 sequence, query_head, head;
    u32 key_rank, value_rank, columns; // columns: the higher rank, rounded up
    u32 first, rows;                   // first row of the block; rows of the sequence
    u32 offset, limit;                 // the token of row 0; the end of the tokens that the block's last row sees
    u32 end, tiles;                    // the end of the tiles: `limit`, or the next multiple of the box if PAGED
    u32 part, parts, split;            // number of the part, of `parts`, and of the row block after the first `whole`

    // Tile `tile` begins at token `end` - TOKENS * (`tile` + 1), so the last tokens come first.
    __device__ __forceinline__ int first_token(u32 tile) const { return (int)end - (int)((tile + 1) * TOKENS); }
};

// Row block i. Row blocks are ordered by sequence, then by heads whose keys and values fit L2 together, then longest
// first. One of a shorter sequence than the longest may have no tiles.
__device__ __forceinline__ RowBlock row_block(const Arguments& a, u32 i) {
    RowBlock block;
    block.tiles = 0;
    const u32 query_heads = a.heads * a.group;
    block.sequence = i / (query_heads * a.row_blocks), i %= query_heads * a.row_blocks;
    const u32 length = a.lengths[block.sequence];
    block.rows = a.counts[block.sequence];
    const u32 near_heads = min(max(a.near_tokens / max(length, 1), 1), a.heads) * a.group;
    const u32 heads_before = i / (near_heads * a.row_blocks) * near_heads;
    i -= heads_before * a.row_blocks;
    const u32 heads = min(near_heads, query_heads - heads_before);
    const u32 row_blocks = (block.rows + ROWS - 1) / ROWS;
    if (i / heads >= row_blocks || block.rows > length) return block;
    block.query_head = heads_before + i % heads, block.head = block.query_head / a.group;
    block.key_rank = a.key_ranks[block.head], block.value_rank = a.value_ranks[block.head];
    block.columns = (max(block.key_rank, block.value_rank) + COLUMN_STEP - 1) / COLUMN_STEP * COLUMN_STEP;
    block.first = (row_blocks - 1 - i / heads) * ROWS;
    block.offset = length - block.rows;
    block.limit = block.offset + min(block.first + ROWS, block.rows);
    block.end = !PAGES ? block.limit : (block.limit + a.box - 1) & -a.box;
    const u32 seen = block.offset + block.first + 1; // the first row sees the last `window` of so many tokens
    block.tiles = (block.end - (seen - min(seen, a.window)) + TOKENS - 1) / TOKENS;
    return block;
}

// Limits a row block to a part of its tiles, if it has so many parts; if not, it has no tiles.
__device__ __forceinline__ void take_part(RowBlock& block, u32 part, u32 most_parts) {
    const u32 parts = min(most_parts, max(block.tiles / LEAST_TILES, 1)), longer = block.tiles % parts;
    block.end -= (block.tiles / parts * part + min(part, longer)) * TOKENS;
    block.tiles = part < parts ? block.tiles / parts + (part < longer) : 0;
    block.part = part, block.parts = parts;
}

// Calls `run` with the row blocks of this block from a round on, in turn. Rounds go alternately forwards and backwards
// through the grid, which evens out the lengths.
template <class Run>
__device__ __forceinline__ void for_each_row_block(const Arguments& a, u32 first_round, const Run& run) {
    for (u32 round = first_round;; round++) {
        const u32 i = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (i >= a.total) return;
        const bool is_split = i >= a.whole;
        const u32 split = is_split ? (i - a.whole) / a.parts : 0;
        RowBlock block = row_block(a, is_split ? a.whole + split : i);
        block.split = split;
        take_part(block, is_split ? (i - a.whole) % a.parts : 0, is_split ? a.parts : 1);
        if (block.tiles > 0) run(block);
    }
}

// Where the lane's box of a tile lies. Only the first lanes have one.
struct Box {
    u32 page;  // the sequence, without pages
    int token; // in the page; TMA reads zeros where it is below 0 or at or above `capacity`
};
__device__ __forceinline__ Box box_of(const Arguments& a, const RowBlock& block, int first_token) {
#ifdef PAGED
    const u32 token = first_token + a.box * (threadIdx.x % LANES); // wraps below 0
    if (token >= block.limit) return {0, (int)a.capacity};
    return {__ldg(a.pages + (u64)block.sequence * a.max_pages + token / a.capacity), (int)(token % a.capacity)};
#else
    return {block.sequence, first_token};
#endif
}

// Starts to load a tile, of which the lane has `box`; columns at or above the rank are zeros. `offset` is that of the
// head in the box's page, in units of 8 elements.
__device__ __forceinline__ void load_tile(const Arguments& a, u16 (&to)[SIDE][TOKENS][WIDTH], const TensorMap& map,
                                          u32 columns, Box box, u32 offset, u64* full) {
    // At DIM 64 there is one side, and the constant saves registers.
    const u32 sides = SIDE == 1 ? 1 : (columns + WIDTH - 1) / WIDTH, lane = threadIdx.x % LANES;
    if (lane == 0) mbarrier_arrive_expect_tx(full, sides * TOKENS * WIDTH * 2);
    const auto load_box = [&](u32 first_row) {
        for (u32 side = 0; side < sides; side++)
            tma_load<false>(to[side][first_row], map, side * WIDTH, box.token, offset, full);
    };
    if (!PAGES) return load_box(0);
    __syncwarp();
    if (lane * a.box < TOKENS) load_box(lane * a.box);
}

// Sets the values after the row block's last one to zero in its first tile, which is loaded.
__device__ __forceinline__ void clear_beyond_limit(const RowBlock& block, u16 (&values)[SIDE][TOKENS][WIDTH]) {
    const u32 lane = threadIdx.x % LANES;
    for (u32 row = TOKENS - (block.end - block.limit) + lane / 8; row < TOKENS; row += LANES / 8)
        for (u32 side = 0; 64 * side < block.columns; side++)
            *reinterpret_cast<uint4*>(&values[side][row][lane % 8 * 8]) = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    __syncwarp();
}

// Loads the keys, or the values, of all row blocks.
template <bool VALUES>
__device__ __forceinline__ void load_side(const Arguments& a, Shared& shared) {
    u32 before = 0;  // tiles of earlier row blocks
    u32 cleared = 0; // earlier row blocks with values beyond the limit
    for_each_row_block(a, 0, [&](const RowBlock& block) {
        // `__ldg` reads the rank again; kept in `block`, it was spilled.
        const u32 rank = __ldg(&(VALUES ? a.value_ranks : a.key_ranks)[block.head]);
        const TensorMap& map = (VALUES ? a.values : a.keys)[rank / 8 - 1];
        const u32 head = (VALUES ? a.value_offsets : a.key_offsets)[block.head] / 8;
        for (u32 tile = 0; tile < block.tiles; tile++) {
            const u32 i = before + tile, stage = i % STAGES;
            const Box box = box_of(a, block, block.first_token(tile));
            const u32 offset = a.capacity * (box.page * (VALUES ? a.value_chunks : a.key_chunks) + head);
            u64 *full = VALUES ? &shared.values_full[stage] : &shared.keys_full[stage],
                *empty = VALUES ? &shared.values_empty[stage] : &shared.keys_empty[stage];
            mbarrier_wait(empty, i / STAGES - 1); // phase -1 counts as complete
            const bool clear = PAGES && VALUES && tile == 0 && block.limit < block.end;
            load_tile(a, VALUES ? shared.values[stage] : shared.keys[stage], map, block.columns, box, offset,
                      clear ? &shared.last_values : full);
            if (clear) {
                mbarrier_wait(&shared.last_values, cleared++);
                clear_beyond_limit(block, shared.values[stage]);
                if (threadIdx.x % LANES == 0) mbarrier_arrive(full);
            }
        }
        before += block.tiles;
    });
}

// The threads that load queries; rows and components that do not exist are zeros.
__device__ __forceinline__ void load_queries(const Arguments& a, Shared& shared) {
    const u32 thread = threadIdx.x - (THREADS - QUERY_THREADS);
    u32 before = 0; // row blocks
    for_each_row_block(a, 0, [&](const RowBlock& block) {
        const u32 stage = before % STAGES;
        mbarrier_wait(&shared.queries_empty[stage], before / STAGES - 1);
        const u16* queries = a.queries + block.sequence * a.sequence_stride + block.query_head * a.query_stride;
        constexpr u32 PAIRS = DIM / 2;
        for (u32 i = thread; i < ROWS * PAIRS; i += QUERY_THREADS) {
            const u32 row = i / PAIRS, component = i % PAIRS * 2;
            const bool valid = block.first + row < block.rows && component < block.key_rank;
            u16* box = &shared.queries[stage][component / WIDTH][0][0];
            cp_async_4_zfill(swizzled<8>(box, row, component % WIDTH / 8) + component % 8,
                             valid ? queries + (block.first + row) * a.row_stride + component : queries, valid);
        }
        cp_async_wait_all();
        fence_proxy_async();
        mbarrier_arrive(&shared.queries_full[stage]);
        before++;
    });
}

// The running maximum and the lane's part of the sum of weights, of rows g and g + 8 of a warp.
struct Softmax {
    float max[2] = {NEG_INF, NEG_INF}, weight[2] = {};

    // Turns a tile's scores into weights, and returns the factors of all earlier weights. Even and odd tokens have
    // separate maxima and sums, for shorter chains of dependent instructions. Row g comes before row g + 8, so that its
    // exponentials overlap with the maximum of the other one: with both at once, ptxas does not always do so.
    __device__ __forceinline__ float2 add(float (&scores)[TOKENS / 2], float scale) {
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float tile_max[2], sum[2];
#pragma unroll
            for (int i = 2 * half; i < TOKENS / 2; i += i % 2 ? 3 : 1)
                tile_max[i % 2] = i < 4 ? scores[i] : fmaxf(tile_max[i % 2], scores[i]);
            float row_max = fmaxf(tile_max[0], tile_max[1]);
            row_max = fmaxf(row_max, __shfl_xor_sync(FULL, row_max, 1));
            row_max = fmaxf(row_max, __shfl_xor_sync(FULL, row_max, 2));
            const float new_max = fmaxf(max[half], row_max * scale);
            rescale[half] = exp2_approx(max[half] - new_max);
            max[half] = new_max;
#pragma unroll
            for (int i = 2 * half; i < TOKENS / 2; i += i % 2 ? 3 : 1) {
                scores[i] = exp2_approx(scores[i] * scale - new_max);
                sum[i % 2] = i < 4 ? scores[i] : sum[i % 2] + scores[i];
            }
            weight[half] = weight[half] * rescale[half] + (sum[0] + sum[1]);
        }
        return make_float2(rescale[0], rescale[1]);
    }
};

// The 16 rows of a consumer warp.
struct WarpRows {
    u16* out;  // of the first one
    u32 count; // that exist

    __device__ __forceinline__ WarpRows(const Arguments& a, const RowBlock& block) {
        const u32 first = block.first + threadIdx.x / LANES * 16;
        out = a.out + block.sequence * a.sequence_stride + block.query_head * a.query_stride + first * a.row_stride;
        count = block.rows - min(block.rows, first);
    }
    __device__ __forceinline__ float* result(const Arguments& a, const RowBlock& block, u32 part) const {
        return a.results + ((block.split * a.parts + part) * CONSUMER_WARPS + threadIdx.x / LANES) * RESULT;
    }
    // Sets what follows the value rank to zero.
    __device__ __forceinline__ void pad(const Arguments& a, const RowBlock& block) const {
        if (!a.padded) return;
        for (u32 i = block.value_rank / 8; i < DIM / 8; i++) write_chunk(out, a.row_stride, count, i, 0, 0);
    }
};

// A consumer warpgroup: its 64 rows of a row block. `tiles_before` and `blocks_before` count what the rings have held.
template <int COLUMNS>
__device__ __forceinline__ void attend(const Arguments& a, Shared& shared, const RowBlock& block, u32 tiles_before,
                                       u32 blocks_before) {
    const int group = threadIdx.x / GROUP_THREADS, warp = threadIdx.x % GROUP_THREADS / LANES;
    const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 first_row = block.first + 64 * group, query_stage = blocks_before % STAGES;
    const int first_key = block.offset + first_row; // the last key that the warpgroup's first row sees
    const int row_key = first_key + 16 * warp + g;  // the last one of the warp's row g; row g + 8 sees eight further
    Softmax softmax;
    float scores[TOKENS / 2], sums[COLUMNS / 2];
    u32 weights[TOKENS / 16][4]; // A fragments: accumulators of the scores have their layout
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0;

    const auto stage_of = [&](u32 tile) { return (tiles_before + tile) % STAGES; };
    const auto wait_full = [&](u64* full, u32 tile) {
        mbarrier_wait(&full[stage_of(tile)], (tiles_before + tile) / STAGES);
    };
    const auto leave = [&](u64* empty, u32 stage) {
        if (lane == 0) mbarrier_arrive(&empty[stage]);
    };
    const auto start_scores = [&](u32 tile) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 16)
            wgmma(scores, smem_descriptor(&shared.queries[query_stage][c / WIDTH][64 * group][c % WIDTH]),
                  smem_descriptor(&shared.keys[stage_of(tile)][c / WIDTH][0][c % WIDTH]), c > 0);
        wgmma_commit();
    };
    const auto start_sums = [&](u32 tile) {
        constexpr u64 BOX = TOKENS * WIDTH * 2; // the stride between columns 0 to 63 and 64 to 127
#pragma unroll
        for (int t = 0; t < TOKENS / 16; t++)
            wgmma(sums, weights[t], smem_descriptor(shared.values[stage_of(tile)][0][16 * t]) | BOX / 16 << 16);
        wgmma_commit();
    };
    const auto weigh = [&](u32 tile) {
        const int first_token = block.first_token(tile), window = a.window;
        if (warp_uniform(first_token < 0 || first_token + TOKENS - 1 > first_key ||
                         first_token <= first_key + 63 - window)) {
            // A row sees `seen` keys, up to its last one; the difference wraps after that one.
            const int seen[2] = {min(row_key + 1, window), min(row_key + 9, window)};
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i++) {
                const int half = i / 2 % 2, token = first_token + 8 * (i / 4) + 2 * l + i % 2;
                if ((u32)(row_key + 8 * half - token) >= (u32)seen[half]) scores[i] = -infinity();
            }
        }
        return softmax.add(scores, a.scale);
    };
    const auto pack = [&] {
#pragma unroll
        for (int t = 0; t < TOKENS / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) weights[t][i] = pack_elements(scores[8 * t + 2 * i], scores[8 * t + 2 * i + 1]);
    };

    mbarrier_wait(&shared.queries_full[query_stage], blocks_before / STAGES);
    wait_full(shared.keys_full, 0);
    wgmma_fence();
    start_scores(0);
    wgmma_wait();
    wgmma_keep(scores);
    leave(shared.keys_empty, stage_of(0));
    weigh(0);
    pack();
    for (u32 tile = 1; tile < block.tiles; tile++) {
        wait_full(shared.keys_full, tile);
        named_barrier_sync(1 + group, 2 * GROUP_THREADS); // this warpgroup's turn
        wgmma_fence();
        start_scores(tile);
        wait_full(shared.values_full, tile - 1);
        start_sums(tile - 1);
        named_barrier_arrive(1 + (group + 1) % GROUPS, 2 * GROUP_THREADS);
        wgmma_wait<1>();
        wgmma_keep(scores);
        leave(shared.keys_empty, stage_of(tile));
        const float2 rescale = weigh(tile);
        wgmma_wait();
        wgmma_keep(sums);
        leave(shared.values_empty, stage_of(tile - 1));
        pack();
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sums[i] *= i / 2 % 2 ? rescale.y : rescale.x;
    }
    leave(shared.queries_empty, query_stage);
    wait_full(shared.values_full, block.tiles - 1);
    wgmma_fence();
    start_sums(block.tiles - 1);
    wgmma_wait();
    wgmma_keep(sums);
    leave(shared.values_empty, stage_of(block.tiles - 1));

    const WarpRows rows(a, block);
    if (warp_uniform(block.parts > 1)) {
        store_result<COLUMNS / 2>(rows.result(a, block, block.part), sums, softmax.max, softmax.weight);
        return;
    }
    const float x = 1 / row_sum(softmax.weight[0]), y = 1 / row_sum(softmax.weight[1]);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++)
        if (8 * i < block.value_rank)
            write_chunk(rows.out, a.row_stride, rows.count, i, pack_elements(sums[4 * i] * x, sums[4 * i + 1] * x),
                        pack_elements(sums[4 * i + 2] * y, sums[4 * i + 3] * y));
    rows.pad(a, block);
}

// Writes the row blocks of which this block has computed parts, if its warps are the last to arrive.
__device__ __forceinline__ void merge_parts(const Arguments& a) {
    for_each_row_block(a, a.whole / gridDim.x, [&](const RowBlock& block) {
        if (block.parts == 1) return;
        const WarpRows rows(a, block);
        if (!is_last_warp(a.arrived + block.split * CONSUMER_WARPS + threadIdx.x / LANES, block.parts)) return;
        merge_results(rows.result(a, block, 0), CONSUMER_WARPS * RESULT, block.parts, block.columns / 2,
                      block.value_rank, rows.out, a.row_stride, rows.count);
        rows.pad(a, block);
    });
}

extern __shared__ __align__(1024) u8 smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_prefill(const __grid_constant__ Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    if (threadIdx.x < STAGES) {
        const u32 stage = threadIdx.x;
        mbarrier_init(&shared.queries_full[stage], QUERY_THREADS);
        mbarrier_init(&shared.keys_full[stage], 1), mbarrier_init(&shared.values_full[stage], 1);
        mbarrier_init(&shared.queries_empty[stage], CONSUMER_WARPS);
        mbarrier_init(&shared.keys_empty[stage], CONSUMER_WARPS);
        mbarrier_init(&shared.values_empty[stage], CONSUMER_WARPS);
    }
    if (threadIdx.x == 0) mbarrier_init(&shared.last_values, 1);
    __syncthreads();
    if (warp_uniform(threadIdx.x >= GROUPS * GROUP_THREADS)) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        const u32 warp = threadIdx.x / LANES - GROUPS * GROUP_THREADS / LANES;
        const bool loads = PAGES || threadIdx.x % LANES == 0;
        if (warp_uniform(warp == 0)) {
            if (loads) load_side<false>(a, shared);
        } else if (warp_uniform(warp == 1)) {
            if (loads) load_side<true>(a, shared);
        } else {
            load_queries(a, shared);
        }
    } else {
        setmaxnreg_inc<REGISTERS>();
        // The first turn is the first warpgroup's; its last barrier takes the arrival that remains.
        if (threadIdx.x / GROUP_THREADS == GROUPS - 1) named_barrier_arrive(1, 2 * GROUP_THREADS);
        u32 tiles_before = 0, blocks_before = 0;
        for_each_row_block(a, 0, [&](const RowBlock& block) {
            if (block.columns == 32) attend<32>(a, shared, block, tiles_before, blocks_before);
            if (block.columns == 64) attend<64>(a, shared, block, tiles_before, blocks_before);
            if constexpr (DIM > 64) {
                if (block.columns == 96) attend<96>(a, shared, block, tiles_before, blocks_before);
                if (block.columns == 128) attend<128>(a, shared, block, tiles_before, blocks_before);
            }
            tiles_before += block.tiles, blocks_before++;
        });
        if (threadIdx.x / GROUP_THREADS == 0) named_barrier_sync(1, 2 * GROUP_THREADS);
        if (a.parts > 1) merge_parts(a);
    }
}

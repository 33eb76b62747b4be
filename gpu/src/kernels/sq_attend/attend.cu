// Decode attention on scalar codes: int8 tensor cores multiply queries and weights with the codes as they are stored.
//
// CPU twin: pq_core::sq::attend_into. shape.cuh has the compile-time shape, keys.cuh and values.cuh the products.
//
// Launch: grid (blocks, slices) with one block per multiprocessor in total; THREADS threads. A block serves QUERIES
// query heads of a group; a larger group has several slices (blockIdx.y). The entries of the work (scheduler.cuh) are
// the KV heads of all sequences, its units tiles of 32 tokens. Each warp takes consecutive tiles of the block's part,
// since tiles of the same block of tokens share its queries, and has a tile in registers: the keys of the next one are
// loaded once its scores are known, the values once its sums are.
//
// The floor is reading every code, step and norm once. Per warp and tile of 2 bits for 128 components about 460
// instructions are issued (counted in the machine code), about as long as reading it takes on an H200, and the two
// overlap little: 32 query heads on 8 KV heads and 131,072 tokens take 2.6 of the floor at 2 bits, 1.7 at 4; four such
// sequences 2.1 and 1.5 (gpu_speed). Next: a path without tables for keys of one width (31 instructions a column
// today), then copies into shared memory ahead of the warp.
#include "sq_attend/queries.cuh"
#include "sq_attend/values.cuh"
#include "softmax_reduce.cuh"

// The cost of another sequence or head in a block, in tiles.
constexpr u32 ENTRY_COST = 20;
// Minimum tiles of a block, if there are as many: smaller parts cost more in merges than they save.
constexpr u32 LEAST_TILES = 4;

// Words of shared memory.
constexpr int RESULTS = WARPS * QUERIES * RESULT, TABLE = RESULTS + WARPS * QUERY_WORDS,
              WORK = TABLE + (KeyTable::WORDS + 3) / 4 * 4, SHARED = (WORK + 16) * 4;
static_assert(SHARED <= SHARED_BYTES, "the host reserves enough");
static_assert(sizeof(Work) <= 16 * 4, "room for the plan");

extern __shared__ __align__(16) u32 shared[];

struct Units {
    const Arguments& a;

    __device__ __forceinline__ u32 overhead(u32) const { return ENTRY_COST; }
    // An empty sequence still has an output to write.
    __device__ __forceinline__ u32 operator()(u32 entry) const {
        return ENTRY_COST + max((a.lengths[entry / a.heads] + TILE - 1) / TILE, 1u);
    }
};

// The codes and norms of a warp's tile.
struct Tile {
    Keys keys;
    Values values;
    u32 norms;                                      // bytes of tokens 4 g to 4 g + 3
    u32 addends[ADDENDS ? SETS : 1][ADDENDS ? 2 : 1]; // halves of these tokens, of query l of every set

    __device__ __forceinline__ void load_keys(const Arguments& a, u64 tile, const Lane& lane) {
        keys.load(a.keys + tile * (KEY_SLOTS * VECTOR), lane);
    }
    // The addends of a tile of an entry. Queries beyond the group have those of its last one.
    __device__ __forceinline__ void load_addends(const Arguments& a, u32 entry, u32 tile, const Lane& lane) {
#if ADDENDS
        const u16* rows = a.addends + ((u64)entry * a.addend_tiles + tile) * a.group * TILE + 4 * lane.g;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const u32 query = min(blockIdx.y * QUERIES + 4 * set + lane.l, a.group - 1);
            ld_nc_no_allocate<2>(addends[set], rows + query * TILE);
        }
#endif
    }
    // Adds the addends to the scores, logarithms to base 2.
    __device__ __forceinline__ void add_to(float (&scores)[SETS][4]) const {
#if ADDENDS
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float2 first = half2_to_float2(addends[set][0]), second = half2_to_float2(addends[set][1]);
            scores[set][0] += first.x * LOG2_E, scores[set][1] += first.y * LOG2_E;
            scores[set][2] += second.x * LOG2_E, scores[set][3] += second.y * LOG2_E;
        }
#endif
    }
    __device__ __forceinline__ void load_values(const Arguments& a, u64 tile, const Lane& lane) {
        values.load(a.values + tile * (VALUE_SLOTS * VECTOR), lane);
        norms = __ldg(reinterpret_cast<const u32*>(a.norms + tile * TILE) + lane.g);
    }
};

// Attends to the block's part of an entry. Each warp writes a result row per query to shared memory, for `reduce`.
__device__ __forceinline__ void attend_entry(const Arguments& a, Work& work) {
    const Lane lane;
    const u32 sequence = work.entry / a.heads, head = work.entry % a.heads, length = a.lengths[sequence];
    const u32 begin = max(work.from, ENTRY_COST) - ENTRY_COST,
              end = min(work.to - ENTRY_COST, (length + TILE - 1) / TILE), tiles = max(end, begin) - begin;
    u32 tile = begin + tiles * lane.warp / WARPS;
    const u32 tile_end = begin + tiles * (lane.warp + 1) / WARPS;

    Tile loaded;
    u64 place = 0, next_place = 0; // of the block of tokens of this tile and the next
    auto stored = [&](u64 place, u32 tile) { return place * BLOCK_TILES + tile % BLOCK_TILES; };
    if (tile < tile_end) {
        next_place = place_of(a, sequence, head, tile / BLOCK_TILES);
        loaded.load_keys(a, stored(next_place, tile), lane);
        loaded.load_values(a, stored(next_place, tile), lane);
        loaded.load_addends(a, work.entry, tile, lane);
    }

    const KeyTable table{shared + TABLE};
    for (u32 i = threadIdx.x; i < KeyTable::WORDS / 4; i += THREADS)
        reinterpret_cast<uint4*>(shared + TABLE)[i] =
            __ldg(reinterpret_cast<const uint4*>(a.tables + (u64)head * KeyTable::WORDS) + i);
    if (threadIdx.x == 0) work.find_sharers(); // divisions, hidden behind the loads
    __syncthreads();

    const u32 first_query = blockIdx.y * QUERIES, live = min(a.group - first_query, (u32)QUERIES);
    const u64 query_block = (u64)work.entry * a.query_blocks; // the entry's first
    u32* query_words = shared + RESULTS + lane.warp * QUERY_WORDS;
    BlockQueries queries;
    Sums sums;
    const float per_step = WEIGHT_LIMIT * 256 / a.value_step; // 256: the smallest norm is 2^-8
    bool is_new = true; // the block of tokens
    while (warp_uniform(tile < tile_end)) {
        const u32 block = tile / BLOCK_TILES, first = tile * TILE;
        if (warp_uniform(is_new)) {
            place = next_place;
            const float* rows = a.queries + ((query_block + block) * a.group + first_query) * D;
            queries.load(rows, a.steps + place * D, live, a.scale, table, query_words, lane);
            if (first + BLOCK < tile_end * TILE)
                prefetch_global_l2(reinterpret_cast<const u8*>(rows + a.group * D), live * D * 4, lane.lane, LANES);
        }
        int products[SETS][2][4];
        loaded.keys.multiply(products, table, query_words, lane);

        const u32 next = tile + 1;
        const bool more = next < tile_end;
        is_new = next % BLOCK_TILES == 0;
        if (more) {
            if (is_new) next_place = place_of(a, sequence, head, next / BLOCK_TILES);
            loaded.load_keys(a, stored(next_place, next), lane);
        }

        float scores[SETS][4];
#pragma unroll
        for (int i = 0; i < SETS * 4; i++) {
            const int set = i / 4, t = i % 4, *limbs = products[set][t / 2] + t % 2 * 2;
            scores[set][t] = (float)(limbs[0] * 128 + limbs[1]) * queries.unit[set] + queries.offset[set];
        }
        loaded.add_to(scores);
        if (more) loaded.load_addends(a, work.entry, next, lane);
        if (warp_uniform(first + TILE > length))
#pragma unroll
            for (int i = 0; i < SETS * 4; i++)
                if (first + 4 * lane.g + i % 4 >= length) scores[i / 4][i % 4] = -infinity();
        sums.add(scores, loaded.norms, loaded.values, lane);
        if (more) loaded.load_values(a, stored(next_place, next), lane);
        if (MEAN_ERRORS && warp_uniform(is_new || !more)) sums.end_block(a.errors + place * D, per_step, lane);
        tile = next;
    }
    sums.store(reinterpret_cast<float*>(shared) + lane.warp * QUERIES * RESULT, 1 / per_step, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sq_attend(const Arguments a) {
    Work& work = *reinterpret_cast<Work*>(shared + WORK);
    const u32 entries = a.batch * a.heads;
    Units units{a};
    if (warp_uniform(threadIdx.x < LANES)) work.begin(entries, blockIdx.x, gridDim.x, units, 1, LEAST_TILES);
    pdl_wait(); // the previous kernel may write all inputs except lengths
    pdl_trigger();
    __syncthreads();
    while (warp_uniform(work.entry < entries)) {
        attend_entry(a, work);
        const u32 entry = work.entry, first = blockIdx.y * QUERIES, live = min(a.group - first, (u32)QUERIES);
        const u64 first_query = (u64)entry * a.group + first;
        float* own_partials = a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * QUERIES * RESULT;
        reduce<QUERIES, D, WARPS, RESULT, THREADS, (QUERIES > 4)>(
            reinterpret_cast<const float*>(shared), live, work, blockIdx.x, own_partials,
            a.arrived + (u64)entry * gridDim.y + blockIdx.y, [&](u32 query, int component, const Sum& sum) {
                *reinterpret_cast<u32*>(a.out + (first_query + query) * D + component) = sum.normalized();
                if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
            });
        __syncthreads();
        if (threadIdx.x == 0) work.advance(entries, units);
        __syncthreads();
    }
}

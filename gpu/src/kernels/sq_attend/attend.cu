// Decode attention on scalar codes: int8 tensor cores multiply queries and weights with the codes as they are stored.
//
// CPU twin: pq_core::sq::attend_into. shape.cuh has the compile-time shape, ring.cuh the copies, keys.cuh and
// values.cuh the products; PERFORMANCE.md says what bounds it.
//
// Launch: grid (blocks, slices) with RESIDENT blocks per multiprocessor in total; THREADS threads. A block serves
// QUERIES query heads of a group; a larger group has several slices (blockIdx.y). The entries of the work
// (scheduler.cuh) are the KV heads of all sequences, its units tiles of 32 tokens. Each warp takes consecutive tiles of
// the block's part, since tiles of the same block of tokens share its queries.
#include "softmax_reduce.cuh"
#include "sq_attend/queries.cuh"
#include "sq_attend/values.cuh"

// The cost of another sequence or head in a block, in tiles.
constexpr u32 ENTRY_COST = 5 * WARPS;
// Minimum tiles of a block, if there are as many: smaller parts cost more in merges than they save.
constexpr u32 LEAST_TILES = 4;

// Places in shared memory, in words.
constexpr int RESULTS = WARPS * STAGES * STAGE / 4, QUERIES_AT = RESULTS + WARPS * QUERIES * RESULT,
              TABLE = QUERIES_AT + WARPS * 2 * QUERY_WORDS,
              WORK = TABLE + (KEY_WIDTH ? 0 : (KeyTable::WORDS + 3) / 4 * 4), SHARED = (WORK + 16) * 4;
static_assert(SHARED <= SHARED_BYTES, "the host reserves enough");
static_assert(sizeof(Work) <= 16 * 4, "room for the plan");

extern __shared__ __align__(128) u32 shared[];

struct Units {
    const Arguments& a;

    __device__ __forceinline__ u32 overhead(u32) const { return ENTRY_COST; }
    // An empty sequence still has an output to write.
    __device__ __forceinline__ u32 operator()(u32 entry) const {
        return ENTRY_COST + max((a.lengths[entry / a.heads] + TILE - 1) / TILE, 1u);
    }
};

// The scores of tokens 4 g to 4 g + 3 with query l of every set, logarithms to base 2.
__device__ __forceinline__ void scores_of(float (&scores)[SETS][4], const int (&products)[SETS][2][4],
                                          const BlockQueries& queries, u32 stage, u32 tokens, const Lane& lane) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int* limbs = products[set][t / 2] + t % 2 * 2;
            scores[set][t] = (float)(limbs[0] * 256 + limbs[1]) * queries.unit[set] + queries.offset[set];
        }
#if ADDENDS
        const u32 chunk = (4 * set + lane.l) * ADDEND_CHUNKS + lane.g / 2;
        const uint2 of_tokens = ld_stage_v2(stage + STAGE_ADDENDS + chunk_place(chunk) + lane.g % 2 * 8);
        const float2 first = half2_to_float2(of_tokens.x), second = half2_to_float2(of_tokens.y);
        scores[set][0] += first.x * LOG2_E, scores[set][1] += first.y * LOG2_E;
        scores[set][2] += second.x * LOG2_E, scores[set][3] += second.y * LOG2_E;
#endif
    }
    if (warp_uniform(tokens < TILE)) // the last tile of the sequence
#pragma unroll
        for (int i = 0; i < SETS * 4; i++)
            if (4 * lane.g + i % 4 >= tokens) scores[i / 4][i % 4] = -infinity();
}

// Attends to the block's part of an entry. Each warp writes a result row per query to shared memory, for `reduce`.
__device__ __forceinline__ void attend_entry(const Arguments& a, Work& work) {
    const Lane lane;
    const u32 sequence = work.entry / a.heads, head = work.entry % a.heads, length = a.lengths[sequence];
    const u32 begin = max(work.from, ENTRY_COST) - ENTRY_COST,
              end = min(work.to - ENTRY_COST, (length + TILE - 1) / TILE), tiles = max(end, begin) - begin;
    u32 tile = begin + tiles * lane.warp / WARPS;
    const u32 tile_end = begin + tiles * (lane.warp + 1) / WARPS;
    const u32 first_query = blockIdx.y * QUERIES, live = min(a.group - first_query, (u32)QUERIES);
    const u64 first_row = (u64)work.entry * a.query_blocks * a.group + first_query;
    BlockQueries queries(a, first_row, live, shared + QUERIES_AT + lane.warp * (2 * QUERY_WORDS), lane);
    if (warp_uniform(tile < tile_end)) queries.copy(tile / BLOCK_TILES, lane);
    Ring ring(shared + lane.warp * (STAGES * STAGE / 4), a, sequence, head, tile, tile_end, lane);

    const KeyTable table{shared + TABLE};
    if (threadIdx.x == 0) work.find_sharers(); // divisions, hidden behind the loads
#if !KEY_WIDTH
    for (u32 i = threadIdx.x; i < KeyTable::WORDS / 4; i += THREADS)
        reinterpret_cast<uint4*>(shared + TABLE)[i] =
            __ldg(reinterpret_cast<const uint4*>(a.tables + (u64)head * KeyTable::WORDS) + i);
    __syncthreads();
#endif

    float* results = reinterpret_cast<float*>(shared + RESULTS) + lane.warp * QUERIES * RESULT;
    // 256: the smallest norm is 2^-8.
    Sums sums(results, a.value_step * (1.f / (65280.f * 256 * ValueCodes::SCALE)), lane);
    KeyProducts keys(table, lane);
    const u16* error = nullptr; // of the block of the tiles so far
    bool is_new = true;         // the block of tokens
    while (warp_uniform(tile < tile_end)) {
        const u16* next_error = error;
        const u32 stage = ring.wait();
        if (warp_uniform(is_new)) {
            const u32 block = tile / BLOCK_TILES;
            keys.begin_block(queries.begin_block(block, lane), lane);
            if (warp_uniform((block + 1) * BLOCK_TILES < tile_end)) queries.copy(block + 1, lane);
            if (MEAN_ERRORS) next_error = a.errors + place_of(a, sequence, head, block) * D;
            if (!error) error = next_error; // the first tile has none before it
        }
        ring.copy(a, sequence, head, lane);
        int products[SETS][2][4];
        keys.multiply(products, stage, lane);
        float scores[SETS][4];
        scores_of(scores, products, queries, stage, length - tile * TILE, lane);
        const u32 norms = ld_stage(stage + STAGE_NORMS + 4 * lane.g);
        sums.add(scores, norms, stage + STAGE_VALUES, is_new, error, lane);
        ring.advance();
        error = next_error;
        tile++;
        is_new = tile % BLOCK_TILES == 0;
    }
    if (!MEAN_ERRORS || error) sums.flush(error, lane);
    sums.store(lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) sq_attend(const Arguments a) {
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
            reinterpret_cast<const float*>(shared + RESULTS), live, work, blockIdx.x, own_partials,
            a.arrived + (u64)entry * gridDim.y + blockIdx.y, [&](u32 query, int component, const Sum& sum) {
                *reinterpret_cast<u32*>(a.out + (first_query + query) * D + component) = sum.normalized();
                if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
            });
        __syncthreads();
        if (threadIdx.x == 0) work.advance(entries, units);
        __syncthreads();
    }
}

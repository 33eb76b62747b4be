// Decode attention on what rotations have left of keys and values: every head at its own two ranks.
//
// CPU twin: svd_core::attend_into. Compile-time shape: DIM, 64 or 128, no rank above it; WARPS; ELEMENT 1 or 2. Ranks
// are multiples of 8, read on the device. A block serves 8 query heads of a group; a larger group has SLICES of them.
//
// The floor is reading every kept component once. A warp takes 16 tokens and keeps all of it in registers, without
// shared memory:
//
// * Scores: keys (rows are tokens) times queries (columns). Lane 4 g + l loads 16 bytes of tokens g and g + 8, which
// are its operand
//   of two products whose order of components the queries follow.
// * The weights, rows of which are tokens, are turned into the other operand of the next product by the instruction
// that transposes
//   matrices.
// * Values: lane 4 g + l loads 16 bytes, components 8 g and on, of the four tokens that its operand wants; byte
// permutations pair
//   two tokens, and product i has components 2 i and 2 i + 1 of every 8 as its rows. Its columns are queries, those of
//   the lane's own maxima.
//
// Work is cut by tokens and ranks: a tile costs its components and something fixed, and so does a head.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"
#include "softmax_reduce.cuh"

constexpr int TILE = 16, QUERIES = 8, THREADS = WARPS * LANES;
constexpr int KEY_CHUNKS = DIM / 32; // a lane has 8 components of each
constexpr int VALUE_CHUNKS = DIM / 64;
// A unit is what eight components of a key cost. In units: eight components of a value; a tile beside its components;
// the start and the end of an entry in a block that has more work, without which blocks with parts of two heads ended
// last. From how long tiles took in blocks of different ranks. With 1, 20 and 832, those of low ranks left their loops
// 9 % later than the mean, and batches at half rank took 4 to 5 % longer.
constexpr u32 VALUE_COST = 2, TILE_COST = 80, ENTRY_COST = 3000;
constexpr int RESULT = DIM + 4;
constexpr int SHARED = WARPS * QUERIES * RESULT * 4 + (int)sizeof(Work);
static_assert(SHARED <= SHARED_BYTES, "the host asks for enough");

struct Arguments {
    const u16* keys; // element [sequence][head][capacity][rank of the head]
    const u16* values;
    const u16* queries;       // element [sequence][head][query of group][DIM], of which the key rank counts
    const u32* lengths;       // [sequence]
    const u32* key_ranks;     // [head]
    const u32* value_ranks;   // [head]
    const u64* key_offsets;   // [head]: rank components of a token of the heads before
    const u64* value_offsets; // [head]
    float* partials;          // [block][2][QUERIES][RESULT]
    u32* arrived;             // [sequence][head][slice], zeros
    u16* out;                 // element [sequence][head][query of group][DIM], of which the value rank is written
    float* log_sum_exp;       // [sequence][head][query of group], or null
    u64 key_rank_sum, value_rank_sum; // of all heads
    u64 capacity;                     // tokens that a sequence has room for
    u32 batch, heads, group;
    float scale; // of scores, times log2 e
};

extern __shared__ __align__(16) float shared[];

__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

// What entries of the work cost; an entry is a head of a sequence. Its own units come first, then those of its tiles.
struct Units {
    const Arguments& a;

    __device__ __forceinline__ u32 of_tile(u32 head) const {
        return (a.key_ranks[head] + VALUE_COST * a.value_ranks[head]) / 8 + TILE_COST;
    }

    __device__ __forceinline__ u32 operator()(u32 entry) const {
        const u32 tiles = (a.lengths[entry / a.heads] + TILE - 1) / TILE;
        return ENTRY_COST + tiles * of_tile(entry % a.heads);
    }
};

// The tiles whose first unit is below a unit of an entry.
__device__ __forceinline__ u32 tiles_below(u32 unit, u32 cost) {
    return unit > ENTRY_COST ? (unit - ENTRY_COST + cost - 1) / cost : 0;
}

// A tile's keys and values, as the lanes want them.
struct Tile {
    uint4 keys[2][KEY_CHUNKS];     // token 8 i + g, components 32 j + 8 l and on
    uint4 values[4][VALUE_CHUNKS]; // tokens 2 l, 2 l + 1, 2 l + 8, 2 l + 9, components 64 j + 8 g and on

    __device__ __forceinline__ void load_keys(const u16* rows, u32 rank, u32 first, u32 length, int g, int l) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u16* row = rows + (u64)min(first + 8 * i + g, length - 1) * rank;
#pragma unroll
            for (int j = 0; j < KEY_CHUNKS; j++) load_if(keys[i][j], row + 32 * j + 8 * l, 32 * j + 8 * l < rank);
        }
    }

    __device__ __forceinline__ void load_values(const u16* rows, u32 rank, u32 first, u32 length, int g, int l) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u16* row = rows + (u64)min(first + 2 * l + i % 2 + i / 2 * 8, length - 1) * rank;
#pragma unroll
            for (int j = 0; j < VALUE_CHUNKS; j++) load_if(values[i][j], row + 64 * j + 8 * g, 64 * j + 8 * g < rank);
        }
    }

    static __device__ __forceinline__ void load_if(uint4& to, const u16* from, bool there) {
        to = make_uint4(0, 0, 0, 0);
        if (there) ld_nc_no_allocate<4>(reinterpret_cast<u32*>(&to), from);
    }
};

__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The block's part of a head of a sequence; leaves the warp's results in shared memory.
__device__ __forceinline__ void attend_entry(const Arguments& a, Work& work) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 sequence = work.entry / a.heads, head = work.entry % a.heads, length = a.lengths[sequence];
    const u32 key_rank = a.key_ranks[head], value_rank = a.value_ranks[head], cost = Units{a}.of_tile(head);
    // A tile is the block's that has its first unit.
    const u32 tile_end = tiles_below(work.to, cost);
    u32 tile = tiles_below(work.from, cost) + warp;
    const u16* keys = a.keys + sequence * a.capacity * a.key_rank_sum + a.capacity * a.key_offsets[head];
    const u16* values = a.values + sequence * a.capacity * a.value_rank_sum + a.capacity * a.value_offsets[head];

    Tile loaded;
    if (tile < tile_end) {
        loaded.load_keys(keys, key_rank, tile * TILE, length, g, l);
        loaded.load_values(values, value_rank, tile * TILE, length, g, l);
    }

    if (threadIdx.x == 0) work.find_sharers();

    // Words of query g: components 32 j + 8 l + 2 i and the next.
    u32 query[KEY_CHUNKS][4];
    const u32 mine = blockIdx.y * QUERIES + g;
    const u16* queries = a.queries + ((u64)work.entry * a.group + mine) * DIM;
#pragma unroll
    for (int j = 0; j < KEY_CHUNKS; j++) {
        uint4 four = make_uint4(0, 0, 0, 0);
        if (mine < a.group && 32 * j + 8 * l < key_rank)
            four = __ldg(reinterpret_cast<const uint4*>(queries + 32 * j + 8 * l));
#pragma unroll
        for (int i = 0; i < 4; i++) query[j][i] = word_of(four, i);
    }

    // [product]: components 64 j + 8 g + 2 i of queries 2 l and 2 l + 1, then the next component of both.
    float sums[VALUE_CHUNKS * 4][4];
#pragma unroll
    for (int i = 0; i < VALUE_CHUNKS * 16; i++) sums[i / 4][i % 4] = 0;
    float max[2] = {NOTHING, NOTHING}, weight[2] = {0, 0}; // of queries 2 l and 2 l + 1; `weight` is the lane's part

    while (warp_uniform(tile < tile_end)) {
        const u32 first = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        float scores[4] = {}; // of token g for queries 2 l and 2 l + 1, then of token g + 8
#pragma unroll
        for (int j = 0; j < KEY_CHUNKS; j++) {
            const uint4 &upper = loaded.keys[0][j], &lower = loaded.keys[1][j];
            const u32 even[4] = {upper.x, lower.x, upper.y, lower.y}, odd[4] = {upper.z, lower.z, upper.w, lower.w};
            mma_m16n8k16(scores, even, query[j][0], query[j][1]);
            mma_m16n8k16(scores, odd, query[j][2], query[j][3]);
        }
        if (more) loaded.load_keys(keys, key_rank, tile * TILE, length, g, l);

#pragma unroll
        for (int t = 0; t < 4; t++) {
            scores[t] *= a.scale;
            if (first + TILE > length && first + g + t / 2 * 8 >= length) scores[t] = -infinity();
        }
        const float top[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        if (warp_uniform(top[0] > max[0] + 8 || top[1] > max[1] + 8)) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const float high = fmaxf(max[q], column_max(top[q])), keep = exp2_approx(max[q] - high);
                max[q] = high, weight[q] *= keep;
#pragma unroll
                for (int i = 0; i < VALUE_CHUNKS * 4; i++) sums[i][q] *= keep, sums[i][q + 2] *= keep;
            }
        }
        float p[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            p[t] = exp2_approx(scores[t] - max[t % 2]);
            weight[t % 2] += p[t];
        }
        const u32 b0 = movmatrix_trans(pack_elements(p[0], p[1])), b1 = movmatrix_trans(pack_elements(p[2], p[3]));
#pragma unroll
        for (int j = 0; j < VALUE_CHUNKS; j++)
            if (64 * j < value_rank)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 word[4], operand[4];
#pragma unroll
                    for (int t = 0; t < 4; t++) word[t] = word_of(loaded.values[t][j], i);
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        operand[2 * t] = prmt(word[2 * t], word[2 * t + 1], 0x5410);
                        operand[2 * t + 1] = prmt(word[2 * t], word[2 * t + 1], 0x7632);
                    }
                    mma_m16n8k16(sums[j * 4 + i], operand, b0, b1);
                }
        if (more) loaded.load_values(values, value_rank, tile * TILE, length, g, l);
    }

#pragma unroll
    for (int q = 0; q < 2; q++) {
        float* result = shared + (warp * QUERIES + 2 * l + q) * RESULT;
#pragma unroll
        for (int i = 0; i < VALUE_CHUNKS * 4; i++)
            *reinterpret_cast<float2*>(result + i / 4 * 64 + 8 * g + i % 4 * 2) =
                make_float2(sums[i][q], sums[i][q + 2]);
        const float sum = column_sum(weight[q]);
        if (g == 0) result[DIM] = max[q], result[DIM + 1] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_attend(const Arguments a) {
    Work& work = *reinterpret_cast<Work*>(shared + WARPS * QUERIES * RESULT);
    const u32 entries = a.batch * a.heads;
    Units units{a};
    if (warp_uniform(threadIdx.x < LANES)) work.begin(entries, blockIdx.x, gridDim.x, units);
    pdl_wait(); // all but lengths, ranks and offsets may come from it
    pdl_trigger();
    __syncthreads();
    while (warp_uniform(work.entry < entries)) {
        attend_entry(a, work);
        const u32 entry = work.entry, value_rank = a.value_ranks[entry % a.heads];
        const u64 first_query = (u64)entry * a.group + blockIdx.y * QUERIES;
        const u32 live = min(a.group - blockIdx.y * QUERIES, (u32)QUERIES);
        float* mine = a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * QUERIES * RESULT;
        reduce<QUERIES, DIM, WARPS, RESULT>(
            shared, live, work, blockIdx.x, mine, a.arrived + (u64)entry * gridDim.y + blockIdx.y,
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

// Decode attention on what rotations have left of keys and values: every head at its own two ranks.
//
// CPU twin: svd_core::attend_into. Compile-time shape: DIM, 64 or 128, no rank above it; WARPS; BFLOAT or not. Ranks are multiples of
// 8, read on the device. A block serves 8 query heads of a group; a larger group has SLICES of them.
//
// The floor is reading every kept component once. A warp takes 16 tokens and keeps all of it in registers, without shared memory:
//
// * Scores: queries (rows) times keys (columns are tokens). Lane 4 g + l loads 16 bytes of token g, which are its operand of two
//   products whose order of components the queries follow.
// * The product leaves each lane the scores of query g for tokens 2 l and 2 l + 1, which as weights are its operand of the next.
// * Values: lane 4 g + l loads 16 bytes, components 8 g and on, of the four tokens that its operand wants; a byte permutation pairs
//   two tokens, and product i has component i of every 8 as its columns.
//
// Work is cut by tokens and ranks: a tile costs its components and something fixed.

constexpr int TILE = 16, QUERIES = 8, THREADS = WARPS * LANES;
constexpr int KEY_CHUNKS = DIM / 32; // a lane has 8 components of each
constexpr int VALUE_CHUNKS = DIM / 64;
constexpr int FIXED = 4; // what a tile costs beside its components, in eights of them
constexpr int RESULT = DIM + 4;
constexpr int SHARED = WARPS * QUERIES * RESULT * 4 + (int)sizeof(Work);
static_assert(SHARED <= SHARED_BYTES, "the host asks for enough");

struct Arguments {
    const u16* keys;          // element [sequence][head][capacity][rank of the head]
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
    u64 capacity;             // tokens that a sequence has room for
    u32 batch, heads, group;
    float scale;              // of scores, times log2 e
};

extern __shared__ __align__(16) float shared[];

__device__ __forceinline__ void multiply_add_elements(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    const u32 a[4] = {a0, 0, a2, 0}; // rows 8 and on are no queries
#ifdef BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add(c, a, b0, b1);
#endif
}

// What entries of the work cost; an entry is a head of a sequence.
struct Units {
    const Arguments& a;

    __device__ __forceinline__ u32 of_tile(u32 entry) const {
        const u32 head = entry % a.heads;
        return (a.key_ranks[head] + a.value_ranks[head]) / 8 + FIXED;
    }
    __device__ __forceinline__ u32 operator()(u32 entry) const {
        const u32 tiles = (a.lengths[entry / a.heads] + TILE - 1) / TILE;
        return max(tiles, 1u) * of_tile(entry); // an empty sequence has an output, too
    }
};

// A tile's keys and values, as the lanes want them.
struct Tile {
    uint4 keys[2][KEY_CHUNKS];    // token 8 i + g, components 32 j + 8 l and on
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
        if (there) load_streaming<4>(reinterpret_cast<u32*>(&to), from);
    }
};

__device__ __forceinline__ u32 word_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

// The block's part of a head of a sequence; leaves the warp's results in shared memory.
__device__ __forceinline__ void attend_entry(const Arguments& a, const Work& work) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 sequence = work.entry / a.heads, head = work.entry % a.heads, length = a.lengths[sequence];
    const u32 key_rank = a.key_ranks[head], value_rank = a.value_ranks[head], cost = Units{a}.of_tile(work.entry);
    // A tile is the block's that has its first unit.
    const u32 tile_end = min((work.to + cost - 1) / cost, (length + TILE - 1) / TILE);
    u32 tile = (work.from + cost - 1) / cost + warp;
    const u16* keys = a.keys + sequence * a.capacity * a.key_rank_sum + a.capacity * a.key_offsets[head];
    const u16* values = a.values + sequence * a.capacity * a.value_rank_sum + a.capacity * a.value_offsets[head];

    Tile loaded;
    if (tile < tile_end) {
        loaded.load_keys(keys, key_rank, tile * TILE, length, g, l);
        loaded.load_values(values, value_rank, tile * TILE, length, g, l);
    }

    // Words of query g: components 32 j + 8 l + 2 i and the next.
    u32 query[KEY_CHUNKS][4];
    const u32 mine = blockIdx.y * QUERIES + g;
    const u16* queries = a.queries + ((u64)work.entry * a.group + mine) * DIM;
#pragma unroll
    for (int j = 0; j < KEY_CHUNKS; j++) {
        uint4 four = make_uint4(0, 0, 0, 0);
        if (mine < a.group && 32 * j + 8 * l < key_rank) four = __ldg(reinterpret_cast<const uint4*>(queries + 32 * j + 8 * l));
#pragma unroll
        for (int i = 0; i < 4; i++) query[j][i] = word_of(four, i);
    }

    float sums[VALUE_CHUNKS * 8][4]; // [product]: components 64 j + 8 (2 l) + i and 64 j + 8 (2 l + 1) + i of query g
#pragma unroll
    for (int i = 0; i < VALUE_CHUNKS * 32; i++) sums[i / 4][i % 4] = 0;
    float max = NOTHING, weight = 0; // of query g; `weight` is the lane's part

    while (uniform(tile < tile_end)) {
        const u32 first = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        float scores[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < KEY_CHUNKS; j++) {
                const uint4& key = loaded.keys[i][j];
                multiply_add_elements(scores[i], query[j][0], query[j][1], key.x, key.y);
                multiply_add_elements(scores[i], query[j][2], query[j][3], key.z, key.w);
            }
        if (more) loaded.load_keys(keys, key_rank, tile * TILE, length, g, l);

        float score[4]; // of tokens 2 l, 2 l + 1, 2 l + 8, 2 l + 9
#pragma unroll
        for (int t = 0; t < 4; t++) {
            score[t] = scores[t / 2][t % 2] * a.scale;
            if (first + TILE > length && first + 2 * l + t % 2 + t / 2 * 8 >= length) score[t] = -infinity();
        }
        const float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
        if (uniform(top > max + 8)) {
            float high = fmaxf(top, max);
            high = fmaxf(high, __shfl_xor_sync(FULL, high, 1));
            high = fmaxf(high, __shfl_xor_sync(FULL, high, 2));
            const float keep = exp2_approx(max - high);
            max = high, weight *= keep;
#pragma unroll
            for (int i = 0; i < VALUE_CHUNKS * 8; i++) sums[i][0] *= keep, sums[i][1] *= keep;
        }
        float p[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            p[t] = exp2_approx(score[t] - max);
            weight += p[t];
        }
        const u32 low = pack_elements(p[0], p[1]), high = pack_elements(p[2], p[3]);
#pragma unroll
        for (int j = 0; j < VALUE_CHUNKS; j++)
            if (64 * j < value_rank)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const u32 pick = i % 2 ? 0x7632 : 0x5410;
                    const u32 b0 = permute_bytes(word_of(loaded.values[0][j], i / 2), word_of(loaded.values[1][j], i / 2), pick);
                    const u32 b1 = permute_bytes(word_of(loaded.values[2][j], i / 2), word_of(loaded.values[3][j], i / 2), pick);
                    multiply_add_elements(sums[j * 8 + i], low, high, b0, b1);
                }
        if (more) loaded.load_values(values, value_rank, tile * TILE, length, g, l);
    }

    weight += __shfl_xor_sync(FULL, weight, 1);
    weight += __shfl_xor_sync(FULL, weight, 2);
    float* result = shared + (warp * QUERIES + g) * RESULT;
#pragma unroll
    for (int i = 0; i < VALUE_CHUNKS * 8; i++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) result[i / 8 * 64 + 8 * (2 * l + odd) + i % 8] = sums[i][odd];
    if (l == 0) result[DIM] = max, result[DIM + 1] = weight;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_attend(const Arguments a) {
    Work& work = *reinterpret_cast<Work*>(shared + WARPS * QUERIES * RESULT);
    const u32 entries = a.batch * a.heads;
    if (threadIdx.x < LANES) {
        work.cut(entries, blockIdx.x, gridDim.x, Units{a});
        work.find(entries, 0, Units{a});
    }
    __syncthreads();
    while (uniform(work.entry < entries)) {
        attend_entry(a, work);
        const u32 entry = work.entry, value_rank = a.value_ranks[entry % a.heads];
        const u64 first_query = (u64)entry * a.group + blockIdx.y * QUERIES;
        const u32 live = min(a.group - blockIdx.y * QUERIES, (u32)QUERIES);
        float* mine = a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * QUERIES * RESULT;
        reduce<QUERIES, DIM, WARPS, RESULT>(
            shared, work, blockIdx.x, mine, a.arrived + (u64)entry * gridDim.y + blockIdx.y,
            [&](u32 query, int component, const Sum& sum) {
                if (query >= live) return;
                if (component < value_rank) *reinterpret_cast<u32*>(a.out + (first_query + query) * DIM + component) = sum.normalized();
                if (component == 0 && a.log_sum_exp) a.log_sum_exp[first_query + query] = sum.log_sum_exp();
            });
        __syncthreads();
        if (threadIdx.x < LANES) work.find(entries, entry + 1, Units{a});
        __syncthreads();
    }
}

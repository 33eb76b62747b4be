// First kernel of hybrid attention: the coded scores of all tokens, and the softmax statistics of each query.
//
// shape.cuh has the compile-time shape and explains the method. Launch: grid (block of a head's work, head), THREADS
// threads. A block makes the ADC table of a sequence's queries (lut.cuh); a warp then scores every WARPS-th tile of the
// block's part. An MMA with constant weights adds a lane's look-ups for two tokens, and the four lanes that share these
// tokens, in f32: 8 MMAs per tile of four queries take the place of 64 additions and 6 shuffles.
#include "pq_hybrid/lut.cuh"
#include "pq_hybrid/plan.cuh"
#include "pq_search/radix.cuh"

constexpr int WARPS = SCORE_WARPS, THREADS = WARPS * LANES;
using KeyCodes = Packed<KEY_M, KEY_BITS>;

struct Shared {
    u8 lut[LUT_BYTES];
    LutBuilder builder;
    Stats warps[VEC][WARPS];
    Plan<false> plan;
};
extern __shared__ __align__(128) u8 shared[];
static_assert(sizeof(Shared) <= SCORES_SHARED_BYTES, "the host reserves it");
__device__ __forceinline__ Shared& block() { return *reinterpret_cast<Shared*>(shared); }

// Merges statistics over the lanes whose indices differ in the bits of `MASK`.
template <int MASK>
__device__ __forceinline__ Stats merged(Stats stats) {
    float max = stats.max;
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) max = fmaxf(max, __shfl_xor_sync(FULL, max, bit));
    float sum = stats.sum * exp2_approx(stats.max - max);
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        if (MASK & bit) sum += __shfl_xor_sync(FULL, sum, bit);
    return {max, sum};
}

// Weights of an MMA that adds table entries: column `query` of half `half` of a tile takes its query. Four queries
// leave columns 4 to 7 for the second half of the tile, two queries leave columns 2 and 3.
struct Selector {
    u32 b[2][2]; // [half of the tile, or of the entry if VEC is 8][operand register]

    __device__ __forceinline__ explicit Selector(int lane) {
        constexpr u32 LOW = 0x3c00, HIGH = 0x3c000000; // 1 as an f16
        const int n = lane / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = n - half * (VEC == 2 ? 2 : 4);
            const u32 one = query % 2 ? HIGH : LOW;
            if (VEC == 2)
                b[half][0] = b[half][1] = query == 0 || query == 1 ? one : 0;
            else
                b[half][0] = query == 0 || query == 1 ? one : 0, b[half][1] = query == 2 || query == 3 ? one : 0;
        }
    }
};

// Scores of a tile: lane 4 g + l has queries 2 `pair` and 2 `pair` + 1 of tokens 16 `half` + g and 16 `half` + 8 + g.
struct TileScores {
    static constexpr int SETS = VEC == 8 ? 2 : 1; // with 8 queries a lane has both halves, else half `half_of(lane)`
    float sums[SETS][4];

    static __device__ __forceinline__ int pair_of(int l) { return VEC == 8 ? l : VEC == 4 ? l % 2 : 0; }
    static __device__ __forceinline__ int half_of(int l) { return VEC == 4 ? l / 2 : l; }
    static __device__ __forceinline__ bool has_scores(int l) { return VEC > 2 || l < 2; }

    __device__ __forceinline__ void look_up(const KeyCodes& packed, const LutOffsets& offsets,
                                            const Selector& selector) {
        u32 codes[KeyCodes::EXPANDED];
        packed.expand(codes);
#pragma unroll
        for (int i = 0; i < SETS * 4; i++) sums[i / 4][i % 4] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 previous[2];
#pragma unroll
            for (int i = 0; i < STEPS * MIDDLES; i++) {
                const int step = i / MIDDLES, middle = i % MIDDLES;
                u32 entry[2][ENTRY / 4];
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const int code = (half * STEPS * MIDDLES + i) * 2 + high;
                    const u32 address = row_address(codes[code / 4], offsets.pairs[step / 2], code % 4, step);
                    const u8* at = shared + address + middle * MIDDLE;
                    if constexpr (VEC == 2) {
                        entry[high][0] = *reinterpret_cast<const u32*>(at);
                    } else if constexpr (VEC == 4) {
                        const uint2 words = *reinterpret_cast<const uint2*>(at);
                        entry[high][0] = words.x, entry[high][1] = words.y;
                    } else {
                        const uint4 words = *reinterpret_cast<const uint4*>(at);
                        entry[high][0] = words.x, entry[high][1] = words.y;
                        entry[high][2] = words.z, entry[high][3] = words.w;
                    }
                }
                if constexpr (VEC == 2) {
                    if (i % 2 == 0) {
                        previous[0] = entry[0][0], previous[1] = entry[1][0];
                    } else {
                        const u32 operand[4] = {previous[0], previous[1], entry[0][0], entry[1][0]};
                        mma_m16n8k16_f16(sums[0], operand, selector.b[half][0], selector.b[half][1]);
                    }
                } else {
#pragma unroll
                    for (int four = 0; four < VEC / 4; four++) {
                        const u32 operand[4] = {entry[0][2 * four], entry[1][2 * four], entry[0][2 * four + 1],
                                                entry[1][2 * four + 1]};
                        const u32(&b)[2] = selector.b[VEC == 4 ? half : four];
                        mma_m16n8k16_f16(sums[VEC == 4 ? 0 : half], operand, b[0], b[1]);
                    }
                }
            }
        }
    }
};

// Scores the block's part of a sequence, and returns the lane's statistics of its two queries.
__device__ __forceinline__ void score_sequence(const Arguments& a, const Scratch& scratch,
                                               const LutWords<THREADS>& words, Stats (&stats)[2]) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const Plan<false>& plan = block().plan;
    const u32 head = blockIdx.y, length = plan.length, end = min(plan.to, (length + TILE - 1) / TILE);
    const Tiles tiles(a, plan.entry, head);
    KeyCodes keys;
    auto load = [&](u32 tile) { keys.load(a.key_codes + (u64)tiles.at(a, tile) * KeyCodes::TILE_BYTES, lane); };
    u32 tile = plan.from + warp;
    if (tile < end) load(tile);
    block().builder.build<THREADS>(a, plan.entry, head, words, shared);

    const int pair = TileScores::pair_of(l);
    const float base[2] = {block().builder.base[2 * pair], block().builder.base[2 * pair + 1]};
    const LutOffsets offsets(lane);
    const Selector selector(lane);
    const u64 row = (u64)plan.entry * a.heads + head;
    float* scores = scratch.scores + row * a.chunks * CHUNK * GROUP + 2 * pair * TILE + 4 * g;
    stats[0] = stats[1] = {NOTHING, 0};
    while (warp_uniform(tile < end)) {
        TileScores sums;
        sums.look_up(keys, offsets, selector);
        const u32 first = tile * TILE;
        float* tile_scores = scores + (u64)tile * GROUP * TILE;
        tile += WARPS;
        if (tile < end) load(tile);
#pragma unroll
        for (int set = 0; set < TileScores::SETS; set++) {
            const int half = VEC == 8 ? set : TileScores::half_of(l);
            float score[2][2]; // [query][token]
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool there = first + 16 * half + 8 * (i / 2) + g < length;
                score[i % 2][i / 2] = there ? sums.sums[set][i] + base[i % 2] : -infinity();
            }
            if (!TileScores::has_scores(l)) continue;
#pragma unroll
            for (int q = 0; q < 2; q++) {
                if (2 * pair + q < GROUP)
                    *reinterpret_cast<float2*>(tile_scores + q * TILE + 2 * half) =
                        make_float2(score[q][0], score[q][1]);
                // `fmaxf` replaces NaN.
                const float x = fmaxf(score[q][0], NOTHING), y = fmaxf(score[q][1], NOTHING);
                const float max = fmaxf(stats[q].max, fmaxf(x, y));
                stats[q].sum =
                    stats[q].sum * exp2_approx(stats[q].max - max) + exp2_approx(x - max) + exp2_approx(y - max);
                stats[q].max = max;
            }
        }
    }
}

// Merges the statistics of lanes, of warps and, in the last block that shares the sequence, of blocks.
__device__ __forceinline__ void finish_stats(const Arguments& a, const Scratch& scratch, const Stats (&stats)[2]) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Shared& s = block();
#pragma unroll
    for (int q = 0; q < 2; q++) {
        const Stats all = merged<28 | (VEC == 4 ? 2 : VEC == 2 ? 1 : 0)>(stats[q]);
        if (lane < VEC / 2) s.warps[2 * lane + q][warp] = all;
    }
    if (threadIdx.x == 0) s.plan.find_sharers();
    __syncthreads();
    const u64 row = (u64)s.plan.entry * a.heads + blockIdx.y;
    const u32 pieces = s.plan.pieces, first_block = s.plan.first_block;
    Stats* parts = scratch.stat_parts + (u64)blockIdx.y * gridDim.x * 2 * VEC;
    Stats* own = parts + (blockIdx.x * 2 + (blockIdx.x == first_block)) * VEC;
    if (warp < VEC) {
        const Stats all = merged<31>(lane < WARPS ? s.warps[warp][lane] : Stats{NOTHING, 0});
        if (lane == 0) (pieces == 1 ? scratch.stats + row * VEC : own)[warp] = all;
    }
    if (pieces == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        s.plan.last = atomic_add_acq_rel(scratch.score_counts + row, 1) == pieces - 1;
        if (s.plan.last) scratch.score_counts[row] = 0; // for the next launch
    }
    __syncthreads();
    if (!s.plan.last || warp >= VEC) return;
    Stats all = {NOTHING, 0};
    for (u32 piece = lane; piece < pieces; piece += LANES) {
        const u32 slot = (first_block + piece) * 2 + (piece == 0);
        const float2 part = __ldcg(reinterpret_cast<const float2*>(parts + slot * VEC + warp));
        const float max = fmaxf(all.max, part.x);
        all = {max, all.sum * exp2_approx(all.max - max) + part.y * exp2_approx(part.x - max)};
    }
    all = merged<31>(all);
    if (lane == 0) scratch.stats[row * VEC + warp] = all;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_hybrid_scores(const Arguments a) {
    Plan<false>& plan = block().plan;
    LutWords<THREADS> words;
    words.load(a, blockIdx.y);
    if (warp_uniform(threadIdx.x < LANES)) plan.find_first(a);
    pdl_wait();
    pdl_trigger();
    __syncthreads();
    const Scratch scratch(a);
    for (bool is_first = true; warp_uniform(plan.entry < a.batch); is_first = false) {
        if (!is_first) words.load(a, blockIdx.y);
        const u64 rows = (u64)a.batch * a.heads, row = (u64)plan.entry * a.heads + blockIdx.y;
        if (plan.from == 0) Selection(scratch.selection, rows, row, a.chunks).clear<THREADS>();
        Stats stats[2];
        score_sequence(a, scratch, words, stats);
        finish_stats(a, scratch, stats);
        __syncthreads();
        if (threadIdx.x == 0) plan.find_next(a);
        __syncthreads();
    }
}

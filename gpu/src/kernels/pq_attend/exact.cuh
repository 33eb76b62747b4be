// Attention on the exact tokens of a sequence, added to the warp's results: per query the sum of values, the maximum of
// the scores and the sum of weights.
//
// CPU twin: pq_core::attend_exact_into. A warp takes a tile of 16 tokens to registers, as MMA fragments of lane
// 4 g + l; nothing passes through shared memory.
//
// * Scores = keys (A operand, rows are tokens) times queries (B operand, columns are queries). A lane loads 16 bytes of
//   tokens g and g + 8 at a time, which permutes the components; the queries are read in the same order.
// * Weights have tokens as rows; movmatrix transposes them to the next B operand.
// * Output = values transposed (A operand, rows are components) times weights. A lane loads 16 bytes of four tokens,
//   and byte permutations pair the tokens: row g of MMA i is the even component of word i, row g + 8 the odd one.
//
// A thread of 16 warps has 128 registers, too few for all sums: such warps take two passes, each with half of a value.
//
// Tokens in FP8 become f16 in registers, and are multiplied with f16 queries and weights even if ELEMENT is bf16. Their
// factors apply to the scores and to the sums.
#pragma once
#include "element.cuh"
#include "pq_attend/codes.cuh"
#include "pq_attend/plan.cuh"

constexpr int SHARERS = WARPS / SLOTS; // warps that share a slot of the results
constexpr int PASSES = WARPS == 16 && D == 128 ? 2 : 1;
constexpr int VALUE_CHUNKS = D / 64 / PASSES; // 64 components of a value each
constexpr int EXACT_QUERY_ROWS = EXACT_FP8 ? F16_QUERY_ROWS : QUERY_ROWS;

__device__ __forceinline__ float* warp_results(const Lane& lane) {
    return reinterpret_cast<float*>(shared + RESULTS) + lane.warp % SLOTS * QUERIES * RESULT;
}

// Runs `merge(turn)` in all warps, one after another in those that share a slot of the results. Called by the whole
// block.
template <typename Merge>
__device__ __forceinline__ void in_turns(const Lane& lane, Merge merge) {
#pragma unroll
    for (int turn = 0; turn < SHARERS; turn++) {
        if (SHARERS > 1) __syncthreads();
        if (SHARERS == 1 || warp_uniform(lane.warp / SLOTS == turn)) merge(turn);
    }
}

// 8 adjacent components of a row.
struct Eight {
    u32 words[2 * sizeof(ExactElement)];

    __device__ __forceinline__ void load(const ExactElement* from) {
        ld_nc_no_allocate<2 * sizeof(ExactElement)>(words, from);
    }

    // Components 2 i and 2 i + 1 as 16-bit numbers.
    __device__ __forceinline__ u32 pair(int i) const {
        return EXACT_FP8 ? e4m3_to_half2(words[i / 2] >> 16 * (i % 2)) : words[i];
    }
};

// The products of the 16-bit numbers of an exact tile.
__device__ __forceinline__ void multiply_exact(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if EXACT_FP8
    mma_m16n8k16_f16(c, a, b0, b1);
#else
    mma_m16n8k16(c, a, b0, b1);
#endif
}
__device__ __forceinline__ void multiply_exact_init(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if EXACT_FP8
    mma_m16n8k16_f16_init(c, a, b0, b1);
#else
    mma_m16n8k16_init(c, a, b0, b1);
#endif
}
__device__ __forceinline__ u32 pack_exact(float low, float high) {
    return EXACT_FP8 ? pack_half2(low, high) : pack_elements(low, high);
}

// Factors of the scores of exact tokens, scale included, and of their sums.
__device__ __forceinline__ float score_factor(const Arguments& a, u32 head) {
    return EXACT_FP8 ? a.scale * a.exact_factors[head].x : a.scale;
}
__device__ __forceinline__ float sum_factor(const Arguments& a, u32 head) {
    return EXACT_FP8 ? a.exact_factors[head].y : 1;
}

// Fragments of a tile of exact tokens. Tokens at or above the length repeat the last token, so that no load is out of
// bounds; their weights are zero.
struct ExactTile {
    Eight keys[2][D / 32];         // [i][j]: token g + 8 i, words 16 j + 4 l to + 3
    Eight values[4][VALUE_CHUNKS]; // [i][j]: token 2 l + {0, 1, 8, 9}[i], words 32 j + 4 g to + 3 of the pass

    __device__ __forceinline__ void load(const ExactElement* key_rows, const ExactElement* value_rows, u32 last,
                                         const Lane& lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const ExactElement* row = key_rows + min(lane.g + 8 * i, last) * D + lane.l * 8;
#pragma unroll
            for (int j = 0; j < D / 32; j++) keys[i][j].load(row + j * 32);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const ExactElement* row = value_rows + min(2 * lane.l + i % 2 + i / 2 * 8, last) * D + lane.g * 8;
#pragma unroll
            for (int j = 0; j < VALUE_CHUNKS; j++) values[i][j].load(row + j * 64);
        }
    }

    // The scores: [i] is of token g + i / 2 * 8 and query 2 l + i % 2.
    __device__ __forceinline__ void score(float (&scores)[4], const Lane& lane) const {
        const u8* words = shared + lane.g * QUERY_ROW + word_of<KEY_SUB>(8 * lane.l) * 4; // constant offsets follow
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            const int j = step / 2, k = step % 2 * 2;
            u32 query[2] = {0, 0};
            if (lane.g < QUERIES)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    query[i] = *reinterpret_cast<const u32*>(
                        words + (EXACT_QUERY_ROWS + word_of<KEY_SUB>(2 * (16 * j + k + i)) * 4));
            const u32 operand[4] = {keys[0][j].pair(k), keys[1][j].pair(k), keys[0][j].pair(k + 1),
                                    keys[1][j].pair(k + 1)};
            if (step == 0)
                multiply_exact_init(scores, operand, query[0], query[1]);
            else
                multiply_exact(scores, operand, query[0], query[1]);
        }
    }

    // Adds the values, weighted: `weights` are those of tokens 2 l and 2 l + 1, and 2 l + 8 and 2 l + 9, of query g.
    __device__ __forceinline__ void add_values_to(float (&sums)[4 * VALUE_CHUNKS][4], const u32 (&weights)[2]) const {
#pragma unroll
        for (int i = 0; i < 4 * VALUE_CHUNKS; i++) {
            u32 tokens[4];
#pragma unroll
            for (int t = 0; t < 4; t++) tokens[t] = values[t][i / 4].pair(i % 4);
            const u32 operand[4] = {prmt(tokens[0], tokens[1], 0x5410), prmt(tokens[0], tokens[1], 0x7632),
                                    prmt(tokens[2], tokens[3], 0x5410), prmt(tokens[2], tokens[3], 0x7632)};
            multiply_exact(sums[i], operand, weights[0], weights[1]);
        }
    }
};

// The lanes of equal l have the sums of different components, and the maxima of queries 2 l and 2 l + 1.
struct ExactState {
    float sums[4 * VALUE_CHUNKS][4]; // [i][j]: component j / 2 of word 32 (i / 4) + 4 g + i % 4, query 2 l + j % 2
    float max[2] = {NEG_INF, NEG_INF}, weight[2] = {0, 0};

    __device__ __forceinline__ ExactState() {
#pragma unroll
        for (int i = 0; i < 16 * VALUE_CHUNKS; i++) sums[i / 4][i % 4] = 0;
    }

    // Adds up to 16 tokens, of which `last` is the last one, from rows of keys and values.
    __device__ __forceinline__ void add(const ExactElement* keys, const ExactElement* values, u32 last, float scale,
                                        const Lane& lane) {
        ExactTile tile;
        tile.load(keys, values, last, lane);
        float p[4];
        tile.score(p, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = lane.g + i / 2 * 8 <= last ? p[i] * scale : -infinity();
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float new_max = fmaxf(max[q], fmaxf(p[q], p[q + 2]));
#pragma unroll
            for (int step = 4; step < LANES; step *= 2) new_max = fmaxf(new_max, __shfl_xor_sync(FULL, new_max, step));
            const float keep = exp2_approx(max[q] - new_max);
            max[q] = new_max;
            p[q] = exp2_approx(p[q] - new_max), p[q + 2] = exp2_approx(p[q + 2] - new_max);
            weight[q] = keep * weight[q] + p[q] + p[q + 2];
#pragma unroll
            for (int i = 0; i < 4 * VALUE_CHUNKS; i++) sums[i][q] *= keep, sums[i][q + 2] *= keep;
        }
        const u32 weights[2] = {movmatrix_trans(pack_exact(p[0], p[1])), movmatrix_trans(pack_exact(p[2], p[3]))};
        tile.add_values_to(sums, weights);
    }

    // Adds the sums of a pass, times a factor, to the results. Their maximum and sum of weights change with the last
    // pass.
    __device__ __forceinline__ void add_to(float* results, int pass, float factor, const Lane& lane) const {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float total = weight[q];
#pragma unroll
            for (int step = 4; step < LANES; step *= 2) total += __shfl_xor_sync(FULL, total, step);
            float* result = results + (2 * lane.l + q) * RESULT;
            const bool is_query = 2 * lane.l + q < QUERIES;
            const float old_max = is_query ? result[D] : NEG_INF, old_weight = is_query ? result[D + 1] : 0;
            const float new_max = fmaxf(old_max, max[q]);
            const float keep_old = exp2_approx(old_max - new_max), keep = exp2_approx(max[q] - new_max);
            const float keep_sum = keep * factor;
            __syncwarp(); // all lanes have read the maximum and the sum of weights
            if (!is_query) continue;
#pragma unroll
            for (int i = 0; i < 4 * VALUE_CHUNKS; i++) {
                const int word = (pass * VALUE_CHUNKS + i / 4) * 32 + 4 * lane.g + i % 4;
                float2* x = reinterpret_cast<float2*>(result) + word;
                *x = make_float2(keep_old * x->x + keep_sum * sums[i][q], keep_old * x->y + keep_sum * sums[i][q + 2]);
            }
            if (lane.g == 0 && pass == PASSES - 1)
                result[D] = new_max, result[D + 1] = keep_old * old_weight + keep * total;
        }
        __syncwarp();
    }
};

// Prefetches the warp's first item of exact tokens into L2, before the tiles: 132 of them next to 32,768 coded tokens
// (32/8 heads) then cost 1.0 us instead of 1.5.
__device__ __forceinline__ void prefetch_exact(const Arguments& a, const Plan& plan) {
    const Lane lane;
    constexpr int ROW_BYTES = D * sizeof(ExactElement), LINES = (ROW_BYTES + 127) / 128;
    const u32 item = plan.exact_begin + lane.warp;
    if (item >= plan.exact_end || lane.lane >= EXACT_TILE * LINES) return;
    const u64 rows = ((u64)plan.sequence * a.heads + plan.head) * a.exact_capacity;
    const u32 token = min(item * EXACT_TILE + lane.lane / LINES, plan.exact_length - 1);
    const u64 at = (rows + token) * D + lane.lane % LINES * (128 / sizeof(ExactElement));
    prefetch_global_l2(a.exact_keys + at), prefetch_global_l2(a.exact_values + at);
}

// Adds the block's exact tokens of the sequence to the results. Called by the whole block.
// N.B. This runs after the loop over tiles, which leaves it all registers.
__device__ __forceinline__ void attend_exact(const Arguments& a, const Plan& plan) {
    const Lane lane;
    const u32 item_end = plan.exact_end;
    if (warp_uniform(plan.exact_begin >= item_end)) return;
    const u64 rows = ((u64)plan.sequence * a.heads + plan.head) * a.exact_capacity;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const float factor = score_factor(a, plan.head);
        ExactState state;
        for (u32 item = plan.exact_begin + lane.warp; warp_uniform(item < item_end); item += WARPS) {
            const u32 first = item * EXACT_TILE, last = plan.exact_length - 1 - first;
            const u64 at = (rows + first) * D;
            state.add(a.exact_keys + at, a.exact_values + at + pass * VALUE_CHUNKS * 64, last, factor, lane);
        }
        in_turns(lane, [&](int) { state.add_to(warp_results(lane), pass, sum_factor(a, plan.head), lane); });
    }
}

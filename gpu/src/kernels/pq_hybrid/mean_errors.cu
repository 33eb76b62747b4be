// Adds to the outputs of attend.cu what the codes of the values lack on average: for every block of tokens the mean of
// its errors times its share of the softmax, the selected tokens left out.
//
// Compile-time shape: that of attend.cu, and MEAN_WARPS. Launch: grid (slices of a row, head, sequence), THREADS
// threads. A warp takes a block of tokens at a time. A lane has eight scores of each query, 16 bytes, and D / 32
// components of the block's mean error; the warp sums the weights, and each lane adds its components times these sums.
// Warps meet only when their sums are added up, those of a slice in shared memory and those of a row by the last slice
// to arrive, always in the same order: the same inputs give the same bytes.
//
// Floor: one read of scores and means, from L2 as far as they fit.
#include "element.cuh"
#include "mean_block.cuh"
#include "pq_hybrid/scored_tile.cuh"
#include "softmax_reduce.cuh"

constexpr int WARPS = MEAN_WARPS, THREADS = WARPS * LANES;
constexpr int LANE_TOKENS = MEAN_TOKENS / LANES, SCORE_WORDS = LANE_TOKENS / 2; // of a lane, for each query
constexpr int TILE_LANES = TILE / LANE_TOKENS;                                  // lanes that share a tile
constexpr int COMPONENTS = D / LANES;                                           // of a lane
constexpr int SUMS = GROUP * D, QUADS = SUMS / 4;                               // of a row
constexpr int ADDERS = THREADS / QUADS < WARPS ? THREADS / QUADS : WARPS;       // threads that share a quad of sums
static_assert(QUADS <= THREADS, "a thread writes at most one quad");

struct MeanArguments : Arguments {
    const u32* selected;      // [row][selected_len]
    const u16* means;         // f16 [row][mean_blocks][D], of whole blocks
    const float* recent;      // [row][recent_parts][D]: sums of parts of the last blocks, a ring
    const float* log_sum_exp; // [row][GROUP]
    float4* partials;         // [row][slice][QUADS]
    u32* counts;              // [row]: slices that have arrived; zero before and after a launch
    uint2* out;               // element [row][GROUP][D], in fours
    u32 mean_blocks, recent_parts;
};

// Loads WORDS words, at most MOST at once, from L2: L1 may hold what the previous launch has read.
template <int WORDS, int MOST = 4>
__device__ __forceinline__ void load_words(u32* to, const void* from) {
    constexpr int AT_ONCE = WORDS < MOST ? WORDS : MOST;
#pragma unroll
    for (int i = 0; i < WORDS; i += AT_ONCE) {
        const u32* at = static_cast<const u32*>(from) + i;
        if constexpr (AT_ONCE == 4) {
            const uint4 words = __ldcg(reinterpret_cast<const uint4*>(at));
            to[i] = words.x, to[i + 1] = words.y, to[i + 2] = words.z, to[i + 3] = words.w;
        } else if constexpr (AT_ONCE == 2) {
            const uint2 words = __ldcg(reinterpret_cast<const uint2*>(at));
            to[i] = words.x, to[i + 1] = words.y;
        } else {
            to[i] = __ldcg(at);
        }
    }
}

// A lane's scores of a block of tokens: lanes 4 i to 4 i + 3 have those of tile i.
struct BlockScores {
    u32 codes[GROUP][SCORE_WORDS], levels[VEC];

    // The memory has room for all tiles of the last block: rows of scores are whole chunks.
    __device__ __forceinline__ void load(const ScoredTile* scores, u32 block) {
        constexpr int ALIGNED = alignof(ScoredTile) / 4;
        const u32 lane = threadIdx.x % LANES;
        const ScoredTile& tile = scores[block * (MEAN_TOKENS / TILE) + lane / TILE_LANES];
#pragma unroll
        for (int q = 0; q < GROUP; q++)
            load_words<SCORE_WORDS, ALIGNED>(codes[q], &tile.scores[q][lane % TILE_LANES * LANE_TOKENS]);
        load_words<VEC, ALIGNED>(levels, tile.levels);
    }

    // The sum of the weights of the first `count` tokens of the block, for a query with this log-sum-exp (to base 2).
    //
    // Weights are summed relative to the level of their tile. Codes below FAR_CODES, as hidden tokens have, then give
    // 2^-208 or less, which is 0. It would be next to nothing relative to the log-sum-exp, too: no level is more than
    // MOST_LOSS (recenter.cuh) above that, or attend.cu would have moved the levels of the row and summed it again.
    // Levels of tiles behind the last token may be anything.
    __device__ __forceinline__ float weight(int query, float log_sum_exp, u32 count) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++)
            sum += exp2_approx(near_score(codes[query][i / 2], i % 2) - ORIGIN);
        const float of_level = exp2_approx(__uint_as_float(levels[query]) - log_sum_exp);
        return warp_sum(threadIdx.x % LANES / TILE_LANES * TILE < count ? sum * of_level : 0);
    }
};

// A lane's components of the mean error of a whole block. `means`: of the row, from the lane's components on.
struct BlockMean {
    u32 pairs[COMPONENTS / 2];

    __device__ __forceinline__ void load(const u16* means, u32 block) {
        load_words<COMPONENTS / 2>(pairs, means + (u64)block * D);
    }
    __device__ __forceinline__ void unpack(float (&mean)[COMPONENTS]) const {
#pragma unroll
        for (int i = 0; i < COMPONENTS; i += 2) {
            const float2 pair = half2_to_float2(pairs[i / 2]);
            mean[i] = pair.x, mean[i + 1] = pair.y;
        }
    }
};

// What a lane loads of a whole block of tokens.
struct WholeBlock {
    BlockScores scores;
    BlockMean mean;

    __device__ __forceinline__ void load(const ScoredTile* of_row, const u16* means, u32 block) {
        scores.load(of_row, block), mean.load(means, block);
    }
};

// A lane's components of the sums of mean errors times weights.
struct MeanSums {
    float log_sum_exp[GROUP]; // to base 2, or infinity where no token has weight: no difference to it is NaN
    float sums[GROUP][COMPONENTS];

    __device__ __forceinline__ void clear(const float* natural) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            const float x = __ldcg(natural + q);
            log_sum_exp[q] = x == -infinity() ? infinity() : x * LOG2_E;
#pragma unroll
            for (int i = 0; i < COMPONENTS; i++) sums[q][i] = 0;
        }
    }

    __device__ __forceinline__ void add(const BlockScores& scores, u32 count, const float (&mean)[COMPONENTS]) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            const float weight = scores.weight(q, log_sum_exp[q], count);
#pragma unroll
            for (int i = 0; i < COMPONENTS; i++) sums[q][i] += weight * mean[i];
        }
    }

    __device__ __forceinline__ void add(const WholeBlock& block) {
        float mean[COMPONENTS];
        block.mean.unpack(mean);
        add(block.scores, MEAN_TOKENS, mean);
    }

    // `to`: [GROUP][D]
    __device__ __forceinline__ void store(float* to) const {
        to += threadIdx.x % LANES * COMPONENTS;
#pragma unroll
        for (int q = 0; q < GROUP; q++)
#pragma unroll
            for (int i = 0; i < COMPONENTS; i += 2)
                *reinterpret_cast<float2*>(to + q * D + i) = make_float2(sums[q][i], sums[q][i + 1]);
    }
};

// Hides the row's selected tokens from `first` to `end`.
__device__ __forceinline__ void hide_selected(const u32* selected, u32 count, ScoredTile* scores, u32 first, u32 end) {
    constexpr u32 IN_FLIGHT = 4;
    for (u32 i = threadIdx.x; i < count; i += IN_FLIGHT * THREADS) {
        u32 tokens[IN_FLIGHT];
#pragma unroll
        for (u32 j = 0; j < IN_FLIGHT; j++) tokens[j] = __ldcg(selected + min(i + j * THREADS, count - 1));
#pragma unroll
        for (u32 j = 0; j < IN_FLIGHT; j++)
            if (tokens[j] - first < end - first) hide(scores, tokens[j]);
    }
}

// A lane's components of the mean error of the last block of a row of `length` tokens, which is not whole: the mean of
// its whole parts or, where it has none, that of the block before. `means` and `recent`: of the row, from the lane's
// components on.
__device__ __forceinline__ void load_incomplete(const u16* means, const float* recent, u32 recent_parts, u32 length,
                                                float (&mean)[COMPONENTS]) {
    const u32 whole = length / MEAN_TOKENS, parts = length / PART_TOKENS - whole * PARTS;
#pragma unroll
    for (int i = 0; i < COMPONENTS; i++) mean[i] = 0;
    if (parts == 0) {
        if (whole == 0) return;
        BlockMean before;
        before.load(means, whole - 1), before.unpack(mean);
        return;
    }
    const u32 first = whole * PARTS % recent_parts;
#pragma unroll
    for (u32 part = 0; part < PARTS - 1; part++) {
        u32 words[COMPONENTS], at = first + min(part, parts - 1); // again the last one rather than a branch
        at -= at < recent_parts ? 0 : recent_parts;
        load_words<COMPONENTS>(words, recent + (u64)at * D);
#pragma unroll
        for (int i = 0; i < COMPONENTS; i++) mean[i] += part < parts ? __uint_as_float(words[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < COMPONENTS; i++) mean[i] /= parts * PART_TOKENS;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_hybrid_mean_errors(const MeanArguments a) {
    __shared__ __align__(16) float sums[WARPS][SUMS];
    __shared__ Work work;
    pdl_wait();
    pdl_trigger();
    const u32 sequence = blockIdx.z, length = a.lengths[sequence];
    const u64 row = (u64)sequence * a.heads + blockIdx.y;
    MeanSums of_warp;
    of_warp.clear(a.log_sum_exp + row * GROUP);
    // Short sequences have work for fewer slices. The last one has the block that is not whole, too.
    const u32 whole = length / MEAN_TOKENS;
    const u32 slice = blockIdx.x, slices = max(min(gridDim.x, (whole + WARPS - 1) / WARPS), 1u);
    if (length == 0 || slice >= slices) return;
    const u32 begin = whole * slice / slices, end = whole * (slice + 1) / slices; // below 2^32: at most 2^24 blocks
    const bool is_end = slice == slices - 1;
    ScoredTile* scores = a.scores_of(row);
    if (!a.hides) { // concurrent attention has not hidden the selected tokens
        const u32 selected = min(min(a.ks[sequence], a.selected_len), length);
        hide_selected(a.selected + row * a.selected_len, selected, scores, begin * MEAN_TOKENS,
                      is_end ? length : end * MEAN_TOKENS);
        __syncthreads();
    }

    const u32 warp = threadIdx.x / LANES, component = threadIdx.x % LANES * COMPONENTS;
    const u16* means = a.means + row * a.mean_blocks * D + component;
    u32 block = begin + warp;
    WholeBlock even, odd; // all loads of two blocks are in flight at once
    const auto load = [&](WholeBlock& to, u32 at) {
        if (warp_uniform(at < end)) to.load(scores, means, at);
    };
    load(even, block);
    if (warp_uniform(is_end && warp == WARPS - 1 && length % MEAN_TOKENS != 0)) { // no warp has fewer whole blocks
        BlockScores last;
        last.load(scores, whole);
        float mean[COMPONENTS];
        load_incomplete(means, a.recent + row * a.recent_parts * D + component, a.recent_parts, length, mean);
        of_warp.add(last, length % MEAN_TOKENS, mean);
    }
    load(odd, block + WARPS);
    for (; warp_uniform(block < end); block += 2 * WARPS) {
        of_warp.add(even);
        load(even, block + 2 * WARPS);
        if (!warp_uniform(block + WARPS < end)) break;
        of_warp.add(odd);
        load(odd, block + 3 * WARPS);
    }
    of_warp.store(sums[warp]);
    __syncthreads();

    float4* partials = a.partials + row * gridDim.x * QUADS;
    for (u32 i = threadIdx.x; i < SUMS; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][i];
        reinterpret_cast<float*>(partials + slice * QUADS)[i] = sum;
    }
    if (!is_last_of(work, a.counts + row, slices)) return;
    const u32 quad = threadIdx.x % QUADS, adder = threadIdx.x / QUADS;
    float4* added = reinterpret_cast<float4*>(sums); // [ADDERS][QUADS]
    if (adder < ADDERS) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (u32 s = adder; s < slices; s += ADDERS) {
            const float4 part = __ldcg(partials + s * QUADS + quad);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        added[adder * QUADS + quad] = sum;
    }
    __syncthreads();
    if (adder > 0) return;
    uint2* out = a.out + row * QUADS + quad;
    const uint2 four = __ldcg(out);
    float x[4] = {to_float((u16)four.x), to_float((u16)(four.x >> 16)), to_float((u16)four.y),
                  to_float((u16)(four.y >> 16))};
#pragma unroll
    for (int i = 0; i < ADDERS; i++) {
        const float4 sum = added[i * QUADS + quad];
        x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
    }
    *out = make_uint2(pack_elements(x[0], x[1]), pack_elements(x[2], x[3]));
}

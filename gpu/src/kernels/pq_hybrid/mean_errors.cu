// Adds to the outputs of attend.cu what the codes of the values lack on average: for every block of tokens the mean of
// its errors times its share of the softmax, the selected tokens left out.
//
// Compile-time shape: that of attend.cu. Launch: grid (slices of a row, head, sequence), THREADS threads. A warp
// sums the weights of a block of tokens; the threads then have the components. The last slice of a row to arrive
// adds up the slices, in their order, so the same inputs give the same bytes.
#include "element.cuh"
#include "mean_block.cuh"
#include "pq_hybrid/scored_tile.cuh"
#include "softmax_reduce.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES, TILES = MEAN_TOKENS / TILE;
constexpr int PAIRS = (GROUP * WORDS + THREADS - 1) / THREADS; // pairs of components of a thread

struct MeanArguments : Arguments {
    const u32* selected;      // [row][selected_len]
    const u32* found;         // [row]: number of selected tokens, if ADAPTIVE
    const u16* means;         // f16 [row][mean_blocks][D], of whole blocks
    const float* recent;      // [row][recent_parts][D]: sums of parts of the last blocks, a ring
    const float* log_sum_exp; // [row][GROUP]
    float2* partials;         // [row][slice][GROUP][WORDS]
    u32* counts;              // [row]: slices that have arrived; zero before and after a launch
    u32* out;                 // element [row][GROUP][D], in pairs
    u32 mean_blocks, recent_parts;
};

// Two components of the mean error of a block of a row of `length` tokens. The last block has the mean of its whole
// parts or, where it has none, that of the block before.
__device__ __forceinline__ float2 mean_error(const MeanArguments& a, u64 row, u32 length, u32 block, u32 word) {
    const u32 first = block * PARTS, end = length / PART_TOKENS;
    if (first == end && block > 0) block--;
    if (block < length / MEAN_TOKENS)
        return half2_to_float2(
            __ldcg(reinterpret_cast<const u32*>(a.means + (row * a.mean_blocks + block) * D) + word));
    float2 sum = make_float2(0, 0);
#pragma unroll 8
    for (u32 part = first; part < end; part++) {
        const float* of_part = a.recent + (row * a.recent_parts + part % a.recent_parts) * D;
        const float2 pair = __ldcg(reinterpret_cast<const float2*>(of_part) + word);
        sum.x += pair.x, sum.y += pair.y;
    }
    const float tokens = max(end - first, 1u) * PART_TOKENS;
    return make_float2(sum.x / tokens, sum.y / tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) pq_hybrid_mean_errors(const MeanArguments a) {
    __shared__ float weights[WARPS][GROUP]; // of blocks of tokens
    __shared__ Work work;
    pdl_wait();
    pdl_trigger();
    const u32 sequence = blockIdx.z, length = a.lengths[sequence], blocks = (length + MEAN_TOKENS - 1) / MEAN_TOKENS;
    if (blocks == 0) return;
    const u64 row = (u64)sequence * a.heads + blockIdx.y;
    const u32 begin = (u64)blocks * blockIdx.x / gridDim.x, end = (u64)blocks * (blockIdx.x + 1) / gridDim.x;
    ScoredTile* scores = a.scores_of(row);
    // Concurrent attention has not hidden them.
    const u32 selected = IS_ADAPTIVE ? a.found[row] : min(min(a.ks[sequence], a.selected_len), length);
    for (u32 i = threadIdx.x; i < selected; i += THREADS) {
        const u32 token = a.selected[row * a.selected_len + i];
        if (begin <= token / MEAN_TOKENS && token / MEAN_TOKENS < end) hide(scores, token);
    }
    __syncthreads();
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float2 sums[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) sums[i] = make_float2(0, 0);
    for (u32 first = begin; first < end; first += WARPS) {
#pragma unroll
        for (int q = 0; q < GROUP; q++) {
            const float log_sum_exp = a.log_sum_exp[row * GROUP + q] * LOG2_E;
            float weight = 0;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const u32 tile = (first + warp) * TILES + t;
                if (first + warp >= end || tile * TILE >= length || log_sum_exp == -infinity()) continue;
                const float score = any_score(__ldcg(&scores[tile].scores[q][lane]));
                weight += exp2_approx(score + (__ldcg(&scores[tile].levels[q]) - log_sum_exp));
            }
            weight = warp_sum(weight);
            if (lane == 0) weights[warp][q] = weight;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const u32 pair = threadIdx.x + i * THREADS, q = pair / WORDS;
            if (pair >= GROUP * WORDS) break;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                if (first + w >= end) break;
                const float2 mean = mean_error(a, row, length, first + w, pair % WORDS);
                sums[i].x += weights[w][q] * mean.x, sums[i].y += weights[w][q] * mean.y;
            }
        }
        __syncthreads(); // the weights have been read
    }
    float2* partials = a.partials + row * gridDim.x * GROUP * WORDS;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 pair = threadIdx.x + i * THREADS;
        if (pair < GROUP * WORDS) partials[blockIdx.x * GROUP * WORDS + pair] = sums[i];
    }
    if (!is_last_of(work, a.counts + row, gridDim.x)) return;
    for (u32 pair = threadIdx.x; pair < GROUP * WORDS; pair += THREADS) {
        u32& out = a.out[row * GROUP * WORDS + pair];
        float x = to_float((u16)out), y = to_float((u16)(out >> 16));
        for (u32 slice = 0; slice < gridDim.x; slice++) {
            const float2 sum = __ldcg(partials + slice * GROUP * WORDS + pair);
            x += sum.x, y += sum.y;
        }
        out = pack_elements(x, y);
    }
}

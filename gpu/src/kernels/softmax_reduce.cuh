// Merges partial softmax results (split-K attention): first those of a block's warps, then those of the blocks that
// share an entry of the work. No second kernel is needed: the last block to arrive merges and writes the output.
//
// A partial result of a query is the weighted sum of values, the maximum m of the scores (logarithms to base 2) and the
// sum of the weights 2^(score - m). The order of merging is that of warps, then of blocks, whichever block arrives
// last, so the same inputs give the same bytes.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"

// Two adjacent components of a query's weighted sum of values, with the query's maximum and sum of weights.
struct Sum {
    float2 value = make_float2(0, 0);
    float max = NOTHING, weight = 0;

    __device__ __forceinline__ void scale(float factor) { value.x *= factor, value.y *= factor, weight *= factor; }

    __device__ __forceinline__ void add(const float2& other, float other_weight, float factor) {
        value.x += factor * other.x, value.y += factor * other.y, weight += factor * other_weight;
    }

    // Both components divided by the sum of weights, packed as elements; zeros if there are no tokens.
    __device__ __forceinline__ u32 normalized() const {
        const float divisor = weight == 0 ? 1 : weight;
        return pack_elements(value.x / divisor, value.y / divisor);
    }

    __device__ __forceinline__ float log_sum_exp() const {
        return weight == 0 ? -infinity() : (max + log2f(weight)) * LN_2;
    }
};

// Called by all TEAM warps of a block.
// - `results`: [TEAM][ROWS][STRIDE] floats of shared memory, one row per warp and query: components, maximum, sum of
//   weights. Only the first `rows` queries are used.
// - `own_partials`: [2][ROWS][STRIDE] floats of global memory; those of the next block follow. Two slots are enough,
//   since a block shares at most the first and the last entry of its range: slot 0 holds an entry that began in an
//   earlier block, slot 1 one that begins in this block.
// - `arrived`: counter of the entry; it is 0 before and after.
// - `write(query, component, sum)` stores components `component` and `component + 1` of the output.
template <int ROWS, int COMPONENTS, int TEAM, int STRIDE, typename Write>
__device__ __forceinline__ void reduce(const float* results, u32 rows, Work& work, u32 block, float* own_partials,
                                       u32* arrived, Write write) {
    constexpr int THREADS = TEAM * LANES, SLOT = ROWS * STRIDE;
    __syncthreads();
    const u32 pieces = work.pieces, first_block = work.first_block;
    float* partial = own_partials + (block == first_block) * SLOT;
    for (int i = 2 * threadIdx.x; i < rows * COMPONENTS; i += 2 * THREADS) {
        const int q = i / COMPONENTS, d = i % COMPONENTS;
        const float* result = results + q * STRIDE;
        Sum sum;
#pragma unroll
        for (int w = 0; w < TEAM; w++) sum.max = fmaxf(sum.max, result[w * SLOT + COMPONENTS]);
#pragma unroll
        for (int w = 0; w < TEAM; w++) {
            const float* warp_result = result + w * SLOT;
            const float rescale = exp2_approx(warp_result[COMPONENTS] - sum.max);
            sum.add(*reinterpret_cast<const float2*>(warp_result + d), warp_result[COMPONENTS + 1], rescale);
        }
        if (pieces == 1) {
            write(q, d, sum);
        } else {
            *reinterpret_cast<float2*>(partial + q * STRIDE + d) = sum.value;
            if (d == 0)
                *reinterpret_cast<float2*>(partial + q * STRIDE + COMPONENTS) = make_float2(sum.max, sum.weight);
        }
    }
    if (pieces == 1) return;

    __syncthreads();
    if (threadIdx.x == 0) {
        work.last = atomic_add_acq_rel(arrived, 1) == pieces - 1;
        if (work.last) *arrived = 0; // for the next launch
    }
    __syncthreads();
    if (!work.last) return;
    // The entry is in slot 1 of its first block and in slot 0 of all others. `__ldcg` reads the partials from L2: L1 is
    // not coherent with the writes of other blocks.
    const float* first_partials = own_partials - (u64)(block - first_block) * 2 * SLOT;
    for (int i = 2 * threadIdx.x; i < rows * COMPONENTS; i += 2 * THREADS) {
        const int q = i / COMPONENTS, d = i % COMPONENTS;
        Sum sum;
        constexpr int IN_FLIGHT = ROWS > 2 ? 16 : 8; // limited by the registers that the attention loop leaves
        for (u32 base = 0; base < pieces; base += IN_FLIGHT) {
            float2 value[IN_FLIGHT], max_weight[IN_FLIGHT];
            const float previous_max = sum.max;
            const float* piece = first_partials + (u64)base * 2 * SLOT + q * STRIDE;
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const bool valid = base + p < pieces;
                const float* at = piece + p * 2 * SLOT + (p == 0 && base == 0 ? SLOT : 0);
                value[p] = valid ? __ldcg(reinterpret_cast<const float2*>(at + d)) : make_float2(0, 0);
                max_weight[p] =
                    valid ? __ldcg(reinterpret_cast<const float2*>(at + COMPONENTS)) : make_float2(NOTHING, 0);
            }
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) sum.max = fmaxf(sum.max, max_weight[p].x);
            sum.scale(exp2_approx(previous_max - sum.max));
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++)
                sum.add(value[p], max_weight[p].y, exp2_approx(max_weight[p].x - sum.max));
        }
        write(q, d, sum);
    }
}

// Merges partial softmax results (split-K attention): first those of a block's warps, then those of the blocks that
// share an entry of the work. No second kernel is needed: the last block to arrive merges and writes the output.
//
// A partial result of a query is the weighted sum of values, the maximum m of the scores (logarithms to base 2) and the
// sum of the weights 2^(score - m). Results are merged in the order of warps, then of blocks, whichever block arrives
// last, so the same inputs give the same bytes.
//
// More than MANY_RESULTS results, counted over blocks and queries, may be merged in two steps, first in groups of
// GROUP_BLOCKS blocks: one block takes 8 us to read the results of 132 blocks for 8 queries, since a multiprocessor
// reads 64 bytes per clock from L2. Below that, the second step costs more than it saves: 33 blocks with 4 queries took
// 14.3 us with it and 13.8 without, 132 blocks 10.3 and 13.2 (H200, 32,768 tokens).
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"

constexpr u32 GROUP_BLOCKS = 16, MANY_RESULTS = 192;

// Two adjacent components of a query's weighted sum of values, with the query's maximum and sum of weights.
struct Sum {
    float2 value = make_float2(0, 0);
    float max = NEG_INF, weight = 0;

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

// Called by all threads of a block: whether it is the last of `expected` blocks to arrive at the counter, which is 0
// before and after.
__device__ __forceinline__ bool is_last_of(Work& work, u32* counter, u32 expected) {
    __syncthreads();
    if (threadIdx.x == 0) {
        work.last = atomic_add_acq_rel(counter, 1) == expected - 1;
        if (work.last) *counter = 0; // for the next launch
    }
    __syncthreads();
    return work.last != 0;
}

// Merges `count` partial results of other blocks and calls `put(row, component, sum)`. They are STEP floats apart,
// except that the first one is offset by `shift` floats. `__ldcg` reads them from L2: L1 is not coherent with the
// writes of other blocks.
template <int ROWS, int COMPONENTS, int STRIDE, int STEP, int THREADS, typename Put>
__device__ __forceinline__ void merge(u32 rows, u32 count, const float* partials, int shift, Put put) {
    constexpr int PAIRS = 2, IN_FLIGHT = 16; // pairs of components per thread, results in flight
    for (int i = 2 * PAIRS * threadIdx.x; i < rows * COMPONENTS; i += 2 * PAIRS * THREADS) {
        const int q = i / COMPONENTS, d = i % COMPONENTS;
        Sum sums[PAIRS];
        for (u32 base = 0; base < count; base += IN_FLIGHT) {
            const float* results = partials + (u64)base * STEP + q * STRIDE;
            float2 value[IN_FLIGHT][PAIRS], max_weight[IN_FLIGHT];
            float max = sums[0].max;
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const bool valid = base + p < count;
                const float* result = results + p * STEP + (p == 0 && base == 0 ? shift : 0);
                max_weight[p] =
                    valid ? __ldcg(reinterpret_cast<const float2*>(result + COMPONENTS)) : make_float2(NEG_INF, 0);
                const float4 both =
                    valid ? __ldcg(reinterpret_cast<const float4*>(result + d)) : make_float4(0, 0, 0, 0);
                value[p][0] = make_float2(both.x, both.y), value[p][1] = make_float2(both.z, both.w);
            }
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) max = fmaxf(max, max_weight[p].x);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                sums[j].scale(exp2_approx(sums[j].max - max)), sums[j].max = max;
#pragma unroll
                for (int p = 0; p < IN_FLIGHT; p++)
                    sums[j].add(value[p][j], max_weight[p].y, exp2_approx(max_weight[p].x - max));
            }
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) put(q, d + 2 * j, sums[j]);
    }
}

// Called by all THREADS threads of a block.
// - `results`: [TEAM][ROWS][STRIDE] floats of shared memory, one row per query of each of TEAM partial results:
//   components, maximum, sum of weights. Only the first `rows` queries are used.
// - `own_partials`: [2][ROWS][STRIDE] floats of global memory; those of the next block follow. Two slots are enough,
//   since a block shares at most the first and the last entry of its range: slot 0 holds an entry that began in an
//   earlier block, slot 1 one that begins in this block. IN_GROUPS uses float COMPONENTS + 2 of the first row as the
//   counter of a group of blocks.
// - `arrived`: counter of the entry; like those of groups, it is 0 before and after.
// - `write(query, component, sum)` stores components `component` and `component + 1` of the output.
template <int ROWS, int COMPONENTS, int TEAM, int STRIDE, int THREADS = TEAM * LANES, bool IN_GROUPS = false,
          typename Write>
__device__ __forceinline__ void reduce(const float* results, u32 rows, Work& work, u32 block, float* own_partials,
                                       u32* arrived, Write write) {
    constexpr int SLOT = ROWS * STRIDE;
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

    if constexpr (IN_GROUPS) {
        constexpr int STEP = 2 * SLOT;
        static_assert(STRIDE >= COMPONENTS + 3 && COMPONENTS % 4 == 0, "room for the counter of a group");
        // The last group has 2 to GROUP_BLOCKS + 1 blocks. The result of a group goes to slot 1 of its first block, or
        // of the second one in the first group: that block has no other entry.
        if (pieces * ROWS > MANY_RESULTS) {
            float* first_partials = own_partials - (u64)(block - first_block) * STEP;
            const u32 groups = (pieces - 1 + GROUP_BLOCKS - 1) / GROUP_BLOCKS,
                      group = min((block - first_block) / GROUP_BLOCKS, groups - 1);
            const u32 first = group * GROUP_BLOCKS, count = group == groups - 1 ? pieces - first : GROUP_BLOCKS;
            float *partials = first_partials + (u64)first * STEP, *merged = partials + (group == 0 ? STEP : 0) + SLOT;
            const int shift = group == 0 ? SLOT : 0;
            if (!is_last_of(work, reinterpret_cast<u32*>(partials + shift + COMPONENTS + 2), count)) return;
            merge<ROWS, COMPONENTS, STRIDE, STEP, THREADS>(
                rows, count, partials, shift, [&](u32 row, int component, const Sum& sum) {
                    float* result = merged + row * STRIDE;
                    *reinterpret_cast<float2*>(result + component) = sum.value;
                    if (component == 0)
                        *reinterpret_cast<float2*>(result + COMPONENTS) = make_float2(sum.max, sum.weight);
                });
            if (is_last_of(work, arrived, groups))
                merge<ROWS, COMPONENTS, STRIDE, STEP*(int)GROUP_BLOCKS, THREADS>(rows, groups, first_partials + SLOT,
                                                                                 STEP, write);
            return;
        }
        // With 8 queries, the loop below made ptxas schedule the loop over tiles differently, which took 2 % longer.
        if constexpr (ROWS > 4) {
            const float* first_partials = own_partials - (u64)(block - first_block) * STEP;
            if (is_last_of(work, arrived, pieces))
                merge<ROWS, COMPONENTS, STRIDE, STEP, THREADS>(rows, pieces, first_partials, SLOT, write);
            return;
        }
    }
    if (!is_last_of(work, arrived, pieces)) return;
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
                    valid ? __ldcg(reinterpret_cast<const float2*>(at + COMPONENTS)) : make_float2(NEG_INF, 0);
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

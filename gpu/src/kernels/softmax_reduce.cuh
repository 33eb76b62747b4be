// From the softmax of warps to that of a block, and from those of the blocks that share an entry of the work to its
// output.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "scheduler.cuh"

// Two components of a query's sum of values, with maximum (of the logarithms to base 2) and sum of weights.
struct Sum {
    float2 value = make_float2(0, 0);
    float max = NOTHING, weight = 0;

    __device__ __forceinline__ void scale(float factor) { value.x *= factor, value.y *= factor, weight *= factor; }

    __device__ __forceinline__ void add(const float2& other, float other_weight, float factor) {
        value.x += factor * other.x, value.y += factor * other.y, weight += factor * other_weight;
    }

    // Both components over the sum of weights, as elements; zeros for no tokens.
    __device__ __forceinline__ u32 normalized() const {
        const float divisor = weight == 0 ? 1 : weight;
        return pack_elements(value.x / divisor, value.y / divisor);
    }

    __device__ __forceinline__ float log_sum_exp() const {
        return weight == 0 ? -infinity() : (max + log2f(weight)) * LN_2;
    }
};

// `results` are [TEAM warps][ROWS queries][STRIDE] floats of shared memory: components, maximum, sum of weights; the
// first `rows` queries count. A block shares at most the first and the last entry of its part with others, so it has
// two places of ROWS rows each, at `mine`, and those of the next block follow. `write` takes a query, a component and
// the Sum of it and the next. Reduced in the order of warps and blocks, whoever is last.
template <int ROWS, int COMPONENTS, int TEAM, int STRIDE, typename Write>
__device__ __forceinline__ void reduce(const float* results, u32 rows, Work& work, u32 block, float* mine, u32* arrived,
                                       Write write) {
    constexpr int THREADS = TEAM * LANES, PLACE = ROWS * STRIDE;
    __syncthreads();
    const u32 pieces = work.pieces, first_block = work.first_block;
    float* partial = mine + (block == first_block) * PLACE;
    for (int i = 2 * threadIdx.x; i < rows * COMPONENTS; i += 2 * THREADS) {
        const int q = i / COMPONENTS, d = i % COMPONENTS;
        const float* result = results + q * STRIDE;
        Sum sum;
#pragma unroll
        for (int w = 0; w < TEAM; w++) sum.max = fmaxf(sum.max, result[w * PLACE + COMPONENTS]);
#pragma unroll
        for (int w = 0; w < TEAM; w++) {
            const float* of_warp = result + w * PLACE;
            const float keep = exp2_approx(of_warp[COMPONENTS] - sum.max);
            sum.add(*reinterpret_cast<const float2*>(of_warp + d), of_warp[COMPONENTS + 1], keep);
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
    // To the first block the entry was its last, to the others their first.
    const float* of_first = mine - (u64)(block - first_block) * 2 * PLACE;
    for (int i = 2 * threadIdx.x; i < rows * COMPONENTS; i += 2 * THREADS) {
        const int q = i / COMPONENTS, d = i % COMPONENTS;
        Sum sum;
        constexpr int IN_FLIGHT = ROWS > 2 ? 16 : 8; // by the registers that the warps leave
        for (u32 base = 0; base < pieces; base += IN_FLIGHT) {
            float2 value[IN_FLIGHT], max_weight[IN_FLIGHT];
            const float before = sum.max;
            const float* piece = of_first + (u64)base * 2 * PLACE + q * STRIDE;
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const bool there = base + p < pieces;
                const float* at = piece + p * 2 * PLACE + (p == 0 && base == 0 ? PLACE : 0);
                value[p] = there ? __ldcg(reinterpret_cast<const float2*>(at + d)) : make_float2(0, 0);
                max_weight[p] =
                    there ? __ldcg(reinterpret_cast<const float2*>(at + COMPONENTS)) : make_float2(NOTHING, 0);
            }
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) sum.max = fmaxf(sum.max, max_weight[p].x);
            sum.scale(exp2_approx(before - sum.max));
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++)
                sum.add(value[p], max_weight[p].y, exp2_approx(max_weight[p].x - sum.max));
        }
        write(q, d, sum);
    }
}

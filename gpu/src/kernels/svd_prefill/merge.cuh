// Merges the results of blocks that share a row block (split-K attention), warp by warp: the last warp to arrive adds
// up all of them, in the order of the parts, so that the same inputs give the same bytes. No warp waits for another.
//
// A thread's result is `length` weighted sums of values, accumulators of m16n8 products: of four, the first two are of
// row g, the others of row g + 8. The rows' maxima and the thread's parts of the sums of their weights follow. A warp's
// results lie as the threads hold them, four floats per lane in turn.
//
// Results are merged after a block's last part. Within the loop over row blocks, this code made ptxas spill in the
// sm_80 kernel, or order its loop so that it took 5 % longer.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

// Floats of a warp's result.
__device__ constexpr u32 result_floats(u32 length) { return (length + 4) * LANES; }

// Stores a thread's part of a result, of LENGTH sums.
template <int LENGTH>
__device__ __forceinline__ void store_result(float* result, const float* sums, const float (&max)[2],
                                             const float (&weight)[2]) {
    float4* to = reinterpret_cast<float4*>(result) + threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < LENGTH / 4; i++)
        __stcg(to + i * LANES, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    __stcg(to + LENGTH / 4 * LANES, make_float4(max[0], max[1], weight[0], weight[1]));
}

// Whether this warp, which has stored its results, is the last of `expected` to arrive at the counter, which is 0
// before and after. If so, it may read the results of all of them.
__device__ __forceinline__ bool is_last_warp(u32* counter, u32 expected) {
    __syncwarp();
    bool last = false;
    if (threadIdx.x % LANES == 0) {
        last = atomic_add_acq_rel(counter, 1) == expected - 1;
        if (last) *counter = 0; // for the next launch
    }
    last = warp_uniform(last);
    __syncwarp();
    return last;
}

// The sum over the four lanes that hold a row of an accumulator.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

// Writes the thread's components of chunk i, of 8, to rows g and g + 8 of a warp, of which `rows` exist.
__device__ __forceinline__ void write_chunk(u16* out, u64 row_stride, u32 rows, u32 i, u32 upper, u32 lower) {
    const u32 g = threadIdx.x % LANES / 4, l = threadIdx.x % 4;
    u32* at = reinterpret_cast<u32*>(out + g * row_stride + 8 * i + 2 * l);
    if (g < rows) *at = upper;
    if (g + 8 < rows) *(at + 4 * row_stride) = lower;
}

// Writes the rows of a warp, of which `rows` exist: `rank` components of the means of the values of all parts, which
// have `length` sums each. `results` is the address of the first part's result, and `stride` the distance of the others
// in floats.
__device__ __forceinline__ void merge_results(const float* results, u32 stride, u32 parts, u32 length, u32 rank,
                                              u16* out, u64 row_stride, u32 rows) {
    float4 sums[DIM / 8] = {};
    float max[2] = {NEG_INF, NEG_INF}, weight[2] = {};
#pragma unroll 1
    for (u32 part = 0; part < parts; part++) {
        // L1 is not coherent with the writes of other blocks.
        const float4* from = reinterpret_cast<const float4*>(results + part * stride) + threadIdx.x % LANES;
        const float4 stats = __ldcg(from + length / 4 * LANES);
        float4 other[DIM / 8];
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) other[i] = 4 * i < length ? __ldcg(from + i * LANES) : float4{};
        const float new_max[2] = {fmaxf(max[0], stats.x), fmaxf(max[1], stats.y)};
        const float old[2] = {exp2_approx(max[0] - new_max[0]), exp2_approx(max[1] - new_max[1])};
        const float factor[2] = {exp2_approx(stats.x - new_max[0]), exp2_approx(stats.y - new_max[1])};
        max[0] = new_max[0], max[1] = new_max[1];
        weight[0] = weight[0] * old[0] + stats.z * factor[0], weight[1] = weight[1] * old[1] + stats.w * factor[1];
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) {
            sums[i].x = sums[i].x * old[0] + other[i].x * factor[0];
            sums[i].y = sums[i].y * old[0] + other[i].y * factor[0];
            sums[i].z = sums[i].z * old[1] + other[i].z * factor[1];
            sums[i].w = sums[i].w * old[1] + other[i].w * factor[1];
        }
    }
    const float x = 1 / row_sum(weight[0]), y = 1 / row_sum(weight[1]);
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++)
        if (8 * i < rank)
            write_chunk(out, row_stride, rows, i, pack_elements(sums[i].x * x, sums[i].y * x),
                        pack_elements(sums[i].z * y, sums[i].w * y));
}

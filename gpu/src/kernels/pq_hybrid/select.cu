// Second part of hybrid attention: selects the tokens of the largest weight of each row, from the scores of scores.cu.
//
// shape.cuh has the compile-time shape and explains the method. Three kernels of grid (chunk of CHUNK tokens, row),
// SELECT_THREADS threads; `collect` and `write` are those of radix.cuh. The weight of a token is that of
// pq_core::combine_group_into: the sum or the maximum of the weights of the group's queries.
#include "pq_hybrid/shape.cuh"
#include "pq_search/radix.cuh"

__device__ __forceinline__ SelectRange range_of(const Arguments& a, u32 row) {
    const u32 sequence = row / a.heads;
    return {a.lengths[sequence], min(a.ks[sequence], a.selected_len), 0, 0};
}

__device__ __forceinline__ Selection selection_of(const Arguments& a, u32 row) {
    return {Scratch(a).selection, (u64)a.batch * a.heads, row, a.chunks};
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_keys(const Arguments a) {
    __shared__ float max[GROUP], scale[GROUP];
    __shared__ u32 counts[HIGH_BUCKETS];
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SELECT_THREADS) counts[i] = 0;
    const SelectRange range = range_of(a, row);
    pdl_wait();
    pdl_trigger();
    const Scratch scratch(a);
    const Selection work = selection_of(a, row);
    if (threadIdx.x == 0) work.chunk_counts[blockIdx.x] = 0;
    if (first >= range.n) return;
    if (threadIdx.x < GROUP) {
        const Stats stats = scratch.stats[row * VEC + threadIdx.x];
        max[threadIdx.x] = stats.max * LN_2, scale[threadIdx.x] = 1.f / stats.sum;
    }
    // A warp has a tile at a time, in the order of its scores; the loads of BATCH tiles overlap.
    constexpr int WARPS = SELECT_THREADS / LANES, PASSES = CHUNK / SELECT_THREADS, BATCH = GROUP <= 4 ? PASSES : 4;
    const u32 place = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const float* scores =
        scratch.scores + (((u64)row * a.chunks + blockIdx.x) * (CHUNK / TILE) + warp) * GROUP * TILE + place;
#pragma unroll
    for (int batch = 0; batch < PASSES; batch += BATCH) {
        float score[BATCH][GROUP];
#pragma unroll
        for (int i = 0; i < BATCH * GROUP; i++)
            score[i / GROUP][i % GROUP] = scores[((batch + i / GROUP) * WARPS * GROUP + i % GROUP) * TILE];
        if (batch == 0) __syncthreads(); // statistics
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const u32 token = first + ((batch + i) * WARPS + warp) * TILE + token_at(place);
            float weight = 0;
#pragma unroll
            for (int q = 0; q < GROUP; q++) weight = combine(weight, weight_of(score[i][q] * LN_2, max[q], scale[q]));
            if (token >= range.n) continue;
            const u32 key = key_of(weight, max, scale, [&](int q) { return score[i][q] * LN_2; });
            work.keys[token] = key;
            atomicAdd(&counts[key >> 2 * LOW_BITS], 1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SELECT_THREADS)
        if (counts[i]) atomicAdd(&work.row->histogram[i], counts[i]);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_collect(const Arguments a) {
    const SelectRange range = range_of(a, blockIdx.y);
    pdl_wait();
    pdl_trigger();
    collect(range, selection_of(a, blockIdx.y));
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_write(const Arguments a) {
    const SelectRange range = range_of(a, blockIdx.y);
    pdl_wait();
    pdl_trigger();
    const Output out{a.selected + (u64)blockIdx.y * a.selected_len, a.selected_len, range};
    u8* mask = Scratch(a).mask + (u64)blockIdx.y * a.chunks * (CHUNK / 8);
    write(range, selection_of(a, blockIdx.y), out, a.tickets, mask);
}

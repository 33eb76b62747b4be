// Second part of hybrid attention: selects the tokens of the largest weight of each row, from the scores of scores.cu.
//
// shape.cuh has the compile-time shape and explains the method. Three kernels of grid (chunk of CHUNK tokens, row),
// SELECT_THREADS threads; `collect` and `write` are those of radix.cuh. If ADAPTIVE, `count` runs before `collect`;
// only the first block of a row counts. On sm_90 select_sm90.cu replaces them.
#include "pq_hybrid/budget.cuh"

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_keys(const SelectArguments a) {
    __shared__ Normalizers normalizers;
    __shared__ u32 counts[HIGH_BUCKETS];
    const u32 row = blockIdx.y, first = blockIdx.x * CHUNK;
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SELECT_THREADS) counts[i] = 0;
    const SelectRange range = range_of(a, row);
    pdl_wait();
    pdl_trigger();
    const Selection work = selection_of(a, row);
    if (threadIdx.x == 0) work.chunk_counts[blockIdx.x] = 0;
    if (first >= range.n) return;
    if (threadIdx.x < GROUP * LANES) normalizers.load(a, row);
    // A warp processes one tile at a time, in the order of its scores; the loads of BATCH tiles overlap.
    constexpr int WARPS = SELECT_THREADS / LANES, PASSES = CHUNK / SELECT_THREADS, BATCH = GROUP <= 4 ? 4 : 2;
    const u32 place = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const ScoredTile* tiles = a.scores_of(row) + first / TILE + warp;
#pragma unroll
    for (int batch = 0; batch < PASSES; batch += BATCH) {
        u16 code[BATCH][GROUP];
        float level[BATCH][GROUP];
#pragma unroll
        for (int i = 0; i < BATCH * GROUP; i++) {
            const ScoredTile& tile = tiles[(batch + i / GROUP) * WARPS];
            code[i / GROUP][i % GROUP] = tile.scores[i % GROUP][place];
            level[i / GROUP][i % GROUP] = tile.levels[i % GROUP];
        }
        if (batch == 0) __syncthreads(); // normalizers
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const u32 token = first + ((batch + i) * WARPS + warp) * TILE + token_at(place);
            if (token >= range.n) continue;
            float score[GROUP], of_tile[GROUP];
#pragma unroll
            for (int q = 0; q < GROUP; q++)
                score[q] = near_score(code[i][q]), of_tile[q] = level[i][q] - normalizers.log_sum[q] - ORIGIN;
            const float weight = Normalizers::weight_of(score, of_tile);
            const u32 key =
                normalizers.key_of_any(weight, [&](int q) { return any_score(code[i][q]) + level[i][q]; });
            work.keys[token] = key;
            atomicAdd(&counts[key >> 2 * LOW_BITS], 1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HIGH_BUCKETS; i += SELECT_THREADS)
        if (counts[i]) atomicAdd(&work.row->histogram[i], counts[i]);
}

#ifdef ADAPTIVE
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_count(const SelectArguments a) {
    __shared__ Normalizers normalizers;
    __shared__ Budget budget;
    const u32 row = blockIdx.y, warp = threadIdx.x / LANES;
    const SelectRange range = range_of(a, row);
    pdl_wait();
    pdl_trigger();
    if (blockIdx.x > 0) return;
    if (warp < GROUP)
        normalizers.load(a, row);
    else
        budget.load(a, row, 0, 1);
    __syncthreads();
    if (warp < GROUP) {
        const Stats stats = budget.block_stats(warp);
        if (threadIdx.x % LANES == 0) budget.of_block[0][warp] = stats;
    }
    __syncthreads();
    if (warp > 0) return;
    const u32 rows = budget.find(a, row, selection_of(a, row).row->histogram, range.n, normalizers, 1);
    if (threadIdx.x == 0) put_found(a, row, min(range.k, rows));
}
#endif

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_collect(const SelectArguments a) {
    const SelectRange most = range_of(a, blockIdx.y);
    pdl_wait();
    pdl_trigger();
    collect(found_range_of(a, blockIdx.y, most), selection_of(a, blockIdx.y));
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) pq_hybrid_write(const SelectArguments a) {
    const SelectRange most = range_of(a, blockIdx.y);
    pdl_wait();
    pdl_trigger();
    const SelectRange range = found_range_of(a, blockIdx.y, most);
    write(range, selection_of(a, blockIdx.y), SelectedOutput(a, blockIdx.y, range), a.tickets);
}

// Nearest centroids of a tile of points in one subspace: a register-tiled matrix product whose results are only
// compared. Shared by pq_encode_generic.cu and pq_train.cu.
//
// CPU twin: the assignment in pq_core::encode_into. Compile-time shape: DSUB, KSUB; ELEMENT of the vectors. A block of
// THREADS threads has TILE points; a thread has 8 of them and 8 of 64 centroids, so that four 16-byte loads from shared
// memory serve 64 multiply-adds. Rows of the tiles are padded by four floats against bank conflicts.
// Floor: KSUB * (DSUB + 3) operations per point. Bound by instruction issue: 72 % of the slots at 64 components (ncu,
// with an earlier, slower load of points), where 67 of 150 million instructions were multiply-adds.
#pragma once
#include "element.cuh"

constexpr int TILE = 256, THREADS = 256, WARPS = THREADS / LANES;
// COLUMNS threads share the same points; PER_THREAD is the number of points, and of centroids, of a thread.
constexpr int COLUMNS = 8, PER_THREAD = 8;
constexpr int CENTROIDS = COLUMNS * PER_THREAD; // centroids of an iteration
constexpr int STEP = DSUB < 32 ? DSUB : 32;     // components of a staged centroid tile
constexpr int SHARING = THREADS / CENTROIDS;    // threads that sum the norm of a centroid
constexpr int PADDED_POINTS = TILE + 4, PADDED_CENTROIDS = CENTROIDS + 4;

struct NearestShared {
    float points[DSUB][PADDED_POINTS];
    float centroids[STEP][PADDED_CENTROIDS];
    float half_norms[CENTROIDS];
    u16 index[TILE];
    float distance[TILE]; // half the squared distance minus half the point's squared norm
};

// Loads `count` rows of `stride` elements into the tile and sets its other points to 0. NaN and infinity count as 0.
__device__ __forceinline__ void load_points(NearestShared& shared, const Element* rows, u64 stride, u32 count) {
    __syncthreads();
    auto put = [&](u32 point, u32 d, Element element) {
        const float x = to_float(element);
        shared.points[d][point] = fabsf(x) < infinity() ? x : 0;
    };
    if (DSUB % 8 == 0) {
        // A warp loads 8 components of 4 points at a time, and writes them to different banks.
        const u32 d = threadIdx.x % 8, first = threadIdx.x / 8;
        const Element* from = rows + first * stride + d;
#pragma unroll 1
        for (u32 point = first; point < TILE; point += THREADS / 8, from += THREADS / 8 * stride)
#pragma unroll
            for (int part = 0; part < DSUB; part += 8) put(point, part + d, point < count ? from[part] : Element(0));
    } else {
        for (int i = threadIdx.x; i < TILE * DSUB; i += THREADS) {
            const u32 point = i / DSUB, d = i % DSUB;
            put(point, d, point < count ? rows[point * stride + d] : Element(0));
        }
    }
}

// Fills `index` and `distance` of the tile; ties go to the lower index. `codebook` is [KSUB][DSUB].
__device__ __forceinline__ void find_nearest(NearestShared& shared, const float* codebook) {
    const int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    float nearest[PER_THREAD];
    u32 index[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) nearest[i] = infinity(), index[i] = 0;
    for (int base = 0; base < KSUB; base += CENTROIDS) {
        float distance[PER_THREAD][PER_THREAD];
        for (int first = 0; first < DSUB; first += STEP) {
            __syncthreads();
            for (int i = threadIdx.x; i < CENTROIDS * STEP; i += THREADS) {
                const int c = i / STEP, d = i % STEP;
                shared.centroids[d][c] =
                    base + c < KSUB && first + d < DSUB ? codebook[(base + c) * DSUB + first + d] : 0;
            }
            __syncthreads();
            const int c = threadIdx.x / SHARING;
            float norm = 0;
            for (int d = threadIdx.x % SHARING; d < STEP; d += SHARING)
                norm += shared.centroids[d][c] * shared.centroids[d][c] / 2;
#pragma unroll
            for (int step = 1; step < SHARING; step *= 2) norm += __shfl_xor_sync(FULL, norm, step);
            if (threadIdx.x % SHARING == 0) shared.half_norms[c] = first == 0 ? norm : shared.half_norms[c] + norm;
            if (first == 0)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                    for (int c = 0; c < PER_THREAD; c++) distance[i][c] = 0;
#pragma unroll 2
            for (int d = 0; d < STEP; d++) {
                if (DSUB % STEP && first + d >= DSUB) break;
                float x[PER_THREAD], y[PER_THREAD];
#pragma unroll
                for (int i = 0; i < PER_THREAD; i += 4) {
                    *reinterpret_cast<float4*>(x + i) =
                        *reinterpret_cast<const float4*>(&shared.points[first + d][row * PER_THREAD + i]);
                    *reinterpret_cast<float4*>(y + i) =
                        *reinterpret_cast<const float4*>(&shared.centroids[d][COLUMNS * i + 4 * column]);
                }
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                    for (int c = 0; c < PER_THREAD; c++) distance[i][c] -= x[i] * y[c];
            }
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++) { // ascending: ties go to the lower index
            const int centroid = c / 4 * 4 * COLUMNS + 4 * column + c % 4;
            const float half_norm = base + centroid < KSUB ? shared.half_norms[centroid] : infinity();
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                const float x = half_norm + distance[i][c];
                if (x < nearest[i]) nearest[i] = x, index[i] = base + centroid;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
#pragma unroll
        for (int step = 1; step < COLUMNS; step *= 2) {
            const float other = __shfl_xor_sync(FULL, nearest[i], step);
            const u32 other_index = __shfl_xor_sync(FULL, index[i], step);
            if (other < nearest[i] || (other == nearest[i] && other_index < index[i]))
                nearest[i] = other, index[i] = other_index;
        }
        if (column == 0)
            shared.index[row * PER_THREAD + i] = (u16)index[i], shared.distance[row * PER_THREAD + i] = nearest[i];
    }
    __syncthreads();
}

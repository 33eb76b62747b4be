// Lloyd's k-means in every subspace of many sets of vectors.
//
// CPU twin: pq_core::train_batch, from given centroids. Compile-time shape: M, DSUB, KSUB; ELEMENT. Four kernels of
// THREADS threads; a pair is a subspace of a set:
//
// - `start`, grid (4, M, set): initial centroids, cleared sums and state.
// - `largest`, grid (up to 32, M, set): the largest finite magnitude of the pair.
// - `assign`, grid (part of PART points, M, set), in each iteration: adds points to the sums of their nearest
// centroids.
// - `update`, grid (M, set), in each iteration: computes new centroids, and decides whether the pair is done.
//
// Sums are fixed-point integers, in units of 2^-20 of the largest magnitude: 32 bits within a block, 64 bits between
// blocks. Integer addition is associative, so two runs give the same bytes.
// Bounds: pq_nearest.cuh. Not tried yet: f16 tensor cores, with each centroid as a sum of two halves.
#include "pq_nearest.cuh"
#include "warp.cuh"

constexpr int PART = 2048; // points of a block: a sum of PART magnitudes below 2^20 fits 31 bits
constexpr float FIXED_POINT_MAX = (1 << 20) - 1;

// State of a pair between kernels.
struct State {
    u32 largest; // bits of the float: non-negative floats compare like integers
    u32 done;
    double error;
};

struct Arguments {
    const Element* vectors; // [set][vector][M * DSUB], with the strides below
    const u32* starts;      // [KSUB]: indices of the vectors that are the initial centroids, or null
    float* centroids;       // [set][M][KSUB][DSUB]
    double* errors;         // [set][M], or null
    State* states;          // [set][M]
    long long* sums;        // [set][M][KSUB][DSUB + 1]; the last is the count
    double* part_errors;    // [set][M][parts]
    u64 set_stride, vector_stride;
    double tolerance;
    u32 n, parts;
};

extern "C" __global__ void __launch_bounds__(THREADS) pq_train_start(const Arguments a) {
    const u64 pair = blockIdx.z * (u64)M + blockIdx.y;
    const Element* rows = a.vectors + blockIdx.z * a.set_stride + blockIdx.y * DSUB;
    if (a.starts)
        for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < KSUB * DSUB; i += gridDim.x * THREADS) {
            const float x = to_float(rows[a.starts[i / DSUB] * a.vector_stride + i % DSUB]);
            a.centroids[pair * KSUB * DSUB + i] = fabsf(x) < infinity() ? x : 0;
        }
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < KSUB * (DSUB + 1); i += gridDim.x * THREADS)
        a.sums[pair * KSUB * (DSUB + 1) + i] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) a.states[pair] = {0, 0, (double)infinity()};
}

extern "C" __global__ void __launch_bounds__(THREADS) pq_train_largest(const Arguments a) {
    const Element* rows = a.vectors + blockIdx.z * a.set_stride + blockIdx.y * DSUB;
    float largest = 0;
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < (u64)a.n * DSUB; i += gridDim.x * THREADS) {
        const float x = fabsf(to_float(rows[i / DSUB * a.vector_stride + i % DSUB]));
        if (x < infinity()) largest = fmaxf(largest, x);
    }
    largest = warp_max(largest);
    if (threadIdx.x % LANES == 0) atomicMax(&a.states[blockIdx.z * M + blockIdx.y].largest, __float_as_uint(largest));
}

struct Shared {
    NearestShared nearest;
    int sums[KSUB * DSUB];
    u32 counts[KSUB];
    double errors[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host computes it, too");

extern __shared__ __align__(16) Shared shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 2) pq_train_assign(const Arguments a) {
    const u64 pair = blockIdx.z * (u64)M + blockIdx.y;
    const State state = a.states[pair];
    if (state.done) return;
    NearestShared& nearest = shared->nearest;
    const u32 first = blockIdx.x * PART, end = min(a.n, first + PART);
    const float largest = __uint_as_float(state.largest), to_fixed = largest > 0 ? FIXED_POINT_MAX / largest : 0;
    for (int i = threadIdx.x; i < KSUB * DSUB; i += THREADS) shared->sums[i] = 0;
    for (int i = threadIdx.x; i < KSUB; i += THREADS) shared->counts[i] = 0;
    double error = 0;
    for (u32 start = first; start < end; start += TILE) {
        const u32 count = min(end - start, TILE);
        const Element* rows = a.vectors + blockIdx.z * a.set_stride + start * a.vector_stride + blockIdx.y * DSUB;
        load_points(nearest, rows, a.vector_stride, count);
        find_nearest(nearest, a.centroids + pair * KSUB * DSUB);
        const u32 point = threadIdx.x;
        if (point < count) {
            float square = 0;
#pragma unroll 8
            for (int d = 0; d < DSUB; d++) square += nearest.points[d][point] * nearest.points[d][point];
            error += (double)square + 2. * (double)nearest.distance[point];
            atomicAdd(&shared->counts[nearest.index[point]], 1);
#pragma unroll 4
            for (int i = 0; i < DSUB; i++) {
                // Where DSUB is a multiple of 32, the order of the components is rotated by the point, so that lanes
                // with the same centroid add to different words.
                const int d = DSUB % LANES ? i : (i + (int)point) % DSUB;
                atomicAdd(&shared->sums[nearest.index[point] * DSUB + d],
                          __float2int_rn(nearest.points[d][point] * to_fixed));
            }
        }
    }
    __syncthreads();
    unsigned long long* sums = (unsigned long long*)a.sums + pair * KSUB * (DSUB + 1);
    for (int i = threadIdx.x; i < KSUB * (DSUB + 1); i += THREADS) {
        const int c = i / (DSUB + 1), d = i % (DSUB + 1);
        const long long sum = d < DSUB ? (long long)shared->sums[c * DSUB + d] : (long long)shared->counts[c];
        if (sum) atomicAdd(sums + i, (unsigned long long)sum);
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) error += __shfl_xor_sync(FULL, error, step);
    if (threadIdx.x % LANES == 0) shared->errors[threadIdx.x / LANES] = error;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = 0; i < WARPS; i++) sum += shared->errors[i];
        a.part_errors[pair * a.parts + blockIdx.x] = sum;
    }
}

// A centroid without points takes half of the largest cluster, as on the CPU. Called by one warp.
__device__ void split_into_empty(float* centroids, u32* counts) {
    constexpr float NUDGE = 1.f / 1024;
    const u32 lane = threadIdx.x;
    for (int c = 0; c < KSUB; c++) {
        __syncwarp();
        if (counts[c] > 0) continue;
        u64 best = 0; // count in the high word; the low word prefers the lower index
        for (u32 i = lane; i < KSUB; i += LANES) {
            const u64 here = (u64)counts[i] << 32 | (KSUB - 1 - i);
            best = here > best ? here : best;
        }
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) {
            const u64 other = __shfl_xor_sync(FULL, best, step);
            best = other > best ? other : best;
        }
        const u32 from = KSUB - 1 - (u32)best, count = (u32)(best >> 32);
        for (u32 d = lane; d < DSUB; d += LANES) {
            const float y = centroids[from * DSUB + d], nudge = d % 2 ? -NUDGE : NUDGE;
            centroids[c * DSUB + d] = y * (1 + nudge);
            centroids[from * DSUB + d] = y * (1 - nudge);
        }
        __syncwarp();
        if (lane == 0) counts[c] = count / 2, counts[from] = count - count / 2;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pq_train_update(const Arguments a) {
    __shared__ u32 counts[KSUB];
    const u64 pair = blockIdx.y * (u64)M + blockIdx.x;
    State& state = a.states[pair];
    if (state.done) return;
    float* centroids = a.centroids + pair * KSUB * DSUB;
    long long* sums = a.sums + pair * KSUB * (DSUB + 1);
    const double from_fixed = (double)__uint_as_float(state.largest) / (double)FIXED_POINT_MAX;
    for (int c = threadIdx.x; c < KSUB; c += THREADS) counts[c] = (u32)sums[c * (DSUB + 1) + DSUB];
    __syncthreads();
    for (int i = threadIdx.x; i < KSUB * DSUB; i += THREADS) {
        const int c = i / DSUB;
        if (counts[c]) centroids[i] = (float)((double)sums[c * (DSUB + 1) + i % DSUB] * from_fixed / counts[c]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < KSUB * (DSUB + 1); i += THREADS) sums[i] = 0;
    if (threadIdx.x < LANES && a.n > KSUB) split_into_empty(centroids, counts);
    if (threadIdx.x == 0) {
        double now = 0;
        for (u32 part = 0; part < a.parts; part++) now += a.part_errors[pair * a.parts + part];
        now = fmax(now, 0.);
        state.done = state.error - now <= a.tolerance * now;
        state.error = fmin(now, state.error);
        if (a.errors) a.errors[pair] = state.error;
    }
}

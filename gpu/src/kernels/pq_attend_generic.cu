// Decode attention on product-quantized keys and values of any shape, with lookup tables in global memory, on codes in
// the layout of pq-core. It supports the shapes that pq_attend does not, in particular codes of more than 8 bits, whose
// tables do not fit shared memory. It is not a fast kernel.
//
// CPU twin: pq_core::attend_into, with its scales and bias. Compile-time shape: DIM, GROUP, KEY_M, KEY_BITS, VALUE_M,
// VALUE_BITS.
// Launch: grid (head, sequence), THREADS threads. A block processes CHUNK tokens at a time: a thread scores one token
// for all queries, a warp computes the softmax of one query at a time, and a thread sums OUTPUTS components. All
// arithmetic is in f32.
#include "pq_codes.cuh"
#include "warp.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES, CHUNK = THREADS; // CHUNK: tokens of an iteration
constexpr int KEY_KSUB = 1 << KEY_BITS, VALUE_KSUB = 1 << VALUE_BITS, DSUB = DIM / VALUE_M;
constexpr int OUTPUTS = (GROUP * DIM + THREADS - 1) / THREADS; // output components of a thread

struct Arguments {
    const float* luts;         // [sequence][head][GROUP][KEY_M][KEY_KSUB]
    const u8* key_codes;       // [sequence][head][key_stride bytes]: codes in the layout of pq_codes.cuh
    const u8* value_codes;     // [sequence][head][value_stride bytes]
    const float* centroids;    // [head][VALUE_M][VALUE_KSUB][DSUB]
    const u32* lengths;        // [sequence]
    const float* key_scales;   // [sequence][head][capacity], or null
    const float* value_scales; // [sequence][head][capacity], or null
    const float* bias;         // [sequence][head][GROUP][capacity], or null
    float* out;                // [sequence][head][GROUP][DIM]
    float* log_sum_exp;        // [sequence][head][GROUP], or null
    u64 key_stride, value_stride, capacity;
};

template <int M, int BITS>
__device__ __forceinline__ u32 code_at(const u8* codes, u32 token, int subspace) {
    return code_of<BITS>(run_of<M, BITS>(codes, token, subspace), token % BLOCK_TOKENS);
}

__shared__ float weights[GROUP][CHUNK];
__shared__ float max_of[GROUP], sum_of[GROUP], rescale[GROUP];

extern "C" __global__ void __launch_bounds__(THREADS) pq_attend_generic(const Arguments a) {
    const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
    const u64 head = (u64)blockIdx.y * gridDim.x + blockIdx.x; // index over all sequences
    const u32 length = a.lengths[blockIdx.y];
    const float* luts = a.luts + head * GROUP * KEY_M * KEY_KSUB;
    const float* centroids = a.centroids + (u64)blockIdx.x * VALUE_M * VALUE_KSUB * DSUB;
    const u8* keys = a.key_codes + head * a.key_stride;
    const u8* values = a.value_codes + head * a.value_stride;
    float sums[OUTPUTS] = {};
    if (thread < GROUP) max_of[thread] = NEG_INF, sum_of[thread] = 0;
    __syncthreads();

    for (u32 first = 0; first < length; first += CHUNK) {
        const u32 count = min(length - first, (u32)CHUNK), token = first + thread;
        float scores[GROUP] = {};
        if (thread < count) {
            for (int j = 0; j < KEY_M; j++) {
                const u32 code = code_at<KEY_M, KEY_BITS>(keys, token, j);
#pragma unroll
                for (int g = 0; g < GROUP; g++) scores[g] += luts[((u64)g * KEY_M + j) * KEY_KSUB + code];
            }
            const float scale = a.key_scales ? a.key_scales[head * a.capacity + token] : 1;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float bias = a.bias ? a.bias[(head * GROUP + g) * a.capacity + token] : 0;
                scores[g] = (scores[g] * scale + bias) * LOG2_E;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) weights[g][thread] = thread < count ? scores[g] : -infinity();
        __syncthreads();

        for (int g = warp; g < GROUP; g += WARPS) {
            float new_max = NEG_INF, sum = 0;
            for (int t = lane; t < CHUNK; t += LANES) new_max = fmaxf(new_max, weights[g][t]);
            new_max = fmaxf(warp_max(new_max), max_of[g]);
            for (int t = lane; t < CHUNK; t += LANES) {
                const float weight = exp2f(weights[g][t] - new_max);
                const float scale = a.value_scales && t < count ? a.value_scales[head * a.capacity + first + t] : 1;
                sum += weight;
                weights[g][t] = weight * scale;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                rescale[g] = exp2f(max_of[g] - new_max);
                max_of[g] = new_max, sum_of[g] = sum_of[g] * rescale[g] + sum;
            }
            __syncwarp();
        }
        __syncthreads();

#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            const int output = thread + i * THREADS, g = output / DIM, d = output % DIM, j = d / DSUB;
            if (output >= GROUP * DIM) break;
            sums[i] *= rescale[g];
            for (u32 t = 0; t < count; t++) {
                const u32 code = code_at<VALUE_M, VALUE_BITS>(values, first + t, j);
                sums[i] += weights[g][t] * centroids[((u64)j * VALUE_KSUB + code) * DSUB + d % DSUB];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const int output = thread + i * THREADS;
        if (output >= GROUP * DIM) break;
        const float sum = sum_of[output / DIM];
        a.out[head * GROUP * DIM + output] = sum == 0 ? 0 : sums[i] / sum;
    }
    if (thread < GROUP && a.log_sum_exp)
        a.log_sum_exp[head * GROUP + thread] =
            sum_of[thread] == 0 ? -infinity() : max_of[thread] / LOG2_E + logf(sum_of[thread]);
}

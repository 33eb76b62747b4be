// ADC table of a head's queries in shared memory: inner products with every centroid, without bank conflicts.
//
// An entry has the scores of VEC queries as f16, each less the maximum of its subspace, which the base of the query
// collects in f32: rounding then matters least for the tokens of the largest scores. Lanes 4 g + l that are served
// together look up entries of different subspaces or, where there are too few, of different copies.
#pragma once
#include "element.cuh"
#include "pq_hybrid/codes.cuh"
#include "warp.cuh"

constexpr int KSUB = 1 << KEY_BITS, DSUB = D / KEY_M;
constexpr int STEPS = KEY_M == 8 ? 2 : 4, MIDDLES = KEY_M == 32 ? 2 : 1;
constexpr int LINE_M = KEY_M / MIDDLES, ENTRY = 2 * VEC; // subspaces of a line; bytes of an entry
constexpr int LINE = LINE_M * ENTRY > 128 ? LINE_M * ENTRY : 128, LINE_COPIES = LINE / (LINE_M * ENTRY);
constexpr int MIDDLE = LINE * MIDDLES <= ROW ? LINE : KSUB * ROW; // distance of the lines of a code
constexpr int LUT_BYTES = KSUB * ROW * (LINE * MIDDLES <= ROW ? 1 : 2);
static_assert(LINE <= ROW, "a line fits a row");

constexpr int AT_ONCE = VEC == 4 ? 4 : 2; // queries of one pass over the centroids
constexpr float LEAST_ENTRY = -60000;     // finite in f16: products with zeros are zeros

// Offsets of the lane's entries in a row, for steps 2 i and 2 i + 1.
struct LutOffsets {
    u32 pairs[STEPS / 2];

    __device__ __forceinline__ explicit LutOffsets(int lane) {
        const int g = lane / 4, l = lane % 4, copy = g / STEPS % LINE_COPIES;
        auto at = [&](int step) { return (copy * LINE_M + 4 * (step ^ g % STEPS) + l) * ENTRY; };
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) pairs[i] = pack_offsets(at(2 * i), at(2 * i + 1));
    }
};

// A thread's words of the codebook table, loaded ahead of the queries.
template <int THREADS>
struct LutWords {
    static constexpr int CODES = THREADS / KEY_M, ITEMS = (KSUB + CODES - 1) / CODES; // codes at a time; of a thread
    u32 words[ITEMS][DSUB / 2];

    static __device__ __forceinline__ bool exists(int i) {
        return KSUB % CODES == 0 || (int)threadIdx.x / KEY_M + i * CODES < KSUB;
    }
    __device__ __forceinline__ void load(const Arguments& a, u32 head) {
        const u32* table = a.key_table + ((u64)head * KSUB + threadIdx.x / KEY_M) * WORDS + threadIdx.x % KEY_M;
#pragma unroll
        for (int i = 0; i < ITEMS * DSUB / 2; i++) {
            const int item = i / (DSUB / 2), p = i % (DSUB / 2);
            words[item][p] = exists(item) ? __ldg(table + item * CODES * WORDS + p * KEY_M) : 0;
        }
    }
};

// Queries and maxima while a table is made.
struct LutBuilder {
    float queries[DSUB][KEY_M][AT_ONCE]; // times scale and log2(e)
    int maxima[KEY_M][AT_ONCE];          // ordered like floats
    float base[VEC];

    static __device__ __forceinline__ int ordered(float x) {
        const int bits = __float_as_int(x);
        return bits ^ (bits >> 31 & 0x7fffffff);
    }
    static __device__ __forceinline__ float from_ordered(int x) { return __int_as_float(x ^ (x >> 31 & 0x7fffffff)); }

    // Called by all THREADS threads; writes the table at `lut` and `base`, and synchronizes.
    template <int THREADS>
    __device__ __forceinline__ void build(const Arguments& a, u32 sequence, u32 head, const LutWords<THREADS>& words,
                                          u8* lut) {
        constexpr int CODES = LutWords<THREADS>::CODES, ITEMS = LutWords<THREADS>::ITEMS;
        const u16* from = a.code_queries + ((u64)sequence * a.heads + head) * GROUP * D;
        const int j = threadIdx.x % KEY_M, first_code = threadIdx.x / KEY_M;
        for (int first = 0; first < VEC; first += AT_ONCE) {
            __syncthreads();
            for (int i = threadIdx.x; i < AT_ONCE * D; i += THREADS) {
                const int q = i / D, d = i % D;
                queries[d % DSUB][d / DSUB][q] = first + q < GROUP ? to_float(from[(first + q) * D + d]) * a.scale : 0;
            }
            if (threadIdx.x < KEY_M * AT_ONCE) maxima[threadIdx.x / AT_ONCE][threadIdx.x % AT_ONCE] = ordered(-1e30f);
            __syncthreads();
            float dots[ITEMS][AT_ONCE] = {};
#pragma unroll
            for (int p = 0; p < DSUB / 2; p++) {
                float low[AT_ONCE], high[AT_ONCE];
#pragma unroll
                for (int q = 0; q < AT_ONCE; q++) low[q] = queries[2 * p][j][q], high[q] = queries[2 * p + 1][j][q];
#pragma unroll
                for (int i = 0; i < ITEMS; i++) {
                    const u32 word = words.words[i][p];
                    const float x = half_to_float((u16)word), y = half_to_float((u16)(word >> 16));
#pragma unroll
                    for (int q = 0; q < AT_ONCE; q++) dots[i][q] += low[q] * x + high[q] * y;
                }
            }
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) {
                float max = -1e30f;
#pragma unroll
                for (int i = 0; i < ITEMS; i++)
                    if (words.exists(i)) max = fmaxf(max, dots[i][q]);
#pragma unroll
                for (int other = KEY_M; other < LANES; other *= 2) max = fmaxf(max, __shfl_xor_sync(FULL, max, other));
                atomicMax(&maxima[j][q], ordered(max));
            }
            __syncthreads();
            const int line = j / LINE_M * MIDDLE;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const int code = first_code + i * CODES;
                if (!words.exists(i)) continue;
                u32 entry[AT_ONCE / 2];
#pragma unroll
                for (int q = 0; q < AT_ONCE; q += 2) {
                    // `fmaxf` replaces NaN, which only a query that is not finite has; `base` is NaN then.
                    entry[q / 2] = pack_half2(fmaxf(dots[i][q] - from_ordered(maxima[j][q]), LEAST_ENTRY),
                                              fmaxf(dots[i][q + 1] - from_ordered(maxima[j][q + 1]), LEAST_ENTRY));
                }
#pragma unroll
                for (int copy = 0; copy < LINE_COPIES; copy++) {
                    u8* at = lut + line + code * ROW + (copy * LINE_M + j % LINE_M) * ENTRY + first * 2;
                    if constexpr (AT_ONCE == 4)
                        *reinterpret_cast<uint2*>(at) = make_uint2(entry[0], entry[1]);
                    else
                        *reinterpret_cast<u32*>(at) = entry[0];
                }
            }
            add_base<THREADS>(a, head, first);
        }
        __syncthreads();
    }

    // The sums of the maxima, and half the variance of the scores. A query that is not finite makes its base NaN.
    template <int THREADS>
    __device__ __forceinline__ void add_base(const Arguments& a, u32 head, int first) {
        static_assert(THREADS / LANES >= AT_ONCE, "a warp for each query");
        const int q = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        if (q >= AT_ONCE) return;
        float sum = lane < KEY_M ? from_ordered(maxima[lane][q]) : 0;
#pragma unroll
        for (int d = lane; d < D; d += LANES) {
            const float x = queries[d % DSUB][d / DSUB][q];
            sum += x * 0.f;
            if (a.key_errors) sum += .5f * LN_2 * x * x * __ldg(a.key_errors + head * D + d);
        }
        sum = warp_sum(sum);
        if (lane == 0) base[first + q] = sum;
    }
};

// ADC table of a head's queries in shared memory: inner products with every centroid, without bank conflicts.
//
// An entry holds the scores of VEC queries as f16, each minus the maximum of its subspace; a base of the query has the
// sum of these maxima in f32. Rounding then matters least for the tokens with the largest scores. Lanes 4 g + l of one
// wavefront look up entries of different subspaces or, where there are too few, of different copies.
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

constexpr float LEAST_ENTRY = -60000; // finite in f16: products with zeros are zeros

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

// MMAs compute the table: their rows are codes, their columns queries, and their inner dimension (k) components. Lane
// 4 g + l has pairs of components in two halves of the inner dimension, for codes g and g + 8.
constexpr int PAIRS = DSUB / 2, CHUNKS = PAIRS == 8 ? 2 : 1; // pairs of components, and the halves that they fill
constexpr int SHARE = VEC <= 4 && CHUNKS == 1 ? 2 : 1;       // subspaces that share an MMA
constexpr int FOURS = KEY_M / 4, PRODUCTS = 4 / SHARE;       // MMAs for four subspaces
constexpr bool ALL_FOUR = PAIRS < 4; // whether one operand has all four subspaces; an MMA uses only its own
constexpr int CODE_WORDS = ALL_FOUR ? PAIRS : 4 * CHUNKS; // words of a lane for four subspaces of a code

// The subspace (of four) and the pair of components that the lane holds in a half of the inner dimension.
struct LutSlot {
    int subspace, pair;
    bool exists;

    __device__ __forceinline__ LutSlot(int l, int product, int half) {
        subspace = ALL_FOUR ? l / PAIRS * PAIRS + half : product * SHARE + (SHARE == 2 ? half : 0);
        pair = ALL_FOUR ? l % PAIRS : l + (CHUNKS == 2 ? half * 4 : 0);
        exists = ALL_FOUR ? half < PAIRS : half < SHARE * CHUNKS;
    }
};

template <int WIDTH>
__device__ __forceinline__ void load_words(u32* to, const u32* from) {
    if constexpr (WIDTH == 4) {
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    } else if constexpr (WIDTH == 2) {
        const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
        to[0] = words.x, to[1] = words.y;
    } else {
        to[0] = __ldg(from);
    }
}

// A warp's part of the codebook table, loaded ahead of the queries: items of 16 codes of four subspaces.
template <int WARPS>
struct LutWords {
    static constexpr int ALL = KSUB / 16 * FOURS, ITEMS = (ALL + WARPS - 1) / WARPS;
    static constexpr int STEP = WARPS / FOURS * 16; // codes between consecutive items of a warp
    static_assert(WARPS % FOURS == 0, "all items of a warp have the same subspaces");
    u32 words[ITEMS][2][CODE_WORDS]; // [item][code]

    static __device__ __forceinline__ int item(int i) { return threadIdx.x / LANES + i * WARPS; }
    static __device__ __forceinline__ bool exists(int i) { return ALL % WARPS == 0 || warp_uniform(item(i) < ALL); }
    static __device__ __forceinline__ int first_code(int i) { return threadIdx.x / LANES / FOURS * 16 + i * STEP; }
    static __device__ __forceinline__ int first_subspace() { return threadIdx.x / LANES % FOURS * 4; }

    __device__ __forceinline__ void load(const SelectArguments& a, u32 head) {
        constexpr int WIDTH = CODE_WORDS < 4 ? CODE_WORDS : 4;
        const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
        const LutSlot first(l, 0, 0);
        const u32* table = a.table + (u64)head * KSUB * WORDS + (first_code(0) + g) * WORDS + first.pair * KEY_M +
                           first_subspace() + first.subspace;
#pragma unroll
        for (int i = 0; i < ITEMS * 2 * CHUNKS; i++) {
            const int item = i / 2 / CHUNKS, code = i / CHUNKS % 2, chunk = i % CHUNKS;
            const u32* from = table + (item * STEP + code * 8) * WORDS + chunk * 4 * KEY_M;
            u32 loaded[4] = {};
            if (exists(item)) load_words<WIDTH>(loaded, from);
#pragma unroll
            for (int w = 0; w < WIDTH; w++) words[item][code][chunk * 4 + w] = loaded[w];
        }
    }

    // The A operand of an MMA.
    __device__ __forceinline__ void operand(u32 (&words_of)[4], int item, int product) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int half = i / 2, word = ALL_FOUR       ? half
                                           : CHUNKS == 2 ? half * 4 + product
                                                         : product * SHARE + (SHARE == 2 ? half : 0);
            words_of[i] = half < (ALL_FOUR ? PAIRS : SHARE * CHUNKS) ? words[item][i % 2][word] : 0;
        }
    }
};

// Shared state of the warps during the construction of a table.
struct LutBuilder {
    int maxima[KEY_M][VEC]; // ordered like floats
    // What is added to the entries of a query and, if KEY_NORMS, to their sum times a norm.
    float bases[HAS_KEY_NORMS ? 2 : 1][VEC];

    static __device__ __forceinline__ int ordered(float x) {
        const int bits = __float_as_int(x);
        return bits ^ (bits >> 31 & 0x7fffffff);
    }
    static __device__ __forceinline__ float from_ordered(int x) { return __int_as_float(x ^ (x >> 31 & 0x7fffffff)); }

    // Called by all threads of the WARPS warps; writes the table at `lut` and `bases`, and synchronizes. Codes are the
    // rows of an MMA and queries its columns: lane 4 g + l has two queries for codes g and g + 8. Up to four queries
    // leave columns 4 to 7 for the next subspace.
    template <int WARPS>
    __device__ __forceinline__ void build(const SelectArguments& a, u32 sequence, u32 head,
                                          const LutWords<WARPS>& words, u8* lut) {
        using Words = LutWords<WARPS>;
        const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4, subspace = Words::first_subspace();
        const u16* queries = a.queries + ((u64)sequence * a.heads + head) * GROUP * D;
        u32 query[PRODUCTS][2]; // B operands: zeros for components outside the column's subspace
#pragma unroll
        for (int i = 0; i < PRODUCTS * 2; i++) {
            const int product = i / 2, half = i % 2, q = SHARE == 2 ? g % 4 : g;
            const int column = product * SHARE + (SHARE == 2 ? g / 4 : 0);
            const LutSlot slot(l, product, half);
            const u16* pair = queries + q * D + (subspace + column) * DSUB + slot.pair * 2;
            query[product][half] = q < GROUP && slot.exists && slot.subspace == column ? as_halves(pair) : 0;
        }
        const float variance = half_variance(a, queries, head); // its loads overlap with those above
        __syncthreads();                                        // the previous table is no longer in use
        static_assert(KEY_M * VEC <= WARPS * LANES, "a thread for each maximum");
        if (threadIdx.x < KEY_M * VEC) (&maxima[0][0])[threadIdx.x] = ordered(-1e30f);
        __syncthreads();
        auto multiply = [&](float (&dots)[4], int item, int product) {
            u32 operand[4];
            words.operand(operand, item, product);
            mma_m16n8k16_f16_init(dots, operand, query[product][0], query[product][1]);
#pragma unroll
            for (int i = 0; i < 4; i++) dots[i] *= a.scale;
        };
        // The lane's queries, and its subspace of product 0.
        const int first_query = (SHARE == 2 ? l % 2 : l) * 2, own = subspace + (SHARE == 2 ? l / 2 : 0);
        const bool has_queries = first_query < VEC;
#pragma unroll
        for (int product = 0; product < PRODUCTS; product++) {
            float max[2] = {-1e30f, -1e30f};
#pragma unroll
            for (int item = 0; item < Words::ITEMS; item++) {
                if (!Words::exists(item)) continue;
                float dots[4];
                multiply(dots, item, product);
#pragma unroll
                for (int i = 0; i < 4; i++) max[i % 2] = fmaxf(max[i % 2], dots[i]);
            }
#pragma unroll
            for (int q = 0; q < 2; q++) {
#pragma unroll
                for (int other = 4; other < LANES; other *= 2)
                    max[q] = fmaxf(max[q], __shfl_xor_sync(FULL, max[q], other));
                if (g == product && has_queries)
                    atomicMax(&maxima[own + product * SHARE][first_query + q], ordered(max[q]));
            }
        }
        __syncthreads();
        add_base<WARPS>(variance);
        u8* line = lut + own / LINE_M * MIDDLE + own % LINE_M * ENTRY + first_query * 2;
#pragma unroll
        for (int item = 0; item < Words::ITEMS; item++) {
            if (!Words::exists(item)) continue;
            u32 entries[2][PRODUCTS]; // [code][product]: two queries
#pragma unroll
            for (int product = 0; product < PRODUCTS; product++) {
                float dots[4];
                multiply(dots, item, product);
                const int* of_queries = &maxima[own + product * SHARE][has_queries ? first_query : 0];
                const float max[2] = {from_ordered(of_queries[0]), from_ordered(of_queries[1])};
                // `fmaxf` replaces NaN, which only a query that is not finite causes; `base` is then NaN.
#pragma unroll
                for (int half = 0; half < 2; half++)
                    entries[half][product] = pack_half2(fmaxf(dots[2 * half] - max[0], LEAST_ENTRY),
                                                        fmaxf(dots[2 * half + 1] - max[1], LEAST_ENTRY));
            }
            // The entries of a subspace lie in one bank, so lanes of different g write different subspaces at a time.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32(&e)[PRODUCTS] = entries[half];
#pragma unroll
                for (int i = 0; i < PRODUCTS; i++) {
                    u32 entry = g & 1 ? e[(i + 1) % PRODUCTS] : e[i];
                    if (PRODUCTS == 4 && g & 2) entry = g & 1 ? e[(i + 3) % PRODUCTS] : e[(i + 2) % PRODUCTS];
                    u8* at = line + (Words::first_code(item) + g + half * 8) * ROW + (i + g) % PRODUCTS * SHARE * ENTRY;
#pragma unroll
                    for (int copy = 0; copy < LINE_COPIES; copy++)
                        if (has_queries) *reinterpret_cast<u32*>(at + copy * LINE_M * ENTRY) = entry;
                }
            }
        }
        __syncthreads();
    }

    static __device__ __forceinline__ u32 as_halves(const u16* pair) {
        const u32 both = *reinterpret_cast<const u32*>(pair);
        return ELEMENT == 1 ? both : pack_half2(to_float((u16)both), to_float((u16)(both >> 16)));
    }

    // Half the variance of the scores of query `warp`: the lane's share. NaN if the query is not finite.
    static __device__ __forceinline__ float half_variance(const SelectArguments& a, const u16* queries, u32 head) {
        const int q = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        float sum = 0;
        if (!warp_uniform(q < GROUP)) return sum;
#pragma unroll
        for (int d = lane; d < D; d += LANES) {
            const float x = to_float(queries[q * D + d]) * a.scale;
            sum += x * 0.f;
            if (a.errors) sum += .5f * LN_2 * x * x * __ldg(a.errors + head * D + d);
        }
        return sum;
    }

    // The bases of the queries: half the variance, which no norm multiplies, and the sum of the maxima.
    template <int WARPS>
    __device__ __forceinline__ void add_base(float variance) {
        static_assert(WARPS >= VEC && KEY_M <= LANES, "a warp for each query, a lane for each subspace");
        const int q = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        if (!warp_uniform(q < VEC)) return;
        const float max = lane < KEY_M ? from_ordered(maxima[lane][q]) : 0;
        if constexpr (HAS_KEY_NORMS) {
            const float sum = warp_sum(max), of_errors = warp_sum(variance);
            if (lane == 0) bases[0][q] = sum, bases[1][q] = of_errors;
        } else {
            const float sum = warp_sum(variance + max);
            if (lane == 0) bases[0][q] = sum;
        }
    }
};

// The queries of a step as the integers that `sq_attend` multiplies with the coded keys of each block of tokens.
//
// CPU twin: Queries and `round_query` of pq_core::sq. A query is rotated by minus the position of the middle of a
// block, and multiplied by the dual of the keys' basis and by the steps of the block. A component then is z units, and
// z = 256 high + low, with high in -64 to 64 and low in -128 to 127. A sum of 256 products of z with a byte is below
// 2^31. (A sixteenth bit would fit, too, but scores would no longer be those of the CPU.) The score of a token is
// (sum + offset) * unit, where the offset moves the codes to their levels: c + 1/2 - 2^(b - 1).
//
// Compile-time shape: ELEMENT of queries (1 for f16, 2 for bf16), HEAD_DIM, GROUP query heads of a key/value head,
// QUERIES of a slice of them, PASSES in which a map is used (2 where a whole one does not fit into shared memory),
// WARPS, BLOCK, KEY_SLOTS, KEY_WIDTH (bits of every component of the keys, 0 if they differ), PAGED or not.
//
// Launch: grid (any number, heads * slices, sequences), WARPS warps, a map for each query in shared memory.
//
// With a pair (x, y) of a query and the rows (u, v) of the dual basis of its components, which are the same for all
// blocks, a component of the result is the sum over pairs of
//   cos(position f) (x u + y v) + sin(position f) (y u - x v).
// So a query is a map from waves of a position to components, made once for all blocks, and tensor cores multiply it
// with the waves of 16 blocks, all components of which a warp has in its registers. Both are f16: scaled by powers of
// two, numbers are rounded by 2^-11 at most, an eighth of what the queries are rounded by in bf16, and as much as in
// f16.
//
// The floor is writing 2 D bytes a row; instructions bind it, about 12 a component. Forms that failed, for 131,072
// tokens in blocks of 64 of the 8B shape, on an H200 by Nsight Compute: rows rotated in f32 and multiplied by bf16 in
// two parts, 30.6 us, with the rounding to integers left to each warp of `sq_attend` that shares a block; rows in f16
// and columns in registers, whose largest component eight warps look for together, 27.2 us.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "sq_attend/uniform_codes.cuh"
#include "sq_key_table.cuh"
#include "warp.cuh"
#include "wave.cuh"

constexpr int HALF = D / 2, THREADS = WARPS * LANES, ROWS = 16; // ROWS: blocks of tokens of a warp
constexpr int STEPS = PARTS / PASSES;                           // of a pass, of 8 pairs each
constexpr int MAP = STEPS * PARTS * LANES; // chunks of a query's map in a pass: [step][16 components][lane]
static_assert(PASSES == 1 || QUERIES == 1, "maps stay where they fit");
constexpr int DUAL = D * D + D; // numbers of a head's dual basis
constexpr float LIMIT = 16256;  // 127 * 128
// Codes of one width are at the top of their bytes.
constexpr int KEY_SCALE = KEY_WIDTH ? UniformCodes<KEY_SLOTS, KEY_WIDTH>::SCALE : 1;

struct Arguments {
    const Element* queries;   // [sequence][head][GROUP][D], after RoPE
    const float* duals;       // [head][DUAL]: `DualTable` of kv_gpu::sq
    const float* frequencies; // [HALF]: radians a position
    const u8* steps;          // [page or sequence][head][block][D]
    const u32* tables;        // [head][KeyTable::WORDS]; not read if KEY_WIDTH
    const u32* lengths;       // [sequence]: coded tokens
    const u32* pages;         // PAGED: [sequence][max_pages]
    uint2* words;             // [sequence][head][block of sequence][query of group][quad]: high and low limbs
    float2* units;            // [sequence][head][block of sequence][query of group]: unit and offset
    u32 heads;
    u32 first;             // position of the first coded token
    u32 blocks, max_pages; // blocks of tokens of a page or sequence, and pages of a sequence
    u32 query_blocks;      // blocks of tokens of a sequence in `words`
    float scale;           // factor of the scores, times log2(e)
};

extern __shared__ __align__(16) uint4 maps[]; // [query][MAP]
__shared__ float scaled[QUERIES][D];          // queries of magnitudes below 4
__shared__ float factors[QUERIES];            // what they are multiples of
__shared__ __align__(16) float logs[D];       // of the factors of components, less 2^20 + 16 for the code of a step
__shared__ uint2 turns[HALF];                 // by a position, in units of 2^-64: low and high words
__shared__ int weights[QUADS];                // of the sums of z in the offset

// Lane 4 g + l has rows g and g + 8 of a product, and quads l, 4 + l and so on.
struct Lane {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, g = lane / 4, l = lane % 4;
};

// What does not depend on the step. Called by the whole block of threads.
__device__ __forceinline__ void load_constants(const Arguments& a, const float* dual, u32 head) {
    for (int i = threadIdx.x; i < D; i += THREADS) logs[i] = __ldg(dual + D * D + i) - 1048592.f;
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const double turn = __ldg(a.frequencies + i) * 0.15915494309189533577; // 1 / (2 pi)
        const u64 fraction = fraction_of(turn);
        turns[i] = make_uint2((u32)fraction, (u32)(fraction >> 32));
    }
#if KEY_WIDTH
    for (int i = threadIdx.x; i < QUADS; i += THREADS) weights[i] = 1 - (1 << KEY_WIDTH);
#else
    const KeyTable table{a.tables + (u64)head * KeyTable::WORDS};
    for (int i = threadIdx.x; i < QUADS; i += THREADS) weights[i] = table.offset(i);
#endif
}

// Called by the whole block of threads.
__device__ __forceinline__ void load_queries(const Element* queries, u32 live, const Lane& lane) {
    constexpr int OF_LANE = D / LANES;
    for (u32 q = lane.warp; q < live; q += WARPS) {
        float x[OF_LANE];
        u32 largest = 0; // bits of a magnitude; NaN is the largest
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            x[i] = to_float(queries[q * D + i * LANES + lane.lane]);
            largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
        }
        const u32 exponent = min(max(__reduce_max_sync(FULL, largest) >> 23, 1u), 253u);
        const float unit = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) scaled[q][i * LANES + lane.lane] = x[i] * unit;
        if (lane.lane == 0) factors[q] = __uint_as_float(exponent << 23);
    }
}

// The maps of the queries in a pass, as B operands: a word has the factors of the cosine and the sine of a pair. Called
// by the whole block of threads.
__device__ __forceinline__ void fill_maps(const float* dual, int pass, u32 live) {
    for (int i = threadIdx.x; i < MAP; i += THREADS) {
        const int pair = (pass * STEPS + i / (PARTS * LANES)) * 8 + i % 4;
        const float4* from = reinterpret_cast<const float4*>(dual) + 2 * (pass * MAP + i); // of a component each:
        const float4 first = __ldg(from), second = __ldg(from + 1);                        // u and v of two pairs
        for (u32 q = 0; q < live; q++) {
            const float *near = scaled[q] + pair, *far = near + 4;
            const auto word = [](float u, float v, float x, float y) {
                return pack_half2(x * u + y * v, y * u - x * v);
            };
            maps[q * MAP + i] =
                make_uint4(word(first.x, first.y, near[0], near[HALF]), word(first.z, first.w, far[0], far[HALF]),
                           word(second.x, second.y, near[0], near[HALF]), word(second.z, second.w, far[0], far[HALF]));
        }
    }
}

// The cosine and the sine of a pair at a position, as two halves.
__device__ __forceinline__ u32 wave(uint2 turn, u32 position) {
    const float2 both = wave_at(__umulhi(turn.x, position) + turn.y * position);
    return pack_half2(both.x, both.y);
}

// The larger of a number and a magnitude; NaN is the largest.
__device__ __forceinline__ float max_magnitude(float most, float x) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x)));
    return most;
}

// Adds the products of a query's map in a pass with the waves of blocks at positions `near` and `far`, rows g and g
// + 8.
__device__ __forceinline__ void multiply(float (&sums)[PARTS][2][4], const uint4* map, int pass, u32 near, u32 far,
                                         const Lane& lane) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const uint2* of_step = turns + 8 * (pass * STEPS + k) + lane.l;
        const uint2 first = of_step[0], second = of_step[4];
        const u32 waves[4] = {wave(first, near), wave(first, far), wave(second, near), wave(second, far)};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint4 b = map[(k * PARTS + part) * LANES + lane.lane];
            mma_m16n8k16_f16(sums[part][0], waves, b.x, b.y);
            mma_m16n8k16_f16(sums[part][1], waves, b.z, b.w);
        }
    }
}

// Rounds row g (HALF_ROW 0) or g + 8 (1) of the products, of a block with these steps, and stores it.
template <int HALF_ROW>
__device__ __forceinline__ void store(float (&sums)[PARTS][2][4], const u8* steps, float factor, bool exists,
                                      uint2* words, float2* unit, const Lane& lane) {
    float top = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int quad = 4 * part + lane.l;
        const u32 codes = __ldg(reinterpret_cast<const u32*>(steps) + quad);
        const float4 of_quad = reinterpret_cast<const float4*>(logs)[quad];
        const float log[4] = {of_quad.x, of_quad.y, of_quad.z, of_quad.w};
#pragma unroll
        for (int j = 0; j < 4; j++) { // a step is 2^(code / 8 - 16), the code in the mantissa of 2^23
            const float code = __uint_as_float(prmt(codes, 0x4b000000, 0x7440 + j));
            float& x = sums[part][j / 2][2 * HALF_ROW + j % 2];
            x *= exp2_approx(code * .125f + log[j]);
            top = max_magnitude(top, x);
        }
    }
    top = max_magnitude(top, __shfl_xor_sync(FULL, top, 1));
    top = max_magnitude(top, __shfl_xor_sync(FULL, top, 2));
    const float per_unit = top > 0 ? __fdividef(LIMIT, top) : 0;
    int level = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 z[4]; // low bits of floats of 1.5 * 2^23, to which z + 128 is added
#pragma unroll
        for (int j = 0; j < 4; j++)
            z[j] = __float_as_uint(sums[part][j / 2][2 * HALF_ROW + j % 2] * per_unit + 12583040.f);
        const u32 first = prmt(z[0], z[1], 0x5140), second = prmt(z[2], z[3], 0x5140);
        const u32 high = prmt(first, second, 0x7632), low = prmt(first, second, 0x5410) ^ 0x80808080u;
        if (exists) words[4 * part + lane.l] = make_uint2(high, low);
        const int of_quad = __dp4a((int)high, 0x01010101, 0) * 256 + __dp4a((int)low, 0x01010101, 0);
        level += of_quad * weights[4 * part + lane.l];
    }
    level += __shfl_xor_sync(FULL, level, 1);
    level += __shfl_xor_sync(FULL, level, 2);
    // NaN if a component is not finite.
    const float one = (top < infinity() ? top * (1 / LIMIT) : top * 0) * factor;
    if (exists && lane.l == 0) *unit = make_float2(one * (1.f / KEY_SCALE), one * (.5f * level));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sq_queries(const Arguments a) {
    const Lane lane;
    const u32 head = blockIdx.y % a.heads, first_query = blockIdx.y / a.heads * QUERIES, sequence = blockIdx.z;
    const u32 live = min(GROUP - first_query, (u32)QUERIES), blocks = (a.lengths[sequence] + BLOCK - 1) / BLOCK;
    const u32 items = (blocks + ROWS - 1) / ROWS * live;
    if (blockIdx.x * WARPS >= items) return;
    const float* dual = a.duals + (u64)head * DUAL;
    prefetch_global_l2(reinterpret_cast<const u8*>(dual), D * D * 4, threadIdx.x, THREADS);
    load_constants(a, dual, head);
    pdl_wait(); // earlier kernels write the queries and steps, but neither tables nor lengths
    pdl_trigger();
    const u64 entry = (u64)sequence * a.heads + head;
    load_queries(a.queries + (entry * GROUP + first_query) * D, live, lane);
    for (u32 first_item = blockIdx.x * WARPS; first_item < items; first_item += gridDim.x * WARPS) {
        const u32 item = first_item + lane.warp;
        const u32 query = item % live, near = item / live * ROWS + lane.g, far = near + 8;
        const u32 middle = a.first + BLOCK / 2;
        float sums[PARTS][2][4] = {};
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (PASSES > 1 || first_item == blockIdx.x * WARPS) {
                __syncthreads(); // queries are there, and nobody reads the maps of the pass before
                fill_maps(dual, pass, live);
                __syncthreads();
            }
            multiply(sums, maps + query * MAP, pass, middle + near * BLOCK, middle + far * BLOCK, lane);
        }
        if (item >= items) continue;
        const float factor = a.scale * factors[query];
        const auto row = [&](u32 block) { return (entry * a.query_blocks + block) * GROUP + first_query + query; };
        const auto steps = [&](u32 block) { return a.steps + place_of(a, sequence, head, min(block, blocks - 1)) * D; };
        store<0>(sums, steps(near), factor, near < blocks, a.words + row(near) * QUADS, a.units + row(near), lane);
        store<1>(sums, steps(far), factor, far < blocks, a.words + row(far) * QUADS, a.units + row(far), lane);
    }
}

// Prepares rows for the quantizers, and restores them: keys minus their rotated mean, keys and values divided by their
// norms, which are times a gain.
//
// CPU twin: RopeMean::subtract and, of rows times the gain, divide_by_norms of pq_core. Compile-time shape: ELEMENT (1 for f16, 2 for bf16),
// HEAD_DIM; MEAN and NORMS, each 0 or 1.
//
// Rows are in the basis of the codes. The rotated mean is mapped to it by the map of the keys, and rounded to elements
// like a key, so that both lose the same. A warp holds 16 columns of the map in registers, as B fragments of mma, and
// the same columns of the rows of a tile of tokens.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr u32 MAPS = 3; // of a head, as in bases.cu
constexpr u32 WARPS = HEAD_DIM / 16, THREADS = WARPS * LANES, STEPS = HEAD_DIM / 16;
constexpr u32 TOKENS = 16;    // of a tile
constexpr u32 CODE_TILE = 32; // tokens of a tile of codes
constexpr u32 HALF = HEAD_DIM / 2, PITCH = HEAD_DIM + 8; // rows of ldmatrix are in different banks

struct Arguments {
    const u16* from;          // element [sequence][head][from_capacity][HEAD_DIM], of the first token on
    u16* to;                  // element [sequence][head][to_capacity][HEAD_DIM], the same; may be `from`
    const uint4* maps;        // [head][MAPS][WARPS][STEPS][LANES], from the map of keys on
    const float* means;       // [head][HEAD_DIM]: of keys before RoPE
    const float* frequencies; // [HALF]: radians a position
    u16* norms;               // f16 [page or sequence][head][tiles][CODE_TILE], of tokens after the sinks
    const u32* pages;         // [sequence][max_pages], or null
    const u32* firsts;        // [sequence]: the first token, counted after the sinks; null: `first`
    const u32* counts;        // [sequence]; null: `count`
    u32 first, count, heads, from_capacity, to_capacity, sinks, tiles, max_pages;
    float gain; // of rows before they are divided by their norms
};

// The nearest of the norms that pq_core::encode_norm stores in a byte.
__device__ __forceinline__ float coded_norm(float norm) {
    const float code = fminf(fmaxf(floorf(log2f(norm) * 16 + 128.5f), 0), 255); // 0 for NaN
    return exp2f((code - 128) / 16);
}

// The address of a token's norm.
__device__ __forceinline__ u16* norm_of(const Arguments& a, u32 sequence, u32 token) {
    u32 tile = token / CODE_TILE;
    u64 place = sequence;
    if (a.pages) place = a.pages[(u64)sequence * a.max_pages + tile / a.tiles], tile %= a.tiles;
    return a.norms + ((place * a.heads + blockIdx.x) * a.tiles + tile) * CODE_TILE + token % CODE_TILE;
}

// Rotates the mean to the positions of a tile.
__device__ __forceinline__ void rotate(const Arguments& a, u32 position, u16 (&rows)[TOKENS][PITCH]) {
    const float* mean = a.means + blockIdx.x * HEAD_DIM;
    for (u32 i = threadIdx.x; i < TOKENS * HALF; i += THREADS) {
        const u32 token = i / HALF, pair = i % HALF;
        const double turns = (position + token) * (__ldg(a.frequencies + pair) * 0.15915494309189535); // / 2 pi
        float sine, cosine;
        sincospif(2 * (float)(turns - rint(turns)), &sine, &cosine);
        const float x = __ldg(mean + pair), y = __ldg(mean + pair + HALF);
        rows[token][pair] = to_element(cosine * x - sine * y);
        rows[token][pair + HALF] = to_element(sine * x + cosine * y);
    }
}

template <bool BACK>
__device__ __forceinline__ void code(const Arguments& a) {
    __shared__ __align__(16) u16 means[TOKENS][PITCH];
    __shared__ float squares[WARPS][TOKENS];
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 sequence = blockIdx.z, first = a.firsts ? a.firsts[sequence] : a.first;
    const u32 count = a.counts ? a.counts[sequence] : a.count;
    const u64 head = (u64)sequence * a.heads + blockIdx.x;
    uint4 map[STEPS];
    if constexpr (MEAN) {
        const uint4* maps = a.maps + ((u64)blockIdx.x * MAPS * WARPS + warp) * STEPS * LANES + lane;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) map[step] = __ldg(maps + step * LANES);
    }
    for (u32 tile = blockIdx.y * TOKENS; tile < count; tile += gridDim.y * TOKENS) {
        float sums[2][4] = {}; // of columns 8 apart: two of row g, then two of row g + 8
        __syncthreads();       // the previous tile is no longer used
        if constexpr (MEAN) {
            rotate(a, a.sinks + first + tile, means);
            __syncthreads();
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                u32 operand[4];
                ldmatrix_x4(operand, &means[lane % 16][16 * step + lane / 16 * 8]);
                mma_m16n8k16(sums[0], operand, map[step].x, map[step].y);
                mma_m16n8k16(sums[1], operand, map[step].z, map[step].w);
            }
        }
        const u32 column = 16 * warp + 2 * l;
        float norms[2] = {1, 1};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 token = tile + g + 8 * half;
            const bool is_there = token < count;
            if (NORMS && BACK && is_there) norms[half] = half_to_float(*norm_of(a, sequence, first + token));
            const u16* row = a.from + (head * a.from_capacity + token) * HEAD_DIM + column;
            float square = 0;
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                const u32 pair = is_there ? *reinterpret_cast<const u32*>(row + 8 * j) : 0;
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float& sum = sums[j][2 * half + i];
                    const float x = to_float((u16)(pair >> 16 * i));
                    sum = BACK ? x * norms[half] + sum : x - sum;
                    square += sum * sum;
                }
            }
            if constexpr (NORMS && !BACK) {
                square += __shfl_xor_sync(FULL, square, 1), square += __shfl_xor_sync(FULL, square, 2);
                if (l == 0) squares[warp][g + 8 * half] = square;
            }
        }
        if constexpr (NORMS && !BACK) {
            __syncthreads();
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float square = 0;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) square += squares[w][g + 8 * half];
                const u16 norm = float_to_half(coded_norm(a.gain * sqrtf(square)));
                norms[half] = a.gain / half_to_float(norm);
                const u32 token = tile + g + 8 * half;
                if (warp == 0 && l == 0 && token < count) *norm_of(a, sequence, first + token) = norm;
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 token = tile + g + 8 * half;
            if (token >= count) continue;
            const float scale = BACK ? 1 : norms[half];
            u16* row = a.to + (head * a.to_capacity + token) * HEAD_DIM + column;
#pragma unroll
            for (u32 j = 0; j < 2; j++)
                *reinterpret_cast<u32*>(row + 8 * j) =
                    pack_elements(scale * sums[j][2 * half], scale * sums[j][2 * half + 1]);
        }
    }
}

// Rows of keys or values to the rows that are coded; writes their norms.
//
// Launch: grid (heads, blocks, sequences), THREADS threads: any number of blocks, which take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const Arguments a) { code<false>(a); }

// Decoded rows to rows of keys or values.
//
// Launch: as above.
extern "C" __global__ void __launch_bounds__(THREADS) restore(const Arguments a) { code<true>(a); }

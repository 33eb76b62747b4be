// The queries of a step in the dual basis of every block of scalar codes, rotated by minus the position of its middle.
//
// CPU twin: Queries of pq_core::sq. Compile-time shape: ELEMENT of queries (1 for f16, 2 for bf16), HEAD_DIM, GROUP
// query heads of a key/value head, WARPS of a block of threads.
//
// Launch: grid (any number, heads * SLICES, sequences), WARPS warps: blocks of threads take tiles of rows in turn. A
// row is a query rotated for one block of tokens.
//
// The floor is writing D floats a row. Tensor cores multiply the rows with a map whose fragments stay in registers, a
// slice of its columns for each warp. Rows and map are sums of two bf16 numbers, which have 16 bits of the mantissa and
// the exponents of f32; of the four products that of the low parts is left out.
//
// N.B. On an H200 a step of the 8B shape over 131,072 tokens, in 2 bits and blocks of 64 tokens, took 8.6 ms with f32
// products, a thread holding a column of the map, and takes 6.5; of four sequences 30.3 and 13.9, of which blocks of
// 256 tokens, with a quarter of the rows, take 8.9. Next: the integers that `sq::Attend` makes of these floats, here.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "turn.cuh"
#include "warp.cuh"

constexpr int D = HEAD_DIM, HALF = D / 2, THREADS = WARPS * LANES;
constexpr int SLICES = D > 128 ? 2 : 1, COLUMNS = D / SLICES; // of the map, that a block of threads has
constexpr int OF_WARP = COLUMNS / (8 * WARPS), STEPS = D / 16; // tiles of eight columns; MMAs of a sum
constexpr int ROWS = D > 128 ? 16 : 32, STRIPS = ROWS / 16;    // of a tile
constexpr int BLOCKS = ROWS / GROUP;                           // of tokens, in a tile
static_assert(COLUMNS % (8 * WARPS) == 0 && D % 16 == 0 && BLOCKS > 0, "whole MMAs; a tile has a block");

struct Arguments {
    const u16* queries;       // element [sequence][head][GROUP][D], after RoPE
    const float* duals;       // [head][D][D]
    const float* frequencies; // [HALF]: radians a position
    const u32* lengths;       // [sequence]: coded tokens
    float* out;               // [sequence][head][query_blocks][GROUP][D]
    u32 heads, sinks, block, query_blocks;
};

// A number as a sum of two bf16 numbers.
struct Split {
    u16 high, low;

    __device__ __forceinline__ explicit Split(float x) {
        high = float_to_bfloat(x), low = float_to_bfloat(x - bfloat_to_float(high));
    }
};

// Rows of a tile. The padding keeps the rows that an `ldmatrix` reads in different banks.
struct Tile {
    u16 high[ROWS][D + 8], low[ROWS][D + 8];
};

// The fragments of a warp's columns of the map.
struct Columns {
    u32 high[OF_WARP][STEPS][2], low[OF_WARP][STEPS][2];

    __device__ __forceinline__ void load(const float* map, int first, int lane) {
#pragma unroll
        for (int t = 0; t < OF_WARP; t++)
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float* x = map + (16 * k + 8 * i + 2 * (lane % 4)) * D + first + 8 * t + lane / 4;
                    const Split upper(__ldg(x)), lower(__ldg(x + D));
                    high[t][k][i] = upper.high | (u32)lower.high << 16;
                    low[t][k][i] = upper.low | (u32)lower.low << 16;
                }
    }
};

// Writes the rows of the blocks from `first` on, up to `blocks`.
__device__ __forceinline__ void rotate(Tile& tile, const Arguments& a, const u16* queries, u32 first, u32 blocks) {
    for (int i = threadIdx.x; i < BLOCKS * HALF; i += THREADS) {
        const int pair = i % HALF, row = i / HALF * GROUP;
        const u32 block = first + i / HALF;
        if (block >= blocks) return;
        const Turn back(__ldg(a.frequencies + pair), -(int)(a.sinks + block * a.block + a.block / 2));
#pragma unroll 4
        for (int q = 0; q < GROUP; q++) {
            const u16* query = queries + q * D + pair;
            const float2 turned = back(to_float(query[0]), to_float(query[HALF]));
            const Split x(turned.x), y(turned.y);
            tile.high[row + q][pair] = x.high, tile.high[row + q][pair + HALF] = y.high;
            tile.low[row + q][pair] = x.low, tile.low[row + q][pair + HALF] = y.low;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2) transform_queries(const Arguments a) {
    __shared__ __align__(16) Tile tiles[2]; // one is written while others read the one before
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 head = blockIdx.y / SLICES;
    const int column = blockIdx.y % SLICES * COLUMNS + warp * OF_WARP * 8;
    const u32 blocks = (a.lengths[blockIdx.z] + a.block - 1) / a.block;
    if (blockIdx.x * BLOCKS >= blocks) return;
    Columns columns;
    columns.load(a.duals + (u64)head * D * D, column, lane);
    pdl_wait(); // an earlier kernel writes the queries, but neither maps nor lengths
    pdl_trigger();
    const u64 own = (u64)blockIdx.z * a.heads + head;
    const u16* queries = a.queries + own * GROUP * D;
    float* out = a.out + own * a.query_blocks * GROUP * D + column;
    int turn = 0;
    for (u32 first = blockIdx.x * BLOCKS; first < blocks; first += gridDim.x * BLOCKS, turn ^= 1) {
        Tile& tile = tiles[turn];
        rotate(tile, a, queries, first, blocks);
        __syncthreads();
        float sums[STRIPS][OF_WARP][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                const int row = 16 * s + lane % 16, at = 16 * k + lane / 16 * 8;
                u32 high[4], low[4];
                ldmatrix_x4(high, &tile.high[row][at]);
                ldmatrix_x4(low, &tile.low[row][at]);
#pragma unroll
                for (int t = 0; t < OF_WARP; t++) {
                    mma_m16n8k16_bf16(sums[s][t], low, columns.high[t][k][0], columns.high[t][k][1]);
                    mma_m16n8k16_bf16(sums[s][t], high, columns.low[t][k][0], columns.low[t][k][1]);
                    mma_m16n8k16_bf16(sums[s][t], high, columns.high[t][k][0], columns.high[t][k][1]);
                }
            }
        const u32 rows = min((blocks - first) * GROUP, BLOCKS * GROUP);
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 row = 16 * s + 8 * i + lane / 4;
                if (row >= rows) continue;
                float* to = out + ((u64)first * GROUP + row) * D + 2 * (lane % 4);
#pragma unroll
                for (int t = 0; t < OF_WARP; t++)
                    *reinterpret_cast<float2*>(to + 8 * t) = make_float2(sums[s][t][2 * i], sums[s][t][2 * i + 1]);
            }
    }
}

// Maps queries and new keys of each head to another basis, in place; without queries (GROUP 0) rows of keys or values
// alone, from which a mean may be subtracted. Scores stay the same: the maps of keys and queries are inverse to each
// other up to a transposition.
//
// CPU twin: svd_core::Map::project_into. Compile-time shape: ELEMENT (1 for f16, 2 for bf16), HEAD_DIM, and GROUP query
// heads of a key/value head, or 0.
//
// A warp holds 16 columns of both maps in registers, as B fragments of mma, loaded before the PDL wait. The rows of a
// tile of tokens pass through shared memory; all warps have read them before one replaces them.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr u32 MAPS = 3; // of a head: queries, keys, values
constexpr u32 WARPS = HEAD_DIM / 16, THREADS = WARPS * LANES, STEPS = HEAD_DIM / 16;
constexpr u32 TOKENS = GROUP <= 8 ? 16 : 8;              // of a tile
constexpr u32 TILES = (TOKENS * GROUP + 15) / 16;        // of 16 rows of queries; one of keys follows
constexpr u32 ROWS = 16 * TILES + 16, PITCH = HEAD_DIM + 8; // rows of ldmatrix are in different banks

struct Arguments {
    u16* queries;       // element [token][head][GROUP][HEAD_DIM], replaced
    u16* keys;          // element [..][head][capacity][HEAD_DIM]; a token's rows are replaced
    const uint4* maps;  // [head][MAPS][WARPS][STEPS][LANES], see above; without queries from the map of the rows on
    const float* means; // [head][HEAD_DIM]: subtracted from mapped rows, without queries; or null
    const u32* slots;   // [token]: its row of the first head's keys; null: rows from `first` on
    u32 tokens, heads, capacity, first;
};

// The rows of a tile of tokens.
struct Tile {
    const Arguments& a;
    u32 head, first, count;

    // The address of a row, or null if no token has it.
    __device__ __forceinline__ u16* row(u32 r) const {
        const bool is_key = r >= 16 * TILES;
        const u32 token = is_key ? r - 16 * TILES : r / max(GROUP, 1);
        if (token >= count) return nullptr;
        if (!is_key)
            return a.queries + (((u64)(first + token) * a.heads + head) * GROUP + r % max(GROUP, 1)) * HEAD_DIM;
        const u32 slot = a.slots ? a.slots[first + token] : a.first + first + token;
        return a.keys + ((u64)head * a.capacity + slot) * HEAD_DIM;
    }
};

// Replaces the 16 rows from `from` on in the warp's 16 columns.
__device__ __forceinline__ void multiply(const u16 (&rows)[ROWS][PITCH], const Tile& tile, u32 from,
                                         const uint4 (&map)[STEPS]) {
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    float sums[2][4] = {};
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        u32 operand[4];
        ldmatrix_x4(operand, &rows[from + lane % 16][16 * step + lane / 16 * 8]);
        mma_m16n8k16(sums[0], operand, map[step].x, map[step].y);
        mma_m16n8k16(sums[1], operand, map[step].z, map[step].w);
    }
    if constexpr (GROUP == 0)
        if (tile.a.means) {
            const float* means = tile.a.means + tile.head * HEAD_DIM + 16 * warp + 2 * l;
#pragma unroll
            for (u32 i = 0; i < 8; i++) sums[i / 4][i % 4] -= __ldg(means + i / 4 * 8 + i % 2);
        }
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        if (u16* row = tile.row(from + g + 8 * half))
#pragma unroll
            for (u32 j = 0; j < 2; j++)
                *reinterpret_cast<u32*>(row + 16 * warp + 8 * j + 2 * l) =
                    pack_elements(sums[j][2 * half], sums[j][2 * half + 1]);
}

// Launch: grid (heads, blocks), THREADS threads: any number of blocks, which take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS) turn(const Arguments a) {
    __shared__ __align__(16) u16 rows[ROWS][PITCH];
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    uint4 query_map[STEPS], key_map[STEPS];
    const uint4* maps = a.maps + (u64)blockIdx.x * MAPS * WARPS * STEPS * LANES + warp * STEPS * LANES + lane;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        if constexpr (GROUP > 0) query_map[step] = __ldg(maps + step * LANES);
        key_map[step] = __ldg(maps + ((GROUP > 0 ? WARPS * STEPS : 0) + step) * LANES);
    }
    pdl_wait(); // the previous kernel writes queries and keys
    pdl_trigger();
    for (u32 first = blockIdx.y * TOKENS; first < a.tokens; first += gridDim.y * TOKENS) {
        const Tile tile{a, blockIdx.x, first, min(TOKENS, a.tokens - first)};
        for (u32 i = threadIdx.x; i < ROWS * HEAD_DIM / 8; i += THREADS) {
            const u32 r = i / (HEAD_DIM / 8), at = i % (HEAD_DIM / 8) * 8;
            const u16* row = tile.row(r);
            *reinterpret_cast<uint4*>(&rows[r][at]) =
                row ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
        if constexpr (GROUP > 0)
            for (u32 from = 0; from < tile.count * GROUP; from += 16) multiply(rows, tile, from, query_map);
        multiply(rows, tile, 16 * TILES, key_map);
        __syncthreads(); // the rows have been read
    }
}

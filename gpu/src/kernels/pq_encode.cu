// Nearest centroids of vectors, packed into the tiles that pq_attend reads.
//
// CPU twin: pq_core::encode_into. Compile-time shape: HEAD_DIM; M subspaces of DSUB components, NBITS; KEPT_M codes of
// KEPT_BITS bits per vector, where JOINED packs two codes of one component into one; KEYS or not; ELEMENT 0 (f32), 1
// (f16) or 2 (bf16); PAGED or not, and then HALF_TILES or not: with it, a "tile" has 16 tokens; TILE_BYTES.
// Launch: grid (group of TOKENS tokens, head, sequence), THREADS threads. A warp processes one subspace at a time: its
// lanes hold points in registers, and the centroids are staged in shared memory and broadcast to all lanes. The block
// then packs its codes from shared memory, one lane's words at a time, in the order of the tile.
// Floor: KSUB * DSUB multiply-adds and three operations for the running minimum, per point and subspace. Bound by
// arithmetic: five operations per centroid at two components.
#include "element.cuh"

#ifdef HALF_TILES
constexpr int TILE = 16;
#else
constexpr int TILE = 32;
#endif
constexpr int TOKENS = 128, TILES = TOKENS / TILE; // of a block
constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int KSUB = 1 << NBITS;
constexpr int LANE_POINTS = TOKENS / LANES, POINTS = DSUB <= 4 ? LANE_POINTS : 1; // of a lane; at a time
// Floats of a staged centroid: its components and half its squared norm, padded for 16-byte loads.
constexpr int PADDED = (DSUB + 1 + 3) / 4 * 4;
constexpr int STAGE_FLOATS = 1024; // floats of a warp's stage
constexpr int STAGE_CAPACITY = STAGE_FLOATS / PADDED;
constexpr int CENTROIDS = STAGE_CAPACITY >= KSUB  ? KSUB // staged centroids
                          : STAGE_CAPACITY >= 128 ? 128
                          : STAGE_CAPACITY >= 64  ? 64
                                                  : 32;
static_assert(CENTROIDS <= STAGE_CAPACITY && KSUB % CENTROIDS == 0, "a stage never reaches into the next subspace");
constexpr int LANE_CODES = TILE * KEPT_M / LANES, LANE_WORDS = LANE_CODES * KEPT_BITS / 32;
constexpr int WIDTH = KEPT_BITS == 6 ? LANE_WORDS / 3 : LANE_WORDS < 4 ? LANE_WORDS : 4, LOADS = LANE_WORDS / WIDTH;
static_assert(TILE * KEPT_M * KEPT_BITS / 8 == TILE_BYTES, "the host computes it, too");

struct Arguments {
    const Element* vectors;                          // [sequence][head][vector][HEAD_DIM], with the strides below
    const float* centroids;                          // [head][M][KSUB][DSUB]
    const u32* firsts;                               // [sequence]: token index of the first vector
    const u32* counts;                               // [sequence]: number of vectors
    const u32* pages;                                // [sequence][page of sequence]; not read unless PAGED
    u8* tiles;                                       // [page or sequence][head][tile][TILE_BYTES]
    u64 sequence_stride, head_stride, vector_stride; // in elements
    u32 heads, page_tiles, max_pages;
};

__device__ __forceinline__ float finite_element(const Arguments& a, u64 at) {
    const float x = to_float(a.vectors[at]);
    return fabsf(x) < infinity() ? x : 0; // NaN and infinity count as 0, as on the CPU
}

// The token and code that a lane has at index `place` of its codes: the inverse of key_code and value_code
// (pq_attend/codes.cuh).
__device__ __forceinline__ void token_and_code(int lane, int place, int& token, int& code) {
    constexpr int PARTS = KEPT_M < 64 ? 1 : 2;
    const int g = lane / 4, l = lane % 4;
#ifdef KEYS
    constexpr int MIDDLES = KEPT_M < 32 ? 1 : 2, STEPS = KEPT_M < 16 ? 2 : 4;
    const int high = place % 2, middle = place / 2 % MIDDLES, step = place / 2 / MIDDLES % STEPS;
    const int part = place / 2 / MIDDLES / STEPS % PARTS, half = place / 2 / MIDDLES / STEPS / PARTS;
    token = 16 * half + 8 * high + g;
    code = 32 * part + 16 * middle + 4 * (step ^ (g % STEPS)) + l;
#else
    constexpr int STEPS = KEPT_M < 16 ? 1 : KEPT_M < 32 ? 2 : 4, HIGHS = TILE / 16;
    const int odd = place % 2, part = place / 2 % PARTS, high = place / 2 / PARTS % HIGHS;
    const int step = place / 2 / PARTS / HIGHS % STEPS, half = place / 2 / PARTS / HIGHS / STEPS;
    token = 4 * half + l + 8 * (2 * high + odd);
    code = (32 * part + 8 * ((step + l) & 3) + g) % KEPT_M;
#endif
}

__shared__ float stage[WARPS][STAGE_FLOATS];
__shared__ u8 codes[M][TOKENS];

// Assigns POINTS points per lane in one subspace: tokens lane + 32 (first_point + i) of the block.
__device__ __forceinline__ void assign(const Arguments& a, int subspace, int first_point, u64 vectors, u32 from,
                                       u32 to) {
    const int lane = threadIdx.x % LANES;
    float* staged = stage[threadIdx.x / LANES];
    float x[POINTS][DSUB], nearest[POINTS];
    int index[POINTS];
#pragma unroll
    for (int i = 0; i < POINTS; i++) {
        const u32 token = lane + LANES * (first_point + i);
        nearest[i] = infinity(), index[i] = 0;
#pragma unroll
        for (int d = 0; d < DSUB; d++) {
            const u64 at = vectors + (u64)(token - from) * a.vector_stride + subspace * DSUB + d;
            x[i][d] = token >= from && token < to ? finite_element(a, at) : 0;
        }
    }
    const float* centroids = a.centroids + ((u64)blockIdx.y * M + subspace) * KSUB * DSUB;
    for (int base = 0; base < KSUB; base += CENTROIDS) {
        __syncwarp();
        for (int i = lane; i < CENTROIDS; i += LANES) {
            float norm = 0;
            for (int d = 0; d < DSUB; d++) {
                const float y = centroids[(base + i) * DSUB + d];
                staged[i * PADDED + d] = y;
                norm += y * y;
            }
            staged[i * PADDED + DSUB] = norm / 2;
        }
        __syncwarp();
#pragma unroll 2
        for (int c = 0; c < CENTROIDS; c++) {
            float y[PADDED];
#pragma unroll
            for (int d = 0; d < PADDED; d += 4)
                *reinterpret_cast<float4*>(y + d) = *reinterpret_cast<const float4*>(staged + c * PADDED + d);
#pragma unroll
            for (int i = 0; i < POINTS; i++) {
                float distance = y[DSUB];
#pragma unroll
                for (int d = 0; d < DSUB; d++) distance -= x[i][d] * y[d];
                if (distance < nearest[i]) nearest[i] = distance, index[i] = base + c;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < POINTS; i++) codes[subspace][lane + LANES * (first_point + i)] = index[i];
}

// Four codes of a lane, one in each byte of `value`, and the mask of the new bits.
__device__ __forceinline__ void lane_register(int tile, int lane, int index, u32 from, u32 to, u32& value,
                                              u32& new_mask) {
    value = 0, new_mask = 0;
    for (int k = 0; k < 4; k++) {
        int token, code;
        token_and_code(lane, 4 * index + k, token, code);
        token += tile * TILE;
#ifdef JOINED
        const u32 kept = codes[2 * code][token] | codes[2 * code + 1][token] << NBITS;
#else
        const u32 kept = codes[code][token];
#endif
        value |= kept << (8 * k);
        new_mask |= token >= from && token < to ? 0xffu << (8 * k) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pq_encode(const Arguments a) {
    const u32 sequence = blockIdx.z, head = blockIdx.y, first = a.firsts[sequence], count = a.counts[sequence];
    const u32 tile = first / TILE + blockIdx.x * TILES, tile_end = (first + count + TILE - 1) / TILE;
    if (count == 0 || tile >= tile_end) return;
    // The block's new tokens, relative to its first token.
    const u32 start = tile * TILE, from = first > start ? first - start : 0,
              to = min(first + count - start, (u32)TOKENS);
    const u64 vectors =
        sequence * a.sequence_stride + head * a.head_stride + (u64)(start + from - first) * a.vector_stride;
    for (int task = threadIdx.x / LANES; task < M * (LANE_POINTS / POINTS); task += WARPS)
        assign(a, task % M, task / M, vectors, from, to);
    __syncthreads();

    for (int i = threadIdx.x; i < TILES * LOADS * LANES; i += THREADS) {
        const int lane = i % LANES, load = i / LANES % LOADS, local_tile = i / LANES / LOADS;
        if (tile + local_tile >= tile_end) break;
#ifdef PAGED
        const u32 page = a.pages[(u64)sequence * a.max_pages + (tile + local_tile) / a.page_tiles];
#else
        const u32 page = sequence;
#endif
        const u64 index = ((u64)page * a.heads + head) * a.page_tiles + (tile + local_tile) % a.page_tiles;
        u32* words = reinterpret_cast<u32*>(a.tiles + index * TILE_BYTES) + (load * LANES + lane) * WIDTH;
        for (int w = 0; w < WIDTH; w++) {
            const int word = load * WIDTH + w;
            u32 value, new_mask;
            if (KEPT_BITS == 8) {
                lane_register(local_tile, lane, word, from, to, value, new_mask);
            } else if (KEPT_BITS == 4) {
                u32 high, high_mask;
                lane_register(local_tile, lane, 2 * word, from, to, value, new_mask);
                lane_register(local_tile, lane, 2 * word + 1, from, to, high, high_mask);
                value |= high << 4, new_mask = (new_mask & 0x0f0f0f0fu) | (high_mask & 0xf0f0f0f0u);
            } else { // three words hold four registers: the fourth in their top two bits each
                u32 fourth, fourth_mask;
                lane_register(local_tile, lane, word / 3 * 4 + word % 3, from, to, value, new_mask);
                lane_register(local_tile, lane, word / 3 * 4 + 3, from, to, fourth, fourth_mask);
                value |= (fourth >> (2 * (word % 3)) & 0x03030303u) << 6;
                new_mask = (new_mask & 0x3f3f3f3fu) | (fourth_mask & 0xc0c0c0c0u);
            }
            words[w] = new_mask == FULL ? value : (words[w] & ~new_mask) | (value & new_mask);
        }
    }
}

// Transforms rows and quantizes their coefficients to bins, on tensor cores: the first kernel of encoding planes with a
// transform.
//
// CPU twin: codec_core's `Transform` and `Quantize`, with the same bins. Compile-time shape: CHANNELS, HEAD_DIM, PAGED,
// ELEMENT (place.cuh); MAP_DIM, a multiple of 16 up to 128; CONTEXTS, SYMBOLS (tile.cuh). Compiled with --fmad=false.
// Prediction from the previous token is not supported.
//
// A coefficient of the CPU is a sum in f32, in order, of products of components x, from which the mean has been
// subtracted, and weights w. Here x has the same bits and the sum is approximated. If the approximation, in steps, is
// farther from the midpoint of two bins than it can be from the CPU's value, both round to the same bin; the other
// coefficients are listed and recomputed in the CPU's order. With S = sum |x w| <= |x| |w| (Euclidean norms, Cauchy and
// Schwarz) and n = MAP_DIM <= 128 products, both differ by at most
//   the CPU's roundings: n 2^-24 S                                                                    <= 0.763e-5 S
//   x and w as two bf16 each, whose sum is off by 2^-18 of it, and the product of both small parts,
//   2^-18 S, which is left out: 3 2^-18 S                                                             <= 1.145e-5 S
//   tensor cores: m16n8k16 adds 17 terms, or 9 twice. They are shifted to the exponent of the largest, and bits more
//   than 23 below it are truncated, as in the sum (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA
//   tensor cores", 2021; newer devices keep more bits). The loss is less than 20 2^-23 of the sum of magnitudes in
//   each of n / 16 products: 160 2^-23 S                                                              <= 1.908e-5 S
//   the same in products with small parts, which have separate sums: 320 2^-23 2^-8 S                 <= 0.015e-5 S
//   the addition of these sums, and roundings of the norms                                            <= 0.020e-5 S
// which is less than ERROR S = 4.57e-5 S. The CPU's quotient by the step and this one are each rounded by 2^-24. TINY
// covers products and small parts that underflow, 2^-126 each. A coefficient that is NaN, infinite, or may be 2^13
// steps from zero is marked with FAR_BIN: `codec_encode` quantizes such a tile again in the CPU's order.
//
// Launch: grid (ceil(chunks / CHUNKS), heads of the map, planes), a chunk being CHUNK tokens of a block of tokens; a
// warp for every 16 coefficients of a head. A warp keeps its part of the map in registers. The rows of a chunk are
// split into bf16 in shared memory, while those of the next are loaded.
//
// The floor is reading the rows and writing the bins.
#include "codec/maps.cuh"
#include "codec/tile.cuh"
#include "primitives_sm80.cuh"

constexpr int WARPS = MAP_DIM / 16, THREADS = WARPS * LANES, STEPS = MAP_DIM / 16;
constexpr int CHUNK = 32, CHUNKS = 16; // tokens at a time, and chunks of a block
constexpr int LISTED = 1024;           // bins of a block that are recomputed; others are marked
constexpr int STRIDE = MAP_DIM + 8;    // padded by 16 bytes: rows of an 8 x 8 matrix lie in different banks
constexpr float ERROR = 4.57763671875e-5f, TINY = 8.8817841970012523e-16f; // 3 2^-16, 2^-50

// A lane loads four components at a time; the number of lanes per row is a power of two.
constexpr int FOURS = MAP_DIM / 4, ACROSS = FOURS > 16 ? 32 : FOURS > 8 ? 16 : FOURS > 4 ? 8 : 4;
constexpr int DOWN = THREADS / ACROSS, PASSES = (CHUNK + DOWN - 1) / DOWN;

struct Arguments {
    const Planes* planes;
    const Maps* maps; // [plane of the frame]
    u16* bins;        // [plane of the launch][block of tokens][tile] of `bins_of_tile` numbers
    PlanesAt rows;    // planes of the launch
    Place place;
    u32 first_plane, tokens, block_tokens;
};

struct __align__(16) Shared {
    u16 rounded[2][CHUNK][STRIDE], rest[2][CHUNK][STRIDE]; // components in bf16, and rounding residuals
    float norms[2][CHUNK];                                 // of the components of each token
    u32 listed;
    u32 list[LISTED]; // token of the thread block * MAP_DIM + coefficient
};

// The square root, within a few units in the last place.
__device__ __forceinline__ float sqrt_approx(float x) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// Four components of a token.
struct alignas(4 * sizeof(Element)) Four {
    Element x[4];
};

// Part of a block of tokens.
struct Chunk {
    u32 block, first, rows; // `first` counts from the block's first token

    __device__ __forceinline__ Chunk(const Arguments& a, u32 index) {
        const u32 per_block = (a.block_tokens + CHUNK - 1) / CHUNK;
        block = index / per_block, first = index % per_block * CHUNK;
        const u32 all = min(a.tokens - block * a.block_tokens, a.block_tokens);
        rows = first < all ? min(all - first, CHUNK) : 0;
    }

    __device__ __forceinline__ u32 token(const Arguments& a, u32 row) const {
        return block * a.block_tokens + first + row;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) codec_quantize(const Arguments a) {
    __shared__ Shared shared;
    const u32 head = blockIdx.y * MAP_DIM;
    const Maps& maps = a.maps[a.first_plane + blockIdx.z];
    const Element* plane = a.rows[blockIdx.z];
    const u32 blocks = (a.tokens + a.block_tokens - 1) / a.block_tokens;
    const u32 chunks = blocks * ((a.block_tokens + CHUNK - 1) / CHUNK);
    const u32 first_chunk = blockIdx.x * CHUNKS, end_chunk = min(first_chunk + CHUNKS, chunks);
    if (threadIdx.x == 0) shared.listed = 0;

    // The weights of the warp's coefficients, with `group` and `group + 8` those of the lane.
    const int lane = threadIdx.x % LANES, group = lane / 4, pair = 2 * (lane % 4);
    const u32 coefficient = threadIdx.x / LANES * 16 + group;
    u32 map[STEPS][4], map_rest[STEPS][4];
    float inverse[2], bounds[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* weight = &maps.forward[head + 16 * step + pair + i / 2 * 8][coefficient + i % 2 * 8];
            split(weight[0], weight[MAP_DIM], map[step][i], map_rest[step][i]);
            bounds[i % 2] = fmaf(weight[0], weight[0], fmaf(weight[MAP_DIM], weight[MAP_DIM], bounds[i % 2]));
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 channel = head + coefficient + 8 * h;
        bounds[h] += __shfl_xor_sync(FULL, bounds[h], 1);
        bounds[h] += __shfl_xor_sync(FULL, bounds[h], 2);
        inverse[h] = 1.f / a.planes->tiles[a.first_plane + blockIdx.z][channel / LANES].steps[channel % LANES];
        bounds[h] = ERROR * (sqrtf(bounds[h]) + TINY) * inverse[h];
    }

    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const bool loads = across < FOURS;
    float mean[4];
#pragma unroll
    for (int j = 0; j < 4; j++) mean[j] = loads ? maps.mean[head + 4 * across + j] : 0;
    // Whether the lane's four components are adjacent, and aligned in every token.
    const Element* components = plane + a.place.of_channel(head + 4 * across);
    const bool together = HEAD_DIM % 4 == 0 && (u64)components % sizeof(Four) == 0 &&
                          (a.place.token_stride | a.place.page_stride) % 4 == 0;
    Four next[PASSES];
    auto load = [&](const Chunk& chunk) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const u32 row = pass * DOWN + down;
            if (!loads || row >= chunk.rows) continue;
            const u64 token = a.place.of_token(chunk.token(a, row));
            if (together) {
                next[pass] = *reinterpret_cast<const Four*>(components + token);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) next[pass].x[j] = plane[token + a.place.of_channel(head + 4 * across + j)];
        }
    };
    auto store = [&](const Chunk& chunk, int stage) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const u32 row = pass * DOWN + down;
            float x[4], squares = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[j] = loads && row < chunk.rows ? to_float(next[pass].x[j]) - mean[j] : 0;
                squares = fmaf(x[j], x[j], squares);
            }
#pragma unroll
            for (int step = ACROSS / 2; step; step /= 2) squares += __shfl_xor_sync(FULL, squares, step);
            if (row >= CHUNK || !loads) continue;
            uint2 rounded, rest;
            split(x[0], x[1], rounded.x, rest.x);
            split(x[2], x[3], rounded.y, rest.y);
            *reinterpret_cast<uint2*>(&shared.rounded[stage][row][4 * across]) = rounded;
            *reinterpret_cast<uint2*>(&shared.rest[stage][row][4 * across]) = rest;
            if (across == 0) shared.norms[stage][row] = sqrt_approx(squares) + TINY;
        }
    };

    Chunk chunk(a, first_chunk);
    load(chunk);
    store(chunk, 0);
    int stage = 0;
    for (u32 index = first_chunk; index < end_chunk; index++, stage ^= 1) {
        __syncthreads();
        const Chunk following(a, index + 1);
        const bool more = index + 1 < end_chunk;
        if (more) load(following);
        const u32 tile = (head + coefficient) / LANES, place = (head + coefficient) % LANES;
        u16* bins = a.bins + (((u64)blockIdx.z * blocks + chunk.block) * TILES + tile) * bins_of_tile(a.block_tokens) +
                    bin_index(chunk.first + pair, place);
#pragma unroll 1
        for (u32 first = 0; first < chunk.rows; first += GROUP) {
            float sums[4] = {}, small[2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                // Loads two steps of eight tokens; a last odd step is loaded twice.
                const int column = 16 * step + (step + 1 < STEPS ? lane / 8 : lane / 8 % 2) * 8;
                u32 rounded[4], rest[4];
                ldmatrix_x4(rounded, &shared.rounded[stage][first + lane % 8][column]);
                ldmatrix_x4(rest, &shared.rest[stage][first + lane % 8][column]);
#pragma unroll
                for (int i = 0; i < 2 && step + i < STEPS; i++) {
                    mma_m16n8k16_bf16(small[0], map_rest[step + i], rounded[2 * i], rounded[2 * i + 1]);
                    mma_m16n8k16_bf16(small[1], map[step + i], rest[2 * i], rest[2 * i + 1]);
                    mma_m16n8k16_bf16(sums, map[step + i], rounded[2 * i], rounded[2 * i + 1]);
                }
            }
            const float2 norms = *reinterpret_cast<const float2*>(&shared.norms[stage][first + pair]);
            float steps[4];
            u32 bin[4]; // in the low 16 bits
            bool certain[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                steps[i] = (sums[i] + (small[0][i] + small[1][i])) * inverse[i / 2];
                const float rounded = steps[i] + ROUND;
                bin[i] = __float_as_uint(rounded);
                // The |steps| / FAR_BIN term exceeds the error of quotients, and is 1/2 where a bin would be too far
                // from zero.
                const float bound = fmaf(fabsf(steps[i]), 1.f / FAR_BIN, (i % 2 ? norms.y : norms.x) * bounds[i / 2]);
                certain[i] = fabsf(steps[i] - (rounded - ROUND)) + bound < 0.5f;
            }
            if (!(certain[0] && certain[1] && certain[2] && certain[3])) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 row = first + pair + i % 2;
                    if (certain[i]) continue;
                    bin[i] = 0;
                    if (row >= chunk.rows) continue; // no such token
                    const float bound = (i % 2 ? norms.y : norms.x) * bounds[i / 2];
                    const bool near = fabsf(steps[i]) < FAR_BIN / 4 && bound < 0.25f;
                    const u32 at = near ? atomicAdd(&shared.listed, 1) : LISTED;
                    if (at < LISTED)
                        shared.list[at] = ((index - first_chunk) * CHUNK + row) * MAP_DIM + coefficient + i / 2 * 8;
                    else
                        bin[i] = FAR_BIN;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<u32*>(bins + first * LANES + 8 * GROUP * h) =
                    __byte_perm(bin[2 * h], bin[2 * h + 1], 0x5410);
        }
        if (more) store(following, stage ^ 1);
        chunk = following;
    }

    __syncthreads();
    for (u32 i = threadIdx.x; i < min(shared.listed, LISTED); i += THREADS) {
        const u32 row = shared.list[i] / MAP_DIM, channel = head + shared.list[i] % MAP_DIM;
        const u32 tile = channel / LANES, place = channel % LANES;
        const Chunk chunk(a, first_chunk + row / CHUNK);
        const Element* from = plane + a.place.of_token(chunk.token(a, row % CHUNK));
        const float steps = exact_coefficient(maps, a.place, from, channel) *
                            (1.f / a.planes->tiles[a.first_plane + blockIdx.z][tile].steps[place]);
        u16* bins = a.bins + (((u64)blockIdx.z * blocks + chunk.block) * TILES + tile) * bins_of_tile(a.block_tokens);
        bins[bin_index(chunk.first + row % CHUNK, place)] = (u16)bin_of(steps);
    }
}

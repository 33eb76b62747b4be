// Inverse transform of the codec's reconstruction points to 16-bit rows, on tensor cores: a row is the product of its
// points, in steps, with a map whose rows are multiplied by the steps.
//
// CPU twin: codec_core's `Transform`, inverse, after the steps. Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT
// (place.cuh), which is f16 or bf16; CONTEXTS, SYMBOLS (tile.cuh); MAP_DIM, a multiple of 16 up to 128; ROPE
// (rope.cuh). Points are exact in f16 (points.cuh). A weight, scaled by a power of two of its column, is the sum of two
// f16, which together have 22 bits of mantissa. So the error of a sum is about 2^-22 of its terms, and an element
// equals the CPU's unless the sum is close to the midpoint of two elements; then it may be the other one.
//
// Launch: grid (ceil(tokens / TOKENS), heads of the map, planes), THREADS threads, two blocks a multiprocessor. A warp
// holds all weights of 16 columns in registers. Points pass through a ring of STAGES stages in shared memory, from
// which every warp reads the points of its tokens. Columns are permuted within groups of 16 so that a lane stores four
// adjacent components, or two adjacent pairs of RoPE.
//
// The floor is reading the points and writing the rows.
#include "codec/maps.cuh"
#include "codec/points.cuh"
#include "codec/tile.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int TOKENS = 512, STAGES = 4, TILE = 16;
constexpr int ACROSS = MAP_DIM / 16, DOWN = ACROSS > 8 / 2 ? 1 : 8 / ACROSS; // warps along columns and tokens
constexpr int THREADS = ACROSS * DOWN * LANES;
constexpr int TILES_EACH = 2, STAGE_TOKENS = DOWN * TILES_EACH * TILE;
constexpr int CHUNKS = MAP_DIM / 8; // of 16 bytes, in a token's points of a head
static_assert(TOKENS % STAGE_TOKENS == 0, "blocks consist of whole stages");

struct Arguments {
    const Planes* planes;
    const Maps* maps; // [plane of the frame]
    Points points;
    PlanesAt rows; // planes of the launch
    Place place;
    u32 first_plane, first_token, tokens, block_tokens; // those of the launch; it begins with a block
#ifdef ROPE
    Rope rope;
#endif
};

struct Shared {
    u16 points[STAGES][STAGE_TOKENS * MAP_DIM];
    u64 tokens[TOKENS]; // their offsets in a plane
    float mean[MAP_DIM];
};

// The weights of a warp's 16 columns, as the matrices of 8 columns that a lane holds parts of, and what is common to
// the columns of its sums: column 4 (l % 4) + 2 i + j is [i][j].
struct Weights {
    u32 rounded[ACROSS][2][2], rest[ACROSS][2][2];
    float scale[2][2];

    __device__ Weights(const Planes& planes, const Maps& maps, u32 plane, u32 first_channel, u32 first_column,
                       bool rotated) {
        const u32 lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 component = component_of(first_column + g / 2 * 4 + 2 * i + g % 2, rotated);
            float weights[ACROSS][4], largest = 0;
#pragma unroll
            for (int step = 0; step < ACROSS; step++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 channel = first_channel + 16 * step + 2 * l + 8 * (j / 2) + j % 2;
                    const float map = maps.inverse[channel][component];
                    weights[step][j] = map * planes.tiles[plane][channel / LANES].steps[channel % LANES];
                    largest = fmaxf(largest, fabsf(weights[step][j]));
                }
            largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
            // The exponent that scales the largest weight to 2^14.
            const int exponent = 14 + 127 - (int)min(max(__float_as_uint(largest) >> 23, 15u), 254u);
            const float up = power_of_two(exponent), down = power_of_two(-exponent);
#pragma unroll
            for (int step = 0; step < ACROSS; step++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float low = weights[step][2 * j] * up, high = weights[step][2 * j + 1] * up;
                    const u32 pair = pack_half2(low, high);
                    rounded[step][i][j] = pair;
                    rest[step][i][j] = pack_half2(low - half_to_float(pair), high - half_to_float(pair >> 16));
                }
            scale[i][0] = __shfl_sync(FULL, down, 8 * l), scale[i][1] = __shfl_sync(FULL, down, 8 * l + 4);
        }
    }
};

// Additional inputs for the wide tiles of a token: the rest of their points, and their exponents.
struct WideTiles {
    const Arguments& a;
    u32 token; // of the launch
    u32 first_channel;

    __device__ u32 mark(u32 step) const {
        if (token >= a.tokens) return 0;
        const u32 blocks = (a.tokens + a.block_tokens - 1) / a.block_tokens;
        const u64 block = (u64)blockIdx.z * blocks + token / a.block_tokens;
        return a.points.wide[block * TILES + (first_channel + 16 * step) / LANES];
    }
    __device__ u32 rest(u32 step, u32 i) const {
        const u64 row = (u64)blockIdx.z * a.tokens + token;
        return *(const u32*)(a.points.rest + row * CHANNELS + first_channel + 16 * step + i);
    }
};

// The products of the points of 16 tokens with the weights: sums[i] has the columns of `weights.scale[i]`, of tokens
// lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void multiply(float (&sums)[2][4], const u16* points, u32 first_token,
                                         const Weights& weights) {
    const u32 lane = threadIdx.x % LANES;
    float rest[2][4] = {}; // separate, for twice as many independent products
#pragma unroll
    for (int step = 0; step < ACROSS; step++) {
        u32 point[4];
        ldmatrix_x4(point, swizzled<CHUNKS>(const_cast<u16*>(points), first_token + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mma_m16n8k16_f16(rest[i], point, weights.rest[step][i][0], weights.rest[step][i][1]);
            mma_m16n8k16_f16(sums[i], point, weights.rounded[step][i][0], weights.rounded[step][i][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = (sums[i][j] + rest[i][j]) * weights.scale[i][j % 2];
}

// The same if some tiles are wide.
__device__ __forceinline__ void multiply_wide(float (&sums)[2][4], const u16* points, u32 first_token,
                                              const Weights& weights, const WideTiles (&wide)[2]) {
    const u32 lane = threadIdx.x % LANES, l = lane % 4;
#pragma unroll
    for (int step = 0; step < ACROSS; step++) {
        u32 point[4], rest[4] = {};
        ldmatrix_x4(point, swizzled<CHUNKS>(const_cast<u16*>(points), first_token + lane % 16, 2 * step + lane / 16));
        u32 marks[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            marks[i] = wide[i].mark(step);
            if (marks[i]) rest[i] = wide[i].rest(step, 2 * l), rest[i + 2] = wide[i].rest(step, 2 * l + 8);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float part[4] = {};
            mma_m16n8k16_f16(part, rest, weights.rounded[step][i][0], weights.rounded[step][i][1]);
            mma_m16n8k16_f16(part, point, weights.rest[step][i][0], weights.rest[step][i][1]);
            mma_m16n8k16_f16(part, point, weights.rounded[step][i][0], weights.rounded[step][i][1]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 exponent = marks[j / 2] ? marks[j / 2] - 1 : 0;
                sums[i][j] += part[j] * weights.scale[i][j % 2] * power_of_two(exponent / 2) *
                              power_of_two(exponent - exponent / 2);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) codec_points_to_rows(const Arguments a) {
    __shared__ __align__(128) Shared shared;
    const u32 first_token = blockIdx.x * TOKENS, first_channel = blockIdx.y * MAP_DIM,
              plane = a.first_plane + blockIdx.z;
    const u32 tokens = min(a.tokens - first_token, TOKENS);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const Maps& maps = a.maps[plane];
    const bool rotated = is_rotated(blockIdx.z);
    const u16* points = a.points.nearest + ((u64)blockIdx.z * a.tokens + first_token) * CHANNELS + first_channel;
    auto copy = [&](u32 stage) { // tokens after the last one repeat it
#pragma unroll 1
        for (u32 i = threadIdx.x; i < STAGE_TOKENS * CHUNKS; i += THREADS) {
            const u32 row = i / CHUNKS, chunk = i % CHUNKS, token = min(stage * STAGE_TOKENS + row, tokens - 1);
            cp_async_16(swizzled<CHUNKS>(shared.points[stage % STAGES], row, chunk),
                        points + token * CHANNELS + 8 * chunk);
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (u32 stage = 0; stage + 1 < STAGES; stage++) copy(stage);

    for (u32 token = threadIdx.x; token < tokens; token += THREADS)
        shared.tokens[token] = a.place.of_token(a.first_token + first_token + token);
    for (u32 i = threadIdx.x; i < MAP_DIM; i += THREADS)
        shared.mean[i] = maps.mean[first_channel + component_of(i, rotated)];
    const u32 launch_blocks = (a.tokens + a.block_tokens - 1) / a.block_tokens;
    const u32 first_block = first_token / a.block_tokens,
              blocks = (first_token + tokens - 1) / a.block_tokens - first_block + 1;
    const u32 first_tile = first_channel / LANES, tiles = (first_channel + MAP_DIM - 1) / LANES - first_tile + 1;
    bool has_wide = false;
    for (u32 i = threadIdx.x; i < blocks * tiles; i += THREADS)
        has_wide |=
            a.points.wide[((u64)blockIdx.z * launch_blocks + first_block + i / tiles) * TILES + first_tile + i % tiles];
    const Weights weights(*a.planes, maps, plane, first_channel, warp % ACROSS * TILE, rotated);
    has_wide = __syncthreads_or(has_wide);

    Element* rows = a.rows[blockIdx.z];
    const u32 column = warp % ACROSS * TILE + 4 * (lane % 4);
    for (u32 stage = 0; stage * STAGE_TOKENS < tokens; stage++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy(stage + STAGES - 1);
#pragma unroll 1
        for (int tile = 0; tile < TILES_EACH; tile++) {
            const u32 in_stage = (warp / ACROSS * TILES_EACH + tile) * TILE, first = stage * STAGE_TOKENS + in_stage;
            const u32 token[2] = {first + lane / 4, first + lane / 4 + 8};
#ifdef ROPE
            Angles angles[2] = {}; // loaded during the products
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (rotated && token[i] < tokens)
                    angles[i] = Angles::of(a.rope, a.first_token + first_token + token[i], column);
#endif
            float sums[2][4] = {};
            if (has_wide) {
                const WideTiles wide[2] = {{a, first_token + token[0], first_channel},
                                           {a, first_token + token[1], first_channel}};
                multiply_wide(sums, shared.points[stage % STAGES], in_stage, weights, wide);
            } else {
                multiply(sums, shared.points[stage % STAGES], in_stage, weights);
            }
            const float4 mean = *reinterpret_cast<const float4*>(&shared.mean[column]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#ifdef ROPE
                if (rotated && token[i] < tokens)
                    store_rotated(rows + shared.tokens[token[i]], a.place, first_channel, column, mean, &sums[0][2 * i],
                                  &sums[1][2 * i], angles[i]);
                else
#endif
                if (token[i] < tokens)
                    store_four(rows + shared.tokens[token[i]], a.place, first_channel + column, mean, &sums[0][2 * i],
                               &sums[1][2 * i]);
        }
    }
    cp_async_wait_all();
}

// Inverse transform of the codec's coefficients to 16-bit rows, on tensor cores.
//
// CPU twin: codec_core's `Transform`, inverse. Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh),
// which is f16 or bf16; MAP_DIM, a multiple of 16 up to 128; WARPS, as many as fit the device's shared memory, up to 8;
// ROPE (rope.cuh). A factor is split into the sum of two bf16, which together have 16 bits of mantissa; the smallest of
// the four products is left out. So the error of a sum is about 2^-16 of its terms, and an element equals the CPU's
// unless the sum is close to the midpoint of two elements; then it may be the other one.
//
// Launch: grid (ceil(tokens / TOKENS), heads of the map, planes), THREADS threads. A block splits the map of its head
// once, in shared memory; a warp takes 16 tokens at a time. Components and coefficients are permuted within groups of
// 16 so that a lane loads four adjacent coefficients and stores four adjacent components, or two adjacent pairs of
// RoPE.
//
// The coefficients of a warp's next tile are in flight to shared memory during the current one: 64 KiB per
// multiprocessor, while loads of the next 16 to registers were 16 KiB.
//
// The floor is reading the coefficients and writing the rows.
#include "codec/maps.cuh"
#include "primitives_sm80.cuh"

constexpr int TOKENS = 512, THREADS = WARPS * LANES, TILE = 16, STEPS = MAP_DIM / 16;
constexpr int STRIDE = MAP_DIM + 8; // rows padded by 16 bytes: those of an 8 x 8 matrix lie in different banks

struct Shared {
    u16 map[2][MAP_DIM][STRIDE]; // rounded to bf16, and rounding residuals
    float mean[MAP_DIM];
    float4 coefficients[WARPS][STEPS][2][LANES]; // a tile's, by lane: each lane copies its own
};

// The position of index i of a group of 16 in a matrix product: lane l of four has 4 l to 4 l + 3.
__device__ __forceinline__ int permuted(int i) { return i / 16 * 16 + i % 4 / 2 * 8 + i % 16 / 4 * 2 + i % 2; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) codec_coefficients_to_rows(const TransformArguments a) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    const u32 first_token = blockIdx.x * TOKENS, first_channel = blockIdx.y * MAP_DIM;
    const Maps& maps = a.maps[a.first_plane + blockIdx.z];
    const bool rotated = is_rotated(blockIdx.z);
    for (int i = 2 * threadIdx.x; i < MAP_DIM * MAP_DIM; i += 2 * THREADS) {
        const int from = i / MAP_DIM, to = i % MAP_DIM;
        const float* map = &maps.inverse[first_channel + from][component_of(to, rotated)];
        u32 rounded, rest;
        split(map[0], map[component_of(1, rotated)], rounded, rest);
        *reinterpret_cast<u32*>(&shared.map[0][permuted(from)][permuted(to)]) = rounded;
        *reinterpret_cast<u32*>(&shared.map[1][permuted(from)][permuted(to)]) = rest;
    }
    for (int i = threadIdx.x; i < MAP_DIM; i += THREADS)
        shared.mean[i] = maps.mean[first_channel + component_of(i, rotated)];
    __syncthreads();

    const int lane = threadIdx.x % LANES, row = lane / 4, four = 4 * (lane % 4);
    const u32 tokens = min(a.tokens - first_token, TOKENS);
    const float* coefficients =
        a.coefficients + ((u64)blockIdx.z * a.tokens + first_token) * CHANNELS + first_channel + four;
    Element* rows = a.rows[blockIdx.z];
    auto& ring = shared.coefficients[threadIdx.x / LANES];
    auto copy = [&](u32 tile, int step) { // the tile may be past the last one
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 token = tile + row + 8 * i;
            const bool valid = token < tokens;
            const float* from = coefficients + (valid ? (u64)token * CHANNELS : 0) + 16 * step;
            cp_async_16_zfill(&ring[step][i][lane], from, valid);
        }
        cp_async_commit();
    };
    u32 tile = threadIdx.x / LANES * TILE;
    for (int step = 0; step < STEPS; step++) copy(tile, step);
    for (; tile < tokens; tile += WARPS * TILE) {
        const u32 token[2] = {tile + row, tile + row + 8};
        float sums[MAP_DIM / 8][4] = {};
#pragma unroll 2
        for (int step = 0; step < MAP_DIM; step += 16) {
            cp_async_wait<STEPS - 1>();
            u32 rounded[4], rest[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 four = ring[step / 16][i][lane];
                split(four.x, four.y, rounded[i], rest[i]);
                split(four.z, four.w, rounded[i + 2], rest[i + 2]);
            }
            copy(tile + WARPS * TILE, step / 16);
#pragma unroll
            for (int n = 0; n < MAP_DIM; n += 16) {
                u32 map[4], map_rest[4]; // [8 columns][8 rows]
                ldmatrix_x4_trans(map, &shared.map[0][step + lane % 16][n + lane / 16 * 8]);
                ldmatrix_x4_trans(map_rest, &shared.map[1][step + lane % 16][n + lane / 16 * 8]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float (&sum)[4] = sums[n / 8 + i];
                    mma_m16n8k16_bf16(sum, rounded, map_rest[2 * i], map_rest[2 * i + 1]);
                    mma_m16n8k16_bf16(sum, rest, map[2 * i], map[2 * i + 1]);
                    mma_m16n8k16_bf16(sum, rounded, map[2 * i], map[2 * i + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (token[i] >= tokens) continue;
            Element* to = rows + a.place.of_token(a.first_token + first_token + token[i]);
#pragma unroll
            for (int n = 0; n < MAP_DIM; n += 16) {
                const float4 mean = *reinterpret_cast<const float4*>(&shared.mean[n + four]);
                const float *low = &sums[n / 8][2 * i], *high = &sums[n / 8 + 1][2 * i];
#ifdef ROPE
                if (rotated) {
                    const Angles angles = Angles::of(a.rope, a.first_token + first_token + token[i], n + four);
                    store_rotated(to, a.place, first_channel, n + four, mean, low, high, angles);
                    continue;
                }
#endif
                store_four(to, a.place, first_channel + n + four, mean, low, high);
            }
        }
    }
    cp_async_wait_all();
}

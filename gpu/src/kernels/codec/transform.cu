// Rows to coefficients before they are encoded, and back when they have been decoded: a linear map for each head.
//
// CPU twin: codec_core's `Transform`. Compile-time shape, beside that of place.cuh: MAP_DIM, components of a head of
// the maps, which need not be those of the place. Compiled without contraction: products are rounded, then added in the
// order of what is mapped. The CPU passes over zeros, which changes no sum: one that starts at 0 is never -0.
//
// A block of threads has TOKENS tokens and COLUMNS components of what comes out, a thread 8 of those and 4 or 8 of
// these; what is mapped, and the map, pass through shared memory a STEP at a time, the next on its way while the last
// is used. Floor: a multiplication and an addition for each number and component of its head.
#include "codec/place.cuh"
#include "primitives_sm80.cuh"

constexpr int TOKENS = 64, COLUMNS = MAP_DIM > 64 ? 128 : 64, STEP = 16, THREADS = 128;
constexpr int PARTS = (MAP_DIM + COLUMNS - 1) / COLUMNS; // of a head
constexpr int ACROSS = 16, DOWN = THREADS / ACROSS;      // threads

struct Maps {
    float into[CHANNELS][MAP_DIM]; // row i: what component i of its head adds to the coefficients
    float back[CHANNELS][MAP_DIM]; // row i: what coefficient i adds to the components
    float mean[CHANNELS];
};

struct Arguments {
    const Maps* maps;    // of every plane of the frame
    float* coefficients; // [plane of the launch][token of the launch][CHANNELS]
    PlanesAt rows;       // of the launch
    Place place;
    u32 first_plane, first_token, tokens; // of the launch
};

struct Shared {
    u64 tokens[TOKENS];              // where they are in a plane
    float from[2][STEP][TOKENS + 4]; // threads with neighbouring columns are in different banks
    float map[2][STEP][COLUMNS];
};

template <bool BACK>
__device__ __forceinline__ void transform(const Arguments& a) {
    __shared__ Shared shared;
    const u32 first_token = blockIdx.x * TOKENS, head = blockIdx.y / PARTS, first_column = blockIdx.y % PARTS * COLUMNS;
    const u32 first_channel = head * MAP_DIM, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    const Maps& maps = a.maps[a.first_plane + blockIdx.z];
    const float (*map)[MAP_DIM] = (BACK ? maps.back : maps.into) + first_channel;
    Element* rows = a.rows[blockIdx.z];
    float* coefficients = a.coefficients + ((u64)blockIdx.z * a.tokens + first_token) * CHANNELS + first_channel;
    const u32 tokens = min(a.tokens - first_token, TOKENS);
    if (threadIdx.x < tokens) shared.tokens[threadIdx.x] = a.place.of_token(a.first_token + first_token + threadIdx.x);
    __syncthreads();

    auto fetch_map = [&](u32 step, int stage) {
#pragma unroll
        for (u32 i = threadIdx.x; i < STEP * COLUMNS; i += THREADS) {
            const u32 row = i / COLUMNS, column = first_column + i % COLUMNS;
            const bool there = step + row < MAP_DIM && column < MAP_DIM;
            cp_async_4_zfill(&shared.map[stage][row][i % COLUMNS], there ? &map[step + row][column] : &map[0][0],
                             there);
        }
        cp_async_commit();
    };
    static_assert(STEP == ACROSS, "a thread has one row of a step");
    float numbers[TOKENS / DOWN];
    auto load_numbers = [&](u32 step) {
        const u32 row = step + x, channel = first_channel + row;
#pragma unroll
        for (int i = 0; i < TOKENS / DOWN; i++) {
            const u32 token = y + DOWN * i;
            numbers[i] = 0;
            if (row >= MAP_DIM || token >= tokens) continue;
            if (BACK)
                numbers[i] = coefficients[token * CHANNELS + row];
            else
                numbers[i] = to_float(rows[shared.tokens[token] + a.place.of_channel(channel)]) - maps.mean[channel];
        }
    };
    auto store_numbers = [&](int stage) {
#pragma unroll
        for (int i = 0; i < TOKENS / DOWN; i++) shared.from[stage][x][y + DOWN * i] = numbers[i];
    };

    float sums[8][COLUMNS / ACROSS] = {}; // of tokens 4 y + 32 h + i, columns 4 x + 64 h + i
    fetch_map(0, 0);
    load_numbers(0);
    store_numbers(0);
    int stage = 0;
    for (u32 step = 0; step < MAP_DIM; step += STEP, stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();
        const bool more = step + STEP < MAP_DIM;
        if (more) fetch_map(step + STEP, stage ^ 1), load_numbers(step + STEP);
#pragma unroll
        for (int row = 0; row < STEP; row++) {
            float4 from[2], to[COLUMNS / 64];
#pragma unroll
            for (int h = 0; h < 2; h++)
                from[h] = *reinterpret_cast<const float4*>(&shared.from[stage][row][4 * y + 32 * h]);
#pragma unroll
            for (int h = 0; h < COLUMNS / 64; h++)
                to[h] = *reinterpret_cast<const float4*>(&shared.map[stage][row][4 * x + 64 * h]);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS / ACROSS; j++)
                    sums[i][j] += (&from[i / 4].x)[i % 4] * (&to[j / 4].x)[j % 4];
        }
        if (more) store_numbers(stage ^ 1);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 token = 4 * y + 32 * (i / 4) + i % 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / ACROSS; j++) {
            const u32 column = first_column + 4 * x + 64 * (j / 4) + j % 4, channel = first_channel + column;
            if (token >= tokens || column >= MAP_DIM) continue;
            if (BACK)
                rows[shared.tokens[token] + a.place.of_channel(channel)] = to_element(sums[i][j] + maps.mean[channel]);
            else
                coefficients[token * CHANNELS + column] = sums[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) codec_rows_to_coefficients(const Arguments a) {
    transform<false>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) codec_coefficients_to_rows(const Arguments a) {
    transform<true>(a);
}

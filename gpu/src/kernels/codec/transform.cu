// The linear transform of the codec, one map per head: it transforms rows to coefficients before encoding, and back
// after decoding.
//
// CPU twin: codec_core's `Transform`. Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh); MAP_DIM, the
// size of a head of the maps, which need not be HEAD_DIM; ROPE (rope.cuh). Compiled with --fmad=false: products are
// rounded, then added in the order of the input components, so results have the bits of the CPU. The CPU skips inputs
// of zero; that changes no sum, since a sum that starts at 0 is never -0.
//
// Launch: grid (ceil(tokens / TOKENS), heads * PARTS, planes), 128 threads, four blocks per multiprocessor. A block
// owns TOKENS = 64 tokens and COLUMNS output components of a head; a thread owns 8 tokens and 4 or 8 columns. Inputs
// and map pass through shared memory STEP = 16 components at a time, double-buffered: the next step is loaded during
// the current one, which cut the time from 6.1 to 3.8 ms (32 layers, 8 heads, 4,096 tokens of 128 components, H200).
//
// The floor is one multiplication and one addition per element and component of its head. Since both are rounded,
// tensor cores cannot compute them.
#include "codec/maps.cuh"
#include "primitives_sm80.cuh"

constexpr int TOKENS = 64, COLUMNS = MAP_DIM > 64 ? 128 : 64, STEP = 16, THREADS = 128;
constexpr int PARTS = (MAP_DIM + COLUMNS - 1) / COLUMNS; // blocks per head
constexpr int ACROSS = 16, DOWN = THREADS / ACROSS;      // threads along columns and tokens

struct Shared {
    u64 tokens[TOKENS];              // offsets in a plane
    float from[2][STEP][TOKENS + 4]; // inputs; the padding puts adjacent components in different banks
    float map[2][STEP][COLUMNS];
};

template <bool INVERSE>
__device__ __forceinline__ void transform(const TransformArguments& a) {
    __shared__ Shared shared;
    const u32 first_token = blockIdx.x * TOKENS, head = blockIdx.y / PARTS, first_column = blockIdx.y % PARTS * COLUMNS;
    const u32 first_channel = head * MAP_DIM, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    const Maps& maps = a.maps[a.first_plane + blockIdx.z];
    const float (*map)[MAP_DIM] = (INVERSE ? maps.inverse : maps.forward) + first_channel;
    const bool rotated = INVERSE && is_rotated(blockIdx.z);
    Element* rows = a.rows[blockIdx.z];
    float* coefficients = a.coefficients + ((u64)blockIdx.z * a.tokens + first_token) * CHANNELS + first_channel;
    const u32 tokens = min(a.tokens - first_token, TOKENS);
    if (threadIdx.x < tokens) shared.tokens[threadIdx.x] = a.place.of_token(a.first_token + first_token + threadIdx.x);
    __syncthreads();

    auto load_map = [&](u32 step, int stage) {
#pragma unroll
        for (u32 i = threadIdx.x; i < STEP * COLUMNS; i += THREADS) {
            const u32 row = i / COLUMNS, column = first_column + i % COLUMNS;
            const bool valid = step + row < MAP_DIM && column < MAP_DIM;
            cp_async_4_zfill(&shared.map[stage][row][i % COLUMNS],
                             valid ? &map[step + row][component_of(column, rotated)] : &map[0][0], valid);
        }
        cp_async_commit();
    };
    static_assert(STEP == ACROSS, "a thread loads one component of a step");
    float inputs[TOKENS / DOWN];
    auto load_inputs = [&](u32 step) {
        const u32 row = step + x, channel = first_channel + row;
#pragma unroll
        for (int i = 0; i < TOKENS / DOWN; i++) {
            const u32 token = y + DOWN * i;
            inputs[i] = 0;
            if (row >= MAP_DIM || token >= tokens) continue;
            if (INVERSE)
                inputs[i] = coefficients[token * CHANNELS + row];
            else
                inputs[i] = to_float(rows[shared.tokens[token] + a.place.of_channel(channel)]) - maps.mean[channel];
        }
    };
    auto store_inputs = [&](int stage) {
#pragma unroll
        for (int i = 0; i < TOKENS / DOWN; i++) shared.from[stage][x][y + DOWN * i] = inputs[i];
    };

    float sums[8][COLUMNS / ACROSS] = {}; // [4 h + i][4 h + i]: token 4 y + 32 h + i, column 4 x + 64 h + i
    load_map(0, 0);
    load_inputs(0);
    store_inputs(0);
    int stage = 0;
    for (u32 step = 0; step < MAP_DIM; step += STEP, stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();
        const bool more = step + STEP < MAP_DIM;
        if (more) load_map(step + STEP, stage ^ 1), load_inputs(step + STEP);
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
        if (more) store_inputs(stage ^ 1);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 token = 4 * y + 32 * (i / 4) + i % 4;
#ifdef ROPE
#pragma unroll
        for (int h = 0; h < COLUMNS / 64; h++) {
            const u32 column = first_column + 4 * x + 64 * h;
            if (!rotated || token >= tokens || column >= MAP_DIM) continue;
            const float* mean = &maps.mean[first_channel + component_of(column, true)];
            float* sum = &sums[i][4 * h];
            float2 first = make_float2(sum[0], sum[2]), second = make_float2(sum[1], sum[3]);
            rotate(first, second, make_float4(mean[0], mean[HALF], mean[1], mean[HALF + 1]),
                   Angles::of(a.rope, a.first_token + first_token + token, column));
            sum[0] = first.x, sum[1] = second.x, sum[2] = first.y, sum[3] = second.y;
        }
#endif
#pragma unroll
        for (int j = 0; j < COLUMNS / ACROSS; j++) {
            const u32 column = first_column + 4 * x + 64 * (j / 4) + j % 4,
                      channel = first_channel + component_of(column, rotated);
            if (token >= tokens || column >= MAP_DIM) continue;
            if (INVERSE)
                rows[shared.tokens[token] + a.place.of_channel(channel)] =
                    decoded_element(rotated ? sums[i][j] : sums[i][j] + maps.mean[channel]);
            else
                coefficients[token * CHANNELS + column] = sums[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) codec_rows_to_coefficients(const TransformArguments a) {
    transform<false>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) codec_coefficients_to_rows(const TransformArguments a) {
    transform<true>(a);
}

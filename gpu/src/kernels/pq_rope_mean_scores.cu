// The addends of the scores of coded tokens for a mean of the keys before RoPE:
// addend = <query, R(position) mean> * scale, in f16.
//
// CPU twin: pq_core::RopeMean::scores_into. Compile-time shape: HEAD_DIM 64 or 128; GROUP (query heads per KV head);
// ELEMENT of the queries. Launch: grid (blocks), THREADS threads, with PDL.
//
// With the coefficients a = q_x m_x + q_y m_y and b = q_y m_x - q_x m_y of a pair of components of frequency f, the
// addend at position p is the sum over pairs of a cos(p f) + b sin(p f). For a span of SPAN positions with centre c,
// the coefficients are rotated to c in f32, and
//   addend(c + d) = even(d) + odd(d),  addend(c - d) = even(d) - odd(d),
//   even(d) = sum of a cos(d f),  odd(d) = sum of b sin(d f),  d = 1/2, 3/2, ..., (SPAN - 1) / 2:
// products on tensor cores, half the size of a product over all positions. Their cosines and sines are the same for all
// spans, heads and queries, and are kept in shared memory (`fill_waves`). A unit of work of a warp is UNIT_ROWS queries
// times UNIT_SPANS spans: a lane has a share of the pairs of one query, and rotates it to every span. Rotated
// coefficients include the scale: if one of them overflows f16, an addend does.
//
// Before the PDL wait, everything but the queries is read, and the waves and the first centres are computed.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"
#include "wave.cuh"

constexpr int TILE = 32, WARPS = 8, THREADS = WARPS * LANES;
constexpr int PAIRS = HEAD_DIM / 2, STEPS = PAIRS / 16; // STEPS: mma steps along the pairs
constexpr int SHARE = PAIRS / 4;                        // pairs of a lane, from SHARE l on
constexpr int SPAN = 256, SPAN_TILES = SPAN / TILE, DISTANCES = SPAN / 2;
constexpr int UNIT_ROWS = 8, UNIT_SPANS = 2;
constexpr int CHUNKS = HEAD_DIM / 8; // 16-byte chunks of a row of waves

struct Arguments {
    const float* means;       // [head][HEAD_DIM]
    const float* frequencies; // [PAIRS]: radians per position
    const Element* queries;   // [sequence][head][GROUP][HEAD_DIM]
    const u32* lengths;       // [sequence]: coded tokens
    u16* addends;             // f16 [sequence][head][tile][GROUP][TILE]
    u64 first;                // position of the first coded token
    u32 batch, heads, tiles;
    float scale;
};

// Half of the angle by which each pair turns per position, in units of 2^-64 turns.
__shared__ u64 half_turns[PAIRS];
// f16 [distance][cosines and sines of all pairs], swizzled. Row 32 i + 8 j + c holds the distance with index
// 32 i + 8 (c / 2) + 2 j + c % 2, so that four consecutive products give a lane eight adjacent positions. Word l of
// chunk c of a row's cosines or sines holds the pairs SHARE l + 2 c and the next one.
__shared__ __align__(16) u16 waves[DISTANCES * HEAD_DIM];
// [warp][span of the unit][lane's share]: cosine and sine of the angle at the span's centre. The padding puts the
// shares of four lanes in different banks.
__shared__ __align__(16) float2 centres[WARPS][UNIT_SPANS][4][SHARE + 2];

// Called by the whole block.
__device__ __forceinline__ void fill_waves(const float* frequencies) {
    if (threadIdx.x < PAIRS) {
        const double turns = frequencies[threadIdx.x] * 0.079577471545947667884; // 1 / (4 pi)
        half_turns[threadIdx.x] = fraction_of(turns);
    }
    __syncthreads();
    constexpr int WORDS = PAIRS / 2, RUN = DISTANCES * WORDS / THREADS; // RUN: distances per thread
    const int word = threadIdx.x % WORDS, first = threadIdx.x / WORDS * RUN, pair = word % 4 * SHARE + word / 4 * 2;
    float2 wave[2], step[2]; // of two pairs: at a distance, and per step of the distance
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 turn = half_turns[pair + j] >> 32;
        wave[j] = wave_at(turn * (2 * first + 1)), step[j] = wave_at(2 * turn);
    }
#pragma unroll
    for (int i = first; i < first + RUN; i++) {
        const int row = i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
        u16* cosines = swizzled<CHUNKS>(waves, row, word / 4) + word % 4 * 2;
        u16* sines = swizzled<CHUNKS>(waves, row, CHUNKS / 2 + word / 4) + word % 4 * 2;
        *reinterpret_cast<u32*>(cosines) = pack_half2(wave[0].x, wave[1].x);
        *reinterpret_cast<u32*>(sines) = pack_half2(wave[0].y, wave[1].y);
#pragma unroll
        for (int j = 0; j < 2; j++)
            wave[j] = make_float2(wave[j].x * step[j].x - wave[j].y * step[j].y,
                                  wave[j].x * step[j].y + wave[j].y * step[j].x);
    }
}

// Loads N components, in 16-byte loads.
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const Element* from) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const uint4 words = reinterpret_cast<const uint4*>(from)[i];
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to[8 * i + 2 * j] = to_float((u16)pairs[j]), to[8 * i + 2 * j + 1] = to_float((u16)(pairs[j] >> 16));
        }
    }
}
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const float* from) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
}

// A lane's share of a query or a mean.
struct Share {
    float x[SHARE], y[SHARE];

    template <typename T>
    __device__ __forceinline__ explicit Share(const T* from) {
        load(x, from), load(y, from + PAIRS);
    }
};

// A lane's share of the coefficients of a query, at position 0, times the scale.
struct Coefficients {
    float a[SHARE], b[SHARE];

    __device__ __forceinline__ Coefficients(const Share& query, const Share& mean, float scale) {
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            a[i] = (query.x[i] * mean.x[i] + query.y[i] * mean.y[i]) * scale;
            b[i] = (query.y[i] * mean.x[i] - query.x[i] * mean.y[i]) * scale;
        }
    }
};

// The A operands of a unit: row g of mma `m` is span 2 m of the lane's query, row g + 8 is span 2 m + 1.
struct Rotated {
    u32 a[UNIT_SPANS / 2][STEPS][4], b[UNIT_SPANS / 2][STEPS][4];

    __device__ __forceinline__ Rotated(const Coefficients& at_zero, const float2 (&centres)[UNIT_SPANS][4][SHARE + 2],
                                       int l) {
#pragma unroll
        for (int span = 0; span < UNIT_SPANS; span++)
#pragma unroll
            for (int i = 0; i < SHARE; i += 2) {
                const float4 both = *reinterpret_cast<const float4*>(&centres[span][l][i]);
                const float cosine[2] = {both.x, both.z}, sine[2] = {both.y, both.w};
                float x[2], y[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    x[j] = at_zero.a[i + j] * cosine[j] + at_zero.b[i + j] * sine[j];
                    y[j] = at_zero.b[i + j] * cosine[j] - at_zero.a[i + j] * sine[j];
                }
                const int word = i / 2 % 2 * 2 + span % 2;
                a[span / 2][i / 4][word] = pack_half2(x[0], x[1]), b[span / 2][i / 4][word] = pack_half2(y[0], y[1]);
            }
    }
};

// Adds the products of two steps with the cosines or sines of 8 distances, which begin at chunk `chunk` of their rows.
__device__ __forceinline__ void multiply(float (&sums)[UNIT_SPANS / 2][4], const u32 (&rows)[UNIT_SPANS / 2][STEPS][4],
                                         int first_row, int chunk, int step, int lane) {
    u32 columns[4];
    ldmatrix_x4(columns, swizzled<CHUNKS>(waves, first_row + lane % 8, chunk + 2 * step + lane / 8));
#pragma unroll
    for (int m = 0; m < UNIT_SPANS / 2; m++) {
        if (step == 0)
            mma_m16n8k16_f16_init(sums[m], rows[m][0], columns[0], columns[1]);
        else
            mma_m16n8k16_f16(sums[m], rows[m][step], columns[0], columns[1]);
        mma_m16n8k16_f16(sums[m], rows[m][step + 1], columns[2], columns[3]);
    }
}

// Computes the addends of UNIT_ROWS queries from `first_row` on, and of UNIT_SPANS spans from `first_span` on.
__device__ __forceinline__ void add_unit(const Arguments& a, u32 sequence, u32 first_row, u32 first_span, u32 length) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 rows = a.heads * GROUP, row = min(first_row + g, rows - 1), head = row / GROUP, query = row % GROUP;
    const u64 place = (u64)sequence * a.heads;
    const Share mean(a.means + head * HEAD_DIM + SHARE * l);
    __syncwarp(); // the centres of the previous unit are no longer in use
#pragma unroll
    for (int pair = lane; pair < PAIRS; pair += LANES)
#pragma unroll
        for (int span = 0; span < UNIT_SPANS; span++) {
            const u64 centre = 2 * (a.first + (u64)(first_span + span) * SPAN) + SPAN - 1; // in half positions
            centres[warp][span][pair / SHARE][pair % SHARE] = wave_at((u32)(half_turns[pair] * centre >> 32));
        }
    __syncwarp();
    pdl_wait(); // the previous kernel may write the queries, and read the addends
    pdl_trigger();
    const Share query_share(a.queries + (place * GROUP + row) * HEAD_DIM + SHARE * l);
    const Rotated rotated(Coefficients(query_share, mean, a.scale), centres[warp], l);

    const u32 tile_end = first_row + g < rows ? (length + TILE - 1) / TILE : 0; // a row without a query has no tiles
    u16* out = a.addends + ((place + head) * a.tiles * GROUP + query) * TILE;
    auto store = [&](u32 tile, u32 token, const u32(&words)[4]) {
        if (tile < tile_end) st_global_v4(out + (u64)tile * GROUP * TILE + token, words);
    };
#pragma unroll 1
    for (int i = 0; i < DISTANCES / TILE; i++) {
        float even[4][UNIT_SPANS / 2][4], odd[4][UNIT_SPANS / 2][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                multiply(even[j], rotated.a, 32 * i + 8 * j, 0, step, lane);
                multiply(odd[j], rotated.b, 32 * i + 8 * j, CHUNKS / 2, step, lane);
            }
#pragma unroll
        for (int span = 0; span < UNIT_SPANS; span++) {
            u32 before[4], after[4]; // eight tokens on each side of the centre
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int first = span % 2 * 2;
                const float *x = even[j][span / 2] + first, *y = odd[j][span / 2] + first;
                after[j] = pack_half2(x[0] + y[0], x[1] + y[1]);
                before[3 - j] = pack_half2(x[1] - y[1], x[0] - y[0]);
            }
            const u32 tile = (first_span + span) * SPAN_TILES;
            store(tile + SPAN_TILES / 2 + i, 8 * l, after);
            store(tile + SPAN_TILES / 2 - 1 - i, TILE - 8 - 8 * l, before);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_rope_mean_scores(const Arguments a) {
    fill_waves(a.frequencies);
    __syncthreads();
    const u32 lane = threadIdx.x % LANES, slices = (a.heads * GROUP + UNIT_ROWS - 1) / UNIT_ROWS;
    // The warps of all blocks take the units of all sequences in turn. Lanes look up the lengths of 32 sequences at a
    // time.
    u32 unit = threadIdx.x / LANES * gridDim.x + blockIdx.x;
    for (u32 first = 0; first < a.batch; first += LANES) {
        const u32 length = first + lane < a.batch ? a.lengths[first + lane] : 0;
        const u32 units = (length + SPAN * UNIT_SPANS - 1) / (SPAN * UNIT_SPANS) * slices;
        const u32 end = warp_inclusive_sum(units), all = __shfl_sync(FULL, end, LANES - 1);
        for (; unit < all; unit += gridDim.x * WARPS) {
            const int entry = __ffs(__ballot_sync(FULL, unit < end)) - 1;
            const u32 of_entry = unit - __shfl_sync(FULL, end - units, entry);
            add_unit(a, first + entry, of_entry % slices * UNIT_ROWS, of_entry / slices * UNIT_SPANS,
                     __shfl_sync(FULL, length, entry));
        }
        unit -= all;
    }
    pdl_wait(); // also by warps without a unit: this grid must not end before the previous one
}

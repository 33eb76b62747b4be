// Attention of a prompt's queries on what rotations have left of keys and values: every head at its own two ranks,
// causal.
//
// CPU twin: svd_core::attend_into, row by row. Compile-time shape: DIM, 64 or 128, no rank above it; ELEMENT 1 or 2.
// Ranks are multiples of 8, read on the device.
//
// ZACK's row-block rule: where both ranks are half of DIM or less a block has twice the rows, so that blocks cost about
// the same, and so that rows take the registers that there are. Blocks are numbered longest first: a prompt's last rows
// see the most keys. A block's warps have 16 rows each, or twice 16; keys and values of TOKENS tokens pass through a
// ring of two tiles in shared memory.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES, ROWS = 16 * WARPS; // of a block at full rank
constexpr int TOKENS = 64;                                           // of a tile
constexpr int CHUNKS = DIM / 8;                                      // of 16 bytes, of a row of keys or values
constexpr int TILE = TOKENS * DIM;                                   // elements
constexpr int SHARED = 4 * TILE * 2;
static_assert(SHARED == SHARED_BYTES, "the host computes it, too");

struct Arguments {
    const u16* keys; // element [sequence][head][capacity][rank of the head]
    const u16* values;
    const u16*
        queries; // element [sequence][row][query head][DIM], with the strides below, of which the key rank counts
    const u32* lengths;       // [sequence]: keys
    const u32* counts;        // [sequence]: queries, the last of the keys' tokens
    const u32* key_ranks;     // [head]
    const u32* value_ranks;   // [head]
    const u64* key_offsets;   // [head]: rank components of a token of the heads before
    const u64* value_offsets; // [head]
    u16* out;                 // as the queries, of which the value rank is written
    u64 key_rank_sum, value_rank_sum, capacity;
    u64 sequence_stride, row_stride, query_stride; // elements of queries and outputs
    u32 heads, group;
    float scale; // of scores, times log2 e
};

extern __shared__ __align__(128) u16 shared[];

// A head of a sequence.
struct Head {
    const u16 *keys, *values;
    u32 key_rank, value_rank, length;

    // Chunks of up to RANK components; those beyond the head's ranks are zeros.
    template <int RANK>
    __device__ __forceinline__ void fetch(u32 tile, u16* to) const {
        constexpr int MINE = RANK / 8, ROWS_AT_ONCE = THREADS / MINE; // chunks of a row
        const u32 chunk = threadIdx.x % MINE, first = threadIdx.x / MINE;
        const bool key = 8 * chunk < key_rank, value = 8 * chunk < value_rank;
        const u16 *key_at = keys + (key ? 8 * chunk : 0), *value_at = values + (value ? 8 * chunk : 0);
#pragma unroll
        for (u32 row = first; row < TOKENS; row += ROWS_AT_ONCE) {
            if (TOKENS % ROWS_AT_ONCE && first >= ROWS_AT_ONCE) break; // threads that do not fill a row
            const u64 token = min(tile * TOKENS + row, length - 1);
            cp_async_16_zfill(swizzled<CHUNKS>(to, row, chunk), key_at + token * key_rank, key);
            cp_async_16_zfill(swizzled<CHUNKS>(to + TILE, row, chunk), value_at + token * value_rank, value);
        }
        cp_async_commit();
    }
};

// Rows `first` and on of a query head, FRAGMENTS times 16 a warp, at ranks of up to RANK. A row sees keys up to
// `before` plus its number.
template <int FRAGMENTS, int RANK>
__device__ __forceinline__ void attend(const Arguments& a, const Head& head, const u16* queries, u16* out, u32 first,
                                       u32 rows, u32 before) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    constexpr int STEPS = RANK / 16, OUTPUTS = RANK / 8;
    const u32 mine = first + warp * 16 * FRAGMENTS; // the warp's first row
    u32 query[FRAGMENTS][STEPS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 row = mine + 16 * f + g + i % 2 * 8, component = 16 * s + 2 * l + i / 2 * 8;
                const bool there = row < rows && component < head.key_rank;
                query[f][s][i] = there ? *(const u32*)(queries + row * a.row_stride + component) : 0;
            }
    float sums[FRAGMENTS][OUTPUTS][4] = {}, max[FRAGMENTS][2], weight[FRAGMENTS][2] = {};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) max[f][0] = max[f][1] = NOTHING;

    const u32 last = min(first + ROWS * FRAGMENTS, rows) - 1; // row of the block
    const u32 tiles = (before + last) / TOKENS + 1;           // that it sees
    head.fetch<RANK>(0, shared);
    for (u32 tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles)
            head.fetch<RANK>(tile + 1, shared + (tile + 1) % 2 * 2 * TILE);
        else
            cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        u16 *keys = shared + tile % 2 * 2 * TILE, *values = keys + TILE;
        // A tile beyond what the warp's last row sees is the others'.
        if (warp_uniform(mine < rows && tile * TOKENS <= before + mine + 16 * FRAGMENTS - 1)) {
            float scores[FRAGMENTS][TOKENS / 8][4];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int t = 0; t < TOKENS / 16; t++) {
                    // Tokens 16 t to 16 t + 15, components 16 s to 16 s + 15.
                    u32 key[4];
                    ldmatrix_x4(key, swizzled<CHUNKS>(keys, 16 * t + lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
#pragma unroll
                    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            if (s == 0)
                                mma_m16n8k16_init(scores[f][2 * t + half], query[f][s], key[2 * half],
                                                  key[2 * half + 1]);
                            else
                                mma_m16n8k16(scores[f][2 * t + half], query[f][s], key[2 * half], key[2 * half + 1]);
                        }
                }
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                const u32 seen = before + mine + 16 * f + g; // the last key of row g; of row g + 8 eight more
                if (warp_uniform(tile * TOKENS + TOKENS - 1 > before + mine + 16 * f))
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (tile * TOKENS + 8 * t + 2 * l + i % 2 > seen + i / 2 * 8) scores[f][t][i] = -infinity();
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float top = -infinity();
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++)
                        top = fmaxf(top, fmaxf(scores[f][t][2 * half], scores[f][t][2 * half + 1]));
                    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                    const float high = fmaxf(max[f][half], top * a.scale), keep = exp2_approx(max[f][half] - high);
                    max[f][half] = high, weight[f][half] *= keep;
#pragma unroll
                    for (int o = 0; o < OUTPUTS; o++) sums[f][o][2 * half] *= keep, sums[f][o][2 * half + 1] *= keep;
                }
            }
#pragma unroll
            for (int t = 0; t < TOKENS / 16; t++) {
                u32 p[FRAGMENTS][4]; // weights, as the other operand
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float* pair = &scores[f][2 * t + i / 2][i % 2 * 2];
                        const float first = exp2_approx(pair[0] * a.scale - max[f][i % 2]),
                                    second = exp2_approx(pair[1] * a.scale - max[f][i % 2]);
                        weight[f][i % 2] += first + second;
                        p[f][i] = pack_elements(first, second);
                    }
#pragma unroll
                for (int o = 0; o < OUTPUTS; o += 2) {
                    u32 value[4]; // tokens 16 t to 16 t + 15, components 8 o to 8 o + 15
                    ldmatrix_x4_trans(value, swizzled<CHUNKS>(values, 16 * t + lane % 16, o + lane / 16));
#pragma unroll
                    for (int f = 0; f < FRAGMENTS; f++) {
                        mma_m16n8k16(sums[f][o], p[f], value[0], value[1]);
                        mma_m16n8k16(sums[f][o + 1], p[f], value[2], value[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
    cp_async_wait<0>();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = weight[f][half];
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            const u32 row = mine + 16 * f + g + 8 * half;
            if (row >= rows) continue;
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
                if (8 * o < head.value_rank)
                    *(u32*)(out + row * a.row_stride + 8 * o + 2 * l) =
                        pack_elements(sums[f][o][2 * half] / sum, sums[f][o][2 * half + 1] / sum);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) svd_prefill(const Arguments a) {
    const u32 query_head = blockIdx.x, sequence = blockIdx.z, index = query_head / a.group;
    const u32 rows = a.counts[sequence], length = a.lengths[sequence];
    Head head;
    head.key_rank = a.key_ranks[index], head.value_rank = a.value_ranks[index], head.length = length;
    head.keys = a.keys + sequence * a.capacity * a.key_rank_sum + a.capacity * a.key_offsets[index];
    head.values = a.values + sequence * a.capacity * a.value_rank_sum + a.capacity * a.value_offsets[index];
    // The work of a row is that of the higher rank, in steps of a quarter.
    const u32 quarters = (max(head.key_rank, head.value_rank) + DIM / 4 - 1) / (DIM / 4);
    const u32 block_rows = quarters <= 2 ? 2 * ROWS : ROWS, blocks = (rows + block_rows - 1) / block_rows;
    if (blockIdx.y >= blocks || rows > length) return;
    const u32 first = (blocks - 1 - blockIdx.y) * block_rows;
    const u64 at = sequence * a.sequence_stride + query_head * a.query_stride;
    const u16* queries = a.queries + at;
    if (quarters <= 1)
        attend<2, DIM / 4>(a, head, queries, a.out + at, first, rows, length - rows);
    else if (quarters == 2)
        attend<2, DIM / 2>(a, head, queries, a.out + at, first, rows, length - rows);
    else if (quarters == 3)
        attend<1, DIM / 4 * 3>(a, head, queries, a.out + at, first, rows, length - rows);
    else
        attend<1, DIM>(a, head, queries, a.out + at, first, rows, length - rows);
}

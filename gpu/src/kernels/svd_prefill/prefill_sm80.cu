// Causal attention of a prompt's queries on projected keys and values, on sm_80: every KV head has its own key rank and
// value rank.
//
// CPU twin: svd_core::attend_exact_into, row by row. Source: ZACK, 5.3; the loop is that of FlashAttention-2.
//
// Compile-time shape: DIM (64 or 128; no rank is above it), ELEMENT (1 for f16, 2 for bf16), SHARED_BYTES, PAGED or
// not. Ranks are multiples of 8 and are read on the device.
//
// Launch: grid (query heads, row blocks * parts, sequences), 4 warps per block, two blocks per multiprocessor. Row
// blocks follow ZACK's rule: where both ranks of a head are at most DIM / 2, a block has 128 rows (queries) instead of
// 64, so blocks cost about the same and use the registers that a lower rank leaves free. The host launches enough
// blocks for 64 rows each; the surplus returns at once. Blocks are numbered longest first: the last rows of a prompt
// see the most keys. Few row blocks are split by their keys (split-K attention), so that no multiprocessor is idle. A
// warp owns 16 or 32 rows. All warps share the keys and values of a tile of 64 tokens, which pass through a ring of two
// tiles in shared memory (cp.async). Pages have a multiple of 16 tokens: every 32 tiles, each thread looks up where a
// quarter of a tile lies.
//
// The floor is the rate of the tensor cores. Bound by issue and latency: at full rank a thread takes 254 registers, so
// a scheduler has two warps, which issue in half of the slots, and tensor cores are 42 % busy. Three changes
// halved the time: no branch on the rank in the loop over mma, cheaper addresses, and fragments from shared memory that
// serve both halves of a warp's rows at half rank.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "svd_prefill/merge.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES, ROWS = 16 * WARPS; // rows of a block at full rank
constexpr int TOKENS = 64;                                           // tokens of a tile
constexpr int CHUNKS = DIM / 8;                                      // 16-byte chunks of a row of keys or values
constexpr int TILE = TOKENS * DIM;                                   // elements of a tile of keys or values
constexpr int SHARED = 4 * TILE * 2;
constexpr int LEAST_TILES = 8;                // of a part of a row block
constexpr int RESULT = (DIM / 2 + 8) * LANES; // floats of a warp's results, of up to two fragments of rows
static_assert(SHARED == SHARED_BYTES, "the host computes the same size");

struct Arguments {
    const u16* keys; // element [sequence (PAGED: page)][head][capacity][rank of the head, or DIM if `padded`]
    const u16* values;
    const u32* pages;         // PAGED: [sequence][max_pages]
    const u16* queries;       // element [sequence][row][query head][DIM], strided; only the key rank is read
    const u32* lengths;       // [sequence]: number of keys
    const u32* counts;        // [sequence]: number of queries; they belong to the last tokens
    const u32* key_ranks;     // [head]
    const u32* value_ranks;   // [head]
    const u64* key_offsets;   // [head]: sum of the key ranks of all earlier heads
    const u64* value_offsets; // [head]: the same of the value ranks
    u16* out;                 // as the queries; only the value rank is written, and zeros after it if `padded`
    float* results;           // [sequence][query head][row block][part][warp][RESULT]
    u32* arrived;             // [sequence][query head][row block][warp]
    u64 key_rank_sum, value_rank_sum;
    u64 capacity;                                  // of a sequence (PAGED: of a page) in tokens
    u64 sequence_stride, row_stride, query_stride; // in elements, of queries and outputs
    u32 max_pages, heads, group;
    u32 parts;   // blocks that share a row block, unless it has few tiles
    u32 window;  // keys that a row sees, its own included
    float scale; // factor of the scores, times log2(e)
    u32 padded;
};

extern __shared__ __align__(128) u16 shared[];

#ifdef PAGED
// Offsets of the first key and value of 16 tokens in elements, from the head's part of page 0 on.
struct Place {
    u64 key, value;
};
__shared__ Place places[THREADS];                  // of the quarters of PLACE_TILES tiles
constexpr int PLACE_TILES = THREADS * 16 / TOKENS; // successive ones
#endif

// A KV head of a sequence.
struct Head {
    const u16 *keys, *values; // PAGED: in page 0
    u32 key_rank, value_rank, length;

    __device__ __forceinline__ u32 pitch(const Arguments& a, u32 rank) const { return a.padded ? DIM : rank; }

#ifdef PAGED
    // Sets the places of the tiles from `first_tile` on, once all threads have used the earlier ones.
    __device__ __forceinline__ void set_places(const Arguments& a, u32 first_tile) const {
        const u32 token = first_tile * TOKENS + 16 * threadIdx.x, capacity = a.capacity, in_page = token % capacity;
        Place place = {};
        if (token < length) {
            const u64 page = a.capacity * __ldg(a.pages + (u64)blockIdx.z * a.max_pages + token / capacity);
            place.key = page * a.key_rank_sum + (u64)in_page * pitch(a, key_rank);
            place.value = page * a.value_rank_sum + (u64)in_page * pitch(a, value_rank);
        }
        __syncthreads();
        places[threadIdx.x] = place;
        __syncthreads();
    }
#endif

    // Starts copying the keys and values of a tile to shared memory, RANK components each; those at or above the head's
    // ranks are zeros. Tokens at or above the length repeat the last token, or are zeros if PAGED, where `places` of
    // the tile are set.
    template <int RANK>
    __device__ __forceinline__ void load_tile(const Arguments& a, u32 tile, u16* to) const {
        constexpr int ROW_CHUNKS = RANK / 8, ROWS_AT_ONCE = THREADS / ROW_CHUNKS;
        const u32 chunk = threadIdx.x % ROW_CHUNKS, first = threadIdx.x / ROW_CHUNKS;
        const u32 key_pitch = pitch(a, key_rank), value_pitch = pitch(a, value_rank);
        const bool key_valid = 8 * chunk < key_rank, value_valid = 8 * chunk < value_rank;
        const u16 *key_at = keys + (key_valid ? 8 * chunk : 0), *value_at = values + (value_valid ? 8 * chunk : 0);
#pragma unroll
        for (u32 row = first; row < TOKENS; row += ROWS_AT_ONCE) {
            if (TOKENS % ROWS_AT_ONCE && first >= ROWS_AT_ONCE) break; // the remaining threads do not fill a row
#ifdef PAGED
            const bool exists = tile * TOKENS + row < length;
            const Place& quarter = places[tile % PLACE_TILES * (TOKENS / 16) + row / 16];
            const u64 key = quarter.key + row % 16 * key_pitch, value = quarter.value + row % 16 * value_pitch;
#else
            const bool exists = true;
            const u64 token = min(tile * TOKENS + row, length - 1);
            const u64 key = token * key_pitch, value = token * value_pitch;
#endif
            cp_async_16_zfill(swizzled<CHUNKS>(to, row, chunk), key_at + key, key_valid && exists);
            cp_async_16_zfill(swizzled<CHUNKS>(to + TILE, row, chunk), value_at + value, value_valid && exists);
        }
        cp_async_commit();
    }
};

// Offset of the block's query head in the queries and outputs.
__device__ __forceinline__ u64 query_offset(const Arguments& a) {
    return blockIdx.z * a.sequence_stride + blockIdx.x * a.query_stride;
}

// The results of this warp's rows, of a part of their tiles.
__device__ __forceinline__ float* result_of(const Arguments& a, u32 part) {
    const u32 row_block = (blockIdx.z * gridDim.x + blockIdx.x) * (gridDim.y / a.parts) + blockIdx.y / a.parts;
    return a.results + ((row_block * a.parts + part) * WARPS + threadIdx.x / LANES) * RESULT;
}

// Computes a block's rows of a query head, from row `first`: 16 * FRAGMENTS rows per warp, both ranks at most RANK.
// `offset` is the token of row 0, so row i sees the last `window` of the keys 0 to `offset` + i. If `is_part`, the
// tiles from `first_tile` up to `tiles` are not all of them, and the results are stored for `merge_results`.
template <int FRAGMENTS, int RANK>
__device__ __forceinline__ void attend(const Arguments& a, const Head& head, u32 first, u32 rows, u32 offset,
                                       u32 first_tile, u32 tiles, bool is_part) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    constexpr int STEPS = RANK / 16, OUTPUTS = RANK / 8;
    const u32 warp_row = first + warp * 16 * FRAGMENTS; // first row of the warp
    // A fragments of the queries, which stay in registers.
    u32 query[FRAGMENTS][STEPS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 row = warp_row + 16 * f + g + i % 2 * 8, component = 16 * s + 2 * l + i / 2 * 8;
                const bool valid = row < rows && component < head.key_rank;
                const u16* at = a.queries + query_offset(a) + row * a.row_stride + component;
                query[f][s][i] = valid ? *(const u32*)at : 0;
            }
    // Accumulators of the output; of rows g and g + 8, the running maximum and the lane's part of the sum of weights.
    float sums[FRAGMENTS][OUTPUTS][4] = {}, max[FRAGMENTS][2], weight[FRAGMENTS][2] = {};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) max[f][0] = max[f][1] = NEG_INF;

    const auto load_tile = [&](u32 tile) {
#ifdef PAGED
        if (tile == first_tile || tile % PLACE_TILES == 0) head.set_places(a, tile / PLACE_TILES * PLACE_TILES);
#endif
        head.load_tile<RANK>(a, tile, shared + tile % 2 * 2 * TILE);
    };
    load_tile(first_tile);
    for (u32 tile = first_tile; tile < tiles; tile++) {
        if (tile + 1 < tiles)
            load_tile(tile + 1);
        else
            cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        u16 *keys = shared + tile % 2 * 2 * TILE, *values = keys + TILE;
        // A warp skips tiles that none of its rows see; other warps of the block may need them.
        const int first_token = tile * TOKENS, warp_key = offset + warp_row, window = a.window;
        if (warp_uniform(warp_row < rows && first_token < warp_key + 16 * FRAGMENTS &&
                         first_token + TOKENS - 1 > warp_key - window)) {
            float scores[FRAGMENTS][TOKENS / 8][4];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int t = 0; t < TOKENS / 16; t++) {
                    // B fragments of tokens 16 t to 16 t + 15, components 16 s to 16 s + 15.
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
                const int first_key = warp_key + 16 * f; // the last key that the fragment's first row sees
                if (warp_uniform(first_token + TOKENS - 1 > first_key || first_token <= first_key + 15 - window)) {
                    const int distance = first_key + g - first_token - 2 * l; // it wraps after a row's last key
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if ((u32)(distance + i / 2 * 8 - 8 * t - i % 2) >= (u32)window)
                                scores[f][t][i] = -infinity();
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float tile_max = -infinity();
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++)
                        tile_max = fmaxf(tile_max, fmaxf(scores[f][t][2 * half], scores[f][t][2 * half + 1]));
                    tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL, tile_max, 1));
                    tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL, tile_max, 2));
                    const float new_max = fmaxf(max[f][half], tile_max * a.scale);
                    const float rescale = exp2_approx(max[f][half] - new_max);
                    max[f][half] = new_max, weight[f][half] *= rescale;
#pragma unroll
                    for (int o = 0; o < OUTPUTS; o++)
                        sums[f][o][2 * half] *= rescale, sums[f][o][2 * half + 1] *= rescale;
                }
            }
#pragma unroll
            for (int t = 0; t < TOKENS / 16; t++) {
                u32 p[FRAGMENTS][4]; // A fragments of the weights: accumulators of the scores have their layout
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float* pair = &scores[f][2 * t + i / 2][i % 2 * 2];
                        const float even = exp2_approx(pair[0] * a.scale - max[f][i % 2]),
                                    odd = exp2_approx(pair[1] * a.scale - max[f][i % 2]);
                        weight[f][i % 2] += even + odd;
                        p[f][i] = pack_elements(even, odd);
                    }
#pragma unroll
                for (int o = 0; o < OUTPUTS; o += 2) {
                    u32 value[4]; // B fragments of tokens 16 t to 16 t + 15, components 8 o to 8 o + 15
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
    for (int f = 0; f < FRAGMENTS; f++) {
        if (warp_uniform(is_part)) {
            float* result = result_of(a, blockIdx.y % a.parts) + f * result_floats(RANK / 2);
            store_result<RANK / 2>(result, sums[f][0], max[f], weight[f]);
            continue;
        }
        const u32 row = warp_row + 16 * f;
        const float x = 1 / row_sum(weight[f][0]), y = 1 / row_sum(weight[f][1]);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            const float(&sum)[4] = sums[f][i];
            if (8 * i < head.value_rank)
                write_chunk(a.out + query_offset(a) + row * a.row_stride, a.row_stride, rows - min(rows, row), i,
                            pack_elements(sum[0] * x, sum[1] * x), pack_elements(sum[2] * y, sum[3] * y));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) svd_prefill(const Arguments a) {
    const u32 query_head = blockIdx.x, sequence = blockIdx.z, kv_head = query_head / a.group;
    const u32 rows = a.counts[sequence], length = a.lengths[sequence];
    Head head;
    head.key_rank = a.key_ranks[kv_head], head.value_rank = a.value_ranks[kv_head], head.length = length;
    head.keys = a.keys + a.capacity * a.key_offsets[kv_head];
    head.values = a.values + a.capacity * a.value_offsets[kv_head];
#ifndef PAGED
    head.keys += sequence * a.capacity * a.key_rank_sum, head.values += sequence * a.capacity * a.value_rank_sum;
#endif
    // A row costs its higher rank, rounded up to a multiple of DIM / 4: there is one instance of `attend` for each.
    const u32 quarters = (max(head.key_rank, head.value_rank) + DIM / 4 - 1) / (DIM / 4);
    const u32 block_rows = quarters <= 2 ? 2 * ROWS : ROWS, blocks = (rows + block_rows - 1) / block_rows;
    const u32 row_block = blockIdx.y / a.parts;
    if (row_block >= blocks || rows > length) return;
    const u32 first = (blocks - 1 - row_block) * block_rows, offset = length - rows;
    // Tiles that the block's first row sees, and those that its last row sees, of which this block has a part.
    const u32 last = min(first + block_rows, rows) - 1, seen = offset + first + 1;
    const u32 before = (seen - min(seen, a.window)) / TOKENS, all = (offset + last) / TOKENS + 1 - before;
    const u32 part = blockIdx.y % a.parts, parts = min(max(all / LEAST_TILES, 1), a.parts);
    if (part >= parts) return;
    const u32 first_tile = before + all / parts * part + min(part, all % parts);
    const u32 tiles = first_tile + all / parts + (part < all % parts);

    const bool is_part = parts > 1;
    if (quarters <= 1)
        attend<2, DIM / 4>(a, head, first, rows, offset, first_tile, tiles, is_part);
    else if (quarters == 2)
        attend<2, DIM / 2>(a, head, first, rows, offset, first_tile, tiles, is_part);
    else if (quarters == 3)
        attend<1, DIM / 4 * 3>(a, head, first, rows, offset, first_tile, tiles, is_part);
    else
        attend<1, DIM>(a, head, first, rows, offset, first_tile, tiles, is_part);

    const u32 warp = threadIdx.x / LANES;
    const u32 split = (sequence * gridDim.x + query_head) * (gridDim.y / a.parts) + row_block;
    if (is_part && !is_last_warp(a.arrived + split * WARPS + warp, parts)) return;
    const u32 fragments = block_rows / ROWS, sums = quarters * (DIM / 8); // of a thread
    for (u32 f = 0; f < fragments; f++) {
        const u32 row = first + 16 * (warp * fragments + f), count = rows - min(rows, row);
        u16* to = a.out + query_offset(a) + row * a.row_stride;
        if (is_part)
            merge_results(result_of(a, 0) + f * result_floats(sums), WARPS * RESULT, parts, sums, head.value_rank, to,
                          a.row_stride, count);
        if (a.padded)
            for (u32 i = head.value_rank / 8; i < DIM / 8; i++) write_chunk(to, a.row_stride, count, i, 0, 0);
    }
}

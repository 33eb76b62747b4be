// Decode attention to exact rows and chosen rows, some of which are still in host memory: a warp attends to
// these as they arrive over PCIe, and stores them in slots on the device for later launches.
//
// CPU twin: pq_core::attend_exact_into over the exact rows, then the chosen ones.
//
// Compile-time shape: DIM (64 or 128), ELEMENT (1 for f16, 2 for bf16), WARPS, SHARED_BYTES.
//
// Launch: grid (splits, heads of all sequences, slices), WARPS warps per block. A block serves QUERIES = 8 query heads
// of a group; a larger group has several slices, each of which reads the rows from the host. A head's tiles of 16
// tokens are split evenly over its blocks, which deal them to their warps in turn.
//
// The floor is PCIe: every missing row crosses it once. Each warp has 16 rows of both sides in flight, all warps
// together many times what saturates the link, so that attention is hidden behind the transfer: resident rows do not
// wait, and few tiles are left when the last row arrives. Device memory is idle meanwhile, so blocks also prefetch into
// L2 for later kernels.
//
// As fragments of an mma (tile_attention.cuh), four lanes need 64 bytes of a key at a time, but PCIe reads are most
// efficient in pieces of 128 bytes. So the eight lanes of two keys read a piece of one, then of the other, and exchange
// halves.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "softmax_reduce.cuh"
#include "tile_attention.cuh"

constexpr int THREADS = WARPS * LANES;
constexpr int PIECES = DIM / 64; // pieces of 128 bytes per row
constexpr int SHARED = WARPS * QUERIES * RESULT * 4 + (int)sizeof(Work);
static_assert(SHARED <= SHARED_BYTES, "the host reserves enough");

struct Arguments {
    u16* keys; // element [head of a sequence][capacity][DIM]: exact rows, then slots from `first_slot` on
    u16* values;
    const u32* exact_lengths; // [sequence]
    const u32* counts;        // [sequence]: chosen tokens of each head
    const u32* slots;         // [head][list_len]: slots of the chosen tokens
    const u16* host_keys;     // element [head][host_rows][DIM]
    const u16* host_values;
    const u32* tokens;  // [head][list_len]: host row of each chosen token
    const u32* missing; // [head][list_len / 32, rounded up]: bit set if a token is not in its slot; null if all are
    const u16* queries; // element [head][query of group][DIM]
    float* partials;    // [slice][head][split][2][QUERIES][RESULT]
    u32* arrived;       // [head][slice], zero between launches
    u16* out;           // element [head][query of group][DIM]
    u64 capacity, host_rows, list_len, first_slot;
    u32 heads; // of a sequence
    u32 group;
    float scale;        // factor of the scores, times log2(e)
    const u8* prefetch; // bytes to prefetch into L2
    u64 prefetch_len;
};

extern __shared__ __align__(16) float shared[];

constexpr u32 NO_SLOT = 0xffffffffu;

// The rows of a token: lane t and lane t + 16 have those of token t of a tile.
struct Place {
    u32 row;  // on the device, or in host memory
    u32 kept; // the device row to store it in, or NO_SLOT if it is resident

    __device__ __forceinline__ Place of(int t) const {
        return {__shfl_sync(FULL, row, t), __shfl_sync(FULL, kept, t)};
    }
};

// Rows of one side of a head.
struct SideRows {
    u16* device;
    const u16* host;

    __device__ __forceinline__ const u16* at(const Place& place) const {
        return (place.kept == NO_SLOT ? device : host) + (u64)place.row * DIM;
    }
    __device__ __forceinline__ void keep(const Place& place, int component, const uint4& words) const {
        if (place.kept != NO_SLOT) *reinterpret_cast<uint4*>(device + (u64)place.kept * DIM + component) = words;
    }
};

struct Head {
    SideRows keys, values;
    const u32 *slots, *tokens, *missing;
    u32 exact, length, first_slot;

    __device__ __forceinline__ Head(const Arguments& a, u32 head) {
        const u64 rows = head * a.capacity * DIM, host_rows = head * a.host_rows * DIM, list = head * a.list_len;
        keys = {a.keys + rows, a.host_keys + host_rows}, values = {a.values + rows, a.host_values + host_rows};
        slots = a.slots + list, tokens = a.tokens + list, first_slot = (u32)a.first_slot;
        missing = a.missing ? a.missing + head * ((a.list_len + 31) / 32) : nullptr;
        // Before the PDL wait, loads bypass L1.
        exact = __ldcg(&a.exact_lengths[head / a.heads]), length = exact + __ldcg(&a.counts[head / a.heads]);
    }

    // Tokens at or above the length repeat the last one; their weights are zero.
    __device__ __forceinline__ Place place(u32 token) const {
        token = min(token, length - 1);
        if (token < exact) return {token, NO_SLOT};
        const u32 i = token - exact, slot = first_slot + slots[i];
        if (!missing) return {slot, NO_SLOT};
        const u32 on_host = tokens[i];
        return missing[i / 32] >> i % 32 & 1 ? Place{on_host, slot} : Place{slot, NO_SLOT};
    }
};

// A tile's keys and values in lane 4 g + l.
struct Tile {
    uint4 keys[2][2 * PIECES]; // [i][2 j + r]: token 8 i + g - g % 2 + r, components 64 j + 32 (g % 2) + 8 l to + 7;
                               // exchanged: token 8 i + g, components 64 j + 32 r + 8 l to + 7
    uint4 values[4][PIECES];   // [i][j]: token 2 l + {0, 1, 8, 9}[i], components 64 j + 8 g to + 7

    __device__ __forceinline__ static int key_token(int i, int r, int g) { return 8 * i + (g & ~1) + r; }
    __device__ __forceinline__ static int key_component(int j, int g, int l) { return 64 * j + 32 * (g & 1) + 8 * l; }
    __device__ __forceinline__ static int value_token(int i, int l) { return 2 * l + i % 2 + i / 2 * 8; }

    __device__ __forceinline__ static void load(uint4& to, const u16* from) {
        ld_nc_no_allocate<4>(reinterpret_cast<u32*>(&to), from);
    }

    __device__ __forceinline__ void load_keys(const SideRows& rows, const Place& place, int g, int l) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u16* row = rows.at(place.of(key_token(i, r, g)));
#pragma unroll
                for (int j = 0; j < PIECES; j++) load(keys[i][2 * j + r], row + key_component(j, g, l));
            }
    }

    __device__ __forceinline__ void load_values(const SideRows& rows, const Place& place, int g, int l) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u16* row = rows.at(place.of(value_token(i, l)));
#pragma unroll
            for (int j = 0; j < PIECES; j++) load(values[i][j], row + 64 * j + 8 * g);
        }
    }

    // Stores the keys that have arrived from the host in their slots; called before `exchange`.
    __device__ __forceinline__ void keep_keys(const SideRows& rows, const Place& place, int g, int l) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Place of = place.of(key_token(i, r, g));
#pragma unroll
                for (int j = 0; j < PIECES; j++) rows.keep(of, key_component(j, g, l), keys[i][2 * j + r]);
            }
    }

    __device__ __forceinline__ void keep_values(const SideRows& rows, const Place& place, int g, int l) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Place of = place.of(value_token(i, l));
#pragma unroll
            for (int j = 0; j < PIECES; j++) rows.keep(of, 64 * j + 8 * g, values[i][j]);
        }
    }

    // Gives every lane both halves of its own rows' pieces.
    __device__ __forceinline__ void exchange(int g) {
        const bool is_odd = g & 1;
        const auto swap = [&](u32& even, u32& odd) {
            const u32 other = __shfl_xor_sync(FULL, is_odd ? even : odd, 4), own = is_odd ? odd : even;
            even = is_odd ? other : own, odd = is_odd ? own : other;
        };
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                uint4 &even = keys[i][2 * j], &odd = keys[i][2 * j + 1];
                swap(even.x, odd.x), swap(even.y, odd.y), swap(even.z, odd.z), swap(even.w, odd.w);
            }
    }
};

// Attends to the block's tiles of a head. Each warp writes a result row per query to shared memory, for `reduce`.
__device__ __forceinline__ void attend(const Arguments& a, const Head& head, u32 tile, u32 tile_end) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const bool keeps = head.missing && blockIdx.z == 0;
    tile += warp;
    Place place = {};
    Tile loaded;
    if (tile < tile_end) {
        place = head.place(tile * TILE + lane % TILE);
        loaded.load_keys(head.keys, place, g, l);
        loaded.load_values(head.values, place, g, l);
    }

    const u64 block = blockIdx.y * gridDim.x + blockIdx.x, blocks = (u64)gridDim.y * gridDim.x;
    if (blockIdx.z == 0)
        prefetch_global_l2(a.prefetch, a.prefetch_len, block * THREADS + threadIdx.x, blocks * THREADS);

    const u32 query_index = blockIdx.z * QUERIES + g;
    TileQueries queries;
    queries.load(a.queries, (u64)blockIdx.y * a.group + query_index, query_index < a.group, DIM, l);
    TileSums sums;
    while (warp_uniform(tile < tile_end)) {
        const u32 first = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        Place next = {};
        if (more) next = head.place(tile * TILE + lane % TILE);
        const bool arrives = warp_uniform(keeps && place.kept != NO_SLOT);
        if (arrives) loaded.keep_keys(head.keys, place, g, l);
        loaded.exchange(g);
        float scores[4];
        queries.scores(loaded.keys, scores);
        if (more) loaded.load_keys(head.keys, next, g, l);

        const uint2 weights = sums.weights(scores, a.scale, first, head.length, g);
        if (arrives) loaded.keep_values(head.values, place, g, l);
        sums.add(loaded.values, weights, DIM);
        if (more) loaded.load_values(head.values, next, g, l);
        place = next;
    }

    sums.store(shared + warp * QUERIES * RESULT, g, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_attend(const Arguments a) {
    Work& work = *reinterpret_cast<Work*>(shared + WARPS * QUERIES * RESULT);
    const u32 entry = blockIdx.z * gridDim.y + blockIdx.y, block = entry * gridDim.x + blockIdx.x;
    const Head head(a, blockIdx.y);
    const u32 tiles = (head.length + TILE - 1) / TILE;
    const u32 from = (u64)tiles * blockIdx.x / gridDim.x, to = (u64)tiles * (blockIdx.x + 1) / gridDim.x;
    if (threadIdx.x == 0) work.pieces = gridDim.x, work.first_block = entry * gridDim.x;
    pdl_wait(); // the previous kernels may write all inputs except lengths and counts
    pdl_trigger();
    attend(a, head, from, to);
    const u32 first_query = blockIdx.z * QUERIES, queries = min(a.group - first_query, (u32)QUERIES);
    reduce<QUERIES, DIM, WARPS, RESULT>(
        shared, queries, work, block, a.partials + (u64)block * 2 * QUERIES * RESULT, a.arrived + entry,
        [&](u32 query, int component, const Sum& sum) {
            const u64 row = (u64)blockIdx.y * a.group + first_query + query;
            *reinterpret_cast<u32*>(a.out + row * DIM + component) = sum.normalized();
        });
}

// Scalar codes between the products and attention: the rows of a block in the basis of its codes and back, and the
// exact rows behind a block that has left.
//
// CPU twin: transform_keys of pq_core::sq. Compile-time shape: ELEMENT of rows (1 for f16, 2 for bf16), HEAD_DIM.
//
// A thread holds a column of a map, in f32, and multiplies a tile of rows in shared memory with it.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "turn.cuh"

constexpr u32 D = HEAD_DIM, HALF = D / 2, THREADS = D;
constexpr u32 TILE = 8; // rows that are multiplied together

struct Tile {
    float rows[TILE][D];
};

// A column of a map (D, D), or of its transpose.
struct Column {
    float x[D];

    __device__ __forceinline__ void load(const float* map) {
#pragma unroll
        for (u32 i = 0; i < D; i++) x[i] = __ldg(map + i * D + threadIdx.x);
    }
    __device__ __forceinline__ void load_transposed(const float* map) {
#pragma unroll
        for (u32 i = 0; i < D; i += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(map + threadIdx.x * D + i));
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    }
    // This component of the mapped rows.
    __device__ __forceinline__ void multiply(const Tile& tile, float (&out)[TILE]) const {
#pragma unroll
        for (u32 r = 0; r < TILE; r++) out[r] = 0;
#pragma unroll
        for (u32 i = 0; i < D; i += 4)
#pragma unroll
            for (u32 r = 0; r < TILE; r++) {
                const float4 row = *reinterpret_cast<const float4*>(&tile.rows[r][i]);
                out[r] += row.x * x[i] + row.y * x[i + 1] + row.z * x[i + 2] + row.w * x[i + 3];
            }
    }
};

// Rows of tokens of a batch, and the same in the bases of their codes. The first token begins a block, whose first
// token is at position `sinks + firsts * block`.
struct RowsArguments {
    u16* keys;                // element [sequence][head][capacity][D], after RoPE, of the first token on
    u16* values;              // the same of values
    float* transformed_keys;  // [sequence][head][most][D]
    float* transformed_values;
    const float* maps;        // [head][D][D]: the bases of keys, or to restore them the dual bases
    const float* means;       // [head][D]: of keys before RoPE
    const float* frequencies; // [HALF]: radians a position
    const u32* firsts;        // [sequence]: the block
    const u32* counts;        // [sequence]: tokens
    u32 heads, capacity, most, sinks, block;
};

// A tile of a head's tokens.
struct Place {
    u32 head, sequence, first, count;
    u64 row, transformed; // of the first token
    int middle, relative; // position of its block's middle, and from there to the first token

    __device__ __forceinline__ Place(const RowsArguments& a, u32 first) : first(first) {
        head = blockIdx.y, sequence = blockIdx.z / 2, count = min(a.counts[sequence] - first, TILE);
        const u64 own = (u64)sequence * a.heads + head;
        row = (own * a.capacity + first) * D, transformed = (own * a.most + first) * D;
        middle = a.sinks + (a.firsts[sequence] + first / a.block) * a.block + a.block / 2;
        relative = (int)(first % a.block) - (int)(a.block / 2);
    }
};

// The mean of the head's keys before RoPE, of the thread's pair of components.
struct PairMean {
    float frequency, x, y;

    __device__ __forceinline__ PairMean(const RowsArguments& a, u32 pair) {
        const float* mean = a.means + blockIdx.y * D;
        frequency = __ldg(a.frequencies + pair), x = __ldg(mean + pair), y = __ldg(mean + pair + HALF);
    }
    __device__ __forceinline__ float2 at(int position) const { return Turn(frequency, position)(x, y); }
};

// Values are coded as they are: to f32, or BACK to elements.
template <bool BACK>
__device__ __forceinline__ void copy_values(const RowsArguments& a, u32 count) {
    for (u32 first = blockIdx.x * TILE; first < count; first += gridDim.x * TILE) {
        const Place place(a, first);
        for (u32 i = threadIdx.x; i < place.count * D; i += THREADS) {
            u16& own = a.values[place.row + i];
            float& transformed = a.transformed_values[place.transformed + i];
            if constexpr (BACK)
                own = to_element(transformed);
            else
                transformed = to_float(own);
        }
    }
}

// Keys less their mean, relative to the middle of their block and in its basis; values as they are.
//
// Launch: grid (blocks, heads, twice the sequences), THREADS threads: any number of blocks, which take tiles in turn.
// The block of tokens is a multiple of a tile.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const RowsArguments a) {
    __shared__ __align__(16) Tile tile;
    const u32 count = a.counts[blockIdx.z / 2], step = gridDim.x * TILE;
    if (blockIdx.z % 2) return copy_values<false>(a, count);
    if (blockIdx.x * TILE >= count) return;
    const u32 pair = threadIdx.x % HALF;
    const PairMean mean(a, pair);
    Column basis;
    basis.load(a.maps + (u64)blockIdx.y * D * D);
    for (u32 first = blockIdx.x * TILE; first < count; first += step) {
        const Place place(a, first);
        const Turn back(mean.frequency, -place.middle);
        for (u32 t = threadIdx.x / HALF; t < TILE; t += 2) {
            const u16* key = a.keys + place.row + t * D + pair;
            float2 own = make_float2(0, 0);
            if (t < place.count) own = back(to_float(key[0]), to_float(key[HALF]));
            const float2 common = mean.at(place.relative + (int)t);
            tile.rows[t][pair] = own.x - common.x, tile.rows[t][pair + HALF] = own.y - common.y;
        }
        __syncthreads();
        float out[TILE];
        basis.multiply(tile, out);
#pragma unroll
        for (u32 t = 0; t < TILE; t++)
            if (t < place.count) a.transformed_keys[place.transformed + t * D + threadIdx.x] = out[t];
        __syncthreads(); // the tile has been read
    }
}

// What `prepare` made of rows, as codes have kept it, to rows.
//
// Launch: as above.
extern "C" __global__ void __launch_bounds__(THREADS) restore(const RowsArguments a) {
    __shared__ __align__(16) Tile tile;
    const u32 count = a.counts[blockIdx.z / 2], step = gridDim.x * TILE;
    if (blockIdx.z % 2) return copy_values<true>(a, count);
    if (blockIdx.x * TILE >= count) return;
    const u32 pair = threadIdx.x % HALF;
    const PairMean mean(a, pair);
    Column inverse;
    inverse.load_transposed(a.maps + (u64)blockIdx.y * D * D);
    for (u32 first = blockIdx.x * TILE; first < count; first += step) {
        const Place place(a, first);
        for (u32 t = 0; t < TILE; t++)
            tile.rows[t][threadIdx.x] =
                t < place.count ? a.transformed_keys[place.transformed + t * D + threadIdx.x] : 0;
        __syncthreads();
        float out[TILE];
        inverse.multiply(tile, out);
        __syncthreads();
#pragma unroll
        for (u32 t = 0; t < TILE; t++) tile.rows[t][threadIdx.x] = out[t];
        __syncthreads();
        const Turn forward(mean.frequency, place.middle);
        for (u32 t = threadIdx.x / HALF; t < place.count; t += 2) {
            const float2 common = mean.at(place.relative + (int)t);
            const float2 key = forward(tile.rows[t][pair] + common.x, tile.rows[t][pair + HALF] + common.y);
            u16* to = a.keys + place.row + t * D + pair;
            to[0] = to_element(key.x), to[HALF] = to_element(key.y);
        }
        __syncthreads(); // the tile has been read
    }
}

struct CloseUpArguments {
    uint4* rows;       // element [side][sequence][head][capacity][D]
    const u32* counts; // [sequence]: tokens that have left, a block or none
    u32 heads, capacity, sinks, behind; // rows behind them
};

constexpr u32 CHUNKS = D / 8; // pieces of 16 bytes of a row
constexpr u32 MOVERS = 256;

// Moves the rows behind a block that has left to where it was.
//
// Launch: grid (heads, sequences, keys and values), MOVERS threads.
extern "C" __global__ void __launch_bounds__(MOVERS) close_up(const CloseUpArguments a) {
    const u32 left = a.counts[blockIdx.y];
    if (left == 0) return;
    const u64 own = ((u64)blockIdx.z * gridDim.y + blockIdx.y) * a.heads + blockIdx.x;
    uint4* to = a.rows + (own * a.capacity + a.sinks) * CHUNKS;
    for (u32 first = 0; first < a.behind * CHUNKS; first += MOVERS) {
        const u32 i = first + threadIdx.x;
        const bool is_row = i < a.behind * CHUNKS;
        const uint4 piece = is_row ? to[left * CHUNKS + i] : make_uint4(0, 0, 0, 0);
        __syncthreads(); // all have read what this one overwrites, here or a turn before
        if (is_row) to[i] = piece;
    }
}

struct StoredValuesArguments {
    u16* values;         // element [head][capacity][D], of the first token on
    const float* map;    // [D][D]
    const float* means;  // [head][D]
    const float* scales; // [head], powers of two
    u32 count, capacity;
};

// Values that a model without folded maps has computed, as a folded one computes them: less their mean, in units of
// their scale, mapped.
//
// Launch: grid (blocks, heads), THREADS threads: any number of blocks, which take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS) map_values(const StoredValuesArguments a) {
    __shared__ __align__(16) Tile tile;
    Column map;
    map.load(a.map);
    const float mean = a.means[blockIdx.y * D + threadIdx.x], per_scale = 1 / a.scales[blockIdx.y];
    for (u32 first = blockIdx.x * TILE; first < a.count; first += gridDim.x * TILE) {
        u16* rows = a.values + ((u64)blockIdx.y * a.capacity + first) * D + threadIdx.x;
        const u32 count = min(a.count - first, TILE);
        for (u32 t = 0; t < TILE; t++)
            tile.rows[t][threadIdx.x] = t < count ? (to_float(rows[t * D]) - mean) * per_scale : 0;
        __syncthreads();
        float out[TILE];
        map.multiply(tile, out);
#pragma unroll
        for (u32 t = 0; t < TILE; t++)
            if (t < count) rows[t * D] = to_element(out[t]);
        __syncthreads(); // the tile has been read
    }
}

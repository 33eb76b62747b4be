// Nearest centroids of the few vectors that a step appends to many sequences and heads, for one or two sides (keys and
// values) in one launch, written into the tiles that pq_attend reads.
//
// CPU twin: pq_core::encode_into, with the sums of pq_encode.cu, so that both kernels choose the same centroids.
// Compile-time shape: for the sides FIRST and SECOND (the latter optional): _KEYS (0 or 1), _M subspaces of _DSUB
// components, _NBITS; ELEMENT 0 (f32), 1 (f16) or 2 (bf16); PAGED or not, and then HALF_TILES or not: with it, a
// "tile" has 16 tokens.
// Launch: grid (stored codes of a vector / WARPS times groups of vectors, head, side), THREADS threads. A warp computes
// one stored code of up to 32 vectors: its lanes hold the centroids in registers, and vectors are broadcast one at a
// time. Every warp writes only the bits of its own codes, so the split over subspaces needs no reduction.
// Floor: the launch and a chain of three loads (counts, then vectors, then the write). For many vectors, per vector and
// subspace: KSUB * (DSUB + 3) / 32 operations of a warp and the two reductions.
#include "element.cuh"
#include "primitives_sm80.cuh"

#ifdef HALF_TILES
constexpr int TILE = 16;
#else
constexpr int TILE = 32;
#endif
constexpr int WARPS = 4, THREADS = WARPS * LANES;

struct Side {
    const Element* vectors; // [sequence][head][vector][HEAD_DIM], with the strides of Arguments
    const float* centroids; // [head][M][KSUB][DSUB]
    u8* tiles;              // [page or sequence][head][tile][bytes of a tile]
};

struct Arguments {
    Side sides[2];
    const u32* firsts;                               // [sequence]: token index of the first vector
    const u32* counts;                               // [sequence]: number of vectors, at most max_count
    const u32* pages;                                // [sequence][page of sequence]; not read unless PAGED
    u64 sequence_stride, head_stride, vector_stride; // in elements
    u32 batch, heads, max_count;
    u32 group; // vectors of a warp, at most 32
    u32 page_tiles, max_pages;
};

// The bits of one code in a tile. The other bits of its bytes belong to codes of other warps, so bits are written
// atomically where a code does not fill its byte.
__device__ __forceinline__ void set_bits(u32* word, int shift, int bits, u32 value) {
    const u32 mask = ((1u << bits) - 1) << shift;
    atomicAnd(word, ~mask);
    atomicOr(word, value << shift & mask);
}

// The centroids of one subspace in the registers of a warp: a lane has lane, lane + 32 and so on.
template <int KSUB, int DSUB>
struct Centroids {
    static constexpr int PER_LANE = (KSUB + LANES - 1) / LANES;
    float y[PER_LANE][DSUB], half_norm[PER_LANE];

    __device__ __forceinline__ void load(const float* centroids) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int c = threadIdx.x % LANES + k * LANES;
            float norm = 0;
#pragma unroll
            for (int d = 0; d < DSUB; d++) {
                y[k][d] = c < KSUB ? centroids[c * DSUB + d] : 0;
                norm += y[k][d] * y[k][d];
            }
            half_norm[k] = c < KSUB ? norm / 2 : infinity();
        }
    }

    // The nearest centroid to the vector of each lane in `active`, returned to that lane. Ties go to the lower index.
    __device__ __forceinline__ u32 nearest(u32 active, const float (&x)[DSUB]) const {
        const int lane = threadIdx.x % LANES;
        u32 code = 0;
        for (; active; active &= active - 1) {
            const int owner = __ffs(active) - 1;
            float of_owner[DSUB], smallest = infinity();
            u32 index = 0;
#pragma unroll
            for (int d = 0; d < DSUB; d++) of_owner[d] = __shfl_sync(FULL, x[d], owner);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                float distance = half_norm[k];
#pragma unroll
                for (int d = 0; d < DSUB; d++) distance -= of_owner[d] * y[k][d];
                if (distance < smallest) smallest = distance, index = lane + k * LANES;
            }
            // Maps floats to unsigned integers of the same order; -0 becomes +0 first.
            const u32 bits = __float_as_uint(smallest + 0.f), ordered = bits ^ ((int)bits >> 31 | 0x80000000u);
            const u32 least = __reduce_min_sync(FULL, ordered);
            const u32 winner = __reduce_min_sync(FULL, ordered == least ? index : FULL);
            if (lane == owner) code = winner;
        }
        return code;
    }
};

// A quantizer and its layout, CodeLayout of the host: subspaces of one component are stored in pairs.
template <bool KEYS, int M, int DSUB_, int NBITS>
struct Quantizer {
    static constexpr int DSUB = DSUB_, KSUB = 1 << NBITS, JOINED = DSUB == 1 ? 2 : 1; // subspaces of a stored code
    static constexpr int CODES = M / JOINED, BITS = NBITS * JOINED;                   // stored codes of a vector
    static constexpr int TILE_BYTES = TILE * CODES * BITS / 8, LANE_WORDS = TILE_BYTES / 4 / LANES;
    static constexpr int WIDTH = BITS == 6 ? LANE_WORDS / 3 : LANE_WORDS < 4 ? LANE_WORDS : 4;
    static_assert(CODES % WARPS == 0, "a block has one code for each of its warps");

    // Writes stored code `code` of a token of a tile: the positions of CodeLayout.
    static __device__ __forceinline__ void store(u8* tile, u32 token, int code, u32 value) {
        constexpr int PARTS = CODES < 64 ? 1 : 2;
        const int part = code / 32;
        int lane, place;
        if (KEYS) {
            constexpr int MIDDLES = CODES < 32 ? 1 : 2, STEPS = CODES < 16 ? 2 : 4;
            const int half = token / 16, high = token / 8 % 2, g = token % 8;
            const int middle = code / 16 % 2, step = (code / 4 % STEPS) ^ (g % STEPS);
            lane = 4 * g + code % 4;
            place = ((half * PARTS + part) * STEPS + step) * MIDDLES * 2 + middle * 2 + high;
        } else {
            constexpr int STEPS = CODES < 16 ? 1 : CODES < 32 ? 2 : 4, HIGHS = TILE / 16;
            const int half = token / 4 % 2, l = token % 4, i = token / 8, step = (code / 8 + 4 - l) % 4 % STEPS;
            lane = 4 * (code % 8) + l;
            place = (((half * STEPS + step) * HIGHS + i / 2) * PARTS + part) * 2 + i % 2;
        }
        const int at = place / 4, shift = place % 4 * 8; // register and byte of a lane's codes
        auto word = [&](int i) {
            return reinterpret_cast<u32*>(tile) + (i / WIDTH * LANES + lane) * WIDTH + i % WIDTH;
        };
        if (BITS == 8) {
            reinterpret_cast<u8*>(word(at))[place % 4] = value;
        } else if (BITS == 4) {
            set_bits(word(at / 2), shift + at % 2 * 4, 4, value);
        } else if (at % 4 < 3) { // three words hold four registers: the fourth in their top two bits each
            set_bits(word(at / 4 * 3 + at % 4), shift, 6, value);
        } else {
#pragma unroll
            for (int i = 0; i < 3; i++) set_bits(word(at / 4 * 3 + i), shift + 6, 2, value >> (2 * i));
        }
    }
};

template <typename Q>
__device__ __forceinline__ void append(const Arguments& a, const Side& side) {
    constexpr int BLOCKS = Q::CODES / WARPS; // of a group of vectors
    const int lane = threadIdx.x % LANES, code = blockIdx.x % BLOCKS * WARPS + threadIdx.x / LANES;
    const u32 head = blockIdx.y, vector = blockIdx.x / BLOCKS * a.group + lane;
    const u32 sequence = vector / a.max_count, i = vector - sequence * a.max_count;
    Centroids<Q::KSUB, Q::DSUB> centroids[Q::JOINED];
#pragma unroll
    for (int j = 0; j < Q::JOINED; j++) {
        const u64 subspace = (u64)head * Q::CODES * Q::JOINED + code * Q::JOINED + j;
        centroids[j].load(side.centroids + subspace * Q::KSUB * Q::DSUB);
    }
    pdl_wait(); // the previous kernel may write anything but the centroids
    pdl_trigger();
    const bool is_new = lane < a.group && sequence < a.batch && i < a.counts[sequence];
    const u32 active = __ballot_sync(FULL, is_new);
    if (!active) return;
    const u32 token = is_new ? a.firsts[sequence] + i : 0, tile = token / TILE;
    const Element* row = side.vectors + sequence * a.sequence_stride + head * a.head_stride + i * a.vector_stride;
    float x[Q::JOINED][Q::DSUB];
#pragma unroll
    for (int j = 0; j < Q::JOINED * Q::DSUB; j++) {
        const float component = is_new ? to_float(row[code * Q::JOINED * Q::DSUB + j]) : 0;
        // NaN and infinity count as 0, as on the CPU.
        x[j / Q::DSUB][j % Q::DSUB] = fabsf(component) < infinity() ? component : 0;
    }
    u32 page = sequence, value = 0;
#ifdef PAGED
    if (is_new) page = a.pages[(u64)sequence * a.max_pages + tile / a.page_tiles];
#endif
#pragma unroll
    for (int j = 0; j < Q::JOINED; j++) value |= centroids[j].nearest(active, x[j]) << (j * Q::BITS / Q::JOINED);
    const u64 index = ((u64)page * a.heads + head) * a.page_tiles + tile % a.page_tiles;
    if (is_new) Q::store(side.tiles + index * Q::TILE_BYTES, token % TILE, code, value);
}

extern "C" __global__ void __launch_bounds__(THREADS) pq_append(const Arguments a) {
    if (blockIdx.z == 0) append<Quantizer<FIRST_KEYS, FIRST_M, FIRST_DSUB, FIRST_NBITS>>(a, a.sides[0]);
#ifdef SECOND_M
    if (blockIdx.z == 1) append<Quantizer<SECOND_KEYS, SECOND_M, SECOND_DSUB, SECOND_NBITS>>(a, a.sides[1]);
#endif
}

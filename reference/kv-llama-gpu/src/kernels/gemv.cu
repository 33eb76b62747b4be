// Products of a weight matrix with the few activations of a decode step, fused with a Llama's other operations: RMSNorm
// before, RoPE and append, SwiGLU or the residual sum after.
//
// CPU twin: ops::linear, with rms_norm, Rope::rotate, swiglu and add of the forward pass.
//
// Compile-time shape: N_IN inputs (a multiple of 8), COLUMNS (sequences, at most 32), ELEMENT (1 for f16, 2 for bf16)
// of weights and activations, HEAD_DIM; NORM if the input is the residual stream; and one of
//   ADD to the residual stream, SWIGLU, ROPE (queries, and rows that are appended to a cache), HEADS (the same rows as
//   elements, for the kernels of a prompt) or STORE (f32);
// WARPS of a block, DEPTH of a warp's ring, SHARED_BYTES.
//
// Launch: any number of blocks. A block takes a tile at a time: 16 rows of the matrix, as 8 pairs: rows i and i + 8,
// gate and up, or the two components that RoPE rotates, so that one thread ends with both. Warps take chunks of 64
// inputs in turn; their sums are added in shared memory. The order of a sum depends on WARPS alone.
//
// The floor is reading the weights once. They are packed (weights.cu) in the order in which lanes read them, so that a
// chunk is 2 KiB of contiguous memory. Tensor cores multiply: A = 16 rows of weights, B = the columns. Lane 4 g + l
// reads 16 bytes of both rows of pair g, which are its A fragments of two mma. This permutes the inputs within 32;
// columns are read in the same order. Weights are constant, so the first ones are in flight before the PDL wait, while
// the previous kernel ends.
//
// RMSNorm needs no pass of its own. Its scale factors out of the sum, so the input is the residual stream times the
// weights of the norm, and the scale is applied at the end. ADD and `begin` of step.cu, which write the residual
// stream, write that product and the sum of squares of every 16 components next to it.
//
// N.B. On an H200 that copies 4.23 TB/s, the products of an 8B model's layers run at 4.37 TB/s for one column and 4.17
// for four. With row-major weights, of which a warp reads 128 bytes of 16 rows, they ran at 3.7; without PDL, at 3.9;
// with inputs loaded at their use instead of through the ring, at 3.6.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int THREADS = WARPS * LANES, TILES = (COLUMNS + 7) / 8;
constexpr int CHUNK = 64, CHUNKS = (N_IN + CHUNK - 1) / CHUNK;  // inputs of a warp at a time
constexpr int COLUMN_LANES = COLUMNS < 8 ? 4 * COLUMNS : LANES; // that have inputs of a column
constexpr int STAGE = 4 * LANES + 2 * TILES * COLUMN_LANES; // words of 16 bytes of a chunk: 16 rows, and the columns
static_assert(N_IN % 8 == 0 && THREADS >= 8 * COLUMNS, "loads of 16 bytes; a thread for every pair and column");

struct Arguments {
    const uint4* weight;  // packed elements, see above
    const float* bias;    // [row], or null
    const u16* input;     // element [column][N_IN]
    const float* squares; // NORM: [column][N_IN / 16, rounded up]
    float* residual;      // ADD: [column][row]; STORE: the output, [column][stride]
    const float* norm;    // ADD: [row], weights of the norm that follows
    u16* out;           // ADD: residual * norm; SWIGLU: [column][row / 2]; HEADS: [column][row];
                        // ROPE: queries [column][query head][HEAD_DIM]
    float* squares_out; // ADD: [column][row / 16, rounded up]
    u16* keys;          // ROPE: element [sequence or page][head][capacity][HEAD_DIM], rotated
    u16* values;        // the same of values
    const float* cos;   // [position][HEAD_DIM / 2]
    const float* sin;   // the same
    const u32* positions; // [column]
    const u32* slots;     // [column]: the row of the first head's keys and values
    u32 rows, columns, query_heads, heads, capacity;
    float eps;
    u32 stride; // STORE: floats from one column's output to the next
};

struct Shared {
    uint4 ring[WARPS][DEPTH * STAGE];
    // Double-buffered, so that one barrier per tile suffices. The padding keeps the lanes of a store in different
    // banks.
    float sums[2][WARPS][8 * TILES][20];
    float scales[8 * TILES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host computes the same size");

extern __shared__ __align__(16) u8 shared_bytes[];

// The number of tiles: of 8 pairs of rows.
__device__ __forceinline__ u32 tiles_of(const Arguments& a) { return (a.rows + 15) / 16; }

// The rows of a pair.
__device__ __forceinline__ void pair_rows(const Arguments& a, u32 tile, u32 pair, u32& upper, u32& lower) {
#if defined(SWIGLU)
    upper = 8 * tile + pair, lower = a.rows / 2 + upper;
#elif defined(ROPE) || defined(HEADS)
    constexpr u32 TILES_OF_HEAD = HEAD_DIM / 16;
    upper = tile / TILES_OF_HEAD * HEAD_DIM + tile % TILES_OF_HEAD * 8 + pair, lower = upper + HEAD_DIM / 2;
#else
    upper = 16 * tile + pair, lower = upper + 8;
#endif
}

// The copies of this warp's chunks, tile after tile, to its ring in shared memory: weights, and inputs of the columns.
// A lane reads only its own copies, so that no lane waits for another.
struct Stream {
    uint4* ring; // [stage]: [32 inputs][upper, lower row][lane] of weights, [32 inputs][8 columns][lane] of columns
    u32 tile;
    int chunk, warp, lane;

    __device__ __forceinline__ Stream(const Arguments& a, uint4* ring, int warp, int lane)
        : ring(ring), tile(blockIdx.x), chunk(warp), warp(warp), lane(lane) {}

    __device__ __forceinline__ bool ends(const Arguments& a) const { return tile >= tiles_of(a) || chunk >= CHUNKS; }

    // Inputs beyond the last are zero-filled; their source is not read, but must be a valid address.
    __device__ __forceinline__ void copy(uint4* to, const u16* row, int j) const {
        const int k = chunk * CHUNK + 32 * j;
        if constexpr (N_IN % CHUNK == 0) {
            cp_async_16(to, row + k);
        } else {
            const bool valid = k + 8 * (lane % 4) < N_IN;
            cp_async_16_zfill(to, valid ? row + k : row, valid);
        }
    }

    __device__ __forceinline__ void copy_weights(const Arguments& a, int stage) const {
        uint4* to = ring + stage * STAGE + lane;
        const uint4* from = a.weight + ((u64)tile * CHUNKS + chunk) * (4 * LANES) + lane;
#pragma unroll
        for (int i = 0; i < 4; i++) cp_async_16(to + i * LANES, from + i * LANES);
    }

    // Columns beyond the last repeat it; their sums are not used.
    __device__ __forceinline__ void copy_columns(const Arguments& a, int stage) const {
        if (lane >= COLUMN_LANES) return;
        uint4* to = ring + stage * STAGE + 4 * LANES + lane;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const u16* column = a.input + (u64)min(8 * t + lane / 4, a.columns - 1) * N_IN + 8 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 2; j++) copy(to + (j * TILES + t) * COLUMN_LANES, column, j);
        }
    }

    __device__ __forceinline__ void advance(const Arguments& a) {
        chunk += WARPS;
        if (chunk < CHUNKS) return;
        chunk = warp, tile += gridDim.x;
    }
};

// The epilogue's inputs of a thread's pair and column, loaded at the start of the tile.
struct Pair {
    u32 upper, lower; // rows
    float x[4];       // ADD: residual and norm of both rows; ROPE: cosine and sine

    __device__ __forceinline__ Pair(const Arguments& a, u32 tile, u32 column, u32 pair, u32 position) {
        pair_rows(a, tile, pair, upper, lower);
        if (column >= a.columns) return;
#if defined(ADD)
        const u32 first = min(upper, a.rows - 1), second = min(lower, a.rows - 1);
        const float* residual = a.residual + (u64)column * a.rows;
        x[0] = residual[first], x[1] = residual[second], x[2] = a.norm[first], x[3] = a.norm[second];
#elif defined(ROPE)
        const u64 at = (u64)position * (HEAD_DIM / 2) + upper % HEAD_DIM;
        x[0] = a.cos[at], x[1] = a.sin[at];
#endif
    }

    __device__ __forceinline__ void finish(const Arguments& a, u32 tile, u32 column, float first, float second,
                                           u32 slot) const {
        if (a.bias) first += a.bias[min(upper, a.rows - 1)], second += a.bias[min(lower, a.rows - 1)];
#if defined(ADD)
        const u64 row = (u64)column * a.rows;
        first = upper < a.rows ? first + x[0] : 0, second = lower < a.rows ? second + x[1] : 0;
        if (upper < a.rows) a.residual[row + upper] = first, a.out[row + upper] = to_element(first * x[2]);
        if (lower < a.rows) a.residual[row + lower] = second, a.out[row + lower] = to_element(second * x[3]);
        float square = first * first + second * second; // of the 16 rows: eight neighbouring lanes have them
#pragma unroll
        for (int step = 1; step < 8; step *= 2) square += __shfl_xor_sync(0xffu << (threadIdx.x & 24), square, step);
        if (upper % 16 == 0) a.squares_out[(u64)column * tiles_of(a) + tile] = square;
#elif defined(STORE)
        float* out = a.residual + (u64)column * a.stride;
        if (upper < a.rows) out[upper] = first;
        if (lower < a.rows) out[lower] = second;
#elif defined(SWIGLU)
        if (upper < a.rows / 2)
            a.out[(u64)column * (a.rows / 2) + upper] = to_element(first / (1 + __expf(-first)) * second);
#elif defined(HEADS)
        u16* out = a.out + (u64)column * a.rows;
        out[upper] = to_element(first), out[lower] = to_element(second);
#elif defined(ROPE)
        const u32 head = upper / HEAD_DIM, i = upper % HEAD_DIM;
        if (head < a.query_heads + a.heads) {
            const float turned = first * x[0] - second * x[1];
            second = second * x[0] + first * x[1], first = turned;
        }
        u16* to;
        if (head < a.query_heads) {
            to = a.out + ((u64)column * a.query_heads + head) * HEAD_DIM;
        } else {
            const bool key = head < a.query_heads + a.heads;
            const u64 own = head - a.query_heads - (key ? 0 : a.heads);
            to = (key ? a.keys : a.values) + (own * a.capacity + slot) * HEAD_DIM;
        }
        to[i] = to_element(first), to[i + HEAD_DIM / 2] = to_element(second);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv(const Arguments a) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, g = lane / 4, l = lane % 4;
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    Stream stream(a, shared.ring[warp], warp, lane), columns = stream;
#pragma unroll 1
    for (int stage = 0; stage < DEPTH && !stream.ends(a); stage++) stream.copy_weights(a, stage), stream.advance(a);
    pdl_wait(); // the previous kernel writes the input
    pdl_trigger();
#pragma unroll 1
    for (int stage = 0; stage < DEPTH; stage++) { // the first group has all weights so far
        if (!columns.ends(a)) columns.copy_columns(a, stage), columns.advance(a);
        cp_async_commit();
    }

#ifdef NORM
    for (u32 column = warp; column < a.columns; column += WARPS) {
        constexpr u32 PARTS = (N_IN + 15) / 16;
        float square = 0;
        for (u32 i = lane; i < PARTS; i += LANES) square += a.squares[(u64)column * PARTS + i];
        square = warp_sum(square);
        if (lane == 0) shared.scales[column] = rsqrtf(square / N_IN + a.eps);
    }
#endif
    const u32 column = threadIdx.x / 8, pair_index = threadIdx.x % 8;
    u32 position = 0, slot = 0;
#ifdef ROPE
    if (column < a.columns) position = a.positions[column], slot = a.slots[column];
#endif

    int turn = 0, stage = 0;
    for (u32 tile = blockIdx.x; warp_uniform(tile < tiles_of(a)); tile += gridDim.x, turn ^= 1) {
        const Pair pair(a, tile, column, pair_index, position);
        float acc[TILES][4] = {};
        for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
            cp_async_wait<DEPTH - 1>();
            const uint4* from = shared.ring[warp] + stage * STAGE + lane;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 upper = from[2 * j * LANES], lower = from[(2 * j + 1) * LANES];
                const u32 even[4] = {upper.x, lower.x, upper.y, lower.y}, odd[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    uint4 column = make_uint4(0, 0, 0, 0);
                    if (COLUMN_LANES == LANES || lane < COLUMN_LANES)
                        column = from[4 * LANES + (j * TILES + t) * COLUMN_LANES];
                    mma_m16n8k16(acc[t], even, column.x, column.y);
                    mma_m16n8k16(acc[t], odd, column.z, column.w);
                }
            }
            if (!stream.ends(a)) stream.copy_weights(a, stage), stream.copy_columns(a, stage), stream.advance(a);
            cp_async_commit();
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
        }

        float (*own)[20] = shared.sums[turn][warp];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) own[8 * t + 2 * l + i % 2][g + i / 2 * 8] = acc[t][i];
        __syncthreads();
        if (column >= a.columns) continue;
        float first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            first += shared.sums[turn][w][column][pair_index], second += shared.sums[turn][w][column][pair_index + 8];
#ifdef NORM
        first *= shared.scales[column], second *= shared.scales[column];
#endif
        pair.finish(a, tile, column, first, second, slot);
    }
}

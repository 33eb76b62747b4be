// Second moments of rows: sums of x^T x and of x, for all heads.
//
// CPU twin: svd_core::Gram, whose sums are in f64. Compile-time shape: DIM, a multiple of 16 up to 128; BFLOAT or not.
//
// Products of halves are exact in f32. Tensor cores add them up there for the 128 rows of a tile; above, a sum is two floats, its
// value and what rounding has lost of it, and f64 across blocks. Tensor cores cut off rather than round: of 256 rows a diagonal
// sum came out too low by 1e-6 of itself, so tiles are not longer.
//
// A block has a part of a head's rows and all of its matrix, a warp 16 components: their products with the components of half the
// others, around a circle, so that every pair is computed once. A second kernel adds the blocks' matrices in their order to what was
// there. The floor is reading the rows, which pass through a ring of STAGES tiles.

constexpr int STRIPS = DIM / 16, THREADS = STRIPS * LANES; // a warp has a strip
constexpr int ROWS = 128, STAGES = 3;                      // of a tile; of the ring
constexpr int PARTNERS = STRIPS / 2 + 1;                   // strips around the circle, its own first
constexpr int CHUNKS = DIM / 8;                            // of 16 bytes, of a row
constexpr int PACKED = STRIPS * PARTNERS * 256 + DIM;      // numbers of a part
constexpr int SHARED = STAGES * ROWS * DIM * 2;
static_assert(SHARED == SHARED_BYTES, "the host computes it, too");

struct Arguments {
    const u16* rows;  // element [head][row][DIM], with the strides below
    double* matrices; // [head][DIM][DIM], added to
    double* sums;     // [head][DIM], added to
    double* partials; // [head][part][PACKED]: (strip, partner) blocks of 16 x 16, then the sums
    u64 n, head_stride, row_stride; // elements
};

extern __shared__ __align__(128) u16 ring[];

// A sum of floats and what rounding has lost of it.
struct TwoFloats {
    float high, low;

    // Exact where the sum is the greater one; else what is lost is no more than the rounding of `x` itself.
    __device__ __forceinline__ void add(float x) {
        const float sum = high + x;
        low += x - (sum - high), high = sum;
    }
    __device__ __forceinline__ double sum() const { return (double)high + (double)low; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) svd_gram(const Arguments a) {
    const int strip = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u64 tiles = (a.n + ROWS - 1) / ROWS, from = tiles * blockIdx.x / gridDim.x, to = tiles * (blockIdx.x + 1) / gridDim.x;
    // A thread fetches one chunk of every 16th row.
    const int fetched_row = threadIdx.x / CHUNKS, fetched_chunk = threadIdx.x % CHUNKS;
    const u16* rows = a.rows + blockIdx.y * a.head_stride + fetched_row * a.row_stride + fetched_chunk * 8;
    auto fetch = [&](u64 tile) {
        u16* at = ring + tile % STAGES * (ROWS * DIM);
        const u16* from = rows + tile * ROWS * a.row_stride;
        const int there = tile < to ? (int)min(a.n - tile * ROWS, (u64)ROWS) - fetched_row : 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += 16)
            if (tile < to)
                copy_async_16_if(chunk_at<CHUNKS>(at, fetched_row + i, fetched_chunk), i < there ? from + i * a.row_stride : rows, i < there);
        commit_copies();
    };
    // [partner][half of its 16 columns]: rows g and g + 8 of the strip, columns 2 l and 2 l + 1. Of sums of rows, one row counts.
    TwoFloats totals[PARTNERS][2][4] = {}, ones_total[2][2] = {};
#ifdef BFLOAT
    constexpr u32 ONES = 0x3f803f80;
#else
    constexpr u32 ONES = 0x3c003c00;
#endif
    const u32 all_ones[4] = {ONES, ONES, ONES, ONES};
    for (u64 tile = from; tile < from + STAGES - 1; tile++) fetch(tile);
    for (u64 tile = from; tile < to; tile++) {
        wait_for_all_but<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        u16* at = ring + tile % STAGES * (ROWS * DIM);
        float sums[PARTNERS][2][4], ones[2][4];
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            // Transposed: components are the operands' rows and columns, rows of the tile what is summed over.
            u32 mine[4];
            load_transposed(mine, chunk_at<CHUNKS>(at, step * 16 + lane % 8 + lane / 16 * 8, strip * 2 + lane / 8 % 2));
#pragma unroll
            for (int p = 0; p < PARTNERS; p++) {
                const int partner = (strip + p) % STRIPS;
                u32 others[4] = {mine[0], mine[2], mine[1], mine[3]};
                if (p > 0) load_transposed(others, chunk_at<CHUNKS>(at, step * 16 + lane % 16, partner * 2 + lane / 16));
                auto add = [&](float(&sum)[4], const u32(&mine)[4], u32 b0, u32 b1) {
                    if (step == 0)
                        multiply_elements(sum, mine, b0, b1);
                    else
                        multiply_add_elements(sum, mine, b0, b1);
                };
                add(sums[p][0], mine, others[0], others[1]);
                add(sums[p][1], mine, others[2], others[3]);
                if (p == 0) {
                    add(ones[0], all_ones, others[0], others[1]);
                    add(ones[1], all_ones, others[2], others[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PARTNERS * 8; i++) totals[i / 8][i / 4 % 2][i % 4].add(sums[i / 8][i / 4 % 2][i % 4]);
#pragma unroll
        for (int i = 0; i < 4; i++) ones_total[i / 2][i % 2].add(ones[i / 2][i % 2]);
    }

    double* out = a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * PACKED;
#pragma unroll
    for (int p = 0; p < PARTNERS; p++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[(strip * PARTNERS + p) * 256 + (g + i / 2 * 8) * 16 + half * 8 + 2 * l + i % 2] = totals[p][half][i].sum();
    if (g == 0)
        for (int i = 0; i < 4; i++) out[STRIPS * PARTNERS * 256 + strip * 16 + i / 2 * 8 + 2 * l + i % 2] = ones_total[i / 2][i % 2].sum();
}

// Adds the parts of a head in their order.
struct JoinArguments {
    Arguments gram;
    u32 parts;
};

extern "C" __global__ void __launch_bounds__(256) svd_gram_join(const JoinArguments a) {
    const u32 i = blockIdx.x * 256 + threadIdx.x, head = blockIdx.y;
    if (i >= PACKED) return;
    const double* partials = a.gram.partials + (u64)head * a.parts * PACKED + i;
    double sum = 0;
    for (u32 part = 0; part < a.parts; part++) sum += partials[(u64)part * PACKED];
    if (i >= STRIPS * PARTNERS * 256) {
        a.gram.sums[head * DIM + i - STRIPS * PARTNERS * 256] += sum;
        return;
    }
    const u32 strip = i / 256 / PARTNERS, p = i / 256 % PARTNERS, partner = (strip + p) % STRIPS;
    const u32 row = strip * 16 + i % 256 / 16, column = partner * 16 + i % 16;
    // Strips across an even circle have each other's block both, which is faster than a branch; of a strip's own, one half is taken.
    if ((STRIPS % 2 == 0 && p > 0 && p == STRIPS / 2 && strip >= STRIPS / 2) || (p == 0 && column > row)) return;
    double* matrix = a.gram.matrices + (u64)head * DIM * DIM;
    const double total = matrix[row * DIM + column] + sum;
    matrix[row * DIM + column] = total;
    if (row != column) matrix[column * DIM + row] = total;
}

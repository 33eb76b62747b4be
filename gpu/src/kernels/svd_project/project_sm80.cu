// Projects rows with a map, head by head: out = rows (n, DIM) times columns (DIM, RANK). Runs on every device (sm_80
// and later), with mma.m16n8k16.
//
// CPU twin: svd_core::Map::project_into. Compile-time shape: DIM (a multiple of 32 up to 128), RANK (a multiple of 8),
// ELEMENT (1 for f16, 2 for bf16), SHARED_BYTES. The map is rounded to f16; with bf16, whose significand has 8 bits, it
// is split into the sum of two elements.
//
// Launch: grid (blocks, heads), 8 warps per block, two blocks per multiprocessor, with PDL. A block loads the map of
// its head into shared memory once. Warps take 16 rows at a time in a grid-stride loop, and load the next rows
// meanwhile.
//
// The floor is reading the rows and writing the results, so nothing else passes through memory: a lane loads 16 bytes
// of a row straight into A fragments, which permutes the components within 32; the map in shared memory has the same
// order, laid out by fragment, so it is read without bank conflicts. The columns of four mma are interleaved so that a
// lane also stores 16 bytes.
#include "element.cuh"
#include "primitives_sm80.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int STEPS = DIM / 16;          // steps of mma along the components
constexpr int GROUPS = (RANK + 31) / 32; // groups of 32 columns, four mma wide
constexpr int ROWS = 16;                 // rows of a warp at a time
// The map is split into MAP_TERMS elements whose sum is its f32 value, rounded.
#if ELEMENT == 2
constexpr int MAP_TERMS = 2;
#else
constexpr int MAP_TERMS = 1;
#endif
constexpr int SHARED = MAP_TERMS * GROUPS * 4 * STEPS * LANES * 8;
static_assert(SHARED == SHARED_BYTES, "the host computes the same size");

struct Arguments {
    const u16* rows;                // element [head][row][DIM], strided
    const float* columns;           // [head][DIM][RANK]
    u16* out;                       // element [head][row][RANK]
    u64 n, head_stride, row_stride; // strides in elements
};

extern __shared__ __align__(16) u32 shared[];

// Writes the map to shared memory as B fragments: [term][mma][step][lane][word]. Word i of lane 4 g + l holds rows
// 2 l + 8 i and the next one of B, column g. They are components 8 l + 4 (step & 1) + 2 i and the next one of 32, and
// column 8 (g / 2) + 2 mma + (g & 1) of the group.
__device__ __forceinline__ void load_map(const Arguments& a, u32 head) {
    const float* columns = a.columns + (u64)head * DIM * RANK;
#pragma unroll 8
    for (int i = threadIdx.x; i < GROUPS * 32 * DIM / 2; i += THREADS) {
        const int column = i % (GROUPS * 32), d = i / (GROUPS * 32) * 2;
        float pair[2] = {0, 0};
        if (column < RANK) pair[0] = columns[d * RANK + column], pair[1] = columns[(d + 1) * RANK + column];
        const int step = d / 32 * 2 + d / 4 % 2, mma = column / 32 * 4 + column / 2 % 4;
        const int lane = 4 * (column / 8 % 4 * 2 + column % 2) + d / 8 % 4, word = d / 2 % 2;
        for (int term = 0; term < MAP_TERMS; term++) {
            const u16 low = to_element(pair[0]), high = to_element(pair[1]);
            shared[term * (SHARED / 4 / MAP_TERMS) + ((mma * STEPS + step) * LANES + lane) * 2 + word] =
                low | (u32)high << 16;
            pair[0] -= to_float(low), pair[1] -= to_float(high);
        }
    }
    __syncthreads();
}

// The A fragments of ROWS rows. Rows at or above n repeat the last row; they are not stored.
struct Rows {
    uint4 x[2][STEPS / 2]; // [i][j]: row g + 8 i, components 32 j + 8 l to + 7

    __device__ __forceinline__ void load(const Arguments& a, u32 head, u64 first, int g, int l) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u64 row = min(first + g + 8 * i, a.n - 1);
            const u16* from = a.rows + head * a.head_stride + row * a.row_stride + 8 * l;
#pragma unroll
            for (int j = 0; j < STEPS / 2; j++) ld_nc_no_allocate<4>(reinterpret_cast<u32*>(&x[i][j]), from + 32 * j);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) svd_project(const Arguments a) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
    const u32 head = blockIdx.y;
    pdl_wait();
    pdl_trigger();
    const u64 stride = (u64)gridDim.x * WARPS * ROWS;
    u64 first = ((u64)blockIdx.x * WARPS + warp) * ROWS;
    Rows next;
    next.load(a, head, first, g, l); // overlaps the loads of the map
    load_map(a, head);
    const uint2* map = reinterpret_cast<const uint2*>(shared) + lane;
    for (; first < a.n; first += stride) {
        const Rows rows = next;
        if (first + stride < a.n) next.load(a, head, first + stride, g, l);
#pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
            float sums[4][4] = {}; // accumulators [mma]
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const uint4 &upper = rows.x[0][step / 2], &lower = rows.x[1][step / 2];
                const u32 even[4] = {upper.x, lower.x, upper.y, lower.y}, odd[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int mma = 0; mma < 4; mma++)
#pragma unroll
                    for (int term = 0; term < MAP_TERMS; term++) {
                        const uint2 b =
                            map[term * (SHARED / 8 / MAP_TERMS) + ((group * 4 + mma) * STEPS + step) * LANES];
                        mma_m16n8k16(sums[mma], step & 1 ? odd : even, b.x, b.y);
                    }
            }
            const int column = group * 32 + 8 * l;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u64 row = first + g + 8 * i;
                u32 packed[4];
#pragma unroll
                for (int mma = 0; mma < 4; mma++) packed[mma] = pack_elements(sums[mma][2 * i], sums[mma][2 * i + 1]);
                if (row < a.n && column < RANK) st_global_v4(a.out + (head * a.n + row) * RANK + column, packed);
            }
        }
    }
}

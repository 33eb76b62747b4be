// Codes blocks of transformed values.
//
// CPU twins: pq_core::sq::encode_values_into, mean_error_into. sq_encode.cuh has the arguments; compile-time shape:
// HEAD_DIM, VALUE_BITS, BLOCK, PAGED or not.
//
// Launch: grid (blocks of tokens, heads, sequences), a thread per component. The floor is reading the rows. Sums are in
// the order of the CPU.
#include "sq_encode.cuh"
#include "warp.cuh"

constexpr int THREADS = D, VALUE_SLOTS = PARTS * VALUE_BITS, VALUE_WORDS = VALUE_SLOTS * VECTOR;
constexpr float HALF_RANGE = 1 << VALUE_BITS >> 1;

// The bits of the codes of four tokens at a slot of a part, as `Field::put` of pq_core::sq places them.
__device__ __forceinline__ u32 put_part(const u8 (&codes)[TILE][CODE_ROW], const Row& row, int part, int unit,
                                        int component) {
    const int begin = part * VALUE_BITS, from = max(begin, row.first),
              to = min(begin + VALUE_BITS, row.first + row.slots);
    if (from >= to) return 0;
    // The leading bits of a code come first.
    const int below = begin + VALUE_BITS - to;
    const u32 mask = ((1u << (to - from)) - 1) << below;
    const int up = row.slots * (unit / row.slots) + from - row.first - below;
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) word |= (codes[4 * unit + j][component] & mask) << 8 * j;
    return __funnelshift_l(word, word, up);
}

extern "C" __global__ void __launch_bounds__(THREADS) sq_encode_values(const Arguments a) {
    __shared__ float steps[TILE];
    __shared__ u8 codes[TILE][CODE_ROW];
    const u32 head = blockIdx.y, sequence = blockIdx.z, count = a.counts[sequence], first = blockIdx.x * BLOCK;
    if (first >= count) return;
    const u32 n = min(count - first, (u32)BLOCK);
    const float* rows = a.rows + (((u64)sequence * a.heads + head) * a.max_rows + first) * D;
    const u64 place = place_of(a, sequence, head, a.firsts[sequence] + blockIdx.x);
    u32* words = a.words + place * BLOCK_TILES * VALUE_WORDS;
    const float unit_step = a.steps[VALUE_BITS] / sqrtf(D);
    float lost = 0; // of the thread's component
    for (u32 tile = 0; tile * TILE < n; tile++) {
        const u32 in_tile = min(n - tile * TILE, (u32)TILE);
        const float* of_tile = rows + (u64)tile * TILE * D;
        // Half a warp sums the squares of a row.
        for (u32 t = threadIdx.x / VECTOR; t < TILE; t += THREADS / VECTOR) {
            const u32 lane = threadIdx.x % VECTOR;
            float squares = 0, sum = 0;
            for (int p = 0; p < PARTS; p++) {
                const float x = t < in_tile ? finite(of_tile[t * D + p * VECTOR + lane]) : 0;
                squares += x * x;
            }
            const u32 mask = 0xffffu << (threadIdx.x & 16);
            for (int i = 0; i < VECTOR; i++) sum += __shfl_sync(mask, squares, i, VECTOR);
            const u32 norm = saturated_byte(log2f(sqrtf(sum)) * 16 + 128 + .5f);
            if (lane == 0) {
                steps[t] = decode_norm(norm) * unit_step;
                if (t < in_tile) a.scales[place * BLOCK + tile * TILE + t] = norm;
            }
        }
        __syncthreads();
        for (u32 t = 0; t < TILE; t++) {
            float code = 0;
            if (t < in_tile) {
                const float x = finite(of_tile[t * D + threadIdx.x]);
                code = code_of(x, 1 / steps[t], HALF_RANGE);
                lost += x - level_of(code, HALF_RANGE) * steps[t];
            }
            codes[t][threadIdx.x] = code;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < VALUE_WORDS; i += THREADS) {
            const int vector = i / VECTOR, lane = i % VECTOR;
            const Row row = row_at(VALUE_SLOTS, vector);
            u32 word = 0;
            for (int unit = vector - row.first; unit < 8; unit += row.slots)
                for (int part = 0; part < PARTS; part++)
                    word |= put_part(codes, row, part, unit, part * VECTOR + lane);
            words[tile * VALUE_WORDS + i] = word;
        }
        __syncthreads();
    }
    if (a.errors) a.errors[place * D + threadIdx.x] = float_to_finite_half(lost / n);
}

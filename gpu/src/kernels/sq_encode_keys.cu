// Codes blocks of transformed keys.
//
// CPU twin: pq_core::sq::encode_keys_into. sq_encode.cuh has the arguments; compile-time shape: HEAD_DIM, KEY_SLOTS,
// BLOCK, PAGED or not.
//
// Launch: grid (blocks of tokens, heads, sequences), 3 threads per component, each of which tries three of the nine
// multiples of the step that fits a Gaussian. Sums over tokens are in the order of the CPU. The floor is reading the
// rows; they are read ten times, from L1 or L2 after the first.
#include "sq_encode.cuh"
#include "sq_key_table.cuh"

constexpr int TURNS = 3, THREADS = TURNS * D;
constexpr int KEY_WORDS = KEY_SLOTS * VECTOR;

__device__ __forceinline__ u32 encode_step(float step) { return saturated_byte(log2f(step) * 8 + 128.5f); }

__constant__ float MULTIPLES[3 * TURNS] = {.6f, .75f, .9f, 1.05f, 1.25f, 1.5f, 1.9f, 2.5f, 3.3f};

// The step of a component of a block with the least squared error, as a byte.
__device__ __forceinline__ u32 best_step(const Arguments& a, const float* rows, u32 n, int bits, float half_range,
                                         float (&errors)[TURNS][D], u8 (&codes)[TURNS][D]) {
    const int component = threadIdx.x % D, turn = threadIdx.x / D;
    float squares = 0;
    for (u32 t = 0; t < n; t++) {
        const float x = finite(rows[t * D]);
        squares += x * x;
    }
    const float fitting = sqrtf(squares / n) * a.steps[bits];
    float least = infinity();
    u32 best = 0;
    for (int i = 3 * turn; i < 3 * turn + 3; i++) {
        const u32 coded = encode_step(MULTIPLES[i] * fitting);
        const float step = decode_step(coded), per_step = 1 / step;
        float error = 0;
        for (u32 t = 0; t < n; t++) {
            const float x = finite(rows[t * D]);
            const float lost = x - level_of(code_of(x, per_step, half_range), half_range) * step;
            error += lost * lost;
        }
        if (error < least || i == 0) least = error, best = coded;
    }
    errors[turn][component] = least, codes[turn][component] = best;
    __syncthreads();
    best = codes[0][component], least = errors[0][component];
    for (int i = 1; i < TURNS; i++)
        if (errors[i][component] < least) least = errors[i][component], best = codes[i][component];
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS) sq_encode_keys(const Arguments a) {
    __shared__ float errors[TURNS][D], per_steps[D], half_ranges[D];
    __shared__ u8 bests[TURNS][D];
    __shared__ __align__(4) u8 codes[TILE][CODE_ROW];
    __shared__ __align__(16) u32 table_words[KeyTable::WORDS];
    const u32 head = blockIdx.y, sequence = blockIdx.z, count = a.counts[sequence], first = blockIdx.x * BLOCK;
    if (first >= count) return;
    const u32 n = min(count - first, (u32)BLOCK);
    const float* rows = a.rows + (((u64)sequence * a.heads + head) * a.max_rows + first) * D;
    const u64 place = place_of(a, sequence, head, a.firsts[sequence] + blockIdx.x);
    for (int i = threadIdx.x; i < KeyTable::WORDS; i += THREADS)
        table_words[i] = a.tables[(u64)head * KeyTable::WORDS + i];
    __syncthreads();
    const KeyTable table{table_words};
    const int component = threadIdx.x % D;
    const int levels = 1 - table.offset(component / 4), bits = 31 - __clz(levels);
    const float half_range = .5f * levels;
    const u32 step = best_step(a, rows + component, n, bits, half_range, errors, bests);
    if (threadIdx.x < D) {
        a.scales[place * D + component] = step;
        per_steps[component] = 1 / decode_step(step), half_ranges[component] = half_range;
    }
    __syncthreads();
    u32* words = a.words + place * BLOCK_TILES * KEY_WORDS;
    for (u32 tile = 0; tile * TILE < n; tile++) {
        for (int i = threadIdx.x; i < TILE * D; i += THREADS) {
            const int t = i / D, c = i % D;
            const u32 token = tile * TILE + t;
            codes[t][c] =
                token < n ? (u8)code_of(finite(rows[(u64)token * D + c]), per_steps[c], half_ranges[c]) : 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < KEY_WORDS; i += THREADS) {
            const int vector = i / VECTOR, lane = i % VECTOR;
            const Row row = row_at(KEY_SLOTS, vector);
            const int index = rows_before(KEY_SLOTS, row.first);
            u32 word = 0;
            // The units whose bits are in this vector.
            for (int unit = vector - row.first; unit < 2 * COLUMNS; unit += row.slots) {
                const int column = unit / 2, half = unit % 2;
                const u32* fields = table_words + KeyTable::ENTRIES + (steps_before(index) * COLUMNS + column) * 4;
                const u32* of_token = reinterpret_cast<const u32*>(codes[VECTOR * half + lane]);
                for (u32 f = 0; f < 2 * table.steps(index); f++) {
                    const u32 *field = fields + f / 2 * COLUMNS * 4 + f % 2 * 2, place = field[0], mask = field[1];
                    const u32 rotation = place + (row.slots == 1 ? half : 0); // to the left: the kernel's to the right
                    const u32 bits = of_token[place >> 5] & mask;
                    word |= __funnelshift_l(bits, bits, rotation);
                }
            }
            words[tile * KEY_WORDS + i] = word;
        }
        __syncthreads();
    }
}

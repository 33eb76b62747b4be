// Decodes blocks of coded keys or values.
//
// CPU twins: pq_core::sq::decode_keys_into, decode_values_into. Compile-time shape: HEAD_DIM, KEY_SLOTS (keys) or
// VALUE_BITS (values), BLOCK, ELEMENT of the rows (element.cuh), PAGED or not.
//
// Launch: grid (tiles of 32 tokens, heads, sequences), THREADS threads. The floor is writing the rows.
#include "element.cuh"
#include "sq_blocks.cuh"
#include "sq_levels.cuh"
#ifdef KEY_SLOTS
#include "sq_key_table.cuh"
constexpr int SLOTS = KEY_SLOTS;
#else
constexpr int SLOTS = PARTS * VALUE_BITS;
#endif

constexpr int THREADS = TILE * COLUMNS;
constexpr int CODE_WORDS = QUADS + 1; // of a row of codes in shared memory; odd, so that rows begin in different banks

struct Arguments : BlockArguments {
    Element* rows;   // [sequence][head][max_rows][D]
    float unit_step; // values: between the levels of a value of norm 1
    u32 padding;
};

#ifdef KEY_SLOTS
// Collects the codes of a tile: a thread has all quads of a column of a token.
__device__ __forceinline__ void gather_codes(u32 (&codes)[TILE][CODE_WORDS], const u32* words, const KeyTable& table) {
    const int token = threadIdx.x % TILE, column = threadIdx.x / TILE, half = token / VECTOR;
    u32* of_token = codes[token];
    for (int quad = column; quad < QUADS; quad += COLUMNS) of_token[quad] = 0;
    for (int i = 0; i < KEY_ROWS; i++) {
        const Row row = row_of(KEY_SLOTS, i);
        const u32 word = words[(row.first + (2 * column + half) % row.slots) * VECTOR + token % VECTOR];
        const u32* field = table.words + KeyTable::ENTRIES + (steps_before(i) * COLUMNS + column) * 4;
        for (u32 step = table.steps(i); step; step--, field += COLUMNS * 4)
            for (int f = 0; f < 4; f += 2)
                of_token[field[f] >> 5] |=
                    __funnelshift_r(word, word, field[f] + (row.slots == 1 ? half : 0)) & field[f + 1];
    }
}
#else
// Collects the codes of a tile: a thread has a component of four tokens at a time.
__device__ __forceinline__ void gather_codes(u32 (&codes)[TILE][CODE_WORDS], const u32* words) {
    for (int i = threadIdx.x; i < TILE / 4 * D; i += THREADS) {
        const int unit = i / D, component = i % D, begin = component / VECTOR * VALUE_BITS, end = begin + VALUE_BITS;
        u32 four = 0;
        for (int from = begin; from < end;) {
            const Row row = row_at(SLOTS, from);
            const int to = min(end, row.first + row.slots), below = end - to; // the leading bits of a code come first
            const u32 word = words[(row.first + unit % row.slots) * VECTOR + component % VECTOR];
            const u32 mask = ((1u << (to - from)) - 1 << below) * 0x01010101u;
            four |= __funnelshift_r(word, word, row.slots * (unit / row.slots) + from - row.first - below) & mask;
            from = to;
        }
        for (int j = 0; j < 4; j++) reinterpret_cast<u8*>(codes[4 * unit + j])[component] = four >> 8 * j;
    }
}
#endif

__device__ __forceinline__ void store(Element* to, const float (&x)[4]) {
#if ELEMENT == 0
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
#else
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_elements(x[0], x[1]), pack_elements(x[2], x[3]));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) sq_decode(const Arguments a) {
    __shared__ u32 codes[TILE][CODE_WORDS];
    const u32 head = blockIdx.y, sequence = blockIdx.z, count = a.counts[sequence], first = blockIdx.x * TILE;
    if (first >= count) return;
    const u32 n = min(count - first, (u32)TILE);
    const u64 place = place_of(a, sequence, head, a.firsts[sequence] + blockIdx.x / BLOCK_TILES);
    const u32 tile = blockIdx.x % BLOCK_TILES;
    const u32* words = a.words + (place * BLOCK_TILES + tile) * (SLOTS * VECTOR);
    Element* rows = a.rows + (((u64)sequence * a.heads + head) * a.max_rows + first) * D;
#ifdef KEY_SLOTS
    __shared__ __align__(16) u32 table_words[KeyTable::WORDS];
    for (int i = threadIdx.x; i < KeyTable::WORDS; i += THREADS)
        table_words[i] = a.tables[(u64)head * KeyTable::WORDS + i];
    __syncthreads();
    const KeyTable table{table_words};
    gather_codes(codes, words, table);
#else
    gather_codes(codes, words);
#endif
    __syncthreads();
    for (u32 i = threadIdx.x; i < n * QUADS; i += THREADS) {
        const int t = i / QUADS, quad = i % QUADS;
        const u32 four = codes[t][quad];
        float x[4];
        for (int j = 0; j < 4; j++) {
            const float code = four >> 8 * j & 255;
            const int component = 4 * quad + j;
#ifdef KEY_SLOTS
            x[j] = level_of(code, .5f * (1 - table.offset(quad))) * decode_step(a.scales[place * D + component]);
#else
            constexpr float HALF_RANGE = 1 << VALUE_BITS >> 1;
            x[j] = level_of(code, HALF_RANGE) * (a.unit_step * decode_norm(a.scales[place * BLOCK + tile * TILE + t]));
            if (a.errors) x[j] += half_to_float(a.errors[place * D + component]);
#endif
        }
        store(rows + t * D + 4 * quad, x);
    }
}

// Sums of what codes of values have lost, by blocks of tokens, right after pq_encode.cu has encoded them.
//
// CPU twin: MeanErrors of the reference's `pqklt`. Compile-time shape: HEAD_DIM; ELEMENT of the vectors (1 for f16, 2
// for bf16); KEPT_M codes of KEPT_BITS bits a vector, in the tiles of pq_encode.cu.
//
// A thread has a component of a part of the block, and adds the tokens in their order: the sums do not depend on how
// many tokens a launch has.
#include "element.cuh"
#include "mean_block.cuh"
#include "tile_code.cuh"

constexpr u32 GROUPS = 8, THREADS = GROUPS * HEAD_DIM; // groups of threads have a part each

struct Arguments {
    const u16* vectors; // element [sequence][head][vector][HEAD_DIM], with the strides below: what has been encoded
    const u8* codes;    // [page or sequence][head][tile][TILE_WORDS * 4]
    const u32* table;   // [head][code][WORDS]
    const u16* norms;   // f16 [page or sequence][head][tile][TILE], or null
    const u32* pages;   // [sequence][max_pages], or null
    const u32* firsts;  // [sequence]: token index of the first vector
    const u32* counts;  // [sequence]: number of vectors
    u16* means;         // f16 [sequence][head][blocks][HEAD_DIM]
    float* recent;      // [sequence][head][recent_parts][HEAD_DIM], a ring
    u32* summed;        // [sequence][head]: tokens whose errors have been added
    u64 sequence_stride, head_stride, vector_stride; // in elements
    u32 heads, page_tiles, max_pages, blocks, recent_parts;
    float gain; // by which vectors are longer than the values over their norms
};

// What is lost of a component of a token.
__device__ __forceinline__ float error_of(const Arguments& a, u32 token, u32 component, float x) {
    const u32 head = blockIdx.x, sequence = blockIdx.y;
    u32 tile = token / TILE;
    u64 place = sequence;
    if (a.pages) place = a.pages[(u64)sequence * a.max_pages + tile / a.page_tiles], tile %= a.page_tiles;
    const u64 at = (place * a.heads + head) * a.page_tiles + tile;
    const u32 code = code_at(a.codes + at * TILE_WORDS * 4, token % TILE, component / 2 / CODE_WORDS);
    const u32 pair = decoded_pair(a.table + (u64)head * (WORDS << KEPT_BITS), code, component / 2);
    const float norm = a.norms ? half_to_float(a.norms[at * TILE + token % TILE]) : 1;
    // What is not finite counts as 0, as for the encoder.
    return norm * ((fabsf(x) < infinity() ? x / a.gain : 0) - half_to_float((u16)(pair >> 16 * (component % 2))));
}

// Launch: grid (heads, sequences), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_mean_errors(const Arguments a) {
    const u32 sequence = blockIdx.y, component = threadIdx.x % HEAD_DIM;
    const u32 first = a.firsts[sequence], end = first + a.counts[sequence];
    const u64 row = (u64)sequence * a.heads + blockIdx.x;
    // A chunk of a prompt encodes some tokens again, whose errors have been added; a sequence that begins anew has
    // none.
    const u32 before = a.summed[row], from = first > 0 && first < before && before <= end ? before : first;
    const u16* vectors = a.vectors + sequence * a.sequence_stride + blockIdx.x * a.head_stride + component;
    float* recent = a.recent + row * a.recent_parts * HEAD_DIM + component;
    for (u32 block = from / MEAN_TOKENS; block * MEAN_TOKENS < end; block++) {
        for (u32 i = threadIdx.x / HEAD_DIM; i < PARTS; i += GROUPS) {
            const u32 part = block * PARTS + i, to = min((part + 1) * PART_TOKENS, end);
            u32 token = max(part * PART_TOKENS, from);
            if (token >= to) continue;
            float& kept = recent[part % a.recent_parts * HEAD_DIM];
            float sum = token > part * PART_TOKENS ? kept : 0;
#pragma unroll 8
            for (; token < to; token++)
                sum += error_of(a, token, component, to_float(vectors[(token - first) * a.vector_stride]));
            kept = sum;
        }
        __syncthreads(); // all parts are there
        if (threadIdx.x < HEAD_DIM && (block + 1) * MEAN_TOKENS <= end) {
            float sum = 0;
            for (u32 i = 0; i < PARTS; i++) sum += recent[(block * PARTS + i) % a.recent_parts * HEAD_DIM];
            a.means[(row * a.blocks + block) * HEAD_DIM + component] = float_to_finite_half(sum / MEAN_TOKENS);
        }
        __syncthreads(); // all parts have been read
    }
    if (threadIdx.x == 0 && end > first) a.summed[row] = end;
}

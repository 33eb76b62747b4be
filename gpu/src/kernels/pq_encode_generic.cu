// Nearest centroids of vectors of any quantizer, packed in the layout of pq-core.
//
// CPU twin: pq_core::encode_into. Compile-time shape: M, DSUB, KSUB, NBITS; ELEMENT. Launch: grid (tile, subspace, head
// of a sequence), THREADS threads. A block has TILE tokens, which are four blocks of codes, in one subspace
// (pq_nearest.cuh, also for the bounds). Bits of tokens that are not new are preserved.
#include "pq_codes.cuh"
#include "pq_nearest.cuh"

constexpr int RUN_BYTES = 8 * NBITS;

struct Arguments {
    const Element* vectors; // [sequence][head][vector][M * DSUB], with the strides below
    const float* centroids; // [head][M][KSUB][DSUB]
    const u32* firsts;      // [sequence]: token index of the first vector
    const u32* counts;      // [sequence]: number of vectors
    u8* codes;              // [sequence][head][code_stride bytes]
    u64 code_stride, sequence_stride, head_stride, vector_stride;
    u32 heads;
};

extern __shared__ __align__(16) NearestShared shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 2) pq_encode_generic(const Arguments a) {
    const u32 sequence = blockIdx.z / a.heads, head = blockIdx.z % a.heads, subspace = blockIdx.y;
    const u32 first = a.firsts[sequence], end = first + a.counts[sequence];
    const u32 start = (first / TILE + blockIdx.x) * TILE; // first token of the tile
    if (start >= end || first == end) return;
    // The tile's new tokens, relative to its first token.
    const u32 from = first > start ? first - start : 0, to = min(end - start, (u32)TILE);
    const Element* vectors = a.vectors + sequence * a.sequence_stride + head * a.head_stride + subspace * DSUB;
    load_points(*shared, vectors + (u64)(start + from - first) * a.vector_stride, a.vector_stride, to - from);
    find_nearest(*shared, a.centroids + (head * (u64)M + subspace) * KSUB * DSUB);
    u8* codes = a.codes + blockIdx.z * a.code_stride;
    for (int i = threadIdx.x; i < TILE / BLOCK_TOKENS * RUN_BYTES; i += THREADS) {
        const u32 block = i / RUN_BYTES, token = block * BLOCK_TOKENS;
        if (token + BLOCK_TOKENS <= from || token >= to) continue;
        u32 byte = i % RUN_BYTES, value = 0, new_mask = 0;
        int shift = 0;
#pragma unroll
        for (int width = 8; width; width /= 2) {
            if (!(NBITS & width)) continue;
            if (byte < 8 * width) { // the byte is in this plane
                for (u32 part = 0; part < 8 / width; part++) {
                    const u32 here = token + byte + 8 * width * part, mask = (1u << width) - 1;
                    if (here < from || here >= to) continue;
                    value |= (shared->index[here - from] >> shift & mask) << width * part;
                    new_mask |= mask << width * part;
                }
                break;
            }
            byte -= 8 * width, shift += width;
        }
        u8* at = const_cast<u8*>(run_of<M, NBITS>(codes, start + token, subspace)) + i % RUN_BYTES;
        if (new_mask) *at = new_mask == 0xff ? (u8)value : (u8)((*at & ~new_mask) | value);
    }
}

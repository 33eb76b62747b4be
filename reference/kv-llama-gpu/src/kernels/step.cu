// The two ends of a decode step: the embedding of a batch's tokens, and the choice of the next ones.
//
// CPU twin: the embedding of Decoder::step, ops::argmax. Compile-time shape: ELEMENT of the embedding (1 for f16, 2 for
// bf16).
#include "element.cuh"
#include "picks.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

struct BeginArguments {
    const u16* embedding; // element [token][hidden]
    const u32* tokens;    // [sequence]: NO_TOKEN counts as the last one of the vocabulary
    const u32* positions; // [sequence]: of these tokens
    const float* norm;    // [hidden]: weights of the norm that follows
    float* residual;      // [sequence][hidden]
    u16* scaled;          // element [sequence][hidden]: residual * norm; null if the norm is a kernel of its own
    float* squares;       // [sequence][hidden / 16, rounded up]: sums of squares of 16 components each, or null
    u32* slots;           // [sequence]: this token's row among all rows of exact tokens, for the first head
    u32* exact_lengths;   // [sequence]: exact tokens, this one included
    u32* coded_lengths;   // [sequence]: tokens that only the codes hold
    const u32* pages;     // [sequence][max_pages] pages of the exact tokens, or null: a sequence is a page
    u32 hidden, sinks, ring, leaving;
    u32 max_pages, heads, capacity; // capacity: rows of a head in a page
    u32 vocab;
};

// Embeds the tokens and assigns their rows. The first `sinks` tokens keep their rows; the others share `ring` rows
// after them. If tokens leave one by one (`leaving` is 1), these are a ring, in which a token replaces the one `ring`
// positions earlier; if several leave at once, the rows behind them have moved up, so that a token follows the one
// before.
//
// Launch: one block per sequence, any number of threads.
extern "C" __global__ void begin(const BeginArguments a) {
    pdl_wait();
    pdl_trigger();
    const u32 sequence = blockIdx.x, parts = (a.hidden + 15) / 16;
    const u16* row = a.embedding + (u64)min(a.tokens[sequence], a.vocab - 1) * a.hidden;
    const u64 to = (u64)sequence * a.hidden;
    for (u32 part = threadIdx.x; part < parts; part += blockDim.x) {
        float square = 0;
        for (u32 i = 16 * part; i < min(16 * part + 16, a.hidden); i++) {
            const float x = to_float(row[i]);
            a.residual[to + i] = x, square += x * x;
            if (a.scaled) a.scaled[to + i] = to_element(x * a.norm[i]);
        }
        if (a.squares) a.squares[(u64)sequence * parts + part] = square;
    }
    if (threadIdx.x == 0) {
        const u32 position = a.positions[sequence];
        const u32 kept = a.sinks + a.ring + 1 - a.leaving; // at least
        const u32 coded = position + 1 > kept ? (position + 1 - kept) / a.leaving * a.leaving : 0;
        const u32 moved = a.leaving > 1 ? coded : 0;
        const u32 slot = position < a.sinks ? position : a.sinks + (position - a.sinks - moved) % max(a.ring, 1u);
        const u32 page = a.pages ? a.pages[(u64)sequence * a.max_pages + slot / a.capacity] : sequence;
        a.slots[sequence] = page * a.heads * a.capacity + slot % a.capacity;
        a.exact_lengths[sequence] = position + 1 - coded, a.coded_lengths[sequence] = coded;
    }
}

struct ScaleArguments {
    const float* residual; // [sequence][hidden]
    const float* norm;     // [hidden]: weights of the norm that follows
    u16* scaled;           // element [sequence][hidden]: residual * norm
    float* squares;        // [sequence][hidden / 16, rounded up]
    u32 hidden;
};

// Prepares a norm of the residual stream, which ranks have summed or a prompt begins with: what ADD of gemv.cu does
// where there is one rank, and `begin` for a step.
//
// Launch: grid (blocks of a sequence's components, sequence), whole warps.
extern "C" __global__ void scale(const ScaleArguments a) {
    pdl_trigger(); // gemv.cu, which follows, waits for the whole kernel
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    const u64 row = (u64)blockIdx.y * a.hidden;
    const float x = i < a.hidden ? a.residual[row + i] : 0;
    if (i < a.hidden) a.scaled[row + i] = to_element(x * a.norm[i]);
    float square = x * x;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) square += __shfl_xor_sync(FULL, square, step);
    if (i % 16 == 0 && i < a.hidden) a.squares[(u64)blockIdx.y * ((a.hidden + 15) / 16) + i / 16] = square;
}

struct PickArguments {
    const float* logits; // [sequence][vocab]
    Picks picks;
    float* best;  // [sequence][block]
    u32* best_at; // [sequence][block]
    u32* arrived; // [sequence], zero between launches
    u32 vocab, first;
};

// Keeps the greater value; ties go to the lower index.
__device__ __forceinline__ void keep_best(float& value, u32& at, float other, u32 other_at) {
    if (other > value || (other == value && other_at < at)) value = other, at = other_at;
}

// The best of a block, in its first thread.
__device__ __forceinline__ void block_best(float& value, u32& at) {
    __shared__ float values[LANES];
    __shared__ u32 indices[LANES];
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(FULL, value, step);
        const u32 other_at = __shfl_xor_sync(FULL, at, step);
        keep_best(value, at, other, other_at);
    }
    __syncthreads();
    if (threadIdx.x % LANES == 0) values[threadIdx.x / LANES] = value, indices[threadIdx.x / LANES] = at;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < blockDim.x / LANES; w++) keep_best(value, at, values[w], indices[w]);
}

// Takes the most likely token of every sequence from `first` on. A sequence that has ended does not advance.
//
// Launch: grid (blocks, sequences), whole warps. The last block of a sequence to arrive picks.
extern "C" __global__ void pick(const PickArguments a) {
    __shared__ bool last;
    const u32 sequence = a.first + blockIdx.y;
    const float* logits = a.logits + (u64)sequence * a.vocab;
    pdl_wait();
    pdl_trigger();
    float value = -infinity();
    u32 at = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.vocab; i += gridDim.x * blockDim.x) {
        const bool finite = fabsf(logits[i]) < infinity();
        keep_best(value, at, finite ? logits[i] : infinity(), finite ? i : NO_TOKEN);
    }
    block_best(value, at);
    const u64 own = (u64)sequence * gridDim.x;
    if (threadIdx.x == 0) {
        a.best[own + blockIdx.x] = value, a.best_at[own + blockIdx.x] = at;
        last = atomic_add_acq_rel(a.arrived + sequence, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    value = -infinity(), at = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x)
        keep_best(value, at, __ldcg(a.best + own + i), __ldcg(a.best_at + own + i));
    block_best(value, at);
    if (threadIdx.x == 0) {
        a.arrived[sequence] = 0;
        take(a.picks, sequence, at);
    }
}

// A Llama's operations on the rows of many tokens between the GEMMs: embedding, RMSNorm, RoPE and append, SwiGLU. The
// tokens are those of a step, one of each sequence, or consecutive ones of a prompt.
//
// CPU twin: the forward pass (embedding, ops::rms_norm, Rope::rotate_rows, ops::swiglu). Compile-time shape: ELEMENT of
// the activations (1 for f16, 2 for bf16), HEAD_DIM. The residual stream is f32. Sizes of rows are multiples of 8, so
// that a thread moves 16 bytes; the floor of each kernel is its bytes.
#include "eight_elements.cuh"
#include "warp.cuh"

struct EmbedArguments {
    const u16* embedding; // element [token][hidden]
    const u32* tokens;    // [row]
    float* residual;      // [row][hidden]
    u32 hidden;
};

// Launch: one block per row, any number of threads.
extern "C" __global__ void embed(const EmbedArguments a) {
    pdl_trigger();
    const u16* row = a.embedding + (u64)a.tokens[blockIdx.x] * a.hidden;
    float* to = a.residual + (u64)blockIdx.x * a.hidden;
    for (u32 i = 8 * threadIdx.x; i < a.hidden; i += 8 * blockDim.x) Eight::of(row + i).store(to + i);
}

struct NormArguments {
    float* residual;   // [row][hidden]
    const float* bias; // [hidden], or null: of the last product added; it is added here
    const float* norm; // [hidden]
    u16* out;          // element [row][hidden]
    u32 hidden;
    float eps;
};

// Launch: one block per row, THREADS threads.
constexpr int THREADS = 256;
extern "C" __global__ void __launch_bounds__(THREADS) normalize(const NormArguments a) {
    __shared__ float sums[THREADS / LANES];
    pdl_wait();
    pdl_trigger();
    float* row = a.residual + (u64)blockIdx.x * a.hidden;
    float square = 0;
    for (u32 i = 8 * threadIdx.x; i < a.hidden; i += 8 * THREADS) {
        Eight x = Eight::of(row + i);
        x.add(a.bias, i);
        if (a.bias) x.store(row + i);
#pragma unroll
        for (int j = 0; j < 8; j++) square += x.x[j] * x.x[j];
    }
    square = warp_sum(square);
    if (threadIdx.x % LANES == 0) sums[threadIdx.x / LANES] = square;
    __syncthreads();
    square = 0;
#pragma unroll
    for (int w = 0; w < THREADS / LANES; w++) square += sums[w];
    const float scale = rsqrtf(square / a.hidden + a.eps);
    // A thread rereads only what it has read, or written, itself.
    for (u32 i = 8 * threadIdx.x; i < a.hidden; i += 8 * THREADS) {
        Eight x = Eight::of(row + i);
        const Eight norm = Eight::of(a.norm + i);
#pragma unroll
        for (int j = 0; j < 8; j++) x.x[j] *= scale * norm.x[j];
        x.store(a.out + (u64)blockIdx.x * a.hidden + i);
    }
}

struct AppendArguments {
    const u16* qkv;    // element [row][query heads, heads of keys, heads of values][HEAD_DIM]
    const float* bias; // of these rows, or null
    const float* cos;  // [position][HEAD_DIM / 2]
    const float* sin;  // the same
    u16* queries;      // element [row][query head][HEAD_DIM], rotated
    u16* keys;         // element [head][capacity][HEAD_DIM], rotated, of a sequence; or of all sequences or pages
    u16* values;       // the same of values
    const u32* positions; // [row], or null: from `position` on
    const u32* slots;     // [row]: the row of the first head's keys and values, or null: the position
    u32 rows, position, query_heads, heads, capacity;
};

// Launch: any; a thread has eight components of the first half of a head and their partners in RoPE.
extern "C" __global__ void append(const AppendArguments a) {
    pdl_wait();
    pdl_trigger();
    constexpr u32 HALF = HEAD_DIM / 2, PARTS = HALF / 8;
    const u32 all_heads = a.query_heads + 2 * a.heads;
    const u64 n = (u64)a.rows * all_heads * PARTS;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += (u64)gridDim.x * blockDim.x) {
        const u32 i = 8 * (u32)(at % PARTS), head = (u32)(at / PARTS % all_heads), row = (u32)(at / PARTS / all_heads);
        const u16* from = a.qkv + ((u64)row * all_heads + head) * HEAD_DIM + i;
        Eight first = Eight::of(from), second = Eight::of(from + HALF);
        first.add(a.bias, head * HEAD_DIM + i), second.add(a.bias, head * HEAD_DIM + i + HALF);
        const bool is_query = head < a.query_heads, is_value = head >= a.query_heads + a.heads;
        const u32 position = a.positions ? a.positions[row] : a.position + row;
        if (!is_value) {
            const u64 angle = (u64)position * HALF + i;
            turn(first, second, a.cos + angle, a.sin + angle);
        }
        u16* to;
        if (is_query) {
            to = a.queries + ((u64)row * a.query_heads + head) * HEAD_DIM;
        } else {
            const u32 own = head - a.query_heads - (is_value ? a.heads : 0);
            const u32 slot = a.slots ? a.slots[row] : position;
            to = (is_value ? a.values : a.keys) + ((u64)own * a.capacity + slot) * HEAD_DIM;
        }
        first.store(to + i), second.store(to + i + HALF);
    }
}

struct SwigluArguments {
    const u16* gate_up; // element [row][gate, up][inner]
    const float* bias;  // [gate, up][inner], or null
    u16* out;           // element [row][inner]
    u64 rows;
    u32 inner;
};

// Launch: any.
extern "C" __global__ void swiglu(const SwigluArguments a) {
    pdl_wait();
    pdl_trigger();
    const u32 parts = a.inner / 8;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < a.rows * parts; at += (u64)gridDim.x * blockDim.x) {
        const u64 row = at / parts;
        const u32 i = 8 * (u32)(at % parts);
        const u16* from = a.gate_up + row * 2 * a.inner + i;
        Eight gate = Eight::of(from), up = Eight::of(from + a.inner);
        gate.add(a.bias, i), up.add(a.bias, a.inner + i);
#pragma unroll
        for (int j = 0; j < 8; j++) gate.x[j] = gate.x[j] / (1 + __expf(-gate.x[j])) * up.x[j];
        gate.store(a.out + row * a.inner + i);
    }
}

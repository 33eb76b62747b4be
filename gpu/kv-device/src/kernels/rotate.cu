// In-place RoPE of keys, and its inverse.
//
// CPU twin: Rope::rotate_rows of the reference. Compile-time shape: ELEMENT (1 for f16, 2 for bf16), HEAD_DIM. The floor
// is its bytes.
#include "eight_elements.cuh"

struct RotateArguments {
    u16* const* rows; // [layer][keys, values]: element [head][capacity][HEAD_DIM]; keys are rotated in place
    const float* cos; // [position][HEAD_DIM / 2]
    const float* sin; // the same
    u32 tokens, position, heads, capacity;
    u32 first_row; // of the token at `position`
    float sign;    // of the angles: -1 to undo RoPE
};

// Launch: any in x, layers in y; a thread has eight components of the first half of a head and their partners.
extern "C" __global__ void rotate(const RotateArguments a) {
    constexpr u32 HALF = HEAD_DIM / 2, PARTS = HALF / 8;
    u16* keys = a.rows[2 * blockIdx.y];
    const u32 n = a.tokens * a.heads * PARTS;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x) {
        const u32 i = 8 * (at % PARTS), token = at / PARTS % a.tokens, head = at / PARTS / a.tokens;
        u16* row = keys + ((u64)head * a.capacity + a.first_row + token) * HEAD_DIM + i;
        Eight first = Eight::of(row), second = Eight::of(row + HALF);
        const u64 angle = ((u64)a.position + token) * HALF + i;
        turn(first, second, a.cos + angle, a.sin + angle, a.sign);
        first.store(row), second.store(row + HALF);
    }
}

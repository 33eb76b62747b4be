// Weights on the device: from rows sent by the host, or hashed (random.cuh), packed for gemv.cu; and unpacked to rows
// for the GEMMs of a prompt.
//
// CPU twin of the numbers: kv_device::hashed. Compile-time shape: ELEMENT, 1 (f16) or 2 (bf16). Launch: any.
#include "element.cuh"
#include "random.cuh"

struct Shape {
    u32 n_rows, n_in;
    u32 order;    // of the rows: 0 unchanged, 1 gate then up, 2 heads
    u32 head_dim; // of order 2

    // The row at position `half` (first or second) of a pair of a tile: `pair_rows` of gemv.cu.
    __device__ __forceinline__ u32 packed_row(u32 tile, u32 pair, u32 half) const {
        if (order == 1) return 8 * tile + pair < n_rows / 2 ? 8 * tile + pair + half * (n_rows / 2) : n_rows;
        const u32 tiles_of_head = head_dim / 16;
        if (order == 2)
            return tile / tiles_of_head * head_dim + tile % tiles_of_head * 8 + pair + half * (head_dim / 2);
        return 16 * tile + pair + 8 * half;
    }
};

struct PackArguments {
    const float* rows; // [row][n_in], or null for hashed ones
    Element* out;      // [tile][chunk][32 inputs][first or second row][pair][8 inputs][8]
    Shape shape;
    u32 tensor;
    float amplitude;
};

// Rows and inputs beyond the last are zeros. Launch: one block per chunk of a tile, grid (chunks, tiles).
extern "C" __global__ void pack(const PackArguments a) {
    Element* out = a.out + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 1024;
    for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) {
        const u32 row = a.shape.packed_row(blockIdx.y, i / 32 % 8, i / 256 % 2);
        const u32 input = blockIdx.x * 64 + i / 512 * 32 + i % 32;
        float x = 0;
        if (row < a.shape.n_rows && input < a.shape.n_in) {
            const u64 at = (u64)row * a.shape.n_in + input;
            x = a.rows ? a.rows[at] : hashed(a.tensor, at, a.amplitude);
        }
        out[i] = to_element(x);
    }
}

struct UnpackArguments {
    const uint4* packed; // as `pack` writes it, 8 elements each
    uint4* rows;         // [row][n_in / 8]; n_in is a multiple of 8
    Shape shape;
};

constexpr u32 UNPACKED = 8; // chunks of a block

// Launch: 256 threads, grid (groups of UNPACKED chunks, tiles). Eight lanes write 128 bytes of a row.
extern "C" __global__ void __launch_bounds__(256) unpack(const UnpackArguments a) {
    const u32 chunks = (a.shape.n_in + 63) / 64, row_words = a.shape.n_in / 8;
    const u32 piece = threadIdx.x % 8, pair = threadIdx.x / 8 % 8, half = threadIdx.x / 64 % 2;
    const u32 row = a.shape.packed_row(blockIdx.y, pair, half);
    if (row >= a.shape.n_rows) return;
#pragma unroll
    for (u32 i = 0; i < UNPACKED; i += 2) {
        const u32 chunk = blockIdx.x * UNPACKED + i + threadIdx.x / 128, input = 8 * chunk + piece;
        if (chunk < chunks && input < row_words)
            a.rows[(u64)row * row_words + input] =
                a.packed[((u64)blockIdx.y * chunks + chunk) * 128 + piece / 4 * 64 + half * 32 + pair * 4 + piece % 4];
    }
}

// Arguments of both forms of the gather (gather.cu, gather_sm90.cu): rows by index, from device memory or, over PCIe,
// from host memory.
//
// Compile-time shape: ROW_BYTES, a multiple of 16. Grid: (blocks, head, keys and values).
#pragma once
#include "primitives_sm80.cuh"

struct Arguments {
    const u8* keys;    // [head][row][ROW_BYTES]
    const u8* values;  // as keys
    const u32* rows;   // [head][list_len]: row indices
    const u32* places; // [head][list_len]: output row of each, or null for its index in the list
    const u32* counts; // [head]: rows in the list, or null for list_len
    u8* keys_out;      // [head][out_len][ROW_BYTES]
    u8* values_out;
    u64 head_rows, list_len, out_len;
    const u8* prefetch; // bytes to prefetch into L2 while rows cross PCIe
    u64 prefetch_len;

    // Called by all blocks.
    template <u32 THREADS>
    __device__ __forceinline__ void prefetch_to_l2() const {
        const u64 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const u64 blocks = (u64)gridDim.z * gridDim.y * gridDim.x;
        prefetch_global_l2(prefetch, prefetch_len, block * THREADS + threadIdx.x, blocks * THREADS);
    }
};

// The listed rows of the block's head, keys or values.
struct Rows {
    const u32 *list, *places;
    const u8* in;
    u8* out;
    u64 count;

    __device__ __forceinline__ explicit Rows(const Arguments& a) {
        const u64 head = blockIdx.y;
        list = a.rows + head * a.list_len;
        places = a.places ? a.places + head * a.list_len : nullptr;
        in = (blockIdx.z ? a.values : a.keys) + head * a.head_rows * ROW_BYTES;
        out = (blockIdx.z ? a.values_out : a.keys_out) + head * a.out_len * ROW_BYTES;
        count = a.counts ? a.counts[head] : a.list_len;
    }
    __device__ __forceinline__ const u8* from(u64 i) const { return in + (u64)list[i] * ROW_BYTES; }
    __device__ __forceinline__ u8* to(u64 i) const { return out + (places ? places[i] : i) * ROW_BYTES; }
};

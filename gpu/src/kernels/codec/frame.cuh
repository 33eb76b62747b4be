// A frame in the device's memory, where it may begin at any byte (codec-core/FORMAT.md, "Frame").
#pragma once
#include "types.cuh"

constexpr u32 HEADER_BYTES = 64, CHECKSUM_BYTES = 4;

// Little-endian numbers at any byte.
__device__ __forceinline__ u32 load_u16(const u8* at) { return at[0] | at[1] << 8; }
__device__ __forceinline__ u32 load_u32(const u8* at) { return load_u16(at) | load_u16(at + 2) << 16; }

// The index and the payload of a frame. An entry of the index is a block of tokens of a plane: the end of its bytes in
// the payload, their checksum, and the lengths of its tiles.
class FrameIndex {
    const u8* entries;
    u32 entry_bytes;

  public:
    const u8* payload;

    __device__ __forceinline__ FrameIndex(const u8* frame, u32 planes, u32 blocks, u32 tiles)
        : entries(frame + HEADER_BYTES + 4 * planes), entry_bytes(8 + CHECKSUM_BYTES + 2 * tiles),
          payload(entries + (u64)planes * blocks * entry_bytes + CHECKSUM_BYTES) {}

    __device__ __forceinline__ const u8* start(u64 entry) const { return entry ? end(entry - 1) : payload; }
    __device__ __forceinline__ const u8* end(u64 entry) const {
        const u8* at = entries + entry * entry_bytes;
        return payload + (load_u32(at) | (u64)load_u32(at + 4) << 32);
    }
    __device__ __forceinline__ u32 checksum(u64 entry) const { return load_u32(entries + entry * entry_bytes + 8); }
    // In units of two bytes.
    __device__ __forceinline__ u32 tile_length(u64 entry, u32 tile) const {
        return load_u16(entries + entry * entry_bytes + 8 + CHECKSUM_BYTES + 2 * tile);
    }
};

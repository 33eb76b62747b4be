// The indices of a warp's tiles among all tiles [page][head][tile of page], which are fewer than 2^32. Without pages, a
// sequence is its own page.
#pragma once
#include "warp.cuh"

// A warp takes the tiles of a run, up to LANES of them, one after another. With pages, the lanes look up a run
// together, one tile each, and a shuffle broadcasts one at a time: a loop over tiles then has no division, no load
// ahead of the loads of codes, and as many registers as without pages.
struct TileIndices {
#ifdef PAGED
    static constexpr bool PAGES = true; // `take` is then called by the whole warp
    u32 indices, taken;                 // of the run: lane i has the index of tile i

    // Begins a run whose tiles are `tile` of each lane.
    template <typename Arguments>
    __device__ __forceinline__ void begin(const Arguments& a, u32 sequence, u32 head, u32 tile) {
        const u32 page = tile / a.page_tiles, number = __ldg(a.pages + (u64)sequence * a.max_pages + page);
        indices = (number * a.heads + head) * a.page_tiles + tile - page * a.page_tiles, taken = 0;
    }
    // The index of the lane's own tile of the run.
    __device__ __forceinline__ u32 own(u32) const { return indices; }
    __device__ __forceinline__ u32 left() const { return LANES - taken; }
    __device__ __forceinline__ u32 take(u32) { return __shfl_sync(FULL, indices, taken++); }
#else
    static constexpr bool PAGES = false;
    u32 first;

    template <typename Arguments>
    __device__ __forceinline__ void begin(const Arguments& a, u32 sequence, u32 head, u32) {
        first = (sequence * a.heads + head) * a.page_tiles;
    }
    __device__ __forceinline__ u32 own(u32 tile) const { return first + tile; }
    __device__ __forceinline__ u32 left() const { return LANES; }
    __device__ __forceinline__ u32 take(u32 tile) const { return first + tile; }
#endif
};

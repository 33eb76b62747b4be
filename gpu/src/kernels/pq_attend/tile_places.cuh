// The locations of the codes of a warp's tiles: the index of every run of a tile among all runs.
#pragma once
#include "pq_attend/shape.cuh"
#include "tile_indices.cuh"

struct TilePlace {
    u32 runs[RUNS];
};

#ifdef HALF_TILES
// As TileIndices with pages, but a lane looks up the two halves of its tile, which may lie in two pages. A page has
// `page_tiles` half tiles.
struct TilePlaces {
    static constexpr bool PAGES = true;
    u32 first, second, taken; // lane i has the halves of tile i of the run

    __device__ __forceinline__ void begin(const Arguments& a, u32 sequence, u32 head, u32 tile, u32 length) {
        // The last tile may have no second half: the first half then takes its place, with weights of zero.
        first = index(a, sequence, head, 2 * tile);
        second = index(a, sequence, head, min(2 * tile + 1, (length - 1) / (TILE / 2)));
        taken = 0;
    }
    __device__ __forceinline__ u32 left() const { return LANES - taken; }
    __device__ __forceinline__ TilePlace take(u32) {
        const TilePlace place{__shfl_sync(FULL, first, taken), __shfl_sync(FULL, second, taken)};
        taken++;
        return place;
    }

  private:
    static __device__ __forceinline__ u32 index(const Arguments& a, u32 sequence, u32 head, u32 half) {
        const u32 page = half / a.page_tiles, number = __ldg(a.pages + (u64)sequence * a.max_pages + page);
        return (number * a.heads + head) * a.page_tiles + half - page * a.page_tiles;
    }
};
#else
struct TilePlaces : TileIndices {
    __device__ __forceinline__ void begin(const Arguments& a, u32 sequence, u32 head, u32 tile, u32) {
        TileIndices::begin(a, sequence, head, tile);
    }
    __device__ __forceinline__ TilePlace take(u32 tile) { return {TileIndices::take(tile)}; }
};
#endif

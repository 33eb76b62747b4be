// The division of a head's work among its blocks: the work items of a sequence are its exact tokens, EXACT_PER_ITEM at
// a time, and then its tiles.
#pragma once
#include "pq_attend/shape.cuh"
#include "scheduler.cuh"

struct Items {
    const Arguments& a;
    u32 length, exact_length; // of the sequence of the last call

    __device__ __forceinline__ u32 operator()(u32 sequence) {
        length = a.lengths[sequence];
        exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
        // An empty sequence still has an output to write.
        return max((length + TILE - 1) / TILE + (exact_length + EXACT_PER_ITEM - 1) / EXACT_PER_ITEM, 1u);
    }
};

// The block's current sequence, and its part of that sequence's items.
struct Plan : Work {
    u32 length, exact_length;

    // Called by the block's first warp.
    __device__ __forceinline__ void find_first(const Arguments& a) {
        const GridCoord coord;
        Items items{a};
        if (begin(a.batch, coord.block, coord.blocks, items)) length = items.length, exact_length = items.exact_length;
    }

    // Called by the block's first thread.
    __device__ __forceinline__ void find_next(const Arguments& a) {
        Items items{a};
        if (advance(a.batch, items)) length = items.length, exact_length = items.exact_length;
    }
};

static_assert(sizeof(Plan) <= KEY_BARRIER - PLAN, "room for the plan");

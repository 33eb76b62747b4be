// The items of a sequence: its exact tokens, EXACT at a time, and then its tiles.
#pragma once
#include "pq_attend/shape.cuh"
#include "scheduler.cuh"

struct Items {
    const Arguments& a;
    u32 length, exact_length; // of the sequence that was last asked for

    __device__ __forceinline__ u32 operator()(u32 sequence) {
        length = a.lengths[sequence];
        exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
        // An empty one has an output, too.
        return max((length + TILE - 1) / TILE + (exact_length + EXACT - 1) / EXACT, 1u);
    }
};

// What a block does next: a part of a sequence's items.
struct Plan : Work {
    u32 length, exact_length;

    // For the block's first warp.
    __device__ __forceinline__ void find_first(const Arguments& a) {
        const Place place;
        Items items{a};
        if (begin(a.batch, place.block, place.blocks, items)) length = items.length, exact_length = items.exact_length;
    }

    // For its first thread.
    __device__ __forceinline__ void find_next(const Arguments& a) {
        Items items{a};
        if (advance(a.batch, items)) length = items.length, exact_length = items.exact_length;
    }
};

static_assert(sizeof(Plan) <= KEYS_HERE - PLAN, "room for the plan");

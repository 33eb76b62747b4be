// The division of a head's work among its blocks.
#pragma once
#include "pq_hybrid/shape.cuh"
#include "scheduler.cuh"

constexpr int ROWS_PER_ITEM = 16; // exact rows of a work item
constexpr int ROW_ITEM_UNITS = 4; // cost of such an item in tiles

// Whether the kernel with arguments A attends to exact rows.
template <class A>
constexpr bool WITH_ROWS = false;
template <>
constexpr bool WITH_ROWS<AttendArguments> = true;

// The work of a sequence: its exact tokens and its selected rows, ROWS_PER_ITEM at a time, and its tiles. The scoring
// kernel has tiles only.
template <class A>
struct Items {
    const A& a;
    u32 length, exact_length, selected; // of the sequence of the last call

    __device__ __forceinline__ u32 operator()(u32 sequence) {
        length = a.lengths[sequence];
        u32 items = (length + TILE - 1) / TILE;
        if constexpr (WITH_ROWS<A>) {
            exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
            // Bypasses L1: this may precede `pdl_wait`.
            selected = IS_ADAPTIVE ? __ldcg(a.found + (u64)sequence * a.heads + blockIdx.y)
                                   : min(min(a.ks[sequence], a.selected_len), length);
            items += ROW_ITEM_UNITS * ((exact_length + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM +
                                       (selected + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
        }
        return max(items, 1u); // an empty sequence still has an output to write
    }
};

// The block's current sequence, and its part of that sequence's items. Grid: (block of the head's work, head).
template <class A>
struct Plan : Work {
    u32 length, exact_length, selected;

    __device__ __forceinline__ void take(const Items<A>& items) {
        length = items.length;
        if constexpr (WITH_ROWS<A>) exact_length = items.exact_length, selected = items.selected;
    }
    // Called by the block's first warp.
    __device__ __forceinline__ void find_first(const A& a) {
        Items<A> items{a};
        if (begin(a.batch, blockIdx.x, gridDim.x, items)) take(items);
    }
    // Called by the block's first thread: the whole sequence becomes the part of this block alone.
    __device__ __forceinline__ void take_whole(u32 block) { from = 0, to = units, first_block = block, pieces = 1; }
    // Called by the block's first thread.
    __device__ __forceinline__ void find_next(const A& a) {
        Items<A> items{a};
        if (advance(a.batch, items)) take(items);
    }
};

// The tiles of a warp. The first `busy` of WARPS warps attend to one more exact item than the others. To balance this,
// they skip the first ROW_ITEM_UNITS rounds of tiles.
template <int WARPS>
struct TileWalk {
    u32 tile, short_rounds, stride;

    __device__ __forceinline__ TileWalk(u32 first, u32 warp, u32 busy) {
        const bool is_busy = warp < busy;
        stride = WARPS - busy;
        tile = first + (is_busy ? ROW_ITEM_UNITS * stride + warp : warp - busy);
        short_rounds = is_busy || busy == 0 ? 0 : ROW_ITEM_UNITS - 1;
    }
    __device__ __forceinline__ void advance() {
        tile += short_rounds ? stride : WARPS;
        short_rounds -= short_rounds > 0;
    }
    __device__ __forceinline__ u32 after(u32 rounds) const {
        const u32 short_ones = min(rounds, short_rounds);
        return tile + short_ones * stride + (rounds - short_ones) * WARPS;
    }
};

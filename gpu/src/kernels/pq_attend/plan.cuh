// The division of the work on a list of heads among the blocks of the list: for each head, the sequences of the batch.
// The work items of a sequence are its tiles and its exact tokens, EXACT_TILE at a time. Its overhead comes first.
#pragma once
#include "pq_attend/shape.cuh"
#include "scheduler.cuh"

// Overheads in items: the cost for a block to begin another sequence, or another head with its tables. Without the
// first, 131,072 tokens and 31 sequences of 512 took 1.7 times as long.
constexpr u32 SEQUENCE_COST = 20, HEAD_COST = 40;
// Minimum items of a block, if there are as many: smaller parts cost more in table copies and merges than they save.
// 32/8 heads x 1,024 tokens took 7.8 us with 4, 8.1 with 8 and 8.0 without a minimum. With PDL they took 6.5, 6.9 and
// 7.1 us.
constexpr u32 LEAST_ITEMS = 4;

struct Items {
    const Arguments& a;
    u32 length, exact_length; // of the sequence of the last call

    __device__ __forceinline__ u32 overhead(u32 sequence) const { return sequence == 0 ? HEAD_COST : SEQUENCE_COST; }

    __device__ __forceinline__ u32 operator()(u32 sequence) {
        length = a.lengths[sequence];
        exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
        // An empty sequence still has an output to write.
        const u32 items = (length + TILE - 1) / TILE + (exact_length + EXACT_TILE - 1) / EXACT_TILE;
        return overhead(sequence) + max(items, 1u);
    }
};

// The block's current head and sequence, and its part of that sequence's items.
struct Plan : Work {
    u32 head, sequence, length, exact_length;
    u32 tile_begin, tile_end, exact_begin, exact_end; // the block's tiles and items of exact tokens
    u32 tables, new_head; // heads whose tables the block has loaded, and whether the current one is new

    __device__ __forceinline__ bool has_work(const Arguments& a) const { return entry < a.batch * a.list_heads; }

    // Called by the block's first warp.
    __device__ __forceinline__ void find_first(const Arguments& a) {
        const GridCoord coord;
        Items items{a};
        if (threadIdx.x == 0) tables = 0, head = ~0u;
        __syncwarp();
        if (begin(a.batch, coord.block, coord.blocks, items, a.list_heads, LEAST_ITEMS)) take(a, items);
    }

    // Called by the block's first thread.
    __device__ __forceinline__ void find_next(const Arguments& a) {
        Items items{a};
        if (advance(a.batch, items, a.list_heads)) take(a, items);
    }

    // The parity of the barriers of the tables.
    __device__ __forceinline__ u32 phase() const { return tables - 1; }

  private:
    __device__ __forceinline__ void take(const Arguments& a, const Items& items) {
        const u32 list_head = a.list_heads == 1 ? 0 : entry / a.batch;
        const u32 next_head = GridCoord().list * a.list_heads + list_head;
        new_head = next_head != head, tables += new_head;
        head = next_head, sequence = entry - list_head * a.batch;
        length = items.length, exact_length = items.exact_length;
        divide();
    }

    // Divides the block's range of the sequence's items into tiles and exact items, in the proportion that they have in
    // the sequence. An exact item waits for its loads, which tiles do not: when the first block of a head had all 64
    // items of 1,024 exact tokens, next to 32,768 coded ones, they cost 6.3 us, the time of eight such waits.
    __device__ __forceinline__ void divide() {
        const u32 first = max(from, overhead) - overhead, end = to - overhead, items = units - overhead;
        const u32 tiles = (length + TILE - 1) / TILE, exact_items = (exact_length + EXACT_TILE - 1) / EXACT_TILE;
        exact_begin = 0, exact_end = 0;
        if (exact_items > 0) {
            // The fraction of exact items, times a little less than 2^32: rounding must not exceed the fraction.
            const u32 part = __float2uint_rd(__fdividef(exact_items, items) * 4294960000.f);
            exact_begin = __umulhi(first, part);
            exact_end = end == items ? exact_items : __umulhi(end, part);
        }
        tile_begin = first - exact_begin, tile_end = min(end - exact_end, tiles);
    }
};

static_assert(sizeof(Plan) <= KEY_BARRIER - PLAN, "room for the plan");

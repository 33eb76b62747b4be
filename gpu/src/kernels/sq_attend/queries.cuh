// The queries of a block of tokens, B operands of the products with keys: `sq_queries` makes them. The limbs of query q
// are columns 2 q and 2 q + 1 of an MMA, which a group of four fills. A warp copies them a block ahead.
#pragma once
#include "sq_attend/keys.cuh"

constexpr int QUERY_UNITS = SETS * QUADS * 8; // place of units and offsets, after the words [set][quad][column]
constexpr int QUERY_WORDS = QUERY_UNITS + QUERIES * 2; // of a block

struct BlockQueries {
    float unit[SETS], offset[SETS]; // of the scores of query l of each set

    // The `live` queries of a slice, from its first row in the first block on; `buffers` has room for two blocks. The
    // other columns are zeros.
    __device__ __forceinline__ BlockQueries(const Arguments& a, u64 first_row, u32 live, u32* buffers, const Lane& lane)
        : words(a.queries + first_row * QUADS), units(a.units + first_row), group(a.group), live(live),
          buffers(buffers) {
        for (u32 i = live * QUADS + lane.lane; i < QUERIES * QUADS; i += LANES)
            *two(0, i / QUADS, i % QUADS) = *two(1, i / QUADS, i % QUADS) = make_uint2(0, 0);
        if (lane.lane >= live && lane.lane < QUERIES)
            *of_query(0, lane.lane) = *of_query(1, lane.lane) = make_float2(0, 0);
    }

    // Starts to copy those of a block, as a part of the ring's next copy.
    __device__ __forceinline__ void copy(u32 block, const Lane& lane) const {
        const u64 row = (u64)block * group;
#pragma unroll
        for (int q = 0; q < QUERIES; q++)
#pragma unroll
            for (int first = 0; first < QUADS; first += LANES) {
                const int quad = first + lane.lane;
                if (q < live && quad < QUADS) cp_async_8(two(block % 2, q, quad), words + (row + q) * QUADS + quad);
            }
        if (lane.lane < live) cp_async_8(of_query(block % 2, lane.lane), units + row + lane.lane);
    }

    // Takes a block whose copy has ended, and returns its words.
    __device__ __forceinline__ const u32* begin_block(u32 block, const Lane& lane) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float2 both = *of_query(block % 2, 4 * set + lane.l);
            unit[set] = both.x, offset[set] = both.y;
        }
        return buffers + block % 2 * QUERY_WORDS;
    }

  private:
    const uint2* words;
    const float2* units;
    u32 group, live;
    u32* buffers;

    // The limbs of a quad, and unit and offset.
    __device__ __forceinline__ uint2* two(u32 buffer, int query, int quad) const {
        u32* words = buffers + buffer * QUERY_WORDS + (query / 4 * QUADS + quad) * 8;
        return reinterpret_cast<uint2*>(words + query % 4 * 2);
    }
    __device__ __forceinline__ float2* of_query(u32 buffer, int query) const {
        return reinterpret_cast<float2*>(buffers + buffer * QUERY_WORDS + QUERY_UNITS + query * 2);
    }
};

// A warp's ring of tiles in shared memory, which asynchronous copies fill ahead of it. Warps do not wait for each
// other.
//
// Chunk c of 16 bytes of keys or values is at c ^ 2 (c / 8 % 4) in its stage. Lanes 4 g + l read chunks 8 l + g of a
// row of keys (tokens 4 g to 4 g + 3 of column l), and half chunks of 4 l + g / 2 of a row of values: without the
// exchange lanes of equal g would share banks. Addends are placed likewise.
#pragma once
#include "sq_attend/shape.cuh"

constexpr int KEY_CHUNKS = KEY_SLOTS * VECTOR / CHUNK_WORDS, VALUE_CHUNKS = VALUE_SLOTS * VECTOR / CHUNK_WORDS;
constexpr int ADDEND_CHUNKS = TILE * 2 / CHUNK; // of a query

__host__ __device__ constexpr int lines(int chunks) { return (chunks + 7) / 8 * 8 * CHUNK; } // bytes of whole lines

// Places in a stage, in bytes.
constexpr int STAGE_VALUES = lines(KEY_CHUNKS), STAGE_NORMS = STAGE_VALUES + lines(VALUE_CHUNKS),
              STAGE_ADDENDS = STAGE_NORMS + 128,
              STAGE = STAGE_ADDENDS + ADDENDS * lines(QUERIES * ADDEND_CHUNKS);

// Loads from a stage, by an address in shared memory.
__device__ __forceinline__ u32 ld_stage(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}
__device__ __forceinline__ uint2 ld_stage_v2(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
    return x;
}
__device__ __forceinline__ uint4 ld_stage_v4(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}
// cp.async with a cache policy.
__device__ __forceinline__ void copy_chunk(u32 to, const u8* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

struct Ring {
    u32 stages, chunk;                         // addresses in shared memory: of the stages, and of the lane's chunk
    const u8 *keys, *values, *norms, *addends; // what the lane copies next
    u32 tile, end;                             // to be copied next, and the last
    u32 filling = 0, reading = 0;              // places of stages
    u64 evict_first; // L2 policy of codes, which are read once: the transformed queries stay in L2

    // Starts with the first tile of an entry.
    __device__ __forceinline__ Ring(void* at, const Arguments& a, u32 sequence, u32 head, u32 tile, u32 end,
                                    const Lane& lane)
        : stages(smem_address(at)), chunk(stages + chunk_place(lane.lane)), tile(tile), end(end) {
        keep_in_register(stages), keep_in_register(chunk);
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
        if (tile >= end) return;
        find(a, sequence, head, lane);
#if ADDENDS
        const u32 first = blockIdx.y * QUERIES, query = min(first + lane.lane / ADDEND_CHUNKS, a.group - 1);
        const u64 row = (((u64)sequence * a.heads + head) * a.addend_tiles + tile) * a.group + query;
        addends = reinterpret_cast<const u8*>(a.addends + row * TILE) + lane.lane % ADDEND_CHUNKS * CHUNK;
#endif
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) copy(a, sequence, head, lane);
    }

    // Starts to copy the next tile, if there is one.
    __device__ __forceinline__ void copy(const Arguments& a, u32 sequence, u32 head, const Lane& lane) {
        if (tile < end) {
            const u32 to = chunk + filling;
            copy_chunks<KEY_CHUNKS>(to, keys, lane);
            copy_chunks<VALUE_CHUNKS>(to + STAGE_VALUES, values, lane);
            if (lane.lane < TILE / CHUNK) copy_chunk(to + STAGE_NORMS, norms, evict_first);
#if ADDENDS
            if (lane.lane < QUERIES * ADDEND_CHUNKS) copy_chunk(to + STAGE_ADDENDS, addends, evict_first);
            addends += a.group * (TILE * 2);
#endif
            filling = filling == (STAGES - 1) * STAGE ? 0 : filling + STAGE;
            tile++;
            keys += KEY_CHUNKS * CHUNK, values += VALUE_CHUNKS * CHUNK, norms += TILE;
#ifdef PAGED
            if (warp_uniform(tile % BLOCK_TILES == 0 && tile < end)) find(a, sequence, head, lane);
#endif
        }
        cp_async_commit();
    }

    // Waits for the oldest tile, and returns its stage. All lanes have read the one before, whose place is free.
    __device__ __forceinline__ u32 wait() {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        return stages + reading;
    }
    __device__ __forceinline__ void advance() { reading = reading == (STAGES - 1) * STAGE ? 0 : reading + STAGE; }

  private:
    // Finds a tile in the arrays; the others of its page, or of the sequence, follow it.
    __device__ __forceinline__ void find(const Arguments& a, u32 sequence, u32 head, const Lane& lane) {
        const u64 stored = place_of(a, sequence, head, tile / BLOCK_TILES) * BLOCK_TILES + tile % BLOCK_TILES;
        const int chunk = lane.lane * CHUNK;
        keys = reinterpret_cast<const u8*>(a.keys) + stored * (KEY_CHUNKS * CHUNK) + chunk;
        values = reinterpret_cast<const u8*>(a.values) + stored * (VALUE_CHUNKS * CHUNK) + chunk;
        norms = a.norms + stored * TILE + chunk;
    }

    template <int CHUNKS>
    __device__ __forceinline__ void copy_chunks(u32 to, const u8* from, const Lane& lane) const {
        constexpr int ROUND = LANES * CHUNK, WHOLE = CHUNKS / LANES * ROUND;
#pragma unroll
        for (int at = 0; at < WHOLE; at += ROUND) copy_chunk(to + at, from + at, evict_first);
        if (CHUNKS % LANES && lane.lane < CHUNKS % LANES) copy_chunk(to + WHOLE, from + WHOLE, evict_first);
    }
};

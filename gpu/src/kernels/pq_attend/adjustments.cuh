// Adjustments of the scores and weights of a tile's tokens: norms, which are factors of decoded keys and values, and
// addends of the scores.
//
// They are copied to shared memory a tile ahead, 16 bytes a lane: the addends to the rows of the tile's later weights,
// one row for each query, the norms to the two rows after them. A transposing ldmatrix then gives a lane the
// adjustments of its tokens g, g + 8, g + 16 and g + 24 from two rows at once: its two queries, or keys and values.
#pragma once
#include "pq_attend/shape.cuh"
#include "pq_attend/tile_places.cuh"
#include "primitives_sm80.cuh"

// The adjustments of tokens g, g + 8, g + 16 and g + 24.
struct TileAdjustments {
    float key_norms[4], value_norms[4];
    float addends[LANE_QUERIES][4]; // times log2(e)

    // The score, a logarithm to base 2, from the product of a query and a decoded key.
    __device__ __forceinline__ float score(float product, float scale, int query, int t) const {
        float score = product * (NORMS ? key_norms[t] * scale : scale);
        if constexpr (ADDENDS) score += addends[query][t];
        return score;
    }

    // Masks a position past the length, whose norm may be NaN.
    __device__ __forceinline__ void mask(int t) {
        if constexpr (NORMS) value_norms[t] = 0;
    }
};

// Source and destination of a lane's copies, for all tiles of a sequence.
struct Adjustments {
    static constexpr bool ANY = ADDENDS || NORMS;
    static constexpr int CHUNK = 16, CHUNKS = TILE * 2 / CHUNK; // of a row
    static constexpr u32 FULL_ROW = TILE * 2;                   // bytes of a row in global memory
    u8* rows;                                                   // the warp's
    const u8* addends;                                          // the lane's chunk of the sequence's first tile
    bool has_addends;                                           // whether the chunk's row has a query

    __device__ __forceinline__ Adjustments(const Arguments& a, u32 sequence, u32 head, const Lane& lane) {
        if constexpr (ANY) rows = warp_weights(lane);
        if constexpr (ADDENDS) {
            const u32 query = GridCoord().slice * QUERIES + lane.lane / CHUNKS;
            has_addends = query < a.group;
            const u64 first_row = ((u64)sequence * a.heads + head) * a.addend_tiles * a.group;
            addends = a.addends + (first_row + (has_addends ? query : 0)) * FULL_ROW + lane.lane % CHUNKS * CHUNK;
        }
    }

    // Starts copying the adjustments of a tile. Called by all lanes of the warp or by none.
    __device__ __forceinline__ void copy(const Arguments& a, const TilePlace& place, u32 tile, const Lane& lane) const {
        const int chunk = lane.lane % CHUNKS, row = lane.lane / CHUNKS;
        u8* to = rows + row * WEIGHT_ROW + chunk * CHUNK;
        if constexpr (ADDENDS) {
            if (row < QUERIES) cp_async_16_zfill(to, addends + (u64)tile * a.group * FULL_ROW, has_addends);
        }
        if constexpr (NORMS) {
            constexpr int OF_RUN = CHUNKS / RUNS;
            const u8* norms = row == 0 ? a.key_norms : a.value_norms;
            const u64 run = place.runs[RUNS == 2 && chunk >= OF_RUN];
            if (row < 2) cp_async_16(to + QUERIES * WEIGHT_ROW, norms + (run * OF_RUN + chunk % OF_RUN) * CHUNK);
        }
        if constexpr (ANY) cp_async_commit();
    }

    // Waits for the copies of the tile.
    __device__ __forceinline__ TileAdjustments of_tile(const Lane& lane) const {
        TileAdjustments of_tile;
        if constexpr (ANY) {
            cp_async_wait<0>();
            __syncwarp();
        }
        const int row = lane.lane % 8; // of each of ldmatrix's matrices, which have 8 tokens
        if constexpr (NORMS) {
            u32 words[4];
            ldmatrix_x4_trans(words, rows + (QUERIES + row % 2) * WEIGHT_ROW + lane.lane / 8 * CHUNK);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                of_tile.key_norms[t] = half_to_float((u16)words[t]);
                of_tile.value_norms[t] = half_to_float((u16)(words[t] >> 16));
            }
        }
        if constexpr (ADDENDS) {
            u32 words[KEY_MMAS][4]; // of the queries whose scores are in the accumulator of each MMA
            const int query = QUERIES == 1 ? 0 : row / 2 / VARIANTS * 2 + row % 2;
#pragma unroll
            for (int i = 0; i < KEY_MMAS; i++)
                ldmatrix_x4_trans(words[i], rows + (i * MMA_QUERIES + query) * WEIGHT_ROW + lane.lane / 8 * CHUNK);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const u32 word = words[KEY_MMAS > 1 && lane.mma_index == 1][t];
#pragma unroll
                for (int i = 0; i < LANE_QUERIES; i++)
                    of_tile.addends[i][t] = half_to_float((u16)(word >> 16 * i)) * LOG2_E;
            }
        }
        return of_tile;
    }
};
static_assert(KEY_MMAS <= 2, "a lane selects one of two");

// Subtracts the coded values of selected tokens from the sums of all coded values.
//
// Values are summed before the selection is known. The weights here are bit for bit those of ValueSums and products of
// f16 are exact, so the residue of a token is the rounding of f32 sums, which tensor cores truncate: up to 2^-16 of the
// subtracted weight. Exact rows replace that weight, so the residue is below the rounding of weights to f16 even if the
// selected tokens have nearly all of the weight. recenter.cuh sees to those whose rows have far less than their codes.
#pragma once
#include "pq_hybrid/rows.cuh"
#include "pq_hybrid/stats.cuh"
#include "pq_hybrid/values.cuh"
#include "tile_indices.cuh"

// Sums like those of exact rows, with negative weights.
struct CodedRows : RowSums {
    static constexpr int PIECES = 8 / PIECE; // pieces of a chunk of 8 components

    // `bases`: the base of each query.
    __device__ __forceinline__ void begin(const float* bases) {
        clear();
#pragma unroll
        for (int q = 0; q < 2; q++) max[q] = bases[min(threadIdx.x % 4 * 2 + q, GROUP - 1)];
    }

    // Subtracts the `count` tokens of the list `selected` of a head of a sequence. `table`: of the values, in shared
    // memory.
    __device__ __forceinline__ void subtract(const AttendArguments& a, u32 sequence, u32 head, const u32* selected,
                                             u32 count, const u8* table) {
        const int lane = threadIdx.x % LANES, g = lane / 4, l = lane % 4;
        // Bypasses L1: this may precede `pdl_wait`.
        const auto token_of = [&](u32 i) { return __ldcg(selected + min(i, count - 1)); };
        const u64 row = (u64)sequence * a.heads + head;
        const ScoredTile* scores = a.scores_of(row);
        float p[4], level[4]; // row g + 8 (i / 2), query 2 l + i % 2
        u16 norms[2];         // of rows g and g + 8
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // The query is clamped for registers: with the condition alone, the kernel spills.
            const u32 token = token_of(g + i / 2 * 8), q = min(2 * l + i % 2, GROUP - 1);
            const ScoredTile& tile = scores[token / TILE];
            const bool exists = 2 * l + i % 2 < GROUP && g + i / 2 * 8 < count;
            p[i] = near_score(exists ? __ldcg(&tile.scores[q][place_of(token % TILE)]) : NO_SCORE) - ORIGIN;
            level[i] = exists ? __ldcg(&tile.levels[q]) : NEG_INF;
        }
        if constexpr (HAS_VALUE_NORMS) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 token = token_of(g + i * 8);
                TileIndices tiles;
                tiles.begin(a, sequence, head, token / TILE);
                norms[i] = __ldg(a.value_norms + (u64)tiles.own(token / TILE) * TILE + token % TILE);
            }
        }
        u32 words[PARTS][4][4]; // [group of chunks][token 2 l + i % 2 + i / 2 * 8][word of a chunk]
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 token = token_of(2 * l + i % 2 + i / 2 * 8);
            TileIndices tiles;
            tiles.begin(a, sequence, head, token / TILE);
            const u8* tile = a.codes + (u64)tiles.own(token / TILE) * Values::TILE_BYTES;
#pragma unroll
            for (int k = 0; k < PARTS * PIECES; k++) {
                const int piece = (g + k / PIECES * 8) * PIECES + k % PIECES; // index in the value
                const int of_g = VALUE_M == 8 ? piece / SETS : piece % 8, set = VALUE_M == 8 ? piece % SETS : piece / 8;
                const u32 code = ValueLookUp::code(tile, token % TILE, of_g, set);
                const u8* at = table + ValueLookUp::address(code, of_g, set);
                u32* to = &words[k / PIECES][i][k % PIECES * PIECE_WORDS];
#pragma unroll
                for (int w = 0; w < PIECE_WORDS; w++) to[w] = reinterpret_cast<const u32*>(at)[w];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = exp2_approx(p[i] + (level[i] - max[i % 2])), weight[i % 2] -= p[i];
            if constexpr (HAS_VALUE_NORMS) p[i] = ValueNorms::times_norm(p[i], norms[i / 2]);
        }
        const u32 weights[2] = {movmatrix_trans(pack_half2(-p[0], -p[1])), movmatrix_trans(pack_half2(-p[2], -p[3]))};
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const u32(&of)[4][4] = words[part];
                const u32 operand[4] = {prmt(of[0][w], of[1][w], 0x5410), prmt(of[0][w], of[1][w], 0x7632),
                                        prmt(of[2][w], of[3][w], 0x5410), prmt(of[2][w], of[3][w], 0x7632)};
                mma_m16n8k16_f16(sums[part][w], operand, weights[0], weights[1]);
            }
    }
};

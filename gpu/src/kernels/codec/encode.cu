// Encodes rows of an engine's KV cache into tiles of a frame, byte for byte those of the CPU.
//
// CPU twin: codec_core::encode_frame, of planes with one step per channel. Bitstream: codec-core/FORMAT.md. Each tile
// goes into a fixed-size slot of its own; `codec_join` (join.cu) then concatenates them.
//
// Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh); CONTEXTS, SYMBOLS, PREVIOUS (tile.cuh); MAP_DIM,
// defined if quantize_mma.cu has computed the bins. Compiled with --fmad=false.
//
// Launch: persistent thread blocks of 4 warps, at most 5 per multiprocessor. In each round a thread block takes a tile
// index of a plane and WARPS of its blocks of tokens: a tile per warp, a channel per lane. The warps share the tile's
// models in shared memory. rANS encodes from the last row to the first and its size is known only at the end, so bins,
// words and escapes stay in a workspace per warp, which the warp's next tile reuses.
//
// The floor is reading the rows and writing the tiles. A load that waits for the store of the previous row takes a
// thousand cycles, so every pass over a tile loads the next GROUP rows into registers before it stores anything.
#include "codec/encode_bins.cuh"
#include "codec/encode_families.cuh"
#include "codec/encode_stream.cuh"

__device__ __forceinline__ void store_u16(u8* at, u32 x) { at[0] = (u8)x, at[1] = (u8)(x >> 8); }

__device__ u32 bits_below_highest(u32 state) { return 31 - __clz(state); }

// The bytes of a rANS tile before its words.
__device__ u32 bytes_before_words(const Tile& tile, u32 state_bits, bool own) {
    return HEAD_BYTES + (own ? (tile.lanes + 1) / 2 * 2 : 0) + 6 + (tile.lanes + 1) / 2 + (state_bits + 7) / 8;
}

// Copies words to a byte address of any alignment.
__device__ __forceinline__ void copy_words(u8* to, const u16* from, u32 count) {
    constexpr int AT_ONCE = 8;
    for (u32 first = threadIdx.x % LANES; first < count; first += AT_ONCE * LANES) {
        u16 words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * LANES < count) words[i] = from[first + i * LANES];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * LANES < count) store_u16(to + 2 * (first + i * LANES), words[i]);
    }
}

// Writes a rANS tile.
__device__ void write_coded(const Tile& tile, const Stream& stream, bool has_own, u32 own, u32* state_bits, u8* to) {
    const u32 lane = threadIdx.x % LANES, words = 2 * LANES * tile.rows - stream.first_word;
    const bool used = lane < tile.lanes;
    const u32 length = used ? bits_below_highest(stream.state) : 0, bits_end = warp_inclusive_sum(length);
    const u32 first_bit = bits_end - length, all_bits = __shfl_sync(FULL, bits_end, LANES - 1);
    const u32 before_words = bytes_before_words(tile, all_bits, has_own), padding = before_words % 2;
    if (lane == 0) {
        to[0] = has_own ? OWN_LANES : PLANE_LANES, to[1] = (u8)padding;
        store_u16(to + 2, tile.escape_count);
    }
    u8* at = to + HEAD_BYTES;
    if (has_own) {
        if (lane < (tile.lanes + 1) / 2 * 2) at[lane] = used ? (u8)own : 0;
        at += (tile.lanes + 1) / 2 * 2;
    }
    if (lane == 0) {
        store_u16(at, stream.warmup);
        store_u16(at + 2, stream.carrying & 0xffff);
        store_u16(at + 4, stream.carrying >> 16);
    }
    at += 6;
    const u32 nibble = used ? length - 16 : 0, next = __shfl_down_sync(FULL, nibble, 1);
    if (lane % 2 == 0 && used) at[lane / 2] = (u8)(nibble | (lane + 1 < tile.lanes ? next << 4 : 0));
    at += (tile.lanes + 1) / 2;
    state_bits[lane] = 0;
    __syncwarp();
    if (used) {
        const u64 below = (u64)(stream.state & ((1u << length) - 1)) << first_bit % 32;
        atomicOr(&state_bits[first_bit / 32], (u32)below);
        if (below >> 32) atomicOr(&state_bits[first_bit / 32 + 1], (u32)(below >> 32));
    }
    __syncwarp();
    for (u32 i = lane; i < (all_bits + 7) / 8; i += LANES) at[i] = (u8)(state_bits[i / 4] >> i % 4 * 8);
    __syncwarp();
    at = to + before_words;
    copy_words(at, tile.words + stream.first_word, words);
    at += 2 * words;
    if (padding && lane == 0) *at = 0;
    copy_words(at + padding, tile.escapes, tile.escape_count);
}

// A tile of bins of fixed width.
struct Fixed {
    u32 width, exponent, bytes;
    float factor; // 2^-exponent
};

// The narrowest fixed-width coding of a tile: the fallback for tiles that rANS would expand or that have large bins.
__device__ Fixed fixed_of(const Tile& tile, const Stats& stats) {
    Fixed fixed = {0, 0, 0, 1};
    for (; fmaxf(stats.highest, -stats.lowest) * fixed.factor > (float)MAX_BIN; fixed.exponent++) fixed.factor *= 0.5f;
    const u32 largest = max(zigzag(bin_of(stats.lowest * fixed.factor)), zigzag(bin_of(stats.highest * fixed.factor)));
    fixed.width = 32 - __clz(largest);
    fixed.bytes = HEAD_BYTES + (tile.rows * tile.lanes * fixed.width + 15) / 16 * 2;
    return fixed;
}

// Writes a tile of fixed width. Quantizes the values again, since its bins have no prediction and may have another
// scale.
__device__ void write_fixed(const Tile& tile, const Fixed& fixed, const Values& values, u8* to) {
    const u32 lane = threadIdx.x % LANES;
    if (lane < HEAD_BYTES) to[lane] = lane == 1 ? (u8)fixed.width : lane == 2 ? (u8)fixed.exponent : 0;
    const u32 count = tile.rows * tile.lanes;
    auto bin_at = [&](u32 row, u32 lane) {
#ifdef MAP_DIM
        if (fixed.exponent == 0) return (int)(short)tile.bins[bin_index(row, lane)]; // these have no prediction either
#endif
        return bin_of(values.at(row, lane) * fixed.factor);
    };
    for (u32 word = lane; word < (fixed.bytes - HEAD_BYTES) / 2; word += LANES) {
        u32 bits = 0;
        for (u32 i = word * 16 / fixed.width; i < count && i * fixed.width < word * 16 + 16; i++) {
            const u64 bin = zigzag(bin_at(i / tile.lanes, i % tile.lanes));
            bits |= (u32)((bin << 16 << (i * fixed.width + 16 - word * 16)) >> 32);
        }
        store_u16(to + HEAD_BYTES + 2 * word, bits);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) codec_encode(Arguments a) {
    __shared__ Shared shared;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 blocks = (a.tokens + a.block_tokens - 1) / a.block_tokens, rounds = (blocks + WARPS - 1) / WARPS;
    const u32 tile_bins = bins_of_tile(a.block_tokens);
    u16* workspace = a.workspace + (u64)(blockIdx.x * WARPS + warp) * 4 * tile_bins;
    for (u32 unit = blockIdx.x; unit < a.planes_here * TILES * rounds; unit += gridDim.x) {
        const u32 round = unit % rounds, tile_index = unit / rounds % TILES, plane = unit / rounds / TILES;
        const TileModel& tile_model = a.planes->tiles[a.first_plane + plane][tile_index];
        __syncthreads();
        for (int i = threadIdx.x; i < CONTEXTS * SYMBOLS * LANES; i += THREADS) {
            const Symbol symbol = (&tile_model.symbols[0][0])[i];
            (&shared.symbols[0][0])[i] = symbol;
            if (HAS_RECIPROCALS) (&shared.reciprocals[0][0])[i] = slots(symbol) ? ~0u / slots(symbol) : 0;
        }
        __syncthreads();
        const u32 block = round * WARPS + warp;
        if (block >= blocks) continue;

        const u32 first_token = block * a.block_tokens, first_channel = tile_index * LANES;
        const Values values = {a, tile_model, a.rows[plane], a.first_plane + plane, first_channel, first_token};
        const u64 slot_index = ((u64)plane * blocks + block) * TILES + tile_index;
        Tile tile;
        tile.rows = min(a.tokens - first_token, a.block_tokens);
        tile.lanes = min(CHANNELS - first_channel, LANES);
        tile.codes = workspace;
        tile.words = workspace + tile_bins;
        tile.escapes = workspace + 3 * tile_bins + (CONTEXTS > 1 ? 0 : LANES * tile.rows);
        tile.escape_count = 0;
        u8* to = a.slots + slot_index * a.slot_bytes;
#ifdef MAP_DIM
        tile.bins = a.bins + slot_index * tile_bins;
        Stats stats = stats_of_bins(tile);
        if (!stats.fits) {
            __syncwarp();
            stats = quantize(tile, values);
        }
#else
        tile.bins = workspace;
        const Stats stats = quantize(tile, values);
#endif
        __syncwarp();
        if (!stats.finite) {
            if (lane == 0) atomicMax(a.failed, (u32)slot_index + 1), a.lengths[slot_index] = 0;
            continue;
        }
        const Fixed fixed = fixed_of(tile, stats);
        u32 bytes = fixed.bytes + 1;
        if (stats.fits) {
            Model model = {&shared.symbols[0][lane], LANES, tile_model.low_bits[lane], &tile_model.escapes[0][lane]};
            const bool with_contexts = CONTEXTS > 1 && tile_model.contexts > 1;
            u32 own = 0;
            const bool has_own = !with_contexts && choose_own_families(tile, a, tile_model, model, stats.squares, own);
            if (has_own) model = model_of(a.planes->families[own]);
            if (lane >= tile.lanes) model.low_bits = 0;
#if CONTEXTS > 1
            bins_to_codes(tile, model, with_contexts);
#endif
            Stream stream;
            if (has_own || !HAS_RECIPROCALS) {
                stream = encode_stream(RowCoder<false>(tile, model, shared, with_contexts));
            } else {
                // Assigned again, so that the compiler knows that the pointer is to shared memory.
                model.symbols = &shared.symbols[0][lane], model.stride = LANES;
                stream = encode_stream(RowCoder<true>(tile, model, shared, with_contexts));
            }
            __syncwarp();
            const u32 state_bits = __reduce_add_sync(FULL, lane < tile.lanes ? bits_below_highest(stream.state) : 0);
            const u32 before_words = bytes_before_words(tile, state_bits, has_own);
            bytes =
                before_words + before_words % 2 + 2 * (2 * LANES * tile.rows - stream.first_word + tile.escape_count);
            if (bytes <= fixed.bytes) write_coded(tile, stream, has_own, own, shared.state_bits[warp], to);
        }
        if (bytes > fixed.bytes) {
            bytes = fixed.bytes;
            write_fixed(tile, fixed, values, to);
        }
        if (lane == 0) a.lengths[slot_index] = (u16)(bytes / 2);
        __syncwarp();
    }
}

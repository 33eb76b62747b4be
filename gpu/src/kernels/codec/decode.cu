// Decodes blocks of a frame into rows of an engine's KV cache: entropy decoding, dequantization and the store in one
// kernel. With a linear transform, coefficients go to a workspace: transform.cu, transform_mma.cu or points_mma.cu turn
// them into rows.
//
// CPU twin: codec_core::Frame::decode_block_into; f32 rows have the same bits. Bitstream: codec-core/FORMAT.md. The
// frame lies on the device as it was sent; the host has checked its header, index and plane ids, but not its payload.
// Tiles are parsed with bounds checks, and a malformed tile is reported in `failed`.
//
// Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh); CONTEXTS, SYMBOLS, PREVIOUS (tile.cuh); POINTS,
// defined if the output is that of points.cuh. Compiled with --fmad=false.
//
// Launch: grid (tiles, planes, ceil(token blocks / warps)), up to 8 warps. A thread block owns a tile index of a plane;
// each of its warps decodes that tile in one block of tokens, a lane per channel. The warps share the tile's models in
// shared memory, laid out [symbol][lane] so that lanes never collide in a bank, and a table of the numbers that symbols
// decode to. A symbol is found by bisection of its cdf.
//
// The floor is reading the stream and writing the rows. The kernel is far above it, bound by the instructions of the
// loop over rows. So the last rows, which take no words, have a separate loop, and warp-uniform conditions are votes,
// which tell the compiler that the warp has not diverged.
#ifdef POINTS
#include "codec/decode_points.cuh"
#else
#include "codec/decode_rows.cuh"
#endif
#include "codec/decode_stream.cuh"
#include "codec/points.cuh"

constexpr int MAX_WARPS = 8;
constexpr u32 MANY_LOW_BITS = 7; // of which the bins of the last symbols exceed 2048

struct Arguments {
    const u8* frame;
    const Planes* planes;
    u32* failed;   // maximum of (index of the tile in the frame) + 1 over tiles that failed
    PlanesAt out;  // planes of this launch
    Place place;   // of the tokens in `out`
    Points points; // with POINTS, instead of both
    u32 frame_planes, frame_blocks, tokens, block_tokens; // those of the frame
    u32 first_plane, first_block, blocks;                 // those of this launch
};

struct Shared {
    Ring rings[MAX_WARPS];
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
    Number numbers[SYMBOLS][LANES]; // of the symbols of models without low bits
};

// The symbols of a lane in shared memory: `at` is the address of one.
class SharedModels {
    static constexpr u32 STRIDE = sizeof(Symbol) * LANES, CONTEXT = SYMBOLS * STRIDE; // bytes
    u32 first;                                                                        // of context 0
    u32 numbers;                                                                      // offset to the numbers

  public:
    static constexpr bool OWN = false;

    __device__ explicit SharedModels(const Shared& shared)
        : first(smem_address(&shared.symbols[0][threadIdx.x % LANES])),
          numbers(smem_address(&shared.numbers) - smem_address(&shared.symbols)) {}

    // The symbol of a slot.
    __device__ __forceinline__ u32 find(u32 key, u32 context) const {
        u32 at = CONTEXTS == 1 ? first : first + context * CONTEXT;
#pragma unroll
        for (u32 step = CONTEXT / 2; step >= STRIDE; step /= 2) {
            const Symbol probe = ld_shared_const_u32(at + step);
            // A predicated add. The compiler would select one of two sums, which costs one more instruction.
            asm("{\n.reg .pred p;\nsetp.le.u32 p, %1, %2;\n@p add.u32 %0, %0, %3;\n}"
                : "+r"(at)
                : "r"(probe), "r"(key), "r"(step));
        }
        return at;
    }
    __device__ __forceinline__ Symbol symbol(u32 at) const { return ld_shared_const_u32(at); }
    __device__ __forceinline__ u32 index(u32 at, u32 context) const {
        return (at - first - context * CONTEXT) / STRIDE;
    }
    // The decoded value of a symbol.
    __device__ __forceinline__ Number number(u32 at, u32 context) const {
        const u32 bits = ld_shared_const_u32((CONTEXTS == 1 ? at : at - context * CONTEXT) + numbers);
        return reinterpret_cast<const Number&>(bits);
    }
};

// The symbols of a family in global memory: `at` is the index of one.
struct OwnModels {
    static constexpr bool OWN = true;
    const Symbol* symbols;

    __device__ u32 find(u32 key, u32) const {
        u32 at = 0;
#pragma unroll
        for (u32 step = MAX_SYMBOLS / 2; step; step /= 2)
            if (symbols[at + step] <= key) at += step;
        return at;
    }
    __device__ Symbol symbol(u32 at) const { return symbols[at]; }
    __device__ u32 index(u32 at, u32) const { return at; }
    __device__ Number number(u32, u32) const { return 0; }
};

// The loop over the rows of a coded tile.
template <class Models>
struct Rows {
    const Models& models;
    Writer& writer;
    WordReader words;
    const u8* escapes;
    u32 escape_count;
    u32 low_bits, state;
    bool any_low_bits; // of the tile's lanes
    bool used;         // whether the lane has a channel
    u32 escapes_taken = 0, context = 0;

    // BY_SYMBOL: a symbol is a bin, and bins decode to the same value in all rows. REFILLS: states take words.
    template <bool BY_SYMBOL, bool REFILLS>
    __device__ __forceinline__ void decode_row(u32 row) {
        const u32 key = slot_key(state), at = models.find(key, context);
        const Symbol found = models.symbol(at);
        state = slots(found) * (state >> PRECISION) + (key - found >> FIRST_SLOT_SHIFT);
        if (Models::OWN && !used) state = LOW; // a lane without a channel decodes nothing
        if (REFILLS) words.refill(state);
        Number number;
        if (BY_SYMBOL) {
            number = models.number(at, context);
        } else {
            int bin = unzigzag(models.index(at, context));
            if (any_low_bits) {
                bin = (bin << low_bits) + (int)(state & ((1u << low_bits) - 1)) - half_of(low_bits);
                state >>= low_bits;
                if (REFILLS) words.refill(state);
            }
            number = writer.of_bin(row, bin);
        }
        const bool escaped = is_escape(found) && (used || !Models::OWN);
        if (warp_uniform(escaped)) {
            const u32 escaping = __ballot_sync(FULL, escaped);
            const u32 own = escapes_taken + __popc(escaping & lanes_below(threadIdx.x % LANES));
            escapes_taken += __popc(escaping);
            if (escaped && own < escape_count) number = writer.of_bin(row, (short)load_u16(escapes + 2 * own));
        }
        if (CONTEXTS > 1 && !Models::OWN) context = context_after(models.index(at, context), escaped);
        writer.store(row, number);
    }

    // Decodes all rows. Returns whether the final states and escapes are valid. Before the first row without words, a
    // lane that is `carrying` subtracts LOW from its state.
    template <bool BY_SYMBOL>
    __device__ __forceinline__ bool decode(u32 rows, u32 rows_with_words, bool carrying) {
        u32 row = 0;
        for (; BY_SYMBOL && warp_uniform(row + 4 <= rows_with_words); row += 4) {
            decode_row<BY_SYMBOL, true>(row);
            decode_row<BY_SYMBOL, true>(row + 1);
            decode_row<BY_SYMBOL, true>(row + 2);
            decode_row<BY_SYMBOL, true>(row + 3);
        }
        for (; warp_uniform(row < rows_with_words); row++) decode_row<BY_SYMBOL, true>(row);
        const bool carries = !carrying || state >= LOW;
        if (carrying) state -= LOW;
        for (; warp_uniform(row < rows); row++) decode_row<BY_SYMBOL, false>(row);
        return carries && escapes_taken == escape_count && (!used || state == 0);
    }
};

// Decodes a rANS tile.
template <class Models>
__device__ __forceinline__ void decode_coded(Tile& tile, const Models& models, u32 low_bits, Ring& ring, u32 lanes,
                                             Writer& writer) {
    const int lane = threadIdx.x % LANES;
    const bool used = lane < lanes;
    const u32 padding = tile.at[1 - HEAD_BYTES], escape_bytes = 2 * load_u16(tile.at + 2 - HEAD_BYTES);
    if (Models::OWN) tile.at += (lanes + 1) / 2 * 2;
    if (warp_uniform(padding > 1 || tile.end - tile.at < 6 + padding + escape_bytes)) {
        tile.bad = true;
        return;
    }
    const u8 *end = tile.end, *escapes = end - escape_bytes;
    tile.end = escapes - padding;
    const u32 warmup = load_u16(tile.at), carrying = load_u16(tile.at + 2) | load_u16(tile.at + 4) << 16;
    tile.at += 6;
    const u32 state = read_states(tile, used, lanes);
    tile.bad |= warmup > tile.rows;
    if (warp_uniform(tile.bad)) {
        tile.bad = true;
        return;
    }
    tile.stored = true;
    const bool any_low_bits = __any_sync(FULL, low_bits > 0);
    writer.begin_coded(escapes, end, low_bits >= MANY_LOW_BITS);
    Rows<Models> rows{models,  writer,           WordReader(ring, tile.at, tile.end),
                      escapes, escape_bytes / 2, low_bits,
                      state,   any_low_bits,     used};
    const u32 rows_with_words = tile.rows - warmup;
    const bool carries = carrying >> lane & 1, by_symbol = !any_low_bits && writer.same_in_all_rows();
    const bool good = !Models::OWN && warp_uniform(by_symbol)
                          ? rows.template decode<!Models::OWN>(tile.rows, rows_with_words, carries)
                          : rows.template decode<false>(tile.rows, rows_with_words, carries);
    tile.bad |= !good || rows.words.bytes_taken() != tile.end - tile.at;
}

// Decodes a tile of bins of fixed width, times 2^exponent.
__device__ __forceinline__ void decode_fixed(Tile& tile, u32 width, u32 exponent, u32 lanes, Writer& writer) {
    const int lane = threadIdx.x % LANES;
    writer.begin_fixed(width, exponent);
    for (u32 row = 0; row < tile.rows; row++) {
        const u32 bit = (row * lanes + lane) * width;
        u32 window = 0;
        for (u32 byte = bit / 8; byte * 8 < bit + width; byte++)
            if (lane < lanes) window |= (u32)tile.at[byte] << (8 * (byte - bit / 8));
        writer.store_fixed(row, unzigzag(window >> bit % 8 & ((1u << width) - 1)), exponent);
    }
}

__device__ void decode(Tile& tile, const Arguments& a, const TileModel& model, Shared& shared, Writer& writer,
                       u32 lanes) {
    const int lane = threadIdx.x % LANES;
    if (warp_uniform(tile.end - tile.at < HEAD_BYTES)) {
        tile.bad = true;
        return;
    }
    const u32 kind = tile.at[0], second = tile.at[1], third = tile.at[2], fourth = tile.at[3];
    tile.at += HEAD_BYTES;
    if (warp_uniform(kind == FIXED)) {
        const u32 width = second, exponent = third;
        tile.bad = width > 16 || exponent > 128 || fourth != 0 ||
                   tile.end - tile.at != (tile.rows * lanes * width + 15) / 16 * 2;
        if (tile.bad) return;
        tile.stored = true;
        decode_fixed(tile, width, exponent, lanes, writer);
        return;
    }
    Ring& ring = shared.rings[threadIdx.x / LANES];
    if (warp_uniform(kind == PLANE_LANES)) {
        decode_coded(tile, SharedModels(shared), model.low_bits[lane], ring, lanes, writer);
    } else if (warp_uniform(kind == OWN_LANES && tile.end - tile.at >= (lanes + 1) / 2 * 2)) {
        const Family& family = a.planes->families[lane < lanes ? tile.at[lane] : 0];
        decode_coded(tile, OwnModels{family.symbols}, lane < lanes ? family.low_bits : 0, ring, lanes, writer);
    } else {
        tile.bad = true;
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * LANES, 4) codec_decode(Arguments a) {
    __shared__ Shared shared;
    const u32 tile_index = blockIdx.x, plane = a.first_plane + blockIdx.y;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    const TileModel& model = a.planes->tiles[plane][tile_index];
    for (u32 i = threadIdx.x; i < CONTEXTS * SYMBOLS * LANES; i += blockDim.x)
        (&shared.symbols[0][0])[i] = (&model.symbols[0][0])[i];
    for (u32 symbol = warp; symbol < SYMBOLS; symbol += warps)
        shared.numbers[symbol][lane] = Writer::number_of(model, unzigzag(symbol));
    __syncthreads();
    const u32 block = blockIdx.z * warps + warp, frame_block = a.first_block + block;
    if (warp_uniform(block >= a.blocks)) return;

    const u32 lanes = min(CHANNELS - tile_index * LANES, LANES), channel = tile_index * LANES + lane;
    const u32 first_token = frame_block * a.block_tokens, rows = min(a.tokens - first_token, a.block_tokens);
    const FrameIndex index(a.frame, a.frame_planes, a.frame_blocks, TILES);
    const u64 entry = (u64)plane * a.frame_blocks + frame_block;
    const u8 *block_start = index.start(entry), *block_end = index.end(entry);
    u32 words_before = 0; // total words of the earlier tiles of this block of tokens
    for (u32 i = lane; i < tile_index; i += LANES) words_before += index.tile_length(entry, i);
    words_before = __reduce_add_sync(FULL, words_before);
    const u32 side_bytes = model.levels ? 2 * rows : 0;

    Tile tile;
    tile.at = block_start + side_bytes + 2ull * words_before;
    tile.end = tile.at + 2 * index.tile_length(entry, tile_index);
    tile.rows = rows, tile.stored = false;
    tile.bad = tile.end > block_end || (tile_index == TILES - 1 && tile.end != block_end);
    // A token's largest magnitude is finite and not negative.
    if (model.levels && block_start + side_bytes <= block_end)
        for (u32 row = lane; row < rows; row += LANES) tile.bad |= load_u16(block_start + 2 * row) >= 0x7f80;
#ifdef POINTS
    const u32 launch_first = a.first_block * a.block_tokens, launch_end = (a.first_block + a.blocks) * a.block_tokens;
    const u64 token = (u64)blockIdx.y * (min(launch_end, a.tokens) - launch_first) + first_token - launch_first;
    Writer writer(model, a.points, token * CHANNELS + channel,
                  ((u64)blockIdx.y * a.blocks + block) * TILES + tile_index, rows, channel < CHANNELS);
#else
    Writer writer(model, a.place, a.out[blockIdx.y], channel, first_token, block_start);
#endif
    tile.bad = warp_uniform(tile.bad);
    if (!tile.bad) decode(tile, a, model, shared, writer, lanes);
    // Zeros for a tile too damaged to decode, so that an inverse transform reads nothing that was never written.
    if (!warp_uniform(tile.stored))
        for (u32 row = 0; row < rows; row++) writer.store_zero(row);
    writer.end();
    if (__any_sync(FULL, tile.bad) && lane == 0) atomicMax(a.failed, (u32)entry * TILES + tile_index + 1);
}

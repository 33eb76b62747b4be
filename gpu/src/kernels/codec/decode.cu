// Decodes blocks of a frame into rows of an engine's KV cache: entropy decoding, dequantization and the store in one
// kernel. (A linear transform, if the planes have one, follows in transform.cu.)
//
// CPU twin: codec_core::Frame::decode_block_into; f32 rows have the same bits. Bitstream: codec-core/FORMAT.md. The
// frame lies on the device as it was sent; the host has checked its header, index and plane ids, but not its payload.
// Tiles are parsed with bounds checks, and a tile that no encoder writes is reported in `failed`.
//
// Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh); CONTEXTS, SYMBOLS, PREVIOUS (tile.cuh). Compiled
// with --fmad=false.
//
// Launch: grid (tiles, planes, ceil(token blocks / WARPS)), 8 warps. A thread block owns a tile index of a plane; each
// of its warps decodes that tile in one block of tokens, a lane per channel. The warps share the tile's models in
// shared memory, laid out [symbol][lane] so that lanes never collide in a bank, and a table of the elements that
// symbols decode to. A symbol is found by bisection of its cdf. Words of the stream pass through a ring of 256 bytes
// per warp: one half is loaded while the other is read.
//
// The floor is reading the stream and writing the rows. The kernel is far above it: integer arithmetic bounds the loop
// over rows, of which a row executed 114 instructions with 76 % of the integer pipe busy (H200) before there was the
// table.
#include "codec/tile.cuh"
#include "warp.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int HEADER_BYTES = 64, ENTRY_BYTES = 12 + 2 * TILES;

struct Arguments {
    const u8* frame;
    const Planes* planes;
    u32* failed;  // maximum of (index of the tile in the frame) + 1 over tiles that failed
    PlanesAt out; // planes of this launch
    Place place;
    u32 frame_planes, frame_blocks, tokens, block_tokens; // those of the frame
    u32 first_plane, first_block, blocks;                 // those of this launch
};

#ifdef PREVIOUS
typedef float Number; // the reconstruction point of a bin, in steps, without its prediction
#else
typedef Element Number;
#endif

struct Shared {
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
    Number numbers[SYMBOLS][LANES]; // of the symbols of models without low bits
    u32 rings[WARPS][2 * LANES];
};

// A warp's stream of 16-bit words, which may begin at any byte. Each lane that needs a word takes one, in lane order.
class WordReader {
    u32* ring; // two halves of 64 words
    const u8 *next, *end;
    u32 prefetched; // the lane's four bytes of the half that follows those in the ring

    // Loads the lane's four bytes of the next 128. Aligned words past the end are not read and count as zeros.
    __device__ u32 load() {
        const u64 address = (u64)next + 4 * (threadIdx.x % LANES), aligned = address & ~3ull;
        const u32 low = aligned < (u64)end ? *(const u32*)aligned : 0,
                  high = aligned + 4 < (u64)end ? *(const u32*)(aligned + 4) : 0;
        next += 4 * LANES;
        return __funnelshift_r(low, high, 8 * (address & 3));
    }

    __device__ void fill(u32 half) {
        __syncwarp();
        ring[half % 2 * LANES + threadIdx.x % LANES] = prefetched;
        prefetched = load();
        __syncwarp();
    }

  public:
    u32 taken = 0; // words

    __device__ WordReader(u32* ring, const u8* from, const u8* to) : ring(ring), next(from), end(to) {
        prefetched = load();
        fill(0);
        fill(1);
    }

    // rANS renormalization: each lane whose state is below LOW takes a word. Refills a half of the ring once all of its
    // words are taken.
    __device__ __forceinline__ void refill(u32& state) {
        const bool needed = state < LOW;
        const u32 mask = __ballot_sync(FULL, needed);
        const u32 word = ((const u16*)ring)[(taken + __popc(mask & lanes_below(threadIdx.x % LANES))) % (4 * LANES)];
        if (needed) state = state << 16 | word;
        const u32 half = taken / (2 * LANES);
        taken += __popc(mask);
        if (taken / (2 * LANES) != half) fill(half);
    }
};

// A tile that is being decoded.
struct Tile {
    const u8 *at, *end; // remaining bytes
    u32 rows;
    bool bad; // malformed: no encoder writes such a tile
};

// Reads the initial rANS state of every lane: its length in bits, then the bits below its highest one. The stream has
// none for lanes without a channel (`used` is false).
__device__ u32 read_states(Tile& tile, bool used, u32 lanes) {
    const int lane = threadIdx.x % LANES;
    const u32 length_bytes = (lanes + 1) / 2;
    if (tile.end - tile.at < length_bytes) return tile.bad = true, LOW;
    const u32 bits = used ? 16 + (tile.at[lane / 2] >> (4 * (lane % 2)) & 15) : 0;
    tile.at += length_bytes;
    const u32 bits_end = warp_inclusive_sum(bits), first = bits_end - bits,
              all = __shfl_sync(FULL, bits_end, LANES - 1);
    if (tile.end - tile.at < (all + 7) / 8) return tile.bad = true, LOW;
    u64 window = 0;
    if (used)
        for (u32 byte = first / 8; byte * 8 < first + bits; byte++)
            window |= (u64)tile.at[byte] << (8 * (byte - first / 8));
    if (all % 8 && tile.at[all / 8] >> all % 8) tile.bad = true;
    tile.at += (all + 7) / 8;
    return used ? 1u << bits | ((u32)(window >> first % 8) & ((1u << bits) - 1)) : LOW;
}

// Dequantizes bins, adds the mean and stores the elements of a tile.
struct Writer {
    const TileModel& model;
    const Place& place;
    const Number* numbers; // of the lane's symbols
    const u8* side;        // per-token scales (bf16), used if `model.levels` is not 0
    Column column;
    u32 first_token;
    float step, mean;
    bool used;
    float factor = 0, previous = 0;

    __device__ __forceinline__ float step_of(u32 row) const {
        if (model.levels == 0) return step;
        return fmaxf(__uint_as_float(load_u16(side + 2 * row) << 16) / (float)model.levels, 1.17549435e-38f);
    }

    __device__ __forceinline__ Number of_bin(u32 row, int bin) const {
        const float number = centre(bin, model.centroids[0], model.centroids[1]);
#ifdef PREVIOUS
        return number;
#else
        return decoded_element(number * step_of(row) + mean);
#endif
    }

    __device__ __forceinline__ void store(u32 row, Number number) {
#ifdef PREVIOUS
        previous = previous * factor + number;
        store_element(row, decoded_element(previous * step_of(row) + mean));
#else
        store_element(row, number);
#endif
    }

    __device__ __forceinline__ void store_element(u32 row, Element element) {
        Element* to = column.of(place, first_token + row, row == 0);
        if (used) *to = element;
    }
};

// Decodes a rANS tile. OWN: the tile names families of its own, which are read from global memory; otherwise `symbols`
// are the plane's models in shared memory, LANES apart.
template <bool OWN>
__device__ __forceinline__ void decode_coded(Tile& tile, const Symbol* symbols, u32 low_bits, u32* ring, u32 lanes,
                                             Writer& writer) {
    constexpr int STRIDE = OWN ? 1 : LANES, FIRST_STEP = (OWN ? MAX_SYMBOLS : SYMBOLS) / 2;
    const int lane = threadIdx.x % LANES;
    const bool used = lane < lanes;
    const u32 padding = tile.at[1 - HEAD_BYTES], escape_bytes = 2 * load_u16(tile.at + 2 - HEAD_BYTES);
    if (OWN) tile.at += (lanes + 1) / 2 * 2;
    if (padding > 1 || tile.end - tile.at < 6 + padding + escape_bytes) {
        tile.bad = true;
        return;
    }
    const u8* escapes = tile.end - escape_bytes;
    const u8* end_of_escapes = tile.end;
    tile.end = escapes - padding;
    const u32 warmup = load_u16(tile.at), carrying = load_u16(tile.at + 2) | load_u16(tile.at + 4) << 16;
    tile.at += 6;
    u32 state = read_states(tile, used, lanes);
    if (tile.bad || warmup > tile.rows) {
        tile.bad = true;
        return;
    }
    const u32 rows_with_words = tile.rows - warmup;
    const bool any_low_bits = __any_sync(FULL, low_bits > 0);
    const bool by_symbol = !OWN && !any_low_bits && writer.model.levels == 0;
    const int half = half_of(low_bits);
    WordReader words(ring, tile.at, tile.end);
    u32 context = 0;
    // Before the first row without words, subtracts LOW from the state of each lane whose bit in `carrying` is set.
    auto carry = [&] {
        if (carrying >> lane & 1) {
            tile.bad |= state < LOW;
            state -= LOW;
        }
    };
    for (u32 row = 0; row < tile.rows; row++) {
        const bool refills = row < rows_with_words;
        if (row == rows_with_words) carry();
        const Symbol* model = OWN || CONTEXTS == 1 ? symbols : symbols + context * SYMBOLS * STRIDE;
        const u32 slot = state % SLOTS;
        u32 symbol = 0;
        Symbol found = model[0];
#pragma unroll
        for (int step = FIRST_STEP; step; step /= 2) {
            const Symbol probe = model[(symbol + step) * STRIDE];
            if (probe <= (slot << 16 | 0xffff)) symbol += step, found = probe;
        }
        state = slots(found) * (state / SLOTS) + slot - first_slot(found);
        if (OWN && !used) state = LOW; // a lane without a channel decodes nothing
        if (refills) words.refill(state);
        Number number;
        if (by_symbol) {
            number = writer.numbers[symbol * LANES];
        } else {
            int bin = unzigzag(symbol);
            if (any_low_bits) {
                bin = (bin << low_bits) + (int)(state & ((1u << low_bits) - 1)) - half;
                state >>= low_bits;
                if (refills) words.refill(state);
            }
            number = writer.of_bin(row, bin);
        }
        const bool escaped = is_escape(found) && used;
        const u32 escaping = __ballot_sync(FULL, escaped);
        if (escaping) {
            const u8* own_escape = escapes + 2 * __popc(escaping & lanes_below(lane));
            escapes += 2 * __popc(escaping);
            if (escapes > end_of_escapes) {
                tile.bad = true;
                return;
            }
            if (escaped) number = writer.of_bin(row, (short)load_u16(own_escape));
        }
        if (CONTEXTS > 1 && !OWN) context = context_after(symbol, escaped);
        writer.store(row, number);
    }
    if (warmup == 0) carry();
    tile.bad |= escapes != end_of_escapes || (used && state != 0) || words.taken * 2 != tile.end - tile.at;
}

// Decodes a tile of bins of fixed width and calls `sink(row, bin)` for every row.
template <class Sink>
__device__ __forceinline__ void decode_fixed(Tile& tile, u32 width, u32 lanes, const Sink& sink) {
    const int lane = threadIdx.x % LANES;
    for (u32 row = 0; row < tile.rows; row++) {
        const u32 bit = (row * lanes + lane) * width;
        u32 window = 0;
        for (u32 byte = bit / 8; byte * 8 < bit + width; byte++)
            if (lane < lanes) window |= (u32)tile.at[byte] << (8 * (byte - bit / 8));
        sink(row, unzigzag(window >> bit % 8 & ((1u << width) - 1)));
    }
}

__device__ void decode(Tile& tile, const Arguments& a, const TileModel& model, Shared& shared, Writer& writer,
                       u32 lanes) {
    const int lane = threadIdx.x % LANES;
    if (tile.end - tile.at < HEAD_BYTES) {
        tile.bad = true;
        return;
    }
    const u32 kind = tile.at[0], second = tile.at[1], third = tile.at[2], fourth = tile.at[3];
    tile.at += HEAD_BYTES;
    if (kind == FIXED) {
        const u32 width = second, exponent = third;
        tile.bad = width > 16 || exponent > 128 || fourth != 0 ||
                   tile.end - tile.at != (tile.rows * lanes * width + 15) / 16 * 2;
        if (tile.bad) return;
        // 2^exponent as a product of two factors, since it may exceed f32. Results are clamped to finite values.
        const float scale_a = __uint_as_float((127 + exponent / 2) << 23),
                    scale_b = __uint_as_float((127 + exponent - exponent / 2) << 23);
        decode_fixed(tile, width, lanes, [&](u32 row, int bin) {
            const float value = clamp_finite((float)bin * writer.step_of(row) * scale_a * scale_b);
            writer.store_element(row, decoded_element(value + writer.mean));
        });
        return;
    }
    u32* ring = shared.rings[threadIdx.x / LANES];
    if (kind == PLANE_LANES) {
        decode_coded<false>(tile, &shared.symbols[0][lane], model.low_bits[lane], ring, lanes, writer);
    } else if (kind == OWN_LANES && tile.end - tile.at >= (lanes + 1) / 2 * 2) {
        const Family& family = a.planes->families[lane < lanes ? tile.at[lane] : 0];
        decode_coded<true>(tile, family.symbols, lane < lanes ? family.low_bits : 0, ring, lanes, writer);
    } else {
        tile.bad = true;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) codec_decode(Arguments a) {
    __shared__ Shared shared;
    const u32 tile_index = blockIdx.x, plane = a.first_plane + blockIdx.y;
    const int lane = threadIdx.x % LANES;
    const TileModel& model = a.planes->tiles[plane][tile_index];
    for (int i = threadIdx.x; i < CONTEXTS * SYMBOLS * LANES; i += THREADS)
        (&shared.symbols[0][0])[i] = (&model.symbols[0][0])[i];
    const u32 block = blockIdx.z * WARPS + threadIdx.x / LANES, frame_block = a.first_block + block;
    const u32 lanes = min(CHANNELS - tile_index * LANES, LANES), channel = tile_index * LANES + lane;
    const u32 first_token = frame_block * a.block_tokens;
    Writer writer{model,       a.place,           &shared.numbers[0][lane],
                  nullptr,     Column(a.place, a.out[blockIdx.y], channel),
                  first_token, model.steps[lane], model.mean[lane], lane < lanes};
    if (model.levels == 0)
        for (int symbol = threadIdx.x / LANES; symbol < SYMBOLS; symbol += WARPS)
            shared.numbers[symbol][lane] = writer.of_bin(0, unzigzag(symbol));
    __syncthreads();
    if (block >= a.blocks) return;

    const u32 rows = min(a.tokens - first_token, a.block_tokens);
    const u8* index = a.frame + HEADER_BYTES + 4 * a.frame_planes;
    const u64 block_index = (u64)plane * a.frame_blocks + frame_block;
    const u8* entry = index + block_index * ENTRY_BYTES;
    auto end_of = [](const u8* entry) {
        u64 end = 0;
        for (int i = 3; i >= 0; i--) end = end << 16 | load_u16(entry + 2 * i);
        return end;
    };
    const u8* payload = index + (u64)a.frame_planes * a.frame_blocks * ENTRY_BYTES + 4;
    const u8* block_start = payload + (block_index ? end_of(entry - ENTRY_BYTES) : 0);
    const u8* block_end = payload + end_of(entry);
    u32 words_before = 0; // total words of the earlier tiles of this block of tokens
    for (u32 i = lane; i < tile_index; i += LANES) words_before += load_u16(entry + 12 + 2 * i);
    words_before = __reduce_add_sync(FULL, words_before);
    const u32 side_bytes = model.levels ? 2 * rows : 0;

    Tile tile;
    tile.at = block_start + side_bytes + 2ull * words_before;
    tile.end = tile.at + 2 * load_u16(entry + 12 + 2 * tile_index);
    tile.rows = rows;
    tile.bad = tile.end > block_end || (tile_index == TILES - 1 && tile.end != block_end);
    // A token's largest magnitude is finite and not negative.
    if (model.levels && block_start + side_bytes <= block_end)
        for (u32 row = lane; row < rows; row += LANES) tile.bad |= load_u16(block_start + 2 * row) >= 0x7f80;
    tile.bad = __any_sync(FULL, tile.bad);
    writer.side = block_start;
#ifdef PREVIOUS
    writer.factor = model.factors[lane];
#endif
    if (!tile.bad) decode(tile, a, model, shared, writer, lanes);
    if (__any_sync(FULL, tile.bad) && lane == 0) atomicMax(a.failed, (u32)block_index * TILES + tile_index + 1);
}

// Encodes rows of an engine's KV cache into tiles of a frame, byte for byte those of the CPU.
//
// CPU twin: codec_core::encode_frame, of planes with one step per channel. Bitstream: codec-core/FORMAT.md. Each tile
// goes into a fixed-size slot of its own; `codec_join` (join.cu) then concatenates them.
//
// Compile-time shape: CHANNELS, HEAD_DIM, PAGED, ELEMENT (place.cuh); CONTEXTS, SYMBOLS, PREVIOUS (tile.cuh). Compiled
// with --fmad=false.
//
// Launch: persistent thread blocks of 4 warps, at most 6 per multiprocessor. In each round a thread block takes a tile
// index of a plane and WARPS of its blocks of tokens: a tile per warp, a channel per lane. The warps share the tile's
// models in shared memory. rANS encodes from the last row to the first and its size is known only at the end, so bins,
// words and escapes stay in a workspace per warp, which the warp's next tile uses again.
//
// The floor is reading the rows and writing the tiles. Bound by the latency of loads, two thirds of the stalls on an
// H200, with six warps per scheduler.
#include "codec/tile.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES;
constexpr int MAX_BIN = 32767, COST_BITS = 8;
constexpr u16 ESCAPE = 0xffff; // code of an escaped bin

struct Arguments {
    const Planes* planes;
    u8* slots;      // [plane][token block][tile], `slot_bytes` each
    u16* lengths;   // [plane][token block][tile], in units of two bytes
    u16* workspace; // [warp of the grid][4 * LANES * block_tokens]
    u32* failed;    // maximum of (index of the tile) + 1 over tiles with values that are not finite
    PlanesAt rows;  // planes of this launch
    Place place;
    u32 planes_here, first_plane, tokens, block_tokens, slot_bytes;
};

struct Shared {
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
    u32 state_bits[WARPS][LANES];
};

// A tile that is being encoded, in the workspace of its warp.
struct Tile {
    u32 rows, lanes;
    u16* codes;   // [row][lane]: bins, later replaced by their codes
    u16* words;   // filled downwards from its end, 2 * LANES * rows
    u16* escapes; // escaped bins, in order of row, then lane
    u32 escape_count;
};

// The model of a lane: the plane's, or a family that the tile names.
struct Model {
    const Symbol* symbols;
    u32 stride, low_bits;
    const u32* escapes; // index of the escape symbol by context, LANES apart

    __device__ Symbol symbol(u32 context, u32 i) const { return symbols[(context * SYMBOLS + i) * stride]; }
    __device__ u32 escape(u32 context) const { return escapes[context * LANES]; }
};

// Rounds to the nearest integer, ties to even, after clamping to +-2^20. Adding 1.5 * 2^23 rounds in one operation.
__device__ __forceinline__ int bin_of(float x) {
    constexpr float LIMIT = 1 << 20, ROUND = 12582912.f;
    return (int)(fminf(fmaxf(x, -LIMIT), LIMIT) + ROUND - ROUND);
}

// The code of a bin: its symbol and low bits, without regard to the escape.
__device__ __forceinline__ u32 code_of(int bin, u32 low_bits) {
    const int shifted = bin + half_of(low_bits);
    return zigzag(shifted >> low_bits) << low_bits | (shifted & ((1 << low_bits) - 1));
}

__device__ __forceinline__ float in_steps(Element x, float mean, float inverse) {
    return (to_float(x) - mean) * inverse;
}

// The value of a token and lane of a tile, in steps.
__device__ float in_steps_at(const Place& place, Element* plane, const TileModel& model, u32 first_channel, u32 lane,
                             u32 token) {
    Column column(place, plane, first_channel + lane);
    return in_steps(*column.of(place, token, true), model.mean[lane], 1.f / model.steps[lane]);
}

// Statistics of a tile.
struct Stats {
    float squares;         // sum of squared bins of the lane
    float lowest, highest; // values of the tile, in steps
    bool fits, finite;     // all bins of the tile are within MAX_BIN; all values are finite
};

// Quantizes a tile into `tile.codes`.
__device__ Stats quantize(Tile& tile, const Place& place, Element* plane, const TileModel& model, u32 first_channel,
                          u32 first_token) {
    const u32 lane = threadIdx.x % LANES;
    const bool used = lane < tile.lanes;
    Column column(place, plane, first_channel + lane);
    const float mean = model.mean[lane], inverse = 1.f / model.steps[lane], centroid_1 = model.centroids[0],
                centroid_2 = model.centroids[1];
    float previous = 0, prediction = 0;
    Stats stats = {0, 0, 0, true, true};
#pragma unroll 4
    for (u32 row = 0; row < tile.rows; row++) {
        const Element* at = column.of(place, first_token + row, row == 0);
        const float value = used ? in_steps(*at, mean, inverse) : 0;
#ifdef PREVIOUS
        prediction = previous * model.factors[lane];
#endif
        const int bin = bin_of(value - prediction);
        previous = prediction + centre(bin, centroid_1, centroid_2);
        tile.codes[row * LANES + lane] = (u16)bin;
        stats.fits &= abs(bin) <= MAX_BIN;
        stats.finite &= fabsf(value) < infinity();
        stats.squares += (float)bin * (float)bin;
        stats.lowest = fminf(stats.lowest, value);
        stats.highest = fmaxf(stats.highest, value);
    }
    stats.fits = __all_sync(FULL, stats.fits);
    stats.finite = __all_sync(FULL, stats.finite);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) {
        stats.lowest = fminf(stats.lowest, __shfl_xor_sync(FULL, stats.lowest, step));
        stats.highest = fmaxf(stats.highest, __shfl_xor_sync(FULL, stats.highest, step));
    }
    return stats;
}

// codec-core's `log2`, operation for operation, so that both choose the same families.
__device__ double log2_of(double x) {
    constexpr u64 MANTISSA = (1ull << 52) - 1, ONE = 1023ull << 52;
    constexpr double LOG2_E_64 = 1.4426950408889634, SQRT_2 = 1.4142135623730951;
    const u64 bits = (u64)__double_as_longlong(x);
    const double mantissa = __longlong_as_double((long long)((bits & MANTISSA) | ONE));
    const double exponent = (double)(bits >> 52) - 1023.;
    const double s = (mantissa - SQRT_2) / (mantissa + SQRT_2), square = s * s;
    double sum = 0;
    for (int n = 11; n > 0; n -= 2) sum = sum * square + 1. / n;
    return exponent + 0.5 + 2. * LOG2_E_64 * (s * sum);
}

// The cost of a symbol in units of 2^-COST_BITS bits: PRECISION - log2(slots), computed digit by digit in integers.
__device__ u32 cost_of(u32 slots) {
    const int whole = 31 - __clz(slots);
    u64 x = (u64)slots << (32 - whole);
    u32 log = whole;
    for (int digit = 0; digit < COST_BITS; digit++) {
        x = __umul64hi(x, x) << 32 | (x * x) >> 32;
        const u32 carry = (u32)(x >> 33);
        log = log << 1 | carry;
        x >>= carry;
    }
    return (PRECISION << COST_BITS) - log;
}

// The cost of a lane's bins under a model.
__device__ long long cost_under(const Tile& tile, const Model& model) {
    const u32 escape = model.escape(0);
    long long sum = 0;
    for (u32 row = 0; row < tile.rows; row++) {
        const int bin = (short)tile.codes[row * LANES + threadIdx.x % LANES];
        const u32 symbol = min(code_of(bin, model.low_bits) >> model.low_bits, escape);
        const u32 escape_bits = symbol == escape ? 16 : 0; // the bin is stored as an i16
        sum += cost_of(slots(model.symbol(0, symbol))) + ((model.low_bits + escape_bits) << COST_BITS);
    }
    return sum;
}

__device__ Model model_of(const Family& family) { return {family.symbols, 1, family.low_bits, &family.escape}; }

// Whether families of its own code the tile in fewer bits than the plane's models, including the bytes that name them.
// `own` is then the family of the lane. An estimate from the deviations comes first: exact costs take two passes over
// the bins.
__device__ bool choose_own_families(const Tile& tile, const Arguments& a, const TileModel& tile_model,
                                    const Model& model, float squares, u32& own) {
    const u32 lane = threadIdx.x % LANES;
    const bool used = lane < tile.lanes;
    const double n = tile.rows;
    const long long price = 8 * ((tile.lanes + 1) / 2 * 2);
    const double deviation = sqrt(fmax((double)squares / fmax(n, 1.) - 1. / 12., 0.));
    const double ratio = fmax(deviation / tile_model.deviations[lane], 1e-3);
    const double estimate = n * (1.4426950408889634 * (ratio * ratio - 1.) - 2. * log2_of(ratio)) / 2.;
    double sum = 0;
    for (u32 i = 0; i < tile.lanes; i++) sum += __shfl_sync(FULL, estimate, i);
    if (sum <= (double)price) return false;
    const double scale = round(5. * log2_of(fmax(deviation, 1e-9))) + 16.;
    own = 64 * tile_model.shapes[lane] + (u32)fmin(fmax(scale, 0.), 63.);
    long long gain = used ? cost_under(tile, model) - cost_under(tile, model_of(a.planes->families[own])) : 0;
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) gain += __shfl_xor_sync(FULL, gain, step);
    return gain > price << COST_BITS;
}

// Replaces bins by codes; bins beyond the alphabet go to `tile.escapes`.
__device__ void bins_to_codes(Tile& tile, const Model& model, bool with_contexts) {
    const u32 lane = threadIdx.x % LANES;
    const bool used = lane < tile.lanes;
    u32 context = 0;
    tile.escape_count = 0;
#pragma unroll 4
    for (u32 row = 0; row < tile.rows; row++) {
        u16& entry = tile.codes[row * LANES + lane];
        const u16 bin = entry;
        const u32 code = code_of((short)bin, model.low_bits), symbol = code >> model.low_bits;
        const bool escaped = used && symbol >= model.escape(context);
        const u32 escaping = __ballot_sync(FULL, escaped);
        if (escaped) tile.escapes[tile.escape_count + __popc(escaping & lanes_below(lane))] = bin;
        tile.escape_count += __popc(escaping);
        entry = escaped ? ESCAPE : (u16)code;
        if (with_contexts) context = context_after(symbol, escaped);
    }
}

// The symbol of a lane in a row, for rANS: first slot, number of slots, low bits.
struct CodedSymbol {
    u32 first, slots, low;
};

__device__ __forceinline__ CodedSymbol coded_at(const Tile& tile, const Model& model, u32 row, bool with_contexts) {
    const u16* at = tile.codes + row * LANES + threadIdx.x % LANES;
    const u32 code = *at, bits = model.low_bits;
    u32 context = 0;
    if (with_contexts && row > 0) context = context_after(at[-LANES] >> bits, at[-LANES] == ESCAPE);
    const u32 escape = model.escape(context), symbol = code == ESCAPE ? escape : code >> bits;
    const Symbol s = model.symbol(context, symbol);
    return {first_slot(s), slots(s), code == ESCAPE ? 0 : code & ((1u << bits) - 1)};
}

// The rANS stream of a tile, see "Lane stream" in FORMAT.md.
struct Stream {
    u32 warmup;     // rows at the end that take no words
    u32 carrying;   // mask of lanes whose state gets LOW added after those rows
    u32 state;      // rANS state of the lane
    u32 first_word; // words are [first_word, 2 * LANES * rows) of `tile.words`
};

__device__ Stream encode_stream(Tile& tile, const Model& model, bool with_contexts) {
    const u32 lane = threadIdx.x % LANES, bits = model.low_bits;
    const bool used = lane < tile.lanes;
    Stream stream = {0, 0, used ? 0 : LOW, 2 * LANES * tile.rows};
    u32& state = stream.state;
    // The last rows are coded without words, as long as the states of all lanes fit 32 bits.
    for (; stream.warmup < tile.rows; stream.warmup++) {
        u64 next = state;
        bool fits = true;
        if (used) {
            const CodedSymbol coded = coded_at(tile, model, tile.rows - 1 - stream.warmup, with_contexts);
            const u64 with_low = (u64)state << bits | coded.low;
            const u32 quotient = (u32)with_low / coded.slots;
            next = ((u64)quotient << PRECISION) + ((u32)with_low - quotient * coded.slots) + coded.first;
            fits = (with_low | next) >> 32 == 0;
        }
        if (!__all_sync(FULL, fits)) break;
        state = (u32)next;
    }
    stream.carrying = __ballot_sync(FULL, state < LOW);
    if (state < LOW) state += LOW;
    // Every lane with `needed` set moves the low 16 bits of its state to the stream, in lane order.
    auto push = [&](bool needed) {
        const u32 mask = __ballot_sync(FULL, needed);
        if (needed) {
            tile.words[stream.first_word - 1 - __popc(mask >> lane >> 1)] = (u16)state;
            state >>= 16;
        }
        stream.first_word -= __popc(mask);
    };
    const bool any_low_bits = __any_sync(FULL, bits > 0);
#pragma unroll 2
    for (u32 row = tile.rows - stream.warmup; row-- > 0;) {
        const CodedSymbol coded = coded_at(tile, model, row, with_contexts);
        if (any_low_bits) {
            push(((u64)state << bits) >> 32 != 0);
            state = state << bits | coded.low;
        }
        push(used && state >> (32 - PRECISION) >= coded.slots);
        const u32 quotient = state / coded.slots;
        if (used) state = (quotient << PRECISION) + (state - quotient * coded.slots) + coded.first;
    }
    return stream;
}

__device__ __forceinline__ void store_u16(u8* at, u32 x) { at[0] = (u8)x, at[1] = (u8)(x >> 8); }

__device__ u32 bits_below_highest(u32 state) { return 31 - __clz(state); }

// The bytes of a rANS tile before its words.
__device__ u32 bytes_before_words(const Tile& tile, u32 state_bits, bool own) {
    return HEAD_BYTES + (own ? (tile.lanes + 1) / 2 * 2 : 0) + 6 + (tile.lanes + 1) / 2 + (state_bits + 7) / 8;
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
    for (u32 i = lane; i < words; i += LANES) store_u16(at + 2 * i, tile.words[stream.first_word + i]);
    at += 2 * words;
    if (padding && lane == 0) *at = 0;
    at += padding;
    for (u32 i = lane; i < tile.escape_count; i += LANES) store_u16(at + 2 * i, tile.escapes[i]);
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

// Writes a tile of fixed width. Quantizes the values again, since its bins have no prediction and another scale.
__device__ void write_fixed(const Tile& tile, const Fixed& fixed, const Place& place, Element* plane,
                            const TileModel& model, u32 first_channel, u32 first_token, u8* to) {
    const u32 lane = threadIdx.x % LANES;
    if (lane < HEAD_BYTES) to[lane] = lane == 1 ? (u8)fixed.width : lane == 2 ? (u8)fixed.exponent : 0;
    const u32 count = tile.rows * tile.lanes;
    for (u32 word = lane; word < (fixed.bytes - HEAD_BYTES) / 2; word += LANES) {
        u32 bits = 0;
        for (u32 i = word * 16 / fixed.width; i < count && i * fixed.width < word * 16 + 16; i++) {
            const float value =
                in_steps_at(place, plane, model, first_channel, i % tile.lanes, first_token + i / tile.lanes);
            const u64 bin = zigzag(bin_of(value * fixed.factor));
            bits |= (u32)((bin << 16 << (i * fixed.width + 16 - word * 16)) >> 32);
        }
        store_u16(to + HEAD_BYTES + 2 * word, bits);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6) codec_encode(Arguments a) {
    __shared__ Shared shared;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 blocks = (a.tokens + a.block_tokens - 1) / a.block_tokens, rounds = (blocks + WARPS - 1) / WARPS;
    u16* workspace = a.workspace + (u64)(blockIdx.x * WARPS + warp) * 4 * LANES * a.block_tokens;
    for (u32 unit = blockIdx.x; unit < a.planes_here * TILES * rounds; unit += gridDim.x) {
        const u32 round = unit % rounds, tile_index = unit / rounds % TILES, plane = unit / rounds / TILES;
        const TileModel& tile_model = a.planes->tiles[a.first_plane + plane][tile_index];
        __syncthreads();
        for (int i = threadIdx.x; i < CONTEXTS * SYMBOLS * LANES; i += THREADS)
            (&shared.symbols[0][0])[i] = (&tile_model.symbols[0][0])[i];
        __syncthreads();
        const u32 block = round * WARPS + warp;
        if (block >= blocks) continue;

        Tile tile;
        const u32 first_token = block * a.block_tokens, first_channel = tile_index * LANES;
        tile.rows = min(a.tokens - first_token, a.block_tokens);
        tile.lanes = min(CHANNELS - first_channel, LANES);
        tile.codes = workspace;
        tile.words = workspace + LANES * a.block_tokens;
        tile.escapes = workspace + 3 * LANES * a.block_tokens;
        Element* rows = a.rows[plane];
        const u64 slot_index = ((u64)plane * blocks + block) * TILES + tile_index;
        u8* to = a.slots + slot_index * a.slot_bytes;

        const Stats stats = quantize(tile, a.place, rows, tile_model, first_channel, first_token);
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
            bins_to_codes(tile, model, with_contexts);
            const Stream stream = encode_stream(tile, model, with_contexts);
            __syncwarp();
            const u32 state_bits = __reduce_add_sync(FULL, lane < tile.lanes ? bits_below_highest(stream.state) : 0);
            const u32 before_words = bytes_before_words(tile, state_bits, has_own);
            bytes =
                before_words + before_words % 2 + 2 * (2 * LANES * tile.rows - stream.first_word + tile.escape_count);
            if (bytes <= fixed.bytes) write_coded(tile, stream, has_own, own, shared.state_bits[warp], to);
        }
        if (bytes > fixed.bytes) {
            bytes = fixed.bytes;
            write_fixed(tile, fixed, a.place, rows, tile_model, first_channel, first_token, to);
        }
        if (lane == 0) a.lengths[slot_index] = (u16)(bytes / 2);
        __syncwarp();
    }
}

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
// words and escapes stay in a workspace per warp, which the warp's next tile uses again.
//
// The floor is reading the rows and writing the tiles. A load that waits for the store of the row before it takes a
// thousand cycles: every pass over a tile therefore has the next GROUP rows in registers before it stores anything.
#ifdef MAP_DIM
#include "codec/maps.cuh"
#endif
#include "codec/tile.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES;
constexpr int MAX_BIN = 32767, COST_BITS = 8;
constexpr u16 ESCAPE = 0xffff; // code of an escaped bin
constexpr bool HAS_RECIPROCALS = CONTEXTS * SYMBOLS <= 96; // which fit shared memory

struct Arguments {
    const Planes* planes;
    u8* slots;      // [plane][token block][tile], `slot_bytes` each
    u16* lengths;   // [plane][token block][tile], in units of two bytes
    u16* workspace; // [warp of the grid][4 * `bins_of_tile`]
    u32* failed;    // maximum of (index of the tile) + 1 over tiles with values that are not finite
#ifdef MAP_DIM
    u16* bins;        // [plane][token block][tile] of `bins_of_tile` numbers
    const Maps* maps; // [plane of the frame]
#else
    const void* absent[2]; // so that the host has one structure
#endif
    PlanesAt rows; // planes of this launch
    Place place;
    u32 planes_here, first_plane, tokens, block_tokens, slot_bytes;
};

struct Shared {
    Symbol symbols[CONTEXTS * SYMBOLS][LANES];
    u32 reciprocals[HAS_RECIPROCALS ? CONTEXTS * SYMBOLS : 1][LANES]; // (2^32 - 1) / slots of each symbol
    u32 state_bits[WARPS][LANES];
};

// A tile that is being encoded, in the workspace of its warp.
struct Tile {
    u32 rows, lanes;
    u16* bins;    // at `bin_index`
    u16* codes;   // the same, for tables by context; may be the memory of `bins`
    u16* words;   // filled downwards from its end, 2 * LANES * rows
    u16* escapes; // the first of the escaped bins, in order of row, then lane
    u32 escape_count;
};

// GROUP rows of a lane.
struct alignas(16) Rows {
    u32 pairs[GROUP / 2];

    __device__ __forceinline__ u16 operator[](u32 i) const {
        const u32 pair = i < 4 ? (i < 2 ? pairs[0] : pairs[1]) : i < 6 ? pairs[2] : pairs[3];
        return (u16)(pair >> 16 * (i % 2));
    }
    __device__ __forceinline__ void set(int i, u16 x) {
        pairs[i / 2] = i % 2 ? pairs[i / 2] & 0xffff | (u32)x << 16 : x;
    }
};

// The lane's rows of a group, in `bins` or `codes`.
__device__ __forceinline__ Rows& rows_of(u16* of, u32 group) {
    return *reinterpret_cast<Rows*>(of + bin_index(group * GROUP, threadIdx.x % LANES));
}

// The model of a lane: the plane's, or a family that the tile names.
struct Model {
    const Symbol* symbols;
    u32 stride, low_bits;
    const u32* escapes; // index of the escape symbol by context, LANES apart

    __device__ Symbol symbol(u32 context, u32 i) const { return symbols[(context * SYMBOLS + i) * stride]; }
    __device__ u32 escape(u32 context) const { return escapes[context * LANES]; }
};

// The code of a bin: its symbol and low bits, without regard to the escape.
__device__ __forceinline__ u32 code_of(int bin, u32 low_bits) {
    const int shifted = bin + half_of(low_bits);
    return zigzag(shifted >> low_bits) << low_bits | (shifted & ((1 << low_bits) - 1));
}

__device__ __forceinline__ float in_steps(Element x, float mean, float inverse) {
    return (to_float(x) - mean) * inverse;
}

// The values of a tile, in steps.
struct Values {
    const Arguments& a;
    const TileModel& model;
    Element* plane;
    u32 plane_of_frame, first_channel, first_token;

    __device__ float at(u32 row, u32 lane) const {
        Element* token = plane + a.place.of_token(first_token + row);
        const u32 channel = first_channel + lane;
        const float inverse = 1.f / model.steps[lane];
#ifdef MAP_DIM
        return exact_coefficient(a.maps[plane_of_frame], a.place, token, channel) * inverse;
#else
        return in_steps(token[a.place.of_channel(channel)], model.mean[lane], inverse);
#endif
    }
};

// Statistics of a tile.
struct Stats {
    float squares;         // sum of squared bins of the lane
    float lowest, highest; // values of the tile, in steps
    bool fits, finite;     // all bins of the tile are within MAX_BIN; all values are finite
};

// Quantizes a tile into `tile.bins`.
__device__ Stats quantize(const Tile& tile, const Values& values) {
    const u32 lane = threadIdx.x % LANES;
    const bool used = lane < tile.lanes;
    const TileModel& model = values.model;
    const float centroid_1 = model.centroids[0], centroid_2 = model.centroids[1];
#ifndef MAP_DIM
    const Place& place = values.a.place;
    const float mean = model.mean[lane], inverse = 1.f / model.steps[lane];
    Column column(place, values.plane, values.first_channel + lane);
    Element next[GROUP];
    auto load = [&](u32 first) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= tile.rows) break;
            const Element* at = column.of(place, values.first_token + first + i, first + i == 0);
            if (used) next[i] = *at;
        }
    };
    load(0);
#endif
    float previous = 0, prediction = 0;
    Stats stats = {0, 0, 0, true, true};
    for (u32 first = 0; first < tile.rows; first += GROUP) {
#ifndef MAP_DIM
        Element now[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) now[i] = next[i];
        load(first + GROUP);
#endif
        Rows rows = {};
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= tile.rows) break;
#ifdef MAP_DIM
            const float value = used ? values.at(first + i, lane) : 0;
#else
            const float value = used ? in_steps(now[i], mean, inverse) : 0;
#endif
#ifdef PREVIOUS
            prediction = previous * model.factors[lane];
#endif
            const int bin = bin_of(value - prediction);
            previous = prediction + centre(bin, centroid_1, centroid_2);
            rows.set(i, (u16)bin);
            stats.fits &= abs(bin) <= MAX_BIN;
            stats.finite &= fabsf(value) < infinity();
            stats.squares += (float)bin * (float)bin;
            stats.lowest = fminf(stats.lowest, value);
            stats.highest = fmaxf(stats.highest, value);
        }
        rows_of(tile.bins, first / GROUP) = rows;
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

#ifdef MAP_DIM
// The statistics of a tile that has been quantized; `fits` is false if a bin may be FAR_BIN. Instead of the lowest
// value there is one of the same width. A sum of squares below 2^24 is that of the CPU in any order.
__device__ Stats stats_of_bins(const Tile& tile) {
    u32 sizes = 0, any = 0, squares = 0; // all bits of the bins' magnitudes, and of the bins, two at a time
    Rows next = rows_of(tile.bins, 0);
    for (u32 first = 0; first < tile.rows; first += GROUP) {
        const Rows rows = next; // those after the last row are zero
        if (first + GROUP < tile.rows) next = rows_of(tile.bins, first / GROUP + 1);
#pragma unroll
        for (int i = 0; i < GROUP / 2; i++) {
            u32 signs;
            asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(signs) : "r"(rows.pairs[i])); // each half is its sign
            sizes |= rows.pairs[i] ^ signs, any |= rows.pairs[i];
            const int low = (short)rows.pairs[i], high = (int)rows.pairs[i] >> 16;
            squares += low * low + high * high;
        }
    }
    const u32 lane = threadIdx.x % LANES;
    if (lane >= tile.lanes) sizes = any = 0;
    const u32 bits = 32 - __clz(__reduce_or_sync(FULL, (sizes | sizes >> 16) & 0xffff));
    const float lowest = __any_sync(FULL, any != 0) ? -(float)(1 << bits) : 0;
    if (2 * bits + 32 - __clz(tile.rows) <= 24) return {(float)squares, lowest, 0, true, true};
    float sum = 0;
    for (u32 row = 0; row < tile.rows; row++) {
        const float bin = (float)(short)tile.bins[bin_index(row, lane)];
        sum += bin * bin;
    }
    return {sum, lowest, 0, bits < 15, true};
}
#endif

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
        const int bin = (short)tile.bins[bin_index(row, threadIdx.x % LANES)];
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

#if CONTEXTS > 1
// Computes the codes of all bins, and collects those that are escaped, from the first row on: whether a bin is escaped
// depends on its context.
__device__ void bins_to_codes(Tile& tile, const Model& model, bool with_contexts) {
    const u32 lane = threadIdx.x % LANES;
    const bool used = lane < tile.lanes;
    u32 context = 0;
    Rows next = rows_of(tile.bins, 0);
    for (u32 first = 0; first < tile.rows; first += GROUP) {
        const Rows bins = next;
        Rows codes = {};
        if (first + GROUP < tile.rows) next = rows_of(tile.bins, first / GROUP + 1);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= tile.rows) break;
            const u32 code = code_of((short)bins[i], model.low_bits), symbol = code >> model.low_bits;
            const bool escaped = used && symbol >= model.escape(context);
            const u32 escaping = __ballot_sync(FULL, escaped);
            if (escaped) tile.escapes[tile.escape_count + __popc(escaping & lanes_below(lane))] = bins[i];
            tile.escape_count += __popc(escaping);
            codes.set(i, escaped ? ESCAPE : (u16)code);
            if (with_contexts) context = context_after(symbol, escaped);
        }
        rows_of(tile.codes, first / GROUP) = codes;
    }
}
#else
// Puts the escaped bins of a row before those of the rows after it.
__device__ __forceinline__ void push_escapes(Tile& tile, bool escaped, u16 bin) {
    const u32 escaping = __ballot_sync(FULL, escaped);
    if (escaping == 0) return;
    tile.escapes -= __popc(escaping), tile.escape_count += __popc(escaping);
    if (escaped) tile.escapes[__popc(escaping & lanes_below(threadIdx.x % LANES))] = bin;
}
#endif

// A symbol of a lane for rANS, with its low bits.
struct CodedSymbol {
    Symbol symbol;
    u32 reciprocal, low; // the first only with RECIPROCALS
};

// Codes a tile's rows from the last to the first. RECIPROCALS: the model is the plane's, in shared memory.
template <bool RECIPROCALS>
struct RowCoder {
    Tile& tile;
    const Model& model;
    const u32* reciprocals;
    bool with_contexts, used;

    __device__ RowCoder(Tile& tile, const Model& model, const Shared& shared, bool with_contexts)
        : tile(tile), model(model), reciprocals(&shared.reciprocals[0][threadIdx.x % LANES]),
          with_contexts(with_contexts), used(threadIdx.x % LANES < tile.lanes) {}

    // A group of rows: their codes if there are tables by context, else their bins.
    __device__ __forceinline__ const Rows& rows(u32 group) const {
        return rows_of(CONTEXTS > 1 ? tile.codes : tile.bins, group);
    }

    // The symbol of a row, given its bin or code, and that of the row before unless it is the first one.
    __device__ __forceinline__ CodedSymbol symbol(u16 number, u16 before, bool first) {
        const u32 bits = model.low_bits;
#if CONTEXTS > 1
        const u32 context = with_contexts && !first ? context_after(before >> bits, before == ESCAPE) : 0;
        const u32 code = number, escape = model.escape(context);
        const bool escaped = code == ESCAPE;
#else
        const u32 context = 0, code = code_of((short)number, bits), escape = model.escape(0);
        const bool escaped = used && code >> bits >= escape;
        push_escapes(tile, escaped, number);
#endif
        const u32 index = escaped ? escape : min(code >> bits, escape);
        CodedSymbol coded = {model.symbol(context, index), 0, escaped ? 0 : code & ((1u << bits) - 1)};
        if (RECIPROCALS) coded.reciprocal = reciprocals[(context * SYMBOLS + index) * LANES];
        return coded;
    }

    // state / slots, as (quotient << PRECISION) + remainder + first slot: the state after the symbol.
    __device__ __forceinline__ u32 state_after(u32 state, const CodedSymbol& coded) const {
        const u32 width = slots(coded.symbol);
        if (!RECIPROCALS) {
            const u32 quotient = state / width;
            return (quotient << PRECISION) + (state - quotient * width) + first_slot(coded.symbol);
        }
        // The reciprocal is less than 1 too small in 2^32 / slots, so that the quotient is too small by at most 1.
        const u32 quotient = __umulhi(state, coded.reciprocal), remainder = state - quotient * width;
        const u32 next = (quotient << PRECISION) + remainder + first_slot(coded.symbol);
        return remainder >= width ? next + SLOTS - width : next;
    }
};

// The rANS stream of a tile, see "Lane stream" in FORMAT.md.
struct Stream {
    u32 warmup;     // rows at the end that take no words
    u32 carrying;   // mask of lanes whose state gets LOW added after those rows
    u32 state;      // rANS state of the lane
    u32 first_word; // words are [first_word, 2 * LANES * rows) of `tile.words`
};

template <bool RECIPROCALS>
__device__ __forceinline__ Stream encode_stream(RowCoder<RECIPROCALS> coder) {
    Tile& tile = coder.tile;
    const u32 lane = threadIdx.x % LANES, bits = coder.model.low_bits;
    const bool used = coder.used;
    Stream stream = {0, 0, used ? 0 : LOW, 2 * LANES * tile.rows};
    u32& state = stream.state;
    // The rows [0, row) remain; `group` has the last of them, `before` is the group before that.
    u32 row = tile.rows;
    Rows group = coder.rows((row - 1) / GROUP), before = group;
    if (row > GROUP) before = coder.rows((row - 1) / GROUP - 1);
    auto symbol_of = [&](u32 i) { // of row i of `group`
        return coder.symbol(group[i], i ? group[i - 1] : before[GROUP - 1], i == 0 && row <= GROUP);
    };
    auto next_group = [&] { // once the first row of `group` has been coded
        group = before;
        if (row > GROUP) before = coder.rows((row - 1) / GROUP - 1);
    };
    // The last rows are coded without words, as long as the states of all lanes fit 32 bits.
    while (row > 0) {
        const u32 escape_count = tile.escape_count;
        const CodedSymbol coded = symbol_of((row - 1) % GROUP);
        u64 next = state;
        bool fits = true;
        if (used) {
            const u64 with_low = (u64)state << bits | coded.low;
            const u32 width = slots(coded.symbol), quotient = (u32)with_low / width;
            next = ((u64)quotient << PRECISION) + ((u32)with_low - quotient * width) + first_slot(coded.symbol);
            fits = (with_low | next) >> 32 == 0;
        }
        if (!__all_sync(FULL, fits)) { // this row is coded with words
            tile.escapes += tile.escape_count - escape_count, tile.escape_count = escape_count;
            break;
        }
        state = (u32)next;
        if (--row % GROUP == 0) next_group();
    }
    stream.warmup = tile.rows - row;
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
    auto code = [&](const CodedSymbol& coded) {
        if (any_low_bits) {
            push(((u64)state << bits) >> 32 != 0);
            state = state << bits | coded.low;
        }
        push(used && state >> (32 - PRECISION) >= slots(coded.symbol));
        if (used) state = coder.state_after(state, coded);
    };
    while (RECIPROCALS ? row % GROUP : row) {
        code(symbol_of((row - 1) % GROUP));
        if (--row % GROUP == 0) next_group();
    }
    while (RECIPROCALS && row > 0) { // unrolled: the other form would be too much code
        CodedSymbol coded[GROUP];
#pragma unroll
        for (int i = GROUP - 1; i >= 0; i--) coded[i] = symbol_of(i);
#pragma unroll
        for (int i = GROUP - 1; i >= 0; i--) code(coded[i]);
        row -= GROUP;
        next_group();
    }
    return stream;
}

__device__ __forceinline__ void store_u16(u8* at, u32 x) { at[0] = (u8)x, at[1] = (u8)(x >> 8); }

__device__ u32 bits_below_highest(u32 state) { return 31 - __clz(state); }

// The bytes of a rANS tile before its words.
__device__ u32 bytes_before_words(const Tile& tile, u32 state_bits, bool own) {
    return HEAD_BYTES + (own ? (tile.lanes + 1) / 2 * 2 : 0) + 6 + (tile.lanes + 1) / 2 + (state_bits + 7) / 8;
}

// Copies words to bytes that may begin anywhere.
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
                // Once more, so that the compiler knows that these are in shared memory.
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

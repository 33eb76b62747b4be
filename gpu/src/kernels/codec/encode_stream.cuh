// The rANS stream of a tile, and its escaped bins.
#pragma once
#include "codec/encode_tile.cuh"

#if CONTEXTS > 1
// Computes the codes of all bins, and collects escaped bins, in row order: whether a bin is escaped depends on its
// context.
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
        // The reciprocal is less than 1 below 2^32 / slots, so that the quotient is too small by at most 1.
        const u32 quotient = __umulhi(state, coded.reciprocal), remainder = state - quotient * width;
        const u32 next = (quotient << PRECISION) + remainder + first_slot(coded.symbol);
        return remainder >= width ? next + SLOTS - width : next;
    }
};

// The rANS stream of a tile, see "Lane stream" in FORMAT.md.
struct Stream {
    u32 warmup;     // rows at the end that take no words
    u32 carrying;   // mask of lanes to whose state LOW is added after those rows
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

// Exact rows in 8 bits in host memory: the key and the value of a token and head as one record.
//
// CPU twin: RowFormat::Int8, whose bytes these are. Compile-time shape: ELEMENT, HEAD_DIM 64 or 128. A record has a
// byte for every component of the key, then of the value: 7 bits, and a bit of the f16 scale that GROUP components
// share.
//
// The link's cost is per read of at most 128 bytes, not per byte: 2.5 ns (H200). So scales have no bytes of their own;
// with 16 bytes of them behind the components, a record of 272 bytes took 8.3 ns, one of 256 takes 5.1.
#pragma once
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int D = HEAD_DIM, GROUP = 16, RECORD = 2 * D;
constexpr int SHARERS = RECORD / GROUP; // lanes that share a record, with a group each

// The scale of a group: 1/63 of its largest magnitude, as on the CPU. A subnormal one has few bits: rounded down, it
// would clamp the largest component.
__device__ __forceinline__ u16 scale_of(float largest) {
    const float exact = largest / 63.f;
    const u16 nearest = float_to_half(fminf(exact, 65504.f));
    return nearest + (nearest < 0x400 && half_to_float(nearest) < exact);
}

// The byte of x, component number `component` of its row.
__device__ __forceinline__ u32 quantized(float x, float unit, u16 scale, u32 component) {
    const int rounded = min(max((int)roundf(x * unit), -63), 63); // 0 for NaN, as on the CPU
    return (u32)(2 * rounded + (scale >> component % GROUP & 1)) & 0xff;
}

struct LoadArguments {
    const u8* records; // [head][stored][RECORD]; a head is one of a sequence
    const u32* tokens; // [head][list_len]: after the sinks, or null for the first `count`
    const u32* places; // [head][list_len]: the row of each, or null for rows in order from `first_place` on
    const u32* counts; // [head]: how many tokens, or null for `count`
    Element* keys;     // [head][capacity][D]
    Element* values;
    const u8* prefetch; // bytes for L2, as in `pq::Gather`
    u64 prefetch_len;
    u32 stored, list_len, count, first_place, capacity;
};

// The listed tokens of a head, or the first ones.
struct Tokens {
    const u32 *tokens, *places;
    const u8* records;
    u16 *keys, *values;
    u32 count, first_place;

    __device__ __forceinline__ Tokens(const LoadArguments& a, u32 head) {
        const u64 list = (u64)head * a.list_len, rows = (u64)head * a.capacity * D;
        tokens = a.tokens ? a.tokens + list : nullptr, places = a.places ? a.places + list : nullptr;
        records = a.records + (u64)head * a.stored * RECORD;
        keys = a.keys + rows, values = a.values + rows;
        count = a.counts ? a.counts[head] : a.count, first_place = a.first_place;
    }
    __device__ __forceinline__ const u8* record(u32 i) const {
        return records + (u64)(tokens ? tokens[i] : i) * RECORD;
    }
    __device__ __forceinline__ u32 place(u32 i) const { return places ? places[i] : first_place + i; }

    // Stores group `lane % SHARERS` of a record as elements of a row.
    __device__ __forceinline__ void dequantize(const uint4& group, u32 row, u32 lane) const {
        const u32 words[4] = {group.x, group.y, group.z, group.w};
        u32 bits = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) bits |= (words[w] & 0x01010101u) * 0x10204080u >> 28 << 4 * w; // a bit of each byte
        const float scale = half_to_float((u16)bits);
        u32 elements[8];
#pragma unroll
        for (int pair = 0; pair < 8; pair++) {
            const int shifted = (int)(words[pair / 2] << (pair % 2 ? 0 : 16)); // the pair in the high half
            elements[pair] = pack_elements(scale * (float)(shifted << 8 >> 25), scale * (float)(shifted >> 25));
        }
        const u32 at = lane % (SHARERS / 2) * GROUP;
        u16* side = lane % SHARERS < SHARERS / 2 ? keys : values;
        uint4* to = reinterpret_cast<uint4*>(side + (u64)row * D + at);
        to[0] = make_uint4(elements[0], elements[1], elements[2], elements[3]);
        to[1] = make_uint4(elements[4], elements[5], elements[6], elements[7]);
    }
};

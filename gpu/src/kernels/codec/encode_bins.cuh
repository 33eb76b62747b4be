// Quantizes the values of a tile to bins and computes their statistics.
#pragma once
#include "codec/encode_tile.cuh"

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
    Column column(place, values.plane, values.first_channel + lane, values.first_token);
    Element next[GROUP];
    auto load = [&](u32 first) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= tile.rows) break;
            const Element* at = column.of(place, values.first_token + first + i);
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
// The statistics of a tile that has been quantized; `fits` is false if a bin may be FAR_BIN. `lowest` is a value that
// needs the same width as the lowest one. A sum of squares below 2^24 equals the CPU's in any order.
__device__ Stats stats_of_bins(const Tile& tile) {
    u32 sizes = 0, any = 0, squares = 0; // all bits of the bins' magnitudes, and of the bins, two at a time
    Rows next = rows_of(tile.bins, 0);
    for (u32 first = 0; first < tile.rows; first += GROUP) {
        const Rows rows = next; // rows after the last one are zero
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

// Dequantizes the bins of a tile, adds the mean, and rounds to elements of an engine's cache or to coefficients in f32.
#pragma once
#include "codec/tile.cuh"

// The decoded value of a symbol, the same in all rows: the element, or with PREVIOUS the reconstruction point in steps,
// which is added to the prediction.
#if defined(PREVIOUS) || ELEMENT == 0
typedef float Number;
#else
typedef u32 Number; // the bits of an element
#endif

class Writer {
    const TileModel& model;
    const Place& place;
    const u8* side; // scales of the tokens (bf16), used if `model.levels` is not 0
    Column column;
    u32 first_token;
    float step, mean;
    bool used; // whether the lane has a channel
#ifdef PREVIOUS
    float factor, previous = 0;
#endif

    __device__ __forceinline__ float step_of(u32 row) const {
        if (model.levels == 0) return step;
        return fmaxf(__uint_as_float(load_u16(side + 2 * row) << 16) / (float)model.levels, 1.17549435e-38f);
    }

    __device__ __forceinline__ void store_element(u32 row, Element element) {
        Element* to = column.of(place, first_token + row);
        if (CHANNELS % LANES == 0 || used) *to = element;
    }

  public:
    __device__ Writer(const TileModel& model, const Place& place, Element* plane, u32 channel, u32 first_token,
                      const u8* side)
        : model(model), place(place), side(side), column(place, plane, channel, first_token), first_token(first_token),
          step(model.steps[channel % LANES]), mean(model.mean[channel % LANES]), used(channel < CHANNELS) {
#ifdef PREVIOUS
        factor = model.factors[channel % LANES];
#endif
    }

    // The decoded value of a bin of a lane.
    static __device__ __forceinline__ Number number_of(const TileModel& model, int bin, float step, float mean) {
        const float point = centre(bin, model.centroids[0], model.centroids[1]);
#ifdef PREVIOUS
        return point;
#else
        return decoded_element(point * step + mean);
#endif
    }
    // The same if all rows have the same step.
    static __device__ Number number_of(const TileModel& model, int bin) {
        return number_of(model, bin, model.steps[threadIdx.x % LANES], model.mean[threadIdx.x % LANES]);
    }
    __device__ bool same_in_all_rows() const { return model.levels == 0; }

    __device__ __forceinline__ Number of_bin(u32 row, int bin) const {
        return number_of(model, bin, step_of(row), mean);
    }

    __device__ void begin_coded(const u8*, const u8*, bool) {}

    __device__ __forceinline__ void store(u32 row, Number number) {
#ifdef PREVIOUS
        previous = previous * factor + number;
        store_element(row, decoded_element(previous * step_of(row) + mean));
#else
        store_element(row, (Element)number);
#endif
    }

    // Reads nothing of the tile's block, which may be too short.
    __device__ __forceinline__ void store_zero(u32 row) { store_element(row, Element{}); }

    // A tile of bins of fixed width, times 2^exponent, which may exceed f32. Results are clamped to finite values.
    __device__ void begin_fixed(u32, u32) {}
    __device__ __forceinline__ void store_fixed(u32 row, int bin, u32 exponent) {
        const float value = clamp_finite((float)bin * step_of(row) * power_of_two(exponent / 2) *
                                         power_of_two(exponent - exponent / 2));
        store_element(row, decoded_element(value + mean));
    }

    __device__ void end() {}
};

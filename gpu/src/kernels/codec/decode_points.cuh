// Converts the bins of a tile to reconstruction points of coefficients (points.cuh).
#pragma once
#include "codec/points.cuh"
#include "codec/tile.cuh"

typedef u32 Number; // the bits of a point in f16

class Writer {
    const TileModel& model;
    u16 *nearest, *rest; // the lane's, of row 0
    u8* mark;            // of the tile, in `Points::wide`
    u32 wide = 0;        // the value to store there
    u32 rows;
    bool used; // whether the lane has a channel

    __device__ __forceinline__ void store_rest(u32 row, float point) {
        if (CHANNELS % LANES == 0 || used)
            rest[row * CHANNELS] = float_to_half(point - half_to_float(float_to_half(point)));
    }

  public:
    // `first` is the index of the tile's first point in `points`, `tile` that of the tile.
    __device__ Writer(const TileModel& model, const Points& points, u64 first, u64 tile, u32 rows, bool used)
        : model(model), nearest(points.nearest + first), rest(points.rest + first), mark(points.wide + tile),
          rows(rows), used(used) {}

    // The decoded value of a bin, the same in all rows.
    static __device__ Number number_of(const TileModel& model, int bin) {
        return float_to_half(centre(bin, model.centroids[0], model.centroids[1]));
    }
    __device__ bool same_in_all_rows() const { return true; }

    __device__ __forceinline__ Number of_bin(u32 row, int bin) {
        if (wide) store_rest(row, centre(bin, model.centroids[0], model.centroids[1]));
        return number_of(model, bin);
    }

    // A coded tile is wide if one of its escapes is beyond LARGEST_EXACT, or if it has many low bits.
    __device__ void begin_coded(const u8* escapes, const u8* end, bool many_low_bits) {
        bool far = many_low_bits;
        for (escapes += 2 * (threadIdx.x % LANES); escapes < end; escapes += 2 * LANES)
            far |= abs((int)(short)load_u16(escapes)) > LARGEST_EXACT;
        if (!__any_sync(FULL, far)) return;
#pragma unroll 1
        for (u32 row = 0; row < rows; row++) store_rest(row, 0);
        wide = 1;
    }

    __device__ __forceinline__ void store(u32 row, Number number) {
        if (CHANNELS % LANES == 0 || used) nearest[row * CHANNELS] = number;
    }

    __device__ __forceinline__ void store_zero(u32 row) { store(row, 0); }

    // A tile of bins of fixed width, times 2^exponent.
    __device__ void begin_fixed(u32 width, u32 exponent) {
        if (exponent || 1 << width > 2 * LARGEST_EXACT) wide = 1 + exponent;
    }
    __device__ __forceinline__ void store_fixed(u32 row, int bin, u32) {
        if (wide) store_rest(row, bin);
        store(row, float_to_half(bin));
    }

    __device__ void end() {
        if (threadIdx.x % LANES == 0) *mark = wide;
    }
};

// Decides whether a tile names families of its own instead of using the models of its plane.
#pragma once
#include "codec/encode_tile.cuh"

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

// Whether the tile takes fewer bits with its own families than with the plane's models, including the bytes that name
// them. `own` is then the family of the lane. An estimate from the deviations comes first: exact costs take two passes
// over the bins.
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

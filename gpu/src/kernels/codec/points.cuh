// Reconstruction points of a transform's coefficients, in steps, on their way from decode.cu to points_mma.cu.
//
// They are f16, in which bins up to 2048 are exact, and the points of bins 1 and 2, since `Planes::pack` chooses them
// for such centroids only. A *wide* tile has larger bins, or bins times a power of two: its points are sums of two f16,
// times that power.
#pragma once
#include "codec/place.cuh"

struct Points {
    u16 *nearest, *rest; // [plane of the launch][token of the launch][CHANNELS]; the second is that of wide tiles
    u8* wide;            // [plane][block of the launch][tile]: 1 + the exponent of a wide tile, 0 for other ones
};

constexpr int LARGEST_EXACT = 2048;

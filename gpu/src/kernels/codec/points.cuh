// Reconstruction points of a transform's coefficients, in steps, passed from decode.cu to points_mma.cu.
//
// They are f16. Bins up to 2048 are exact in f16, and so are the points of bins 1 and 2, since `Planes::pack` requires
// centroids for which they are. A *wide* tile has larger bins, or bins times a power of two: its points are sums of two
// f16, times that power.
#pragma once
#include "codec/place.cuh"

struct Points {
    u16 *nearest, *rest; // [plane of the launch][token of the launch][CHANNELS]; the second is that of wide tiles
    u8* wide;            // [plane][block of the launch][tile]: 1 + the exponent of a wide tile, 0 for other ones
};

constexpr int LARGEST_EXACT = 2048;

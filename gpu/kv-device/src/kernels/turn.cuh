// The rotation of RoPE by any number of positions.
#pragma once

struct Turn {
    float cosine, sine;

    // Of a pair of components by a number of positions.
    __device__ __forceinline__ Turn(float frequency, int positions) {
        const double turns = positions * (frequency * 0.15915494309189535); // / 2 pi
        sincospif(2 * (float)(turns - rint(turns)), &sine, &cosine);
    }
    __device__ __forceinline__ float2 operator()(float x, float y) const {
        return make_float2(cosine * x - sine * y, sine * x + cosine * y);
    }
};

// The maps of the codec's linear transform, and the argument of the kernels that apply them.
//
// Compile-time shape: that of place.cuh; MAP_DIM, the size of a head of the maps, which need not be HEAD_DIM.
#pragma once
#include "codec/place.cuh"

struct Maps {
    float forward[CHANNELS][MAP_DIM]; // row i: weights of component i in the coefficients of its head
    float inverse[CHANNELS][MAP_DIM]; // row i: weights of coefficient i in the components of its head
    float mean[CHANNELS];
};

struct Arguments {
    const Maps* maps;    // [plane of the frame]
    float* coefficients; // [plane of the launch][token of the launch][CHANNELS]
    PlanesAt rows;       // planes of the launch
    Place place;
    u32 first_plane, first_token, tokens; // those of the launch
};
